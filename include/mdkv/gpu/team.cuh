/// \file team.cuh: the team of a GPU: a block, whose collectives are CUB's.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/gpu/device.cuh>

#include <concepts>

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

namespace MDKV_NAMESPACE::gpu
{

/// A block of `Threads` threads. The host compiles the bodies of jobs as well, and never runs them with this team: the
/// pragmas silence nvcc's warning that they call a function of the device.
template <int Threads>
class team
{
public:
    static constexpr int lanes          = 1;
    static constexpr int register_lanes = 1;

#pragma nv_exec_check_disable
    [[nodiscard]] MDKV_HD static index_t rank() { return device::thread(); }
    [[nodiscard]] MDKV_HD static constexpr index_t size() { return Threads; }
#pragma nv_exec_check_disable
    MDKV_HD static void sync() { device::sync(); }

    /// The block's sum of x, the same in every thread and summed in a fixed order.
#pragma nv_exec_check_disable
    template <class V>
    [[nodiscard]] MDKV_HD static V sum(V x)
    {
        return reduce(x, [](V a, V b) { return static_cast<V>(a + b); });
    }
#pragma nv_exec_check_disable
    template <class V>
    [[nodiscard]] MDKV_HD static V largest(V x)
    {
        return reduce(x, [](V a, V b) { return a < b ? b : a; });
    }
#pragma nv_exec_check_disable
    template <class V>
    [[nodiscard]] MDKV_HD static mdkv::detail::prefix_sum<V> prefix(V x)
    {
        return scan(x);
    }

#pragma nv_exec_check_disable
    template <std::integral Integer>
    MDKV_HD static void add(Integer* counter, Integer n)
    {
        device::shared_add(counter, n);
    }
#pragma nv_exec_check_disable
    template <std::integral Integer>
    MDKV_HD static void add_across(Integer* counter, Integer n)
    {
        device::atomic_add(counter, n);
    }
#pragma nv_exec_check_disable
    template <std::integral Integer>
    MDKV_HD static void min_across(Integer* least, Integer n)
    {
        device::atomic_min(least, n);
    }

#pragma nv_exec_check_disable
    [[nodiscard]] MDKV_HD static mdkv::detail::carver scratch()
    {
        return mdkv::detail::carver{device::shared_memory()};
    }

private:
    template <class V, class Join>
    [[nodiscard]] __device__ static V reduce(V x, Join const& join)
    {
        using block = cub::BlockReduce<V, Threads>;
        __shared__ typename block::TempStorage storage;
        __shared__ V all;
        device::sync(); // `storage` and `all` may still be read
        V const mine = block{storage}.Reduce(x, join);
        if (device::thread() == 0) { all = mine; }
        device::sync();
        return all;
    }
    template <class V>
    [[nodiscard]] __device__ static mdkv::detail::prefix_sum<V> scan(V x)
    {
        using block = cub::BlockScan<V, Threads>;
        __shared__ typename block::TempStorage storage;
        device::sync();
        mdkv::detail::prefix_sum<V> sums;
        block{storage}.ExclusiveSum(x, sums.before, sums.total);
        return sums;
    }
};

} // namespace MDKV_NAMESPACE::gpu
