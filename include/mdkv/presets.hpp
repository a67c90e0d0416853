/// \file presets.hpp: ratio sets and options that belong together, by name: the paper's, eviction's, and the best measured (arXiv 2603.20616, section 4).
#pragma once

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/score_options.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/replay/balance.hpp>
#include <mdkv/replay/refit.hpp>
#include <mdkv/replay/replay.hpp>
#include <mdkv/replay/stand_in.hpp>
#include <mdkv/stages/pool.hpp>

#include <optional>

namespace MDKV_NAMESPACE
{

/// balance_options::leverage_power for a prompt of `tokens`: `largest` from 2,048 tokens on, and less in proportion below, because
/// leverages mean less if keys are few (docs/lab/2026-11/quality.md).
[[nodiscard]] constexpr float leverage_power_for(float largest, index_t tokens) noexcept
{
    return tokens < 2048 ? largest * static_cast<float>(tokens) / 2048 : largest;
}

/// Number of tokens that `stand_in` may make of each of `heads` heads: `most`, of `bytes` bytes each, but in at most
/// 1 / part of the limit.
[[nodiscard]] constexpr index_t stand_ins_within(
    index_t most, index_t limit, index_t part, index_t heads, index_t bytes) noexcept
{
    index_t const each    = part * heads * bytes;
    index_t const fitting = each > 0 && limit > 0 ? limit / each : 0;
    return fitting < most ? fitting : most;
}

/// Number of last queries that `stand_in` uses. Earlier queries attend to close neighbours that will be dropped; later
/// queries find such neighbours in the window or the tail (docs/lab/2026-11/quality.md).
inline constexpr index_t stand_in_queries = 16;

/// How a prompt's own queries score it while it is read: `replay`.
struct replay_part
{
    row_norm norm = row_norm::euclidean; ///< replay_options::norm
    index_t chunk = 256;                 ///< length: a replayed query attends to all keys of its chunk
    index_t sinks = 4;                   ///< first tokens of a prompt; a replayed query attends to their keys, too
    index_t ahead = 256;                 ///< replay_options::ahead
    bool own      = false;               ///< replay_options::own
    float join    = 0.0F;          ///< weight of the last queries' losses beside the replayed ones: `join`. 0: none
    row_norm last = row_norm::sum; ///< norm over the last queries' rows if they are joined; a `reader` adds them up
};

/// How all layers of a prompt share one budget: `balance`.
struct sharing_part
{
    float depth          = 0.0F; ///< balance_options::depth
    float leverage_power = 0.0F; ///< balance_options::leverage_power for 2,048 tokens or more: see leverage_power_for
};

/// All options of `prompt`, `reader` and `compress`. A starting point: every member may be changed, and further presets are
/// made like the ones below.
struct preset
{
    char const* name;
    ratio_set ratios;
    pool_options pooling{};
    projection_charge charge = projection_charge::if_better;
    index_t window           = 32;   ///< last tokens of the prompt, stored uncompressed: but see window_part
    index_t queries          = 32;   ///< last queries to score with
    index_t question         = 32;   ///< the last queries, which have weight 1
    float early_weight       = 1.0F; ///< weight of the queries before the question
    float uniform            = 0.0F; ///< score_options::uniform_queries as a multiple of the queries' total weight

    std::optional<replay_part> replayed = std::nullopt; ///< unset: the last queries score alone
    std::optional<sharing_part> shared  = std::nullopt; ///< unset: each layer has a budget of its own
    index_t stand_ins                   = 0;  ///< most stand-ins of a head, at most stand_ins_within: `stand_in`
    index_t stand_in_part               = 16; ///< stand-ins take at most 1 / stand_in_part of the limit

    /// Whether stand-ins are stored in the cheapest codes of the ratio set, if `allocate` gives these to most of the tokens that
    /// it keeps; otherwise a quarter as many are uncompressed, in half the part of the limit.
    bool coded_stand_ins = false;
    /// A window that takes more than 1 / window_part of the limit is stored in the costliest codes of the set, under the same
    /// condition, unless everything fits. 0: never.
    index_t window_part = 0;

    /// How `refit` changes the values of kept tokens. Unset: values stay, as they do without `replayed`, in prompts of fewer than
    /// `apart` + `span` tokens, if `pack` is given fewer than `span` last queries, and in a `reader`'s chunks below `span` tokens.
    std::optional<refit_part> refitted = std::nullopt;

    /// The model's factor of q.k in all stages; 0 means 1/sqrt(D). For a model with another factor: `preset p = presets::best;
    /// p.scale = ...`.
    float scale = 0.0F;

