/// \file score_products.cuh: how score cuts tokens into tiles on a GPU, the shared memory of a block, and products of tokens with queries in a warp (arXiv 2603.20616, section 4.2).
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/score_plan.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/device.cuh>

#include <cstdint>
#include <cstring>

#include <vector_types.h>

namespace MDKV_NAMESPACE::gpu::detail
{

using mdkv::detail::score_head;
using mdkv::detail::score_plan;
using mdkv::detail::score_states;

// A warp multiplies 32 tokens with a panel of 16 rows (queries, or directions of a basis), each lane four tokens with four
// rows. Two by two tensor core products give a lane the same shape, if tokens and rows are numbered for it (see
// multiply_exact).

inline constexpr int score_threads     = 256;
inline constexpr int score_warps       = score_threads / device::warp_size;
inline constexpr int score_warp_tokens = 32;
inline constexpr int score_panel       = 16; ///< rows of a panel
inline constexpr int score_depth       = 16; ///< coordinates of one tensor core product

/// Shared memory that every GPU since compute capability 8.0 gives a block; a tile of one warp's tokens may take more.
inline constexpr index_t score_most_shared = 96 * 1024;
/// Blocks of the first sweep: about eight on each multiprocessor; bounds the scratch.
inline constexpr index_t score_splits = 1056;

/// Size of a tile, and its contents.
struct score_tiling
{
    int token_shift;  ///< log2 of the warps that share out the tokens; other warps multiply other rows
    bool tensor;      ///< exact logits by tensor cores
    bool plain_keys;  ///< keys themselves are needed in float, e.g. to be projected
    index_t keys = 0; ///< bytes of shared memory that a tile of keys needs
    index_t all  = 0; ///< bytes with sweep two's sums, one of each softmax for every thread

    score_tiling(score_plan const& p, bool half_width);

    [[nodiscard]] MDKV_HD int token_warps() const noexcept { return 1 << token_shift; }
    [[nodiscard]] MDKV_HD int tokens() const noexcept { return score_warp_tokens << token_shift; }
    /// Number of tiles of n tokens, and number of tokens in the tile that begins at `first`.
    [[nodiscard]] MDKV_HD index_t tiles(index_t n) const noexcept { return (n + tokens() - 1) / tokens(); }
    [[nodiscard]] MDKV_HD int count(index_t n, index_t first) const noexcept
    {
        return n - first < tokens() ? static_cast<int>(n - first) : tokens();
    }
    /// Number of threads that share a token, and this thread's number among them.
    [[nodiscard]] MDKV_HD int shares() const noexcept { return score_threads / score_warp_tokens >> token_shift; }
    [[nodiscard]] __device__ int share() const { return device::warp() >> token_shift; }
};

/// A block's copy of a tile of keys, coordinate by coordinate, so that neighbours in memory are tokens.
struct score_tile
{
    float* rows;    // [dim, tokens]  only if plain_keys
    float* latents; // [latent, tokens]

    // [tokens, dim / 2 + 1]  keys in pairs, for tensor cores; the odd step avoids bank conflicts
    std::uint32_t* pairs;

