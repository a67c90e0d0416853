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
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
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

/// Whose queries tell what a prompt's tokens are worth.
enum class scoring_rows
{
    window, // the last ones', where they stand
    replay, // all of the prompt's, where a replay of it would ask them
    both    // the losses by either, joined
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
    pyramid,     // more for early layers
    head_scores, // among all heads, by scores measured beforehand
    losses       // among all heads, by what their tokens lose: one multiplier
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
    std::vector<std::string> parameters{};       // that may be set, besides "heads"
    mdkv::ratio_set ratios = mdkv::evict_ratios; // for mixed caches; the others keep or drop
    mdkv::pool_options pooling{1};
    mdkv::projection_charge charge = mdkv::projection_charge::by_use; // for mixed caches, as the next ones
    std::int64_t keep              = 0; // last tokens that stay as they are, at most the window; 0: the window
    std::int64_t queries           = 0; // last queries that score, at least the window's
    std::int64_t fold_queries      = 8; // last appended ones that a fold scores by; they take memory of the cache
    double early                   = 1; // weight of a query before the window's
    double even                    = 0; // part of the queries' weight whose attention is taken to be even
    scoring_rows rows              = scoring_rows::window;
    mdkv::row_norm norm            = mdkv::row_norm::euclidean; // norm over replayed rows
    std::int64_t chunk             = 256;                       // tokens whose queries see each other's keys only
    std::int64_t ahead             = 256;                       // positions by which replayed queries are rotated
    bool own                       = false;  // rows of a replay see its own tokens, too: those before them
    double join                    = 1;      // weight of the window's losses beside replayed ones
    mdkv::row_norm join_norm       = mdkv::row_norm::sum; // norm over the rows of the window's losses there
    double depth                   = 0;      // e^depth is the weight of the last layer in one budget
    double odd                     = 0;      // power of leverages in one budget: sharing_part::odd
    std::optional<mdkv::refit_part> refit{}; // preset::refitted
    std::int64_t stand_ins     = 0;          // tokens of each head that stand for dropped ones: preset::stand_ins
    std::int64_t stand_in_part = 16;         // preset::stand_in_part
    bool coded_stand_ins       = false;      // preset::coded_stand_ins
    std::int64_t window_part   = 0;          // preset::window_part
    bool while_reading         = false;      // compressed chunk by chunk, in memory that does not grow with the prompt
    std::optional<float> slack{};            // reader_options::slack
    mdkv::storage stored = mdkv::storage::plain; // storage of kept or selected tokens
    double beta          = 0;                    // how uneven pyramid and head_scores are
    std::string head_scores{};                   // file
    bool per_query_head = false;                 // caches keys and values once for every query head, as most authors do
    std::string label{};                         // the name and whatever was set: how tables and files call it
    backend_kind backend = backend_kind::cpu;

    [[nodiscard]] bool whole() const noexcept { return kind == cache_kind::whole; }
    /// Whether all layers share one budget by their losses, and so are made together.
    [[nodiscard]] bool one_budget() const noexcept { return share == sharing::losses; }
    /// Whether prefill must show its chunks.
    [[nodiscard]] bool replays() const noexcept { return rows == scoring_rows::replay || rows == scoring_rows::both; }
    [[nodiscard]] bool joins() const noexcept { return rows == scoring_rows::both; }
    /// Whether prefill must hand over the queries of all tokens, not of the window alone.
    [[nodiscard]] bool reads_all_queries() const noexcept { return rank == ranking::all_attention; }
    /// Whether its layers can be made and attended on a GPU: those that go through mdkv::compress, each by itself, and
    /// those whose rungs are chosen on the CPU for all layers.
    [[nodiscard]] bool runs_on_device() const noexcept
    {
        return !while_reading
               && (one_budget()
                   || (((kind == cache_kind::mixed && rows == scoring_rows::window) || whole())
                       && share == sharing::uniform));
    }
    /// Last tokens of a prompt that stay as they are, the window being that of all policies.
    [[nodiscard]] std::int64_t kept_window(std::int64_t window) const noexcept
    {
        return keep > 0 ? std::min(keep, window) : window;
    }
    [[nodiscard]] bool has_parameter(std::string_view parameter) const
    {
        return std::find(parameters.begin(), parameters.end(), parameter) != parameters.end();
    }
};

