/// \file recompress.hpp: recompress on the CPU: stored tokens read back, scored, allocated and packed anew; what keeps its rung is copied as it was written.
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
#include <mdkv/cpu/allocate.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/detail/read_stored.hpp>
#include <mdkv/cpu/detail/rungs.hpp>
#include <mdkv/cpu/detail/stored_layer.hpp>
#include <mdkv/cpu/detail/stored_tokens.hpp>
#include <mdkv/cpu/finite.hpp>
#include <mdkv/cpu/pack.hpp>
#include <mdkv/cpu/pool.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/pool.hpp>
#include <mdkv/score.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace mdkv::cpu
{

namespace detail
{

/// Losses of what is stored: 0 where a token stays as it is, and at every rung of what pads the shorter heads. A rung above
/// a token's own, or one that its head cannot read, loses as much as none, so that nobody pays for it.
template <element T, std::size_t R>
void score_stored(backend const& on, stored_layer<T> const& layer, in_view<T, 3, backend> queries,
    ratio_set<R> const& ratios, recompress_options<backend> const& options, out_view<float, 3, backend> loss,
    out_view<float, 3, backend> smooth)
{
    cache_layout const& layout  = layer.layout;
    auto const [dim, value_dim] = layout.dims;
    index_t const heads         = layout.heads;
    index_t const group         = queries.extent(0) / heads;
    bool const dry              = on.scratch->counting();
    bool const pooled           = !options.pooling.copies();
    auto const keys             = in(on, layer.keys, heads, layer.most, dim);
    auto const values           = in(on, layer.values, heads, layer.most, value_dim);
    auto const window_keys      = in(on, layer.window_keys, heads, layout.window, dim);
    score_options<backend> const scoring{
        .scale = options.scale, .query_weights = options.query_weights, .quantisation = options.quantisation};
    if (!dry) { std::fill_n(loss.data_handle(), heads * loss.extent(1) * layer.most, 0.0F); }
    for (index_t h = 0; h < heads; ++h)
    {
        index_t const n       = layer.tokens(h);
        stored_bases const b  = layer.bases_of(h);
        index_t const present = layer.bases ? 1 : 0;
        auto const own        = slice<2>(slice<0>(loss, h, 1), 0, n);
        score(on, slice<0>(queries, h * group, group), slice<1>(slice<0>(keys, h, 1), 0, n),
            slice<1>(slice<0>(values, h, 1), 0, n), slice<0>(window_keys, h, 1),
            key_bases<backend>{in(on, b.of_keys, present, dim, dim), in(on, b.of_queries, present, dim, dim)},
            in(on, b.values, present, value_dim, value_dim), ratios, scoring, own);
        if (pooled)
        {
            auto const to = slice<0>(smooth, h, 1);
            layer.for_stretches(h, [&](index_t first, index_t count) {
                pool(on, as_input(slice<2>(own, first, count)), options.pooling, slice<2>(to, first, count));
            });
        }
        for (index_t t = 0; t < n && !dry; ++t)
        {
            std::size_t const stays = layer.own_rung(h, t);
            bool const exact        = t >= layer.first_exact(h);
            for (std::size_t r = 0; r < ratios.size(); ++r)
            {
                auto const i       = static_cast<index_t>(r);
                float const wanted = pooled ? smooth(h, i, t) : loss(h, i, t);
                bool const kept    = exact ? r == layout.full_rung : r == stays;
                bool const closed  = r > stays || !layer.open(h, r);
                loss(h, i, t)      = kept ? 0.0F : closed ? loss(h, 0, t) : wanted;
            }
        }
    }
}

/// Copies what a run of the new cache can take from the old one without reading it: tokens whose rung is as it was, and
/// plain coordinates that some have been cut off from.
template <element T>
void copy_stored(backend const& on, stored_layer<T> const& layer, in_view<std::uint8_t, 2, backend> rung,
    cache_view<T, space::host> const& made)
{
    cache_layout const& layout = layer.layout;
    cache_layout const& before = layer.cache.layout;
    auto const rungs           = static_cast<index_t>(layout.rungs);
    on.for_each(layout.heads * rungs, [&](index_t item, index_t) {
        index_t const h = item / rungs;
        auto const r    = static_cast<std::size_t>(item % rungs);
        if (!layout.own_run(r)) { return; }
        stored_run const to = run_of(made, h, r);
        index_t place       = 0;
        for_tokens_at(rung.data_handle() + rung.mapping()(h, 0), layer.tokens(h), r, [&](index_t t) {
            stored_token const from = token_at(layer.cache, h, t);
            bool const cut          = from.rung < before.rungs && before.in_basis[from.rung] && layout.in_basis[r]
                             && from.run.keys.kind == storage::plain && layout.kinds[r] == storage::plain;
            if (cut || (from.rung < before.rungs && layer.same[from.rung] == r))
            {
                copy_token<T>(from.run, from.place, to, place);
            }
            ++place;
        });
    });
}

/// The old slot of every new one.
template <element T>
void list_sources(stored_layer<T> const& layer, in_view<std::uint8_t, 2, backend> rung,
    out_view<std::int32_t, 2, backend> const& sources)
{
    cache_layout const& layout = layer.layout;
    for (index_t h = 0; h < layout.heads; ++h)
    {
        index_t const n = layer.tokens(h);
        index_t next    = 0;
        auto const add  = [&](index_t slot) { sources(h, next++) = static_cast<std::int32_t>(slot); };
        auto const list = [&](std::size_t r) { for_tokens_at(rung.data_handle() + rung.mapping()(h, 0), n, r, add); };
        for (std::size_t r = 0; r < layout.rungs; ++r)
        {
            if (layout.own_run(r)) { list(r); }
        }
        if (layout.full_rung < layout.rungs) { list(layout.full_rung); }
        for (index_t t = n; t < n + layout.window; ++t) { add(t); }
        while (next < sources.extent(1)) { add(-1); }
    }
}

} // namespace detail

template <element T, std::size_t R>
recompress_report recompress_impl(backend const& on, in_view<T, 3, backend> queries, ratio_set<R> const& ratios,
    recompress_options<backend> const& options, layer_shape const& shape, cache_view<T, space::host> const& directory,
    cache<T>& destination)
{
    index_t const H    = shape.heads;
    auto const R_count = static_cast<index_t>(ratios.size());
    bool const pooled  = !options.pooling.copies();
    detail::stored_layer<T> layer{directory, cache_layout{ratios, H, shape.window, shape.dims}, shape.tokens,
        ratios.widest_projection(shape.dims.keys) > 0};

    if (!on.scratch->counting()) // so that a workspace too small for the last stage is refused before the first
    {
        workspace all;
        static_cast<void>(
            recompress_impl(backend{&all, on.executor}, queries, ratios, options, shape, directory, destination));
        expects<insufficient_workspace>(all.bytes() <= on.scratch->free_memory().size(),
            "recompress: the workspace holds ", on.scratch->free_memory().size(), " bytes, ", all.bytes(),
            " are needed");
    }
    workspace::frame frame{*on.scratch, "recompress"};
    layer.take(frame, on);
    auto const rung = out(on, frame.take<std::uint8_t>(H * layer.most), H, layer.most);
    auto const loss = out(on, frame.take<float>(H * R_count * layer.most), H, R_count, layer.most);
    auto const smooth =
        out(on, frame.take<float>(pooled ? H * R_count * layer.most : 0), pooled ? H : 0, R_count, layer.most);
    auto const limits  = out(on, frame.take<index_t>(1), 1);
    auto const reports = out(on, frame.take<allocation>(1), 1);
    bool const real    = frame.ready();

    recompress_report report;
    report.limit_bytes  = options.limit.in_bytes(shape);
    report.window_bytes = shape.window_bytes();
    bool everything     = false; // stays as it is
    if (real)
    {
        layer.read(on);
        for (index_t h = 0; h < H; ++h)
        {
            for (index_t t = 0; t < layer.most; ++t)
            {
                rung(h, t) = static_cast<std::uint8_t>(t < layer.tokens(h) ? layer.own_rung(h, t) : 0);
            }
        }
        everything = packed_bytes<T>(on, as_input(rung), layer.layout) <= report.limit_bytes;
    }
    if (!everything)
    {
        expects_finite(on, "recompress: queries", queries);
        expects_finite(on, "recompress: keys by slot", in(on, layer.keys, H, layer.most, shape.dims.keys));
        expects_finite(on, "recompress: values by slot", in(on, layer.values, H, layer.most, shape.dims.values));
        expects_finite(on, "recompress: window keys", in(on, layer.window_keys, H, shape.window, shape.dims.keys));
        detail::score_stored(on, layer, queries, ratios, options, loss, smooth);
        if (real) { limits(0) = report.limit_bytes - report.window_bytes; }
        allocate(on, as_input(loss), rung_costs{ratios, shape.dims, shape.element_bytes}, as_input(limits),
            options.allocation, rung, reports);
        if (real) { report.chosen = reports(0); }
        expects<non_finite_input>(report.chosen.status != allocation_status::non_finite_loss,
            "recompress: a loss is NaN or infinite; stored vectors or queries are too large to multiply");
    }
    if (!real) { return report; }

    auto const bases_of = [&](float const* data, index_t dim) { return in(on, data, layer.bases ? H : 0, dim, dim); };
    cache<T> made{layer.layout, packed_bytes<T>(on, as_input(rung), layer.layout), destination.tail_capacity(),
        destination.resource()};
    pack(on, in(on, layer.keys, H, layer.most, shape.dims.keys), in(on, layer.values, H, layer.most, shape.dims.values),
        in(on, layer.window_keys, H, shape.window, shape.dims.keys),
        in(on, layer.window_values, H, shape.window, shape.dims.values),
        key_bases<backend>{bases_of(layer.of_keys, shape.dims.keys), bases_of(layer.of_queries, shape.dims.keys)},
        bases_of(layer.of_values, shape.dims.values), as_input(rung), made.view());
    detail::copy_stored(on, layer, as_input(rung), made.view());

    report.resident_bytes = made.arena_bytes();
    report.released       = H * destination.appended();
    report.chosen.tokens  = {};
    for (index_t h = 0; h < H; ++h)
    {
        for (index_t t = 0; t < layer.tokens(h); ++t)
        {
            bool const stays = layer.stays(h, t, rung(h, t));
            ++report.chosen.tokens[rung(h, t)];
            ++(stays ? report.kept : layer.layout.key_coordinates[rung(h, t)] == 0 ? report.dropped : report.lowered);
        }
    }
    if (everything) { mdkv::detail::report_everything_kept(report, ratios, shape); }
    if (options.sources) { detail::list_sources(layer, as_input(rung), *options.sources); }
    destination = std::move(made);
    return report;
}

} // namespace mdkv::cpu
