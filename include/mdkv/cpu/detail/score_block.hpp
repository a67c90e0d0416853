/// \file score_block.hpp: both of score's sweeps over one block of tokens on the CPU, all rungs, in register tiles (arXiv 2603.20616, section 4.2).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/block.hpp>
#include <mdkv/cpu/detail/read_again.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/tile.hpp>
#include <mdkv/cpu/width.hpp>
#include <mdkv/detail/score_plan.hpp>
#include <mdkv/detail/team.hpp>

#include <algorithm>
#include <cstring>
#include <limits>

// How it works. Query rows lie in vector lanes, tokens are broadcast: a row's softmax state then never crosses lanes, and
// keys are read as they come. Because bases nest, the logits of a wider plain rung continue the sum of the narrower one;
// quantised rungs read their keys again from codes and multiply all they hold. Every softmax needs its normaliser before
// the first loss, so the keys are read twice: sweep one finds the log-sum-exps of the exact softmax (unless the caller has
// them) and of every rung that needs P', sweep two adds up the losses. Nothing of size rows x tokens exists outside one
// tile. Logits are kept in units of log2, with the scale folded into the queries, and a query's weight into its
// log-sum-exps.

namespace mdkv::cpu::inline MDKV_CPU_WIDTH::detail
{

using mdkv::detail::causal_mask;
using mdkv::detail::score_head;
using mdkv::detail::score_plan;
using mdkv::detail::score_rung;
using mdkv::detail::score_state;

/// The working set of a thread: a block of tokens and all that is made of it.
struct score_slot
{
    static constexpr index_t block = block_rows;

    float* rows;    // [block, dim or value_dim]
    float* rotated; // [block, dim or value_dim]              the same, rotated
    float* latents; // [block, key_columns or value_columns]  coordinates in the basis
    float* again;   // [block, u.keys] of every quantised rung u with a softmax: keys read again; or values of one rung
    float* sums;    // [softmaxes, block, lanes]              sum P, then sum |P' - P|
    float* roundings; // [quantised rungs, block]  squared distance of a value's coordinates from those read again

    score_slot(mdkv::detail::carver& memory, score_plan const& plan) noexcept
    {
        index_t const width = std::max(plan.dim, plan.value_dim);
        rows                = memory.take<float>(block * width);
        rotated             = memory.take<float>(plan.rotated > 0 ? block * width : 0);
        latents             = memory.take<float>(block * std::max(plan.key_columns(), plan.value_columns()));
        again     = memory.take<float>(block * std::max(plan.again, plan.plain < plan.count ? plan.value_dim : 0));
        sums      = memory.take<float>(sum_floats(plan));
        roundings = memory.take<float>((plan.count - plan.plain) * block);
    }

