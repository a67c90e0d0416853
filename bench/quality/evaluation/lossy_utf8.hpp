/// \file lossy_utf8.hpp: text with what is no UTF-8 in it replaced, as the public tokenizers decode
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "runner/utf8.hpp"

namespace runner
{

namespace detail
{

/// How many bytes of a text that begins with no character belong together: the beginning of a character as far as it
/// goes, else one (the Unicode Standard's "maximal subpart of an ill-formed subsequence").
[[nodiscard]] inline std::size_t broken_utf8_bytes(std::string_view text) noexcept
{
    auto const byte     = [text](std::size_t i) { return static_cast<unsigned>(static_cast<unsigned char>(text[i])); };
    unsigned const lead = byte(0);
    std::size_t const length = lead < 0xC2 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 1;
    // The second byte tells shortest forms, surrogates and the end of Unicode.
    unsigned const least = lead == 0xE0 ? 0xA0U : lead == 0xF0 ? 0x90U : 0x80U;
    unsigned const most  = lead == 0xED ? 0x9FU : lead == 0xF4 ? 0x8FU : 0xBFU;
    std::size_t bytes    = 1;
    while (bytes < length && bytes < text.size() && byte(bytes) >= (bytes == 1 ? least : 0x80U)
           && byte(bytes) <= (bytes == 1 ? most : 0xBFU))
    {
        ++bytes;
    }
    return bytes;
}

} // namespace detail

/// The text with U+FFFD for each such piece.
[[nodiscard]] inline std::string lossy_utf8(std::string_view text)
{
    std::string out;
    while (!text.empty())
    {
        std::size_t const valid = valid_utf8_prefix(text);
        out += text.substr(0, valid);
        text.remove_prefix(valid);
        if (text.empty()) { break; }
        append_utf8(out, 0xFFFD);
        text.remove_prefix(detail::broken_utf8_bytes(text));
    }
    return out;
}

} // namespace runner
