/// \file team.cuh: stands in for <mdkv/gpu/team.cuh> on the host: the same collectives, made from the emulated GPU's warp functions.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/gpu/device.cuh>

#include <emulation/machine.hpp>

#include <concepts>
#include <cstddef>
#include <cstring>

namespace MDKV_NAMESPACE::gpu
{

template <int Threads>
class team
{
public:
    static constexpr int lanes              = 1;
    static constexpr int register_lanes = 1;
    static constexpr index_t reserved_bytes = 32 * 16; // one result of every warp

    [[nodiscard]] static index_t rank() { return device::thread(); }
    [[nodiscard]] static constexpr index_t size() { return Threads; }
    static void sync() { device::sync(); }

    template <class V>
    [[nodiscard]] static V sum(V x)
    {
        return combined(x, [](V a, V b) { return static_cast<V>(a + b); });
    }
    template <class V>
    [[nodiscard]] static V largest(V x)
    {
        return combined(x, [](V a, V b) { return a < b ? b : a; });
    }
    template <class V>
    [[nodiscard]] static mdkv::detail::prefix_sum<V> prefix(V x)
    {
        V up_to = x;
        for (int step = 1; step < device::warp_size; step *= 2)
        {
            auto const all = emulation::exchange(up_to, "prefix");
            if (device::lane() >= step) { up_to = static_cast<V>(up_to + all.of(device::lane() - step)); }
        }
        publish(up_to, device::warp_size - 1);
        mdkv::detail::prefix_sum<V> sums{static_cast<V>(up_to - x), V{}};
        for (int w = 0; w < Threads / device::warp_size; ++w)
        {
            if (w < device::warp()) { sums.before = static_cast<V>(sums.before + of_warp<V>(w)); }
            sums.total = static_cast<V>(sums.total + of_warp<V>(w));
        }
        return sums;
    }

    template <std::integral I>
    static void add(I* counter, I n)
    {
        device::shared_add(counter, n);
    }
    template <std::integral I>
    static void add_across(I* counter, I n)
    {
        device::atomic_add(counter, n);
    }
    template <std::integral I>
    static void min_across(I* least, I n)
    {
        device::atomic_min(least, n);
    }

    [[nodiscard]] static mdkv::detail::carver scratch()
    {
        return mdkv::detail::carver{device::shared_memory() + reserved_bytes};
    }

private:
    template <class V, class Join>
    [[nodiscard]] static V combined(V x, Join const& join)
    {
        for (int step = device::warp_size / 2; step > 0; step /= 2) { x = join(x, device::shuffle_xor(x, step)); }
        publish(x, 0);
        V all = of_warp<V>(0);
        for (int w = 1; w < Threads / device::warp_size; ++w) { all = join(all, of_warp<V>(w)); }
        return all;
    }

    /// Makes one lane's value of every warp known to the block.
    template <class V>
    static void publish(V const& value, int lane)
    {
        static_assert(sizeof(V) <= 16 && Threads % device::warp_size == 0);
        device::sync(); // the last ones may still be read
        if (device::lane() == lane)
        {
            std::memcpy(device::shared_memory() + device::warp() * 16, &value, sizeof value);
        }
        device::sync();
    }
    template <class V>
    [[nodiscard]] static V of_warp(int warp)
    {
        V value;
        std::memcpy(static_cast<void*>(&value), device::shared_memory() + warp * 16, sizeof value);
        return value;
    }
};

} // namespace MDKV_NAMESPACE::gpu
