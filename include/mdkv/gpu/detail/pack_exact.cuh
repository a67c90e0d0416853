/// \file pack_exact.cuh: what pack copies: original vectors into the exact run, and the leading directions of the bases.
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/collectives.cuh>
#include <mdkv/gpu/detail/pack_rows.cuh>
#include <mdkv/gpu/device.cuh>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <vector_types.h>

namespace mdkv::gpu::kernels
{

/// The tokens at the full rung, then the window, a tile at a time and bit for bit.
template <element T>
struct pack_exact
{
    static constexpr char const* name              = "pack_exact";
    static constexpr int blocks_per_multiprocessor = 8;
    static constexpr int threads                   = 128;
    static constexpr int warps                     = threads / device::warp_size;
    static constexpr int coordinates               = 128;                    ///< turned over at once
    static constexpr int pitch           = coordinates + 4 / int{sizeof(T)}; ///< columns lie in different banks
    static constexpr index_t most_blocks = 4096;                             ///< of all heads

    packing<T> job;
    int blocks_per_head;

    struct shared
    {
        T const** keys;   // [16]
        T const** values; // [16]
        T* block;         // [16, pitch]

        __host__ __device__ explicit shared(device::shared_carver& memory)
            : keys{memory.take<T const*>(tile_tokens)}
            , values{memory.take<T const*>(tile_tokens)}
            , block{memory.take<T>(tile_tokens * pitch)}
        {}
    };

    [[nodiscard]] index_t shared_bytes() const
    {
        device::shared_carver size{nullptr};
        static_cast<void>(shared{size});
        return size.bytes();
    }

    __device__ void operator()() const
    {
        device::shared_carver memory{device::shared_memory()};
        shared const at{memory};
        auto const block    = static_cast<int>(device::block());
        index_t const h     = block / blocks_per_head;
        run_entry const run = job.cache.heads[h].exact;
        auto const tiles    = static_cast<int>((run.tokens + tile_tokens - 1) / tile_tokens);
        for (int tile = block % blocks_per_head; tile < tiles; tile += blocks_per_head)
        {
            index_t const first = tile * tile_tokens;
            auto const width    = static_cast<int>(run.tokens - first < tile_tokens ? run.tokens - first : tile_tokens);
            device::sync();
            if (device::thread() < width)
            {
                find(at, h, first + device::thread(), run.tokens - job.cache.layout.window);
            }
            device::sync();
            write_keys(at, job.cache.arena + run.keys, first, width);
            write_values(at, job.cache.arena + run.values, first, width);
        }
    }

    /// Where token i of the run comes from; the window begins at `window`.
    __device__ void find(shared const& at, index_t h, index_t i, index_t window) const
    {
        bool const in_window        = i >= window;
        index_t const t             = in_window ? i - window : job.position(h, job.cache.layout.full_rung, i);
        at.keys[device::thread()]   = row_of(in_window ? job.window_keys : job.keys, h, t);
        at.values[device::thread()] = row_of(in_window ? job.window_values : job.values, h, t);
    }

    /// block[t][c] = row[t][c0 + c] for c < n.
    __device__ void read(T const* const* row, int c0, int n, int width, T* block) const
    {
        if (!job.vector_keys)
        {
            for (int t = device::warp(); t < width; t += warps)
            {
                for (int c = device::lane(); c < n; c += device::warp_size) { block[t * pitch + c] = row[t][c0 + c]; }
            }
            return;
        }
        constexpr int row_threads = coordinates / piece_of<T>;
        int const c               = device::thread() % row_threads * piece_of<T>;
        for (int t = device::thread() / row_threads; t < width && c < n; t += threads / row_threads)
        {
            uint4 const piece = device::load16(row[t] + c0 + c);
            memcpy(static_cast<void*>(block + t * pitch + c), &piece, sizeof piece); // rows begin at 4 bytes
        }
    }

