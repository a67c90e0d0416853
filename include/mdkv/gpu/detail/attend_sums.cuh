/// \file attend_sums.cuh: a warp's softmax and sums of values in registers, the states that blocks leave in memory, and rotations by a warp (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/detail/attend.hpp>
#include <mdkv/detail/hadamard.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/gpu/detail/attend_rows.cuh>
#include <mdkv/gpu/device.cuh>

#include <cmath>

#include <vector_types.h>

namespace MDKV_NAMESPACE::gpu::kernels
{

using mdkv::detail::attend_sizes;

/// Where blocks leave softmaxes and sums: float [blocks][attend_queries][4], the logit whose weight is 1, the sum of weights, and
/// 1 if the sums of values are projected, then float [blocks][attend_queries][columns], those sums, then int [sequences][heads][2],
/// the slices of each head.
struct attend_states
{
    attend_sizes sizes;
    int columns  = 0; ///< columns of a block
    int blocks   = 0;
    int heads    = 0; ///< KV heads of all sequences
    float* begin = nullptr;

    /// Blocks that share the coordinates of values.
    [[nodiscard]] MDKV_HD int column_blocks() const { return (sizes.values + columns - 1) / columns; }
    [[nodiscard]] MDKV_HD index_t floats() const
    {
        return index_t{blocks} * attend_queries * (4 + columns) + 2 * heads;
    }
    [[nodiscard]] MDKV_HD float* softmax(int block, int g) const
    {
        return begin + (index_t{block} * attend_queries + g) * 4;
    }
    [[nodiscard]] MDKV_HD float* sums(int block, int g) const
    {
        return begin + index_t{blocks} * attend_queries * 4 + (index_t{block} * attend_queries + g) * columns;
    }
    [[nodiscard]] MDKV_HD int* slices(int head) const
    {
        return reinterpret_cast<int*>(sums(blocks, 0)) + index_t{2} * head;
    }
};

/// x := H x / sqrt(n) by the lanes of a warp, in the order of detail/hadamard.hpp, for a block of n = `size` numbers up to 32, or
/// for Numbers / 2 groups of 64.
template <int Numbers>
__device__ __forceinline__ void rotate_block(float* x, int size)
{
    int const lane   = device::lane();
    bool const there = Numbers > 1 || lane < size;
    float of[std::size_t{Numbers}]; // numbers lane, lane + 32, ...
    MDKV_UNROLL
    for (int i = 0; i < Numbers; ++i) { of[i] = there ? x[lane + i * device::warp_size] : 0.0F; }
    MDKV_UNROLL
    for (int step = 1; step < (Numbers > 1 ? device::warp_size : size); step *= 2)
    {
        MDKV_UNROLL
        for (int i = 0; i < Numbers; ++i)
        {
            float const other = device::shuffle_xor(of[i], step);
            of[i]             = (lane & step) != 0 ? other - of[i] : of[i] + other;
        }
    }
    MDKV_UNROLL
    for (int i = 0; i + 1 < Numbers; i += 2)
    {
        float const first = of[i];
        of[i]             = first + of[i + 1];
        of[i + 1]         = first - of[i + 1];
    }
    float const factor = Numbers > 1 ? 0.125F : mdkv::detail::hadamard_factor(size);
    MDKV_UNROLL
    for (int i = 0; i < Numbers && there; ++i) { x[lane + i * device::warp_size] = of[i] * factor; }
}
/// The same for n numbers, block by block.
__device__ inline void rotate_by_warp(float* x, int n)
{
    MDKV_ROLLED
    for (int size = 0; n > 0; x += size, n -= size)
    {
        size = n >= 2 * group ? 2 * group : static_cast<int>(mdkv::detail::hadamard_block(n));
        if (size == 2 * group) { rotate_block<4>(x, size); }
        else if (size == group) { rotate_block<2>(x, size); }
        else { rotate_block<1>(x, size); }
    }
    device::sync_warp();
}

/// The softmax and the sums of queries 2p and 2p + 1, in a lane with p = lane % 4.
template <int Columns>
struct attend_sums
{
    // Lazy rescaling: the running maximum moves only if a logit exceeds it by `most_over` (base 2), and then to `lift` below
    // that logit. The largest weight is from 2^11 to 2^15, within half's range and far above its smallest numbers, and most
    // tiles need no exchange between lanes.
    static constexpr float most_over  = 15.0F;
    static constexpr float lift       = 11.0F;
    static constexpr float no_top     = -1e30F;   ///< instead of -infinity: hidden logits minus a top are never NaN
    static constexpr float no_inverse = 0x1p100F; ///< every scale but 0 is too large for it

    float of[Columns / 16][4]{};      ///< sums as multiply_tile leaves them
    float bias[Columns / group][2]{}; ///< sums of the weighted minima of codes
    float top[2]{no_top, no_top};
    float total[2]{};           ///< sums of the lane's own weights
    float inverse = no_inverse; ///< power of two by which scales are multiplied: weights times scales are halves then

    /// x := weights of 16 tokens with logits x * factor: [token][query], as multiply_tile leaves them.
    __device__ void soften(float (&x)[4], float2 factor)
    {
        float const by[2]{factor.x, factor.y};
        float over[4];
        bool move          = false;
        auto const compare = [&] {
            MDKV_UNROLL
            for (int i = 0; i < 4; ++i)
            {
                over[i] = fmaf(x[i], by[i % 2], -top[i % 2]);
                move    = move || over[i] > most_over;
            }
        };
        compare();
        if (device::any(move))
        {
            move_tops(x, by);
            compare();
        }
        MDKV_UNROLL
        for (int i = 0; i < 4; ++i)
        {
            x[i] = device::exp2(over[i]);
            total[i % 2] += x[i];
        }
    }

