/// \file compressing.hpp: one call of compress: bases, losses, rungs, and the packed cache (arXiv 2603.20616, sections 4, 5).
#pragma once

#include <mdkv/compress.hpp>

#include <mdkv/core/budget.hpp>
#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/ranks.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/engine/finite.hpp>
#include <mdkv/stages/allocate.hpp>
#include <mdkv/stages/basis.hpp>
#include <mdkv/stages/channels.hpp>
#include <mdkv/stages/pack.hpp>
#include <mdkv/stages/pool.hpp>
#include <mdkv/stages/score.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace MDKV_NAMESPACE::detail
{

/// The report of a layer that is stored uncompressed. An item is a limit.
template <space S>
struct report_whole
{
    static constexpr char const* name = "report_whole";
    static constexpr int threads      = 32;

    view<allocation, 1, S> report;   // [limits]
    allocation value;                ///< report without its limit
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
        total.status     = (std::max)(total.status, reports(i).status);
        total.multiplier = (std::max)(total.multiplier, reports(i).multiplier);
        total.loss += reports(i).loss;
        total.dual += reports(i).dual;
        total.limit += reports(i).limit;
        total.token_bytes += reports(i).token_bytes;
        total.charged_bytes += reports(i).charged_bytes;
        for (std::size_t r = 0; r < max_rungs; ++r) { total.tokens[r] += reports(i).tokens[r]; }
    }
    return total;
}

