/// \file score_products.cuh: products of tokens with queries in a warp of score, and the queries as these take them (arXiv 2603.20616, section 4.2).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/score_tiling.cuh>
#include <mdkv/gpu/device.cuh>

#include <cstdint>
#include <cstring>

#include <vector_types.h>

namespace mdkv::gpu::detail
{

/// [token][row]: a lane's part of a product.
using score_products = float[4][4];

[[nodiscard]] __device__ __forceinline__ float4 load4(float const* from)
{
    return *reinterpret_cast<float4 const*>(from);
}

__device__ __forceinline__ void clear(score_products& products)
{
    for (int k = 0; k < 16; ++k) { products[k / 4][k % 4] = 0; }
}

/// products += tokens [depth, tile] of rows [depth, row_step].
__device__ __forceinline__ void multiply_add(
    score_products& products, float const* tokens, int tile, float const* rows, int row_step, int depth)
{
    for (int k = 0; k < depth; ++k)
    {
        float4 const t = load4(tokens);
        float4 const r = load4(rows);
        float const a[4]{t.x, t.y, t.z, t.w};
        float const b[4]{r.x, r.y, r.z, r.w};
        for (int i = 0; i < 4; ++i)
        {
            for (int j = 0; j < 4; ++j) { products[i][j] += a[i] * b[j]; }
        }
        tokens += tile;
        rows += row_step;
    }
}

/// The same by tensor cores: row g of product i is token 4 g + 2 i, row g + 8 the one after it; column n of product j is
/// row 4 (n / 2) + 2 j + n % 2: a lane then ends with the four by four it has elsewhere. `tokens` is the first of the
/// lane's in [tile, dim / 2 + 1], `fragments` the panel's. Queries are as they came, the sum is scaled: products of two
/// numbers of 16 bits are exact in float and summed in float, though cut instead of rounded.
template <element T>
__device__ __forceinline__ void multiply_exact(
    score_products& products, std::uint32_t const* tokens, uint4 const* fragments, int dim, float to_log2)
{
    int const p      = device::lane() % 4;
    float d[2][2][4] = {};
    auto const pair  = [&](int token, int coordinate) { return tokens[token * (dim / 2 + 1) + coordinate / 2 + p]; };
    for (int k = 0; k < dim; k += score_depth)
    {
        uint4 const f = fragments[k / score_depth * device::warp_size + device::lane()];
        std::uint32_t const b[2][2]{{f.x, f.y}, {f.z, f.w}};
        for (int i = 0; i < 2; ++i)
        {
            std::uint32_t const a[4]{pair(2 * i, k), pair(2 * i + 1, k), pair(2 * i, k + 8), pair(2 * i + 1, k + 8)};
            for (int j = 0; j < 2; ++j) { device::multiply_tile<T>(d[i][j], a, b[j]); }
        }
    }
    for (int i = 0; i < 4; ++i)
    {
        for (int j = 0; j < 4; ++j) { products[i][j] = d[i / 2][j / 2][i % 2 * 2 + j % 2] * to_log2; }
    }
}

/// Sums of four numbers over the lanes that differ in the bits `high` and `low`; a lane gets that of the number which those
/// two bits of its own say.
[[nodiscard]] __device__ __forceinline__ float fold4(float const (&x)[4], int high, int low)
{
    bool const h  = (device::lane() & high) != 0;
    bool const l  = (device::lane() & low) != 0;
    float const a = (h ? x[2] : x[0]) + device::shuffle_xor(h ? x[0] : x[2], high);
    float const b = (h ? x[3] : x[1]) + device::shuffle_xor(h ? x[1] : x[3], high);
    return (l ? b : a) + device::shuffle_xor(l ? a : b, low);
}

/// A logit, or -infinity where it is hidden.
[[nodiscard]] __device__ __forceinline__ float shown(float logit, unsigned hidden, int i, int j)
{
    return (hidden >> (4 * i + j) & 1U) != 0 ? -__builtin_huge_valf() : logit;
}

} // namespace mdkv::gpu::detail

namespace mdkv::gpu::kernels
{

/// Queries in the key basis, and in the order of tensor cores. One block a head and panel of rows.
template <element T>
struct score_panels
{
    static constexpr char const* name = "score_panels";
    static constexpr int threads      = 256;
    static constexpr int panel        = detail::score_panel;

    in_view<T, 3, backend> queries;
    in_view<float, 3, backend> basis; // [H, D, D]  of keys
    detail::score_plan plan;
    bool tensor;

    __device__ void operator()() const
    {
        int const panels           = plan.rows / panel;
        index_t const head         = device::block() / panels;
        auto const at              = static_cast<int>(device::block() % panels);
        detail::score_head const h = plan.head(head);
        // Queries in the key basis: one thread a query and direction.
        float const* const rows = h.queries + index_t{at} * plan.dim * panel;
        float* const latents    = h.latents + index_t{at} * plan.key_columns() * panel;
        for (int i = device::thread(); i < plan.latent * panel; i += threads)
        {
            float const* const direction = basis.row(head, i / panel);
            float sum                    = 0;
            for (int d = 0; d < plan.dim; ++d) { sum += direction[d] * rows[d * panel + i % panel]; }
            latents[i] = sum;
        }
        if constexpr (sizeof(T) == 2)
        {
            int const fragments = plan.dim / detail::score_depth * device::warp_size; // of a panel
            uint4* const to     = reinterpret_cast<uint4*>(h.more) + index_t{at} * fragments;
            for (int i = device::thread(); tensor && i < fragments; i += threads)
            {
                write_fragment(head, at * panel, i, to + i);
            }
        }
    }

private:
    /// Queries as they are, in the order in which tensor cores take them (see multiply_exact).
    __device__ void write_fragment(index_t head, int first_row, int i, uint4* to) const
    {
        int const lane = i % device::warp_size;
        T pairs[2][2][2]; // [product][coordinates from 0 or 8][two]
        for (int j = 0; j < 8; ++j)
        {
            int const row = first_row + lane / 8 * 4 + j / 4 * 2 + lane / 4 % 2;
            int const d   = i / device::warp_size * detail::score_depth + lane % 4 * 2 + j / 2 % 2 * 8 + j % 2;
            pairs[j / 4][j / 2 % 2][j % 2] =
                row >= plan.query_rows
                    ? narrow<T>(0.0F)
                    : queries(head * (plan.query_rows / plan.per_head) + row / plan.per_head, row % plan.per_head, d);
        }
        std::memcpy(to, pairs, sizeof pairs);
    }
};

} // namespace mdkv::gpu::kernels
