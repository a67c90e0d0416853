/// \file run_of_head.hpp: where everything in a packed cache lies: the runs of a head, and in a run the coordinates, scales, minima and codes of its tokens (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>

// The picture of cache.hpp in functions. Every reader or writer of an arena or a tail finds its bytes here.

namespace MDKV_NAMESPACE::detail
{

/// One group of coordinates in one tile of codes. Offsets are bytes from the tile's beginning.
struct coded_group
{
    int coordinates; ///< number of coordinates in the group
    int bytes;       ///< bytes of one token's codes
    int width;       ///< tokens of the tile
    int scales;      // [width] half
    int minima;      // [width] half
    int codes;       // see code()
    bool by_token;
    storage kind;

    /// Group `number` of tokens of `all` coordinates.
    MDKV_HD constexpr coded_group(int all, int number, int width_, bool by_token_, storage kind_) noexcept
        : coordinates{all - number * size < size ? all - number * size : size}
        , bytes{kind_ == storage::int8 ? coordinates : (coordinates + 1) / 2}
        , width{width_}
        , scales{width_ * number * static_cast<int>(coordinate_bytes(kind_, size, 0))}
        , minima{scales + width_ * int{sizeof(half)}}
        , codes{minima + width_ * int{sizeof(half)}}
        , by_token{by_token_}
        , kind{kind_}
    {}

    [[nodiscard]] MDKV_HD constexpr int scale(int token) const noexcept { return scales + token * int{sizeof(half)}; }
    [[nodiscard]] MDKV_HD constexpr int minimum(int token) const noexcept { return minima + token * int{sizeof(half)}; }
    /// Place of byte b of a token's codes: in keys four neighbours of a token lie together, in values the same byte of four.
    [[nodiscard]] MDKV_HD constexpr int code(int token, int b) const noexcept
    {
        return codes + (by_token ? by_fours(token, width, b, bytes) : by_fours(b, bytes, token, width));
    }

private:
    static constexpr int size = quantised_group;

    /// Place of (i, j) in [n / 4, m, 4], (i / 4, j, i % 4), followed by [n % 4, m].
    [[nodiscard]] MDKV_HD static constexpr int by_fours(int i, int n, int j, int m) noexcept
    {
        return i < n / 4 * 4 ? (i / 4 * m + j) * 4 + i % 4 : i * m + j;
    }
};

/// The keys of a run, or its values. Offsets are bytes from `begin`.
struct run_rows
{
    std::byte* begin = nullptr; ///< first byte, at any address
    index_t stored   = 0;       ///< tokens that its tiles are laid out for: the run's tokens, or a tail's capacity
    int coordinates  = 0;       ///< an int, like all counts inside a tile
    int token_bytes  = 0;
    int unit         = 0; ///< bytes of an element
    storage kind     = storage::plain;
    bool by_token    = false; ///< true for values, token by token; keys are coordinate by coordinate inside a tile

    /// First token of the tile of token t. `width` is the number of the tile's tokens.
    [[nodiscard]] MDKV_HD static constexpr index_t tile_begin(index_t t) noexcept
    {
        return t / tile_tokens * tile_tokens;
    }
    [[nodiscard]] MDKV_HD constexpr int width(index_t t) const noexcept
    {
        index_t const left = stored - tile_begin(t);
        return static_cast<int>(left < tile_tokens ? left : tile_tokens);
    }
    /// Where the tile of token t begins.
    [[nodiscard]] MDKV_HD constexpr index_t tile(index_t t) const noexcept { return tile_begin(t) * token_bytes; }

    /// Place of coordinate c of token t of a plain run.
    [[nodiscard]] MDKV_HD constexpr index_t coordinate(index_t t, int c) const noexcept
    {
        index_t const first = tile_begin(t);
        return (by_token ? t * coordinates + c : first * coordinates + c * width(t) + t - first) * unit;
    }

    /// Bytes from one coordinate of token t of a plain run to the next.
    [[nodiscard]] MDKV_HD constexpr int step(index_t t) const noexcept { return by_token ? unit : width(t) * unit; }

    [[nodiscard]] MDKV_HD constexpr int groups() const noexcept
    {
        return (coordinates + int{quantised_group} - 1) / int{quantised_group};
    }
    /// Group `number` in the tile of token t of a coded run.
    [[nodiscard]] MDKV_HD constexpr coded_group group(index_t t, int number) const noexcept
    {
        return {coordinates, number, width(t), by_token, kind};
    }
};

/// The basis in which a run's coordinates stand.
enum class run_basis : std::uint8_t
{
    original,
    projected, ///< leading coordinates of the head's basis
    rotated    ///< groups of the vector itself (centred, a key scaled, too, by channel), times a Hadamard matrix
};

/// Tokens of one head stored alike.
struct stored_run
{
    run_rows keys;
    run_rows values;
    index_t tokens  = 0;
    run_basis basis = run_basis::original;

