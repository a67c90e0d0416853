/// \file score.cuh: score on the GPU: two streamed sweeps over the keys, all rungs at once (arXiv 2603.20616, section 4.2, algorithm 1).
#pragma once

#include <mdkv/stages/score.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/score_losses.hpp>
#include <mdkv/detail/score_plan.hpp>
#include <mdkv/detail/score_prepare.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/score_products.cuh>
#include <mdkv/gpu/detail/score_sweeps.cuh>
#include <mdkv/gpu/launch.cuh>

#include <algorithm>
#include <concepts>

namespace MDKV_NAMESPACE::gpu
{

// How it works. A block takes a tile of tokens: it reads the tile once, finds coordinates in the basis, and
// multiplies keys and coordinates with the queries, panel by panel, in registers; nothing of size queries x tokens leaves
// the registers. Tokens are read twice, because every softmax needs its normaliser before the
// first loss: sweep one adds up the log-sum-exps of a split of the tokens per block, which one job joins; sweep two adds up
// differences of probabilities over the queries, token by token, of which a job makes losses.

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
    index_t const window = window_keys.extent(1);
    if (heads == 0) { return; }
    detail::score_plan plan{ratios, {keys.extent(2), values.extent(2)}, queries.extent(0) / heads, queries.extent(1),
        tokens + window, options, detail::score_panel, detail::score_panel};
    detail::score_tiling const tiling{plan, sizeof(T) == 2 && std::same_as<T, U>};
    plan.more = tiling.tensor ? index_t{plan.dim} * plan.rows / 2 : 0;

    index_t const tiles  = tiling.tiles(tokens); // tiles of a head
    index_t const splits = std::clamp<index_t>(tiles / 4, 1, (detail::score_splits + heads - 1) / heads);
    detail::score_states states{nullptr, (splits + 1) * tiling.token_warps(), plan.softmaxes, plan.rows};

    workspace::frame frame{*on.scratch};
    plan.take_memory(frame, loss, states);
    if (tokens == 0) { return; }
    mdkv::detail::score_losses<T, backend> const last{keys, values, key_basis, value_basis, plan, loss};
    index_t const shared = (std::max)(tiling.all, last.scratch_bytes());
    index_t const most   = most_shared_memory(on);
    expects(shared <= most, "score: head dimensions ", keys.extent(2), " and ", values.extent(2), " take ", shared,
        " bytes of a block's shared memory at these rungs; this GPU has ", most);

    mdkv::detail::prepare_score(on, plan, queries, keys, values, key_basis, options, [&] {
        if (plan.latent == 0 && !tiling.tensor) { return; }
        launch(on, kernels::score_panels<U>{queries, key_basis, plan, tiling.tensor},
            heads * (plan.rows / detail::score_panel));
    });

    detail::token_rows<T> const key_rows{keys};
    if (!options.lse || plan.softmaxes > 1)
    {
        launch(on,
            kernels::score_sums<T>{
                key_rows, detail::token_rows<T>{window_keys}, plan, tiling, states, splits, !options.lse.has_value()},
            heads * (splits + 1));
    }
    mdkv::detail::score_join<backend>::run_for(on, options, plan, states, heads);
    launch(on, kernels::score_totals<T>{key_rows, plan, tiling, tiles}, checked_multiply(heads, tiles));
    mdkv::detail::score_by_totals(on, last);
}

} // namespace MDKV_NAMESPACE::gpu
