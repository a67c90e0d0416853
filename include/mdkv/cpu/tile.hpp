/// \file tile.hpp: the one matrix product of the CPU kernels: a few rows times a few vectors, kept in registers; and blocks of token rows, read as floats and multiplied while they are in cache.
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/detail/lanes.hpp>

#include <algorithm>
#include <cstring>

namespace MDKV_NAMESPACE::cpu::tile
{

/// Rows and vectors of one tile: twice as many accumulators as keep two multiply-add units busy, and few enough for the registers.
inline constexpr int rows    = simd::lanes == 16 ? 8 : 4;
inline constexpr int vectors = 2;
inline constexpr int width   = vectors * simd::lanes;

/// Smallest multiple of `unit` that holds n.
[[nodiscard]] constexpr index_t round_up(index_t n, index_t unit) noexcept
{
    return (n + unit - 1) / unit * unit;
}

template <int Vectors>
using accumulators = simd::floats[rows][std::size_t{Vectors}];

/// acc[i][:] += sum over k < depth of a[i * row_step + k * k_step] * b[k * b_step + :]
template <int Vectors>
inline void multiply_add(float const* a, index_t row_step, index_t k_step, float const* b, index_t b_step,
    index_t depth, accumulators<Vectors>& acc) noexcept
{
    accumulators<Vectors> own; // in registers, because every loop that indexes it is unrolled
    std::memcpy(own, acc, sizeof own);
    for (index_t k = 0; k < depth; ++k)
    {
        simd::floats column[std::size_t{Vectors}];
        MDKV_UNROLL
        for (int v = 0; v < Vectors; ++v) { column[v] = simd::load(b + v * simd::lanes); }
        MDKV_UNROLL
        for (int i = 0; i < rows; ++i)
        {
            simd::floats const factor = simd::broadcast(a[i * row_step]);
            MDKV_UNROLL
            for (int v = 0; v < Vectors; ++v) { own[i][v] += factor * column[v]; }
        }
        a += k_step;
        b += b_step;
    }
    std::memcpy(acc, own, sizeof own);
}

/// Writes n elements of any type as floats.
template <element T>
MDKV_OUTLINE void widen_row(T const* from, float* to, index_t n) noexcept
{
    index_t const whole = n / simd::lanes * simd::lanes;
    for (index_t i = 0; i < whole; i += simd::lanes) { simd::store(to + i, simd::load(from + i)); }
    for (index_t i = whole; i < n; ++i) { to[i] = widen(mdkv::detail::load_at<T>(from + i)); }
}

[[nodiscard]] MDKV_OUTLINE inline float dot(float const* x, float const* y, index_t n) noexcept
{
    simd::floats wide = simd::broadcast(0.0F);
    index_t i         = 0;
    for (; i + simd::lanes <= n; i += simd::lanes) { wide += simd::load(x + i) * simd::load(y + i); }
    float total = simd::sum(wide);
    for (; i < n; ++i) { total += x[i] * y[i]; }
    return total;
}

/// Tokens of a block: at 256 floats each they fill half of a second-level cache's smallest common size.
inline constexpr index_t block = 64;

/// Reads rows [first, first + count) of a head into [block, D] and zeroes the rest.
template <element T>
MDKV_OUTLINE inline void read_block(
    in_view<T, 3, backend> const& from, index_t head, index_t first, index_t count, float* to) noexcept
{
    index_t const dim = from.extent(2);
    for (index_t t = 0; t < count; ++t)
    {
        widen_row(from.data_handle() + from.offset(head, first + t, index_t{0}), to + t * dim, dim);
    }
    std::fill_n(to + count * dim, (block - count) * dim, 0.0F);
}

/// out [block, columns] = from [block, depth] * matrix [depth, columns]; columns a multiple of simd::lanes. Not inlined,
/// because in a larger function g++ 12 keeps the sums in memory.
[[gnu::noinline]] MDKV_OUTLINE inline void multiply_block(
    float const* from, index_t depth, float const* matrix, index_t columns, float* out) noexcept
{
    for (index_t t = 0; t < block; t += rows)
    {
        for (index_t c = 0; c < columns; c += simd::lanes)
        {
            accumulators<1> acc{};
            multiply_add<1>(from + t * depth, depth, 1, matrix + c, columns, depth, acc);
            for (int i = 0; i < rows; ++i) { simd::store(out + (t + i) * columns + c, acc[i][0]); }
        }
    }
}

} // namespace MDKV_NAMESPACE::cpu::tile
