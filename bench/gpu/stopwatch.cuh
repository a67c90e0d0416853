/// \file stopwatch.cuh: times rivals by turns, each with a cold L2 cache, and knows what the memory can do at best
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/device.cuh>
#include <mdkv/gpu/error.cuh>

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include <cuda_runtime_api.h>
#include <vector_types.h>

#include "bench.cuh"

namespace bench
{

namespace device = mdkv::gpu::device;

namespace kernels
{

/// Reads everything once.
struct read_all
{
    static constexpr char const* name  = "read_all";
    static constexpr int threads       = 256;
    static constexpr index_t per_block = index_t{threads} * 8;

    uint4 const* from; // [count]
    uint4* never;      // [1]  keeps the reads from being left out
    index_t count;     // a multiple of per_block

    __device__ void operator()() const
    {
        uint4 const* const mine = from + device::block() * per_block + device::thread();
        uint4 piece[per_block / threads];
#pragma unroll
        for (int i = 0; i < per_block / threads; ++i) { piece[i] = mine[i * threads]; }
        unsigned all = ~0U;
        for (uint4 const& x : piece) { all &= x.x & x.y & x.z & x.w; }
        if (all == ~0U) { *never = piece[0]; } // no buffer here is filled with ones
    }
};

/// Copies with the widest accesses there are.
struct copy_all
{
    static constexpr char const* name  = "copy_all";
    static constexpr int threads       = 256;
    static constexpr index_t per_block = index_t{threads} * 4;

    uint4 const* from; // [count]
    uint4* to;         // [count]
    index_t count;     // a multiple of per_block

    __device__ void operator()() const
    {
        index_t const first = device::block() * per_block + device::thread();
        uint4 piece[per_block / threads];
#pragma unroll
        for (int i = 0; i < per_block / threads; ++i) { piece[i] = from[first + i * threads]; }
#pragma unroll
        for (int i = 0; i < per_block / threads; ++i) { to[first + i * threads] = piece[i]; }
    }
};

/// Anything but zeros, which memory may be quicker with.
struct fill_noise
{
    static constexpr char const* name = "fill_noise";
    static constexpr int threads      = 256;

    uint4* to; // [count], a multiple of threads

    __device__ void operator()() const
    {
        index_t const i  = device::block() * threads + device::thread();
        auto const noise = static_cast<unsigned>(i) * 2654435761U;
        to[i]            = {noise & 0x7fffffffU, noise ^ 0x55555555U, ~noise, noise >> 3U};
    }
};

} // namespace kernels

/// Times works by turns, each behind a read of far more than the L2 cache holds: they find it cold, and are enqueued as a
/// whole before the device gets to them.
class stopwatch
{
public:
    static constexpr int warm_ups    = 3;
    static constexpr int repetitions = 25;

    stopwatch()
    {
        for (cudaEvent_t& event : events_) { expects_success(cudaEventCreate(&event), "cudaEventCreate"); }
        for (auto const* buffer : {&from_, &to_})
        {
            launch(kernels::fill_noise{buffer->data()}, buffer->size() / kernels::fill_noise::threads);
        }
    }
    ~stopwatch()
    {
        for (cudaEvent_t const event : events_) { cudaEventDestroy(event); }
    }
    stopwatch(stopwatch const&)            = delete;
    stopwatch& operator=(stopwatch const&) = delete;

    /// Medians in microseconds a call. The first turn is in the order given: a work may need what those before it wrote.
    [[nodiscard]] std::vector<double> medians(std::vector<work> const& works) const
    {
        std::vector<std::vector<double>> times(works.size());
        for (int turn = -warm_ups; turn < repetitions; ++turn)
        {
            for (std::size_t i = 0; i < works.size(); ++i)
            {
                std::size_t const which = (i + static_cast<std::size_t>(turn + warm_ups)) % works.size();
                double const time       = once(works[which]);
                if (turn >= 0) { times[which].push_back(time); }
            }
        }
        std::vector<double> middle;
        for (std::vector<double>& all : times)
        {
            std::sort(all.begin(), all.end());
            middle.push_back(all[all.size() / 2]);
        }
        return middle;
    }

    /// What all else is compared with; moves 2 * size() bytes.
    [[nodiscard]] work copy() const
    {
        return recorded(1, [&](gpu::backend const& on, index_t) {
            expects_success(cudaMemcpyAsync(to_.data(), from_.data(), static_cast<std::size_t>(size()),
                                cudaMemcpyDeviceToDevice, on.stream),
                "cudaMemcpyAsync");
        });
    }
    [[nodiscard]] work copy_by_kernel() const
    {
        return {[this] {
            launch(
                kernels::copy_all{from_.data(), to_.data(), from_.size()}, from_.size() / kernels::copy_all::per_block);
        }};
    }
    [[nodiscard]] work read() const
    {
        return {[this] { read_from(to_); }};
    }
    [[nodiscard]] index_t size() const noexcept { return from_.bytes(); }

private:
    void read_from(device_array<uint4> const& buffer) const
    {
        launch(
            kernels::read_all{buffer.data(), to_.data(), buffer.size()}, buffer.size() / kernels::read_all::per_block);
    }

    [[nodiscard]] double once(work const& of) const
    {
        read_from(from_);
        expects_success(cudaEventRecord(events_[0], stream()), "cudaEventRecord");
        of.enqueue();
        expects_success(cudaEventRecord(events_[1], stream()), "cudaEventRecord");
        expects_success(cudaEventSynchronize(events_[1]), "cudaEventSynchronize");
        float milliseconds = 0.0F;
        expects_success(cudaEventElapsedTime(&milliseconds, events_[0], events_[1]), "cudaEventElapsedTime");
        return 1e3 * static_cast<double>(milliseconds) / static_cast<double>(of.calls);
    }

    device_array<uint4> from_{index_t{1} << 26}; // 1 GiB
    device_array<uint4> to_{index_t{1} << 26};
    std::array<cudaEvent_t, 2> events_{};
};

} // namespace bench
