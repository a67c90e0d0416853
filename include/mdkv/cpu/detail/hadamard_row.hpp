/// \file hadamard_row.hpp: the rotation of a vector's coordinates in registers, to the bit as detail/hadamard.hpp has it.
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/team.hpp>
#include <mdkv/detail/hadamard.hpp>
#include <mdkv/detail/lanes.hpp>

#include <array>

namespace MDKV_NAMESPACE::cpu::detail
{

/// The steps inside a vector from `Half` on: lanes i and i + Half become their sum and their difference.
template <int Half = 1>
[[nodiscard]] inline simd::floats hadamard_lanes(simd::floats x) noexcept
{
    static constexpr auto signs = [] {
        std::array<float, simd::lanes> all{};
        for (std::size_t i = 0; i < all.size(); ++i) { all[i] = (i & Half) != 0 ? -1.0F : 1.0F; }
        return all;
    }();
    x = simd::swap_lanes<Half>(x) + x * simd::load(signs.data());
    if constexpr (2 * Half < simd::lanes) { return hadamard_lanes<2 * Half>(x); }
    else { return x; }
}

/// Rotates a vector of n coordinates, group by group: whole groups in registers.
MDKV_OUTLINE inline void hadamard_row(float* x, index_t n) noexcept
{
    constexpr int lanes   = simd::lanes;
    constexpr int vectors = int{quantised_group} / lanes;
    for (; n >= quantised_group; x += quantised_group, n -= quantised_group)
    {
        simd::floats v[vectors];
        MDKV_UNROLL
        for (int i = 0; i < vectors; ++i) { v[i] = hadamard_lanes(simd::load(x + i * lanes)); }
        MDKV_UNROLL
        for (int half = 1; half < vectors; half *= 2) // nvcc takes no vectors of a CPU in hadamard_registers
        {
            MDKV_UNROLL
            for (int i = 0; i < vectors; ++i)
            {
                if ((i & half) != 0) { continue; }
                simd::floats const a = v[i];
                simd::floats const b = v[i + half];
                v[i]                 = a + b;
                v[i + half]          = a - b;
            }
        }
        simd::floats const factor = simd::broadcast(mdkv::detail::hadamard_factor(quantised_group));
        MDKV_UNROLL
        for (int i = 0; i < vectors; ++i) { simd::store(x + i * lanes, v[i] * factor); }
    }
    if (n > 0) { mdkv::detail::hadamard<1>(team{nullptr}, x, static_cast<int>(n)); }
}

} // namespace MDKV_NAMESPACE::cpu::detail
