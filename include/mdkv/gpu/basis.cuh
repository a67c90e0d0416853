/// \file basis.cuh: Gram matrices on the GPU, X'X of every head in tiles, on tensor cores if T has 16 bits, and the bases made of them (arXiv 2603.20616, section 4.1).
#pragma once

#include <mdkv/stages/basis.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/device.cuh>
#include <mdkv/gpu/launch.cuh>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <vector_types.h>

namespace MDKV_NAMESPACE::gpu::kernels
{

/// How a Gram matrix is cut: into tiles, of which only the upper ones, diagonal included, are summed, and its samples into
/// splits that blocks sum side by side. The cut depends on extents only, so that every run adds in the same order.
struct gram_cut
{
    static constexpr int side            = 64;   // columns of a tile
    static constexpr index_t most_splits = 32;   // bounds the scratch
    static constexpr index_t least_share = 1024; // samples that make a split worth its own sum

    index_t across; ///< tiles side by side
    index_t tiles;  ///< on and above the diagonal
    index_t splits;

    gram_cut(index_t samples, index_t dim)
        : across{(dim + side - 1) / side}
        , tiles{across * (across + 1) / 2}
        , splits{std::clamp<index_t>(samples / least_share, 1, most_splits)}
    {}
};

/// One tile of one split of one head's samples: 64 x 64 sums in the registers of 128 threads. A thread has acc[k][e] of row
/// `row(k, e)` and column `column(k, e)` of the tile.
template <element T>
struct gram_products
{
    static constexpr char const* name              = "gram_products";
    static constexpr int threads                   = 128;
    static constexpr int blocks_per_multiprocessor = 3;
    static constexpr int side                      = gram_cut::side;
    static constexpr bool tensor                   = sizeof(T) == 2;
    static constexpr int vec16                     = vec16_elements<T>;
    static constexpr int pitch =
        side + vec16; // rows begin at 16 bytes; entries below each other are in different banks
    static constexpr int rows  = tensor ? 64 : 32; // samples in shared memory at once
    static constexpr int in_float = 256 / rows;    // rounds summed in float before they are added in double
    static constexpr int stages   = 2;

    token_rows<T> samples;
    double* sums; // [H, splits, D, D]  written in the tiles on and above the diagonal
    gram_cut cut;

    [[nodiscard]] index_t shared_bytes() const { return index_t{stages} * 2 * rows * pitch * int{sizeof(T)}; }

    __device__ void operator()() const
    {
        index_t const item  = device::block() / cut.tiles; // head and split
        index_t const split = item % cut.splits;
        index_t i          = 0; // the tile's row, in tiles
        index_t j          = device::block() % cut.tiles;
        for (; j >= cut.across - i; ++i) { j -= cut.across - i; }
        j += i;
        index_t const begin  = samples.view.extent(1) * split / cut.splits;
        index_t const end    = samples.view.extent(1) * (split + 1) / cut.splits;
        index_t const rounds = (end - begin + rows - 1) / rows;
        auto const fetch     = [&](index_t round) {
            if (round < rounds)
            {
                fill(strip(round, 0), item / cut.splits, begin + round * rows, end, i * side);
                if (i != j) { fill(strip(round, 1), item / cut.splits, begin + round * rows, end, j * side); }
            }
            device::copy_async_commit();
        };
        float acc[8][4]    = {};
        double total[8][4] = {};
        fetch(0);
        for (index_t round = 0; round < rounds; ++round)
        {
            fetch(round + 1);
            device::copy_async_wait<1>();
            device::sync();
            index_t const left = end - begin - round * rows;
            multiply_add(
                strip(round, 0), strip(round, i == j ? 0 : 1), static_cast<int>(left < rows ? left : rows), acc);
            if (round % in_float == in_float - 1) { move(acc, total); }
            device::sync();
        }
        device::copy_async_wait<0>();
        move(acc, total);
        index_t const dim = samples.view.extent(2);
        for (int k = 0; k < 8; ++k)
        {
            for (int e = 0; e < 4; ++e)
            {
                index_t const r = i * side + row(k, e);
                index_t const c = j * side + column(k, e);
                if (r < dim && c < dim) { sums[(item * dim + r) * dim + c] = total[k][e]; }
            }
        }
    }

private:
    /// Shared memory: [stages, 2, rows, pitch].
    [[nodiscard]] __device__ static T* strip(index_t stage, int which)
    {
        return reinterpret_cast<T*>(device::shared_memory()) + (stage % stages * 2 + which) * (rows * pitch);
    }

