/// \file attend_parts.cuh: steps of a block that attends a slice: stored bytes to shared memory, logits to weights (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/detail/attend.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/gpu/device.cuh>
#include <mdkv/gpu/team.cuh>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace mdkv::inline MDKV_MACHINE::gpu::kernels
{

inline constexpr int attend_threads = 128;                        ///< threads of a block
inline constexpr int attend_queries = 8;                          ///< query heads of a block at most
inline constexpr int attend_tokens  = mdkv::detail::attend_piece; ///< tokens of a staged block at most

/// Copies by all threads of the block. `to` is aligned to 16 bytes; if `from` is, too, asynchronous copies of 16 bytes
/// take part in the group of copies that is committed next.
__device__ inline void stage_bytes(std::byte const* from, int bytes, std::byte* to)
{
    bool const wide = reinterpret_cast<std::uintptr_t>(from) % 16 == 0;
    int const whole = wide ? bytes / 16 * 16 : 0;
    for (int i = device::thread() * 16; i < whole; i += attend_threads * 16) { device::copy_async(to + i, from + i); }
    mdkv::detail::copy_bytes(team<attend_threads>{}, from + whole, to + whole, bytes - whole);
}

/// Two bytes of a staged tile: a scale or a minimum.
[[nodiscard]] __device__ inline float half_at(std::byte const* tile, int offset)
{
    return widen(*reinterpret_cast<half const*>(tile + offset));
}

/// Joins the values of a warp's lanes; the result is the same in every lane.
template <class Join>
[[nodiscard]] __device__ inline float over_lanes(float value, Join const& join)
{
    for (int step = device::warp_size / 2; step > 0; step /= 2)
    {
        value = join(value, device::shuffle_xor(value, step));
    }
    return value;
}

/// Adds logits [shares, most_queries, block_tokens] of `count` tokens to the softmax [most_queries, 2] of every query;
/// query g sees the first seen(g) tokens. The weights take the place of share 0's logits; factor [most_queries] receives
/// the factors of earlier sums. Rows past `queries`, whose logits are zero, stay as they are: their sums are not read
/// back.
template <class Seen>
__device__ inline void soften(float* logits, int shares, int count, int block_tokens, int queries, Seen const& seen,
    float* softmax, float* factor)
{
    constexpr int warps    = attend_threads / device::warp_size;
    constexpr int per_lane = attend_tokens / device::warp_size;
    for (int g = device::warp(); g < queries; g += warps)
    {
        float x[per_lane];
        int const visible = seen(g);
        float highest     = mdkv::detail::empty_lse;
        for (int i = 0; i < per_lane; ++i)
        {
            int const token = i * device::warp_size + device::lane();
            x[i]            = mdkv::detail::empty_lse;
            if (token >= visible) { continue; }
            float sum = 0.0F;
            for (int share = 0; share < shares; ++share)
            {
                sum += logits[(share * attend_queries + g) * block_tokens + token];
            }
            x[i]    = sum;
            highest = sum > highest ? sum : highest;
        }
        highest            = over_lanes(highest, [](float a, float b) { return b > a ? b : a; });
        float const before = softmax[2 * g];
        float const top    = before > highest ? before : highest;
        float sum          = 0.0F;
        for (int i = 0; i < per_lane; ++i)
        {
            int const token = i * device::warp_size + device::lane();
            if (token >= count) { continue; }
            float const weight               = token < visible ? exp2f(x[i] - top) : 0.0F;
            logits[g * block_tokens + token] = weight;
            sum += weight;
        }
        sum = over_lanes(sum, [](float a, float b) { return a + b; });
        if (device::lane() == 0)
        {
            factor[g]          = before == mdkv::detail::empty_lse ? 0.0F : exp2f(before - top);
            softmax[2 * g]     = top;
            softmax[2 * g + 1] = softmax[2 * g + 1] * factor[g] + sum;
        }
        device::sync_warp();
    }
}

} // namespace mdkv::inline MDKV_MACHINE::gpu::kernels
