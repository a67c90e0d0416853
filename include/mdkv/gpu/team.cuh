/// \file team.cuh: the team of a GPU: a block, whose collectives are CUB's.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/gpu/device.cuh>

#include <concepts>

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

// A second file of this name gives each function a meaning on the host (the tests do that).

namespace mdkv::gpu
{

/// A block of `Threads` threads. The host compiles the bodies of jobs as well, and never runs them with this team.
template <int Threads>
class team
{
public:
    static constexpr int lanes              = 1;
    static constexpr index_t reserved_bytes = 0; ///< of dynamic shared memory, for the collectives

    [[nodiscard]] MDKV_HD static index_t rank()
    {
#if defined(__CUDA_ARCH__)
        return device::thread();
#else
        return 0;
#endif
    }
    [[nodiscard]] MDKV_HD static constexpr index_t size() { return Threads; }
    MDKV_HD static void sync()
    {
#if defined(__CUDA_ARCH__)
        device::sync();
#endif
    }

    /// The same in every thread, summed in a fixed order.
    template <class V>
    [[nodiscard]] MDKV_HD static V sum(V x)
    {
#if defined(__CUDA_ARCH__)
        using reduce = cub::BlockReduce<V, Threads>;
        __shared__ typename reduce::TempStorage storage;
        __shared__ V total;
        device::sync(); // both may still be read
        V const mine = reduce{storage}.Sum(x);
        if (device::thread() == 0) { total = mine; }
        device::sync();
        return total;
#else
        return x;
#endif
    }
    template <class V>
    [[nodiscard]] MDKV_HD static V max(V x)
    {
#if defined(__CUDA_ARCH__)
        using reduce = cub::BlockReduce<V, Threads>;
        __shared__ typename reduce::TempStorage storage;
        __shared__ V largest;
        device::sync();
        V const mine = reduce{storage}.Reduce(x, [](V a, V b) { return a < b ? b : a; });
        if (device::thread() == 0) { largest = mine; }
        device::sync();
        return largest;
#else
        return x;
#endif
    }
    template <class V>
    [[nodiscard]] MDKV_HD static mdkv::detail::prefix_sum<V> prefix(V x)
    {
#if defined(__CUDA_ARCH__)
        using scan = cub::BlockScan<V, Threads>;
        __shared__ typename scan::TempStorage storage;
        device::sync();
        mdkv::detail::prefix_sum<V> sums;
        scan{storage}.ExclusiveSum(x, sums.before, sums.total);
        return sums;
#else
        return {V{}, x};
#endif
    }

    template <std::integral I>
    MDKV_HD static void add(I* counter, I n)
    {
#if defined(__CUDA_ARCH__)
        device::atomic_add(counter, n);
#else
        *counter += n;
#endif
    }
    template <std::integral I>
    MDKV_HD static void add_across(I* counter, I n)
    {
        add(counter, n);
    }
    template <std::integral I>
    MDKV_HD static void min_across(I* least, I n)
    {
#if defined(__CUDA_ARCH__)
        device::atomic_min(least, n);
#else
        *least = n < *least ? n : *least;
#endif
    }

    [[nodiscard]] MDKV_HD static mdkv::detail::carver scratch()
    {
#if defined(__CUDA_ARCH__)
        return mdkv::detail::carver{device::shared_memory()};
#else
        return {};
#endif
    }
};

} // namespace mdkv::gpu
