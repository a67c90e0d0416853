/// \file dot_tile.hpp: products of a few weight rows with a few tokens, for decoding: too few tokens to fill a matrix product
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "eigen.hpp"

namespace runner::detail
{

/// As many floats as one vector register of the machine holds.
inline constexpr std::int64_t lane_count = Eigen::internal::packet_traits<float>::size;
using float_lanes = float __attribute__((vector_size(sizeof(float) * static_cast<std::size_t>(lane_count))));

/// Tokens of a tile: its sums and operands stay in registers, of which AVX-512 has 32 and what came before it 16.
inline constexpr int tile_tokens = lane_count >= 16 ? 4 : 2;

/// out[t * out_stride + r] = sum over c of weights[r, c] * x[t, c] for a fixed number of rows and tokens; each lane
/// adds up its share of the products, the lanes are added at the end. The order does not depend on Rows and Tokens.
template <int Rows, int Tokens>
void dot_tile(float const* weights, float const* x, std::int64_t columns, float* out, std::int64_t out_stride)
{
    float_lanes sums[Rows][Tokens] = {};
    std::int64_t const whole       = columns - columns % lane_count;
    for (std::int64_t c = 0; c < whole; c += lane_count)
    {
        float_lanes token[Tokens];
        for (int t = 0; t < Tokens; ++t) { std::memcpy(&token[t], x + t * columns + c, sizeof(float_lanes)); }
        for (int r = 0; r < Rows; ++r)
        {
            float_lanes row;
            std::memcpy(&row, weights + r * columns + c, sizeof row);
            for (int t = 0; t < Tokens; ++t) { sums[r][t] += row * token[t]; }
        }
    }
    for (int r = 0; r < Rows; ++r)
    {
        for (int t = 0; t < Tokens; ++t)
        {
            float sum =
                Eigen::Map<Eigen::Array<float, lane_count, 1> const>(reinterpret_cast<float const*>(&sums[r][t])).sum();
            for (std::int64_t c = whole; c < columns; ++c) { sum += weights[r * columns + c] * x[t * columns + c]; }
            out[t * out_stride + r] = sum;
        }
    }
}

/// As dot_tile, for any number of tokens.
template <int Rows>
void dot_rows(float const* weights, float const* x, std::int64_t tokens, std::int64_t columns, float* out,
    std::int64_t out_stride)
{
    std::int64_t t = 0;
    for (; t + tile_tokens <= tokens; t += tile_tokens)
    {
        dot_tile<Rows, tile_tokens>(weights, x + t * columns, columns, out + t * out_stride, out_stride);
    }
    for (; t < tokens; ++t) { dot_tile<Rows, 1>(weights, x + t * columns, columns, out + t * out_stride, out_stride); }
}

} // namespace runner::detail