    [[nodiscard]] static index_t bytes(score_plan const& plan) noexcept
    {
        mdkv::detail::carver counting;
        static_cast<void>(score_slot{counting, plan});
        return counting.bytes();
    }
    [[nodiscard]] static index_t sum_floats(score_plan const& plan) noexcept
    {
        return plan.softmaxes * block * simd::lanes;
    }
    [[nodiscard]] float* sum(index_t softmax, index_t token) const noexcept
    {
        return sums + (softmax * block + token) * simd::lanes;
    }
};

using score_tile = tile::accumulators<tile::vectors>; // [tokens][vectors of rows]

/// Adds logits of one panel to the running largest logit and sum of 2^(logit - largest) of its rows.
inline void add_to_state(score_state const& state, index_t panel, score_tile const& logits) noexcept
{
    for (int v = 0; v < tile::vectors; ++v)
    {
        float* const at_largest = state.largest + panel * tile::width + v * simd::lanes;
        float* const at_sum     = state.sum + panel * tile::width + v * simd::lanes;
        simd::floats largest    = simd::load(at_largest);
        simd::floats highest    = logits[0][v];
        for (int i = 1; i < tile::rows; ++i) { highest = simd::max(highest, logits[i][v]); }
        simd::floats total = simd::load(at_sum);
        if (simd::any(highest > largest)) // rare once the first blocks are past
        {
            simd::floats const raised = simd::max(highest, largest);
            total *= simd::exp2(largest - raised);
            largest = raised;
            simd::store(at_largest, largest);
        }
        for (int i = 0; i < tile::rows; ++i) { total += simd::exp2(logits[i][v] - largest); }
        simd::store(at_sum, total);
    }
}

/// Makes logits probabilities, and adds these to their tokens' sums [tile::rows, lanes].
inline void add_probabilities(score_tile& exact, float const* lse, float* sums) noexcept
{
    for (int i = 0; i < tile::rows; ++i)
    {
        simd::floats total = simd::load(sums + i * simd::lanes);
        for (int v = 0; v < tile::vectors; ++v)
        {
            // A log-sum-exp that is a NaN gives a NaN, one that is far too low infinity.
            simd::floats const power = exact[i][v] - simd::load(lse + v * simd::lanes);
            exact[i][v]              = simd::exp2<true>(simd::min(simd::broadcast(128.0F), power));
            total += exact[i][v];
        }
        simd::store(sums + i * simd::lanes, total);
    }
}

/// Adds |P' - P| of one tile to its tokens' sums, from logits and log-sum-exps of P'.
inline void add_differences(score_tile const& logits, float const* lse, score_tile const& exact, float* sums) noexcept
{
    for (int i = 0; i < tile::rows; ++i)
    {
        simd::floats total = simd::load(sums + i * simd::lanes);
        for (int v = 0; v < tile::vectors; ++v)
        {
            total += simd::abs(simd::exp2(logits[i][v] - simd::load(lse + v * simd::lanes)) - exact[i][v]);
        }
        simd::store(sums + i * simd::lanes, total);
    }
}

/// A head's queries in its key basis.
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

/// A block of tokens times the queries, tile by tile.
struct score_block
{
    score_slot const& slot;
    score_plan const& plan;
    score_head const& head;
    causal_mask const& mask;
    index_t first; ///< token
    index_t count;

    /// Coordinates in the basis of the keys in slot.rows, and the keys as quantised rungs would read them again. Once a
    /// block, for any number of queries.
    void prepare_keys() const noexcept
    {
        if (plan.latent > 0) { multiply_block(slot.rows, plan.dim, head.key_basis, plan.key_columns(), slot.latents); }
        index_t const rows = tile::round_up(count, tile::rows);
        bool rotated_yet   = false;
        for (int j = plan.plain; j < plan.count; ++j)
        {
            score_rung const& u = plan.rungs[j];
            if (u.softmax == 0) { continue; }
            if (u.rotated() && !rotated_yet) { hadamard_rows(slot.rows, rows, plan.dim, slot.rotated); }
            rotated_yet        = rotated_yet || u.rotated();
            float* const again = slot.again + u.again * score_slot::block;
            read_again(u.rotated() ? slot.rotated : slot.latents, rows, u.rotated() ? plan.dim : plan.key_columns(),
                u.keys, u.kind, again);
            if (u.rotated()) { hadamard_rows(again, rows, plan.dim, again); }
        }
    }

    /// Sweep one: adds to the states of the softmaxes, the first of which is at `states`. With `whole` the block's keys are
    /// stored as they are at every rung (the window).
    void add_states(bool exact_needed, bool whole, score_state const& states) const noexcept
    {
        int const begin = exact_needed || whole ? exact : 0;
        int const end   = whole ? 0 : plan.count;
        for_each_tile([&](index_t t, index_t p) {
            score_tile sums;
            score_tile shown;
            for (int j = begin; j < end; ++j)
            {
                if (j != exact && plan.rungs[j].softmax == 0) { continue; }
                score_tile const& logits = multiply(j, t, p, sums, shown);
                int const own            = j == exact ? 0 : plan.rungs[j].softmax;
                for (int i = whole && !exact_needed ? 1 : own; i < (whole ? plan.softmaxes : own + 1); ++i)
                {
                    index_t const at = index_t{2} * i * plan.rows;
                    add_to_state({states.largest + at, states.sum + at}, p, logits);
                }
            }
        });
    }

