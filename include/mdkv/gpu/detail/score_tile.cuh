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

using kernels::token_rows;

/// Rows of a head's tokens from `first` on, `count` of them, then zeros: to floats [dim, tile] and, pair by pair, to
/// [tile, dim / 2 + 1], either of which may be null. Two neighbouring lanes read 32 bytes of a row.
template <element T>
__device__ void read_rows(token_rows<T> const& from, index_t head, index_t first, int count, score_tiling const& tiling,
    float* floats, std::uint32_t* pairs)
{
    constexpr int width = kernels::piece_of<T>;
    int const tile      = tiling.tokens();
    int const t         = device::thread() / 2 & (tile - 1);
    auto const dim      = static_cast<int>(from.view.extent(2));
    T const* const row  = from.view.data_handle() + from.view.offset(head, first, index_t{0}) + t * from.view.stride(1);
    for (int d = (tiling.share() / 2 * 2 + device::thread() % 2) * width; d < dim; d += tiling.shares() * width)
    {
        T x[width];
        if (from.wide && t < count && d + width <= dim)
        {
            auto const piece = *reinterpret_cast<uint4 const*>(row + d);
            std::memcpy(static_cast<void*>(x), &piece, sizeof x);
        }
        else
        {
            for (int i = 0; i < width; ++i) { x[i] = t < count && d + i < dim ? row[d + i] : narrow<T>(0.0F); }
        }
        if constexpr (sizeof(T) == 2)
        {
            std::uint32_t two[width / 2];
            std::memcpy(two, x, sizeof two);
            for (int i = 0; pairs != nullptr && i < width / 2; ++i) { pairs[t * (dim / 2 + 1) + d / 2 + i] = two[i]; }
        }
        for (int i = 0; floats != nullptr && i < width; ++i)
        {
            if (d + i < dim) { floats[(d + i) * tile + t] = widen(x[i]); }
        }
    }
}

/// The keys of a tile, as they are.
template <element T>
__device__ void read_keys(token_rows<T> const& keys, index_t head, index_t first, int count, score_tiling const& tiling,
    score_tile const& tile)
{
    read_rows(keys, head, first, count, tiling, tiling.plain_keys ? tile.rows : nullptr,
        tiling.tensor ? tile.pairs : nullptr);
    device::sync();
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
    float const* from, int n, int step, storage kind, bool rotated, float* work, Use const& use)
{
    if (rotated)
    {
        for (int i = 0; i < n; ++i) { work[i * step] = from[i * step]; }
        mdkv::detail::hadamard(work, n, step);
        from = work;
    }
    mdkv::detail::quantiser const codes = quantiser_of(from, n, step, kind);
    int const most                      = mdkv::detail::most_code(kind);
    for (int i = 0; i < n; ++i) { use(i, from[i * step], codes.value(codes.code(from[i * step], most))); }
}

/// All that is made of a tile's keys to be multiplied with the queries. The block waits at the end, and not at the beginning.
__device__ inline void prepare_keys(
    score_plan const& p, score_tiling const& tiling, score_head const& h, score_tile const& tile)
{
    constexpr int group = static_cast<int>(quantised_group);
    int const step      = tiling.tokens();
    if (p.latent > 0)
    {
        project(tile.rows, p.dim, h.key_basis, p.key_columns(), p.latent, tiling, tile.latents);
        device::sync();
    }
    if (p.again == 0) { return; }
    for (int i = 1; i < p.softmaxes; ++i)
    {
        score_logits const& l = p.logits[i];
        for (int c = tiling.share() * group; l.of == score_operand::again && c < l.count; c += tiling.shares() * group)
        {
            float const* const from = (l.in_basis ? tile.latents : tile.rows) + c * step + tiling.token();
            float* const to         = tile.again + (l.first + c) * step + tiling.token();
            int const n             = l.count - c < group ? l.count - c : group;
            for_each_read_again(
                from, n, step, l.kind, !l.in_basis, to, [=](int j, float, float read) { to[j * step] = read; });
            if (!l.in_basis) { mdkv::detail::hadamard(to, n, step); } // back, so that queries can stay as they are
        }
    }
    device::sync();
}

} // namespace mdkv::gpu::detail