    /// Weights times the scales of a group of codes, as factors of codes; adds the minima's share. The lane's two tokens have
    /// `scales` and `minima`.
    template <int Limbs>
    __device__ void weigh(float const (&w)[4], std::uint32_t scales, std::uint32_t minima, int number,
        std::uint32_t (&to)[std::size_t{Limbs}][2])
    {
        MDKV_UNROLL
        for (int i = 0; i < 2; ++i)
        {
            bias[number][i] = fmaf(w[i], low_half(minima), fmaf(w[i + 2], high_half(minima), bias[number][i]));
        }
        constexpr float most = 1.0F; // times the largest weight it is half of what a half can be
        float first          = low_half(scales) * inverse;
        float second         = high_half(scales) * inverse;
        if (device::any(first > most || second > most))
        {
            move_inverse(low_half(scales), high_half(scales));
            first  = low_half(scales) * inverse;
            second = high_half(scales) * inverse;
        }
        transposed<half, Limbs>({w[0] * first, w[1] * first, w[2] * second, w[3] * second}, to);
    }

    [[nodiscard]] __device__ float top_of(int i) const { return total[i] == 0.0F ? mdkv::detail::empty_lse : top[i]; }

    /// Adds up what lanes have of the same query.
    __device__ void join_lanes()
    {
        MDKV_UNROLL
        for (int step = 4; step < device::warp_size; step *= 2)
        {
            MDKV_UNROLL
            for (int i = 0; i < 2; ++i) { total[i] += device::shuffle_xor(total[i], step); }
            MDKV_UNROLL
            for (int i = 0; i < Columns / group * 2; ++i)
            {
                bias[i / 2][i % 2] += device::shuffle_xor(bias[i / 2][i % 2], step);
            }
        }
    }

    /// Writes the sums times `factor`, in their order, to [query][Columns], of which `width` columns are in use.
    template <storage Kind>
    __device__ __forceinline__ void write(int lane, float* to, float const (&factor)[2], int width) const
    {
        int const g      = lane / 4;
        float const unit = 0x1p24F / inverse;
        float* const row[2]{to + lane % 4 * 2 * Columns, to + (lane % 4 * 2 + 1) * Columns};
        MDKV_UNROLL
        for (int m = 0; m < Columns / 16; ++m)
        {
            int const first  = m / 4 * group; // first column of the group
            int const size   = width - first < group ? width - first : group;
            int const middle = (size + 1) / 2; // codes beyond are in the words' high halves, or in words further on
            MDKV_UNROLL
            for (int i = 0; i < 4; ++i)
            {
                int column = 16 * m + g + i / 2 * 8;
                float sum  = of[m][i];
                if constexpr (Kind != storage::plain)
                {
                    int const in_half = 4 * g + m % 2 * 2 + i / 2;
                    column            = in_half < middle ? first + m % 4 / 2 * middle + in_half : width;
                    sum = sum * unit * (Kind == storage::int4 && m % 4 >= 2 ? 0.0625F : 1.0F) + bias[m / 4][i % 2];
                }
                if (column < width) { row[i % 2][column] = sum * factor[i % 2]; }
            }
        }
        MDKV_ROLLED
        for (int i = lane; width < Columns && i < attend_queries * Columns; i += device::warp_size)
        {
            if (i % Columns >= width) { to[i] = 0.0F; }
        }
    }

private:
    /// Raises a query's top to `lift` below its largest logit, if that is far above.
    __device__ void move_tops(float const (&x)[4], float const (&by)[2])
    {
        float factor[2];
        MDKV_UNROLL
        for (int i = 0; i < 2; ++i)
        {
            float const most = device::largest_of_lanes<4>(fmaxf(x[i] * by[i], x[i + 2] * by[i]));
            bool const rises = most > top[i] + most_over;
            float const to   = rises ? most - lift : top[i];
            factor[i]        = rises ? device::exp2(top[i] - to) : 1.0F;
            top[i]           = to;
            total[i] *= factor[i];
        }
        MDKV_UNROLL
        for (int i = 0; i < Columns / group * 2; ++i) { bias[i / 2][i % 2] *= factor[i % 2]; }
        MDKV_UNROLL
        for (int i = 0; i < Columns / 16 * 4; ++i) { of[i / 4][i % 4] *= factor[i % 2]; }
    }

    /// Chooses `inverse` anew, so that the largest scale times it is from a quarter to a half.
    __device__ void move_inverse(float first, float second)
    {
        float const most             = device::largest_of_lanes<4>(fmaxf(first, second));
        std::uint32_t const exponent = mdkv::detail::bits_of_float(most) >> 23U; // the exponent of a half's value, or 0
        float const next             = mdkv::detail::float_of_bits((exponent < 251U ? 252U - exponent : 1U) << 23U);
        float const by               = next / inverse;
        inverse                      = next;
        MDKV_UNROLL
        for (int i = 0; i < Columns / 16 * 4; ++i) { of[i / 4][i % 4] *= by; }
    }
};

} // namespace MDKV_NAMESPACE::gpu::kernels
