/// \file columns.hpp: how a team goes over a tile of sixteen tokens, multiplies them, as the columns of a matrix, by directions, and reads and writes neighbours.
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/detail/quantiser.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>
#include <concepts>

namespace MDKV_NAMESPACE::detail
{

/// Calls body(token, coordinate) for a tile. One thread goes along the tokens' rows; members of a block take neighbouring tokens.
template <team Team, class Body>
MDKV_HD void for_tokens(Team const& t, int tokens, int coordinates, Body const& body)
{
    constexpr int across = Team::lanes > 1 ? 1 : tile_tokens;
    for (int i = member(t) % across; i < tokens; i += across)
    {
        for (int c = member(t) / across; c < coordinates; c += members(t) / across) { body(i, c); }
    }
}

/// Calls body(coordinate, token) for each vector of Team::register_lanes neighbouring tokens of a tile.
template <team Team, class Body>
MDKV_HD void for_coordinates(Team const& t, int coordinates, Body const& body)
{
    constexpr int tile  = tile_tokens;
    constexpr int lanes = Team::register_lanes;
    int const first     = member(t) * lanes;
    int const all       = members(t) * lanes;
    for (int c = first / tile; c < coordinates; c += (all + tile - 1) / tile)
    {
        for (int i = first % tile; i < tile; i += all) { body(c, i); }
    }
}

/// x[l] = from[l] for N neighbours at any address, and back, rounded to T. A backend may have overloads of its own.
template <team Team, element T, std::size_t N>
MDKV_HD void widen_lanes(Team const&, T const* from, float (&x)[N])
{
    for (int l = 0; l < static_cast<int>(N); ++l) { x[l] = widen(load_at<T>(from + l)); }
}
template <team Team, element T, std::size_t N>
MDKV_HD void narrow_lanes(Team const&, float const (&x)[N], T* to)
{
    for (int l = 0; l < static_cast<int>(N); ++l) { store_at(to + l, narrow<T>(x[l])); }
}

/// The same for the first n of them; the other x stay.
template <team Team, element T, std::size_t N>
MDKV_HD void widen_some(Team const& t, T const* from, index_t n, float (&x)[N])
{
    if (n >= static_cast<index_t>(N)) { return widen_lanes(t, from, x); }
    for (int l = 0; l < n; ++l) { x[l] = widen(load_at<T>(from + l)); }
}

/// to[16 c + i] = row(i)[c] for the coordinates of a tile's first tokens; row(i) is where token i begins. Backends may overload it.
template <team Team, class Row>
MDKV_HD void widen_columns(Team const& t, int tokens, int coordinates, Row const& row, float* to)
{
    for_tokens(t, tokens, coordinates, [&](int i, int c) { to[c * tile_tokens + i] = widen(load_at(row(i) + c)); });
}

/// The inverse of widen_columns: row(i)[c] = from[16 c + i], rounded to T, and cut to half's range if T is half. One thread takes
/// Team::lanes neighbours in a row at once.
template <element T, team Team, class Row>
MDKV_HD void narrow_columns(Team const& t, int tokens, int coordinates, float const* from, Row const& row)
{
    auto const one = [](float x) { return std::same_as<T, half> ? within_half(x) : x; };
    int done       = 0;
    for (constexpr int lanes = Team::lanes; lanes > 1 && done + lanes <= coordinates; done += lanes)
    {
        for (int i = 0; i < tokens; ++i)
        {
            float x[std::size_t{lanes}];
            for (int l = 0; l < lanes; ++l) { x[l] = one(from[(done + l) * tile_tokens + i]); }
            narrow_lanes(t, x, row(i) + done);
        }
    }
    for_tokens(t, tokens, coordinates - done,
        [&](int i, int c) { store_at(row(i) + done + c, narrow<T>(one(from[(done + c) * tile_tokens + i]))); });
}

/// sum[k][l] = sum over d, ascending, of direction[k][step d] * column[16 d + l]. A backend whose team has a faster way has an
/// overload of its own, with the same sums.
template <team Team, std::size_t Sums>
MDKV_HD void column_products(Team const&, float const* const (&direction)[Sums], float const* column, int dim,
    float (&sum)[Sums][std::size_t{Team::lanes}], index_t step = 1)
{
    for (auto& row : sum)
    {
        for (float& x : row) { x = 0.0F; }
    }
    for (int d = 0; d < dim; ++d)
    {
        for (std::size_t k = 0; k < Sums; ++k)
        {
            for (int l = 0; l < Team::lanes; ++l) { sum[k][l] += direction[k][d * step] * column[d * tile_tokens + l]; }
        }
    }
}

/// Multiplies a tile's first tokens, as columns, by n directions: take(j, i, sums) gets, for tokens i, i + 1, ..., the sums over
/// d, ascending, of columns[d][i] * direction(j)[step d].
template <team Team, class Direction, class Take>
MDKV_HD void project_columns(Team const& t, float const* columns, int tokens, int dim, int n,
    Direction const& direction, Take const& take, index_t step = 1)
{
    constexpr int all     = 8; // sums that grow side by side
    constexpr int lanes   = Team::lanes;
    constexpr int vectors = tile_tokens / lanes; // vectors of a column
    for (int k = member(t); k < (n + all - 1) / all * vectors; k += members(t))
    {
        int const first = k / vectors * all;
        int const i     = k % vectors * lanes;
        if (i >= tokens) { continue; }
        float const* directions[all]{};
        for (int j = 0; j < all; ++j) { directions[j] = direction(first + j < n ? first + j : first); }
        float sums[all][std::size_t{lanes}];
        column_products(t, directions, columns + i, dim, sums, step);
        for (int j = 0; j < all && first + j < n; ++j) { take(first + j, i, sums[j]); }
    }
}

/// x[j][i] = coordinate c + j, for j < n, of each of a tile's first tokens in a head's basis, from its `dim` coordinates in
/// `columns`; or, back from the basis, of the vector itself. All members have seen x and columns, and all see the result.
template <team Team, class Basis>
MDKV_OUTLINE MDKV_HD void turn_columns(Team const& t, float const* columns, int tokens, int dim, Basis const& basis,
    index_t h, bool back, int c, int n, float* x)
{
    t.sync();
    project_columns(
        t, columns, tokens, dim, n, [&](int j) { return back ? basis.row(h, 0) + c + j : basis.row(h, c + j); },
        [&](int j, int i, auto const& sums) {
            for (int l = 0; l < Team::lanes; ++l) { x[j * tile_tokens + i + l] = sums[l]; }
        },
        back ? basis.stride(1) : 1);
    t.sync();
}

/// to[l] = 2^x[l] for x <= 127, to a few units of rounding; 0 below -126. A backend may have an overload of its own.
template <team Team>
MDKV_HD void powers_of_two(Team const&, float const (&x)[std::size_t{Team::lanes}], float* to)
{
    for (int l = 0; l < Team::lanes; ++l) { to[l] = x[l] < -126.0F ? 0.0F : exp2f(x[l]); }
}

} // namespace MDKV_NAMESPACE::detail
