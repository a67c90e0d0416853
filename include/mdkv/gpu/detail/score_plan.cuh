/// \file score_plan.cuh: what score's kernels are told: the rungs by kind, where a head's operands lie, how tokens are cut into tiles (arXiv 2603.20616, section 4.2).
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/gpu/collectives.cuh>
#include <mdkv/score.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>

#include <vector_types.h>

namespace mdkv::gpu::detail
{

// A warp multiplies 32 tokens with a panel of 16 rows (queries, or directions of a basis), each lane four by four of them:
// the shape in which two by two tensor core products come out as well, if tokens and rows are numbered for it.

inline constexpr int score_threads     = 256;
inline constexpr int score_warps       = score_threads / device::warp_size;
inline constexpr int score_warp_tokens = 32;
inline constexpr int score_panel       = 16; ///< rows
inline constexpr int score_depth       = 16; ///< coordinates of one tensor core product

/// A block takes no more than every GPU since compute capability 8.0 has; tiles that are larger lie in global memory.
inline constexpr index_t score_most_shared = 96 * 1024;
/// Blocks in flight where tiles lie in global memory: each has its own.
inline constexpr index_t score_most_blocks = 132;
/// Blocks that sweep one is cut into: enough for every multiprocessor to have several, few enough for their states to be small.
inline constexpr index_t score_parts = 1056;

/// A rung that is neither dropped nor full.
struct score_rung
{
    int index;   ///< in the ratio set
    int keys;    ///< coordinates
    int values;  ///< coordinates
    int softmax; ///< which of the softmaxes is its P'; 0: its loss needs none
    int again;   ///< of a quantised rung with a softmax: coordinates of other rungs before its own in score_tile::again
    storage kind;
    bool projected; ///< its coordinates are those in the basis
    bool turned;    ///< its groups are turned before they become codes

    // |v - v'|: the squares of its coordinates from here on are added to those of the rung before it, unless it is 0.
    int kept_from   = 0;
    bool leaves_out = false; ///< coordinates, and not only rounds them
};

[[nodiscard]] MDKV_HD constexpr int score_padded(int n) noexcept
{
    return (n + score_panel - 1) / score_panel * score_panel;
}

/// The rungs, plain ones first, each holding the coordinates of the one before it; and the sizes that follow.
struct score_plan
{
    score_rung rungs[max_rungs];
    int count     = 0;
    int plain     = 0;
    int softmaxes = 1;  ///< the exact one, then those of the rungs
    int dropped   = -1; ///< index in the ratio set, or none
    int full      = -1;

    int dim          = 0;
    int value_dim    = 0;
    int latent       = 0; ///< coordinates in the key basis that are multiplied with queries
    int value_latent = 0;
    int again        = 0;     ///< coordinates of keys read again, of all rungs together
    int turned       = 0;     ///< the most coordinates of a value that are turned
    int per_head     = 0;     ///< Q
    int query_rows   = 0;     ///< G*Q
    int rows         = 0;     ///< the same in whole panels; those beyond weigh nothing
    float to_log2    = 0;     ///< what makes logits of products: the scale, in units of log2
    bool tensor      = false; ///< exact logits by tensor cores
    bool plain_keys  = true;  ///< keys themselves are needed in float

    template <std::size_t R>
    score_plan(ratio_set<R> const& ratios, head_dims dims, index_t group, index_t queries, float scale,
        quantisation_loss rule, bool half_width)
        : dim{narrowed(dims.keys, "D")}
        , value_dim{narrowed(dims.values, "Dv")}
        , per_head{narrowed(queries, "Q")}
        , query_rows{narrowed(checked_multiply(group, queries), "G*Q")}
        , rows{score_padded(query_rows)}
        , to_log2{(scale > 0.0F ? scale : 1.0F / std::sqrt(static_cast<float>(dim))) * mdkv::detail::log2_e}
        , tensor{half_width && dim % score_depth == 0}
        , plain_keys{!tensor}
    {
        cache_layout const layout{ratios, 0, 0, dims};
        for (bool const quantised : {false, true}) // plain rungs ascend among themselves, whatever stands between them
        {
            for (std::size_t r = 0; r < ratios.size(); ++r)
            {
                rung const& u = ratios[r];
                if (u.dropped()) { dropped = static_cast<int>(r); }
                if (u.full()) { full = static_cast<int>(r); }
                if (u.dropped() || u.full() || u.quantised() != quantised) { continue; }
                bool const values_only = quantised && u.num == u.den && rule == quantisation_loss::value_only;
                add({static_cast<int>(r), static_cast<int>(layout.key_coordinates[r]),
                    static_cast<int>(layout.value_coordinates[r]), values_only ? 0 : softmaxes, again, u.kind,
                    u.projected(), layout.turned(r)});
            }
        }
    }

    [[nodiscard]] MDKV_HD int key_columns() const noexcept { return score_padded(latent); }
    [[nodiscard]] MDKV_HD int value_columns() const noexcept { return score_padded(value_latent); }

private:
    int kept = 0; ///< coordinates of values that the last rung keeps, of those that leave some out

    [[nodiscard]] static int narrowed(index_t n, char const* name)
    {
        expects(n <= (1 << 24), "score: ", name, " is ", n, "; on a GPU it must not exceed ", 1 << 24);
        return static_cast<int>(n);
    }

