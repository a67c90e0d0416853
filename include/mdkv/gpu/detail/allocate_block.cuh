/// \file allocate_block.cuh: what the threads of one block of allocate share, and what they find together
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/gpu/collectives.cuh>
#include <mdkv/gpu/detail/allocate_state.cuh>
#include <mdkv/gpu/device.cuh>

#include <cstddef>
#include <cstdint>

namespace mdkv::gpu::dual
{

/// What the threads of a block share.
struct block_room
{
    unsigned* low;      ///< [exact_bins]
    unsigned* high;     ///< [exact_bins]
    unsigned* counts;   ///< [max_rungs + 1]  tokens at each rung, and those whose losses say nothing
    index_t* whole;     ///< [warps]
    double* real;       ///< [warps]
    std::uint64_t* key; ///< [warps]
    index_t* found;     ///< [2]

    MDKV_HD explicit block_room(device::shared_carver carver)
        : low{carver.take<unsigned>(exact_bins)}
        , high{carver.take<unsigned>(exact_bins)}
        , counts{carver.take<unsigned>(index_t{max_rungs} + 1)}
        , whole{carver.take<index_t>(threads / device::warp_size)}
        , real{carver.take<double>(threads / device::warp_size)}
        , key{carver.take<std::uint64_t>(threads / device::warp_size)}
        , found{carver.take<index_t>(2)}
        , bytes{carver.bytes()}
    {}

    index_t bytes;
};

/// The largest of the block, the same in every thread.
[[nodiscard]] __device__ inline std::uint64_t block_max(std::uint64_t value, std::uint64_t* part)
{
    using word = unsigned long long;
    for (int step = device::warp_size / 2; step > 0; step /= 2)
    {
        std::uint64_t const other = device::shuffle_xor(static_cast<word>(value), step);
        value                     = other > value ? other : value;
    }
    device::sync();
    if (device::lane() == 0) { part[device::warp()] = value; }
    device::sync();
    std::uint64_t most = 0;
    for (int w = 0; w < threads / device::warp_size; ++w) { most = part[w] > most ? part[w] : most; }
    return most;
}

[[nodiscard]] __device__ inline bool block_any(bool mine, index_t* part)
{
    return device::block_sum(index_t{mine ? 1 : 0}, part) > 0;
}

/// Where the bytes of the bins, added up from the last one on, first exceed a budget.
struct found_bin
{
    index_t bin;   ///< -1: they do not
    index_t above; ///< bytes of the bins above
};

/// \param budget   in whole numbers, or in double
template <class Budget>
[[nodiscard]] __device__ inline found_bin find_bin(
    index_t const* bins, index_t count, Budget budget, block_room const& own)
{
    index_t const each = (count + threads - 1) / threads;
    index_t const top  = count - device::thread() * each; // one past this thread's highest bin
    index_t const end  = top - each > 0 ? top - each : 0;
    index_t mine       = 0;
    for (index_t b = top - 1; b >= end; --b) { mine += bins[b]; }
    device::prefix<index_t> const sums = device::block_prefix(mine, own.whole);
    if (device::thread() == 0)
    {
        own.found[0] = -1;
        own.found[1] = sums.total;
    }
    device::sync();
    if (static_cast<Budget>(sums.before) <= budget && static_cast<Budget>(sums.before + mine) > budget)
    {
        index_t above = sums.before;
        index_t b     = top - 1;
        for (; static_cast<Budget>(above + bins[b]) <= budget; --b) { above += bins[b]; }
        own.found[0] = b;
        own.found[1] = above;
    }
    device::sync();
    found_bin const result{own.found[0], own.found[1]};
    device::sync();
    return result;
}

} // namespace mdkv::gpu::dual
