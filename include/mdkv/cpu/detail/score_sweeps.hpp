/// \file score_sweeps.hpp: what score does to one block of tokens: both sweeps, all rungs, in register tiles (arXiv 2603.20616, section 4.2).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/block.hpp>
#include <mdkv/cpu/detail/read_again.hpp>
#include <mdkv/cpu/detail/score_memory.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/tile.hpp>

#include <algorithm>
#include <limits>

// How it works. Query rows lie in vector lanes, tokens are broadcast: a row's softmax state then never crosses lanes, and
// keys are read as they come. Because bases nest, the logits of a wider plain rung continue the sum of the narrower one;
// quantised rungs read their keys again from codes and multiply all they hold. Every softmax needs its normaliser before
// the first loss, so the keys are read twice: sweep one finds the log-sum-exps of the exact softmax (unless the caller has
// them) and of every rung that needs P', sweep two adds up the losses. Nothing of size rows x tokens exists outside a
// register tile. Logits are kept in units of log2, with the scale folded into the queries, and a query's weight into its
// log-sum-exps.

namespace mdkv::cpu
{

namespace detail
{

/// Last token each query row may see, and what follows from it. Rows that only pad the last panel see everything; their
/// log-sum-exp is set so high that they weigh nothing.
class visibility
{
public:
    visibility(index_t first_query, index_t per_head) noexcept
        : first_query_{first_query}
        , per_head_{per_head}
    {}

    /// Every row sees tokens below this.
    [[nodiscard]] bool all_see(index_t last_token) const noexcept { return last_token <= first_query_; }
    [[nodiscard]] bool none_sees(index_t first_token) const noexcept
    {
        return first_token > first_query_ + per_head_ - 1;
    }

    /// Puts -infinity where a row may not see tokens token, token + 1, ... of the tile, and past its `count` tokens.
    [[gnu::always_inline]] void apply(
        index_t token, index_t count, index_t panel, tile::accumulators<tile::vectors>& logits) const noexcept
    {
        if (all_see(token + tile::rows - 1) && count >= tile::rows) [[likely]] { return; }
        tile::accumulators<tile::vectors> memory; // a copy, so that the logits themselves may stay in registers
        tile::copy<tile::vectors>(logits, memory);
        hide(token, panel, memory);
        hide_from(count, memory);
        tile::copy<tile::vectors>(memory, logits);
    }

private:
    [[gnu::noinline]] void hide(index_t token, index_t panel, tile::accumulators<tile::vectors>& logits) const noexcept
    {
        for (int v = 0; v < tile::vectors; ++v)
        {
            simd::floats last; // relative to `token`, so that it is small enough for float and int
            for (int lane = 0; lane < simd::lanes; ++lane)
            {
                index_t const row = panel * tile::width + v * simd::lanes + lane;
                index_t const see = first_query_ + row % per_head_ - token;
                last[lane]        = static_cast<float>(std::clamp<index_t>(see, -1, tile::rows));
            }
            for (int i = 0; i < tile::rows; ++i)
            {
                logits[i][v] = last < simd::broadcast(static_cast<float>(i))
                                   ? simd::broadcast(-std::numeric_limits<float>::infinity())
                                   : logits[i][v];
            }
        }
    }

    [[gnu::noinline]] static void hide_from(index_t count, tile::accumulators<tile::vectors>& logits) noexcept
    {
        for (int i = static_cast<int>(std::max<index_t>(count, 0)); i < tile::rows; ++i)
        {
            for (auto& vector : logits[i]) { vector = simd::broadcast(-std::numeric_limits<float>::infinity()); }
        }
    }

    index_t first_query_;
    index_t per_head_; // Q
};

/// Running maximum and sum of one softmax for the rows of one panel; the sum is of 2^(logit - maximum).
struct lse_state
{
    float* maximum; // [rows]
    float* sum;     // [rows]