    /// Whether the last queries score: they do unless replayed ones score alone.
    [[nodiscard]] constexpr bool last_queries_score() const noexcept { return !replayed || replayed->join > 0; }
    /// sharing_part::leverage_power; 0 without a shared budget.
    [[nodiscard]] constexpr float leverage_power() const noexcept { return shared ? shared->leverage_power : 0.0F; }

    /// score_options::uniform_queries beside a prompt's last `count` queries.
    [[nodiscard]] constexpr float uniform_queries(index_t count) const noexcept
    {
        float weight = 0;
        for (index_t q = 0; q < count; ++q) { weight += q < count - question ? early_weight : 1.0F; }
        return uniform * weight;
    }

    /// The options of replay for a model's position encoding.
    template <backend B>
    [[nodiscard]] replay_options<B> replay(rotary_encoding<B> const& encoding) const
    {
        replay_part const how = replayed.value_or(replay_part{});
        return {.ahead = how.ahead, .own = how.own, .encoding = encoding, .scale = scale, .norm = how.norm};
    }
    /// The most stand-ins of each of `heads` heads, of `bytes` bytes each, in codes or not.
    [[nodiscard]] constexpr index_t most_stand_ins(
        bool coded, index_t limit, index_t heads, index_t bytes) const noexcept
    {
        bool const fewer = coded_stand_ins && !coded;
        return stand_ins_within(
            fewer ? stand_ins / 4 : stand_ins, limit, stand_in_part * (fewer ? 2 : 1), heads, bytes);
    }
    /// The options of stand_in.
    [[nodiscard]] constexpr stand_in_options stand_in() const noexcept { return {.scale = scale}; }
    /// The options of balance for the sums of leverages of a prompt, [N], which are read only if `leverage_power()` is above 0.
    template <backend B>
    [[nodiscard]] balance_options<B> balance(in_view<leverage_sum, 1, B> leverages, ranks const* others = nullptr) const
    {
        balance_options<B> options{.ranks = others};
        if (shared) { options.depth = shared->depth; }
        if (leverage_power() > 0)
        {
            options.leverage_power = leverage_power_for(leverage_power(), leverages.extent(0));
            options.leverages      = leverages;
        }
        return options;
    }
};

namespace presets
{

/// MixedDimKV, its losses pooled over 7 neighbours; heads pay for projections if the layer loses less so.
inline constexpr preset paper{.name = "paper", .ratios = paper_ratios, .pooling = {.width = 7, .kind = pooling::max}};

/// MixedDimKV by its printed algorithm.
inline constexpr preset paper_literal{
    .name = "paper_literal", .ratios = paper_ratios, .pooling = {.width = 1}, .charge = projection_charge::always};

/// Token eviction by MixedDimKV's scores.
inline constexpr preset evict{.name = "evict", .ratios = evict_ratios, .pooling = {.width = 1}};

/// The best that the last queries alone can do (docs/lab/2026-11/quality.md): tokens in 0, 4, 8 or all bits, adaptive
/// pooling, and more queries than the question's.
inline constexpr preset by_window{.name = "by_window",
    .ratios                             = bit_ratios,
    .pooling                            = {.width = 7, .kind = pooling::adaptive},
    .window                             = 8,
    .queries                            = 64,
    .early_weight                       = 0.2F,
    .uniform                            = 0.1F};

/// The best in the project's own evaluation: by_window, joined with replayed rows, and one budget for all layers.
inline constexpr preset best{.name = "best",
    .ratios                        = bit_ratios,
    .pooling                       = {.width = 7, .kind = pooling::adaptive},
    .window                        = 8,
    .queries                       = 64,
    .early_weight                  = 0.2F,
    .replayed                      = replay_part{.ahead = 512, .join = 0.5F, .last = row_norm::maximum},
    .shared                        = sharing_part{.depth = 1.0F},
    .stand_ins                     = 32,
    .stand_in_part                 = 8,
    .coded_stand_ins               = true,
    .window_part                   = 32,
    .refitted                      = refit_part{}};

/// For contexts whose questions come later (shared prefixes, documents): replayed rows alone, and statements unlike the rest
/// of the text count more. Text that goes on is further from the full cache's than with `best`.
inline constexpr preset any_question{.name = "any_question",
    .ratios                                = bit_ratios,
    .pooling                               = {.width = 3, .kind = pooling::adaptive},
    .window                                = 4,
    .queries                               = 64,
    .early_weight                          = 0.2F,
    .replayed                              = replay_part{.own = true},
    .shared                                = sharing_part{.depth = 1.0F, .leverage_power = 16.0F},
    .stand_ins                             = 32,
    .stand_in_part                         = 8,
    .coded_stand_ins                       = true,
    .refitted                              = refit_part{}};

} // namespace presets

} // namespace MDKV_NAMESPACE
