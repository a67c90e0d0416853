/// \file byte_alphabet.hpp: the GPT-2 alphabet, in which byte-level vocabularies write each byte as a visible character
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "utf8.hpp"

namespace runner
{

/// Bytes that are visible Latin-1 characters stand for themselves; the other 68, in order, are U+0100 and following.
class byte_alphabet
{
public:
    byte_alphabet()
    {
        byte_of_.fill(-1);
        char32_t next = 0x100;
        for (char32_t byte = 0; byte < 256; ++byte)
        {
            bool const visible       = (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173);
            char_of_[byte]           = visible ? byte : next++;
            byte_of_[char_of_[byte]] = static_cast<std::int16_t>(byte);
        }
    }

    /// The character that stands for a byte, in UTF-8.
    [[nodiscard]] std::string written(unsigned char byte) const
    {
        std::string out;
        append_utf8(out, char_of_[byte]);
        return out;
    }

    /// Any bytes, written in the alphabet.
    [[nodiscard]] std::string write(std::string_view bytes) const
    {
        std::string out;
        for (char const c : bytes) { append_utf8(out, char_of_[static_cast<unsigned char>(c)]); }
        return out;
    }

    /// Back to bytes. What is not in the alphabet stays as it is: it stands in no text that `write` made.
    [[nodiscard]] std::string read(std::string_view written) const
    {
        std::string out;
        while (!written.empty())
        {
            utf8_char const next    = first_utf8_char(written);
            std::size_t const bytes = next.bytes == 0 ? 1 : next.bytes;
            if (next.bytes != 0 && next.value < byte_of_.size() && byte_of_[next.value] >= 0)
            {
                out += static_cast<char>(static_cast<unsigned char>(byte_of_[next.value]));
            }
            else { out += written.substr(0, bytes); }
            written.remove_prefix(bytes);
        }
        return out;
    }

private:
    std::array<char32_t, 256> char_of_{};
    std::array<std::int16_t, 256 + 68> byte_of_{}; // -1: the character stands for no byte
};

} // namespace runner
