/// \file pack.hpp: pack on the CPU.
#pragma once

#include <mdkv/pack.hpp>

#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/width.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/pack.hpp>

namespace mdkv::cpu::inline MDKV_CPU_WIDTH
{

/// The sums of detail/pack_tile.hpp in registers: the loops there take four times as long.
template <int Sums>
MDKV_HD void column_products(team const&, float const* const (&direction)[Sums], float const* column, int dim,
    float (&sum)[Sums][team::lanes]) noexcept
{
#if !defined(__CUDA_ARCH__)
    constexpr int vectors = team::lanes / simd::lanes;
    constexpr int step    = Sums / vectors; // eight sums keep the multiply-add units busy
    for (int k = 0; k < Sums; k += step)
    {
        simd::floats acc[step][vectors]{};
        for (int d = 0; d < dim; ++d)
        {
            MDKV_UNROLL
            for (int i = 0; i < step; ++i)
            {
                simd::floats const factor = simd::broadcast(direction[k + i][d]);
                MDKV_UNROLL
                for (int v = 0; v < vectors; ++v)
                {
                    acc[i][v] += factor * simd::load(column + d * team::lanes + v * simd::lanes);
                }
            }
        }
        MDKV_UNROLL
        for (int i = 0; i < step; ++i)
        {
            MDKV_UNROLL
            for (int v = 0; v < vectors; ++v) { simd::store(sum[k + i] + v * simd::lanes, acc[i][v]); }
        }
    }
#endif
}

using mdkv::detail::pack_impl;
using mdkv::detail::packed_bytes_impl;

} // namespace mdkv::cpu::inline MDKV_CPU_WIDTH
