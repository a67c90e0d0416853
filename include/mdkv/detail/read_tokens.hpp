/// \file read_tokens.hpp: jobs that read a packed cache back: projections, channels, and tokens as vectors, sixteen tokens of a run at a time, the inverse of packing.hpp.
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/detail/channels.hpp>
#include <mdkv/detail/columns.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/stored_slots.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/detail/tile_codec.hpp>
#include <mdkv/detail/tile_loops.hpp>

namespace MDKV_NAMESPACE::detail
{

/// A head's stored projections as rows of bases, 0 beyond the stored columns; one item a head. They are orthonormal but for
/// the rounding to T.
template <element T, space S>
struct read_projections
{
    static constexpr char const* name = "recompress_read_projections";

    cache_view<T, S> cache;
    view<float, 3, S> key_basis;   // [H, D, D]
    view<float, 3, S> value_basis; // [H, Dv, Dv]

    MDKV_HD void operator()(team auto const& t, index_t h) const
    {
        // key_projection [D, key_columns], value_projection [value_columns, Dv]
        head_entry const& entry = cache.heads[h];
        auto const read = [&, this](auto const& basis, index_t begin, index_t columns, index_t apart, index_t step) {
            index_t const dim = basis.extent(2);
            for (index_t i = t.rank(); i < dim * dim; i += t.size())
            {
                index_t const index        = i / dim * apart + i % dim * step;
                basis(h, i / dim, i % dim) = i / dim < columns ? matrix_at<T>(cache.arena, begin, index) : 0.0F;
            }
        };
        read(key_basis, entry.key_projection, entry.key_columns, 1, entry.key_columns);
        read(value_basis, entry.value_projection, entry.value_columns, cache.layout.dims.values, 1);
    }
};

/// The channels of a head: the stored means and scales or, if the head has no rotated tokens yet, ones fitted to its
/// tokens. The queries' root mean squares are always the present ones. An item is a head.
template <element T, element U, backend B>
struct stored_channels
{
    static constexpr char const* name = "recompress_channels";
    static constexpr int threads      = 128;

    stored_slots<T, B::memory_space> by_slot;
    fit_key_channels<T, U, B> fitted;
    fit_value_means<T, B> of_values;

    MDKV_HD void operator()(team auto const& t, index_t h) const
    {
        bool const stored   = has_channels(by_slot.cache.layout, by_slot.cache, h);
        index_t const count = stored ? 0 : by_slot.tokens(h);
        auto const token    = [](index_t i) { return i; };
        fitted.fit(t, h, count, token);
        of_values.fit(t, h, count, token);
        if (!stored) { return; }
        t.sync();
        auto const [dim, value_dim] = by_slot.layout.dims;
        for (index_t i = t.rank(); i < 2 * dim + value_dim; i += t.size())
        {
            float const x = matrix_at<T>(by_slot.cache.arena, by_slot.cache.heads[h].channels, i);
            (i < 2 * dim ? fitted.channels(h, i / dim, i % dim) : of_values.means(h, i - 2 * dim)) = x;
        }
    }
};

/// Reads tokens [H, M] before the new window as vectors of the original dimension, zero-padded in shorter heads, and the
/// window. Exact tokens come out bit for bit. If the walk goes over stand-ins, too, they are written behind a head's slots.
template <element T, space S>
struct read_tokens
{
    static constexpr char const* name = "recompress_read_tokens";
    static constexpr int threads      = 128;

    using walk_of_tiles          = tile_walk<T, S, false>;
    using scratch                = typename walk_of_tiles::scratch;
    static constexpr int tile    = walk_of_tiles::tile;
    static constexpr int at_once = walk_of_tiles::at_once;

    walk_of_tiles walk;
    stored_slots<T, S> by_slot;
    view<T, 3, S> keys;          // [H, M, D]
    view<T, 3, S> values;        // [H, M, Dv]
    view<T, 3, S> window_keys;   // [H, W, D]
    view<T, 3, S> window_values; // [H, W, Dv]
    view<index_t, 1, S> rows{};  // [H]  receives the rows of each head before padding; or empty

    [[nodiscard]] index_t items() const noexcept { return walk.items(); }
    [[nodiscard]] index_t scratch_bytes() const noexcept { return walk.scratch_bytes(); }

