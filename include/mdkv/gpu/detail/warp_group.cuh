/// \file warp_group.cuh: one group of a token's coordinates in a warp: turned, and looked through for its quantiser.
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/detail/quantiser.hpp>
#include <mdkv/detail/rotation.hpp>
#include <mdkv/gpu/collectives.cuh>
#include <mdkv/gpu/device.cuh>

namespace mdkv::gpu::kernels
{

/// One group of coordinates of one token in a warp: lane i has coordinates i and i + 32.
struct warp_group
{
    static constexpr int halves = int{quantised_group} / device::warp_size;
    static_assert(halves == 2);

    float x[halves];
    int n; ///< coordinates of the group

    /// Whether coordinate k * 32 + lane is one of the group's.
    [[nodiscard]] __device__ bool has(int k) const { return k * device::warp_size + device::lane() < n; }

    /// detail::turn: the same sums, bit for bit.
    __device__ void turn()
    {
        for (int half_way = 1; half_way < n && half_way < device::warp_size; half_way *= 2)
        {
            for (float& mine : x)
            {
                float const other = device::shuffle_xor(mine, half_way);
                mine              = (device::lane() & half_way) != 0 ? other - mine : mine + other;
            }
        }
        if (n > device::warp_size)
        {
            float const first = x[0];
            x[0]              = first + x[1];
            x[1]              = first - x[1];
        }
        float const factor = mdkv::detail::turn_factor(n);
        // Through a shuffle, so that it is rounded, and no part of what is done with it next.
        for (float& mine : x) { mine = device::shuffle(mine * factor, device::lane()); }
    }

    /// The sum of products with 0 is NaN where a coordinate is not finite, and says which zero the least one is.
    [[nodiscard]] __device__ mdkv::detail::quantiser quantiser_of(storage kind) const
    {
        constexpr float huge = 3.4e38F;
        float spoilt         = -0.0F;
        float least          = huge;
        float most           = -huge;
        for (int k = 0; k < halves; ++k)
        {
            if (!has(k)) { continue; }
            spoilt += x[k] * 0.0F;
            least = x[k] < least ? x[k] : least;
            most  = x[k] > most ? x[k] : most;
        }
        spoilt = device::warp_sum(spoilt);
        least  = -device::warp_max(-least);
        most   = device::warp_max(most);
        return {least + spoilt, most + spoilt, kind};
    }
};

} // namespace mdkv::gpu::kernels
