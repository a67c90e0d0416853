/// \file policies.hpp: every policy by name: what it keeps, its parameters, where it comes from
#pragma once

#include <mdkv/compress.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/stages/allocate.hpp>
#include <mdkv/stages/pool.hpp>
#include <mdkv/stages/score.hpp>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "option_texts.hpp"

namespace runner
{

/// How a layer's cache is made.
enum class cache_kind
{
    whole,    // as it is
    mixed,    // mdkv::compress: every token at the rung it is worth
    selected, // tokens kept or dropped by a ranking
    low_rank  // every token, all at one rank
};

/// What tokens are ranked by.
enum class ranking
{
    none,
    window_attention, // received from the window's queries
    all_attention     // received from every query
};

/// Tokens that prefill attends to at once, and so the most that are replayed together.
inline constexpr std::int64_t prefill_chunk = 512;

/// Where layers are compressed and attended; all else of a model runs on the CPU.
enum class backend_kind
{
    cpu,
    cuda
};

/// How the budget is shared among layers and heads.
enum class sharing
{
    uniform,
    pyramid,    // more for early layers
    head_scores // among all heads, by scores measured beforehand
};

/// What is done to a prompt's cache.
struct policy
{
    std::string name;
    std::string keeps;
    std::string source;
    cache_kind kind;
    ranking rank  = ranking::none;
    sharing share = sharing::uniform;
    std::vector<std::string> parameters{};       // that may be set
    mdkv::preset options = mdkv::presets::evict; // for caches made of rungs; selected ones use its pooling
    bool while_reading   = false; // compressed chunk by chunk, in memory that does not grow with the prompt
    float slack          = 0.25F; // reader_options::slack
    std::int64_t tail    = 0;     // appended tokens that are folded into the layer's own bytes at a time; 0: none are
    bool grows           = false; // whether these bytes grow with the text
    double beta          = 0;     // how uneven pyramid and head_scores are
    std::string head_scores{};    // file
    std::string label{};          // the name and whatever was set: how tables and files call it
    backend_kind backend = backend_kind::cpu;

