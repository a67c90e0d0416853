/// \file hadamard.hpp: the rotation of coordinates before they become codes, so that no single one sets the scale.
#pragma once

#include <mdkv/core/types.hpp>

namespace mdkv::detail
{

/// Groups whose size is a power of two are rotated; others, which only odd dimensions have, stay as they are.
[[nodiscard]] MDKV_HD constexpr bool has_hadamard(index_t group) noexcept
{
    return group > 0 && (group & (group - 1)) == 0;
}

/// 1 / sqrt(n) for a power of two n.
[[nodiscard]] MDKV_HD constexpr float hadamard_factor(index_t n) noexcept
{
    float factor = 1.0F;
    for (; n >= 4; n /= 4) { factor *= 0.5F; }
    return n == 2 ? factor * 0.70710678118654752F : factor;
}

/// x := H x / sqrt(n), H the Hadamard matrix of order n with H(i, j) = -1 to the number of bits that i and j share: n log n
/// sums, then one product each, for `Lanes` vectors side by side whose coordinates are `stride` apart. Orthonormal and its
/// own inverse: products of two rotated vectors are those of the originals, and a second rotation gives the original back.
/// Where n is no power of two, nothing changes.
template <int Lanes = 1>
MDKV_HD constexpr void hadamard(float* x, index_t n, index_t stride = Lanes) noexcept
{
    if (!has_hadamard(n)) { return; }
    for (index_t half = 1; half < n; half *= 2)
    {
        for (index_t i = 0; i < n; ++i)
        {
            if ((i & half) != 0) { continue; }
            float* const low  = x + i * stride;
            float* const high = x + (i + half) * stride;
            for (int l = 0; l < Lanes; ++l)
            {
                float const a = low[l];
                float const b = high[l];
                low[l]        = a + b;
                high[l]       = a - b;
            }
        }
    }
    float const factor = hadamard_factor(n);
    for (index_t i = 0; i < n; ++i)
    {
        for (int l = 0; l < Lanes; ++l) { x[i * stride + l] *= factor; }
    }
}

} // namespace mdkv::detail