/// The preset's options. Its window is the runner's unless it is smaller.
inline void take(policy& p, mdkv::preset const& from)
{
    p.ratios          = from.ratios;
    p.pooling         = from.pooling;
    p.charge          = from.charge;
    p.keep            = from.window < from.question ? from.window : 0;
    p.queries         = from.queries > from.question ? from.queries : 0;
    p.early           = double{from.early_weight};
    p.even            = double{from.uniform};
    p.stand_ins       = from.stand_ins;
    p.stand_in_part   = from.stand_in_part;
    p.coded_stand_ins = from.coded_stand_ins;
    p.window_part     = from.window_part;
    p.refit           = from.refitted;
    if (from.replayed)
    {
        p.rows  = from.last_queries_score() ? scoring_rows::both : scoring_rows::replay;
        p.norm  = from.replayed->norm;
        p.chunk = from.replayed->chunk;
        p.ahead = from.replayed->ahead;
        p.own   = from.replayed->own;
        if (from.last_queries_score()) { p.join = double{from.replayed->join}, p.join_norm = from.replayed->last; }
    }
    if (from.shared)
    {
        p.share = sharing::losses;
        p.depth = double{from.shared->depth};
        p.odd   = double{from.shared->leverage_power};
    }
}

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
        {"paper", "MixedDimKV: ratio set 0, 1/8, 1/4, 1, losses pooled over 7 neighbours", "arXiv 2603.20616",
            k::mixed},
        {"paper_h", "MixedDimKV-H: the same, heads of all layers sharing the budget by measured scores",
            "arXiv 2603.20616", k::mixed, r::none, s::head_scores, {"beta", "scores"}},
        {"paper_literal", "MixedDimKV as its algorithm is printed: no pooling, every head paying for projections",
            "arXiv 2603.20616", k::mixed},
        {"evict", "token eviction by MixedDimKV's scores: ratio set 0, 1, no pooling", "arXiv 2603.20616", k::mixed},
        {"by_window", "tokens in as many bits as they are worth to the last 64 queries; each layer its own budget",
            "docs/lab/2026-11/quality.md", k::mixed},
        {"by_window_h", "the same, heads of all layers sharing the budget by measured scores",
            "docs/lab/2026-11/quality.md", k::mixed, r::none, s::head_scores, {"beta", "scores"}},
        {"best", "as by_window, but also worth to the prompt's own queries, replayed; one budget for all layers",
            "docs/lab/2026-11/quality.md", k::mixed},
        {"any_question", "as best, by the replayed queries alone: for contexts whose questions come later",
            "docs/lab/2026-11/quality.md", k::mixed},
    };
    for (policy& p : all)
    {
        p.label = p.name;
        if (p.kind == k::mixed)
        {
            p.parameters.insert(p.parameters.begin(),
                {"pool", "pooling", "ratios", "charge", "keep", "queries", "fold_queries", "early", "even", "rows",
                    "over", "chunk", "ahead", "join", "join_over", "own", "budget", "depth", "odd", "stand_ins",
                    "stand_in_part", "coded_stand_ins", "window_part", "refit", "while_reading", "slack"});
            if (p.name.starts_with("by_window")) { take(p, mdkv::presets::by_window); }
            else if (p.name == "best") { take(p, mdkv::presets::best); }
            else if (p.name == "any_question") { take(p, mdkv::presets::any_question); }
            else if (p.name == "evict") { take(p, mdkv::presets::evict); }
            else if (p.name == "paper_literal") { take(p, mdkv::presets::paper_literal); }
            else { take(p, mdkv::presets::paper); }
        }
        else if (p.has_parameter("pool")) { p.pooling = snapkv_pool; }
        if (p.kind == k::selected) { p.parameters.push_back("storage"); }
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
    if (parameter == "heads")
    {
        if (value != "kv" && value != "query") { refuse("must be kv or query"); }
        p.per_query_head = value == "query";
        return;
    }
    if (!p.has_parameter(parameter))
    {
        std::string known = "heads";
        for (std::string const& one : p.parameters) { known += ", " + one; }
        refuse("unknown parameter; there are " + known);
    }
    if (parameter == "pool")
    {
        p.pooling.width = parse_integer<std::int64_t>("pool", value);
        if (p.pooling.width < 1 || p.pooling.width % 2 == 0) { refuse("must be odd and at least 1"); }
    }
    else if (parameter == "pooling")
    {
        if (value != "max" && value != "mean" && value != "adaptive") { refuse("must be max, mean or adaptive"); }
        p.pooling.kind = value == "max"    ? mdkv::pooling::max
                         : value == "mean" ? mdkv::pooling::mean
                                           : mdkv::pooling::adaptive;
    }
    else if (parameter == "ratios") { p.ratios = parse_ratios(value); }
    else if (parameter == "storage")
    {
        if (value != "plain" && value != "int8" && value != "int4") { refuse("must be plain, int8 or int4"); }
        p.stored = value == "plain"  ? mdkv::storage::plain
                   : value == "int8" ? mdkv::storage::int8
                                     : mdkv::storage::int4;
    }
    else if (parameter == "charge")
    {
        p.charge = either("use", "always") ? mdkv::projection_charge::by_use : mdkv::projection_charge::always;
    }
    else if (parameter == "keep" || parameter == "queries")
    {
        auto const tokens = parse_integer<std::int64_t>(parameter == "keep" ? "keep" : "queries", value);
        if (tokens < 0) { refuse("must not be negative; 0 stands for the window"); }
        (parameter == "keep" ? p.keep : p.queries) = tokens;
    }
    else if (parameter == "fold_queries")
    {
        p.fold_queries = parse_integer<std::int64_t>("fold_queries", value);
        if (p.fold_queries < 1) { refuse("must be positive"); }
    }
    else if (parameter == "early") { p.early = number(0, 1e6, "between 0 and 1000000"); }
    else if (parameter == "even") { p.even = number(0, 1000, "between 0 and 1000"); }
    else if (parameter == "rows")
    {
        constexpr std::array<std::string_view, 3> names{"window", "replay", "both"};
        auto const found = std::find(names.begin(), names.end(), value);
        if (found == names.end()) { refuse("must be window, replay or both"); }
        p.rows = static_cast<scoring_rows>(found - names.begin());
    }
    else if (parameter == "over" || parameter == "join_over")
    {
        if (value != "sum" && value != "rms" && value != "max") { refuse("must be sum, rms or max"); }
        (parameter == "over" ? p.norm : p.join_norm) = value == "sum"   ? mdkv::row_norm::sum
                                                       : value == "rms" ? mdkv::row_norm::euclidean
                                                                        : mdkv::row_norm::maximum;
    }
    else if (parameter == "chunk")
    {
        p.chunk = parse_integer<std::int64_t>("chunk", value);
        if (p.chunk < 1 || prefill_chunk % p.chunk != 0)
        {
            refuse("must divide 512, the tokens of a chunk of prefill");
        }
    }
    else if (parameter == "ahead")
    {
        p.ahead = parse_integer<std::int64_t>("ahead", value);
        if (p.ahead < 0 || p.ahead > 1'000'000) { refuse("must be between 0 and 1000000"); }
    }
    else if (parameter == "own") { p.own = either("yes", "no"); }
    else if (parameter == "while_reading") { p.while_reading = either("yes", "no"); }
    else if (parameter == "slack") { p.slack = static_cast<float>(number(0, 100, "between 0 and 100")); }
    else if (parameter == "budget")
    {
        if (p.share == sharing::head_scores) { refuse("heads share by their scores"); }
        p.share = either("model", "layer") ? sharing::losses : sharing::uniform;
    }
    else if (parameter == "depth") { p.depth = number(-10, 10, "between -10 and 10"); }
    else if (parameter == "odd") { p.odd = number(0, 100, "between 0 and 100"); }
    else if (parameter == "stand_ins")
    {
        p.stand_ins = parse_integer<std::int64_t>("stand_ins", value);
        if (p.stand_ins < 0) { refuse("must not be negative"); }
    }
    else if (parameter == "stand_in_part")
    {
        p.stand_in_part = parse_integer<std::int64_t>("stand_in_part", value);
        if (p.stand_in_part < 1) { refuse("must be positive"); }
    }
    else if (parameter == "window_part")
    {
        p.window_part = parse_integer<std::int64_t>("window_part", value);
        if (p.window_part < 0) { refuse("must not be negative"); }
    }
    else if (parameter == "coded_stand_ins") { p.coded_stand_ins = either("yes", "no"); }
    else if (parameter == "refit")
    {
        p.refit = either("yes", "no") ? p.refit.value_or(mdkv::refit_part{}) : std::optional<mdkv::refit_part>{};
    }
    else if (parameter == "join") { p.join = number(0, 1e6, "between 0 and 1000000"); }
    else if (parameter == "scores") { p.head_scores = value; }
    else { p.beta = number(1, 1e6, "between 1 and 1000000"); } // "beta", the last of them
}

