/// \file recompress.cuh: recompress on the GPU: stored tokens read back, scored, allocated and packed anew; what keeps its rung is copied as it was written.
#pragma once

#include <mdkv/recompress.hpp>

#include <mdkv/allocate.hpp>
#include <mdkv/basis.hpp>
#include <mdkv/cache.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/stored_slots.hpp>
#include <mdkv/gpu/allocate.cuh>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/cache.cuh>
#include <mdkv/gpu/detail/fill.cuh>
#include <mdkv/gpu/detail/recompress_copy.cuh>
#include <mdkv/gpu/detail/recompress_layer.cuh>
#include <mdkv/gpu/detail/recompress_slots.cuh>
#include <mdkv/gpu/finite.cuh>
#include <mdkv/gpu/launch.cuh>
#include <mdkv/gpu/pack.cuh>
#include <mdkv/gpu/slots.cuh>

#include <cstddef>
#include <utility>

namespace mdkv::gpu
{

namespace detail
{

/// Chooses the new rungs into `layer.rung`, and waits for what was chosen.
/// \throws non_finite_input   something that would be scored is not finite
template <element T, std::size_t R>
[[nodiscard]] allocation choose_rungs(backend const& on, stored_layer<T> const& layer, in_view<T, 3, backend> queries,
    ratio_set<R> const& ratios, recompress_options<backend> const& options, layer_shape const& shape, index_t limit,
    workspace::frame& frame)
{
    index_t const H    = shape.heads;
    index_t const M    = shape.tokens;
    auto const R_count = static_cast<index_t>(ratios.size());
    bool const pooled  = !options.pooling.copies();
    auto const loss    = out(on, frame.take<float>(H * R_count * M), H, R_count, M);
    auto const smooth  = out(on, frame.take<float>(pooled ? H * R_count * M : 0), pooled ? H : 0, R_count, M);
    auto* const limits = frame.take<index_t>(1);
    auto const reports = out(on, frame.take<allocation>(1), 1);
    bool const real    = frame.ready();
    expects_finite(on, "recompress: queries", queries);
    expects_finite(on, "recompress: keys by slot", as_input(layer.keys));
    expects_finite(on, "recompress: values by slot", as_input(layer.values));
    expects_finite(on, "recompress: window keys", as_input(layer.window_keys));
    score_stored(on, layer, queries, ratios, options, loss, smooth);
    if (real) { launch(on, kernels::fill<index_t>{out(on, limits, 1, 1), limit}, 1); }
    allocate(on, as_input(loss), rung_costs{ratios, shape.dims, shape.element_bytes}, in(on, limits, 1),
        options.allocation, layer.rung, reports);
    allocation chosen;
    if (!real) { return chosen; }
    read_back(on, reports.data_handle(), &chosen, index_t{sizeof(chosen)});
    expects<non_finite_input>(chosen.status != allocation_status::non_finite_loss,
        "recompress: a loss is NaN or infinite; stored vectors or queries are too large to multiply");
    return chosen;
}

/// Waits for the stream, however the call ends: until then what was enqueued works on memory that is given back.
struct wait_at_end
{
    backend on;

