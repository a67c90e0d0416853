/// \file score_block.hpp: both of score's sweeps over one block of tokens on the CPU, all rungs, in register tiles (arXiv 2603.20616, section 4.2).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/tile.hpp>
#include <mdkv/detail/score_plan.hpp>
#include <mdkv/detail/team.hpp>

#include <algorithm>
#include <cstring>
#include <limits>

// How it works. Query rows lie in vector lanes and tokens are broadcast: a row's softmax state then never crosses lanes,
// and keys are read as they are stored. Because bases nest, the logits of a wider projected rung continue the sums of the
// narrower one; codes of whole vectors need no product. Every softmax needs its normaliser before the first loss, so the
// keys are read twice: sweep one finds the log-sum-exps of the exact softmax (unless the caller has them) and of every
// projected one, sweep two adds up the losses. Nothing of size rows x tokens exists outside one tile, except for few
// tokens, whose exact logits sweep one leaves for sweep two. Logits are in units of log2; the scale is folded into the
// queries, and a query's weight into its log-sum-exps.

namespace MDKV_NAMESPACE::cpu::detail
{

using mdkv::detail::score_head;
using mdkv::detail::score_plan;
using mdkv::detail::score_states;

/// The working set of a thread: a block of tokens and what is computed from it.
struct score_scratch
{
    float* rows;    // [block, dim]               keys
    float* latents; // [block, key_columns]       their coordinates in the basis
    float* sums;    // [softmaxes, block, lanes]  totals over rows of P, then of |P' - P|

    score_scratch(mdkv::detail::carver& memory, score_plan const& plan) noexcept
        : rows{memory.take<float>(tile::block * plan.dim)}
        , latents{memory.take<float>(tile::block * plan.key_columns())}
        , sums{memory.take<float>(plan.softmaxes * tile::block * simd::lanes)}
    {}

    [[nodiscard]] float* sum(index_t softmax, index_t token) const noexcept
    {
        return sums + (softmax * tile::block + token) * simd::lanes;
    }
};

using score_tile = tile::accumulators<tile::vectors>; // [tokens][vectors of rows]

/// Adds logits of one panel to its rows' running largest logits and sums of 2^(logit - largest).
inline void add_to_state(float* largest_logits, float* sums, score_tile const& logits) noexcept
{
    for (int v = 0; v < tile::vectors; ++v)
    {
        float* const at_largest = largest_logits + v * simd::lanes;
        float* const at_sum     = sums + v * simd::lanes;
        simd::floats largest    = simd::load(at_largest);
        simd::floats highest    = logits[0][v];
        for (int i = 1; i < tile::rows; ++i) { highest = simd::larger(highest, logits[i][v]); }
        simd::floats total = simd::load(at_sum);
        if (simd::any(highest > largest)) // rare once the first blocks are past
        {
            simd::floats const raised = simd::larger(highest, largest);
            total *= simd::exp2(largest - raised);
            largest = raised;
            simd::store(at_largest, largest);
        }
        for (int i = 0; i < tile::rows; ++i) { total += simd::exp2(logits[i][v] - largest); }
        simd::store(at_sum, total);
    }
}

/// Adds |P' - P| of one tile to its tokens' totals [tile::rows, lanes], from logits and log-sum-exps of P'. If `is_exact`,
/// both belong to P itself: then P is added, and stored in `exact`.
template <row_norm Norm>
void add_differences(score_tile const& logits, float const* lse, bool is_exact, score_tile& exact, float* sums) noexcept
{
    for (int i = 0; i < tile::rows; ++i)
    {
        simd::floats total = simd::load(sums + i * simd::lanes);
        for (int v = 0; v < tile::vectors; ++v)
        {
            // A NaN log-sum-exp gives a NaN; one that is far too low gives infinity.
            simd::floats const power = logits[i][v] - simd::load(lse + v * simd::lanes);
            simd::floats const p     = simd::exp2(simd::smaller(simd::broadcast(128.0F), power));
            total = mdkv::detail::with_row<Norm>(total, is_exact ? p : simd::magnitude(p - exact[i][v]));
            if (is_exact) { exact[i][v] = p; }
        }
        simd::store(sums + i * simd::lanes, total);
    }
}

/// Multiplies a head's queries with its key basis.
inline void multiply_queries(score_plan const& plan, score_head const& h) noexcept
{
    index_t const columns = plan.key_columns();
    for (index_t p = 0; p * tile::width < plan.rows; ++p)
    {
        for (index_t c = 0; c < columns; c += tile::rows)
        {
            score_tile latents{};
            tile::multiply_add<tile::vectors>(
                h.key_basis + c, 1, columns, h.queries + p * plan.dim * tile::width, tile::width, plan.dim, latents);
            std::memcpy(h.latents + (p * columns + c) * tile::width, latents, sizeof latents);
        }
    }
}

/// A block of a head's tokens, multiplied with the head's queries tile by tile.
struct score_block
{
    score_scratch const& scratch;
    score_plan const& plan;
    score_head const& head;
    index_t first; ///< first token
    index_t count;

    /// Finds the basis coordinates of the keys in scratch.rows: once a block, for any number of queries.
    void project_keys() const noexcept
    {
        if (plan.latent == 0) { return; }
        tile::multiply_block(scratch.rows, plan.dim, head.key_basis, plan.key_columns(), scratch.latents);
    }