/// A policy and what differs from its authors' choice: "snapkv", "paper[pool=13+ratios=0,1/4,1+heads=query]".
/// \throws mdkv::invalid_argument   naming the part that cannot be read
[[nodiscard]] inline policy parse_policy(std::string_view text)
{
    std::size_t const open = text.find('[');
    policy p               = find_policy(text.substr(0, open));
    if (open == std::string_view::npos) { return p; }
    if (!text.ends_with(']'))
    {
        throw mdkv::invalid_argument{"policy \"" + std::string{text} + "\": the closing ] is missing"};
    }
    for (std::string_view const part : split(text.substr(open + 1, text.size() - open - 2), '+'))
    {
        std::size_t const equals = part.find('=');
        if (equals == std::string_view::npos)
        {
            throw mdkv::invalid_argument{"policy \"" + std::string{text} + "\": \"" + std::string{part}
                                         + "\" is not of the form parameter=value"};
        }
        set_parameter(p, part.substr(0, equals), part.substr(equals + 1));
    }
    if (p.rows != scoring_rows::window && (p.ratios.any_projected() || p.per_query_head))
    {
        throw mdkv::invalid_argument{"policy \"" + std::string{text}
                                     + "\": replayed rows score neither projected rungs, whose bases are known at the "
                                       "prompt's end, nor heads=query"};
    }
    if (p.one_budget() && p.ratios.any_projected())
    {
        throw mdkv::invalid_argument{
            "policy \"" + std::string{text} + "\": one budget for all layers is for rungs without projections"};
    }
    if (p.odd > 0 && !p.one_budget())
    {
        throw mdkv::invalid_argument{"policy \"" + std::string{text}
                                     + "\": odd is for one budget for all layers, whose keys say together how odd "
                                       "tokens are; odd=0 leaves it out"};
    }
    if (p.stand_ins > 0 && !p.one_budget())
    {
        throw mdkv::invalid_argument{"policy \"" + std::string{text}
                                     + "\": stand_ins is for one budget for all layers; stand_ins=0 leaves it out"};
    }
    if (p.while_reading && !p.replays())
    {
        throw mdkv::invalid_argument{"policy \"" + std::string{text}
                                     + "\": while_reading is for policies with rows=replay or rows=both: "
                                       "others know no losses before the prompt's end"};
    }
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
