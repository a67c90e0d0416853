/// \file score.cuh: score on the GPU: two streamed sweeps over the keys, all rungs at once (arXiv 2603.20616, section 4.2, algorithm 1).
#pragma once

#include <mdkv/score.hpp>

#include <mdkv/basis.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/score_losses.cuh>
#include <mdkv/gpu/detail/score_plan.cuh>
#include <mdkv/gpu/detail/score_prepare.cuh>
#include <mdkv/gpu/detail/score_sums.cuh>
#include <mdkv/gpu/detail/score_tile.cuh>
#include <mdkv/gpu/detail/score_work.cuh>
#include <mdkv/gpu/launch.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace mdkv::gpu
{

// How it works. A block takes a tile of tokens: reads it once, finds its coordinates in the basis and its keys as quantised
// rungs would read them again, and multiplies all of that with the queries, panel by panel, in registers; nothing of size
// queries x tokens leaves them. Tokens are read twice, because every softmax needs its normaliser before the first loss:
// sweep one adds up the log-sum-exps of a part of the tokens per block, which one kernel joins; sweep two adds up
// differences of probabilities over the queries, token by token, and writes the losses.

namespace detail
{

template <element T>
void expects_whole_elements(in_view<T, 3, backend> const& view, char const* name)
{
    expects(reinterpret_cast<std::uintptr_t>(view.data_handle()) % sizeof(T) == 0, "score: ", name,
        " is not aligned to ", sizeof(T), " bytes, which a GPU needs");
}

[[nodiscard]] inline index_t blocks_of(index_t items) noexcept
{
    return (items + score_threads - 1) / score_threads;
}

/// What is made of queries and bases before the tokens are looked at.
template <element T>
void prepare_heads(backend const& on, in_view<T, 3, backend> queries, key_bases<backend> const& key_basis,
    in_view<float, 3, backend> value_basis, score_plan const& plan, score_operands const& operands, index_t heads)
{
    index_t const per_head = blocks_of(index_t{plan.rows} * plan.dim);
    launch(on, kernels::score_queries<T>{queries, plan, operands, per_head}, heads * per_head);
    if (plan.latent + plan.value_latent == 0) { return; }
    int const width = score_padded(plan.value_dim);
    launch(on,
        kernels::score_bases{{{key_basis.of_keys, operands.key_basis, plan.latent, plan.key_columns(), true},
                                 {value_basis, operands.value_basis, plan.value_latent, plan.value_columns(), true},
                                 {value_basis, operands.value_rows, plan.value_latent, width, false}},
            operands},
        heads * kernels::score_bases::copies);
    index_t const latents_per_head = blocks_of(index_t{plan.rows} * plan.latent);
    launch(on, kernels::score_query_latents{key_basis.of_queries, plan, operands, latents_per_head},
        heads * latents_per_head);
}

} // namespace detail

/// Weights of queries are in device memory, where nothing can be said of them: a negative one or a NaN makes losses NaN,
/// which `allocate` tells of; an infinite one makes them infinite or NaN.
/// \throws invalid_argument   queries, keys, values or window_keys are not aligned to their elements
template <element T, std::size_t R>
void score_impl(backend const& on, in_view<T, 3, backend> queries, in_view<T, 3, backend> keys,
    in_view<T, 3, backend> values, in_view<T, 3, backend> window_keys, key_bases<backend> const& key_basis,
    in_view<float, 3, backend> value_basis, ratio_set<R> const& ratios, score_options<backend> const& options,
    out_view<float, 3, backend> loss)
{
    detail::expects_whole_elements(queries, "queries");
    detail::expects_whole_elements(keys, "keys");
    detail::expects_whole_elements(values, "values");
    detail::expects_whole_elements(window_keys, "window_keys");
    index_t const heads  = keys.extent(0);
    index_t const tokens = keys.extent(1);
    index_t const window = window_keys.extent(1);
    if (heads == 0) { return; }
    detail::score_plan const plan{ratios, {keys.extent(2), values.extent(2)}, queries.extent(0) / heads,
        queries.extent(1), options.scale, options.quantisation, sizeof(T) == 2};
    detail::score_operands operands{plan};
    constexpr int most_tokens = 4 * detail::score_warp_tokens;
    auto const tiling         = detail::score_tiling::of(plan, detail::score_work_places{plan, most_tokens}.tile);
    detail::score_work_places const places{plan, tiling.tokens()};

    auto const tiles_of     = [&](index_t n) { return (n + tiling.tokens() - 1) / tiling.tokens(); };
    index_t const tiles     = tiles_of(tokens); // of a head
    index_t const parts     = std::clamp<index_t>(tiles / 4, 1, (detail::score_parts + heads - 1) / heads);
    index_t const sums      = checked_multiply(heads, parts + 1);
    index_t const items     = checked_multiply(heads, tiles);
    index_t const in_flight = tiling.shared ? index_t{INT32_MAX} : detail::score_most_blocks;
    detail::score_states states{nullptr, plan.rows, plan.softmaxes, tiling.token_warps()};

    expects(std::max(sums, items) < INT32_MAX && tiles_of(window) < INT32_MAX, "score: ", heads, " heads of ", tokens,
        " tokens and a window of ", window, " are more than a grid may have blocks for");
    auto const narrow = [](index_t n) { return static_cast<int>(n); };

    workspace::frame frame{*on.scratch, "score"};
    operands.memory         = frame.take<float>(checked_multiply(heads, operands.per_head));
    states.memory           = frame.take<float>(checked_multiply(sums, states.per_part()));
    auto* const tile_memory = frame.take<std::byte>(
        tiling.shared ? 0 : checked_multiply(std::min(in_flight, std::max(sums, items)), index_t{tiling.bytes}));
    if (!frame.ready() || tokens == 0) { return; }

    detail::score_sight const sight{
        std::min(options.first_query.value_or(tokens + window - queries.extent(1)), tokens + window), plan.per_head};
    detail::prepare_heads(on, queries, key_basis, value_basis, plan, operands, heads);

    bool const keys_wide = detail::wide_rows(keys);
    auto const sweep_one = [&]<bool Shared>() {
        launch(on,
            kernels::score_sums<T, Shared>{keys, window_keys, plan, tiling, operands, sight, states, tile_memory,
                narrow(parts), narrow(sums), narrow(tiles), narrow(tiles_of(window)), keys_wide,
                detail::wide_rows(window_keys), !options.lse.has_value()},
            std::min(sums, in_flight));
    };
    if (!options.lse || plan.softmaxes > 1)
    {
        if (tiling.shared) { sweep_one.template operator()<true>(); }
        else { sweep_one.template operator()<false>(); }
    }

    index_t const rows_per_head = detail::blocks_of(index_t{plan.softmaxes} * plan.rows);
    launch(on,
        kernels::score_join{options.lse.value_or(in_view<float, 2, backend>{}),
            options.query_weights.value_or(in_view<float, 1, backend>{}), plan, operands, states, narrow(parts) + 1,
            rows_per_head, options.lse.has_value(), options.query_weights.has_value()},
        heads * rows_per_head);

    auto const sweep_two = [&]<bool Shared>() {
        launch(on,
            kernels::score_losses<T, Shared>{keys, values, loss, plan, tiling, operands, sight, places, tile_memory,
                narrow(tiles), narrow(items), keys_wide, detail::wide_rows(values)},
            std::min(items, in_flight));
    };
    if (tiling.shared) { sweep_two.template operator()<true>(); }
    else { sweep_two.template operator()<false>(); }
}

} // namespace mdkv::gpu
