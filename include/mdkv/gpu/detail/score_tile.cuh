/// \file score_tile.cuh: a tile of tokens in a block of score: read as floats, projected, and read again from codes.
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/hadamard.hpp>
#include <mdkv/detail/quantiser.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/rows.cuh>
#include <mdkv/gpu/detail/score_products.cuh>
#include <mdkv/gpu/detail/score_tiling.cuh>
#include <mdkv/gpu/device.cuh>

#include <cstdint>
#include <cstring>

#include <vector_types.h>

namespace mdkv::gpu::detail
{

/// Rows that can be read 16 bytes at a time.
template <element T>
[[nodiscard]] bool wide_rows(in_view<T, 3, backend> const& from)
{
    return from.extent(2) % kernels::piece_of<T> == 0 && kernels::rows_begin_at(from, 16);
}

/// Width neighbours of a row, of which `count` are there; the others are 0.
template <int Width, element T>
struct score_piece
{
    T x[Width];
    std::uint32_t pairs[(Width + 1) / 2]; ///< the same, of elements of 16 bits

    __device__ score_piece(T const* from, int count)
    {
        if constexpr (Width * sizeof(T) == 16)
        {
            uint4 const bits = count > 0 ? *reinterpret_cast<uint4 const*>(from) : uint4{0, 0, 0, 0};
            std::memcpy(static_cast<void*>(x), &bits, sizeof bits);
        }
        else
        {
            for (int i = 0; i < Width; ++i) { x[i] = i < count ? from[i] : narrow<T>(0.0F); }
        }
        if constexpr (sizeof(T) == 2) { std::memcpy(pairs, x, sizeof pairs); }
    }
};

/// Rows of `dim` elements from `from`, `step` apart, to floats [dim, tile] and, pair by pair, to rows [tile, dim / 2 + 1],
/// either of which may be null; zeros after the first `count`. Two neighbouring lanes read up to 32 bytes of a row.
template <int Width, element T>
__device__ void read_rows(
    T const* from, index_t step, int count, int dim, score_tiling const& tiling, float* floats, std::uint32_t* rows)
{
    int const tile   = tiling.tokens();
    int const pieces = (dim + Width - 1) / Width;
    int const t      = device::thread() / 2 & (tile - 1);
    for (int piece = tiling.share() / 2 * 2 + device::thread() % 2; piece < pieces; piece += tiling.shares())
    {
        int const d    = piece * Width;
        int const left = dim - d < Width ? dim - d : Width;
        score_piece<Width, T> const here{from + t * step + d, t < count ? left : 0};
        if constexpr (sizeof(T) == 2)
        {
            for (int i = 0; rows != nullptr && i < Width / 2; ++i)
            {
                rows[t * (dim / 2 + 1) + d / 2 + i] = here.pairs[i];
            }
        }
        for (int i = 0; floats != nullptr && i < Width; ++i)
        {
            if (i < left) { floats[(d + i) * tile + t] = widen(here.x[i]); }
        }
    }
}

template <element T>
__device__ void read_rows(in_view<T, 3, backend> const& from, bool wide, index_t head, index_t first, int count,
    score_tiling const& tiling, float* floats, std::uint32_t* rows)
{
    constexpr int width = 16 / static_cast<int>(sizeof(T));
    T const* const at   = from.data_handle() + from.offset(head, first, index_t{0});
    int const dim       = static_cast<int>(from.extent(2));
    if (wide) { read_rows<width>(at, from.stride(1), count, dim, tiling, floats, rows); }
    else { read_rows<2>(at, from.stride(1), count, dim, tiling, floats, rows); }
}

/// Coordinates of the tile's tokens in a basis: to [count, tile]; `basis` is [dim, columns].
__device__ inline void project(
    float const* tokens, int dim, float const* basis, int columns, int count, score_tiling const& tiling, float* to)
{
    score_place const at{tiling};
    int const step = tiling.tokens();
    for (int p = at.first_panel; p * score_panel < count; p += at.panel_step)
    {
        int const c             = p * score_panel + at.row;
        score_products products = {};
        multiply_add(products, tokens + at.token, step, basis + c, columns, dim);
        for (int j = 0; j < 4; ++j)
        {
            if (c + j >= count) { continue; }
            *reinterpret_cast<float4*>(to + (c + j) * step + at.token) =
                float4{products[0][j], products[1][j], products[2][j], products[3][j]};
        }
    }
}

/// How a group of n coordinates, `step` apart, is quantised. One that holds a NaN or an infinity is read as NaN.
[[nodiscard]] __device__ inline mdkv::detail::quantiser quantiser_of(float const* x, int n, int step, storage kind)
{
    float least   = x[0];
    float most    = x[0];
    float nothing = 0;
    for (int i = 0; i < n; ++i)
    {
        float const v = x[i * step];
        least         = v < least ? v : least;
        most          = v > most ? v : most;
        nothing += v * 0.0F;
    }
    return {nothing == 0.0F ? least : nothing, most, kind};
}

/// use(i, x, x') for the n coordinates x of a group, `step` apart, rotated first if they are coded so (a copy at `work`):
/// x' is x as it would be read again.
template <class Use>
__device__ __forceinline__ void for_each_read_again(
    float const* from, int n, int step, score_rung const& u, float* work, Use const& use)
{
    if (u.rotated())
    {
        for (int i = 0; i < n; ++i) { work[i * step] = from[i * step]; }
        mdkv::detail::hadamard(work, n, step);
        from = work;
    }
    mdkv::detail::quantiser const codes = quantiser_of(from, n, step, u.kind);
    int const most                      = mdkv::detail::most_code(u.kind);
    for (int i = 0; i < n; ++i) { use(i, from[i * step], codes.value(codes.code(from[i * step], most))); }
}

/// Of a tile of keys, all that is multiplied with the queries. The block waits at the end, and not at the beginning.
template <element T>
__device__ void prepare_keys(in_view<T, 3, backend> const& keys, bool wide, index_t head, index_t first, int count,
    score_plan const& p, score_tiling const& tiling, score_head const& h, score_tile const& tile)
{
    constexpr int group = static_cast<int>(quantised_group);
    int const step      = tiling.tokens();
    read_rows(keys, wide, head, first, count, tiling, tiling.plain_keys ? tile.keys : nullptr,
        tiling.tensor ? tile.rows : nullptr);
    device::sync();
    if (p.latent > 0)
    {
        project(tile.keys, p.dim, h.key_basis, p.key_columns(), p.latent, tiling, tile.latents);
        device::sync();
    }
    if (p.again == 0) { return; }
    int const token = tiling.token();
    for (int r = p.plain; r < p.count; ++r)
    {
        score_rung const& u = p.rungs[r];
        if (u.softmax == 0) { continue; }
        for (int c = tiling.share() * group; c < u.keys; c += tiling.shares() * group)
        {
            float const* const from = (u.projected ? tile.latents : tile.keys) + c * step + token;
            float* const to         = tile.again + (u.again + c) * step + token;
            int const n             = u.keys - c < group ? u.keys - c : group;
            for_each_read_again(from, n, step, u, to, [=](int i, float, float read) { to[i * step] = read; });
            if (u.rotated()) { mdkv::detail::hadamard(to, n, step); } // back, so that queries can stay as they are
        }
    }
    device::sync();
}

} // namespace mdkv::gpu::detail
