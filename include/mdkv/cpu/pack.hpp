/// \file pack.hpp: pack on the CPU: counts, lays out, then writes every head's projections and runs (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/pack.hpp>

#include <mdkv/basis.hpp>
#include <mdkv/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/detail/pack_tile.hpp>
#include <mdkv/cpu/detail/quantised_tile.hpp>
#include <mdkv/cpu/detail/rungs.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace mdkv::cpu
{

namespace detail
{

/// One call of pack.
template <element T>
struct pack_job
{
    in_view<T, 3, backend> keys;
    in_view<T, 3, backend> values;
    in_view<T, 3, backend> window_keys;
    in_view<T, 3, backend> window_values;
    key_bases<backend> key_basis;
    in_view<float, 3, backend> value_basis;
    in_view<std::uint8_t, 2, backend> rung;
    cache_view<T, space::host> cache;

    template <class View>
    [[nodiscard]] static auto row(View const& view, index_t h, index_t t)
    {
        return view.data_handle() + view.mapping()(h, t, 0);
    }

    [[nodiscard]] T* at(index_t offset) const { return reinterpret_cast<T*>(cache.arena + offset); }

    /// Collects tokens and calls flush(keys, values, tile) for every sixteen of them and for what is left.
    template <class Flush>
    struct gatherer
    {
        Flush flush;
        token_rows<T> keys{};
        token_rows<T> values{};
        index_t tile = 0;

        void add(T const* key, T const* value)
        {
            auto const at  = static_cast<std::size_t>(keys.count);
            keys.row[at]   = key;
            values.row[at] = value;
            values.count   = ++keys.count;
            if (keys.count == tile_tokens) { finish(); }
        }

        void finish()
        {
            if (keys.count == 0) { return; }
            auto const last = static_cast<std::size_t>(keys.count) - 1;
            std::fill(keys.row.begin() + keys.count, keys.row.end(), keys.row[last]);
            std::fill(values.row.begin() + keys.count, values.row.end(), values.row[last]);
            flush(keys, values, tile++);
            keys.count = values.count = 0;
        }
    };
    template <class Flush>
    gatherer(Flush) -> gatherer<Flush>;

    void write_projections(index_t h) const
    {
        head_entry const& entry = cache.heads[h];
        head_dims const dims    = cache.layout.dims;
        for (index_t c = 0; c < entry.key_columns; ++c)
        {
            float const* const direction = row(key_basis.of_queries, h, c);
            for (index_t d = 0; d < dims.keys; ++d)
            {
                narrow_row(direction + d, at(entry.key_projection) + d * entry.key_columns + c, 1);
            }
        }
        for (index_t c = 0; c < entry.value_columns; ++c)
        {
            narrow_row(row(value_basis, h, c), at(entry.value_projection) + c * dims.values, dims.values);
        }
    }

    /// Calls write(keys, values, first) for every tile of the tokens at rung r; `first` is its first token's place in the
    /// run.
    template <class Write>
    void for_tiles(index_t h, std::size_t r, Write const& write) const
    {
        gatherer gather{
            [&](token_rows<T> const& k, token_rows<T> const& v, index_t tile) { write(k, v, tile * tile_tokens); }};
        for_tokens_at(rung.data_handle() + rung.mapping()(h, 0), keys.extent(1), r,
            [&](index_t t) { gather.add(row(keys, h, t), row(values, h, t)); });
        gather.finish();
    }

    void write_projected(index_t h, std::size_t r) const
    {
        run_entry const& run     = cache.heads[h].runs[r];
        cache_layout const& form = cache.layout;
        index_t const rk         = form.key_coordinates[r];
        index_t const rv         = form.value_coordinates[r];
        auto const& basis        = key_basis.of_keys;
        for_tiles(h, r, [&](token_rows<T> const& k, token_rows<T> const& v, index_t first) {
            write_projected_keys(
                k, form.dims.keys, row(basis, h, 0), basis.mapping().stride(1), rk, at(run.keys) + first * rk);
            write_projected_values(v, form.dims.values, row(value_basis, h, 0), value_basis.mapping().stride(1), rv,
                at(run.values) + first * rv);
        });
    }

    void write_coded(index_t h, std::size_t r) const
    {
        run_entry const& run     = cache.heads[h].runs[r];
        cache_layout const& form = cache.layout;
        storage const kind       = form.kinds[r];
        bool const in_basis      = form.projected(r);
        auto const& basis        = key_basis.of_keys;
        for_tiles(h, r, [&](token_rows<T> const& k, token_rows<T> const& v, index_t first) {
            write_coded_tile(k, form.dims.keys, in_basis ? row(basis, h, 0) : nullptr, basis.mapping().stride(1),
                form.key_coordinates[r], kind, code_order::by_coordinate,
                cache.arena + run.keys + first * form.key_bytes(r, sizeof(T)));
            write_coded_tile(v, form.dims.values, in_basis ? row(value_basis, h, 0) : nullptr,
                value_basis.mapping().stride(1), form.value_coordinates[r], kind, code_order::by_token,
                cache.arena + run.values + first * form.value_bytes(r, sizeof(T)));
        });
    }

    /// The tokens at the full rung, then the window.
    void write_exact(index_t h) const
    {
        run_entry const& run     = cache.heads[h].exact;
        cache_layout const& form = cache.layout;
        if (run.tokens == 0) { return; }
        gatherer gather{[&](token_rows<T> const& k, token_rows<T> const& v, index_t tile) {
            index_t const first = tile * tile_tokens;
            write_key_tile(k, form.dims.keys, at(run.keys) + first * form.dims.keys);
            write_value_rows(v, form.dims.values, at(run.values) + first * form.dims.values);
        }};
        if (form.full_rung < form.rungs)
        {
            for_tokens_at(rung.data_handle() + rung.mapping()(h, 0), keys.extent(1), form.full_rung,
                [&](index_t t) { gather.add(row(keys, h, t), row(values, h, t)); });
        }
        for (index_t t = 0; t < form.window; ++t) { gather.add(row(window_keys, h, t), row(window_values, h, t)); }
        gather.finish();
    }

    /// Work item `piece` of head h: a rung's own run, the exact run, or the projections.
    void write(index_t h, std::size_t piece) const
    {
        cache_layout const& form = cache.layout;
        if (piece == form.rungs) { write_exact(h); }
        else if (piece == form.rungs + 1) { write_projections(h); }
        else if (!form.own_run(piece) || cache.heads[h].runs[piece].tokens == 0) { return; }
        else if (form.kinds[piece] == storage::plain) { write_projected(h, piece); }
        else { write_coded(h, piece); }
    }
};

/// Lays out every head, calls body(h, entry, tokens at each rung), and returns the bytes of the arena.
/// \throws invalid_argument   a rung is unknown
template <element T, class Body>
index_t lay_out(char const* stage, in_view<std::uint8_t, 2, backend> rung, cache_layout const& layout, Body const& body)
{
    index_t bytes = 0;
    for (index_t h = 0; h < layout.heads; ++h)
    {
        expects_rungs(stage, rung, h, layout.rungs);
        ::cuda::std::array<index_t, max_rungs> const tokens = count_rungs(rung, h, layout.rungs);
        head_entry entry;
        bytes = lay_out_head<T>(layout, tokens, bytes, entry);
        body(h, entry, tokens);
    }
    return bytes;
}

} // namespace detail

template <element T>
[[nodiscard]] index_t packed_bytes_impl(
    backend const&, in_view<std::uint8_t, 2, backend> rung, cache_layout const& layout, T)
{
    return detail::lay_out<T>("packed_bytes", rung, layout, [](auto const&...) {});
}

template <element T>
void pack_impl(backend const& on, in_view<T, 3, backend> keys, in_view<T, 3, backend> values,
    in_view<T, 3, backend> window_keys, in_view<T, 3, backend> window_values, key_bases<backend> const& key_basis,
    in_view<float, 3, backend> value_basis, in_view<std::uint8_t, 2, backend> rung,
    cache_view<T, space::host> const& cache)
{
    if (on.scratch->counting()) { return; }
    cache_layout const& layout = cache.layout;
    bool const bases =
        key_basis.of_keys.extent(0) > 0 && key_basis.of_queries.extent(0) > 0 && value_basis.extent(0) > 0;
    index_t const bytes =
        detail::lay_out<T>("pack", rung, layout, [&](index_t h, head_entry const&, auto const& tokens) {
            for (std::size_t r = 0; r < layout.rungs; ++r)
            {
                expects(bases || !layout.projected(r) || tokens[r] == 0, "pack: head ", h, " has ", tokens[r],
                    " tokens at projected rung ", r, ", but key_basis or value_basis is empty");
            }
        });
    expects<insufficient_workspace>(
        bytes <= cache.arena_bytes, "pack: the arena holds ", cache.arena_bytes, " bytes, ", bytes, " are needed");
    detail::lay_out<T>(
        "pack", rung, layout, [&](index_t h, head_entry const& entry, auto const&) { cache.heads[h] = entry; });
    if (cache.appended != nullptr) { *cache.appended = 0; }
    detail::pack_job<T> const job{keys, values, window_keys, window_values, key_basis, value_basis, rung, cache};
    auto const pieces = static_cast<index_t>(layout.rungs) + 2;
    on.for_each(layout.heads * pieces,
        [&](index_t i, index_t) { job.write(i / pieces, static_cast<std::size_t>(i % pieces)); });
}

} // namespace mdkv::cpu
