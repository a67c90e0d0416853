/// \file packing.hpp: jobs of pack: the directory laid out from the tokens at each rung, channels, and sixteen tokens of a run at a time, copied or projected or rotated, as elements or as codes (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/channels.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/columns.hpp>
#include <mdkv/detail/panel.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/sort_slots.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/detail/tile_codec.hpp>
#include <mdkv/detail/tile_loops.hpp>

namespace MDKV_NAMESPACE::detail
{

/// The parts of a layer that pack stores.
template <backend B, element T>
struct pack_operands
{
    in_view<T, 3, B> keys;   ///< [H, N, D]
    in_view<T, 3, B> values; ///< [H, N, Dv]
    in_view<T, 3, B> window_keys;
    in_view<T, 3, B> window_values;
    in_view<float, 3, B> key_basis;
    in_view<float, 3, B> value_basis;
    in_view<float, 3, B> channels;         ///< [H, 3, D]  from fit_channels; empty: fitted to the kept keys alone
    in_view<float, 2, B> value_means;      ///< [H, Dv]    empty: fitted to the kept values
    in_view<std::int32_t, 2, B> positions; ///< [H, N]     by rung, ascending: from sort_slots
    in_view<index_t, 2, B> first;          ///< [H, R+1]   where each rung's positions begin: from sort_slots
    in_view<float, 3, B> stand_in_keys;
    in_view<float, 3, B> stand_in_values;
    /// [H, N]  1 for tokens copied afterwards: tiles of such tokens alone are not written
    in_view<std::uint8_t, 2, B> carried{};
    /// directory of a cache whose stand-ins are copied afterwards, without stand_in_keys
    head_entry const* stored = nullptr;
};

/// Lays out every head's entry from its number of tokens at each rung, one head after another. One item.
template <element T, backend B>
struct lay_out_heads
{
    static constexpr char const* name = "pack_lay_out";

    pack_operands<B, T> of;
    cache_view<T, B::memory_space> cache;

    MDKV_HD void operator()(team auto const& t, index_t) const
    {
        cache_layout const& layout = cache.layout;
        bool const bases           = !of.key_basis.empty() && !of.value_basis.empty();
        head_entry entry;
        index_t bytes   = 0;
        index_t unbased = 0; // heads with tokens at a projected rung whose basis is missing
        for (index_t h0 = 0; h0 < layout.heads; h0 += t.size())
        {
            index_t const h     = h0 + t.rank();
            bool const in_range = h < layout.heads;
            array<index_t, max_rungs> count{};
            for (std::size_t r = 0; in_range && r < layout.rungs; ++r)
            {
                auto const at = static_cast<index_t>(r);
                count[r]      = of.first(h, at + 1) - of.first(h, at);
            }
            index_t const more = !in_range              ? 0
                                 : of.stored != nullptr ? of.stored[h].stand_ins
                                                        : layout.stand_ins(count[0], of.stand_in_keys.extent(1));
            auto const sum     = t.prefix(in_range ? lay_out_head<T>(layout, count, 0, entry, more) : index_t{0});
            unbased += in_range && !bases && entry.key_columns > 0 ? 1 : 0;
            if (in_range)
            {
                static_cast<void>(lay_out_head<T>(layout, count, bytes + sum.before, cache.heads[h], more));
            }
            bytes += sum.total;
        }
        bool const stores = t.sum(unbased) == 0 && bytes <= cache.arena_bytes;
        for (index_t h = t.rank(); !stores && h < layout.heads; h += t.size()) { cache.heads[h] = {}; }
        if (t.rank() == 0 && cache.appended != nullptr) { *cache.appended = 0; }
    }
};

/// Writes means and scales of each head that has rotated tokens: the given ones, or ones fitted to its kept tokens alone, or to
/// all if only its stand-ins are in codes. An item is a head.
template <element T, backend B>
struct write_channels
{
    static constexpr char const* name = "pack_write_channels";
    static constexpr int threads      = 128;

    pack_operands<B, T> of;
    fit_key_channels<T, T, B> fitted;
    fit_value_means<T, B> of_values;
    cache_view<T, B::memory_space> cache; // its directory is complete