    explicit wait_at_end(backend const& on_)
        : on{on_}
    {}
    ~wait_at_end()
    {
        try
        {
            read_back(on, nullptr, nullptr, 0);
        }
        catch (...) // where the device has failed, nothing works on that memory any more
        {}
    }
    wait_at_end(wait_at_end const&)            = delete;
    wait_at_end& operator=(wait_at_end const&) = delete;
};

/// Tokens of all heads, from the counts and the directory.
template <element T>
void report_tokens(recompress_report& report, stored_layer<T> const& layer, counted_rungs const& counted)
{
    mdkv::detail::stored_slots const& slots = layer.slots;
    report.chosen.tokens                    = {};
    for (index_t h = 0; h < slots.layout.heads; ++h)
    {
        rung_counts const tokens = counted.tokens(h);
        for (std::size_t r = 0; r < slots.layout.rungs; ++r) { report.chosen.tokens[r] += tokens[r]; }
        report.chosen.tokens[0] -= slots.most - slots.tokens(h); // what pads the shorter heads
    }
    report.kept = counted.kept;
    for (std::size_t r = 0; r < slots.layout.rungs; ++r)
    {
        (slots.layout.key_coordinates[r] == 0 ? report.dropped : report.lowered) += report.chosen.tokens[r];
    }
    report.lowered -= counted.kept; // what was dropped is not among them
}

} // namespace detail

/// Sizes depend on what the directory says, which the host has read; everything else stays on the device but the counts of
/// every rung, which the new cache is made from. Query weights that are negative or not finite cannot be seen here: the
/// losses that they spoil are refused. The cache keeps its stream.
/// \throws invalid_argument   besides what recompress names: queries are not aligned to their elements
template <element T, std::size_t R, class Resource>
recompress_report recompress_impl(backend const& on, in_view<T, 3, backend> queries, ratio_set<R> const& ratios,
    recompress_options<backend> const& options, layer_shape const& shape, cache_view<T, space::host> const& directory,
    cache<T, Resource>& destination)
{
    detail::stored_layer<T> layer{mdkv::detail::stored_slots{directory,
                                      cache_layout{ratios, shape.heads, shape.window, shape.dims}, shape.tokens},
        destination.view(), ratios.widest_projection(shape.dims.keys) > 0};
    cache_layout const& layout = layer.slots.layout;
    if (!on.scratch->counting()) // so that a workspace too small for the last stage is refused before the first
    {
        workspace all;
        static_cast<void>(
            recompress_impl(backend{on.stream, &all}, queries, ratios, options, shape, directory, destination));
        expects<insufficient_workspace>(all.bytes() <= on.scratch->free_memory().size(),
            "recompress: the workspace holds ", on.scratch->free_memory().size(), " bytes, ", all.bytes(),
            " are needed");
    }
    workspace::frame frame{*on.scratch, "recompress"};
    layer.take(frame, on);
    bool const real     = frame.ready();
    auto const write_to = [&](cache_view<T, space::device> const& made) {
        pack(on, as_input(layer.keys), as_input(layer.values), as_input(layer.window_keys),
            as_input(layer.window_values), key_bases<backend>{as_input(layer.of_keys), as_input(layer.of_queries)},
            as_input(layer.of_values), as_input(layer.rung), made);
    };

    recompress_report report;
    report.limit_bytes  = options.limit.in_bytes(shape);
    report.window_bytes = shape.window_bytes();
    if (real) { layer.read(on); }
    bool const everything = real && layer.bytes_as_stored() <= report.limit_bytes; // stays as it is
    if (!everything)
    {
        workspace::frame choosing{*on.scratch, "recompress"};
        report.chosen = detail::choose_rungs(
            on, layer, queries, ratios, options, shape, report.limit_bytes - report.window_bytes, choosing);
    }
    list_slots(on, as_input(layer.rung), layer.listed, layer.first);
    if (!real)
    {
        cache_view<T, space::device> made;
        made.layout = layout;
        write_to(made);
        return report;
    }

    detail::counted_rungs const counted{on, layer};
    index_t const bytes = detail::laid_out_bytes<T>(layout, [&](index_t h) { return counted.tokens(h); });
    cache<T, Resource> made{layout, bytes, destination.tail_capacity(), destination.stream(), destination.resource()};
    detail::wait_at_end const over{on};
    if (destination.stream() != on.stream) { order_streams(destination.stream(), on.stream); }
    write_to(made.view());
    kernels::copy_stored<T> const copy{
        layer.on_device(), layer.cache, made.view(), as_input(layer.listed), as_input(layer.first)};
    launch(on, copy, copy.blocks());
    report.resident_bytes = bytes;
    report.released       = shape.heads * layer.slots.appended;
    detail::report_tokens(report, layer, counted);
    if (everything) { mdkv::detail::report_everything_kept(report, ratios, shape); }
    if (options.sources)
    {
        kernels::list_sources const list{
            layer.on_device(), as_input(layer.listed), as_input(layer.first), *options.sources};
        launch(on, list, list.blocks());
    }
    read_back(on, nullptr, nullptr, 0); // what failed so far is thrown before anything is replaced
    destination = std::move(made);
    return report;
}

} // namespace mdkv::gpu
