/// \file option_texts.hpp: the texts that ratio sets, budgets and numbers are given as
#pragma once

#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace runner
{

[[nodiscard]] inline std::vector<std::string_view> split(std::string_view text, char separator)
{
    std::vector<std::string_view> parts;
    while (true)
    {
        std::size_t const end = text.find(separator);
        parts.push_back(text.substr(0, end));
        if (end == std::string_view::npos) { return parts; }
        text.remove_prefix(end + 1);
    }
}

/// \throws mdkv::invalid_argument   the text is no whole number of the type
template <class Integer>
[[nodiscard]] Integer parse_integer(std::string_view what, std::string_view text)
{
    Integer value{};
    auto const [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
    mdkv::expects(problem == std::errc{} && end == text.data() + text.size(), std::string{what}, ": \"",
        std::string{text}, "\" is not a whole number in range");
    return value;
}

/// A rung: "0", "1/4", "1", with a storage "1/4:int8", "1:int4", "1:plain".
/// \throws mdkv::invalid_argument   naming the rung and what is allowed
[[nodiscard]] inline mdkv::rung parse_rung(std::string_view text)
{
    std::string const named = "ratios: rung \"" + std::string{text} + "\"";
    auto const parts        = split(text, ':');
    auto const fraction     = split(parts[0], '/');
    mdkv::expects(fraction.size() <= 2, named, " is not a fraction");
    mdkv::expects(parts.size() <= 2, named, " has more than a storage after its fraction");
    mdkv::rung rung{parse_integer<std::int32_t>(named, fraction[0]),
        fraction.size() == 2 ? parse_integer<std::int32_t>(named, fraction[1]) : 1};
    mdkv::expects(rung.den >= 1 && rung.num >= 0 && rung.num <= rung.den, named, " is not within 0 and 1");
    if (parts.size() == 2)
    {
        mdkv::expects(parts[1] == "plain" || parts[1] == "int8" || parts[1] == "int4", named,
            " names an unknown storage; there are plain, int8, int4");
        rung.kind = parts[1] == "int8"   ? mdkv::storage::int8
                    : parts[1] == "int4" ? mdkv::storage::int4
                                         : mdkv::storage::plain;
    }
    mdkv::expects(!rung.dropped() || rung.kind == mdkv::storage::plain, named, " drops the token; it has no storage");
    return rung;
}

/// "0,1/8,1/4,1" or "0,1:int4,1:int8,1"
/// \throws mdkv::invalid_argument   naming the rung at fault
[[nodiscard]] inline mdkv::ratio_set parse_ratios(std::string_view text)
{
    std::vector<mdkv::rung> rungs;
    for (std::string_view const part : split(text, ',')) { rungs.push_back(parse_rung(part)); }
    return mdkv::ratio_set{rungs};
}

[[nodiscard]] inline char const* text_of(mdkv::storage kind) noexcept
{
    return kind == mdkv::storage::int8 ? "int8" : kind == mdkv::storage::int4 ? "int4" : "plain";
}

/// What `parse_rung` reads as this rung.
[[nodiscard]] inline std::string text_of(mdkv::rung const& rung)
{
    std::string text = std::to_string(rung.num);
    if (rung.den != 1) { text += "/" + std::to_string(rung.den); }
    if (rung.quantised()) { text += std::string{":"} + text_of(rung.kind); }
    return text;
}

[[nodiscard]] inline std::string text_of(mdkv::ratio_set const& ratios)
{
    std::string text;
    for (mdkv::rung const& rung : ratios) { text += (text.empty() ? "" : ",") + text_of(rung); }
    return text;
}

/// "10%", "12.5%", "1/16" of the whole cache, or a number of bytes a layer.
/// \throws mdkv::invalid_argument   it cannot be read, or is not within the whole cache
[[nodiscard]] inline mdkv::budget parse_budget(std::string_view text)
{
    if (text.ends_with('%'))
    {
        auto const parts = split(text.substr(0, text.size() - 1), '.');
        mdkv::expects(parts.size() == 1 || (parts.size() == 2 && parts[1].size() <= 6), "budget: \"", std::string{text},
            "\" is not a percentage");
        mdkv::index_t num = parse_integer<std::int32_t>("budget", parts[0]);
        mdkv::index_t den = 100;
        for (std::size_t i = 0; parts.size() == 2 && i < parts[1].size(); ++i)
        {
            num = num * 10 + parse_integer<std::int32_t>("budget", parts[1].substr(i, 1));
            den *= 10;
        }
        mdkv::expects(num >= 0 && num <= den, "budget: ", std::string{text}, " is not within 0% and 100%");
        return mdkv::budget::fraction(num, den);
    }
    auto const fraction = split(text, '/');
    if (fraction.size() == 2)
    {
        return mdkv::budget::fraction(
            parse_integer<std::int32_t>("budget", fraction[0]), parse_integer<std::int32_t>("budget", fraction[1]));
    }
    return mdkv::budget::bytes(parse_integer<std::int64_t>("budget", text));
}

} // namespace runner