    MDKV_HD void operator()(team auto const& t, index_t h) const
    {
        if (!has_channels(cache.layout, cache, h)) { return; }
        index_t const all   = of.first(h, static_cast<index_t>(cache.layout.rungs));
        index_t const begin = cache.layout.key_coordinates[0] > 0 || of.first(h, 1) == all ? 0 : of.first(h, 1);
        auto const kept     = [&](index_t i) { return index_t{of.positions(h, begin + i)}; };
        if (of.channels.empty()) { fitted.fit(t, h, all - begin, kept); }
        if (of.value_means.empty()) { of_values.fit(t, h, all - begin, kept); }
        t.sync();
        auto const channels         = of.channels.empty() ? as_input(fitted.channels) : of.channels;
        auto const means            = of.value_means.empty() ? as_input(of_values.means) : of.value_means;
        auto const [dim, value_dim] = cache.layout.dims;
        std::byte* const to         = cache.arena + cache.heads[h].channels;
        for (index_t i = t.rank(); i < 2 * dim + value_dim; i += t.size())
        {
            float const x = i < 2 * dim ? channels(h, i / dim, i % dim) : means(h, i - 2 * dim);
            store_at(to + i * index_t{sizeof(T)}, narrow<T>(x));
        }
    }
};

/// Writes the tiles of a cache, and beside them each head's projections.
template <element T, backend B>
struct pack_tiles
{
    static constexpr char const* name = "pack_tiles";
    static constexpr int threads      = 128;

    using walk_of_tiles          = tile_walk<T, B::memory_space, true>;
    using scratch                = typename walk_of_tiles::scratch;
    static constexpr int tile    = walk_of_tiles::tile;
    static constexpr int at_once = walk_of_tiles::at_once;

    walk_of_tiles walk;
    pack_operands<B, T> of;
    in_view<T, 3, B> stand_in_keys;   // [H, M, D]    read only if the walk goes over stand-ins
    in_view<T, 3, B> stand_in_values; // [H, M, Dv]

    [[nodiscard]] index_t items() const noexcept { return walk.items(); }
    [[nodiscard]] index_t scratch_bytes() const noexcept { return walk.scratch_bytes(); }

    MDKV_HD void operator()(team auto const& t, index_t item) const
    {
        walk(
            t, item,
            [&](scratch const& memory, tile_ref const& ref) {
                if (!all_carried(ref)) { write_tile(t, memory, ref); }
            },
            [&, this](index_t h) { write_projections(t, h); });
    }

private:
    MDKV_HD void write_projections(team auto const& t, index_t h) const
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
        if (of.carried.empty() || ref.r == walk.cache.layout.rungs) { return false; }
        index_t const begin = of.first(ref.h, static_cast<index_t>(ref.r)) + ref.first;
        bool all = ref.first + ref.count <= slots_of_head(walk.cache, ref.h, ref.r).tokens; // none is a stand-in
        for (int i = 0; all && i < ref.count; ++i) { all = of.carried(ref.h, of.positions(ref.h, begin + i)) != 0; }
        return all;
    }

    MDKV_HD void write_tile(team auto const& t, scratch const& memory, tile_ref const& ref) const
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
            if (ref.rows.kind == storage::plain)
            {
                for_elements(t, ref, c, n,
                    [&](int i, int j, std::byte* to) { store_at(to, narrow<T>(memory.x[j * tile + i])); });
            }
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
        if (i >= window) { return (ref.rows.by_token ? of.window_values : of.window_keys).row(ref.h, i - window); }
        auto const r = static_cast<index_t>(ref.r == layout.rungs ? layout.full_rung : ref.r);
        return (ref.rows.by_token ? of.values : of.keys).row(ref.h, of.positions(ref.h, of.first(ref.h, r) + i));
    }

    template <team Team>
    MDKV_HD static void copy_exact(Team const& t, scratch const& memory, tile_ref const& ref)
    {
        bool const lines = Team::lanes > 1 && ref.rows.by_token; // a thread copies them whole
        for (int i = 0; lines && i < ref.count; ++i)
        {
            __builtin_memcpy(ref.rows.begin + ref.rows.coordinate(ref.first + i, 0), memory.rows[i],
                static_cast<std::size_t>(ref.rows.token_bytes));
        }
        if (lines) { return; }
        for_elements(t, ref, 0, ref.rows.coordinates,
            [&](int i, int c, std::byte* to) { store_at(to, load_at<T>(memory.rows[i] + c)); });
    }

    /// to[c][i] = row[i][from + c] for c < n and all of the tile's tokens.
    MDKV_OUTLINE MDKV_HD static void load(team auto const& t, scratch const& memory, int from, int n, float* to)
    {
        t.sync(); // `to` may still be read
        widen_columns(
            t, tile, n, [&](int i) { return memory.rows[i] + from; }, to);
        t.sync();
    }
};

