/// \file staged_tokens.cuh: a block of a run's tokens in shared memory, their bytes as they are stored: how they get there, where one of them lies, what a value is (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/gpu/detail/stored_run.cuh>
#include <mdkv/gpu/device.cuh>

#include <cstddef>
#include <cstdint>

namespace mdkv::gpu::kernels
{

/// A token's place in its tile.
struct in_tile
{
    int first; ///< the tile's first token, counted in the block of tokens
    int place;
    int width; ///< tokens of the tile

    __device__ in_tile(stored_run const& run, index_t block_begin, int token)
        : first{token / tile * tile}
        , place{token % tile}
    {
        index_t const left = run.stored - block_begin - first;
        width              = left < tile ? static_cast<int>(left) : tile;
    }

private:
    static constexpr int tile = tile_tokens;
};

/// Values of plain runs stand token by token, those of codes in tiles.
[[nodiscard]] __device__ inline index_t staged_value_bytes(stored_run const& run, index_t first, int count)
{
    index_t const end = run.kind == storage::plain ? first + count : run.whole_tiles(first + count);
    return (end - first) * run.value_bytes;
}

/// All threads of the block copy: in asynchronous pieces of 16 bytes where the address allows it, which belong to the group
/// of copies that is committed next.
__device__ inline void stage_bytes(std::byte const* from, index_t bytes, std::byte* to)
{
    auto const address = reinterpret_cast<std::uintptr_t>(from);
    index_t done       = 0;
    if (address % 16 == 0)
    {
        for (index_t i = index_t{device::thread()} * 16; i + 16 <= bytes; i += device::threads() * 16)
        {
            device::copy_async(to + i, from + i);
        }
        done = bytes / 16 * 16;
    }
    else if (address % 4 == 0)
    {
        for (index_t i = index_t{device::thread()} * 4; i + 4 <= bytes; i += device::threads() * 4)
        {
            *reinterpret_cast<std::uint32_t*>(to + i) = *reinterpret_cast<std::uint32_t const*>(from + i);
        }
        done = bytes / 4 * 4;
    }
    for (index_t i = done + device::thread(); i < bytes; i += device::threads()) { to[i] = from[i]; }
}

/// Coordinate c of a token's value, of a block of tokens that begins at `first` of the run.
template <element T>
[[nodiscard]] __device__ inline float staged_value(
    stored_run const& run, index_t first, std::byte const* values, int token, int c)
{
    if (run.kind == storage::plain)
    {
        return widen(reinterpret_cast<T const*>(values)[token * run.value_coordinates + c]);
    }
    constexpr int size = quantised_group;
    in_tile const at{run, first, token};
    coded_group const codes{values + at.first * run.value_bytes, at.width, run.value_coordinates, c / size, run.kind};
    return widen(codes.minima[at.place])
           + widen(codes.scales[at.place]) * codes.value_code(c % size, at.place, run.kind);
}

} // namespace mdkv::gpu::kernels
