/// \file settings.hpp: settings of the backend by environment variables, because a plug-in of an engine has no flags
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/presets.hpp>

#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <string>
#include <string_view>

namespace mdkv_ggml
{

using mdkv::index_t;

/// Limit for all that a cache holds: compressed part, tail, directory and remembered queries.
struct memory_limit
{
    enum class unit
    {
        percent, ///< percent of the engine's own cells of the same tokens in a served layer, at any time
        tokens,  ///< uncompressed tokens of every KV head
        bytes    ///< bytes of all layers of a sequence together
    };
    unit in       = unit::percent;
    double amount = 25;

    [[nodiscard]] bool whole() const noexcept { return in == unit::percent && amount >= 100; }
};

struct settings
{
    memory_limit limit{};
    mdkv::preset preset = mdkv::presets::by_window;
    index_t at          = 0;   ///< number of tokens at which to compress; 0: at the first token decoded by itself
    index_t least       = 256; ///< fewest tokens of a prompt that is compressed
    index_t tail = -1; ///< tokens in the tail before it is folded; 0: never folded; -1: a sixteenth of the sequence's
    bool free_cells = false;
    bool reading    = false; ///< prompts are compressed while they are read
    int verbosity   = 1;     ///< 0: errors only, 1: a line at the start and one at the end, 2: every compression
};

namespace detail
{

[[noreturn]] inline void refuse(char const* name, std::string_view value, char const* wants)
{
    throw mdkv::invalid_argument{std::string{name} + "=" + std::string{value} + ": " + wants};
}

/// Reads a number and returns the rest of the text.
inline std::string_view number(char const* name, std::string_view text, char const* wants, double& value)
{
    auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || !std::isfinite(value) || value < 0) { refuse(name, text, wants); }
    return text.substr(static_cast<std::size_t>(end - text.data()));
}

inline index_t whole_number(char const* name, std::string_view text, char const* wants)
{
    double value              = 0;
    std::string_view const no = number(name, text, wants, value);
    if (!no.empty() || value != std::floor(value) || value > 1e9) { refuse(name, text, wants); }
    return static_cast<index_t>(value);
}

inline memory_limit limit_of(char const* name, std::string_view text)
{
    constexpr char const* wants = "a percentage (25%), a number of tokens (256), or bytes of all layers (30MiB, 2GiB)";
    memory_limit limit;
    std::string_view const unit = number(name, text, wants, limit.amount);
    if (limit.amount <= 0) { refuse(name, text, wants); }
    if (unit == "%") { return limit; }
    limit.in = memory_limit::unit::bytes;
    if (unit == "KiB") { limit.amount *= 0x1p10; }
    else if (unit == "MiB") { limit.amount *= 0x1p20; }
    else if (unit == "GiB") { limit.amount *= 0x1p30; }
    else if (unit.empty()) { limit.in = memory_limit::unit::tokens; }
    else if (unit != "B") { refuse(name, text, wants); }
    return limit;
}

inline mdkv::preset preset_of(char const* name, std::string_view text)
{
    using namespace mdkv::presets;
    for (mdkv::preset const* one : std::array{&by_window, &best, &any_question, &paper, &paper_literal, &evict})
    {
        if (text == one->name) { return *one; }
    }
    refuse(name, text, "by_window, best, any_question, paper, paper_literal or evict");
}

inline bool flag_of(char const* name, std::string_view text)
{
    if (text == "1") { return true; }
    if (text != "0") { refuse(name, text, "0 or 1"); }
    return false;
}

} // namespace detail

/// Reads MDKV_BUDGET, _PRESET, _AT, _MIN, _TAIL, _FREE, _READING, _VERBOSE. An unset or empty variable leaves its default.
/// \throws mdkv::invalid_argument   naming the variable and what it may be
inline settings settings_from_environment()
{
    using namespace detail;
    settings chosen;
    auto const read = [](char const* name, auto const& use) {
        char const* const text = std::getenv(name);
        if (text != nullptr && *text != '\0') { use(name, std::string_view{text}); }
    };
    auto const tokens = [](index_t& to) {
        return [&to](char const* name, std::string_view text) { to = whole_number(name, text, "a number of tokens"); };
    };
    read("MDKV_BUDGET", [&](auto name, auto text) { chosen.limit = limit_of(name, text); });
    read("MDKV_PRESET", [&](auto name, auto text) { chosen.preset = preset_of(name, text); });
    read("MDKV_AT", tokens(chosen.at));
    read("MDKV_MIN", tokens(chosen.least));
    read("MDKV_TAIL", tokens(chosen.tail));
    read("MDKV_FREE", [&](auto name, auto text) { chosen.free_cells = flag_of(name, text); });
    read("MDKV_READING", [&](auto name, auto text) { chosen.reading = flag_of(name, text); });
    read("MDKV_VERBOSE", [&](auto name, auto text) { chosen.verbosity = int(whole_number(name, text, "0, 1 or 2")); });
    if (chosen.tail > 0 && chosen.tail < 4) { refuse("MDKV_TAIL", std::to_string(chosen.tail), "0, or at least 4"); }
    if (chosen.reading && !chosen.preset.replayed)
    {
        refuse("MDKV_READING", "1",
            (std::string{"MDKV_PRESET="} + chosen.preset.name
                + " needs the last queries of a whole prompt; best and any_question can be read")
                .c_str());
    }
    return chosen;
}

} // namespace mdkv_ggml
