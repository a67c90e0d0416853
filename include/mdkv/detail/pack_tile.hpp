/// \file pack_tile.hpp: the job that writes a packed cache: sixteen tokens of a run at a time, copied or projected or rotated, as elements or as codes (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/columns.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/detail/tile_codec.hpp>
#include <mdkv/detail/tile_loops.hpp>

#include <cstddef>
#include <cstdint>

namespace MDKV_NAMESPACE::detail
{

/// Writes the tiles of a cache, and beside them each head's projections.
template <element T, backend B>
struct pack_tiles
{
    static constexpr char const* name = "pack_tiles";
    static constexpr int threads      = 128;

    using walk_of_tiles          = tile_walk<T, B::memory_space, true>;
    using scratch                = typename walk_of_tiles::scratch;
    using tile_ref               = typename walk_of_tiles::tile_ref;
    static constexpr int tile    = walk_of_tiles::tile;
    static constexpr int at_once = walk_of_tiles::at_once;

    walk_of_tiles walk;
    in_view<T, 3, B> keys;                 // [H, N, D]
    in_view<T, 3, B> values;               // [H, N, Dv]
    in_view<T, 3, B> window_keys;          // [H, W, D]
    in_view<T, 3, B> window_values;        // [H, W, Dv]
    in_view<T, 3, B> stand_in_keys;        // [H, M, D]    read only if the walk goes over stand-ins
    in_view<T, 3, B> stand_in_values;      // [H, M, Dv]
    in_view<std::int32_t, 2, B> positions; // [H, N]    by rung, ascending
    in_view<index_t, 2, B> first;          // [H, R+1]  where each rung's positions begin
    in_view<std::uint8_t, 2, B> carried;   // [H, N]    1 for tokens copied afterwards; or empty

    [[nodiscard]] index_t items() const noexcept { return walk.items(); }
    [[nodiscard]] index_t scratch_bytes() const noexcept { return walk.scratch_bytes(); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        walk(
            t, item,
            [&](scratch const& memory, tile_ref const& ref) {
                if (!all_carried(ref)) { write_tile(t, memory, ref); }
            },
            [&](index_t h) { write_projections(t, h); });
    }

private:
    template <team Team>
    MDKV_HD void write_projections(Team const& t, index_t h) const
    {
        head_entry const& entry = walk.cache.heads[h];
        head_dims const dims    = walk.cache.layout.dims;
        auto const write        = [&](index_t begin, index_t i, float x) {
            store_at(walk.cache.arena + begin + i * index_t{sizeof(T)}, narrow<T>(x));
        };
        for (index_t i = t.rank(); i < dims.keys * entry.key_columns; i += t.size())
        {
            write(entry.key_projection, i, walk.key_basis(h, i % entry.key_columns, i / entry.key_columns));
        }
        for (index_t i = t.rank(); i < entry.value_columns * dims.values; i += t.size())
        {
            write(entry.value_projection, i, walk.value_basis(h, i / dims.values, i % dims.values));
        }
    }

    [[nodiscard]] MDKV_HD bool all_carried(tile_ref const& ref) const
    {
        if (carried.empty() || ref.r == walk.cache.layout.rungs) { return false; }
        index_t const begin = first(ref.h, static_cast<index_t>(ref.r)) + ref.first;
        int tokens          = 0;
        index_t const stored =
            slots_of_head(walk.cache, ref.h, ref.r).tokens - ref.first; // the tile's others are stand-ins
        while (tokens < ref.count && tokens < stored && carried(ref.h, positions(ref.h, begin + tokens)) != 0)
        {
            ++tokens;
        }
        return tokens == ref.count;
    }

