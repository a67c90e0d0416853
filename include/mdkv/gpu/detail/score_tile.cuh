/// \file score_tile.cuh: what a block of score makes of a tile of tokens: floats, coordinates in a basis, coordinates read again from codes.
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/quantiser.hpp>
#include <mdkv/detail/rotation.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/collectives.cuh>
#include <mdkv/gpu/detail/score_plan.cuh>
#include <mdkv/gpu/detail/score_products.cuh>
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
    constexpr index_t elements = 16 / index_t{sizeof(T)};
    return reinterpret_cast<std::uintptr_t>(from.data_handle()) % 16 == 0 && from.extent(2) % elements == 0
           && from.stride(0) % elements == 0 && from.stride(1) % elements == 0;
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
            uint4 const bits = count > 0 ? device::load16(from) : uint4{0, 0, 0, 0};
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
    T const* const at   = from.data_handle() + from.mapping()(head, first, index_t{0});
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

/// The group as it is coded: itself, or a turned copy at `work`.
[[nodiscard]] __device__ inline float const* coded(float const* x, int n, int step, bool turned, float* work)
{
    if (!turned) { return x; }
    for (int i = 0; i < n; ++i) { work[i * step] = x[i * step]; }
    mdkv::detail::turn(work, n, step);
    return work;
}

/// Writes a group as it would be read again; where it was turned, turned back, so that queries can stay as they are.
__device__ inline void read_group_again(float const* from, int n, int step, storage kind, bool turned, float* to)
{
    float const* const x                = coded(from, n, step, turned, to);
    mdkv::detail::quantiser const codes = quantiser_of(x, n, step, kind);
    int const most                      = mdkv::detail::most_code(kind);
    for (int i = 0; i < n; ++i) { to[i * step] = codes.value(codes.code(x[i * step], most)); }
    if (turned) { mdkv::detail::turn(to, n, step); }
}

/// |x - x'|^2 of a group, x' being what would be read again. Turning keeps lengths.
[[nodiscard]] __device__ inline float squared_rounding(
    float const* from, int n, int step, storage kind, bool turned, float* work)
{
    float const* const x                = coded(from, n, step, turned, work);
    mdkv::detail::quantiser const codes = quantiser_of(x, n, step, kind);
    int const most                      = mdkv::detail::most_code(kind);
    float sum                           = 0;
    for (int i = 0; i < n; ++i)
    {
        float const rest = x[i * step] - codes.value(codes.code(x[i * step], most));
        sum += rest * rest;
    }
    return sum;
}

/// Of a tile of keys, all that is multiplied with the queries. The block waits at the end, and not at the beginning.
template <element T>
__device__ void prepare_keys(in_view<T, 3, backend> const& keys, bool wide, index_t head, index_t first, int count,
    score_plan const& p, score_tiling const& tiling, score_head const& h, score_tile const& tile)
{
    int const step = tiling.tokens();
    read_rows(
        keys, wide, head, first, count, tiling, p.plain_keys ? tile.keys : nullptr, p.tensor ? tile.rows : nullptr);
    device::sync();
    if (p.latent > 0)
    {
        project(tile.keys, p.dim, h.key_basis, score_padded(p.latent), p.latent, tiling, tile.latents);
        device::sync();
    }
    if (p.again == 0) { return; }
    int const token = tiling.token();
    for (int r = p.plain; r < p.count; ++r)
    {
        score_rung const& u = p.rungs[r];
        if (u.softmax == 0) { continue; }
        constexpr int group = static_cast<int>(quantised_group);
        for (int c = tiling.share() * group; c < u.keys; c += tiling.shares() * group)
        {
            float const* const from = (u.projected ? tile.latents : tile.keys) + c * step + token;
            read_group_again(from, u.keys - c < group ? u.keys - c : group, step, u.kind, u.turned,
                tile.again + (u.again + c) * step + token);
        }
    }
    device::sync();
}

} // namespace mdkv::gpu::detail