    MDKV_HD void operator()(team auto const& t, index_t item) const
    {
        walk(
            t, item, [&, this](scratch const& memory, tile_ref const& ref) { read_tile(t, memory, ref); },
            [&, this](index_t h) { pad(t, h); });
    }

private:
    /// Writes zeros behind the last token of a head.
    MDKV_HD void pad(team auto const& t, index_t h) const
    {
        index_t const count = by_slot.tokens(h) + (walk.stand_ins ? walk.cache.heads[h].stand_ins : 0);
        if (t.rank() == 0 && !rows.empty()) { rows(h) = count; }
        for (index_t slot = count; slot < by_slot.most; ++slot)
        {
            for (index_t d = t.rank(); d < keys.extent(2); d += t.size()) { keys(h, slot, d) = narrow<T>(0.0F); }
            for (index_t d = t.rank(); d < values.extent(2); d += t.size()) { values(h, slot, d) = narrow<T>(0.0F); }
        }
    }

    /// Where token i of the tile goes.
    [[nodiscard]] MDKV_HD T* row_of(tile_ref const& ref, int i) const
    {
        index_t const tokens = by_slot.tokens(ref.h);                                          // before the window
        index_t const beyond = ref.first + i - slots_of_head(walk.cache, ref.h, ref.r).tokens; // number of a stand-in
        index_t const slot   = beyond < 0 ? ref.slot + i : tokens + beyond;
        if (beyond >= 0 || slot < tokens) { return (ref.rows.by_token ? values : keys).row(ref.h, slot); }
        return (ref.rows.by_token ? window_values : window_keys).row(ref.h, slot - tokens);
    }

    MDKV_HD void read_tile(team auto const& t, scratch const& memory, tile_ref const& ref) const
    {
        t.sync(); // the tile before may still be written
        for (int i = member(t); i < ref.count; i += members(t)) { memory.rows[i] = row_of(ref, i); }
        t.sync();
        if (ref.basis == run_basis::original) // only exact tokens
        {
            return for_elements(t, ref, 0, ref.rows.coordinates,
                [&](int i, int c, std::byte const* from) { memory.rows[i][c] = load_at<T>(from); });
        }
        bool const in_basis = ref.basis == run_basis::projected;
        for (int c = 0; c < ref.rows.coordinates; c += at_once)
        {
            int const n    = ref.rows.coordinates - c < at_once ? ref.rows.coordinates - c : at_once;
            float* const x = in_basis ? memory.columns + c * tile : memory.x;
            if (ref.rows.kind == storage::plain)
            {
                for_elements(t, ref, c, n,
                    [&](int i, int j, std::byte const* from) { x[j * tile + i] = widen(load_at<T>(from)); });
            }
            else
            {
                read_codes(t, ref.rows.begin + ref.rows.tile(ref.first), ref.rows.group(ref.first, c / at_once),
                    memory.minimum, memory.scale, x);
                if (ref.basis == run_basis::rotated) { rotate_back(t, x, n, memory.mean + c, memory.factor + c); }
            }
            t.sync();
            if (!in_basis) { write(t, memory, ref.count, c, n, x); }
        }
        auto const dim = static_cast<int>((ref.rows.by_token ? values : keys).extent(2));
        for (int d = 0; in_basis && d < dim; d += at_once)
        {
            int const n = dim - d < at_once ? dim - d : at_once;
            turn_columns(t, memory.columns, ref.count, ref.rows.coordinates,
                ref.rows.by_token ? walk.value_basis : walk.key_basis, ref.h, true, d, n, memory.x);
            write(t, memory, ref.count, d, n, memory.x);
        }
    }

    /// Writes coordinates c to c + n - 1 of every token: finite if the stored values are finite.
    MDKV_OUTLINE MDKV_HD static void write(
        team auto const& t, scratch const& memory, int count, int c, int n, float const* x)
    {
        narrow_columns<T>(t, count, n, x, [&](int i) { return memory.rows[i] + c; });
        t.sync(); // x is overwritten next
    }
};

/// Reads the n tokens of a cache's tail.
/// \param keys    [H, n, D]
/// \param values  [H, n, Dv]
template <backend B, element T>
void read_tail(B const& on, cache_view<T, B::memory_space> tail, out_view<T, 3, B> keys, out_view<T, 3, B> values)
{
    workspace::frame frame{on.scratch};
    auto const nothing = scratch_view<head_entry>(on, frame, tail.layout.heads);
    run(on, fill<head_entry>{nothing.data_handle(), {}, tail.layout.heads});
    tail.heads         = nothing.data_handle();
    tail.layout.window = 0;
    run(on, read_tokens<T, B::memory_space>{{tail, {}, {}, most_runs(tail.layout), keys.extent(1)},
                {tail, tail.layout, keys.extent(1)}, keys, values, {}, {}});
}

} // namespace MDKV_NAMESPACE::detail
