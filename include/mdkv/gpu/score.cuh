/// \file score.cuh: score on the GPU: two streamed sweeps over the keys, all rungs at once (arXiv 2603.20616, section 4.2, algorithm 1).
#pragma once

#include <mdkv/stages/score.hpp>

#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/score_losses.hpp>
#include <mdkv/detail/score_plan.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/score_products.cuh>
#include <mdkv/gpu/detail/score_sweeps.cuh>

#include <algorithm>
#include <concepts>

namespace MDKV_NAMESPACE::gpu
{

// How it works: as on the CPU. A block reads a tile of tokens once, finds coordinates in the basis, and multiplies keys and
// coordinates with the queries, panel by panel, in registers. Sweep one leaves the log-sum-exps of a split of the tokens per
// block, which one job joins; sweep two adds up differences of probabilities over the queries, of which a job makes losses.

/// Weights of queries are in device memory, which the host does not read: a negative one or a NaN makes losses NaN, which
/// `allocate` reports; an infinite one makes them infinite or NaN. Tensor cores multiply keys with queries of the same 16-bit
/// element; any other queries are multiplied in float.
/// \throws invalid_argument   queries, keys, values or window_keys are not aligned to their elements; head dimensions are too
///                            large for a block's shared memory (about 512 at few rungs, naming the bytes)
template <element T, element U>
void score_impl(backend const& on, in_view<U, 3, backend> queries, in_view<T, 3, backend> keys,
    in_view<T, 3, backend> values, in_view<T, 3, backend> window_keys, in_view<float, 3, backend> key_basis,
    in_view<float, 3, backend> value_basis, ratio_set const& ratios, score_options<backend> const& options,
    out_view<float, 3, backend> loss)
{
    index_t const heads  = keys.extent(0);
    index_t const tokens = keys.extent(1);
    if (heads == 0) { return; }
    detail::score_plan plan{ratios, {keys.extent(2), values.extent(2)}, queries.extent(0) / heads, queries.extent(1),
        tokens + window_keys.extent(1), options, detail::score_panel};
    detail::score_tiling const tiling{plan, sizeof(T) == 2 && std::same_as<T, U>};
    plan.more = tiling.tensor ? index_t{plan.dim} * plan.rows / 2 : 0;

    index_t const tiles  = tiling.tiles(tokens); // tiles of a head
    index_t const splits = std::clamp<index_t>(tiles / 4, 1, (detail::score_splits + heads - 1) / heads);
    plan.splits          = (splits + 1) * tiling.token_warps();

    workspace::frame frame{on.scratch};
    plan.take_memory(frame, loss);
    if (tokens == 0) { return; }
    mdkv::detail::score_losses<T, backend> const last{keys, values, key_basis, value_basis, plan, loss};
    index_t const shared = (std::max)(tiling.bytes, last.scratch_bytes());
    index_t const most   = most_shared_memory(on);
    expects(shared <= most, "score: head dimensions ", keys.extent(2), " and ", values.extent(2), " take ", shared,
        " bytes of a block's shared memory at these rungs; this GPU has ", most);

    if constexpr (sizeof(U) == 2)
    {
        if (tiling.tensor) { launch(on, kernels::score_fragments<U>{queries, plan}, heads * (plan.rows / plan.panel)); }
    }
    kernels::score_sweep<T, false> const one{keys, window_keys, plan, tiling, splits, !options.lse.has_value()};
    kernels::score_sweep<T, true> const two{keys, window_keys, plan, tiling, tiles, true};
    mdkv::detail::score_by(
        on, last, queries, options, [&] { launch(on, one, one.blocks()); }, [&] { launch(on, two, two.blocks()); });
}

} // namespace MDKV_NAMESPACE::gpu
