/// \file allocate_equal.hpp: the same number of tokens at every rung in every head, near the joint optimum
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/detail/allocate_problem.hpp>
#include <mdkv/detail/threshold.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace mdkv::cpu::dual
{

/// The token of one head that one upgrade would save most on; no token where there is none to upgrade.
struct head_upgrade
{
    float saved      = 0;
    index_t position = -1;
};

/// Scratch of `equalise`.
struct equal_room
{
    float* keys         = nullptr; ///< [slots, N]
    float* sorted       = nullptr; ///< [slots, N]
    head_upgrade* heads = nullptr; ///< [heads, rungs, rungs]
};

/// Tokens that take step j (and thus rung j or a costlier one) in every head: the mean of the joint solution, rounded
/// down, and no more than every head has tokens with losses that say something.
[[nodiscard]] inline std::array<index_t, max_rungs> equal_steps(problem const& p)
{
    std::array<index_t, max_rungs> steps{};
    index_t most = p.tokens_per_head();
    for (index_t h = 0; h < p.heads; ++h)
    {
        index_t finite = p.tokens_per_head();
        for (index_t n = 0; n < p.chunks_per_head(); ++n)
        {
            chunk_state const& state = p.chunks[h * p.chunks_per_head() + n];
            finite -= state.non_finite;
            for (std::size_t r = 1; r < p.common_rungs().count; ++r)
            {
                for (std::size_t j = 1; j <= r; ++j) { steps[j] += state.tokens[r]; }
            }
        }
        most = std::min(most, finite);
    }
    for (std::size_t j = 1; j < p.common_rungs().count; ++j)
    {
        steps[j] = std::min(steps[j] / std::max<index_t>(p.heads, 1), most);
    }
    return steps;
}

/// Gives steps[j] tokens of a head step j: those of the largest thresholds among the ones that have step j - 1, the
/// lower position first.
inline void choose_in_head(
    problem const& p, index_t head, std::array<index_t, max_rungs> const& steps, float* keys, float* sorted)
{
    auto const for_tokens = [&](auto const& body) {
        for (index_t n = 0; n < p.chunks_per_head(); ++n)
        {
            chunk const tokens{p, head * p.chunks_per_head() + n};
            for (index_t i = 0; i < tokens.count; ++i) { body(tokens, i); }
        }
    };
    for_tokens([&](chunk const& tokens, index_t i) { tokens.rung[i] = tokens.rungs->index[0]; });
    for (std::size_t j = 1; j < p.common_rungs().count && steps[j] > 0; ++j)
    {
        index_t runners = 0;
        for_tokens([&](chunk const& tokens, index_t i) {
            float losses[max_rungs];
            float& key = keys[tokens.first + i];
            key        = -1.0F;
            if (tokens.open->place[tokens.rung[i]] + 1U != j || !tokens.read(i, losses)) { return; }
            token_thresholds<mdkv::detail::scalar_operations> thresholds;
            thresholds.first(*tokens.rungs, losses);
            thresholds.others(*tokens.rungs, losses);
            key               = thresholds.theta[j];
            sorted[runners++] = key;
        });
        std::nth_element(sorted, sorted + (steps[j] - 1), sorted + runners, std::greater<>{});
        float const last = sorted[steps[j] - 1];
        index_t equals   = steps[j] - std::count_if(sorted, sorted + steps[j], [&](float k) { return k > last; });
        for_tokens([&](chunk const& tokens, index_t i) {
            float const key = keys[tokens.first + i];
            if (key < last || (key == last && equals-- <= 0)) { return; }
            tokens.rung[i] = tokens.rungs->index[j];
        });
    }
}

/// For every pair of rungs, the token of a head that saves most by that upgrade; ties to the lower position.
inline void best_in_head(problem const& p, index_t head, head_upgrade* best)
{
    std::size_t const rungs = p.common_rungs().count;
    std::fill_n(best, rungs * rungs, head_upgrade{});
    for (index_t n = 0; n < p.chunks_per_head(); ++n)
    {
        chunk const tokens{p, head * p.chunks_per_head() + n};
        for (index_t i = 0; i < tokens.count; ++i)
        {
            float losses[max_rungs];
            if (!tokens.read(i, losses)) { continue; }
            std::size_t const a = tokens.open->place[tokens.rung[i]];
            for (std::size_t c = a + 1; c < rungs; ++c)
            {
                float const saved = losses[a] - losses[c];
                head_upgrade& b   = best[a * rungs + c];
                if (b.position < 0 || saved > b.saved) { b = {saved, tokens.first + i}; }
            }
        }
    }
}

/// One more token in every head takes an upgrade: the one that saves most per byte over all heads together.
/// \return bytes spent; 0 when no upgrade fits, is possible in every head, and saves anything
inline index_t upgrade_every_head(backend const& on, problem const& p, index_t leftover, head_upgrade* room)
{
    std::size_t const rungs = p.common_rungs().count;
    auto const per_head     = static_cast<index_t>(rungs * rungs);
    on.for_each(p.heads, [&](index_t h, index_t) { best_in_head(p, h, room + h * per_head); });
    double best        = 0;
    index_t best_bytes = 0;
    index_t best_pair  = 0;
    for (std::size_t a = 0; a < rungs; ++a)
    {
        for (std::size_t c = a + 1; c < rungs; ++c)
        {
            auto const pair     = static_cast<index_t>(a * rungs + c);
            index_t const bytes = p.heads * (p.common_rungs().cost[c] - p.common_rungs().cost[a]);
            bool possible       = bytes <= leftover;
            double saved        = 0;
            for (index_t h = 0; h < p.heads && possible; ++h)
            {
                possible = room[h * per_head + pair].position >= 0;
                saved += double{room[h * per_head + pair].saved};
            }
            if (possible && saved / static_cast<double>(bytes) > best)
            {
                best       = saved / static_cast<double>(bytes);
                best_bytes = bytes;
                best_pair  = pair;
            }
        }
    }
    if (best_bytes == 0) { return 0; }
    for (index_t h = 0; h < p.heads; ++h)
    {
        index_t const position = room[h * per_head + best_pair].position;
        chunk const tokens{p, h * p.chunks_per_head() + position / chunk_tokens};
        tokens.rung[position % chunk_tokens] = tokens.rungs->index[static_cast<std::size_t>(best_pair) % rungs];
    }
    return best_bytes;
}

/// Spends what is left while every head can follow.
inline void upgrade_equally(backend const& on, problem const& p, index_t leftover, equal_room const& room)
{
    for (index_t spent = 1; spent > 0; leftover -= spent) { spent = upgrade_every_head(on, p, leftover, room.heads); }
}

/// Counts the chunks' rungs anew.
inline void recount(backend const& on, problem const& p)
{
    on.for_each(p.chunk_count(), [&](index_t c, index_t) {
        chunk const tokens{p, c};
        tokens.state->tokens.fill(0);
        for (index_t i = 0; i < tokens.count; ++i) { ++tokens.state->tokens[tokens.open->place[tokens.rung[i]]]; }
        tokens.state->upgraded = true;
    });
}

/// Turns the joint solution into one with the same number of tokens at every rung in every head, no dearer than it, and
/// spends what that leaves. The counts and losses of the chunks are those of the result.
inline void equalise(backend const& on, problem const& p, index_t spare, bool spend_leftover, equal_room const& room)
{
    std::array<index_t, max_rungs> const steps = equal_steps(p);
    index_t const n                            = p.tokens_per_head();
    on.for_each(p.heads,
        [&](index_t h, index_t slot) { choose_in_head(p, h, steps, room.keys + slot * n, room.sorted + slot * n); });
    index_t leftover = spare;
    for (std::size_t j = 1; j < p.common_rungs().count; ++j)
    {
        leftover -= p.heads * steps[j] * p.common_rungs().step(j);
    }
    if (spend_leftover) { upgrade_equally(on, p, leftover, room); }
    recount(on, p);
}

} // namespace mdkv::cpu::dual
