/// \file hadamard.hpp: the rotation of coordinates before they become codes, so that no single one sets the scale.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/team.hpp>

namespace MDKV_NAMESPACE::detail
{

/// Size of the next block of n > 0 coordinates: the largest power of two that is no larger. A group is rotated block by
/// block, from its first coordinate on: 64 at once, 48 as 32 and 16, 7 as 4, 2 and 1.
[[nodiscard]] MDKV_HD constexpr index_t hadamard_block(index_t n) noexcept
{
    while ((n & (n - 1)) != 0) { n &= n - 1; } // only the highest bit stays
    return n;
}

/// 1 / sqrt(n) for a power of two n.
[[nodiscard]] MDKV_HD constexpr float hadamard_factor(index_t n) noexcept
{
    float factor = 1.0F;
    for (; n >= 4; n /= 4) { factor *= 0.5F; }
    return n == 2 ? factor * 0.70710678118654752F : factor;
}

/// The steps of `hadamard` that combine `Count` coordinates, from `half` on, in a block of n coordinates; and the product of the
/// last step. Members share the sums out. All loops over registers are unrolled, because only constant indices choose them.
template <int Count, int Vectors, team Team>
MDKV_HD void hadamard_steps(Team const& t, float* x, int n, int half) noexcept
{
    constexpr int lanes = Vectors % Team::register_lanes == 0 ? Team::register_lanes : 1;
    float const factor  = Count * half == n ? hadamard_factor(n) : 1.0F;
    for (int k = member(t); k < n / Count * (Vectors / lanes); k += members(t))
    {
        int const p       = k / (Vectors / lanes);
        int const i       = (p & -half) * Count + (p & (half - 1)); // (half is a power of two)
        float* const from = x + i * Vectors + k % (Vectors / lanes) * lanes;
        lane_floats<lanes> v[std::size_t{Count}];
        MDKV_UNROLL
        for (int c = 0; c < Count; ++c) { v[c] = load_lanes<lane_floats<lanes>>(from + c * half * Vectors); }
        MDKV_UNROLL
        for (int step = 1; step < Count; step *= 2)
        {
            MDKV_UNROLL
            for (int c = 0; c < Count; ++c)
            {
                if ((c & step) != 0) { continue; }
                lane_floats<lanes> const a = v[c];
                lane_floats<lanes> const b = v[c + step];
                v[c]                       = a + b;
                v[c + step]                = a - b;
            }
        }
        MDKV_UNROLL
        for (int c = 0; c < Count; ++c)
        {
            v[c] *= factor;
            store_lanes(from + c * half * Vectors, v[c]);
        }
    }
    t.sync();
}

/// x := H x / sqrt(n) for each block of n coordinates, H the Hadamard matrix of order n with H(i, j) = -1 to the number of
/// bits that i and j share: n log n sums, then one product each, for `Vectors` vectors side by side whose coordinates are
/// `Vectors` apart. Orthonormal and its own inverse: products of two rotated vectors equal the originals' products, and a
/// second rotation gives the original back. All members have seen x, and all see the result.
template <int Vectors, team Team>
MDKV_HD void hadamard(Team const& t, float* x, int group) noexcept
{
    for (int n = 0; group > 0; group -= n, x += n * Vectors)
    {
        n        = static_cast<int>(hadamard_block(group));
        int half = 1;
        if constexpr (Team::lanes > 1) // three steps a pass over memory, with eight coordinates in registers
        {
            for (; 8 * half <= n; half *= 8) { hadamard_steps<8, Vectors>(t, x, n, half); }
        }
        for (; half < n; half *= 2) { hadamard_steps<2, Vectors>(t, x, n, half); }
    }
}

} // namespace MDKV_NAMESPACE::detail
