/// \file float_tile.cuh: a block's tile of a matrix product in float: 64 x 64 results in the registers of 128 threads.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/gpu/device.cuh>

#include <cmath>

#include <vector_types.h>

namespace mdkv::gpu::kernels
{

/// Both factors lie in shared memory with the index that is summed over first: [depth, pitch]. A thread holds the results
/// acc[k][e] of row `row(k)` and column `column(k, e)`: four rows, and eight columns that four threads of its warp share.
struct float_tile
{
    static constexpr int threads = 128;
    static constexpr int side    = 64;
    static constexpr int pitch   = side + 4; // rows begin at 16 bytes; what lies below each other is in other banks

    [[nodiscard]] __device__ static int row(int k) { return device::thread() / 8 * 4 + k / 2; }
    [[nodiscard]] __device__ static int column(int k, int e)
    {
        return k % 2 * (side / 2) + device::thread() % 8 * 4 + e;
    }

    __device__ static void multiply_add(float const* a, float const* b, int depth, float (&acc)[8][4])
    {
        a += row(0);
        b += column(0, 0);
        for (int d = 0; d < depth; ++d)
        {
            auto const x      = *reinterpret_cast<float4 const*>(a + d * pitch);
            auto const y      = *reinterpret_cast<float4 const*>(b + d * pitch);
            auto const z      = *reinterpret_cast<float4 const*>(b + d * pitch + side / 2);
            float const xs[4] = {x.x, x.y, x.z, x.w};
            float const ys[8] = {y.x, y.y, y.z, y.w, z.x, z.y, z.z, z.w};
            for (int k = 0; k < 8; ++k)
            {
                for (int e = 0; e < 4; ++e) { acc[k][e] = fmaf(xs[k / 2], ys[k % 2 * 4 + e], acc[k][e]); }
            }
        }
    }
};

} // namespace mdkv::gpu::kernels