    /// Sweep one: adds the logits to the states of a head's split, to the exact softmax's only if `exact_needed`. If
    /// `exact_keys`, all rungs store the block's keys as they are (the window).
    void add_states(
        bool exact_needed, bool exact_keys, score_states const& states, index_t of, index_t split) const noexcept
    {
        int const begin = exact_needed ? 0 : 1;
        for_each_tile([&](index_t t, index_t p) {
            score_tile sums;
            score_tile shown;
            score_tile const* exact = exact_keys ? &multiply(0, t, p, sums, shown) : nullptr;
            for (int i = begin; i < plan.softmaxes; ++i)
            {
                score_tile const& logits = exact_keys ? *exact : multiply(i, t, p, sums, shown);
                if (i == 0 && !exact_keys && plan.more > 0) { std::memcpy(kept_logits(t, p), logits, sizeof logits); }
                add_to_state(
                    states.largest(of, split, i) + p * tile::width, states.sum(of, split, i) + p * tile::width, logits);
            }
        });
    }

    /// Sweep two: scratch.sums[0] = total of P over the rows, scratch.sums[i] = total of |P' - P| of softmax i, per token in
    /// `lanes` partial sums.
    void add_totals() const noexcept
    {
        std::fill_n(scratch.sums, scratch.sum(plan.softmaxes, 0) - scratch.sums, 0.0F);
#if !defined(__CUDA_ARCH__) // nvcc reads this for the device, too, which knows no vectors
        for_each_tile([&](index_t t, index_t p) {
            score_tile exact{};
            score_tile sums;
            score_tile shown;
            for (int i = 0; i < plan.softmaxes; ++i)
            {
                score_tile const* logits = &shown;
                if (i == 0 && plan.more > 0) { std::memcpy(shown, kept_logits(t, p), sizeof shown); }
                else { logits = &multiply(i, t, p, sums, shown); }
                mdkv::detail::with_norm(plan.norm, [&](auto norm) {
                    add_differences<norm>(
                        *logits, head.lse + i * plan.rows + p * tile::width, i == 0, exact, scratch.sum(i, t));
                });
            }
        });
#endif
    }

    /// Sweep two: joins the partial sums of the block's tokens.
    void write_totals(index_t of) const noexcept
    {
        auto const join = [&](simd::floats a, [[maybe_unused]] simd::floats b) {
#if !defined(__CUDA_ARCH__)
            a = mdkv::detail::joined_rows(plan.norm, a, b);
#endif
            return a;
        };
        for (int i = 0; i < plan.softmaxes; ++i)
        {
            float* const to = plan.total(of, i) + first;
            for (index_t t = 0; t < count; ++t) { to[t] = simd::over_lanes(simd::load(scratch.sum(i, t)), join); }
        }
    }

private:
    template <class Body>
    void for_each_tile(Body const& body) const noexcept
    {
        for (index_t p = 0; p * tile::width < plan.rows; ++p)
        {
            for (index_t t = 0; t < count && !plan.none_sees(first + t, p); t += tile::rows) { body(t, p); }
        }
    }

    /// Exact logits of a tile, left by sweep one for sweep two if plan.more makes room: [panels, tokens, width].
    [[nodiscard]] float* kept_logits(index_t t, index_t p) const noexcept
    {
        return head.more + (p * (plan.more / plan.rows) + first + t) * tile::width;
    }

    /// Logits of softmax i, of panel p with the block's tokens from t on. Because bases nest, those of a projected softmax
    /// continue the sums of the one before it: `sums` comes in with the logits of softmax i - 1. The result is `sums`, or
    /// `shown` if some logits are hidden.
    [[nodiscard]] score_tile const& multiply(
        int i, index_t t, index_t p, score_tile& sums, score_tile& shown) const noexcept
    {
        index_t const begin   = i == 0 ? 0 : plan.columns[i - 1];
        index_t const end     = i == 0 ? plan.dim : plan.columns[i];
        index_t const step    = i == 0 ? plan.dim : plan.key_columns();
        float const* queries  = (i == 0 ? head.queries : head.latents) + (p * step + begin) * tile::width;
        float const* const at = (i == 0 ? scratch.rows : scratch.latents) + t * step + begin;
        if (begin == 0) { std::memset(sums, 0, sizeof sums); }
        tile::multiply_add<tile::vectors>(at, step, 1, queries, tile::width, end - begin, sums);
        if (plan.all_see(first + t + tile::rows - 1) && count - t >= tile::rows) { return sums; }
        hide(t, p, sums, shown);
        return shown;
    }

    /// Copies logits, with -infinity for missing tokens and for tokens that a row may not see.
    void hide(index_t t, index_t panel, score_tile const& logits, score_tile& shown) const noexcept
    {
        for (int v = 0; v < tile::vectors; ++v)
        {
            simd::floats end{}; // counted from token t, so that it is small enough for float
            for (int lane = 0; lane < simd::lanes; ++lane)
            {
                int const row     = static_cast<int>(panel) * tile::width + v * simd::lanes + lane;
                index_t const see = plan.end_of(row) - first;
                end[lane]         = static_cast<float>(std::clamp<index_t>((std::min)(see, count) - t, 0, tile::rows));
            }
            for (int i = 0; i < tile::rows; ++i)
            {
                shown[i][v] = simd::broadcast(static_cast<float>(i)) < end
                                  ? logits[i][v]
                                  : simd::broadcast(-std::numeric_limits<float>::infinity());
            }
        }
    }
};

} // namespace MDKV_NAMESPACE::cpu::detail
