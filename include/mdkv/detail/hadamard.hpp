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

/// x := H x for numbers, or vectors of neighbours, in registers. All loops are unrolled, because only constant indices choose
/// registers.
template <class V, std::size_t Count>
[[gnu::always_inline]] MDKV_HD inline void hadamard_registers(V (&x)[Count]) noexcept
{
    MDKV_UNROLL
    for (std::size_t step = 1; step < Count; step *= 2)
    {
        MDKV_UNROLL
        for (std::size_t k = 0; k < Count; ++k)
        {
            if ((k & step) != 0) { continue; }
            V const a   = x[k];
            V const b   = x[k + step];
            x[k]        = a + b;
            x[k + step] = a - b;
        }
    }
}

/// The steps of hadamard below that combine `Count` coordinates, from `half` on, in a block of n coordinates; and the
/// product of the last step.
template <int Count, int Lanes>
MDKV_HD void hadamard_steps(float* x, index_t n, index_t stride, index_t half) noexcept
{
    using floats       = lane_floats<Lanes>;
    float const factor = Count * half == n ? hadamard_factor(n) : 1.0F;
    for (index_t p = 0; p < n / Count; ++p)
    {
        index_t const i = (p & -half) * Count + (p & (half - 1)); // (half is a power of two)
        floats v[std::size_t{Count}];
        MDKV_UNROLL
        for (int k = 0; k < Count; ++k) { v[k] = load_lanes<floats>(x + (i + k * half) * stride); }
        hadamard_registers(v);
        MDKV_UNROLL
        for (int k = 0; k < Count; ++k)
        {
            v[k] *= factor;
            store_lanes(x + (i + k * half) * stride, v[k]);
        }
    }
}

/// x := H x / sqrt(n) for each block of n coordinates, H the Hadamard matrix of order n with H(i, j) = -1 to the number of
/// bits that i and j share: n log n sums, then one product each, for `Lanes` vectors side by side whose coordinates are
/// `stride` apart. Orthonormal and its own inverse: products of two rotated vectors equal the originals' products, and a
/// second rotation gives the original back.
template <int Lanes = 1>
MDKV_HD void hadamard(float* x, index_t group, index_t stride = Lanes) noexcept
{
    for (index_t n = 0; group > 0; group -= n, x += n * stride)
    {
        n            = hadamard_block(group);
        index_t half = 1;
        if constexpr (Lanes > 1) // three steps a pass over memory, with eight coordinates in registers
        {
            for (; 8 * half <= n; half *= 8) { hadamard_steps<8, Lanes>(x, n, stride, half); }
        }
        for (; half < n; half *= 2) { hadamard_steps<2, Lanes>(x, n, stride, half); }
    }
}

/// The same for `Vectors` vectors side by side, `Vectors` apart, by a team. Members of a block share the sums of every step
/// out; all have seen x, and all see the result.
template <int Vectors, team Team>
MDKV_HD void hadamard_by_team(Team const& t, float* x, int n) noexcept
{
    if constexpr (Team::lanes > 1)
    {
        constexpr int lanes = Team::register_lanes;
        for (int i = 0; i < Vectors; i += lanes) { hadamard<lanes>(x + i, n, Vectors); }
    }
    else
    {
        for (int half = 1; half < n; half *= 2)
        {
            int const block    = 2 * half;
            int const blocks   = n & -block;                            // coordinates in blocks that are not smaller
            int const last     = (n & block) != 0 ? blocks - block : n; // first coordinate of a block of this size
            float const factor = hadamard_factor(block);
            for (int p = member(t); p < blocks / 2 * Vectors; p += members(t))
            {
                int const pair  = p / Vectors;
                int const i     = (pair & -half) * 2 + (pair & (half - 1));
                float const own = i < last ? 1.0F : factor;
                float* const a  = x + i * Vectors + p % Vectors;
                float* const b  = a + half * Vectors;
                float const sum = *a + *b;
                *b              = (*a - *b) * own;
                *a              = sum * own;
            }
            t.sync();
        }
    }
}

} // namespace MDKV_NAMESPACE::detail
