/// \file hadamard.hpp: whole vectors rotated group by group in registers, to the bit as detail/hadamard.hpp has it.
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/width.hpp>
#include <mdkv/detail/hadamard.hpp>
#include <mdkv/detail/lanes.hpp>

#include <algorithm>
#include <array>
#include <cstddef>

namespace mdkv::cpu::inline MDKV_CPU_WIDTH::detail
{

/// Lane i of the vector is lane i ^ Half of x. Spelled out, because nvcc expands no pack in the builtin.
template <int Half, class Floats>
[[nodiscard]] inline Floats swap_lanes(Floats x) noexcept
{
    constexpr int H = Half;
    if constexpr (sizeof(Floats) == 64)
    {
        return __builtin_shufflevector(x, x, 0 ^ H, 1 ^ H, 2 ^ H, 3 ^ H, 4 ^ H, 5 ^ H, 6 ^ H, 7 ^ H, 8 ^ H, 9 ^ H,
            10 ^ H, 11 ^ H, 12 ^ H, 13 ^ H, 14 ^ H, 15 ^ H);
    }
    else if constexpr (sizeof(Floats) == 32)
    {
        return __builtin_shufflevector(x, x, 0 ^ H, 1 ^ H, 2 ^ H, 3 ^ H, 4 ^ H, 5 ^ H, 6 ^ H, 7 ^ H);
    }
    else { return __builtin_shufflevector(x, x, 0 ^ H, 1 ^ H, 2 ^ H, 3 ^ H); }
}

/// One step inside a vector: lanes i and i + Half become their sum and their difference.
template <int Half>
[[nodiscard]] inline simd::floats hadamard_lanes(simd::floats x) noexcept
{
    static constexpr auto signs = [] {
        std::array<float, simd::lanes> all{};
        for (std::size_t i = 0; i < all.size(); ++i) { all[i] = (i & Half) != 0 ? -1.0F : 1.0F; }
        return all;
    }();
    return swap_lanes<Half>(x) + x * simd::load(signs.data());
}

/// One group of 64 neighbours, in registers.
inline void hadamard_group(float* x) noexcept
{
    constexpr int lanes   = simd::lanes;
    constexpr int vectors = int{quantised_group} / lanes;
    static_assert(vectors >= 2 && lanes >= 4);
    simd::floats v[vectors];
    MDKV_UNROLL for (int i = 0; i < vectors; ++i)
    {
        simd::floats part = simd::load(x + i * lanes);
        part              = hadamard_lanes<2>(hadamard_lanes<1>(part));
        if constexpr (lanes >= 8) { part = hadamard_lanes<4>(part); }
        if constexpr (lanes >= 16) { part = hadamard_lanes<8>(part); }
        v[i] = part;
    }
    MDKV_UNROLL for (int half = 1; half < vectors; half *= 2)
    {
        MDKV_UNROLL for (int i = 0; i < vectors; ++i)
        {
            if ((i & half) != 0) { continue; }
            simd::floats const a = v[i];
            simd::floats const b = v[i + half];
            v[i]                 = a + b;
            v[i + half]          = a - b;
        }
    }
    simd::floats const factor = simd::broadcast(mdkv::detail::hadamard_factor(quantised_group));
    MDKV_UNROLL for (int i = 0; i < vectors; ++i)
    {
        simd::store(x + i * lanes, v[i] * factor);
    }
}

/// A vector of n coordinates, group by group.
MDKV_OUTLINE inline void hadamard_row(float* x, index_t n) noexcept
{
    for (index_t first = 0; first < n; first += quantised_group)
    {
        index_t const group = std::min(quantised_group, n - first);
        if (group == quantised_group) { hadamard_group(x + first); }
        else { mdkv::detail::hadamard(x + first, group); }
    }
}

} // namespace mdkv::cpu::inline MDKV_CPU_WIDTH::detail
