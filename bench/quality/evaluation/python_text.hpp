/// \file python_text.hpp: what Python's `str` makes of an answer, for the metrics that were written in it
#pragma once

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "runner/pre_tokenizer.hpp"
#include "runner/utf8.hpp"

namespace runner::python_text
{

/// `str.isspace`: Unicode's white space and the four separators of ASCII.
[[nodiscard]] constexpr bool is_space(char32_t c) noexcept
{
    return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680
           || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

/// `str.split()` of valid UTF-8.
[[nodiscard]] inline std::vector<std::string_view> split(std::string_view text)
{
    std::vector<std::string_view> words;
    std::size_t begin = 0;
    std::size_t at    = 0;
    while (at < text.size())
    {
        utf8_char const next = first_utf8_char(text.substr(at));
        if (next.bytes == 0) { throw std::runtime_error("split: text is not valid UTF-8"); }
        if (is_space(next.value))
        {
            if (at > begin) { words.push_back(text.substr(begin, at - begin)); }
            begin = at + next.bytes;
        }
        at += next.bytes;
    }
    if (at > begin) { words.push_back(text.substr(begin)); }
    return words;
}

/// `str.strip()` of valid UTF-8.
[[nodiscard]] inline std::string_view stripped(std::string_view text)
{
    std::vector<std::string_view> const words = split(text);
    if (words.empty()) { return {}; }
    auto const begin = static_cast<std::size_t>(words.front().data() - text.data());
    auto const end   = static_cast<std::size_t>(words.back().data() - text.data()) + words.back().size();
    return text.substr(begin, end - begin);
}

namespace detail
{

/// A compiled pattern that matches whatever has a lower case.
struct upper_case_pattern
{
    upper_case_pattern()
    {
        std::string_view const letters = R"([\p{Lu}\p{Lt}]+)";
        int error                      = 0;
        PCRE2_SIZE place               = 0;
        code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(letters.data()), letters.size(), PCRE2_UTF | PCRE2_UCP,
            &error, &place, nullptr));
        if (!code) { throw std::runtime_error("lower: this PCRE2 was built without Unicode"); }
    }

    struct deleter
    {
        void operator()(pcre2_code* p) const noexcept { pcre2_code_free(p); }
    };
    std::unique_ptr<pcre2_code, deleter> code;
};

} // namespace detail

/// `str.lower()` of valid UTF-8. Other than there, U+0130, Roman numerals (U+2160 ...) and circled letters (U+24B6 ...)
/// stay as they are, and a sigma is the same at the end of a word as within it.
[[nodiscard]] inline std::string lower(std::string_view text)
{
    static detail::upper_case_pattern const pattern;
    std::string_view const replacement = R"(\L$0)";
    std::string out(2 * text.size() + 1, '\0'); // no letter's other case is twice as long
    PCRE2_SIZE size  = out.size();
    int const result = pcre2_substitute(pattern.code.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), 0,
        PCRE2_SUBSTITUTE_GLOBAL | PCRE2_SUBSTITUTE_EXTENDED, nullptr, nullptr,
        reinterpret_cast<PCRE2_SPTR>(replacement.data()), replacement.size(),
        reinterpret_cast<PCRE2_UCHAR*>(out.data()), &size);
    if (result < 0) { throw std::runtime_error("lower: text is not valid UTF-8"); }
    out.resize(size);
    return out;
}

} // namespace runner::python_text
