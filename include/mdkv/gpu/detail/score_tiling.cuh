/// \file score_tiling.cuh: how score cuts tokens into tiles on a GPU, and what its blocks hold in shared memory (arXiv 2603.20616, section 4.2).
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/detail/score_plan.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/gpu/device.cuh>

#include <cstddef>
#include <cstdint>

#include <vector_types.h>

namespace mdkv::gpu::detail
{

using mdkv::detail::causal_mask;
using mdkv::detail::score_head;
using mdkv::detail::score_operands;
using mdkv::detail::score_plan;
using mdkv::detail::score_rung;
using mdkv::detail::score_state;
using mdkv::detail::score_states;

// A warp multiplies 32 tokens with a panel of 16 rows (queries, or directions of a basis), each lane four by four of them:
// the shape in which two by two tensor core products come out as well, if tokens and rows are numbered for it.

inline constexpr int score_threads     = 256;
inline constexpr int score_warps       = score_threads / device::warp_size;
inline constexpr int score_warp_tokens = 32;
inline constexpr int score_panel       = 16; ///< rows
inline constexpr int score_depth       = 16; ///< coordinates of one tensor core product

/// Every GPU since compute capability 8.0 has as much for a block; a tile of one warp's tokens may take more.
inline constexpr index_t score_most_shared = 96 * 1024;
/// Blocks that sweep one is cut into: enough for every multiprocessor to have several, few enough for their states to be small.
inline constexpr index_t score_parts = 1056;

/// Size and contents of a tile; the host computes where its arrays begin, so that a kernel has that as constants.
struct score_tiling
{
    int token_shift = 0; ///< log2 of the warps that share out the tokens; the others multiply other rows
    bool tensor;         ///< exact logits by tensor cores
    bool plain_keys;     ///< keys themselves are needed in float
    int latents = 0, again = 0, rows = 0, work = 0; ///< bytes
    int bytes = 0;                                  ///< of the tile and of sweep two's sums

    [[nodiscard]] MDKV_HD int token_warps() const noexcept { return 1 << token_shift; }
    [[nodiscard]] MDKV_HD int tokens() const noexcept { return score_warp_tokens << token_shift; }
    /// Tiles that n tokens are cut into, and tokens of one of them.
    [[nodiscard]] index_t tiles(index_t n) const noexcept { return (n + tokens() - 1) / tokens(); }
    [[nodiscard]] MDKV_HD int count(index_t n, int tile) const noexcept
    {
        index_t const left = n - index_t{tile} * tokens();
        return left < tokens() ? static_cast<int>(left) : tokens();
    }
    /// Threads that share a token, and which of them this one is.
    [[nodiscard]] MDKV_HD int shares() const noexcept { return score_threads / score_warp_tokens >> token_shift; }
    [[nodiscard]] __device__ int share() const { return device::warp() >> token_shift; }
    [[nodiscard]] __device__ int token() const { return device::thread() & (tokens() - 1); }

    score_tiling(score_plan const& p, bool half_width)
        : tensor{half_width && p.dim % score_depth == 0}
        , plain_keys{!tensor || p.softmaxes > 1} // to be projected, or to become codes
    {
        // Wide tiles keep the block busy where tokens are projected, narrow ones where there are many rows.
        token_shift = p.rows / score_panel < score_warps ? 2 : 1;
        index_t all = lay_out(p);
        while (all > score_most_shared && token_shift > 0)
        {
            --token_shift;
            all = lay_out(p);
        }
        expects(all <= INT32_MAX, "score: a tile of keys takes ", all, " bytes, more than a GPU can address");
    }

private:
    [[nodiscard]] index_t lay_out(score_plan const& p) noexcept;
};

/// What a block holds of a tile of tokens; coordinate by coordinate, so that neighbours in memory are tokens.
struct score_tile
{
    float* keys;    // [dim, tokens]     or values [value_dim, tokens]; only if plain_keys, for keys
    float* latents; // [latent, tokens]  or [value_latent, tokens]
    float* again;   // [again, tokens]   keys read again; or [rotated, tokens] of values

