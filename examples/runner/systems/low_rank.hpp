/// \file low_rank.hpp: every past token at the same rank: savings by dimensions alone (arXiv 2603.20616, appendix)
#pragma once

#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/stages/basis.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "packed_cache.hpp"
#include "prompt_layer.hpp"
#include "runner/scratch_memory.hpp"

namespace runner
{

// In the manner of Palu, with four differences. Palu factorises the projection weights once, from calibration text; here
// the basis is the principal components of this prompt's own keys and values. Palu compresses keys before position
// encoding and rebuilds them in the attention; here keys are encoded and are never rebuilt. Palu shares a rank among heads
// of a group and spreads ranks over groups by Fisher information; here each head has its own basis, and all heads have the
// same rank. Palu's ratio counts latents only, its projections being weights; here each head is charged for its
// projections.

/// The one rung of rank `rank`: `rank` of the key_dim coordinates of keys, and the same share of the values' coordinates,
/// rounded down but at least one.
[[nodiscard]] inline mdkv::ratio_set low_rank_set(std::int64_t rank, std::int64_t key_dim)
{
    std::array const rungs{mdkv::rung{static_cast<std::int32_t>(rank), static_cast<std::int32_t>(key_dim)}};
    return mdkv::ratio_set{std::span<mdkv::rung const>{rungs}, mdkv::rounding::down};
}

/// Bytes of window, tokens and projections at that rank.
/// \throws mdkv::invalid_argument   the rank is outside [0, key_dim]
[[nodiscard]] inline std::int64_t low_rank_bytes(mdkv::layer_shape const& shape, std::int64_t rank)
{
    mdkv::expects(
        rank >= 0 && rank <= shape.dims.keys, "low_rank: the rank ", rank, " is not within 0 and ", shape.dims.keys);
    auto const set = low_rank_set(rank, shape.dims.keys);
    return shape.window_bytes()
           + shape.heads
                 * (shape.tokens * set.bytes(0, shape.dims, shape.element_bytes)
                     + mdkv::projection_bytes(set, 0, shape.dims, shape.element_bytes));
}

/// The largest rank whose bytes fit the limit; 0 drops all tokens but the window. Rank key_dim needs no projections and
/// may fit even if lower ranks do not.
/// \throws mdkv::invalid_argument   the limit does not hold the window
[[nodiscard]] inline std::int64_t low_rank_that_fits(mdkv::layer_shape const& shape, std::int64_t limit)
{
    mdkv::expects(limit >= shape.window_bytes(), "low_rank: ", limit, " bytes do not hold the window; ",
        shape.window_bytes(), " are needed");
    std::int64_t rank = shape.dims.keys;
    while (rank > 0 && low_rank_bytes(shape, rank) > limit) { --rank; }
    return rank;
}

template <mdkv::element T>
[[nodiscard]] mdkv::layer_shape shape_of(prompt_layer<T> const& layer)
{
    return {layer.heads, layer.group, layer.past(), layer.window, {layer.key_dim, layer.value_dim},
        static_cast<mdkv::index_t>(sizeof(T))};
}

/// Past tokens at that rank in each head's own basis, the window whole.
/// \throws mdkv::invalid_argument   the rank is outside [0, key_dim]
template <mdkv::element T>
[[nodiscard]] mdkv::cpu::cache<T> low_rank_cache(
    mdkv::cpu::executor_ref executor, scratch_memory& scratch, prompt_layer<T> const& layer, std::int64_t rank)
{
    mdkv::expects(
        rank >= 0 && rank <= layer.key_dim, "low_rank: the rank ", rank, " is not within 0 and ", layer.key_dim);
    bool const projected  = rank > 0 && rank < layer.key_dim;
    auto const keys_size  = static_cast<std::size_t>(projected ? layer.heads * layer.key_dim * layer.key_dim : 0);
    auto const value_size = static_cast<std::size_t>(projected ? layer.heads * layer.value_dim * layer.value_dim : 0);
    std::vector<float> key_basis(keys_size);    // [heads, key_dim, key_dim]
    std::vector<float> value_basis(value_size); // [heads, value_dim, value_dim]
    auto const fit = [&](T const* rows, std::int64_t dim, std::vector<float>& basis) {
        std::vector<float> energy(static_cast<std::size_t>(layer.heads * dim));
        scratch.run(executor, [&](mdkv::cpu::backend on) {
            auto const all = mdkv::in(on, rows, layer.heads, layer.tokens, dim);
            mdkv::fit_basis(on, mdkv::slice<1>(all, 0, layer.past()),
                mdkv::out(on, basis.data(), layer.heads, dim, dim), mdkv::out(on, energy.data(), layer.heads, dim));
            return 0;
        });
    };
    if (projected)
    {
        fit(layer.keys, layer.key_dim, key_basis);
        fit(layer.values, layer.value_dim, value_basis);
    }
    std::vector<std::uint8_t> const rungs(static_cast<std::size_t>(layer.heads * layer.past()), 0);
    return pack_layer(executor, scratch, layer, low_rank_set(rank, layer.key_dim),
        {projected ? key_basis.data() : nullptr, projected ? value_basis.data() : nullptr}, rungs);
}

} // namespace runner
