/// \file compress.hpp: contract of compress: one layer from keys and values to a packed cache, all stages in one call (arXiv 2603.20616, sections 4, 5).
#pragma once

#include <mdkv/allocate.hpp>
#include <mdkv/basis.hpp>
#include <mdkv/cache.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/finite.hpp>
#include <mdkv/pack.hpp>
#include <mdkv/pool.hpp>
#include <mdkv/score.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>

namespace mdkv
{

/// One layer of one sequence after prefill. The N tokens come first, the W window tokens follow them.
template <backend B, element T, element U = T>
struct layer_view
{
    in_view<U, 3, B> queries;       // [H*G, Q, D]  losses preserve their attention; usually the window's, Q = W
    in_view<T, 3, B> keys;          // [H, N, D]    after position encoding
    in_view<T, 3, B> values;        // [H, N, Dv]
    in_view<T, 3, B> window_keys;   // [H, W, D]
    in_view<T, 3, B> window_values; // [H, W, Dv]
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
    /// Limit of the layer: window, tokens and projections.
    budget limit = budget::fraction(1, 10);

    /// [H]  instead of sharing: bytes each head may spend on tokens and projections. Their sum and the window must fit
    /// the limit.
    std::optional<in_view<index_t, 1, B>> quotas = std::nullopt;

    pool_options pooling{};
    allocate_options allocation{};
    score_options<B> scoring{};

    /// [H, R, N]  losses at hand, e.g. scored chunk by chunk during prefill or joined, instead of those by the layer's
    /// queries; those of projected rungs by the bases that fit_basis finds for the N tokens. `pooling` applies to them, too.
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
    index_t budget_bytes   = 0;
    index_t window_bytes   = 0;
    index_t resident_bytes = 0; ///< of the cache that was made, measured; never above budget_bytes
    index_t full_bytes     = 0; ///< of the uncompressed layer
    allocation chosen;          ///< summed over the heads where each had its own limit
};

/// A place for a compressed layer that the caller has made: nothing is allocated and nothing waits, so that on a GPU the
/// whole call can be recorded into a graph and replayed for the next prompt of the same shape.
template <element T, space S>
struct compressed_layer
{
    cache_view<T, S> cache;       ///< layout of the ratio set, arena of at least the budget's bytes
    allocation* report = nullptr; ///< [1], or [H] with quotas: what was chosen, and what could not be; may be null
};

namespace detail
{

/// Copies rungs to the caller's view of them.
template <space S>
struct hand_over
{
    static constexpr char const* name = "hand_over";

    view<std::uint8_t const, 2, S> from; // [H, N]
    view<std::uint8_t, 2, S> to;         // [H, N]

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        for (index_t n = t.rank(); n < to.extent(1); n += t.size()) { to(h, n) = from(h, n); }
    }
};

/// The report of a layer that is stored as it is, for every limit: an item.
template <space S>
struct report_whole
{
    static constexpr char const* name = "report_whole";
    static constexpr int threads      = 32;

    view<allocation, 1, S> report;   // [limits]
    allocation value;                ///< but for its limit
    view<index_t const, 1, S> limit; // [limits]

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t i) const
    {
        if (t.rank() > 0) { return; }
        report(i)       = value;
        report(i).limit = limit(i);
    }
};

/// The sum of the reports of all limits.
[[nodiscard]] inline allocation sum_of(view<allocation const, 1, space::host> reports) noexcept
{
    allocation total = reports.extent(0) > 0 ? reports(0) : allocation{};
    for (index_t i = 1; i < reports.extent(0); ++i)
    {
        total.status     = std::max(total.status, reports(i).status);
        total.multiplier = std::max(total.multiplier, reports(i).multiplier);
        total.loss += reports(i).loss;
        total.dual += reports(i).dual;
        total.limit += reports(i).limit;
        total.token_bytes += reports(i).token_bytes;
        total.charged_bytes += reports(i).charged_bytes;
        for (std::size_t r = 0; r < max_rungs; ++r) { total.tokens[r] += reports(i).tokens[r]; }
    }
    return total;
}

