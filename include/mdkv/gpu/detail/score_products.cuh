/// \file score_products.cuh: how score cuts tokens into tiles on a GPU, the shared memory of a block, and products of its tokens with queries (arXiv 2603.20616, section 4.2).
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/score_options.hpp>
#include <mdkv/detail/score_plan.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/device.cuh>

#include <cstring>

#include <vector_types.h>

namespace MDKV_NAMESPACE::gpu::detail
{

using mdkv::detail::score_plan;

// A warp multiplies 32 tokens with a panel of 16 rows (queries, or directions of a basis), each lane four tokens with four rows.
// Two by two tensor core products give a lane the same shape, if tokens and rows are numbered for it (see multiply_exact).

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
    int token_shift;   ///< log2 of the warps that share out the tokens; other warps multiply other rows
    bool tensor;       ///< exact logits by tensor cores
    bool plain_keys;   ///< keys themselves are needed in float, e.g. to be projected
    index_t bytes = 0; ///< shared memory of a block

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

/// A block's copy of a tile of keys, coordinate by coordinate, so that neighbours in memory are tokens; and its sums.
struct score_tile
{
    mdkv::detail::carver cut;
    score_plan const& plan;
    score_tiling const& tiling;

    float* rows    = cut.take<float>(tiling.plain_keys ? index_t{plan.dim} * tiling.tokens() : 0); // [dim, tokens]
    float* latents = cut.take<float>(index_t{plan.latent} * tiling.tokens());                      // [latent, tokens]

    // [tokens, dim / 2 + 1]  keys in pairs, for tensor cores; the odd step avoids bank conflicts
    std::uint32_t* pairs = cut.take<std::uint32_t>(tiling.tensor ? (plan.dim / 2 + index_t{1}) * tiling.tokens() : 0);

    float* sums = cut.take<float>(index_t{plan.softmaxes} * score_threads); // [softmaxes, threads]  sweep two's
};

inline score_tiling::score_tiling(score_plan const& p, bool half_width)
    // Wide tiles keep the block busy while tokens are projected, narrow tiles if there are many rows.
    : token_shift{p.rows / score_panel < score_warps ? 3 : 2}
    , tensor{half_width && p.dim % score_depth == 0}
    , plain_keys{!tensor || p.softmaxes > 1}
{
    do {
        --token_shift;
        bytes = score_tile{{}, p, *this}.cut.bytes();
    } while (bytes > score_most_shared && token_shift > 0);
}

/// [token][row]: a lane's share of a product.
using score_products = float[4][4];

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
[[nodiscard]] __device__ __forceinline__ float fold4(float const (&x)[4], int high, int low, row_norm norm)
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

/// A tile of a head's tokens, and this lane's share of its products: four tokens by four rows of a panel.
struct score_block
{
    score_plan const& plan;
    score_tiling const& tiling;
    index_t head;
    score_plan::operands operands = plan.head(head);
    score_tile tile{mdkv::detail::carver{device::shared_memory()}, plan, tiling};
    /// The lane's first token in the tile, and its first row in a panel.
    int token = device::warp() % tiling.token_warps() * score_warp_tokens + device::lane() / 4 * 4;
    int row   = device::lane() % 4 * 4;

    /// Reads `count` keys from `first` on, and zeros for the tile's missing tokens: to tile.pairs for tensor cores, and to
    /// tile.rows if plain_keys. Two neighbouring lanes read 32 bytes of a row.
    template <element T>
    __device__ void read(in_view<T, 3, backend> const& from, index_t first, int count) const
    {
        constexpr int width = 16 / static_cast<int>(sizeof(T));
        int const size      = tiling.tokens();
        int const t         = device::thread() / 2 & (size - 1);
        int const dim       = plan.dim;
        T const* const at   = from.data_handle() + from.offset(head, first, index_t{0}) + t * from.stride(1);
        for (int d = (tiling.share() / 2 * 2 + device::thread() % 2) * width; d < dim; d += tiling.shares() * width)
        {
            T x[width];
            if (t < count && d + width <= dim) { mdkv::detail::load_all(at + d, x); }
            else
            {
                for (int i = 0; i < width; ++i) { x[i] = t < count && d + i < dim ? at[d + i] : narrow<T>(0.0F); }
            }
            if constexpr (sizeof(T) == 2)
            {
                std::uint32_t two[width / 2];
                std::memcpy(two, x, sizeof two);
                for (int i = 0; tiling.tensor && i < width / 2; ++i)
                {
                    tile.pairs[t * (dim / 2 + 1) + d / 2 + i] = two[i];
                }
            }
            for (int i = 0; tiling.plain_keys && i < width; ++i)
            {
                if (d + i < dim) { tile.rows[(d + i) * size + t] = widen(x[i]); }
            }
        }
        device::sync();
    }

    /// Writes the keys' coordinates in the basis to tile.latents [latent, tokens].
    __device__ void project_keys() const
    {
        int const step = tiling.tokens();
        for (int p = tiling.share(); p * score_panel < plan.latent; p += tiling.shares())
        {
            int const c             = p * score_panel + row;
            score_products products = {};
            multiply_add(products, tile.rows + token, step, operands.key_basis + c, plan.key_columns(), plan.dim);
            for (int j = 0; j < 4; ++j)
            {
                if (c + j >= plan.latent) { continue; }
                device::store(tile.latents + (c + j) * step + token,
                    float4{products[0][j], products[1][j], products[2][j], products[3][j]});
            }
        }
        device::sync();
    }

    /// Makes the lane's logits of softmax i; `logits` comes in with the logits of softmax i - 1, whose sums those of a wider
    /// projection continue.
    template <element T>
    __device__ __forceinline__ void multiply(score_products& logits, int i, int panel) const
    {
        if constexpr (sizeof(T) == 2)
        {
            if (tiling.tensor && i == 0)
            {
                index_t const fragments = index_t{panel} * (plan.dim / score_depth) * device::warp_size * 4;
                multiply_exact<T>(
                    logits, tile.pairs + token * (plan.dim / 2 + 1), operands.more + fragments, plan.dim, plan.to_log2);
                return;
            }
        }
        int const begin            = i == 0 ? 0 : plan.columns[i - 1];
        int const end              = i == 0 ? plan.dim : plan.columns[i];
        int const all              = i == 0 ? plan.dim : plan.latent;
        float const* const tokens  = i == 0 ? tile.rows : tile.latents;
        float const* const queries = i == 0 ? operands.queries : operands.latents;
        for (int k = 0; begin == 0 && k < 16; ++k) { logits[k / 4][k % 4] = 0; }
        multiply_add(logits, tokens + begin * tiling.tokens() + token, tiling.tokens(),
            queries + (index_t{panel} * all + begin) * score_panel + row, score_panel, end - begin);
    }

    /// The lane's hidden products, bit 4 * token + row, for the `count` tokens from `first` on and rows from `first_row` on.
    [[nodiscard]] __device__ unsigned hidden(index_t first, int count, int first_row) const
    {
        if (count == tiling.tokens() && plan.all_see(first + count - 1)) { return 0; }
        unsigned bits = 0;
        for (int j = 0; j < 4; ++j)
        {
            index_t const seen = plan.end_of(first_row + j) - first;
            index_t const end  = seen < count ? seen : count;
            for (int i = 0; i < 4; ++i) { bits |= token + i < end ? 0U : 1U << (4 * i + j); }
        }
        return bits;
    }
};

} // namespace MDKV_NAMESPACE::gpu::detail