    [[nodiscard]] MDKV_HD constexpr index_t token_bytes() const noexcept
    {
        return index_t{keys.token_bytes} + values.token_bytes;
    }
    [[nodiscard]] MDKV_HD constexpr run_rows const& rows(bool of_values) const noexcept
    {
        return of_values ? values : keys;
    }
};

/// Runs a head may have, in their order: by rung its own run, the exact run (number layout.rungs), the tail.
[[nodiscard]] MDKV_HD constexpr std::size_t most_runs(cache_layout const& layout) noexcept
{
    return layout.rungs + 2;
}

/// Run i of head h; it has no tokens if the head has no such run. A tail to which more tokens were appended than its
/// capacity counts the tokens it holds. `cache` is a cache_view, or has its pointers under the same names.
template <element T, class Cache>
[[nodiscard]] MDKV_HD constexpr stored_run run_of_head(
    cache_layout const& layout, Cache const& cache, index_t h, std::size_t i) noexcept
{
    constexpr int unit = sizeof(T);
    bool const of_rung = i < layout.rungs, tail = layout.rungs < i;
    if (of_rung ? !layout.own_run(i) : tail && cache.tail_capacity == 0) { return {}; }
    head_dims const dims = of_rung ? head_dims{layout.key_coordinates[i], layout.value_coordinates[i]} : layout.dims;
    storage const kind   = of_rung ? layout.kinds[i] : storage::plain;
    index_t const begin  = h * cache.tail_capacity * (layout.dims.keys + layout.dims.values) * unit;
    run_entry const run  = tail ? run_entry{cache.tail_capacity, begin, begin + cache.tail_capacity * dims.keys * unit}
                           : of_rung ? cache.heads[h].runs[i]
                                     : cache.heads[h].exact;
    auto* const memory   = tail ? cache.tail : cache.arena;
    auto const rows      = [&](index_t from, index_t coordinates, bool of_values) {
        return run_rows{memory == nullptr ? memory : memory + from, run.tokens, static_cast<int>(coordinates),
            static_cast<int>(coordinate_bytes(kind, coordinates, unit)), unit, kind, of_values};
    };
    return {rows(run.keys, dims.keys, false), rows(run.values, dims.values, true),
        // race: move_tail lets the count fall to run.tokens, which is the minimum before and after
        tail && *cache.appended < run.tokens ? *cache.appended : run.tokens,
        of_rung && layout.projected(i) ? run_basis::projected
        : of_rung && layout.rotated(i) ? run_basis::rotated
                                       : run_basis::original};
}
template <element T, space S>
[[nodiscard]] MDKV_HD constexpr stored_run run_of_head(cache_view<T, S> const& cache, index_t h, std::size_t i) noexcept
{
    return run_of_head<T>(cache.layout, cache, h, i);
}

/// Run i of head h without stand-ins: the tokens that have slots.
template <element T, space S>
[[nodiscard]] MDKV_HD constexpr stored_run slots_of_head(
    cache_view<T, S> const& cache, index_t h, std::size_t i) noexcept
{
    stored_run run = run_of_head(cache, h, i);
    run.tokens -= i == cache.layout.stand_in_run ? cache.heads[h].stand_ins : 0;
    return run;
}

/// A token in its run.
struct stored_token
{
    stored_run run;
    index_t index    = 0; ///< in the run
    std::size_t rung = 0; ///< number of the run: exact tokens are at layout.rungs and above
};

/// Token `slot` of head h, counted over the runs in their order; a slot beyond the runs before it counts as the tail's.
/// Stand-ins have no slots.
template <element T, space S>
[[nodiscard]] MDKV_HD constexpr stored_token token_at(cache_view<T, S> const& cache, index_t h, index_t slot) noexcept
{
    std::size_t const last = most_runs(cache.layout) - 1;
    for (std::size_t i = 0; i < last; ++i)
    {
        stored_run const run = slots_of_head(cache, h, i);
        if (slot < run.tokens) { return {run, slot, i}; }
        slot -= run.tokens;
    }
    return {run_of_head(cache, h, last), slot, last};
}

/// Element i of a head's matrix at byte `begin`: key_projection [Dk, key_columns], value_projection [value_columns, Dv] or
/// channels [2 Dk + Dv].
template <element T>
[[nodiscard]] MDKV_HD float matrix_at(std::byte const* arena, index_t begin, index_t i) noexcept
{
    return widen(load_at<T>(arena + begin + i * index_t{sizeof(T)}));
}

/// Whether head h has rotated tokens, and so stores its channels. `cache`: see run_of_head.
[[nodiscard]] MDKV_HD constexpr bool has_channels(cache_layout const& layout, auto const& cache, index_t h) noexcept
{
    bool any = false;
    for (std::size_t r = 0; r < layout.rungs; ++r)
    {
        any = any || (layout.rotated(r) && cache.heads[h].runs[r].tokens > 0);
    }
    return any;
}

} // namespace MDKV_NAMESPACE::detail
