/// \file byte_level_model.hpp: text to tokens as GPT-2 has it: words, then pairs of bytes merged by rank
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "byte_alphabet.hpp"
#include "byte_pairs.hpp"
#include "file_error.hpp"
#include "gguf.hpp"
#include "pre_tokenizer.hpp"
#include "utf8.hpp"
#include "vocabulary.hpp"

namespace runner
{

/// The tokenizers a file calls "gpt2". A byte for which the vocabulary has no token is left out, as the reference does.
/// Characters are taken as they come, as llama.cpp takes them: Qwen's own tokenizer composes them first (NFC).
class byte_level_model
{
public:
    /// \throws file_error   an unknown kind of words, or merges that contradict the vocabulary
    byte_level_model(gguf_file const& file, vocabulary const& known)
        : words_(pre_tokenizer_name(file))
        , whole_words_(is_llama3(file))
    {
        for (unsigned byte = 0; byte < 256; ++byte)
        {
            std::int32_t const id = known.find(alphabet_.written(static_cast<unsigned char>(byte)));
            bool const usable     = id != vocabulary::none && known.kind(id) != token_kind::control;
            bytes_[byte]          = usable ? id : vocabulary::none;
        }
        read_merges(file, known);
    }

    /// Whether texts begin with a special token where the file does not say it.
    [[nodiscard]] static bool wants_bos(gguf_file const& file) { return is_llama3(file); }

    /// The bytes a token stands for.
    [[nodiscard]] std::string piece(std::string const& written, token_kind kind) const
    {
        if (kind == token_kind::control || kind == token_kind::user_defined) { return written; }
        auto const byte = kind == token_kind::byte ? named_byte(written) : std::nullopt;
        return byte ? std::string(1, static_cast<char>(*byte)) : alphabet_.read(written);
    }

    void encode(vocabulary const& known, std::string_view text, std::vector<std::int32_t>& out) const
    {
        while (!text.empty())
        {
            std::size_t const valid = valid_utf8_prefix(text);
            for (std::string_view const word : words_.split(text.substr(0, valid))) { encode_word(known, word, out); }
            text.remove_prefix(valid);
            while (!text.empty() && first_utf8_char(text).bytes == 0)
            {
                append_byte(text[0], out);
                text.remove_prefix(1);
            }
        }
    }

    [[nodiscard]] std::size_t bytes_without_token(std::string_view text) const noexcept
    {
        return static_cast<std::size_t>(std::count_if(text.begin(), text.end(),
            [this](char c) { return bytes_[static_cast<unsigned char>(c)] == vocabulary::none; }));
    }

private:
    static std::string_view pre_tokenizer_name(gguf_file const& file)
    {
        constexpr std::string_view key = "tokenizer.ggml.pre";
        std::string_view const name    = file.find_text(key).value_or("default");
        if (!pre_tokenizer::knows(name))
        {
            file.refuse(key, "is not supported", quoted(name), "smollm, llama-bpe, qwen2 or default");
        }
        return name;
    }

    static bool is_llama3(gguf_file const& file)
    {
        return file.find_text("tokenizer.ggml.pre").value_or("") == "llama-bpe";
    }

    void read_merges(gguf_file const& file, vocabulary const& known)
    {
        constexpr std::string_view key             = "tokenizer.ggml.merges";
        std::vector<std::string_view> const merges = file.texts(key);
        std::vector<merge_rule> rules;
        rules.reserve(merges.size());
        for (std::size_t i = 0; i < merges.size(); ++i)
        {
            std::size_t const space = merges[i].find(' ', 1); // a token may begin with a space, and so may a pair
            if (space == std::string_view::npos) { refuse_merge(file, i, merges[i], "has no space"); }
            std::string_view const left  = merges[i].substr(0, space);
            std::string_view const right = merges[i].substr(space + 1);
            merge_rule const rule{known.find(left), known.find(right), static_cast<std::int32_t>(i),
                known.find(std::string(left) + std::string(right))};
            if (rule.left == vocabulary::none || rule.right == vocabulary::none || rule.merged == vocabulary::none)
            {
                refuse_merge(file, i, merges[i], "names a token that is not in the vocabulary");
            }
            if (known.kind(rule.merged) == token_kind::control)
            { // text from outside could become a control token by it
                refuse_merge(file, i, merges[i], "makes a control token");
            }
            rules.push_back(rule);
        }
        merges_ = merge_table(std::move(rules));
    }

    [[noreturn]] static void refuse_merge(
        gguf_file const& file, std::size_t i, std::string_view merge, std::string_view problem)
    {
        file.refuse("tokenizer.ggml.merges", joined("entry ", std::to_string(i), " ", problem), quoted(merge));
    }

    void encode_word(vocabulary const& known, std::string_view word, std::vector<std::int32_t>& out) const
    {
        if (whole_words_)
        {
            std::int32_t const id = known.find(alphabet_.write(word));
            if (id != vocabulary::none && known.kind(id) == token_kind::normal)
            {
                out.push_back(id);
                return;
            }
        }
        std::vector<std::int32_t> tokens;
        tokens.reserve(word.size());
        for (char const c : word) { append_byte(c, tokens); }
        merges_.apply(tokens);
        out.insert(out.end(), tokens.begin(), tokens.end());
    }

    void append_byte(char c, std::vector<std::int32_t>& out) const
    {
        std::int32_t const id = bytes_[static_cast<unsigned char>(c)];
        if (id != vocabulary::none) { out.push_back(id); }
    }

    pre_tokenizer words_;
    byte_alphabet alphabet_;
    bool whole_words_;                      // a word that is a token is taken whole, whether merges lead there or not
    std::array<std::int32_t, 256> bytes_{}; // the token of each single byte
    merge_table merges_;
};

} // namespace runner
