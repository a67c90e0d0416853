/// \file pack_tile.hpp: up to sixteen tokens gathered from anywhere, written as one tile of a run, whole or projected, in elements or in codes (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/detail/quantised_tile.hpp>
#include <mdkv/cpu/detail/repeat.hpp>
#include <mdkv/cpu/detail/transpose.hpp>
#include <mdkv/cpu/detail/turn.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/tile.hpp>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstring>

namespace mdkv::cpu::detail
{

/// Rows of up to sixteen tokens, where the caller keeps them; places beyond the last token repeat one of them.
template <element T>
struct token_rows
{
    std::array<T const*, static_cast<std::size_t>(tile_tokens)> row{};
    index_t count = 0;
};

/// Writes n floats as elements of T at any address.
template <element T>
inline void narrow_row(float const* from, T* to, index_t n) noexcept
{
    if constexpr (std::same_as<T, float>)
    {
        std::memcpy(static_cast<void*>(to), from, static_cast<std::size_t>(n) * sizeof(float));
        return;
    }
    index_t i = 0;
    for (; i + simd::lanes <= n; i += simd::lanes) { simd::narrow_to(to + i, simd::load(from + i)); }
    for (; i < n; ++i)
    {
        T const value = narrow<T>(from[i]);
        std::memcpy(static_cast<void*>(to + i), &value, sizeof value);
    }
}

/// columns[d][t] = row[t][first + d] for d < n: sixteen tokens side by side, bit for bit.
template <element T>
inline void gather_columns(token_rows<T> const& tokens, index_t first, index_t n, T* columns) noexcept
{
    using line = typename square<sizeof(T)>::line;
    index_t d  = 0;
    for (; d + tile_tokens <= n; d += tile_tokens)
    {
        line x[tile_tokens];
        for (std::size_t t = 0; t < 16; ++t) { std::memcpy(&x[t], tokens.row[t] + first + d, sizeof(line)); }
        transpose(x);
        std::memcpy(static_cast<void*>(columns + d * tile_tokens), x, sizeof x);
    }
    for (; d < n; ++d)
    {
        for (std::size_t t = 0; t < 16; ++t)
        {
            std::memcpy(static_cast<void*>(columns + d * tile_tokens + t), tokens.row[t] + first + d, sizeof(T));
        }
    }
}

/// tile[d][t] = row[t][d], bit for bit; a tile of fewer tokens is as much narrower.
template <element T>
inline void write_key_tile(token_rows<T> const& tokens, index_t dim, T* tile) noexcept
{
    if (tokens.count == tile_tokens)
    {
        gather_columns(tokens, 0, dim, tile);
        return;
    }
    T columns[tile_tokens * tile_tokens];
    auto const width = static_cast<std::size_t>(tokens.count) * sizeof(T);
    for (index_t d = 0; d < dim; d += tile_tokens)
    {
        index_t const n = std::min(tile_tokens, dim - d);
        gather_columns(tokens, d, n, columns);
        for (index_t i = 0; i < n; ++i)
        {
            std::memcpy(static_cast<void*>(tile + (d + i) * tokens.count), columns + i * tile_tokens, width);
        }
    }
}

/// values[t][d] = row[t][d], bit for bit.
template <element T>
inline void write_value_rows(token_rows<T> const& tokens, index_t dim, T* values) noexcept
{
    auto const bytes = static_cast<std::size_t>(dim) * sizeof(T);
    for (index_t t = 0; t < tokens.count; ++t)
    {
        std::memcpy(static_cast<void*>(values + t * dim), tokens.row[static_cast<std::size_t>(t)], bytes);
    }
}

/// Some coordinates of sixteen tokens, their own or in a head's basis.
struct coordinate_tile
{
    static constexpr index_t most_coordinates = 64;
    static constexpr index_t most_dims        = 128;

    float at[most_coordinates][tile_tokens]{}; // [coordinate][token]

    /// at[c][t] = row[t][first + c] for c < coordinates, at most most_coordinates.
    template <element T>
    void widen(token_rows<T> const& tokens, index_t first, index_t coordinates) noexcept
    {
        T raw[most_coordinates * tile_tokens];
        gather_columns(tokens, first, coordinates, raw);
        tile::widen_row(raw, &at[0][0], coordinates * tile_tokens);
    }

