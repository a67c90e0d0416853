/// \file naive_kernels.cuh: what a first version of algorithm 1 needs besides matrix products: softmaxes, lengths, sums over queries
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/gpu/device.cuh>
#include <mdkv/gpu/team.cuh>

#include <cmath>

#include "layers.cuh"

namespace bench
{

namespace kernels
{

struct narrow_all
{
    static constexpr char const* name = "narrow_all";
    static constexpr int threads      = 256;

    float const* from; // [count]
    element* to;       // [count]
    index_t count;

    __device__ void operator()() const
    {
        index_t const i = device::block() * threads + device::thread();
        if (i < count) { to[i] = mdkv::narrow<element>(from[i]); }
    }
};

/// |x - y| of every row, or |x|; a warp a row.
struct row_lengths
{
    static constexpr char const* name  = "row_lengths";
    static constexpr int threads       = 128;
    static constexpr index_t rows_each = threads / device::warp_size;

    element const* x; // [heads, stride, dim]
    element const* y; // likewise, or null
    float* to;        // [heads, rows]
    index_t rows;
    index_t stride;

    __device__ void operator()() const
    {
        index_t const row = device::block() * rows_each + device::warp();
        if (row >= heads * rows) { return; }
        index_t const at = (row / rows * stride + row % rows) * dim;
        float sum        = 0.0F;
        for (int d = device::lane(); d < int{dim}; d += device::warp_size)
        {
            float const one = mdkv::widen(x[at + d]) - (y == nullptr ? 0.0F : mdkv::widen(y[at + d]));
            sum += one * one;
        }
        for (int step = device::warp_size / 2; step > 0; step /= 2) { sum += device::shuffle_xor(sum, step); }
        if (device::lane() == 0) { to[row] = sqrtf(sum); }
    }
};

/// Rows of logits become rows of probabilities, over the keys that each query sees; a block a row.
struct softmax_rows
{
    static constexpr char const* name = "softmax_rows";
    static constexpr int threads      = 512;

    float* logits;  // [heads * group * window, columns]
    index_t tokens; // what every query sees; of the window, one more than the query before it
    index_t columns;

    __device__ void operator()() const
    {
        using block        = mdkv::gpu::team<threads>;
        index_t const seen = tokens + device::block() % window + 1;
        float* const row   = logits + device::block() * columns;
        float largest      = -1e30F;
        for (index_t i = device::thread(); i < seen; i += threads) { largest = fmaxf(largest, row[i]); }
        largest   = block::largest(largest);
        float sum = 0.0F;
        for (index_t i = device::thread(); i < seen; i += threads)
        {
            row[i] = expf(row[i] - largest);
            sum += row[i];
        }
        sum = block::sum(sum);
        for (index_t i = device::thread(); i < columns; i += threads) { row[i] = i < seen ? row[i] / sum : 0.0F; }
    }
};

/// Sums over all queries of a head; a thread a token.
struct token_losses
{
    static constexpr char const* name = "token_losses";
    static constexpr int threads      = 256;

    float const* full;     // [heads, group * window, columns]
    float const* other;    // likewise, or null: dropped
    float const* length;   // [heads, tokens]  |v|
    float const* distance; // [heads, tokens]  |v - v'|
    float* loss;           // [heads, rungs, tokens], from the rung on
    index_t rungs;
    index_t tokens;
    index_t columns;

    __device__ void operator()() const
    {
        index_t const i = device::block() * threads + device::thread();
        if (i >= heads * tokens) { return; }
        index_t const head = i / tokens;
        index_t const at   = head * group * window * columns + i % tokens;
        float moved        = 0.0F;
        float all          = 0.0F;
        for (index_t m = 0; m < group * window; ++m)
        {
            float const p = full[at + m * columns];
            all += p;
            if (other != nullptr) { moved += fabsf(other[at + m * columns] - p); }
        }
        loss[head * rungs * tokens + i % tokens] =
            other == nullptr ? 2.0F * all * length[i] : moved * length[i] + all * distance[i];
    }
};

} // namespace kernels

} // namespace bench
