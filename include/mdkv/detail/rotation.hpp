/// \file rotation.hpp: the turn that coordinates are given before they become codes, so that no single one sets the scale.
#pragma once

#include <mdkv/core/types.hpp>

namespace mdkv::detail
{

/// Groups of as many coordinates as a power of two are turned; others, which only odd dimensions have, stay as they are.
[[nodiscard]] MDKV_HD constexpr bool turns(index_t group) noexcept
{
    return group > 0 && (group & (group - 1)) == 0;
}

/// 1 / sqrt(n) for a power of two n.
[[nodiscard]] MDKV_HD constexpr float turn_factor(index_t n) noexcept
{
    float factor = 1.0F;
    for (; n >= 4; n /= 4) { factor *= 0.5F; }
    return n == 2 ? factor * 0.70710678118654752F : factor;
}

/// x := H x / sqrt(n), H the Hadamard matrix of order n with H(i, j) = -1 to the number of bits that i and j share: n log n
/// sums, then one product each. Coordinates are `stride` apart. Orthonormal and its own inverse: products with a vector
/// turned alike are those of the originals, and to turn again is to turn back. Where n is no power of two, nothing changes.
template <class Float>
MDKV_HD constexpr void turn(Float* x, index_t n, index_t stride = 1) noexcept
{
    if (!turns(n)) { return; }
    for (index_t half = 1; half < n; half *= 2)
    {
        for (index_t i = 0; i < n; ++i)
        {
            if ((i & half) != 0) { continue; }
            Float const a          = x[i * stride];
            Float const b          = x[(i + half) * stride];
            x[i * stride]          = a + b;
            x[(i + half) * stride] = a - b;
        }
    }
    Float const factor = turn_factor(n);
    for (index_t i = 0; i < n; ++i) { x[i * stride] *= factor; }
}

} // namespace mdkv::detail
