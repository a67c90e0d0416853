/// \file hadamard.hpp: the rotation of coordinates before they become codes, so that no single one sets the scale.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/detail/lanes.hpp>

namespace mdkv::inline MDKV_MACHINE::detail
{

/// Size of the next block of n > 0 coordinates: the largest power of two that is no larger. A group is rotated block by block,
/// from its first coordinate on: 64 at once, 48 as 32 and 16, 7 as 4, 2 and 1.
[[nodiscard]] MDKV_HD constexpr index_t hadamard_block(index_t n) noexcept
{
    while ((n & (n - 1)) != 0) { n &= n - 1; } // its highest bit alone
    return n;
}

/// 1 / sqrt(n) for a power of two n.
[[nodiscard]] MDKV_HD constexpr float hadamard_factor(index_t n) noexcept
{
    float factor = 1.0F;
    for (; n >= 4; n /= 4) { factor *= 0.5F; }
    return n == 2 ? factor * 0.70710678118654752F : factor;
}

/// x := H x / sqrt(n) for each block of n coordinates, H the Hadamard matrix of order n with H(i, j) = -1 to the number of bits
/// that i and j share: n log n sums, then one product each, for `Lanes` vectors side by side whose coordinates are `stride`
/// apart. Orthonormal and its own inverse: products of two rotated vectors are those of the originals, and a second rotation
/// gives the original back.
template <int Lanes = 1>
MDKV_HD void hadamard(float* x, index_t group, index_t stride = Lanes) noexcept
{
    using floats = lane_floats<Lanes>;
    for (index_t n = 0; group > 0; group -= n, x += n * stride)
    {
        n                  = hadamard_block(group);
        float const factor = hadamard_factor(n);
        for (index_t half = 1; half < n; half *= 2)
        {
            for (index_t i = 0; i < n; ++i)
            {
                if ((i & half) != 0) { continue; }
                floats a;
                floats b;
                __builtin_memcpy(&a, x + i * stride, sizeof a);
                __builtin_memcpy(&b, x + (i + half) * stride, sizeof b);
                floats sum        = a + b;
                floats difference = a - b;
                if (2 * half == n)
                {
                    sum *= factor;
                    difference *= factor;
                }
                __builtin_memcpy(x + i * stride, &sum, sizeof sum);
                __builtin_memcpy(x + (i + half) * stride, &difference, sizeof difference);
            }
        }
    }
}

} // namespace mdkv::inline MDKV_MACHINE::detail
