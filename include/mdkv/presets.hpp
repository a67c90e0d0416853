/// \file presets.hpp: ratio sets and options that belong together, by name: the paper's, eviction's, and the best measured (arXiv 2603.20616, section 4).
#pragma once

#include <mdkv/allocate.hpp>
#include <mdkv/balance.hpp>
#include <mdkv/compress.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/pool.hpp>
#include <mdkv/replay.hpp>
#include <mdkv/score.hpp>
#include <mdkv/stand_in.hpp>

namespace mdkv::inline MDKV_MACHINE
{

/// balance_options::odd of a prompt of `tokens`: `largest` of 2,048 or more, and less in proportion below, because leverages
/// say less where keys are few (docs/quality.md).
[[nodiscard]] constexpr float odd_power(float largest, index_t tokens) noexcept
{
    return tokens < 2048 ? largest * static_cast<float>(tokens) / 2048 : largest;
}

/// Tokens that `stand_in` may make of each head: `most`, or as many as take a sixteenth of the layer's limit.
[[nodiscard]] constexpr index_t stand_ins_within(index_t most, index_t limit, layer_shape const& shape) noexcept
{
    index_t const each = 16 * shape.heads * shape.token_bytes();
    index_t const room = each > 0 && limit > 0 ? limit / each : 0;
    return room < most ? room : most;
}

/// Queries by whose attention stand-ins are made, a prompt's last ones: earlier ones look at neighbours that will be
/// dropped, where later ones have theirs in the window or the tail (docs/quality.md).
inline constexpr index_t stand_in_queries = 16;

/// Arguments of compress, and the caller's cut of a prompt: `window` goes to split_window, and the last `queries`
/// queries to the layer. The members from `replays` on are the caller's work, because compress sees one layer of a whole
/// prompt: replay, balance, allocate and stand_in (docs/pipeline.md shows how). A starting point: every member may be changed.
struct preset
{
    char const* name;
    ratio_set ratios;
    pool_options pooling{};
    projection_charge charge       = projection_charge::by_use;
    quantisation_loss quantisation = quantisation_loss::noise;
    index_t window                 = 32;   ///< last tokens of the prompt, stored uncompressed
    index_t queries                = 32;   ///< last queries to score with
    index_t question               = 32;   ///< the last of them, of weight 1
    float early_weight             = 1.0F; ///< weight of the earlier ones: score_options::query_weights
    float even                     = 0.0F; ///< score_options::even_queries, in parts of the weights of all of them

    bool replays      = false;               ///< the prompt's own queries score, too: replay
    row_norm over     = row_norm::euclidean; ///< of replayed rows: replay_options::over
    index_t chunk     = 256;                 ///< tokens of which all replayed rows see each other's keys
    index_t sinks     = 4;                   ///< first tokens of a prompt whose keys they see, too
    index_t ahead     = 256;                 ///< replay_options::ahead
    bool own          = false;               ///< replay_options::own
    float join        = 0.0F;                ///< weight of the window's losses beside theirs: join. 0: they score alone
    bool one_budget   = false;               ///< allocate serves all layers at once, their losses balanced: balance
    float depth       = 0.0F;                ///< balance_options::depth
    float odd         = 0.0F;                ///< balance_options::odd of 2,048 tokens or more: odd_power
    index_t stand_ins = 0; ///< of each head, where a layer's limit has room for them: stand_in, stand_ins_within

    /// The model's factor of q.k, in all options that the functions below give; 0 means 1/sqrt(D). A model that has one of its
    /// own: `preset p = presets::best; p.scale = ...`.
    float scale = 0.0F;

    /// Weight of query q of `count`, the last ones of a prompt in order: an entry of score_options::query_weights,
    /// which are the caller's memory and needed unless early_weight is 1.
    [[nodiscard]] constexpr float query_weight(index_t q, index_t count) const noexcept
    {
        return q < count - question ? early_weight : 1.0F;
    }
    /// score_options::even_queries beside `count` queries with these weights.
    [[nodiscard]] constexpr float even_queries(index_t count) const noexcept
    {
        float weight = 0;
        for (index_t q = 0; q < count; ++q) { weight += query_weight(q, count); }
        return even * weight;
    }

    /// The options of compress at a budget, but for those that depend on the queries at hand: score_options::query_weights
    /// and even_queries.
    template <backend B>
    [[nodiscard]] compress_options<B> options(budget limit) const
    {
        return {.limit  = limit,
            .pooling    = pooling,
            .allocation = {.charge = charge},
            .scoring    = {.scale = scale, .quantisation = quantisation}};
    }
    /// The options of replay for a model's position encoding.
    template <backend B>
    [[nodiscard]] replay_options<B> replay(rotary_encoding<B> const& encoding) const
    {
        return {.ahead    = ahead,
            .own          = own,
            .encoding     = encoding,
            .scale        = scale,
            .quantisation = quantisation,
            .over         = over};
    }
    /// The options of stand_in.
    [[nodiscard]] constexpr stand_in_options stand_in() const noexcept { return {.scale = scale}; }
    /// The options of balance for the leverages of a prompt, [N], which are read only where `odd` is above 0.
    template <backend B>
    [[nodiscard]] balance_options<B> balance(in_view<float, 1, B> leverages) const
    {
        balance_options<B> options{.depth = depth};
        if (odd > 0)
        {
            options.odd       = odd_power(odd, leverages.extent(0));
            options.leverages = leverages;
        }
        return options;
    }
};

namespace presets
{

/// MixedDimKV, its losses pooled over 7 neighbours and projections charged to the heads that use them.
inline constexpr preset paper{
    "paper", paper_ratios, {7, pooling::max}, projection_charge::by_use, quantisation_loss::bound};

/// MixedDimKV by its printed algorithm.
inline constexpr preset paper_literal{
    "paper_literal", paper_ratios, {1, pooling::max}, projection_charge::always, quantisation_loss::bound};

/// Token eviction by MixedDimKV's scores.
inline constexpr preset evict{
    "evict", evict_ratios, {1, pooling::max}, projection_charge::by_use, quantisation_loss::bound};

/// The best that one call of compress can do (docs/quality.md): tokens in 0, 4, 8 or all bits, adaptive pooling, and
/// more queries than the question's.
inline constexpr preset by_window{"by_window", bit_ratios, {7, pooling::adaptive}, projection_charge::by_use,
    quantisation_loss::noise, 8, 64, 32, 0.2F, 0.1F};

/// The best in the project's own evaluation: the same, joined with replayed rows, and one budget for all layers.
inline constexpr preset best{"best", bit_ratios, {7, pooling::adaptive}, projection_charge::by_use,
    quantisation_loss::noise, 8, 64, 32, 0.2F, 0.0F, true, row_norm::euclidean, 256, 4, 1024, false, 2.0F, true, 1.0F,
    0.0F, 8};

/// For contexts whose questions come later (shared prefixes, documents): replayed rows alone, and statements unlike the rest
/// of the text count more. It keeps passages that the window's queries do not ask about; text that goes on is further from
/// the full cache's than with `best`.
inline constexpr preset any_question{"any_question", bit_ratios, {3, pooling::adaptive}, projection_charge::by_use,
    quantisation_loss::noise, 4, 64, 32, 0.2F, 0.0F, true, row_norm::euclidean, 256, 4, 256, true, 0.0F, true, 1.0F,
    16.0F, 8};

} // namespace presets

} // namespace mdkv::inline MDKV_MACHINE