/// Bytes of an arena with these rungs, which the host can read.
/// \throws invalid_argument   naming the head, and the token whose rung is outside the layout or the projected rung that
///                            lacks a basis
template <element T, space S>
[[nodiscard]] index_t bytes_of_rungs(char const* stage, view<std::uint8_t const, 2, S> const& rung,
    std::uint8_t const* rungs, cache_layout const& layout, bool bases, index_t stand_ins)
{
    index_t bytes = 0;
    for (index_t h = 0; h < layout.heads; ++h)
    {
        array<index_t, max_rungs> tokens{};
        for (index_t i = 0; i < rung.extent(1); ++i)
        {
            std::size_t const r = rungs[rung.offset(h, i)];
            expects(r < layout.rungs, stage, ": rung of head ", h, ", token ", i, " is ", r, "; it must be below ",
                layout.rungs);
            ++tokens[r];
        }
        for (std::size_t r = 0; r < layout.rungs; ++r)
        {
            expects(tokens[r] == 0 || bases || !layout.projected(r), stage, ": head ", h, " has ", tokens[r],
                " tokens at projected rung ", r, ", but key_basis or value_basis is empty");
        }
        head_entry entry;
        bytes = lay_out_head<T>(layout, tokens, bytes, entry, layout.stand_ins(tokens[0], stand_ins));
    }
    return bytes;
}

/// The body of pack, for checked operands.
template <backend B, element T>
void pack_tokens(B const& on, pack_operands<B, T> const& of, cache_view<T, B::memory_space> const& cache)
{
    cache_layout const& layout = cache.layout;
    index_t const heads        = layout.heads;
    index_t const coded        = layout.any_rotated() ? heads : 0;
    index_t const most         = of.stand_in_keys.extent(1); // stand-ins
    workspace::frame frame{on.scratch};
    auto const fitted      = scratch_view<float>(on, frame, of.channels.empty() ? coded : 0, 3, layout.dims.keys);
    auto const means       = scratch_view<float>(on, frame, of.value_means.empty() ? coded : 0, layout.dims.values);
    auto const more_keys   = scratch_view<T>(on, frame, most > 0 ? heads : 0, most, layout.dims.keys);
    auto const more_values = scratch_view<T>(on, frame, most > 0 ? heads : 0, most, layout.dims.values);
    write_channels<T, B> const means_of_codes{of, {{}, of.keys, fitted}, {of.values, means}, cache};
    pack_tiles<T, B> const tiles{
        {cache, of.key_basis, of.value_basis, layout.rungs + 1, of.keys.extent(1) + layout.window + most, most > 0}, of,
        as_input(more_keys), as_input(more_values)};
    if constexpr (requires { reserve(on, tiles, tiles.items()); }) // nothing is written if memory is lacking
    {
        reserve(on, means_of_codes, coded);
        reserve(on, tiles, tiles.items());
    }
    run(on, lay_out_heads<T, B>{of, cache}, 1);
    run(on, means_of_codes, coded);
    run(on, copy_rows<B, float, T>{of.stand_in_keys, more_keys});
    run(on, copy_rows<B, float, T>{of.stand_in_values, more_values});
    run(on, tiles);
}

} // namespace MDKV_NAMESPACE::detail