    template <team Team>
    MDKV_HD void write_tile(Team const& t, scratch const& memory, tile_ref const& ref) const
    {
        auto const dim =
            static_cast<int>(ref.rows.by_token ? walk.cache.layout.dims.values : walk.cache.layout.dims.keys);
        t.sync(); // the tile before may still be read
        for (index_t i = t.rank(); i < tile; i += t.size())
        {
            memory.rows[i] = row_of(ref, ref.first + (i < ref.count ? i : ref.count - 1));
#if !defined(__CUDA_ARCH__) // the rows of a tile lie anywhere: a thread prefetches all before it reads the first
            for (int c = 0; c < dim; c += 64 / int{sizeof(T)}) { __builtin_prefetch(memory.rows[i] + c); }
#endif
        }
        t.sync();
        if (ref.r == walk.cache.layout.rungs) { return copy_exact(t, memory, ref); }
        bool const in_basis = ref.basis == run_basis::projected;
        auto const& basis   = ref.rows.by_token ? walk.value_basis : walk.key_basis;
        if (in_basis) { load(t, memory, 0, dim, memory.columns); }
        for (int c = 0; c < ref.rows.coordinates; c += at_once)
        {
            int const n = ref.rows.coordinates - c < at_once ? ref.rows.coordinates - c : at_once;
            if (!in_basis) { load(t, memory, c, n, memory.x); }
            else { turn_columns(t, memory.columns, tile, dim, basis, ref.h, false, c, n, memory.x); }
            if (ref.rows.kind == storage::plain) { write_elements(t, memory, ref, c, n); }
            else
            {
                if (ref.basis == run_basis::rotated) { rotate(t, memory.x, n, memory.mean + c, memory.factor + c); }
                write_codes(t, memory.x, ref.rows.group(ref.first, c / at_once), ref.count, memory.minimum,
                    memory.scale, ref.rows.begin + ref.rows.tile(ref.first));
            }
        }
    }

    /// Token i of the run, where the caller keeps it.
    [[nodiscard]] MDKV_HD T const* row_of(tile_ref const& ref, index_t i) const
    {
        cache_layout const& layout = walk.cache.layout;
        index_t const stored       = slots_of_head(walk.cache, ref.h, ref.r).tokens;
        index_t const window       = ref.r == layout.rungs ? stored - layout.window : stored;
        if (i >= stored) { return (ref.rows.by_token ? stand_in_values : stand_in_keys).row(ref.h, i - stored); }
        if (i >= window) { return (ref.rows.by_token ? window_values : window_keys).row(ref.h, i - window); }
        auto const r = static_cast<index_t>(ref.r == layout.rungs ? layout.full_rung : ref.r);
        return (ref.rows.by_token ? values : keys).row(ref.h, positions(ref.h, first(ref.h, r) + i));
    }

    template <team Team>
    MDKV_HD static void copy_exact(Team const& t, scratch const& memory, tile_ref const& ref)
    {
        std::byte* const to = ref.rows.begin + ref.rows.coordinate(ref.first, 0);
        int const step      = ref.rows.step(ref.first);
        int const apart     = ref.rows.by_token ? ref.rows.token_bytes : ref.rows.unit; // bytes from token to token
        bool const lines    = Team::lanes > 1 && ref.rows.by_token;                     // a thread copies them whole
        for (int i = 0; lines && i < ref.count; ++i)
        {
            __builtin_memcpy(to + i * apart, memory.rows[i], static_cast<std::size_t>(apart));
        }
        for_tokens(t, lines ? 0 : ref.count, ref.rows.coordinates,
            [&](int i, int c) { store_at(to + c * step + i * apart, load_at<T>(memory.rows[i] + c)); });
    }

    /// to[c][i] = row[i][from + c] for c < n and all of the tile's tokens.
    template <team Team>
    MDKV_OUTLINE MDKV_HD static void load(Team const& t, scratch const& memory, int from, int n, float* to)
    {
        t.sync(); // `to` may still be read
        widen_columns(
            t, tile, n, [&](int i) { return memory.rows[i] + from; }, to);
        t.sync();
    }

    /// n plain coordinates from c on.
    template <team Team>
    MDKV_OUTLINE MDKV_HD static void write_elements(
        Team const& t, scratch const& memory, tile_ref const& ref, int c, int n)
    {
        std::byte* const to = ref.rows.begin + ref.rows.coordinate(ref.first, c);
        int const step      = ref.rows.step(ref.first);
        int const apart     = ref.rows.by_token ? ref.rows.token_bytes : ref.rows.unit; // bytes from token to token
        for_tokens(t, ref.count, n,
            [&](int i, int j) { store_at(to + j * step + i * apart, narrow<T>(memory.x[j * tile + i])); });
    }
};

} // namespace MDKV_NAMESPACE::detail