    [[gnu::always_inline]] void add(index_t panel, tile::accumulators<tile::vectors> const& logits) const noexcept
    {
        tile::unroll<tile::vectors>([&](auto v) {
            float* const at_maximum = maximum + panel * tile::width + v * simd::lanes;
            float* const at_sum     = sum + panel * tile::width + v * simd::lanes;
            simd::floats m          = simd::load(at_maximum);
            simd::floats highest    = logits[0][v];
            tile::unroll<tile::rows - 1>([&](auto i) { highest = simd::max(highest, logits[i + 1][v]); });
            simd::floats total = simd::load(at_sum);
            if (simd::any(highest > m)) // rare once the first blocks are past
            {
                simd::floats const raised = simd::max(highest, m);
                total *= simd::exp2(m - raised);
                m = raised;
                simd::store(at_maximum, m);
            }
            tile::unroll<tile::rows>([&](auto i) { total += simd::exp2(logits[i][v] - m); });
            simd::store(at_sum, total);
        });
    }
};

/// Starting maximum: lower than any logit, and finite so that differences are numbers.
inline constexpr float lowest_logit = -1e30F;

/// Of the keys in slot.rows, what is multiplied with the queries besides: their coordinates in the basis, and keys as
/// quantised rungs would read them again. Once a block, however many queries there are.
inline void prepare_block_keys(
    score_slot const& slot, index_t count, score_rungs const& rungs, score_sizes const& s, score_head const& h) noexcept
{
    if (s.latent > 0) { multiply_block(slot.rows, s.dim, h.key_basis, s.latent, slot.latents); }
    index_t const rows = tile::round_up(count, tile::rows);
    bool turned_yet    = false;
    for (index_t j = rungs.plain; j < rungs.count; ++j)
    {
        score_rung const& u = rungs[j];
        if (u.softmax == 0) { continue; }
        float* const again = slot.keys_again(u, s);
        if (!u.turned())
        {
            read_again(slot.latents, rows, s.row_width(u), u.keys, u.kind, again);
            continue;
        }
        if (!turned_yet) { turn_rows(slot.rows, rows, s.dim, s.dim, slot.turned); }
        turned_yet = true;
        read_again(slot.turned, rows, s.dim, s.dim, u.kind, again);
        turn_rows(again, rows, s.dim, s.dim, again);
    }
}

/// The tokens from t of the block times one panel of queries, as plain rung j sees them: goes on from the sums `acc` of the
/// first `done` coordinates.
[[gnu::always_inline]] inline void extend_logits(score_slot const& slot, index_t t, float const* latents, index_t end,
    score_sizes const& s, index_t& done, tile::accumulators<tile::vectors>& acc) noexcept
{
    tile::multiply_add(
        slot.latents + t * s.latent + done, s.latent, 1, latents + done * tile::width, tile::width, end - done, acc);
    done = end;
}

/// The same as a quantised rung sees them, hidden ones at -infinity.
[[gnu::always_inline]] inline void quantised_logits(score_slot const& slot, index_t first, index_t t, index_t count,
    index_t p, score_rung const& u, score_sizes const& s, score_head const& h, visibility const& see,
    tile::accumulators<tile::vectors>& acc) noexcept
{
    index_t const width        = s.row_width(u);
    float const* const queries = (u.projected ? h.latents : h.queries) + p * width * tile::width;
    tile::clear(acc);
    tile::multiply_add(slot.keys_again(u, s) + t * width, width, 1, queries, tile::width, u.keys, acc);
    see.apply(first + t, count, p, acc);
}

/// Sweep one over the tokens of one block: adds to the softmaxes' states. `state` is [softmaxes] pairs of [rows].
/// With whole = true the block's keys are stored as they are at every rung (the window).
inline void add_block_lse(score_slot const& slot, index_t first, index_t count, bool exact_needed, bool whole,
    score_rungs const& rungs, score_sizes const& s, score_head const& h, visibility const& see, float* state) noexcept
{
    for (index_t p = 0; p < s.panels; ++p)
    {
        float const* const queries = h.queries + p * s.dim * tile::width;
        float const* const latents = h.latents + p * s.latent * tile::width;
        for (index_t t = 0; t < count; t += tile::rows)
        {
            auto const softmax = [&](index_t i) {
                return lse_state{state + 2 * i * s.rows, state + (2 * i + 1) * s.rows};
            };
            tile::accumulators<tile::vectors> acc;
            if (exact_needed || whole)
            {
                tile::clear(acc);
                tile::multiply_add(slot.rows + t * s.dim, s.dim, 1, queries, tile::width, s.dim, acc);
                see.apply(first + t, count - t, p, acc);
                if (exact_needed) { softmax(0).add(p, acc); }
            }
            if (whole)
            {
                for (index_t i = 1; i < s.softmaxes; ++i) { softmax(i).add(p, acc); }
                continue;
            }
            tile::clear(acc);
            index_t done = 0;
            for (index_t j = 0; j < rungs.plain; ++j)
            {
                extend_logits(slot, t, latents, rungs[j].keys, s, done, acc);
                tile::accumulators<tile::vectors> shown; // the wider rung goes on from the unhidden sums
                tile::copy<tile::vectors>(acc, shown);
                see.apply(first + t, count - t, p, shown);
                softmax(1 + j).add(p, shown);
            }
            for (index_t j = rungs.plain; j < rungs.count; ++j)
            {
                if (rungs[j].softmax == 0) { continue; }
                quantised_logits(slot, first, t, count - t, p, rungs[j], s, h, see, acc);
                softmax(rungs[j].softmax).add(p, acc);
            }
        }
    }
}

/// Adds |P' - P| of one tile to its tokens' sums [tile::rows, lanes], from logits and log-sum-exps of P'.
[[gnu::always_inline]] inline void add_differences(tile::accumulators<tile::vectors> const& logits, float const* lse,
    tile::accumulators<tile::vectors> const& exact, float* sums) noexcept
{
    tile::unroll<tile::rows>([&](auto i) {
        simd::floats total = simd::load(sums + i * simd::lanes);
        tile::unroll<tile::vectors>([&](auto v) {
            total += simd::abs(simd::exp2(logits[i][v] - simd::load(lse + v * simd::lanes)) - exact[i][v]);
        });
        simd::store(sums + i * simd::lanes, total);
    });
}

/// Sweep two over the tokens of one block: slot.sums[0] = sum over rows of P, slot.sums[i] = sum of |P' - P| of
/// softmax i, per token in `lanes` parts.
inline void add_block_differences(score_slot const& slot, index_t first, index_t count, score_rungs const& rungs,
    score_sizes const& s, score_head const& h, visibility const& see) noexcept
{
    auto const at = [&](index_t softmax, index_t token) {
        return slot.sums + (softmax * score_sizes::block + token) * simd::lanes;
    };
    std::fill_n(slot.sums, s.sums(), 0.0F);
    for (index_t p = 0; p < s.panels; ++p)
    {
        float const* const queries = h.queries + p * s.dim * tile::width;
        float const* const latents = h.latents + p * s.latent * tile::width;
        float const* const lse     = h.lse + p * tile::width;
        for (index_t t = 0; t < count; t += tile::rows)
        {
            tile::accumulators<tile::vectors> exact; // logits, then probabilities
            tile::clear(exact);
            tile::multiply_add(slot.rows + t * s.dim, s.dim, 1, queries, tile::width, s.dim, exact);
            see.apply(first + t, tile::rows, p, exact);
            tile::unroll<tile::rows>([&](auto i) {
                simd::floats total = simd::load(at(0, t + i));
                tile::unroll<tile::vectors>([&](auto v) {
                    exact[i][v] = simd::exp2(exact[i][v] - simd::load(lse + v * simd::lanes));
                    total += exact[i][v];
                });
                simd::store(at(0, t + i), total);
            });
            tile::accumulators<tile::vectors> acc;
            tile::clear(acc);
            index_t done = 0;
            for (index_t j = 0; j < rungs.plain; ++j)
            {
                extend_logits(slot, t, latents, rungs[j].keys, s, done, acc);
                tile::accumulators<tile::vectors> shown;
                tile::copy<tile::vectors>(acc, shown);
                see.apply(first + t, tile::rows, p, shown);
                add_differences(shown, lse + (1 + j) * s.rows, exact, at(1 + j, t));
            }
            for (index_t j = rungs.plain; j < rungs.count; ++j)
            {
                index_t const softmax = rungs[j].softmax;
                if (softmax == 0) { continue; }
                quantised_logits(slot, first, t, tile::rows, p, rungs[j], s, h, see, acc);
                add_differences(acc, lse + softmax * s.rows, exact, at(softmax, t));
            }
        }
    }
}

} // namespace detail

} // namespace mdkv::cpu
