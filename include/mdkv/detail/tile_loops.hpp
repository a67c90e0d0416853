/// \file tile_loops.hpp: loops of a team over a packed cache: strips of a head's runs, tokens and codes of a tile, a token copied from run to run.
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/team.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

// Offsets: see run_of_head.hpp.

namespace mdkv::inline MDKV_MACHINE::detail
{

/// Up to four tiles of one run, which a team packs or reads.
struct stored_strip
{
    static constexpr index_t tokens = 4 * tile_tokens;

    stored_run run;
    std::size_t rung = 0; ///< number of the run
    index_t first    = 0; ///< first token, counted in the run
    index_t end      = 0; ///< one beyond the last token; at most `first` if there is no such strip
    index_t slot     = 0; ///< slot of the first token, counted over the runs
};

/// Strips of a head with `slots` tokens in `runs` runs, at the most.
[[nodiscard]] MDKV_HD constexpr index_t most_strips(index_t slots, std::size_t runs) noexcept
{
    return slots / stored_strip::tokens + static_cast<index_t>(runs);
}

/// Strip n of head h, counted over its first `runs` runs. Stand-ins are in no strip.
template <element T, space S>
[[nodiscard]] MDKV_HD constexpr stored_strip strip_at(
    cache_view<T, S> const& cache, index_t h, index_t n, std::size_t runs) noexcept
{
    constexpr index_t size = stored_strip::tokens;
    index_t slot           = 0;
    for (std::size_t i = 0; i < runs; ++i)
    {
        stored_run const run = slots_of_head(cache, h, i);
        index_t const here   = (run.tokens + size - 1) / size;
        if (n < here)
        {
            return {run, i, n * size, (n + 1) * size < run.tokens ? (n + 1) * size : run.tokens, slot + n * size};
        }
        n -= here;
        slot += run.tokens;
    }
    return {};
}

/// Goes over a group's codes in one tile, four neighbours at a time if they lie together: body(place, first, step, count)
/// for `count` bytes, an integral constant, that begin `place` behind the first code. The bytes are numbers first, first +
/// step, ... in [bytes, tile_tokens].
template <team Team, class Body>
MDKV_HD void for_codes(Team const& t, coded_group const& group, Body const& body)
{
    constexpr int tile   = tile_tokens;
    int const neighbours = group.by_token ? group.width : group.bytes;
    int const others     = group.by_token ? group.bytes : group.width;
    int const step       = group.by_token ? 1 : tile;
    int const other_step = group.by_token ? tile : 1;
    for (int i = 0; i < neighbours / 4 * 4; i += 4)
    {
        for (int o = member(t); o < others; o += members(t))
        {
            body(i * others + 4 * o, i * step + o * other_step, step, std::integral_constant<int, 4>{});
        }
    }
    for (int i = neighbours / 4 * 4; i < neighbours; ++i)
    {
        for (int o = member(t); o < others; o += members(t))
        {
            body(i * others + o, i * step + o * other_step, step, std::integral_constant<int, 1>{});
        }
    }
}

/// Copies token i of a group's tile to token j of another's, stored alike.
template <team Team>
MDKV_HD void copy_codes(Team const& t, coded_group const& group, std::byte const* from, int i, coded_group const& other,
    std::byte* to, int j)
{
    if (t.rank() == 0)
    {
        store_at(to + other.scale(j), load_at<half>(from + group.scale(i)));
        store_at(to + other.minimum(j), load_at<half>(from + group.minimum(i)));
    }
    if (group.by_token)
    {
        int const step       = group.code(i, 1) - group.code(i, 0);
        int const other_step = other.code(j, 1) - other.code(j, 0);
        from += group.code(i, 0);
        to += other.code(j, 0);
        for (int b = member(t); b < group.bytes; b += members(t)) { to[b * other_step] = from[b * step]; }
        return;
    }
    int const fours = group.bytes / 4;
    for (int f = member(t); f < fours; f += members(t))
    {
        store_at(to + other.code(j, 4 * f), load_at<std::uint32_t>(from + group.code(i, 4 * f)));
    }
    for (int b = 4 * fours + member(t); b < group.bytes; b += members(t))
    {
        to[other.code(j, b)] = from[group.code(i, b)];
    }
}

/// Copies a token's stored key or value, as elements or codes, with the number of coordinates of the target run.
template <element T, team Team>
MDKV_HD void copy_token(Team const& t, run_rows const& from, index_t source, run_rows const& to, index_t target)
{
    if (to.kind == storage::plain)
    {
        std::byte* const there      = to.begin + to.coordinate(target, 0);
        std::byte const* const here = from.begin + from.coordinate(source, 0);
        index_t const step          = to.step(target);
        index_t const own_step      = from.step(source);
        for (int c = member(t); c < to.coordinates; c += members(t))
        {
            store_at(there + c * step, load_at<T>(here + c * own_step));
        }
        return;
    }
    for (int k = 0; k < to.groups(); ++k)
    {
        copy_codes(t, from.group(source, k), from.begin + from.tile(source), static_cast<int>(source % tile_tokens),
            to.group(target, k), to.begin + to.tile(target), static_cast<int>(target % tile_tokens));
    }
}

} // namespace mdkv::inline MDKV_MACHINE::detail
