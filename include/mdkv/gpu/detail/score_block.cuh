/// \file score_block.cuh: a block of score and its tile of tokens: read as floats, projected, dequantised, and multiplied with the queries (arXiv 2603.20616, section 4.2).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/detail/score_plan.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/score_products.cuh>
#include <mdkv/gpu/device.cuh>

#include <cstdint>
#include <cstring>

#include <vector_types.h>

namespace MDKV_NAMESPACE::gpu::detail
{

using kernels::token_rows;

/// A tile of a head's tokens, and this lane's share of its products: four tokens by four rows of a panel.
struct score_block
{
    score_plan const& plan;
    score_tiling const& tiling;
    index_t head;
    score_head operands;
    score_tile tile;
    int token; ///< the lane's first token in the tile
    int row;   ///< the lane's first row in a panel

    __device__ score_block(score_plan const& p, score_tiling const& t, index_t h, mdkv::detail::carver& memory)
        : plan{p}
        , tiling{t}
        , head{h}
        , operands{p.head(h)}
        , tile{memory, p, t}
        , token{device::warp() % t.token_warps() * score_warp_tokens + device::lane() / 4 * 4}
        , row{device::lane() % 4 * 4}
    {}

    /// Reads `count` keys from `first` on, and zeros for the tile's missing tokens: to tile.pairs for tensor cores, and to
    /// tile.rows if plain_keys. Two neighbouring lanes read 32 bytes of a row.
    template <element T>
    __device__ void read(token_rows<T> const& from, index_t first, int count) const
    {
        constexpr int width = kernels::vec16_elements<T>;
        int const size      = tiling.tokens();
        int const t         = device::thread() / 2 & (size - 1);
        int const dim       = plan.dim;
        T const* const at =
            from.view.data_handle() + from.view.offset(head, first, index_t{0}) + t * from.view.stride(1);
        for (int d = (tiling.share() / 2 * 2 + device::thread() % 2) * width; d < dim; d += tiling.shares() * width)
        {
            T x[width];
            if (from.wide && t < count && d + width <= dim)
            {
                auto const vec16 = device::load<uint4>(at + d);
                std::memcpy(static_cast<void*>(x), &vec16, sizeof x);
            }
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
        int const all              = i == 0 ? plan.dim : plan.key_columns();
        float const* const tokens  = i == 0 ? tile.rows : tile.latents;
        float const* const queries = i == 0 ? operands.queries : operands.latents;
        if (begin == 0) { clear(logits); }
        multiply_add(logits, tokens + begin * tiling.tokens() + token, tiling.tokens(),
            queries + (index_t{panel} * all + begin) * score_panel + row, score_panel, end - begin);
    }

    /// The lane's hidden products, bit 4 * token + row, for the `count` tokens from `first` on and rows from `first_row`
    /// on.
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