    /// Copies columns from `column` on of the samples from `first` on; missing columns and samples become zeros.
    __device__ void fill(T* strip, index_t head, index_t first, index_t end, index_t column) const
    {
        for (int i = device::thread(); i < rows * (side / vec16); i += threads)
        {
            int const row   = i / (side / vec16);
            int const at    = i % (side / vec16) * vec16;
            index_t const t = first + row;
            T* const to     = strip + row * pitch + at;
            T const* const from =
                samples.view.data_handle() + samples.view.offset(head, t < end ? t : index_t{0}, column + at);
            if (samples.wide && t < end && column + at + vec16 <= samples.view.extent(2))
            {
                device::copy_async<16>(to, from);
            }
            else
            {
                for (int e = 0; e < vec16; ++e)
                {
                    to[e] = t < end && column + at + e < samples.view.extent(2) ? from[e] : narrow<T>(0.0F);
                }
            }
        }
    }

    [[nodiscard]] __device__ static int row(int k, int e)
    {
        if constexpr (tensor) { return device::warp() / 2 * 32 + device::lane() / 4 * 4 + k / 4 * 2 + e / 2; }
        else { return device::thread() / 8 * 4 + k / 2; }
    }
    [[nodiscard]] __device__ static int column(int k, int e)
    {
        if constexpr (tensor) { return device::warp() % 2 * 32 + device::lane() % 4 * 8 + e % 2 * 4 + k % 4; }
        else { return k % 2 * (side / 2) + device::thread() % 8 * 4 + e; }
    }

    /// Reads four neighbouring columns of a strip as a lane holds them for multiply_tile: rows 2p and 2p+1 of each column,
    /// then 2p+8 and 2p+9. A fragment's row may stand for any column if results are put where they belong (row, column).
    __device__ static void read_fragments(T const* from, std::uint32_t (&to)[4][2])
    {
        for (int k = 0; k < 2; ++k)
        {
            auto const low  = device::load<uint2>(from + (8 * k) * pitch);
            auto const high = device::load<uint2>(from + (8 * k + 1) * pitch);
            to[0][k]        = (low.x & 0xffffU) | (high.x << 16);
            to[1][k]        = (low.x >> 16) | (high.x & 0xffff0000U);
            to[2][k]        = (low.y & 0xffffU) | (high.y << 16);
            to[3][k]        = (low.y >> 16) | (high.y & 0xffff0000U);
        }
    }

    /// acc += a'b over `samples_there` samples; tensor cores take all rows, zeros included.
    __device__ static void multiply_add(T const* a, T const* b, int samples_there, float (&acc)[8][4])
    {
        if constexpr (tensor)
        {
            int const at = device::lane() % 4 * 2 * pitch + device::lane() / 4 * 4;
            a += at + device::warp() / 2 * 32;
            b += at + device::warp() % 2 * 32;
            for (int t = 0; t < rows; t += 16)
            {
                std::uint32_t x[4][2];
                std::uint32_t y[4][2];
                read_fragments(a + t * pitch, x);
                read_fragments(b + t * pitch, y);
                for (int k = 0; k < 8; ++k)
                {
                    int const i                = k / 4 * 2;
                    std::uint32_t const from[] = {x[i][0], x[i + 1][0], x[i][1], x[i + 1][1]};
                    device::multiply_tile<T>(acc[k], from, y[k % 4]);
                }
            }
        }
        else
        {
            for (int t = 0; t < samples_there; ++t)
            {
                auto const x      = device::load<float4>(a + t * pitch + row(0, 0));
                auto const y      = device::load<float4>(b + t * pitch + column(0, 0));
                auto const z      = device::load<float4>(b + t * pitch + column(1, 0));
                float const xs[4] = {x.x, x.y, x.z, x.w};
                float const ys[8] = {y.x, y.y, y.z, y.w, z.x, z.y, z.z, z.w};
                for (int k = 0; k < 8; ++k)
                {
                    for (int e = 0; e < 4; ++e) { acc[k][e] = fmaf(xs[k / 2], ys[k % 2 * 4 + e], acc[k][e]); }
                }
            }
        }
    }

    __device__ static void move(float (&acc)[8][4], double (&total)[8][4])
    {
        for (int k = 0; k < 8; ++k)
        {
            for (int e = 0; e < 4; ++e)
            {
                total[k][e] += static_cast<double>(acc[k][e]);
                acc[k][e] = 0.0F;
            }
        }
    }
};

} // namespace MDKV_NAMESPACE::gpu::kernels

namespace MDKV_NAMESPACE::gpu
{

/// The backend's part of accumulate_gram.
template <element T>
void accumulate_gram_impl(backend const& on, in_view<T, 3, backend> samples, out_view<double, 3, backend> gram)
{
    index_t const heads = samples.extent(0);
    index_t const dim   = samples.extent(2);
    kernels::gram_cut const cut{samples.extent(1), dim};
    workspace::frame frame{*on.scratch, "accumulate_gram"};
    double* const sums = frame.take<double>(checked_multiply(heads * cut.splits, dim * dim));
    if (!frame.ready() || samples.empty()) { return; }
    launch(on, kernels::gram_products<T>{kernels::token_rows<T>{samples}, sums, cut}, heads * cut.splits * cut.tiles);
    run(on, mdkv::detail::gram_of_splits<space::device>{sums, cut.splits, gram}, heads * dim);
}

} // namespace MDKV_NAMESPACE::gpu