    /// Sweep two: slot.sums[0] = sum over rows of P, slot.sums[i] = sum of |P' - P| of softmax i, per token in `lanes`
    /// parts.
    void add_losses() const noexcept
    {
        std::fill_n(slot.sums, score_slot::sum_floats(plan), 0.0F);
        for_each_tile([&](index_t t, index_t p) {
            float const* const lse = head.lse + p * tile::width;
            score_tile probabilities;
            score_tile sums;
            score_tile shown;
            std::memcpy(probabilities, multiply(exact, t, p, sums, shown), sizeof probabilities);
            add_probabilities(probabilities, lse, slot.sum(0, t));
            for (int j = 0; j < plan.count; ++j)
            {
                index_t const i = plan.rungs[j].softmax;
                if (i == 0) { continue; }
                add_differences(multiply(j, t, p, sums, shown), lse + i * plan.rows, probabilities, slot.sum(i, t));
            }
        });
    }

private:
    static constexpr int exact = -1; ///< as the number of a rung

    template <class Body>
    void for_each_tile(Body const& body) const noexcept
    {
        for (index_t p = 0; p * tile::width < plan.rows; ++p)
        {
            for (index_t t = 0; t < count; t += tile::rows) { body(t, p); }
        }
    }

    /// Logits of the tokens from t of the block with panel p as rung j sees the keys. They are in `sums`, which hold
    /// those of rung j - 1 before, or in `shown` where some are hidden.
    [[nodiscard]] score_tile const& multiply(
        int j, index_t t, index_t p, score_tile& sums, score_tile& shown) const noexcept
    {
        float const* const queries = head.queries + p * plan.dim * tile::width;
        float const* const latents = head.latents + p * plan.key_columns() * tile::width;
        if (j <= 0 || j >= plan.plain) { std::memset(sums, 0, sizeof sums); }
        if (j == exact) { multiply(slot.rows + t * plan.dim, plan.dim, queries, plan.dim, sums); }
        else if (score_rung const& u = plan.rungs[j]; u.quantised())
        {
            multiply(slot.again + u.again * score_slot::block + t * u.keys, u.keys, u.projected ? latents : queries,
                u.keys, sums);
        }
        else
        {
            index_t const done = j > 0 ? plan.rungs[j - 1].keys : 0;
            multiply(slot.latents + t * plan.key_columns() + done, plan.key_columns(), latents + done * tile::width,
                u.keys - done, sums);
        }
        if (mask.all_see(first + t + tile::rows - 1) && count - t >= tile::rows) { return sums; }
        hide(t, p, sums, shown);
        return shown;
    }

    static void multiply(
        float const* keys, index_t step, float const* queries, index_t depth, score_tile& sums) noexcept
    {
        tile::multiply_add<tile::vectors>(keys, step, 1, queries, tile::width, depth, sums);
    }

    /// Copies logits, with -infinity where there is no token or a row may not see it.
    void hide(index_t t, index_t panel, score_tile const& logits, score_tile& shown) const noexcept
    {
        for (int v = 0; v < tile::vectors; ++v)
        {
            simd::floats end; // counted from token t, so that it is small enough for float
            for (int lane = 0; lane < simd::lanes; ++lane)
            {
                index_t const row = panel * tile::width + v * simd::lanes + lane;
                index_t const see = mask.first_query + row % mask.per_head + 1 - first;
                end[lane]         = static_cast<float>(std::clamp<index_t>(std::min(see, count) - t, 0, tile::rows));
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

} // namespace mdkv::cpu::inline MDKV_CPU_WIDTH::detail
