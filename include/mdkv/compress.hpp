/// \file compress.hpp: contract of compress: one layer from keys and values to a packed cache, all stages in one call (arXiv 2603.20616, sections 4, 5).
#pragma once

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/score_options.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/ranks.hpp>
#include <mdkv/stages/pool.hpp>

#include <cstdint>
#include <optional>

namespace MDKV_NAMESPACE
{

/// One layer of one sequence after prefill. The N tokens come first, the W window tokens follow them.
template <backend B, element T, element U = T>
struct layer_view
{
    in_view<U, 3, B> queries;       ///< [H*G, Q, D]  the last ones, by whose attention tokens are scored
    in_view<T, 3, B> keys;          ///< [H, N, D]    after position encoding
    in_view<T, 3, B> values;        ///< [H, N, Dv]
    in_view<T, 3, B> window_keys;   ///< [H, W, D]
    in_view<T, 3, B> window_values; ///< [H, W, Dv]
};

/// Cuts a prompt's keys and values [H, N + W, ...] into N tokens for compression and the window.
/// \throws invalid_argument   window is negative; a shorter prompt is all window
template <backend B, element T, element U>
[[nodiscard]] layer_view<B, T, U> split_window(B const&, in_view<U, 3, B> const& queries, in_view<T, 3, B> const& keys,
    in_view<T, 3, B> const& values, index_t window)
{
    expects(window >= 0, "split_window: window is ", window, "; it must not be negative");
    index_t const kept  = window < keys.extent(1) ? window : keys.extent(1);
    index_t const first = keys.extent(1) - kept;
    expects(values.extent(1) == keys.extent(1), "split_window: values have ", values.extent(1), " tokens, keys ",
        keys.extent(1));
    return {queries, slice<1>(keys, 0, first), slice<1>(values, 0, first), slice<1>(keys, first, kept),
        slice<1>(values, first, kept)};
}

enum class non_finite : std::uint8_t
{
    error,    ///< search for NaNs and infinities first and refuse them
    unchecked ///< the caller guarantees that there are none
};

template <backend B>
struct compress_options
{
    /// Limit of the layer, on all ranks: window, tokens and projections.
    budget limit = budget::fraction(1, 10);

    /// [H]  instead of sharing: bytes each head may spend on tokens and projections. Their sum and the window must fit
    /// the limit.
    std::optional<in_view<index_t, 1, B>> quotas = std::nullopt;

    pool_options pooling{};
    allocate_options allocation{};
    score_options<B> scoring{}; ///< its scale and its channels are also used for the new cache

    /// [H, R, N]  precomputed losses, e.g. scored chunk by chunk during prefill or joined, instead of losses by the layer's
    /// queries; for projected rungs, scored with the bases that fit_basis finds for the N tokens. `pooling` applies to them.
    std::optional<in_view<float, 3, B>> losses = std::nullopt;

    non_finite on_non_finite = non_finite::error;
    index_t layer            = -1; ///< number for error messages

