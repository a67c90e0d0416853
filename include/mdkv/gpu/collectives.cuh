/// \file collectives.cuh: what warps and blocks do together, made from device.cuh: sums, scans, shared arrays.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/gpu/device.cuh>

#include <cstddef>
#include <cstdint>

#include <vector_types.h>

namespace mdkv::gpu::device
{

/// Cuts shared memory into arrays. Made with `nullptr` it only counts: the host learns the size from the same code.
class shared_carver
{
public:
    __host__ __device__ explicit shared_carver(std::byte* memory)
        : memory_{memory}
    {}
    // Any address but null serves to count with. A test for null in `take` would hide from nvcc that what is taken is
    // shared memory, and every access to it would be a generic one.
    __host__ __device__ explicit shared_carver(std::nullptr_t)
        : memory_{reinterpret_cast<std::byte*>(std::uintptr_t{16})}
    {}

    template <class T>
    [[nodiscard]] __host__ __device__ T* take(index_t count)
    {
        static_assert(alignof(T) <= 16);
        std::byte* const at = memory_ + used_;
        used_ += (count * index_t{sizeof(T)} + 15) / 16 * 16;
        return reinterpret_cast<T*>(at);
    }
    [[nodiscard]] __host__ __device__ index_t bytes() const { return used_; }

private:
    std::byte* memory_;
    index_t used_ = 0;
};

/// The same sum in every lane, in the same order whatever the lane.
template <class T>
[[nodiscard]] __device__ __forceinline__ T warp_sum(T value)
{
    for (int step = warp_size / 2; step > 0; step /= 2) { value += shuffle_xor(value, step); }
    return value;
}
[[nodiscard]] __device__ __forceinline__ float warp_max(float value)
{
    for (int step = warp_size / 2; step > 0; step /= 2)
    {
        float const other = shuffle_xor(value, step);
        value             = other > value ? other : value;
    }
    return value;
}

/// 16 bytes from an address that is a multiple of 16.
[[nodiscard]] __device__ __forceinline__ uint4 load16(void const* from)
{
    return *static_cast<uint4 const*>(from);
}

/// Sum over the block, the same in every thread; `part` is shared memory of one T per warp. In a fixed order.
template <class T>
[[nodiscard]] __device__ inline T block_sum(T value, T* part)
{
    value = warp_sum(value);
    sync(); // part may still be read
    if (lane() == 0) { part[warp()] = value; }
    sync();
    T sum{};
    for (int w = 0; w < threads() / warp_size; ++w) { sum += part[w]; }
    return sum;
}

/// Sum over the threads before this one, and over all of them.
template <class T>
struct prefix
{
    T before;
    T total;
};

template <class T>
[[nodiscard]] __device__ inline prefix<T> warp_prefix(T value)
{
    T up_to = value;
    for (int step = 1; step < warp_size; step *= 2)
    {
        T const below = shuffle_up(up_to, step);
        if (lane() >= step) { up_to += below; }
    }
    return {static_cast<T>(up_to - value), shuffle(up_to, warp_size - 1)};
}

/// `part` is shared memory of one T per warp.
template <class T>
[[nodiscard]] __device__ inline prefix<T> block_prefix(T value, T* part)
{
    prefix<T> const mine = warp_prefix(value);
    sync();
    if (lane() == 0) { part[warp()] = mine.total; }
    sync();
    prefix<T> all{mine.before, T{}};
    for (int w = 0; w < threads() / warp_size; ++w)
    {
        if (w < warp()) { all.before += part[w]; }
        all.total += part[w];
    }
    return all;
}

} // namespace mdkv::gpu::device
