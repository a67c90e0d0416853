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

/// x := H x / sqrt(n) for the Hadamard matrix H of order n <= 32, by butterflies: its own inverse. Coordinates `stride`
/// apart. Products with another vector turned so are those of the originals.
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
    constexpr float by[]{1.0F, 0.70710678118654752F, 0.5F, 0.35355339059327376F, 0.25F, 0.17677669529663687F};
    int step = 0;
    while ((index_t{1} << step) < n) { ++step; }
    for (index_t i = 0; i < n; ++i) { x[i * stride] = x[i * stride] * by[step]; }
}

} // namespace mdkv::detail