/// One call of compress behind its checks; a dry run only counts.
template <backend B, element T, element U, class Destination>
compress_report compress_layer(B const& on, layer_view<B, T, U> const& layer, ratio_set const& ratios,
    rung_costs const& costs, compress_options<B> const& options, layer_shape const& shape, Destination& destination)
{
    constexpr space S    = B::memory_space;
    constexpr bool owner = requires { destination.view(); };
    static_assert(!owner || S == space::host,
        "compress: on a GPU the destination is a compressed_layer, whose memory the caller has made");
    auto const [H, N]  = std::pair{shape.heads, shape.tokens};
    auto const [D, Dv] = shape.dims;
    compress_report report;
    report.shape        = shape;
    report.full_bytes   = shape.full_bytes();
    report.window_bytes = shape.window_bytes();
    report.budget_bytes = options.limit.in_bytes(shape);
    bool const whole    = N == 0 || report.budget_bytes >= report.full_bytes;
    index_t const spend = report.budget_bytes - report.window_bytes;
    expects(spend >= 0, "compress: a budget of ", report.budget_bytes, " bytes cannot hold the window of ",
        shape.window, " tokens; at least ", report.window_bytes, " bytes are needed");
    if (whole) { report.status = compress_status::uncompressed; }
    if (options.on_non_finite == non_finite::error)
    {
        expects_finite(on, "queries", layer.queries, options.layer);
        expects_finite(on, "window_keys", layer.window_keys, options.layer);
        expects_finite(on, "window_values", layer.window_values, options.layer);
        expects_finite(on, "keys", layer.keys, options.layer);
        expects_finite(on, "values", layer.values, options.layer);
    }

    cache_layout layout{ratios, H, shape.window, shape.dims};
    bool const no_rung       = whole && layout.full_rung == layout.rungs; ///< of the set holds the tokens as they are
    allocation* given_report = nullptr;
    cache_view<T, S> to;
    if constexpr (owner)
    {
        if (no_rung) { layout = cache_layout{evict_ratios, H, shape.window, shape.dims}; } // stored as eviction would
        index_t total = 0;
        for (index_t h = 0; h < H && options.quotas && !whole && !on.scratch->counting(); ++h)
        {
            total = checked_add(total, (*options.quotas)(h));
        }
        expects(total <= spend, "compress: quotas add up to ", total, " bytes; the budget leaves ", spend,
            " beside the window");
        to.layout = layout;
    }
    else
    {
        to                 = destination.cache;
        given_report       = destination.report;
        index_t const room = whole ? report.full_bytes : report.budget_bytes;
        expects(to.layout == layout,
            "compress: destination.cache.layout is not that of the ratio set, heads, window and dimensions");
        expects(to.arena_bytes >= room, "compress: destination.cache.arena_bytes is ", to.arena_bytes,
            "; the budget may take ", room);
        expects(!no_rung, "compress: the budget holds the whole layer, and the ratio set has no rung 1 to store it at");
        report.resident_bytes = -1;
    }

    auto const rungs     = static_cast<index_t>(ratios.size());
    index_t const bases  = !whole && ratios.any_projected() ? H : 0;
    index_t const scored = whole || options.losses ? 0 : H;
    index_t const pooled = whole || options.pooling.copies() ? 0 : H;
    index_t const limits = options.quotas ? H : 1;
    workspace::frame frame{*on.scratch, "compress"};
    auto const rung        = out(on, frame.template take<std::uint8_t>(H * N), H, N);
    auto const key_basis   = out(on, frame.template take<float>(bases * D * D), bases, D, D);
    auto const value_basis = out(on, frame.template take<float>(bases * Dv * Dv), bases, Dv, Dv);
    auto const energy      = out(on, frame.template take<float>(bases * std::max(D, Dv)), bases, std::max(D, Dv));
    auto const loss        = out(on, frame.template take<float>(scored * rungs * N), scored, rungs, N);
    auto const smooth      = out(on, frame.template take<float>(pooled * rungs * N), pooled, rungs, N);
    auto* const shared     = frame.template take<index_t>(1);
    auto* const own        = frame.template take<allocation>(limits);
    auto const reports     = out(on, given_report != nullptr ? given_report : own, limits);
    bool const real        = frame.ready();

    run(on, fill<index_t>{shared, spend, 1}, 1);
    in_view<index_t, 1, B> const limit = options.quotas ? *options.quotas : in(on, shared, 1);
    if (whole)
    {
        fill<std::uint8_t> const keep{rung.data_handle(), static_cast<std::uint8_t>(layout.full_rung), H * N};
        run(on, keep, keep.items());
        index_t const parts = std::max<index_t>(limits, 1);
        allocation chosen;
        chosen.status      = allocation_status::everything_kept;
        chosen.token_bytes = (report.full_bytes - report.window_bytes) / parts;
        if (layout.full_rung < layout.rungs) { chosen.tokens[layout.full_rung] = H * N / parts; }
        run(on, report_whole<S>{reports, chosen, limit}, limits);
    }
    else
    {
        if (bases > 0)
        {
            fit_basis(on, layer.keys, key_basis, slice<1>(energy, 0, D));
            fit_basis(on, layer.values, value_basis, slice<1>(energy, 0, Dv));
        }
        if (!options.losses)
        {
            score(on, layer.queries, layer.keys, layer.values, layer.window_keys, as_input(key_basis),
                as_input(value_basis), ratios, options.scoring, loss);
        }
        in_view<float, 3, B> const losses = options.losses ? *options.losses : as_input(loss);
        if (pooled > 0) { pool(on, losses, options.pooling, smooth); }
        allocate(on, pooled > 0 ? as_input(smooth) : losses, costs, limit, options.allocation, rung, reports);
    }

    [[maybe_unused]] std::conditional_t<owner, Destination, char> made{};
    if constexpr (owner)
    {
        if (real)
        {
            report.chosen = sum_of(as_input(reports));
            expects<non_finite_input>(report.chosen.status != allocation_status::non_finite_loss,
                "compress: a loss is NaN or infinite; keys, values or queries are not finite, or too large to "
                "multiply");
            expects(report.chosen.status != allocation_status::over_limit, "compress: a budget of ",
                report.budget_bytes, " bytes cannot hold every token at its cheapest rung; at least ",
                report.window_bytes + checked_multiply(H * N, costs.bytes[0])
                    + (costs.projected[0] ? H * costs.projection[0] : 0),
                " bytes are needed");
        }
        report.resident_bytes = packed_bytes<T>(on, as_input(rung), layout);
        if (real)
        {
            made = destination.like(layout, report.resident_bytes, 0);
            to   = made.view();
        }
    }
    pack(on, layer.keys, layer.values, layer.window_keys, layer.window_values, as_input(key_basis),
        as_input(value_basis), as_input(rung), to);
    if constexpr (owner)
    {
        if (real) { destination = std::move(made); }
        if (no_rung) // the rungs that the caller is told are those of the ratio set
        {
            report.chosen.tokens = {};
            fill<std::uint8_t> const none{rung.data_handle(), static_cast<std::uint8_t>(rungs), H * N};
            run(on, none, none.items());
        }
    }
    if (options.rungs) { run(on, hand_over<S>{as_input(rung), *options.rungs}, H); }
    return report;
}

} // namespace detail