    MDKV_HD score_tile(mdkv::detail::carver& memory, score_plan const& p, score_tiling const& t) noexcept
        : rows{memory.take<float>(t.plain_keys ? index_t{p.dim} * t.tokens() : 0)}
        , latents{memory.take<float>(index_t{p.latent} * t.tokens())}
        , pairs{memory.take<std::uint32_t>(t.tensor ? (p.dim / 2 + index_t{1}) * t.tokens() : 0)}
    {}
};

inline score_tiling::score_tiling(score_plan const& p, bool half_width)
    // Wide tiles keep the block busy while tokens are projected, narrow tiles if there are many rows.
    : token_shift{p.rows / score_panel < score_warps ? 3 : 2}
    , tensor{half_width && p.dim % score_depth == 0}
    , plain_keys{!tensor || p.softmaxes > 1}
{
    do {
        --token_shift;
        mdkv::detail::carver memory;
        static_cast<void>(score_tile{memory, p, *this});
        keys = memory.bytes();
        all  = keys + index_t{p.softmaxes} * score_threads * index_t{sizeof(float)};
    } while (all > score_most_shared && token_shift > 0);
}

/// [token][row]: a lane's share of a product.
using score_products = float[4][4];

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
        auto const t = device::load<float4>(tokens);
        auto const r = device::load<float4>(rows);
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

/// The product of multiply_add by tensor cores. Row g of product i is token 4 g + 2 i, row g + 8 the token after it;
/// column n of product j is row 4 (n / 2) + 2 j + n % 2: a lane then ends with the same four by four products. `tokens` is
/// the lane's first token in [tile, dim / 2 + 1], `fragments` are the panel's. The sum is scaled instead of the queries:
/// products of two numbers of 16 bits are exact in float and summed in float, though cut instead of rounded.
template <element T>
__device__ __forceinline__ void multiply_exact(
    score_products& products, std::uint32_t const* tokens, float const* fragments, int dim, float to_log2)
{
    int const p      = device::lane() % 4;
    float d[2][2][4] = {};
    auto const pair  = [&](int token, int coordinate) { return tokens[token * (dim / 2 + 1) + coordinate / 2 + p]; };
    for (int k = 0; k < dim; k += score_depth)
    {
        auto const f = device::load<uint4>(fragments + (k / score_depth * device::warp_size + device::lane()) * 4);
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

/// Totals of four numbers over the lanes that differ in the bits `high` and `low`. A lane gets one of the four totals,
/// selected by its own two bits.
[[nodiscard]] __device__ __forceinline__ float fold4(
    float const (&x)[4], int high, int low, row_norm norm = row_norm::sum)
{
    bool const h    = (device::lane() & high) != 0;
    bool const l    = (device::lane() & low) != 0;
    auto const join = [&](float a, float b) { return mdkv::detail::joined_rows(norm, a, b); };
    float const a   = join(h ? x[2] : x[0], device::shuffle_xor(h ? x[0] : x[2], high));
    float const b   = join(h ? x[3] : x[1], device::shuffle_xor(h ? x[1] : x[3], high));
    return join(l ? b : a, device::shuffle_xor(l ? a : b, low));
}

/// A logit, or -infinity if it is hidden.
[[nodiscard]] __device__ __forceinline__ float shown(float logit, unsigned hidden, int i, int j)
{
    return (hidden >> (4 * i + j) & 1U) != 0 ? -__builtin_huge_valf() : logit;
}

} // namespace MDKV_NAMESPACE::gpu::detail

namespace MDKV_NAMESPACE::gpu::kernels
{

/// Queries in the key basis, and in the order of tensor cores. One block a head and panel of rows.
template <element U>
struct score_panels
{
    static constexpr char const* name = "score_panels";
    static constexpr int threads      = 256;
    static constexpr int panel        = detail::score_panel;

    in_view<U, 3, backend> queries;
    in_view<float, 3, backend> basis; // [H, D, D]  key basis
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
        if constexpr (sizeof(U) == 2)
        {
            int const fragments = plan.dim / detail::score_depth * device::warp_size; // fragments of a panel
            float* const to     = h.more + index_t{at} * fragments * 4;
            for (int i = device::thread(); tensor && i < fragments; i += threads)
            {
                write_fragment(head, at * panel, i, to + i * 4);
            }
        }
    }

private:
    /// Writes unscaled queries in the order in which tensor cores take them (see multiply_exact).
    __device__ void write_fragment(index_t head, int first_row, int i, float* to) const
    {
        int const lane = i % device::warp_size;
        U pairs[2][2][2]; // [product][coordinates from 0 or 8][two]
        for (int j = 0; j < 8; ++j)
        {
            int const row = first_row + lane / 8 * 4 + j / 4 * 2 + lane / 4 % 2;
            int const d   = i / device::warp_size * detail::score_depth + lane % 4 * 2 + j / 2 % 2 * 8 + j % 2;
            pairs[j / 4][j / 2 % 2][j % 2] =
                row >= plan.query_rows
                    ? narrow<U>(0.0F)
                    : queries(head * (plan.query_rows / plan.per_head) + row / plan.per_head, row % plan.per_head, d);
        }
        uint4 vec16;
        static_assert(sizeof vec16 == sizeof pairs);
        std::memcpy(&vec16, pairs, sizeof vec16);
        device::store(to, vec16);
    }
};

} // namespace MDKV_NAMESPACE::gpu::kernels
