/// \file needle_options.hpp: which needles in which haystacks: the prompt around, the statement hidden, lengths, depths
#pragma once

#include <mdkv/core/error.hpp>

#include <charconv>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "runner/option_texts.hpp"

namespace runner
{

/// The text around the book.
enum class needle_form
{
    original, // gkamradt/LLMTest_NeedleInAHaystack, in the model's chat form
    headkv    // FYYFU/HeadKV and Zefan-Cai/KVCache-Factory, as plain text
};

/// The statement hidden in it.
enum class needle_kind
{
    sandwich, // the public programs'
    number,   // a number, another one in every sample: it can only be read, not guessed
    pair      // both, the number further on in the book, asked for one after the other
};

/// How much of the haystack is taken.
enum class needle_fit
{
    exact, // as much as makes the whole prompt `length` tokens as it is read, chat form included
    buffer // the public rule: book and needle make `length` less `buffer` tokens, whatever the text around them takes
};

/// The number of a pair stands so many percent of the book behind the sandwich, counted on from the book's beginning
/// where it ends.
inline constexpr double pair_distance = 40;

/// round(linspace(0, 100, count)), halves to even: the public programs' depths are those of 10 (HeadKV) and 35
/// (original).
[[nodiscard]] inline std::vector<double> even_depths(std::int64_t count)
{
    mdkv::expects(count >= 1 && count <= 1001, "needle: depths: count is ", count, ", not within 1 and 1001");
    std::vector<double> depths;
    for (std::int64_t i = 0; i < count; ++i)
    {
        depths.push_back(
            count == 1 ? 0 : std::nearbyint(100 * static_cast<double>(i) / static_cast<double>(count - 1)));
    }
    return depths;
}

struct needle_options
{
    std::vector<std::int64_t> lengths;            // of the whole prompt, in tokens
    std::vector<double> depths = even_depths(10); // percent
    needle_form form           = needle_form::headkv;
    needle_kind kind           = needle_kind::sandwich;
    needle_fit fit             = needle_fit::exact;
    std::int64_t buffer        = 200; // read where fit is buffer
    std::uint64_t seed         = 0;   // of the numbers
    std::int64_t digits        = 7;   // of a number
};

[[nodiscard]] inline std::string text_of(needle_form form)
{
    return form == needle_form::original ? "original" : "headkv";
}

[[nodiscard]] inline std::string text_of(needle_kind kind)
{
    if (kind == needle_kind::pair) { return "pair"; }
    return kind == needle_kind::sandwich ? "sandwich" : "number";
}

[[nodiscard]] inline std::string text_of(needle_fit fit)
{
    return fit == needle_fit::exact ? "exact" : "buffer";
}

namespace detail
{

template <class Choice>
[[nodiscard]] Choice parse_choice(std::string_view what, std::string_view text, std::initializer_list<Choice> choices)
{
    std::string all;
    for (Choice const one : choices)
    {
        if (text == text_of(one)) { return one; }
        all += (all.empty() ? "" : ", ") + text_of(one);
    }
    throw mdkv::invalid_argument{std::string{what} + ": \"" + std::string{text} + "\" is unknown; there are " + all};
}

} // namespace detail

/// \throws mdkv::invalid_argument   no such form, kind or fit; the message lists those there are
[[nodiscard]] inline needle_form parse_needle_form(std::string_view text)
{
    return detail::parse_choice("prompt", text, {needle_form::original, needle_form::headkv});
}

[[nodiscard]] inline needle_kind parse_needle_kind(std::string_view text)
{
    return detail::parse_choice("needle", text, {needle_kind::sandwich, needle_kind::number, needle_kind::pair});
}

[[nodiscard]] inline needle_fit parse_needle_fit(std::string_view text)
{
    return detail::parse_choice("fit", text, {needle_fit::exact, needle_fit::buffer});
}

inline constexpr std::int64_t longest_needle_prompt = std::int64_t{1} << 24;
inline constexpr std::int64_t most_needle_lengths   = 10'000;

/// "512,1024,2048", "1000:8000:500" (first, last, step; the last is one where a step lands on it), or both mixed.
/// \throws mdkv::invalid_argument   naming the part that is no length
[[nodiscard]] inline std::vector<std::int64_t> parse_needle_lengths(std::string_view text)
{
    std::vector<std::int64_t> lengths;
    for (std::string_view const part : split(text, ','))
    {
        auto const range         = split(part, ':');
        auto const first         = parse_integer<std::int64_t>("lengths", range[0]);
        std::int64_t const last  = range.size() == 3 ? parse_integer<std::int64_t>("lengths", range[1]) : first;
        std::int64_t const steps = range.size() == 3 ? parse_integer<std::int64_t>("lengths", range[2]) : 1;
        mdkv::expects((range.size() == 1 || range.size() == 3) && steps >= 1 && first >= 1 && last >= first
                          && last <= longest_needle_prompt,
            "lengths: \"", part, "\" is neither a length nor FIRST:LAST:STEP within 1 and ", longest_needle_prompt);
        mdkv::expects((last - first) / steps < most_needle_lengths - std::ssize(lengths), "lengths: \"", text,
            "\" are more than ", most_needle_lengths, " lengths");
        for (std::int64_t length = first; length <= last; length += steps) { lengths.push_back(length); }
    }
    return lengths;
}

/// Percentages, "0,50,99.5,100".
/// \throws mdkv::invalid_argument   naming the part that is no depth
[[nodiscard]] inline std::vector<double> parse_needle_depths(std::string_view text)
{
    std::vector<double> depths;
    for (std::string_view const part : split(text, ','))
    {
        double depth              = -1;
        auto const [end, problem] = std::from_chars(part.data(), part.data() + part.size(), depth);
        bool const whole          = problem == std::errc{} && end == part.data() + part.size();
        mdkv::expects(whole && depth >= 0 && depth <= 100, "depths: \"", part, "\" is not within 0 and 100");
        depths.push_back(depth);
    }
    return depths;
}

} // namespace runner
