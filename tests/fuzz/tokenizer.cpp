/// \file tokenizer.cpp: fuzzes vocabularies and the texts that they encode
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>

#include "runner/chat.hpp"
#include "runner/tokenizer.hpp"
#include "support/gguf_bytes.hpp"

/// The first byte is a text's length; the text and a GGUF file follow.
extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size)
{
    if (size < 1 || size - 1 < data[0]) { return 0; }
    std::string const all(reinterpret_cast<char const*>(data) + 1, size - 1);
    std::string const text = all.substr(0, data[0]);
    try
    {
        runner::tokenizer const words{parse_gguf(all.substr(data[0]))};
        std::string again;
        for (bool const special : {false, true})
        {
            again.clear();
            for (std::int32_t const token : words.encode(text, special))
            {
                again += words.decode_one(token); // throws if there is no such token
                static_cast<void>(words.is_end_of_generation(token));
            }
        }
        static_cast<void>(words.bytes_without_token(text));
        if (runner::chat_form_of(words) != runner::chat_form::none)
        {
            static_cast<void>(runner::encode_chat(words, std::nullopt, text));
        }
    }
    catch (std::out_of_range const&) // of decode_one: a token that is none
    {
        std::abort();
    }
    catch (std::exception const&)
    {}
    return 0;
}
