/// \file utf8.hpp: UTF-8: what is valid, reading and writing one character
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace runner
{

/// One character and how many bytes it took.
struct utf8_char
{
    char32_t value    = 0;
    std::size_t bytes = 0; // 0: the text does not begin with a valid character
};

/// The character `text` begins with. Valid as in RFC 3629: shortest form, no surrogates, at most U+10FFFF.
[[nodiscard]] inline utf8_char first_utf8_char(std::string_view text) noexcept
{
    if (text.empty()) { return {}; }
    auto const byte     = [text](std::size_t i) { return static_cast<char32_t>(static_cast<unsigned char>(text[i])); };
    char32_t const lead = byte(0);
    if (lead < 0x80) { return {lead, 1}; }
    std::size_t const length = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
    if (length == 0 || length > text.size()) { return {}; }
    char32_t value = lead & (0xFFU >> (length + 1));
    for (std::size_t i = 1; i < length; ++i)
    {
        if ((byte(i) & 0xC0U) != 0x80U) { return {}; }
        value = (value << 6) | (byte(i) & 0x3FU);
    }
    bool const overlong  = (length == 3 && value < 0x800) || (length == 4 && value < 0x10000);
    bool const surrogate = value >= 0xD800 && value < 0xE000;
    if (overlong || surrogate || value > 0x10FFFF) { return {}; }
    return {value, length};
}

/// How many bytes at the beginning of `text` are valid UTF-8.
[[nodiscard]] inline std::size_t valid_utf8_prefix(std::string_view text) noexcept
{
    std::size_t valid = 0;
    while (valid < text.size())
    {
        std::size_t const bytes = first_utf8_char(text.substr(valid)).bytes;
        if (bytes == 0) { break; }
        valid += bytes;
    }
    return valid;
}

/// `value` is a character UTF-8 can express.
inline void append_utf8(std::string& out, char32_t value)
{
    auto const put = [&out](char32_t byte) { out += static_cast<char>(static_cast<unsigned char>(byte)); };
    if (value < 0x80) { put(value); }
    else if (value < 0x800)
    {
        put(0xC0U | (value >> 6));
        put(0x80U | (value & 0x3FU));
    }
    else if (value < 0x10000)
    {
        put(0xE0U | (value >> 12));
        put(0x80U | ((value >> 6) & 0x3FU));
        put(0x80U | (value & 0x3FU));
    }
    else
    {
        put(0xF0U | (value >> 18));
        put(0x80U | ((value >> 12) & 0x3FU));
        put(0x80U | ((value >> 6) & 0x3FU));
        put(0x80U | (value & 0x3FU));
    }
}

} // namespace runner
