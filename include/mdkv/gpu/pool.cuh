/// \file pool.cuh: pool on the GPU: what each token gets of its row's losses
#pragma once

#include <mdkv/pool.hpp>

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/collectives.cuh>
#include <mdkv/gpu/device.cuh>
#include <mdkv/gpu/launch.cuh>

#include <cmath>

namespace mdkv::gpu
{

namespace kernels
{

/// A NaN wins, from either side: it must reach allocate, which tells of it.
[[nodiscard]] MDKV_HD inline float larger(float a, float b)
{
    return b > a || b != b ? b : a;
}

/// Of every token, the largest or the mean of its neighbours, one after another: they are in the nearest cache.
struct pool_neighbours
{
    static constexpr char const* name = "pool_neighbours";
    static constexpr int threads      = 256;

    in_view<float, 3, backend> loss;
    out_view<float, 3, backend> pooled;
    index_t width;
    bool mean;
    index_t blocks_per_row;

    __device__ void operator()() const
    {
        index_t const row   = device::block() / blocks_per_row;
        index_t const n     = loss.extent(2);
        index_t const i     = device::block() % blocks_per_row * threads + device::thread();
        index_t const h     = row / loss.extent(1);
        index_t const r     = row % loss.extent(1);
        index_t const reach = width / 2;
        if (i >= n) { return; }
        float const* const x = &loss(h, r, 0);
        index_t const first  = i < reach ? 0 : i - reach;
        index_t const last   = n - 1 - i < reach ? n - 1 : i + reach;
        float joined         = mean ? 0.0F : x[first];
        for (index_t t = first; t <= last; ++t) { joined = mean ? joined + x[t] : larger(joined, x[t]); }
        pooled(h, r, i) = mean ? joined / static_cast<float>(width) : joined;
    }
};

/// What is left of a loss after some tokens. Neither infinity nor nothing fades.
struct fading
{
    double per_token; ///< logarithm to base 2

    explicit fading(index_t width)
        : per_token{-2.0 / static_cast<double>(width)}
    {}
    [[nodiscard]] MDKV_HD float after(float loss, index_t tokens) const
    {
        auto const factor = static_cast<float>(exp2(per_token * static_cast<double>(tokens)));
        return loss - loss == 0.0F ? loss * factor : loss;
    }
};

/// One row in pieces: what arrives at a piece's two ends from the pieces beside it is known before its tokens are looked at.
struct fading_pieces
{
    static constexpr int threads     = 256;
    static constexpr int tokens_each = 8;
    static constexpr index_t piece   = index_t{threads} * tokens_each;
    static constexpr float nothing   = -__builtin_huge_valf();

    in_view<float, 3, backend> loss;
    out_view<float, 3, backend> pooled;
    float* leaving; // [2, rows, pieces]: of every piece, what leaves it to the right and to the left, at its last token
    fading fade;
    index_t pieces;

    [[nodiscard]] __device__ float& leaves(bool rightwards, index_t row, index_t at) const
    {
        return leaving[((rightwards ? 0 : 1) * loss.extent(0) * loss.extent(1) + row) * pieces + at];
    }

    /// What this thread's tokens hand on, and what arrives from the threads before it (in the direction of travel).
    struct arriving
    {
        float from_before;
        float of_all; ///< leaves the piece
    };
    [[nodiscard]] __device__ arriving travel(float mine, bool rightwards, float* part) const
    {
        int const place = rightwards ? device::thread() : threads - 1 - device::thread();
        // By doubling: after each step a thread holds what twice as many threads hand on.
        float held = mine;
        for (int step = 1; step < threads; step *= 2)
        {
            device::sync();
            part[place] = held;
            device::sync();
            if (place >= step) { held = larger(held, fade.after(part[place - step], index_t{step} * tokens_each)); }
        }
        device::sync();
        part[place] = held;
        device::sync();
        return {place == 0 ? nothing : part[place - 1], part[threads - 1]};
    }

