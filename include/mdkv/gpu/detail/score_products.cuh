/// \file score_products.cuh: products of tokens with queries in a warp of score, exactly and at every rung, and the causal mask of a tile.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/gpu/detail/score_tiling.cuh>
#include <mdkv/gpu/device.cuh>

#include <cstdint>

#include <vector_types.h>

namespace mdkv::gpu::detail
{

/// [token][row]: a lane's part of a product.
using score_products = float[4][4];

/// Where a lane works: its four tokens in the tile, its four rows in a panel, and which panels its warp takes.
struct score_place
{
    int token;
    int row;
    int first_panel;
    int panel_step;

    explicit __device__ score_place(score_tiling const& tiling)
        : token{device::warp() % tiling.token_warps() * score_warp_tokens + device::lane() / 4 * 4}
        , row{device::lane() % 4 * 4}
        , first_panel{tiling.share()}
        , panel_step{tiling.shares()}
    {}
};

[[nodiscard]] __device__ __forceinline__ float4 load4(float const* from)
{
    return *reinterpret_cast<float4 const*>(from);
}

__device__ __forceinline__ void clear(score_products& products)
{
    for (auto& of_token : products)
    {
        for (float& product : of_token) { product = 0; }
    }
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
/// lane's in [tile, step], `fragments` the panel's. Queries are as they came, the sum is scaled: products of two numbers of
/// 16 bits are exact in float and summed in float, though cut instead of rounded.
template <element T>
__device__ __forceinline__ void multiply_exact(
    score_products& products, std::uint32_t const* tokens, int step, uint4 const* fragments, int dim, float to_log2)
{
    int const p      = device::lane() % 4;
    float d[2][2][4] = {};
    auto const pair  = [&](int token, int coordinate) { return tokens[token * step + coordinate / 2 + p]; };
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

/// Adds a lane's parts of its four tokens to their sums over all rows of this warp; sums [score_threads].
__device__ __forceinline__ void add_to_tokens(float const (&x)[4], score_place const& at, int tile, float* sums)
{
    float const mine = fold4(x, 2, 1);
    sums[at.first_panel * tile + at.token + device::lane() % 4] += mine;
}

/// The causal mask for one tile: `count` of its tokens exist, and row 0 sees those up to `last`.
struct score_shade
{
    int count;
    int last;
    int per_head;
    bool nothing; ///< is hidden

    __device__ score_shade(causal_mask const& mask, index_t first, int count_, score_tiling const& tiling)
        : count{count_}
        , last{within(mask.first_query - first, -index_t{mask.per_head}, tiling.tokens())}
        , per_head{mask.per_head}
        , nothing{count == tiling.tokens() && mask.all_see(first + tiling.tokens() - 1)}
    {}

    /// Which of a lane's products are hidden, bit 4 * token + row.
    [[nodiscard]] __device__ unsigned hidden(int token, int row) const
    {
        if (nothing) { return 0; }
        unsigned bits = 0;
        for (int j = 0; j < 4; ++j)
        {
            int const end = last + (row + j) % per_head + 1;
            for (int i = 0; i < 4; ++i) { bits |= token + i < count && token + i < end ? 0U : 1U << (4 * i + j); }
        }
        return bits;
    }

private:
    [[nodiscard]] static __device__ int within(index_t x, index_t low, index_t high)
    {
        return static_cast<int>(x < low ? low : x > high ? high : x);
    }
};

/// A logit, or -infinity where it is hidden.
[[nodiscard]] __device__ __forceinline__ float shown(float logit, unsigned hidden, int i, int j)
{
    return (hidden >> (4 * i + j) & 1U) != 0 ? -__builtin_huge_valf() : logit;
}

/// Exact logits of a lane's tokens and rows.
template <element T>
__device__ __forceinline__ void multiply_queries(score_products& logits, score_tile const& tile, score_place const& at,
    int panel, score_plan const& p, score_tiling const& tiling, score_head const& h)
{
    if constexpr (sizeof(T) == 2)
    {
        if (tiling.tensor)
        {
            uint4 const* const fragments =
                score_extra{h, p}.fragments + index_t{panel} * (p.dim / score_depth) * device::warp_size;
            multiply_exact<T>(
                logits, tile.rows + at.token * (p.dim / 2 + 1), p.dim / 2 + 1, fragments, p.dim, p.to_log2);
            return;
        }
    }
    clear(logits);
    multiply_add(logits, tile.keys + at.token, tiling.tokens(),
        h.queries + index_t{panel} * p.dim * score_panel + at.row, score_panel, p.dim);
}

/// Puts the logits of each rung that has a softmax into `logits`, and calls use(softmax). Because bases nest, a wider plain
/// rung goes on from the sums of the narrower one; quantised ones multiply all they hold.
template <class Use>
__device__ __forceinline__ void for_each_rung(score_plan const& p, score_tile const& tile, score_place const& at,
    int panel, int step, score_head const& h, score_products& logits, Use const& use)
{
    float const* const latents = h.latents + index_t{panel} * p.key_columns() * score_panel + at.row;
    int done                   = 0;
    clear(logits);
    for (int r = 0; r < p.plain; ++r)
    {
        int const end = p.rungs[r].keys;
        multiply_add(
            logits, tile.latents + done * step + at.token, step, latents + done * score_panel, score_panel, end - done);
        done = end;
        use(p.rungs[r].softmax);
    }
    for (int r = p.plain; r < p.count; ++r)
    {
        score_rung const& u = p.rungs[r];
        if (u.softmax == 0) { continue; }
        float const* const queries = u.projected ? latents : h.queries + index_t{panel} * p.dim * score_panel + at.row;
        clear(logits);
        multiply_add(logits, tile.again + u.again * step + at.token, step, queries, score_panel, u.keys);
        use(u.softmax);
    }
}

} // namespace mdkv::gpu::detail
