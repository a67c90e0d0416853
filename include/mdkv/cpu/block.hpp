/// \file block.hpp: blocks of token rows, read as floats and multiplied while they are in cache.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/tile.hpp>
#include <mdkv/cpu/width.hpp>

#include <algorithm>

namespace mdkv::cpu::inline MDKV_CPU_WIDTH
{

/// Rows of a block: at 256 floats each they fill half of a second-level cache's smallest common size.
inline constexpr index_t block_rows = 64;

/// Reads rows [first, first + count) of a head into [block_rows, D] and zeroes the rest.
template <element T>
MDKV_OUTLINE inline void read_block(
    in_view<T, 3, backend> const& from, index_t head, index_t first, index_t count, float* rows) noexcept
{
    index_t const dim = from.extent(2);
    for (index_t t = 0; t < count; ++t)
    {
        tile::widen_row(from.data_handle() + from.offset(head, first + t, index_t{0}), rows + t * dim, dim);
    }
    std::fill_n(rows + count * dim, (block_rows - count) * dim, 0.0F);
}

/// out [block_rows, width] = rows [block_rows, depth] * matrix [depth, width]; width a multiple of simd::lanes.
MDKV_OUTLINE inline void multiply_block(
    float const* rows, index_t depth, float const* matrix, index_t width, float* out) noexcept
{
    for (index_t t = 0; t < block_rows; t += tile::rows)
    {
        for (index_t c = 0; c < width; c += simd::lanes)
        {
            tile::accumulators<1> acc{};
            tile::multiply_add<1>(rows + t * depth, depth, 1, matrix + c, width, depth, acc);
            for (int i = 0; i < tile::rows; ++i) { simd::store(out + (t + i) * width + c, acc[i][0]); }
        }
    }
}

} // namespace mdkv::cpu::inline MDKV_CPU_WIDTH