/// Compresses one layer: fits both bases, scores, pools, allocates and packs. Where the budget holds the whole layer it is
/// stored uncompressed.
///
/// \param on           backend: threads or stream, scratch
/// \param[in]  layer   queries of any element type, keys, values, window
/// \param[in]  ratios  the rungs
/// \param[in]  options budget, pooling and the rest
/// \param[out] destination  `cpu::cache<T>`: replaced at the very end by a cache of exactly the size it needs, out of its
///                     memory resource. Or a `compressed_layer`, on either backend: written to; report.resident_bytes is
///                     then -1 and report.chosen empty, `destination.report` and the directory have them
/// \return     the report, in absolute units
/// \cost   the sum of the stages; scratch O(H*R*N + H*D*D); allocates the new cache of an owner and nothing else
/// \sync   returns when done (cpu); enqueued on the stream, fit for graph capture (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads
/// \throws invalid_argument        shapes disagree; the budget is below the window or the cheapest rungs (naming the
///                                 least budget that works); quotas exceed the budget. A compressed_layer's layout or
///                                 arena does not fit; options.on_non_finite is not unchecked on a GPU, where looking for
///                                 NaNs would wait: ask expects_finite before. Errors that only the device's data show
///                                 are in `destination.report` (allocation_status): losses that are not finite, a limit
///                                 below the cheapest rungs; where quotas exceed the arena, pack stores no token
/// \throws non_finite_input        naming layer, head and row
/// \throws insufficient_workspace  naming the size needed
/// \throws std::bad_alloc          and whatever the executor throws. Nothing was changed in any case
/// \see    tests/compress.cpp, examples/engine_hook.cpp, examples/gpu_pipeline.cu
template <backend B, element T, element U, class Destination>
compress_report compress(B const& on, layer_view<B, T, U> const& layer, ratio_set const& ratios,
    compress_options<B> const& options, Destination& destination)
{
    index_t const heads = layer.keys.extent(0);
    index_t const rows  = layer.queries.extent(0);
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
    if (options.quotas) { c.in("options.quotas", *options.quotas, {{heads}}, "H"); }
    if (options.losses)
    {
        auto const rungs = static_cast<index_t>(ratios.size());
        c.in("options.losses", *options.losses, {{heads, rungs, shape.tokens}}, "H,R,N");
    }
    if (options.rungs) { c.out("options.rungs", *options.rungs, {{heads, shape.tokens}}, "H,N"); }
    rung_costs const costs{ratios, shape.dims, shape.element_bytes};
    expects(B::memory_space == space::host || options.on_non_finite == non_finite::unchecked,
        "compress: on the GPU options.on_non_finite must be unchecked; "
        "ask expects_finite first, which waits for the device");
    return detail::staged(on, "compress", [&](B const& stages) {
        return detail::compress_layer(stages, layer, ratios, costs, options, shape, destination);
    });
}

} // namespace mdkv
