/// \file stored_tokens.hpp: tokens of a packed cache one at a time: found by their slot, read back, copied as they are written (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/detail/quantised_tile.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace mdkv::cpu::detail
{

/// The keys of a run, or its values.
struct stored_side
{
    std::byte* begin    = nullptr; // at any address
    index_t tokens      = 0;       // that its tiles are laid out for
    index_t coordinates = 0;
    storage kind        = storage::plain;
    code_order order    = code_order::by_coordinate;

    /// Tokens in the tile of token t.
    [[nodiscard]] index_t width(index_t t) const noexcept
    {
        return std::min(tile_tokens, tokens - t / tile_tokens * tile_tokens);
    }

    /// Coordinate c of token t of a plain run.
    template <element T>
    [[nodiscard]] std::byte* element_at(index_t t, index_t c) const noexcept
    {
        index_t const tile = t / tile_tokens * tile_tokens;
        index_t const place =
            order == code_order::by_token ? t * coordinates + c : tile * coordinates + c * width(t) + t - tile;
        return begin + place * index_t{sizeof(T)};
    }

    /// Where the tile of token t of a quantised run begins.
    [[nodiscard]] std::byte* tile_of(index_t t) const noexcept
    {
        return begin + t / tile_tokens * tile_tokens * stored_bytes(kind, coordinates, 0);
    }

    [[nodiscard]] coded_form form_at(index_t t) const noexcept { return {kind, order, width(t)}; }
};

/// out[c] = coordinate c of token t as it is stored, for all of them.
template <element T>
inline void read_coordinates(stored_side const& from, index_t t, float* out) noexcept
{
    if (from.kind != storage::plain)
    {
        read_codes(from.tile_of(t), from.form_at(t), t % tile_tokens, from.coordinates, out);
        return;
    }
    for (index_t c = 0; c < from.coordinates; ++c)
    {
        T value;
        std::memcpy(static_cast<void*>(&value), from.element_at<T>(t, c), sizeof value);
        out[c] = widen(value);
    }
}

/// Copies token t of a plain run to place u of another, as many coordinates as that has.
template <element T>
inline void copy_elements(stored_side const& from, index_t t, stored_side const& to, index_t u) noexcept
{
    for (index_t c = 0; c < to.coordinates; ++c)
    {
        std::memcpy(to.element_at<T>(u, c), from.element_at<T>(t, c), sizeof(T));
    }
}

/// Copies token t of a quantised run to place u of another of the same storage and as many coordinates.
inline void copy_codes(stored_side const& from, index_t t, stored_side const& to, index_t u) noexcept
{
    constexpr index_t wide   = sizeof(half);
    std::byte const* const a = from.tile_of(t);
    std::byte* const b       = to.tile_of(u);
    index_t const i          = t % tile_tokens;
    index_t const j          = u % tile_tokens;
    for (index_t first = 0; first < from.coordinates; first += quantised_group)
    {
        group_place const p{from.form_at(t), first, from.coordinates};
        group_place const q{to.form_at(u), first, to.coordinates};
        std::memcpy(b + q.scales + j * wide, a + p.scales + i * wide, sizeof(half));
        std::memcpy(b + q.minima + j * wide, a + p.minima + i * wide, sizeof(half));
        bool const together = from.order == code_order::by_token;
        for (index_t c = 0; c < p.bytes; ++c)
        {
            b[q.codes + (together ? j * q.bytes + c : c * to.width(u) + j)] =
                a[p.codes + (together ? i * p.bytes + c : c * from.width(t) + i)];
        }
    }
}

/// A run of arena or tail.
struct stored_run
{
    stored_side keys;
    stored_side values;

    stored_run() = default;
    stored_run(
        std::byte* key_bytes, std::byte* value_bytes, index_t tokens, head_dims coordinates, storage kind) noexcept
        : keys{key_bytes, tokens, coordinates.keys, kind, code_order::by_coordinate}
        , values{value_bytes, tokens, coordinates.values, kind, code_order::by_token}
    {}
};

/// Copies token t to place u of a run that is written alike, or of a plain one with fewer coordinates.
template <element T>
inline void copy_token(stored_run const& from, index_t t, stored_run const& to, index_t u) noexcept
{
    if (from.keys.kind != storage::plain)
    {
        copy_codes(from.keys, t, to.keys, u);
        copy_codes(from.values, t, to.values, u);
        return;
    }
    copy_elements<T>(from.keys, t, to.keys, u);
    copy_elements<T>(from.values, t, to.values, u);
}

/// Own run of head h at rung r.
template <element T>
[[nodiscard]] inline stored_run run_of(cache_view<T, space::host> const& cache, index_t h, std::size_t r) noexcept
{
    run_entry const& run       = cache.heads[h].runs[r];
    cache_layout const& layout = cache.layout;
    return {cache.arena + run.keys, cache.arena + run.values, run.tokens,
        {layout.key_coordinates[r], layout.value_coordinates[r]}, layout.kinds[r]};
}

/// Where a token is stored.
struct stored_token
{
    stored_run run;
    index_t place    = 0; // in the run
    std::size_t rung = 0; // of the cache; their number where the token is exact

    /// Copies an exact token's key and value.
    template <element T>
    void copy_exact(T* key, T* value) const noexcept
    {
        for (index_t c = 0; c < run.keys.coordinates; ++c)
        {
            std::memcpy(static_cast<void*>(key + c), run.keys.element_at<T>(place, c), sizeof(T));
        }
        for (index_t c = 0; c < run.values.coordinates; ++c)
        {
            std::memcpy(static_cast<void*>(value + c), run.values.element_at<T>(place, c), sizeof(T));
        }
    }
};

/// Token `slot` of head h, counted over the runs by rung, the exact run and the tail.
template <element T>
[[nodiscard]] inline stored_token token_at(cache_view<T, space::host> const& cache, index_t h, index_t slot) noexcept
{
    cache_layout const& layout = cache.layout;
    head_entry const& entry    = cache.heads[h];
    for (std::size_t r = 0; r < layout.rungs; ++r)
    {
        if (!layout.own_run(r)) { continue; }
        if (slot < entry.runs[r].tokens) { return {run_of(cache, h, r), slot, r}; }
        slot -= entry.runs[r].tokens;
    }
    if (slot < entry.exact.tokens)
    {
        return {{cache.arena + entry.exact.keys, cache.arena + entry.exact.values, entry.exact.tokens, layout.dims,
                    storage::plain},
            slot, layout.rungs};
    }
    std::byte* const keys = cache.tail + h * cache.tail_head_bytes();
    return {{keys, keys + cache.tail_capacity * layout.dims.keys * index_t{sizeof(T)}, cache.tail_capacity, layout.dims,
                storage::plain},
        slot - entry.exact.tokens, layout.rungs};
}

} // namespace mdkv::cpu::detail