    /// [H, N]  receives every token's rung, e.g. for list_slots; written last, after all steps that can fail. If the
    /// layer is stored uncompressed it is the full rung, or the number of rungs if the set has none.
    std::optional<out_view<std::uint8_t, 2, B>> rungs = std::nullopt;
};

enum class compress_status : std::uint8_t
{
    compressed,
    uncompressed ///< the budget holds the whole layer: stored bit for bit
};

struct compress_report
{
    compress_status status = compress_status::compressed;
    layer_shape shape;
    index_t budget_bytes   = 0; ///< on all ranks; the other sizes are this rank's
    index_t window_bytes   = 0;
    index_t resident_bytes = 0; ///< bytes of the new cache, measured; within the layer's own budget
    index_t full_bytes     = 0; ///< bytes of the uncompressed layer
    allocation chosen;          ///< summed over the heads if each had its own limit
};

/// A place for a compressed layer that the caller has made: nothing is allocated and nothing waits, so that on a GPU the
/// whole call can be recorded into a graph and replayed for the next prompt of the same shape.
template <element T, space S>
struct compressed_layer
{
    cache_view<T, S> cache;       ///< layout of the ratio set, arena of at least the budget's bytes
    allocation* report = nullptr; ///< [1], or [H] with quotas: the choice, and errors of the data; may be null
};

namespace detail
{

/// One call behind its checks: pipeline/compressing.hpp.
template <backend B, element T, element U, class Destination>
compress_report compress_layer(B const& on, layer_view<B, T, U> const& layer, ratio_set const& ratios,
    rung_costs const& costs, compress_options<B> const& options, layer_shape const& shape,
    agreement<B::memory_space>& agreed, Destination& destination);

} // namespace detail

/// Compresses one layer: fits both bases, scores, pools, allocates and packs. If the budget holds the whole layer, it is
/// stored uncompressed. Over ranks (`mdkv::ranks`) the heads are this rank's, and the budget is that of all ranks' heads;
/// quotas, and then `chosen`, are this rank's.
///
/// \param on           backend: threads or stream, scratch, ranks
/// \param[in]  layer   queries of any element type, keys, values, window
/// \param[in]  ratios  the rungs
/// \param[in]  options budget, pooling and the rest
/// \param[out] destination  `cpu::cache<T>`: replaced at the very end by a cache of exactly the size it needs, out of its
///                     memory resource. Or a `compressed_layer`, on either backend: written to; report.resident_bytes is
///                     then -1 and report.chosen empty, `destination.report` and the directory have them
/// \return     the report, in absolute units
/// \cost   the sum of the stages; scratch O(H*R*N + H*D*D); allocates the new cache of an owner and nothing else
/// \sync   returns when done (cpu); enqueued on the stream, fit for graph capture (gpu); over ranks a GPU is waited for
/// \order  bitwise reproducible for equal inputs, for any number of threads
/// \throws invalid_argument        shapes disagree; the budget is below the window or the cheapest rungs (naming the
///                                 least budget that works); quotas exceed the budget. A compressed_layer's layout or
///                                 arena does not fit; options.on_non_finite is not unchecked on a GPU, where looking for
///                                 NaNs would wait: call expects_finite before. Errors that only the device's data show
///                                 are in `destination.report` (allocation_status): non-finite losses, a limit
///                                 below the cheapest rungs; if quotas exceed the arena, pack stores no token
///                                 Over ranks an error of one rank's arguments, NaNs among them, is thrown on every rank
/// \throws non_finite_input        naming layer, head and row
/// \throws insufficient_workspace  naming the size needed
/// \throws std::bad_alloc          and the executor's exceptions. Nothing was changed in any case
/// \see    tests/unit/compress.cpp, examples/engine_hook.cpp, examples/gpu_pipeline.cu
template <backend B, element T, element U, class Destination>
compress_report compress(B const& on, layer_view<B, T, U> const& layer, ratio_set const& ratios,
    compress_options<B> const& options, Destination& destination)
{
    index_t const heads = layer.keys.extent(0);
    index_t const rows  = layer.queries.extent(0);
    detail::agreement agreed{on};
    detail::check c{on, "compress"};
    expects(heads == 0 || (rows % heads == 0 && rows >= heads), "compress: queries [H*G, Q, D] has ", rows,
        " query heads, which ", heads, " KV heads do not divide");
    layer_shape const shape{heads, heads == 0 ? 1 : rows / heads, layer.keys.extent(1), layer.window_keys.extent(1),
        {layer.keys.extent(2), layer.values.extent(2)}, index_t{sizeof(T)}};
    shape.expects_valid("compress");
    c.rows("queries", layer.queries, {{rows, layer.queries.extent(1), shape.dims.keys}}, "H*G,Q,D");
    c.rows("keys", layer.keys, {{heads, shape.tokens, shape.dims.keys}}, "H,N,D");
    c.rows("values", layer.values, {{heads, shape.tokens, shape.dims.values}}, "H,N,Dv");
    c.rows("window_keys", layer.window_keys, {{heads, shape.window, shape.dims.keys}}, "H,W,D");
    c.rows("window_values", layer.window_values, {{heads, shape.window, shape.dims.values}}, "H,W,Dv");
    c.in("options.quotas", options.quotas, {{heads}}, "H");
    c.in("options.scoring.channels", options.scoring.channels, {{heads, 3, shape.dims.keys}}, "H,3,D");
    c.in("options.losses", options.losses, {{heads, static_cast<index_t>(ratios.size()), shape.tokens}}, "H,R,N");
    detail::expects_not_negative("compress", "options.scoring.scale", options.scoring.scale);
    if (options.rungs) { c.out("options.rungs", *options.rungs, {{heads, shape.tokens}}, "H,N"); }
    rung_costs const costs{ratios, shape.dims, shape.element_bytes};
    expects(B::memory_space == space::host || options.on_non_finite == non_finite::unchecked,
        "compress: on the GPU options.on_non_finite must be unchecked; "
        "ask expects_finite first, which waits for the device");
    return detail::staged(on, "compress", [&](B const& stages) {
        return detail::compress_layer(stages, layer, ratios, costs, options, shape, agreed, destination);
    });
}

} // namespace MDKV_NAMESPACE

#include <mdkv/pipeline/compressing.hpp>
