/// \file presets.hpp: ratio sets and options that belong together, by name: the paper's, eviction's, and the best we know (arXiv 2603.20616, section 4).
#pragma once

#include <mdkv/allocate.hpp>
#include <mdkv/compress.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/detail/contract.hpp>
#include <mdkv/pool.hpp>
#include <mdkv/score.hpp>

#include <cstddef>

namespace mdkv
{

/// What compress is called with, and how the caller cuts a prompt for it: `window` goes to split_window, and the last
/// `queries` queries to the layer. A starting point: every member may be changed.
template <std::size_t R>
struct preset
{
    char const* name;
    ratio_set<R> ratios;
    pool_options pooling{};
    projection_charge charge       = projection_charge::by_use;
    quantisation_loss quantisation = quantisation_loss::bound;
    index_t window                 = 32;   ///< last tokens of the prompt that stay as they are
    index_t queries                = 32;   ///< last queries to score with
    index_t question               = 32;   ///< as many of them count fully, ...
    float early_weight             = 1.0F; ///< ... the earlier ones so much: score_options::query_weights

    /// What query q of `count` counts, the last ones of a prompt in order: an entry of score_options::query_weights, which
    /// are the caller's memory and needed where early_weight is not 1.
    [[nodiscard]] constexpr float query_weight(index_t q, index_t count) const noexcept
    {
        return q < count - question ? early_weight : 1.0F;
    }

    /// Everything else compress reads.
    template <backend B>
    [[nodiscard]] compress_options<B> options(budget limit) const
    {
        compress_options<B> chosen;
        chosen.limit                = limit;
        chosen.pooling              = pooling;
        chosen.allocation.charge    = charge;
        chosen.scoring.quantisation = quantisation;
        return chosen;
    }
};

namespace presets
{

/// MixedDimKV, its losses pooled over 7 neighbours and projections charged to the heads that use them.
inline constexpr preset<4> paper{"paper", paper_ratios, {7, pooling::max}};

/// MixedDimKV as its algorithm is printed.
inline constexpr preset<4> paper_literal{"paper_literal", paper_ratios, {1, pooling::max}, projection_charge::always};

/// Token eviction by MixedDimKV's scores.
inline constexpr preset<2> evict{"evict", evict_ratios, {1, pooling::max}};

/// What came out best in the project's own evaluation (docs/quality.md says over what, and by how much): tokens in as many
/// bits as they are worth, statements kept as far as their peaks reach, and more queries than the question asked.
inline constexpr preset<4> best{"best", bit_ratios, {7, pooling::adaptive}, projection_charge::by_use,
    quantisation_loss::value_only, 8, 64, 32, 0.2F};

} // namespace presets

} // namespace mdkv