    /// This thread's losses in the direction of travel; what there is no token for is nothing.
    __device__ void read(float (&mine)[tokens_each], index_t row, index_t at, bool rightwards) const
    {
        index_t const n     = loss.extent(2);
        index_t const first = at * piece + index_t{device::thread()} * tokens_each;
        for (int i = 0; i < tokens_each; ++i)
        {
            index_t const t = first + (rightwards ? i : tokens_each - 1 - i);
            mine[i]         = t < n ? loss(row / loss.extent(1), row % loss.extent(1), t) : nothing;
        }
    }

    [[nodiscard]] __device__ float handed_on(float const (&mine)[tokens_each]) const
    {
        float held = nothing;
        for (float const x : mine) { held = larger(fade.after(held, 1), x); }
        return held;
    }
};

struct pool_fading_ends : fading_pieces
{
    static constexpr char const* name = "pool_fading_ends";

    [[nodiscard]] index_t shared_bytes() const { return threads * index_t{sizeof(float)}; }

    __device__ void operator()() const
    {
        index_t const row = device::block() / pieces;
        index_t const at  = device::block() % pieces;
        auto* const part  = reinterpret_cast<float*>(device::shared_memory());
        for (bool const rightwards : {true, false})
        {
            float mine[tokens_each];
            read(mine, row, at, rightwards);
            float const out = travel(handed_on(mine), rightwards, part).of_all;
            if (device::thread() == 0) { leaves(rightwards, row, at) = out; }
        }
    }
};

struct pool_fading : fading_pieces
{
    static constexpr char const* name = "pool_fading";

    [[nodiscard]] index_t shared_bytes() const { return threads * index_t{sizeof(float)}; }

    __device__ void operator()() const
    {
        index_t const row = device::block() / pieces;
        index_t const at  = device::block() % pieces;
        index_t const n   = loss.extent(2);
        auto* const part  = reinterpret_cast<float*>(device::shared_memory());
        float best[tokens_each];
        for (bool const rightwards : {true, false})
        {
            float mine[tokens_each];
            read(mine, row, at, rightwards);
            // At the piece's edge: the nearest piece's, or one's further off that fades on its way through those between.
            float outside       = nothing;
            index_t const ahead = rightwards ? at : pieces - 1 - at;
            for (index_t k = 0; k < ahead; ++k)
            {
                index_t const from = rightwards ? k : pieces - 1 - k;
                outside            = larger(fade.after(outside, piece), leaves(rightwards, row, from));
            }
            int const place = rightwards ? device::thread() : threads - 1 - device::thread();
            float held      = larger(travel(handed_on(mine), rightwards, part).from_before,
                     fade.after(outside, index_t{place} * tokens_each));
            for (int i = 0; i < tokens_each; ++i)
            {
                held           = larger(fade.after(held, 1), mine[i]);
                int const slot = rightwards ? i : tokens_each - 1 - i;
                best[slot]     = rightwards ? held : larger(best[slot], held);
            }
        }
        index_t const first = at * piece + index_t{device::thread()} * tokens_each;
        for (int i = 0; i < tokens_each; ++i)
        {
            if (first + i < n) { pooled(row / loss.extent(1), row % loss.extent(1), first + i) = best[i]; }
        }
    }
};

} // namespace kernels

inline void pool_impl(
    backend const& on, in_view<float, 3, backend> loss, pool_options options, out_view<float, 3, backend> pooled)
{
    index_t const rows   = loss.extent(0) * loss.extent(1);
    index_t const n      = loss.extent(2);
    bool const fades     = options.kind == pooling::adaptive;
    index_t const pieces = (n + kernels::fading_pieces::piece - 1) / kernels::fading_pieces::piece;
    workspace::frame frame{*on.scratch, "pool"};
    auto* const leaving = frame.take<float>(fades ? checked_multiply(2 * rows, pieces) : 0);
    if (!frame.ready()) { return; }
    if (fades)
    {
        kernels::fading_pieces const job{loss, pooled, leaving, kernels::fading{options.width}, pieces};
        launch(on, kernels::pool_fading_ends{job}, rows * pieces);
        launch(on, kernels::pool_fading{job}, rows * pieces);
        return;
    }
    index_t const per_row = (n + kernels::pool_neighbours::threads - 1) / kernels::pool_neighbours::threads;
    launch(on, kernels::pool_neighbours{loss, pooled, options.width, options.kind == pooling::mean, per_row},
        rows * per_row);
}

} // namespace mdkv::gpu