    void add(score_rung u) noexcept
    {
        auto const raise     = [](int& most, int n) { most = most < n ? n : most; };
        bool const quantised = u.kind != storage::plain;
        u.leaves_out         = !quantised || u.values < value_dim;
        u.kept_from          = u.leaves_out && u.values >= kept ? kept : 0;
        kept                 = u.leaves_out ? u.values : kept;
        rungs[count++]       = u;
        plain += quantised ? 0 : 1;
        if (u.projected) { raise(value_latent, u.values); }
        if (u.turned) { raise(turned, u.values); }
        if (u.softmax == 0) { return; }
        ++softmaxes;
        if (u.projected) { raise(latent, u.keys); }
        plain_keys = true; // to be projected, or to become codes
        again += quantised ? u.keys : 0;
    }
};

/// Prepared once a head.
struct score_head
{
    float* queries;     // [dim, rows]                        scaled, in units of log2
    float* latents;     // [latent, rows]                     queries in the key basis, likewise
    float* key_basis;   // [dim, key_columns]                 transposed
    float* value_basis; // [value_dim, value_columns]         transposed
    float* value_rows;  // [value_latent, padded value_dim]
    float* lse;         // [softmaxes, rows]                  log2, weights of the queries folded in
    uint4* fragments;   // [rows / panel, dim / depth, lanes] queries as they are, as tensor cores take them
};

/// All heads' operands, one after another.
struct score_operands
{
    float* memory = nullptr;
    index_t queries, latents, key_basis, value_basis, value_rows, lse, fragments, per_head; // floats

    explicit score_operands(score_plan const& p) noexcept
        : queries{0}
        , latents{queries + index_t{p.dim} * p.rows}
        , key_basis{latents + index_t{p.latent} * p.rows}
        , value_basis{key_basis + index_t{p.dim} * p.key_columns()}
        , value_rows{value_basis + index_t{p.value_dim} * p.value_columns()}
        , lse{value_rows + index_t{p.value_latent} * score_padded(p.value_dim)}
        , fragments{lse + index_t{p.softmaxes} * p.rows}
        , per_head{fragments + (p.tensor ? index_t{p.dim} * p.rows / 2 : 0)}
    {}

    [[nodiscard]] __device__ score_head of(index_t head) const
    {
        float* const at = memory + head * per_head;
        return {at + queries, at + latents, at + key_basis, at + value_basis, at + value_rows, at + lse,
            reinterpret_cast<uint4*>(at + fragments)};
    }
};

/// What a block holds of a tile of tokens; coordinate by coordinate, so that neighbours in memory are tokens.
struct score_tile
{
    float* keys;    // [dim, tokens]     or values [value_dim, tokens]; only if plain_keys, for keys
    float* latents; // [latent, tokens]  or [value_latent, tokens]
    float* again;   // [again, tokens]   keys read again; or [turned, tokens] of values

    // [tokens, dim / 2 + 1]  keys as they are, for tensor cores, pair by pair; the odd step spares bank conflicts
    std::uint32_t* rows;
};

/// How many tokens a tile has, where it lies and where its arrays begin in it: all of it known to the host, so that a kernel
/// has it as constants.
struct score_tiling
{
    int token_shift = 0;    ///< log2 of the warps that share out the tokens; the others multiply other rows
    bool shared     = true; ///< in shared memory
    int latents = 0, again = 0, rows = 0; ///< bytes
    int bytes = 0;

    [[nodiscard]] MDKV_HD int token_warps() const noexcept { return 1 << token_shift; }
    [[nodiscard]] MDKV_HD int tokens() const noexcept { return score_warp_tokens << token_shift; }
    /// Tokens of one of the tiles that n tokens are cut into.
    [[nodiscard]] MDKV_HD int count(index_t n, int tile) const noexcept
    {
        index_t const left = n - index_t{tile} * tokens();
        return left < tokens() ? static_cast<int>(left) : tokens();
    }
    /// Threads that share a token, and which of them this one is.
    [[nodiscard]] MDKV_HD int shares() const noexcept { return score_threads / score_warp_tokens >> token_shift; }
    [[nodiscard]] __device__ int share() const { return device::warp() >> token_shift; }
    [[nodiscard]] __device__ int token() const { return device::thread() & (tokens() - 1); }

    [[nodiscard]] __device__ score_tile at(std::byte* memory) const
    {
        return {reinterpret_cast<float*>(memory), reinterpret_cast<float*>(memory + latents),
            reinterpret_cast<float*>(memory + again), reinterpret_cast<std::uint32_t*>(memory + rows)};
    }

    /// `beside`: bytes of shared memory that a block needs for other things, at most.
    [[nodiscard]] static score_tiling of(score_plan const& p, index_t beside)
    {
        // Wide tiles keep the block busy where tokens are projected, narrow ones where there are many rows.
        score_tiling t{};
        for (t.token_shift = p.rows / score_panel < score_warps ? 2 : 1;; --t.token_shift)
        {
            index_t const bytes = t.lay_out(p);
            t.shared            = bytes + beside <= score_most_shared;
            if (t.shared || t.token_shift == 0)
            {
                expects(
                    bytes <= INT32_MAX, "score: a tile of keys takes ", bytes, " bytes, more than a GPU can address");
                return t;
            }
        }
    }

private:
    [[nodiscard]] index_t lay_out(score_plan const& p) noexcept
    {
        device::shared_carver carver{nullptr};
        auto const place = [&](index_t of_token) {
            auto const at = static_cast<int>(carver.bytes());
            static_cast<void>(carver.take<float>(of_token * tokens())); // or pairs
            return at;
        };
        // Keys and values have the same memory in turn.
        auto const larger = [](int a, int b) { return a < b ? b : a; };
        static_cast<void>(place(larger(p.plain_keys ? p.dim : 0, p.value_dim)));
        latents = place(larger(p.latent, p.value_latent));
        again   = place(larger(p.again, p.turned));
        rows    = place(p.tensor ? p.dim / 2 + 1 : 0);
        bytes   = static_cast<int>(carver.bytes());
        return carver.bytes();
    }
};

} // namespace mdkv::gpu::detail
