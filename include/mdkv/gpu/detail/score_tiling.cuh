/// \file score_tiling.cuh: how score cuts tokens into tiles on a GPU, and what its blocks hold in shared memory (arXiv 2603.20616, section 4.2).
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/detail/score_plan.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/gpu/device.cuh>

#include <cstdint>

namespace mdkv::gpu::detail
{

using mdkv::detail::score_head;
using mdkv::detail::score_logits;
using mdkv::detail::score_operand;
using mdkv::detail::score_plan;
using mdkv::detail::score_rung;
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

/// Size of a tile, and what is in it.
struct score_tiling
{
    int token_shift;  ///< log2 of the warps that share out the tokens; the others multiply other rows
    bool tensor;      ///< exact logits by tensor cores
    bool plain_keys;  ///< keys themselves are needed in float: to be projected, or to become codes
    index_t keys = 0; ///< bytes of shared memory that a tile of keys needs
    index_t all  = 0; ///< bytes with sweep two's sums

    score_tiling(score_plan const& p, bool half_width);

    [[nodiscard]] MDKV_HD int token_warps() const noexcept { return 1 << token_shift; }
    [[nodiscard]] MDKV_HD int tokens() const noexcept { return score_warp_tokens << token_shift; }
    /// Tiles that n tokens are cut into, and how many tokens the one from `first` on has.
    [[nodiscard]] MDKV_HD index_t tiles(index_t n) const noexcept { return (n + tokens() - 1) / tokens(); }
    [[nodiscard]] MDKV_HD int count(index_t n, index_t first) const noexcept
    {
        return n - first < tokens() ? static_cast<int>(n - first) : tokens();
    }
    /// Threads that share a token, and which of them this one is.
    [[nodiscard]] MDKV_HD int shares() const noexcept { return score_threads / score_warp_tokens >> token_shift; }
    [[nodiscard]] __device__ int share() const { return device::warp() >> token_shift; }
    [[nodiscard]] __device__ int token() const { return device::thread() & (tokens() - 1); }
};

/// What a block holds of a tile of tokens; coordinate by coordinate, so that neighbours in memory are tokens. Keys and
/// values have the same memory in turn.
struct score_tile
{
    float* rows;    // [dim or value_dim, tokens]  keys only if plain_keys
    float* latents; // [latent or value_latent, tokens]
    float* again;   // [again or value_again, tokens]

    // [tokens, dim / 2 + 1]  keys as they are, for tensor cores, pair by pair; the odd step spares bank conflicts
    std::uint32_t* pairs;

    MDKV_HD score_tile(mdkv::detail::carver& memory, score_plan const& p, score_tiling const& t) noexcept
        : rows{take<float>(memory, t, t.plain_keys ? p.dim : 0, p.value_dim)}
        , latents{take<float>(memory, t, p.latent, p.value_latent)}
        , again{take<float>(memory, t, p.again, p.value_again)}
        , pairs{take<std::uint32_t>(memory, t, t.tensor ? p.dim / 2 + 1 : 0, 0)}
    {}

private:
    template <class V>
    [[nodiscard]] MDKV_HD static V* take(mdkv::detail::carver& memory, score_tiling const& t, int a, int b) noexcept
    {
        return memory.take<V>(index_t{a < b ? b : a} * t.tokens());
    }
};

/// Sweep two's sums, each in parts: one float a thread. Threads that share a token have a part each.
struct score_thread_sums
{
    static constexpr int parts = score_threads;

    int tokens;           ///< of the tile
    float* probabilities; // [softmaxes, parts]  sum P, then sum |P' - P|
    float* squares;       // [parts]             |v|^2
    float* roundings;     // [rungs, parts]      |v - v'|^2 by rounding
    float* kept;          // [rungs, parts]      squares of the coordinates from kept_from on
    float* rests;         // [rungs, parts]      |v - v'|^2 but for rounding, where |v|^2 - |v'|^2 would cancel

    MDKV_HD score_thread_sums(mdkv::detail::carver& memory, score_plan const& p, score_tiling const& t) noexcept
        : tokens{t.tokens()}
        , probabilities{memory.take<float>(index_t{p.softmaxes} * parts)}
        , squares{memory.take<float>(parts)}
        , roundings{memory.take<float>(index_t{p.count} * parts)}
        , kept{memory.take<float>(index_t{p.count} * parts)}
        , rests{memory.take<float>(index_t{p.count} * parts)}
    {}

    /// Sum i of those at `sums` of one token: its parts in their order.
    [[nodiscard]] __device__ float joined(float const* sums, int i, int token) const
    {
        float total = 0;
        for (int part = token; part < parts; part += tokens) { total += sums[i * parts + part]; }
        return total;
    }
};

inline score_tiling::score_tiling(score_plan const& p, bool half_width)
    // Wide tiles keep the block busy where tokens are projected, narrow ones where there are many rows.
    : token_shift{p.rows / score_panel < score_warps ? 3 : 2}
    , tensor{half_width && p.dim % score_depth == 0}
    , plain_keys{!tensor || p.softmaxes > 1}
{
    do {
        --token_shift;
        mdkv::detail::carver memory;
        static_cast<void>(score_tile{memory, p, *this});
        keys = memory.bytes();
        static_cast<void>(score_thread_sums{memory, p, *this});
        all = memory.bytes();
    } while (all > score_most_shared && token_shift > 0);
}

} // namespace mdkv::gpu::detail