    __device__ void write_keys(shared const& at, std::byte* run, index_t first, int width) const
    {
        auto const dim = static_cast<int>(job.cache.layout.dims.keys);
        for (int c0 = 0; c0 < dim; c0 += coordinates)
        {
            int const n = dim - c0 < coordinates ? dim - c0 : coordinates;
            if (c0 > 0) { device::sync(); }
            read(at.keys, c0, n, width, at.block);
            device::sync();
            std::byte* const to = run + (first * dim + c0 * width) * index_t{sizeof(T)};
            if (width == tile_tokens && reinterpret_cast<std::uintptr_t>(to) % 16 == 0)
            {
                write_columns(at.block, n, to);
                continue;
            }
            int const t = device::lane();
            for (int c = device::warp(); c < n && t < width; c += warps)
            {
                store_at(to + (c * width + t) * int{sizeof(T)}, at.block[t * pitch + c]);
            }
        }
    }

    /// A whole tile, sixteen bytes of a coordinate at once.
    __device__ void write_columns(T const* block, int n, std::byte* to) const
    {
        constexpr int per = piece_of<T>;
        for (int i = device::thread() * per; i < n * int{tile_tokens}; i += threads * per)
        {
            T const* const from = block + i % tile_tokens * pitch + i / tile_tokens;
            alignas(16) T piece[per];
            for (int t = 0; t < per; ++t) { piece[t] = from[t * pitch]; }
            uint4 whole;
            memcpy(&whole, static_cast<void const*>(piece), sizeof whole);
            *reinterpret_cast<uint4*>(to + i * int{sizeof(T)}) = whole;
        }
    }

    __device__ void write_values(shared const& at, std::byte* run, index_t first, int width) const
    {
        auto const dim      = static_cast<int>(job.cache.layout.dims.values);
        std::byte* const to = run + first * dim * index_t{sizeof(T)};
        if (job.vector_values && reinterpret_cast<std::uintptr_t>(to) % 16 == 0)
        {
            constexpr int row_threads = 16; // a row of 128 two-byte elements at once
            int const pieces          = dim / piece_of<T>;
            for (int t = device::thread() / row_threads; t < width; t += threads / row_threads)
            {
                for (int i = device::thread() % row_threads; i < pieces; i += row_threads)
                {
                    reinterpret_cast<uint4*>(to)[t * pieces + i] = device::load16(at.values[t] + i * piece_of<T>);
                }
            }
            return;
        }
        for (int t = device::warp(); t < width; t += warps)
        {
            for (int d = device::lane(); d < dim; d += device::warp_size)
            {
                store_at(to + (t * dim + d) * index_t{sizeof(T)}, at.values[t][d]);
            }
        }
    }
};

/// What brings queries to the stored coordinates of keys, and stored coordinates of values back.
template <element T>
struct pack_projections
{
    static constexpr char const* name    = "pack_projections";
    static constexpr int threads         = 256;
    static constexpr int blocks_per_head = 8;

    packing<T> job;

    __device__ void operator()() const
    {
        auto const block        = static_cast<int>(device::block());
        index_t const h         = block / blocks_per_head;
        int const begin         = block % blocks_per_head * threads + device::thread();
        head_entry const& entry = job.cache.heads[h];
        auto const key_dim      = static_cast<int>(job.cache.layout.dims.keys);
        auto const value_dim    = static_cast<int>(job.cache.layout.dims.values);
        auto const columns      = static_cast<int>(entry.key_columns);
        auto const rows         = static_cast<int>(entry.value_columns);
        std::byte* const keys   = job.cache.arena + entry.key_projection;
        std::byte* const values = job.cache.arena + entry.value_projection;
        for (int i = begin; i < key_dim * columns; i += blocks_per_head * threads)
        {
            store_at(keys + i * index_t{sizeof(T)}, narrow<T>(row_of(job.query_basis, h, i % columns)[i / columns]));
        }
        for (int i = begin; i < rows * value_dim; i += blocks_per_head * threads)
        {
            store_at(
                values + i * index_t{sizeof(T)}, narrow<T>(row_of(job.value_basis, h, i / value_dim)[i % value_dim]));
        }
    }
};

} // namespace mdkv::gpu::kernels
