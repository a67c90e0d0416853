/// \file stored_run.cuh: the runs of a packed head as a kernel walks them, and how one coordinate of a staged token is read (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace mdkv::gpu::kernels
{

/// In which coordinates a run's keys and values stand.
enum class run_basis : std::uint8_t
{
    original,
    projected, ///< leading coordinates of the head's basis
    turned     ///< every group of coordinates turned before it became codes
};

/// Tokens of one head stored alike.
struct stored_run
{
    std::byte const* keys   = nullptr;
    std::byte const* values = nullptr;
    index_t tokens          = 0;
    index_t stored          = 0; ///< tokens its tiles are laid out for
    int key_coordinates     = 0; ///< int, as all that is counted inside a block
    int value_coordinates   = 0;
    int key_bytes           = 0; ///< of a token
    int value_bytes         = 0;
    storage kind            = storage::plain;
    run_basis basis         = run_basis::original;

    [[nodiscard]] MDKV_HD index_t token_bytes() const { return index_t{key_bytes} + value_bytes; }
    /// Tokens whose tiles hold the first `count` tokens: the bytes of a tile's keys are those of all its tokens.
    [[nodiscard]] MDKV_HD index_t whole_tiles(index_t count) const
    {
        index_t const rounded = (count + tile_tokens - 1) / tile_tokens * tile_tokens;
        return rounded < stored ? rounded : stored;
    }
};

/// The element at an address of any alignment: what precedes it in the arena may end anywhere.
template <element T>
[[nodiscard]] __device__ inline T element_at(std::byte const* base, index_t element)
{
    std::byte const* const at = base + element * index_t{sizeof(T)};
    if (reinterpret_cast<std::uintptr_t>(at) % alignof(T) == 0) { return *reinterpret_cast<T const*>(at); }
    T value;
    memcpy(static_cast<void*>(&value), at, sizeof value);
    return value;
}

/// Runs a head may have: those of the rungs, then the exact one, then the tail.
[[nodiscard]] MDKV_HD constexpr std::size_t most_runs(cache_layout const& layout) noexcept
{
    return layout.rungs + 2;
}

/// Run i of head h; without tokens where there is none. A tail that was asked to hold more than it can holds what it can.
template <element T>
[[nodiscard]] __device__ inline stored_run run_of(cache_view<T, space::device> const& cache, index_t h, std::size_t i)
{
    constexpr index_t bytes    = sizeof(T);
    cache_layout const& layout = cache.layout;
    head_entry const& entry    = cache.heads[h];
    stored_run run;
    if (i < layout.rungs)
    {
        if (!layout.own_run(i)) { return run; }
        run.keys              = cache.arena + entry.runs[i].keys;
        run.values            = cache.arena + entry.runs[i].values;
        run.tokens            = entry.runs[i].tokens;
        run.stored            = run.tokens;
        run.key_coordinates   = static_cast<int>(layout.key_coordinates[i]);
        run.value_coordinates = static_cast<int>(layout.value_coordinates[i]);
        run.key_bytes         = static_cast<int>(layout.key_bytes(i, bytes));
        run.value_bytes       = static_cast<int>(layout.value_bytes(i, bytes));
        run.kind              = layout.kinds[i];
        run.basis             = layout.projected(i) ? run_basis::projected
                                : layout.turned(i)  ? run_basis::turned
                                                    : run_basis::original;
        return run;
    }
    run.key_coordinates   = static_cast<int>(layout.dims.keys);
    run.value_coordinates = static_cast<int>(layout.dims.values);
    run.key_bytes         = static_cast<int>(layout.dims.keys * bytes);
    run.value_bytes       = static_cast<int>(layout.dims.values * bytes);
    if (i == layout.rungs)
    {
        run.keys   = cache.arena + entry.exact.keys;
        run.values = cache.arena + entry.exact.values;
        run.tokens = entry.exact.tokens;
        run.stored = run.tokens;
        return run;
    }
    if (cache.tail_capacity == 0) { return run; }
    run.keys   = cache.tail + h * cache.tail_head_bytes();
    run.values = run.keys + cache.tail_capacity * run.key_bytes;
    run.tokens = *cache.appended < cache.tail_capacity ? *cache.appended : cache.tail_capacity;
    run.stored = cache.tail_capacity;
    return run;
}

/// One tile of coded rows: scales, minima and codes of one group of coordinates.
struct coded_group
{
    half const* scales; // [w]
    half const* minima; // [w]
    std::uint8_t const* codes;
    int coordinates; ///< of the group

    /// \param tile   its first byte; \param width tokens in the tile; \param all coordinates of a token
    __device__ coded_group(std::byte const* tile, int width, int all, int group, storage kind)
    {
        constexpr int size        = quantised_group;
        int const first           = group * size;
        std::byte const* const at = tile + width * stored_bytes(kind, first, 0);
        scales                    = reinterpret_cast<half const*>(at);
        minima                    = scales + width;
        codes                     = reinterpret_cast<std::uint8_t const*>(minima + width);
        coordinates               = all - first < size ? all - first : size;
    }

    [[nodiscard]] __device__ int half_group() const { return (coordinates + 1) / 2; }

    /// Code of coordinate j of a key: rows of `width` tokens.
    [[nodiscard]] __device__ float key_code(int j, int token, int width, storage kind) const
    {
        if (kind == storage::int8) { return static_cast<float>(codes[j * width + token]); }
        bool const high         = j >= half_group();
        std::uint8_t const both = codes[(high ? j - half_group() : j) * width + token];
        return static_cast<float>(high ? both >> 4 : both & 15);
    }
    /// Code of coordinate j of a value: rows of coordinates.
    [[nodiscard]] __device__ float value_code(int j, int token, storage kind) const
    {
        if (kind == storage::int8) { return static_cast<float>(codes[token * coordinates + j]); }
        bool const high         = j >= half_group();
        std::uint8_t const both = codes[token * half_group() + (high ? j - half_group() : j)];
        return static_cast<float>(high ? both >> 4 : both & 15);
    }
};

} // namespace mdkv::gpu::kernels
