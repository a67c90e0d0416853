/// \file pack_tile.hpp: up to sixteen tokens gathered from anywhere, written as one tile of a run, whole or projected (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/simd.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

namespace mdkv::cpu::detail
{

/// Rows of up to sixteen tokens, where the caller keeps them.
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
    index_t i = 0;
    for (; i + simd::lanes <= n; i += simd::lanes) { simd::narrow_to(to + i, simd::load(from + i)); }
    for (; i < n; ++i)
    {
        T const value = narrow<T>(from[i]);
        std::memcpy(static_cast<void*>(to + i), &value, sizeof value);
    }
}

/// tile[d][t] = row[t][d], bit for bit.
template <element T>
inline void write_key_tile(token_rows<T> const& tokens, index_t dim, T* tile) noexcept
{
    constexpr auto bytes = sizeof(T);
    std::byte line[static_cast<std::size_t>(tile_tokens) * bytes];
    auto const width = static_cast<std::size_t>(tokens.count);
    for (index_t d = 0; d < dim; ++d)
    {
        for (std::size_t t = 0; t < width; ++t) { std::memcpy(line + t * bytes, tokens.row[t] + d, bytes); }
        std::memcpy(static_cast<void*>(tile + d * tokens.count), line, width * bytes);
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

/// Some coordinates of sixteen tokens in a head's basis.
struct projected_tile
{
    static constexpr index_t most_coordinates = 64;
    static constexpr index_t most_dims        = 128;

    float at[most_coordinates][tile_tokens]; // [coordinate][token]; 0 beyond the last token

    /// at[c][t] = sum over d of row[t][d] * basis[c * basis_step + d], for `coordinates` at most most_coordinates.
    template <element T>
    void project(token_rows<T> const& tokens, index_t dim, float const* basis, index_t basis_step, index_t coordinates) noexcept
    {
        std::memset(at, 0, sizeof at);
        float column[most_dims][tile_tokens];
        for (index_t d = 0; d < dim; d += most_dims)
        {
            index_t const n = std::min(most_dims, dim - d);
            transpose(tokens, d, n, column);
            for (index_t c = 0; c < coordinates; c += step)
            {
                add<T>(column, n, basis + c * basis_step + d, basis_step, std::min(step, coordinates - c), at + c);
            }
        }
    }

private:
    static constexpr index_t step = 4;

    template <element T>
    static void transpose(
        token_rows<T> const& tokens, index_t first, index_t n, float (&column)[most_dims][tile_tokens]) noexcept
    {
        if (tokens.count < tile_tokens) { std::memset(column, 0, sizeof column); }
        for (index_t t = 0; t < tokens.count; ++t)
        {
            T const* const row = tokens.row[static_cast<std::size_t>(t)] + first;
            index_t d          = 0;
            for (; d + simd::lanes <= n; d += simd::lanes)
            {
                simd::floats const x = simd::load(row + d);
                for (int i = 0; i < simd::lanes; ++i) { column[d + i][t] = x[i]; }
            }
            for (; d < n; ++d)
            {
                T value; // from any address
                std::memcpy(&value, row + d, sizeof value);
                column[d][t] = widen(value);
            }
        }
    }

    /// to[c] += column * basis row c for at most `step` coordinates. Missing ones repeat the first and are not written.
    template <element T>
    static void add(float const (&column)[most_dims][tile_tokens], index_t n, float const* basis, index_t basis_step,
        index_t coordinates, float (*to)[tile_tokens]) noexcept
    {
        constexpr int vectors = int{tile_tokens} / simd::lanes;
        simd::floats acc[step][vectors];
        float const* direction[step];
        for (index_t c = 0; c < step; ++c)
        {
            bool const present = c < coordinates;
            direction[c]       = basis + (present ? c * basis_step : 0);
            for (int v = 0; v < vectors; ++v) { acc[c][v] = simd::load(to[present ? c : 0] + v * simd::lanes); }
        }
        for (index_t d = 0; d < n; ++d)
        {
            for (index_t c = 0; c < step; ++c)
            {
                simd::floats const factor = simd::broadcast(direction[c][d]);
                for (int v = 0; v < vectors; ++v) { acc[c][v] += factor * simd::load(column[d] + v * simd::lanes); }
            }
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
    projected_tile projected;
    for (index_t c = 0; c < coordinates; c += projected_tile::most_coordinates)
    {
        index_t const n = std::min(projected_tile::most_coordinates, coordinates - c);
        projected.project(tokens, dim, basis + c * basis_step, basis_step, n);
        for (index_t i = 0; i < n; ++i) { narrow_row(projected.at[i], tile + (c + i) * tokens.count, tokens.count); }
    }
}

/// Projected values of a tile: values[t][c].
template <element T>
inline void write_projected_values(token_rows<T> const& tokens, index_t dim, float const* basis, index_t basis_step,
    index_t coordinates, T* values) noexcept
{
    projected_tile projected;
    for (index_t c = 0; c < coordinates; c += projected_tile::most_coordinates)
    {
        index_t const n = std::min(projected_tile::most_coordinates, coordinates - c);
        projected.project(tokens, dim, basis + c * basis_step, basis_step, n);
        for (index_t t = 0; t < tokens.count; ++t)
        {
            float row[projected_tile::most_coordinates];
            for (index_t i = 0; i < n; ++i) { row[i] = projected.at[i][t]; }
            narrow_row(row, values + t * coordinates + c, n);
        }
    }
}

} // namespace mdkv::cpu::detail