    [[nodiscard]] bool whole() const noexcept { return kind == cache_kind::whole; }
    /// Whether all layers share one budget by their losses, and so are made together.
    [[nodiscard]] bool one_budget() const noexcept { return options.shared.has_value(); }
    /// Whether prefill must show its chunks.
    [[nodiscard]] bool replays() const noexcept { return options.replayed.has_value(); }
    /// Whether prefill must hand over the queries of all tokens, not of the window alone.
    [[nodiscard]] bool reads_all_queries() const noexcept { return rank == ranking::all_attention; }
    /// Whether its layers can be made and attended on a GPU: those that go through mdkv::compress, each by itself, and
    /// those whose rungs are chosen on the CPU for all layers.
    [[nodiscard]] bool runs_on_device() const noexcept
    {
        return !while_reading && tail == 0
               && (one_budget()
                   || (((kind == cache_kind::mixed && !replays()) || whole()) && share == sharing::uniform));
    }
    /// Last tokens of a prompt that stay as they are, the window being that of all policies.
    [[nodiscard]] std::int64_t kept_window(std::int64_t window) const noexcept
    {
        return options.window < options.question ? std::min(options.window, window) : window;
    }
    /// Last queries that score, if they are more than the window's.
    [[nodiscard]] std::int64_t more_queries() const noexcept
    {
        return options.queries > options.question ? options.queries : 0;
    }
    [[nodiscard]] bool has_parameter(std::string_view parameter) const
    {
        return std::find(parameters.begin(), parameters.end(), parameter) != parameters.end();
    }
};

[[nodiscard]] inline std::vector<policy> all_policies()
{
    mdkv::pool_options const snapkv_pool{7, mdkv::pooling::max};
    using k = cache_kind;
    using r = ranking;
    using s = sharing;
    std::vector<policy> all{
        {"full", "the whole cache: what the others are measured against", "", k::whole},
        {"h2o", "tokens that received most attention from all of the prompt's queries", "H2O, arXiv 2306.14048",
            k::selected, r::all_attention, s::uniform},
        {"snapkv", "tokens that received most attention from the window, pooled", "SnapKV, arXiv 2404.14469",
            k::selected, r::window_attention, s::uniform, {"pool", "pooling"}},
        {"pyramidkv", "as snapkv, with more tokens in early layers", "PyramidKV, arXiv 2406.02069", k::selected,
            r::window_attention, s::pyramid, {"pool", "pooling", "beta"}},
        {"headkv", "as snapkv, heads of all layers sharing the budget by measured scores", "HeadKV, arXiv 2410.19258",
            k::selected, r::window_attention, s::head_scores, {"pool", "pooling", "beta", "scores"}},
        {"low_rank", "every token, all at the rank the budget allows", "after Palu, arXiv 2407.21118", k::low_rank},
        {"paper", "MixedDimKV: ratio set 0, 1/8, 1/4, 1, losses pooled over 7 neighbours", "arXiv 2603.20616", k::mixed,
            r::none, s::uniform, {}, mdkv::presets::paper},
        {"paper_h", "MixedDimKV-H: the same, heads of all layers sharing the budget by measured scores",
            "arXiv 2603.20616", k::mixed, r::none, s::head_scores, {"beta", "scores"}, mdkv::presets::paper},
        {"paper_literal", "MixedDimKV as its algorithm is printed: no pooling, every head paying for projections",
            "arXiv 2603.20616", k::mixed, r::none, s::uniform, {}, mdkv::presets::paper_literal},
        {"evict", "token eviction by MixedDimKV's scores: ratio set 0, 1, no pooling", "arXiv 2603.20616", k::mixed},
        {"by_window", "tokens in as many bits as they are worth to the last 64 queries; each layer its own budget",
            "docs/lab/2026-11/quality.md", k::mixed, r::none, s::uniform, {}, mdkv::presets::by_window},
        {"by_window_h", "the same, heads of all layers sharing the budget by measured scores",
            "docs/lab/2026-11/quality.md", k::mixed, r::none, s::head_scores, {"beta", "scores"},
            mdkv::presets::by_window},
        {"best", "as by_window, but also worth to the prompt's own queries, replayed; one budget for all layers",
            "docs/lab/2026-11/quality.md", k::mixed, r::none, s::uniform, {}, mdkv::presets::best},
        {"any_question", "as best, by the replayed queries alone: for contexts whose questions come later",
            "docs/lab/2026-11/quality.md", k::mixed, r::none, s::uniform, {}, mdkv::presets::any_question},
    };
    for (policy& p : all)
    {
        p.label = p.name;
        if (p.kind == k::mixed)
        {
            p.parameters.insert(p.parameters.begin(), {"pool", "pooling", "ratios", "budget", "tail", "grows"});
            if (p.replays())
            {
                p.parameters.insert(
                    p.parameters.end(), {"chunk", "ahead", "join", "stand_ins", "stand_in_part", "coded_stand_ins",
                                            "window_part", "refit", "while_reading", "slack"});
            }
        }
        else if (p.has_parameter("pool")) { p.options.pooling = snapkv_pool; }
        if (p.share == s::pyramid) { p.beta = 20; }
        if (p.share == s::head_scores) { p.beta = 1.1; }
    }
    return all;
}

/// The policy as its authors define it.
/// \throws mdkv::invalid_argument   no such policy; the message lists those there are
[[nodiscard]] inline policy find_policy(std::string_view name)
{
    std::string known;
    for (policy const& p : all_policies())
    {
        if (p.name == name) { return p; }
        known += (known.empty() ? "" : ", ") + p.name;
    }
    throw mdkv::invalid_argument{"policy \"" + std::string{name} + "\" is unknown; there are " + known};
}

/// Sets one parameter from its text.
/// \throws mdkv::invalid_argument   the policy does not read it, or the value is none of its values
inline void set_parameter(policy& p, std::string_view parameter, std::string_view value)
{
    auto const refuse = [&](std::string const& why) {
        throw mdkv::invalid_argument{
            "policy " + p.name + ": " + std::string{parameter} + " = " + std::string{value} + ": " + why};
    };
    auto const number = [&](double least, double most, char const* limits) {
        double result{};
        auto const [end, problem] = std::from_chars(value.data(), value.data() + value.size(), result);
        bool const whole          = problem == std::errc{} && end == value.data() + value.size();
        if (!whole || !(result >= least && result <= most)) { refuse(std::string{"must be a number "} + limits); }
        return result;
    };
    auto const either = [&](std::string_view first, std::string_view second) {
        if (value != first && value != second)
        {
            refuse("must be " + std::string{first} + " or " + std::string{second});
        }
        return value == first;
    };
    if (!p.has_parameter(parameter))
    {
        std::string known;
        for (std::string const& one : p.parameters) { known += (known.empty() ? "" : ", ") + one; }
        refuse("unknown parameter; there are " + (known.empty() ? "none" : known));
    }
    auto const whole = [&](std::int64_t least) {
        auto const result = parse_integer<std::int64_t>(parameter, value);
        if (result < least) { refuse("must be at least " + std::to_string(least)); }
        return result;
    };
    mdkv::preset& o = p.options;
    if (parameter == "pool")
    {
        o.pooling.width = whole(1);
        if (o.pooling.width % 2 == 0) { refuse("must be odd"); }
    }
    else if (parameter == "pooling")
    {
        if (value != "max" && value != "mean" && value != "adaptive") { refuse("must be max, mean or adaptive"); }
        o.pooling.kind = value == "max"    ? mdkv::pooling::max
                         : value == "mean" ? mdkv::pooling::mean
                                           : mdkv::pooling::adaptive;
    }
    else if (parameter == "ratios") { o.ratios = parse_ratios(value); }
    else if (parameter == "chunk")
    {
        o.replayed->chunk = whole(1);
        if (prefill_chunk % o.replayed->chunk != 0) { refuse("must divide 512, the tokens of a chunk of prefill"); }
    }
    else if (parameter == "ahead") { o.replayed->ahead = whole(0); }
    else if (parameter == "join") { o.replayed->join = static_cast<float>(number(0, 1e6, "between 0 and 1000000")); }
    else if (parameter == "while_reading") { p.while_reading = either("yes", "no"); }
    else if (parameter == "tail") { p.tail = whole(1); }
    else if (parameter == "grows") { p.grows = either("yes", "no"); }
    else if (parameter == "slack") { p.slack = static_cast<float>(number(0, 100, "between 0 and 100")); }
    else if (parameter == "budget")
    {
        if (p.share == sharing::head_scores) { refuse("heads share by their scores"); }
        if (either("model", "layer")) { o.shared = o.shared.value_or(mdkv::sharing_part{}); }
        else { o.shared.reset(); }
    }
    else if (parameter == "stand_ins") { o.stand_ins = whole(0); }
    else if (parameter == "stand_in_part") { o.stand_in_part = whole(1); }
    else if (parameter == "window_part") { o.window_part = whole(0); }
    else if (parameter == "coded_stand_ins") { o.coded_stand_ins = either("yes", "no"); }
    else if (parameter == "refit")
    {
        if (either("yes", "no")) { o.refitted = o.refitted.value_or(mdkv::refit_part{}); }
        else { o.refitted.reset(); }
    }
    else if (parameter == "scores") { p.head_scores = value; }
    else { p.beta = number(1, 1e6, "between 1 and 1000000"); } // "beta", the last of them
}

/// A policy and what differs from its authors' choice: "snapkv", "paper[pool=13+ratios=0,1/4,1]".
/// \throws mdkv::invalid_argument   naming the part that cannot be read
[[nodiscard]] inline policy parse_policy(std::string_view text)
{
    std::size_t const open = text.find('[');
    policy p               = find_policy(text.substr(0, open));
    if (open == std::string_view::npos) { return p; }
    mdkv::expects(text.ends_with(']'), "policy \"", std::string{text}, "\": the closing ] is missing");
    for (std::string_view const part : split(text.substr(open + 1, text.size() - open - 2), '+'))
    {
        std::size_t const equals = part.find('=');
        mdkv::expects(equals != std::string_view::npos, "policy \"", std::string{text}, "\": \"", std::string{part},
            "\" is not of the form parameter=value");
        set_parameter(p, part.substr(0, equals), part.substr(equals + 1));
    }
    mdkv::expects(!(p.replays() || p.one_budget()) || !p.options.ratios.any_projected(), "policy \"", std::string{text},
        "\": projected rungs, whose bases are known at the prompt's end, have neither replayed rows nor one budget");
    p.label = text;
    if (!p.head_scores.empty()) // the folder of a file says nothing in a table
    {
        p.label.replace(
            p.label.find(p.head_scores), p.head_scores.size(), std::filesystem::path{p.head_scores}.stem().string());
    }
    return p;
}

/// "a,b[ratios=0,1],c" at the commas outside of brackets; "all" stands for every policy, without head scores for every
/// one that needs none.
[[nodiscard]] inline std::vector<std::string> split_policies(std::string_view text, bool head_scores = true)
{
    std::vector<std::string> parts(1);
    int depth = 0;
    for (char const c : text)
    {
        depth += c == '[' ? 1 : c == ']' ? -1 : 0;
        if (c == ',' && depth == 0) { parts.emplace_back(); }
        else { parts.back() += c; }
    }
    std::vector<std::string> specs;
    for (std::string const& part : parts)
    {
        if (part != "all") { specs.push_back(part); }
        else
        {
            for (policy const& p : all_policies())
            {
                if (head_scores || p.share != sharing::head_scores) { specs.push_back(p.name); }
            }
        }
    }
    return specs;
}

} // namespace runner