    // [tokens, dim / 2 + 1]  keys as they are, for tensor cores, pair by pair; the odd step spares bank conflicts
    std::uint32_t* rows;

    __device__ score_tile(std::byte* memory, score_tiling const& t)
        : keys{reinterpret_cast<float*>(memory)}
        , latents{reinterpret_cast<float*>(memory + t.latents)}
        , again{reinterpret_cast<float*>(memory + t.again)}
        , rows{reinterpret_cast<std::uint32_t*>(memory + t.rows)}
    {}
};

/// Sweep two's sums. A sum over many rows or coordinates is kept in `parts` of one float a thread: threads that share a
/// token have a part each, and parts are joined in their order.
struct score_work
{
    static constexpr int parts = score_threads;

    float* sums;    // [most of softmaxes and rungs, parts]  sums of probabilities, then of squared rests
    float* totals;  // [softmaxes, tokens]                   sum P, sum |P' - P|
    float* pieces;  // [1 + 2 * rungs, parts]                |v|^2; |v - v'|^2 by rounding; squares of kept coordinates
    unsigned* rest; // [1]                                   some token needs its rest computed from the difference

    MDKV_HD score_work(mdkv::detail::carver& memory, score_plan const& p, int tokens) noexcept
        : sums{memory.take<float>(index_t{p.softmaxes < p.count ? p.count : p.softmaxes} * parts)}
        , totals{memory.take<float>(index_t{p.softmaxes} * tokens)}
        , pieces{memory.take<float>(index_t{1 + 2 * p.count} * parts)}
        , rest{memory.take<unsigned>(1)}
    {}

    /// Of one token, a sum's parts in their order; `tokens` of the tile.
    [[nodiscard]] static __device__ float joined(float const* sum, int token, int tokens)
    {
        float total = 0;
        for (int part = token; part < parts; part += tokens) { total += sum[part]; }
        return total;
    }
};

inline index_t score_tiling::lay_out(score_plan const& p) noexcept
{
    mdkv::detail::carver memory;
    auto const place = [&](index_t of_token) {
        auto const at = static_cast<int>(memory.bytes());
        static_cast<void>(memory.take<float>(of_token * tokens())); // or pairs
        return at;
    };
    // Keys and values have the same memory in turn.
    auto const larger = [](int a, int b) { return a < b ? b : a; };
    static_cast<void>(place(larger(plain_keys ? p.dim : 0, p.value_dim)));
    latents = place(larger(p.latent, p.value_latent));
    again   = place(larger(p.again, p.rotated));
    rows    = place(tensor ? p.dim / 2 + 1 : 0);
    work    = static_cast<int>(memory.bytes());
    static_cast<void>(score_work{memory, p, tokens()});
    bytes = static_cast<int>(memory.bytes());
    return memory.bytes();
}

/// A head's operands that only a GPU has, in score_head::more.
struct score_extra
{
    float* value_rows; // [value_latent, padded value_dim]   the value basis as it is, zero-padded
    uint4* fragments;  // [rows / panel, dim / depth, lanes] queries as they are, as tensor cores take them

    MDKV_HD score_extra(score_head const& h, score_plan const& p) noexcept
        : value_rows{h.more}
        , fragments{reinterpret_cast<uint4*>(h.more + row_floats(p))}
    {}
    [[nodiscard]] MDKV_HD static index_t row_floats(score_plan const& p) noexcept
    {
        return index_t{p.value_latent} * p.padded(p.value_dim);
    }
    [[nodiscard]] static index_t floats(score_plan const& p, score_tiling const& t) noexcept
    {
        return row_floats(p) + (t.tensor ? index_t{p.dim} * p.rows / 2 : 0);
    }
};

} // namespace mdkv::gpu::detail