/// One call of compress behind its checks. A dry run only counts memory.
template <backend B, element T, element U, class Destination>
compress_report compress_layer(B const& on, layer_view<B, T, U> const& layer, ratio_set const& ratios,
    rung_costs const& costs, compress_options<B> const& options, layer_shape const& shape,
    agreement<B::memory_space>& agreed, Destination& destination)
{
    constexpr space S    = B::memory_space;
    constexpr bool owner = requires { destination.view(); };
    static_assert(!owner || S == space::host,
        "compress: on a GPU the destination is a compressed_layer, whose memory the caller has made");
    auto const [H, N]  = std::pair{shape.heads, shape.tokens};
    auto const [D, Dv] = shape.dims;
    layer_shape all    = shape; ///< the layer on all ranks
    all.heads          = number_heads(on, "compress", H, 0).place.heads;
    compress_report report;
    report.shape        = shape;
    report.full_bytes   = shape.full_bytes();
    report.window_bytes = shape.window_bytes();
    report.budget_bytes = options.limit.in_bytes(all);
    bool const whole    = N == 0 || report.budget_bytes >= all.full_bytes();
    index_t const spend = report.budget_bytes - all.window_bytes();
    expects(spend >= 0, "compress: a budget of ", report.budget_bytes, " bytes cannot hold the window of ",
        shape.window, " tokens; at least ", all.window_bytes(), " bytes are needed");
    if (whole) { report.status = compress_status::uncompressed; }
    if (options.on_non_finite == non_finite::error)
    {
        expects_finite(on, "queries", layer.queries, options.layer);
        expects_finite(on, "window_keys", layer.window_keys, options.layer);
        expects_finite(on, "window_values", layer.window_values, options.layer);
        expects_finite(on, "keys", layer.keys, options.layer);
        expects_finite(on, "values", layer.values, options.layer);
    }

    cache_layout layout{ratios, H, shape.window, shape.dims, options.scoring.scale};
    bool const no_rung       = whole && layout.full_rung == layout.rungs; ///< no rung of the set is uncompressed
    allocation* given_report = nullptr;
    cache_view<T, S> to;
    if constexpr (owner)
    {
        if (no_rung) { layout = {evict_ratios, H, shape.window, shape.dims, layout.scale}; } // stored as eviction would
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
        to                   = destination.cache;
        given_report         = destination.report;
        index_t const most   = H * (costs.widest_projection() + costs.channels + N * costs.bytes[costs.size() - 1]);
        index_t const needed = whole                     ? report.full_bytes
                               : ranks_of(on) != nullptr ? (std::min)(report.budget_bytes, report.window_bytes + most)
                                                         : report.budget_bytes;
        expects(to.layout.scale == layout.scale, "compress: destination.cache.layout.scale is ", to.layout.scale,
            "; options.scoring.scale is ", layout.scale);
        expects(to.layout == layout,
            "compress: destination.cache.layout is not that of the ratio set, heads, window and dimensions");
        expects(to.arena_bytes >= needed, "compress: destination.cache.arena_bytes is ", to.arena_bytes,
            "; the budget may take ", needed);
        expects(!no_rung, "compress: the budget holds the whole layer, and the ratio set has no rung 1 to store it at");
        report.resident_bytes = -1;
    }

    auto const rungs     = static_cast<index_t>(ratios.size());
    index_t const bases  = !whole && ratios.any_projected() ? H : 0;
    index_t const scored = whole || options.losses ? 0 : H;
    index_t const fitted = !whole && ratios.any_rotated() && !options.scoring.channels ? H : 0;
    index_t const pooled = whole || options.pooling.copies() ? 0 : H;
    index_t const limits = options.quotas ? H : 1;
    workspace::frame frame{*on.scratch, "compress"};
    auto const rung        = scratch_view<std::uint8_t>(on, frame, H, N);
    auto const key_basis   = scratch_view<float>(on, frame, bases, D, D);
    auto const value_basis = scratch_view<float>(on, frame, bases, Dv, Dv);
    auto const energy      = scratch_view<float>(on, frame, bases, (std::max)(D, Dv));
    auto const channels    = scratch_view<float>(on, frame, fitted, 3, D);
    auto const loss        = scratch_view<float>(on, frame, scored, rungs, N);
    auto const smooth      = scratch_view<float>(on, frame, pooled, rungs, N);
    auto const shared      = scratch_view<index_t>(on, frame, 1);
    auto const own         = scratch_view<allocation>(on, frame, limits);
    auto const reports     = given_report != nullptr ? out(on, given_report, limits) : own;
    bool const real        = frame.ready();

    if (real && agreed.open())
    {
        auto const& by      = options.scoring;
        auto const& weights = by.query_weights;
        agreed.settle("compress",
            array<shared_number, 15>{
                {{"number N of tokens", N}, {"number W of window tokens", shape.window}, {"dimension D of keys", D},
                    {"dimension Dv of values", Dv}, {"element type (1 float, 2 half, 3 bfloat16)", element_code<T>},
                    shared_number::hash("ratios", hash_of(ratios)), {"options.pooling.width", options.pooling.width},
                    {"options.pooling.kind", options.pooling.kind},
                    {"options.allocation.charge", options.allocation.charge}, {"options.scoring.scale", by.scale},
                    {"options.scoring.norm", by.norm},
                    shared_number::hash("options.scoring.query_weights", weights ? hash_of(on, *weights) : 0),
                    {"options.scoring.even_queries", by.even_queries}, {"options.quotas", options.quotas.has_value()},
                    {"options.limit in bytes", report.budget_bytes}}});
    }
    run(on, fill<index_t>{shared.data_handle(), spend, 1});
    in_view<index_t, 1, B> const limit = options.quotas ? *options.quotas : as_input(shared);
    if (whole)
    {
        run(on, fill<std::uint8_t>{rung.data_handle(), static_cast<std::uint8_t>(layout.full_rung), H * N});
        allocation chosen;
        chosen.status       = allocation_status::everything_kept;
        index_t const heads = options.quotas ? 1 : all.heads;
        chosen.token_bytes  = heads * N * shape.token_bytes();
        if (layout.full_rung < layout.rungs) { chosen.tokens[layout.full_rung] = heads * N; }
        run(on, report_whole<S>{reports, chosen, limit}, limits);
    }
    else
    {
        if (bases > 0)
        {
            fit_basis(on, layer.keys, key_basis, slice<1>(energy, 0, D));
            fit_basis(on, layer.values, value_basis, slice<1>(energy, 0, Dv));
        }
        if (fitted > 0) { fit_channels(on, layer.queries, layer.keys, channels); }
        if (!options.losses)
        {
            score_options<B> scoring = options.scoring;
            if (fitted > 0) { scoring.channels = as_input(channels); }
            score(on, layer.queries, layer.keys, layer.values, layer.window_keys, as_input(key_basis),
                as_input(value_basis), ratios, scoring, loss);
        }
        in_view<float, 3, B> const losses = options.losses ? *options.losses : as_input(loss);
        if (pooled > 0) { pool(on, losses, options.pooling, smooth); }
        allocate(options.quotas ? alone(on) : on, pooled > 0 ? as_input(smooth) : losses, costs, limit,
            options.allocation, rung, reports);
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
                all.window_bytes() + costs.least(all.heads, N), " bytes are needed");
        }
        report.resident_bytes = packed_bytes<T>(on, as_input(rung), layout);
        if (real)
        {
            made = destination.like(layout, report.resident_bytes, 0);
            to   = made.view();
        }
    }
    pack(on, layer.keys, layer.values, layer.window_keys, layer.window_values, as_input(key_basis),
        as_input(value_basis), as_input(rung), to, options.scoring.channels.value_or(as_input(channels)));
    if constexpr (owner)
    {
        if (real) { destination = std::move(made); }
        if (no_rung) // the caller receives rungs of the ratio set
        {
            report.chosen.tokens = {};
            run(on, fill<std::uint8_t>{rung.data_handle(), static_cast<std::uint8_t>(rungs), H * N});
        }
    }
    if (options.rungs)
    {
        out_view<std::uint8_t, 2, B> const& given = *options.rungs;
        run(on, copy_rows<B, std::uint8_t>{{rung.data_handle(), {1, H, N}, {0, N, 1}},
                    {given.data_handle(), {1, H, N}, {0, given.stride(0), 1}}});
    }
    return report;
}

} // namespace MDKV_NAMESPACE::detail
