/// \file compress.hpp: contract of compress: one layer from keys and values to a packed cache, all stages in one call (arXiv 2603.20616, sections 4, 5).
#pragma once

#include <mdkv/allocate.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/progress.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/contract.hpp>
#include <mdkv/pool.hpp>
#include <mdkv/score.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace mdkv
{

/// One layer of one sequence as prefill leaves it. The N tokens come first, the W window tokens follow them.
template <backend B, element T>
struct layer_view
{
    in_view<T, 3, B> queries;       // [H*G, Q, D]  whose attention is to be preserved; usually the window's, Q = W
    in_view<T, 3, B> keys;          // [H, N, D]    after position encoding
    in_view<T, 3, B> values;        // [H, N, Dv]
    in_view<T, 3, B> window_keys;   // [H, W, D]
    in_view<T, 3, B> window_values; // [H, W, Dv]
};

/// Cuts a prompt's keys and values [H, N + W, ...] into what may be compressed and the window.
/// \throws invalid_argument   window is negative; a shorter prompt is all window
template <backend B, element T>
[[nodiscard]] layer_view<B, T> split_window(B const&, in_view<T, 3, B> const& queries, in_view<T, 3, B> const& keys,
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
    error,     ///< look for NaNs and infinities first and refuse them
    keep_full, ///< keep prompt tokens that hold one at the full rung; bases and scores take them for zero vectors. In
               ///< queries and window they are refused all the same. Attention over them is what it was before
    unchecked  ///< the caller knows there are none
};

/// What to do when the budget holds the window, but not the projections of projected rungs.
enum class tight_budget : std::uint8_t
{
    unprojected, ///< use only the rungs that need no projection, and say so in the report
    error        ///< refuse
};

/// Which coordinates of keys come first.
enum class key_basis_kind : std::uint8_t
{
    pca,        ///< those of most energy, as the paper has it (fit_basis)
    query_aware ///< those that most of q . k lies in (fit_query_aware_basis)
};

template <backend B>
struct compress_options
{
    /// What the layer may keep: window, tokens and projections.
    budget limit = budget::fraction(1, 10);

    /// [H]  instead of sharing: bytes each head may spend on tokens and projections. Their sum and the window must fit
    /// the limit.
    std::optional<in_view<index_t, 1, B>> quotas = std::nullopt;

    key_basis_kind key_basis = key_basis_kind::pca;
    pool_options pooling{};
    allocate_options allocation{};
    score_options<B> scoring{};
    non_finite on_non_finite     = non_finite::error;
    tight_budget on_tight_budget = tight_budget::unprojected;
    progress_ref progress{};
    index_t layer = -1; ///< number for error messages

    /// [H, N]  receives every token's rung, e.g. for list_slots; written last, when nothing can fail any more. Where the
    /// layer is stored uncompressed it is the full rung, or the number of rungs if the set has none.
    std::optional<out_view<std::uint8_t, 2, B>> rungs = std::nullopt;
};

enum class compress_status : std::uint8_t
{
    compressed,
    uncompressed, ///< the budget holds the whole layer: stored bit for bit
    cancelled     ///< stopped by the progress callback; the destination is as it was
};

struct compress_report
{
    compress_status status = compress_status::compressed;
    layer_shape shape;
    index_t budget_bytes   = 0;
    index_t window_bytes   = 0;
    index_t resident_bytes = 0; ///< of the cache that was made, measured; never above budget_bytes
    index_t full_bytes     = 0; ///< of the uncompressed layer
    allocation chosen;          ///< summed over the heads where each had its own limit
};

/// Compresses one layer: fits both bases, scores, pools, allocates and packs. The destination is replaced at the very
/// end; whatever fails before leaves it as it was.
///
/// \param on           backend: threads, scratch
/// \param[in]  layer   queries, keys, values, window
/// \param[in]  ratios  the rungs
/// \param[in]  options budget, pooling and the rest
/// \param[out] destination  the backend's cache (for the CPU `cpu::cache<T>`); its memory resource is used
/// \return     what was done, in absolute units
/// \cost   the sum of the stages; scratch O(H*R*N + H*D*D), with keep_full a copy of keys and values; allocates the new cache, and eigenbasis's temporaries
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads
/// \throws invalid_argument        shapes disagree; the budget is below the window or the cheapest rungs (naming the
///                                 least budget that works) or below what keep_full must keep; quotas exceed the budget
/// \throws non_finite_input        naming layer, head and row
/// \throws insufficient_workspace  naming the size needed
/// \throws std::bad_alloc          and whatever the callback or executor throws. Nothing was changed in any case
/// \see    tests/compress.cpp, examples/engine_hook.cpp
template <backend B, element T, std::size_t R, class Cache>
compress_report compress(B const& on, layer_view<B, T> const& layer, ratio_set<R> const& ratios,
    compress_options<B> const& options, Cache& destination)
{
    static_assert(
        requires { compress_impl(on, layer, ratios, options, layer_shape{}, destination); },
        MDKV_DETAIL_NO_IMPLEMENTATION(compress, compress));
    bool const dry      = detail::dry_run(on);
    index_t const heads = layer.keys.extent(0);
    detail::argument const q{"compress", "queries", layer.queries};
    detail::argument const k{"compress", "keys", layer.keys};
    detail::argument const v{"compress", "values", layer.values};
    detail::argument const wk{"compress", "window_keys", layer.window_keys};
    detail::argument const wv{"compress", "window_values", layer.window_values};
    expects(heads == 0 || (layer.queries.extent(0) % heads == 0 && layer.queries.extent(0) >= heads),
        "compress: queries [H*G, Q, D] has ", layer.queries.extent(0), " query heads, which ", heads,
        " KV heads do not divide");
    layer_shape const shape{heads, heads == 0 ? 1 : layer.queries.extent(0) / heads, layer.keys.extent(1),
        layer.window_keys.extent(1), {layer.keys.extent(2), layer.values.extent(2)}, index_t{sizeof(T)}};
    shape.expects_valid("compress");
    q.shape({layer.queries.extent(0), layer.queries.extent(1), shape.dims.keys}, "H*G,Q,D")
        .data(dry)
        .apart_from_scratch(on);
    k.data(dry).apart_from_scratch(on);
    v.shape({heads, shape.tokens, shape.dims.values}, "H,N,Dv").data(dry).apart_from_scratch(on);
    wk.shape({heads, shape.window, shape.dims.keys}, "H,W,D").data(dry).apart_from_scratch(on);
    wv.shape({heads, shape.window, shape.dims.values}, "H,W,Dv").data(dry).apart_from_scratch(on);
    if (options.quotas)
    {
        detail::argument const h{"compress", "options.quotas", *options.quotas};
        h.shape({heads}, "H").data(dry).aligned().apart_from_scratch(on);
    }
    if (options.rungs)
    {
        detail::argument const r{"compress", "options.rungs", *options.rungs};
        r.shape({heads, shape.tokens}, "H,N").data(dry).unique().apart_from(q).apart_from(k).apart_from(v);
        r.apart_from(wk).apart_from(wv).apart_from_scratch(on);
    }
    ratios.expects_fit("key", shape.dims.keys);
    ratios.expects_fit("value", shape.dims.values);
    ratios.expects_ascending(shape.dims, shape.element_bytes);
    return compress_impl(on, layer, ratios, options, shape, destination);
}

} // namespace mdkv
