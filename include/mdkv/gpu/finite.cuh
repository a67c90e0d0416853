/// \file finite.cuh: expects_finite on the GPU. It throws what the device found, so it is the one stage that waits for the
/// device: it cannot be recorded into a CUDA graph, and an engine calls it while looking for a fault, not in every step.
#pragma once

#include <mdkv/finite.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/contract.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/collectives.cuh>
#include <mdkv/gpu/detail/rows.cuh>
#include <mdkv/gpu/device.cuh>
#include <mdkv/gpu/launch.cuh>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include <vector_types.h>

namespace mdkv::gpu
{

namespace kernels
{

/// The smallest of the block's values, in every thread; `part` is shared memory of one a warp.
[[nodiscard]] __device__ inline index_t block_least(index_t value, index_t* part)
{
    for (int step = device::warp_size / 2; step > 0; step /= 2)
    {
        index_t const other = device::shuffle_xor(value, step);
        value               = other < value ? other : value;
    }
    if (device::lane() == 0) { part[device::warp()] = value; }
    device::sync();
    for (int w = 0; w < device::threads() / device::warp_size; ++w) { value = part[w] < value ? part[w] : value; }
    return value;
}

/// Of some of the rows, counted over all heads, the first that holds a NaN or an infinity; all rows where there is none.
template <element T>
struct first_not_finite
{
    static constexpr char const* name              = "first_not_finite";
    static constexpr int threads                   = 256;
    static constexpr int blocks_per_multiprocessor = 6;
    static constexpr index_t least_share           = 32; // rows of a block
    static constexpr index_t most_blocks           = 2048;
    static constexpr int piece                     = piece_of<T>;

    in_view<T, 3, backend> rows;
    index_t* first; // [blocks]
    index_t blocks;
    bool wide; ///< rows can be read in pieces of 16 bytes

    [[nodiscard]] static index_t blocks_for(index_t rows)
    {
        index_t const wanted = (rows + least_share - 1) / least_share;
        return wanted < most_blocks ? wanted : most_blocks;
    }
    [[nodiscard]] index_t shared_bytes() const { return threads / device::warp_size * index_t{sizeof(index_t)}; }

    /// All ones in the exponent.
    [[nodiscard]] __device__ static bool bad_word(unsigned bits)
    {
        constexpr unsigned exponent = std::is_same_v<T, half> ? 0x7c00U : 0x7f80U;
        if constexpr (sizeof(T) == 4) { return (bits & 0x7f800000U) == 0x7f800000U; }
        else { return (bits & exponent) == exponent || (bits >> 16 & exponent) == exponent; }
    }
    [[nodiscard]] __device__ static bool bad_piece(T const* at, index_t count, bool whole)
    {
        if (whole && count >= piece)
        {
            uint4 const bits = device::load16(at);
            return bad_word(bits.x) || bad_word(bits.y) || bad_word(bits.z) || bad_word(bits.w);
        }
        bool bad = false;
        for (int e = 0; e < piece; ++e)
        {
            unsigned bits = 0;
            if (e < count) { std::memcpy(&bits, static_cast<void const*>(at + e), sizeof(T)); }
            bad = bad || bad_word(bits);
        }
        return bad;
    }

    __device__ void operator()() const
    {
        index_t const all    = rows.extent(0) * rows.extent(1);
        index_t const begin  = all * device::block() / blocks;
        index_t const end    = all * (device::block() + 1) / blocks;
        index_t const pieces = (rows.extent(2) + piece - 1) / piece;
        // Pieces one after another over the block's threads; a thread steps on by `threads` of them without dividing.
        index_t const over  = threads / pieces;
        index_t const after = threads % pieces;
        index_t row         = begin + device::thread() / pieces;
        index_t at          = device::thread() % pieces;
        index_t head        = row / rows.extent(1);
        index_t in_head     = row % rows.extent(1);
        index_t mine        = all;
        while (row < end && mine == all)
        {
            if (bad_piece(&rows(head, in_head, at * piece), rows.extent(2) - at * piece, wide)) { mine = row; }
            at += after;
            index_t const on = over + (at >= pieces ? 1 : 0);
            at -= at >= pieces ? pieces : 0;
            row += on;
            for (in_head += on; in_head >= rows.extent(1); ++head) { in_head -= rows.extent(1); }
        }
        index_t const least = block_least(mine, reinterpret_cast<index_t*>(device::shared_memory()));
        if (device::thread() == 0) { first[device::block()] = least; }
    }
};

/// The smallest of them, at their beginning.
struct least_of_blocks
{
    static constexpr char const* name = "least_of_blocks";
    static constexpr int threads      = 256;

    index_t* first; // [count]
    index_t count;

    [[nodiscard]] index_t shared_bytes() const { return threads / device::warp_size * index_t{sizeof(index_t)}; }

    __device__ void operator()() const
    {
        index_t mine = first[0];
        for (index_t i = device::thread(); i < count; i += threads) { mine = first[i] < mine ? first[i] : mine; }
        index_t const least = block_least(mine, reinterpret_cast<index_t*>(device::shared_memory()));
        if (device::thread() == 0) { first[0] = least; }
    }
};

} // namespace kernels

template <element T>
void expects_finite_impl(backend const& on, char const* name, in_view<T, 3, backend> rows, index_t layer)
{
    mdkv::detail::argument const x{"expects_finite", name, rows};
    x.aligned();
    using search         = kernels::first_not_finite<T>;
    index_t const count  = rows.extent(1);
    index_t const all    = checked_multiply(rows.extent(0), count);
    index_t const blocks = search::blocks_for(all);
    workspace::frame frame{*on.scratch, "expects_finite"};
    index_t* const first = frame.take<index_t>(blocks);
    if (!frame.ready() || x.empty()) { return; }
    launch(on, search{rows, first, blocks, kernels::rows_begin_at(rows, 16)}, blocks);
    launch(on, kernels::least_of_blocks{first, blocks}, 1);
    index_t place = 0;
    read_back(on, first, &place, index_t{sizeof(place)});
    if (place == all) { return; }
    if (layer >= 0)
    {
        mdkv::detail::fail<non_finite_input>(
            name, ": NaN or infinity in layer ", layer, ", head ", place / count, ", row ", place % count);
    }
    mdkv::detail::fail<non_finite_input>(name, ": NaN or infinity in head ", place / count, ", row ", place % count);
}

} // namespace mdkv::gpu