    /// at[c][t] = sum over d of row[t][d] * basis[c * basis_step + d], for `coordinates` at most most_coordinates.
    template <element T>
    void project(
        token_rows<T> const& tokens, index_t dim, float const* basis, index_t basis_step, index_t coordinates) noexcept
    {
        T raw[most_dims * tile_tokens];
        float column[most_dims * tile_tokens];
        std::fill_n(&at[0][0], coordinates * tile_tokens, 0.0F);
        for (index_t d = 0; d < dim; d += most_dims)
        {
            index_t const n = std::min(most_dims, dim - d);
            gather_columns(tokens, d, n, raw);
            tile::widen_row(raw, column, n * tile_tokens);
            for (index_t c = 0; c < coordinates; c += step)
            {
                add(column, n, basis + c * basis_step + d, basis_step, std::min(step, coordinates - c), at + c);
            }
        }
    }

    /// rows[t][c] = at[c][t] for c < most_coordinates.
    void transpose_to(float (&rows)[tile_tokens][most_coordinates]) const noexcept
    {
        using line = square<sizeof(float)>::line;
        for (index_t c = 0; c < most_coordinates; c += tile_tokens)
        {
            line x[tile_tokens];
            std::memcpy(x, at[c], sizeof x);
            transpose(x);
            for (index_t t = 0; t < tile_tokens; ++t) { std::memcpy(rows[t] + c, &x[t], sizeof(line)); }
        }
    }

private:
    static constexpr int vectors  = int{tile_tokens} / simd::lanes;
    static constexpr index_t step = 8 / vectors; // coordinates at a time: eight sums keep the multiply-add units busy

    /// to[c] += column * basis row c for at most `step` coordinates. Missing ones repeat the first and are not written.
    static void add(float const* column, index_t n, float const* basis, index_t basis_step, index_t coordinates,
        float (*to)[tile_tokens]) noexcept
    {
        simd::floats acc[step][vectors];
        float const* direction[step];
        for (index_t c = 0; c < step; ++c)
        {
            index_t const present = c < coordinates ? c : 0;
            direction[c]          = basis + present * basis_step;
            for (int v = 0; v < vectors; ++v) { acc[c][v] = simd::load(to[present] + v * simd::lanes); }
        }
        for (index_t d = 0; d < n; ++d)
        {
            repeat<int{step}>([&](auto c) {
                simd::floats const factor = simd::broadcast(direction[c][d]);
                repeat<vectors>(
                    [&](auto v) { acc[c][v] += factor * simd::load(column + d * tile_tokens + v * simd::lanes); });
            });
        }
        for (index_t c = 0; c < coordinates; ++c)
        {
            for (int v = 0; v < vectors; ++v) { simd::store(to[c] + v * simd::lanes, acc[c][v]); }
        }
    }
};

/// Projected keys of a tile: tile[c][t].
template <element T>
inline void write_projected_keys(token_rows<T> const& tokens, index_t dim, float const* basis, index_t basis_step,
    index_t coordinates, T* tile) noexcept
{
    coordinate_tile part;
    for (index_t c = 0; c < coordinates; c += coordinate_tile::most_coordinates)
    {
        index_t const n = std::min(coordinate_tile::most_coordinates, coordinates - c);
        part.project(tokens, dim, basis + c * basis_step, basis_step, n);
        for (index_t i = 0; i < n; ++i) { narrow_row(part.at[i], tile + (c + i) * tokens.count, tokens.count); }
    }
}

/// Projected values of a tile: values[t][c].
template <element T>
inline void write_projected_values(token_rows<T> const& tokens, index_t dim, float const* basis, index_t basis_step,
    index_t coordinates, T* values) noexcept
{
    coordinate_tile part;
    for (index_t c = 0; c < coordinates; c += coordinate_tile::most_coordinates)
    {
        index_t const n = std::min(coordinate_tile::most_coordinates, coordinates - c);
        part.project(tokens, dim, basis + c * basis_step, basis_step, n);
        float rows[tile_tokens][coordinate_tile::most_coordinates];
        part.transpose_to(rows);
        for (index_t t = 0; t < tokens.count; ++t) { narrow_row(rows[t], values + t * coordinates + c, n); }
    }
}

/// A tile of codes: the first `coordinates` coordinates in a basis, or where `basis` is null the vectors' own, turned.
template <element T>
inline void write_coded_tile(token_rows<T> const& tokens, index_t dim, float const* basis, index_t basis_step,
    index_t coordinates, storage kind, code_order order, std::byte* tile) noexcept
{
    static_assert(coordinate_tile::most_coordinates % quantised_group == 0);
    coordinate_tile part;
    for (index_t c = 0; c < coordinates; c += coordinate_tile::most_coordinates)
    {
        index_t const n = std::min(coordinate_tile::most_coordinates, coordinates - c);
        if (basis == nullptr)
        {
            part.widen(tokens, c, n);
            turn_columns(part.at, n);
        }
        else { part.project(tokens, dim, basis + c * basis_step, basis_step, n); }
        write_codes(part.at, c, n, {kind, order, tokens.count}, tile);
    }
}

} // namespace mdkv::cpu::detail
