/// \file allocate_tokens.hpp: the one pass that gives every token a rung, given a range of multipliers (arXiv 2603.20616, section 4.3)
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/detail/allocate_problem.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/detail/threshold.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace mdkv::cpu::dual
{

/// The multiplier (in units of the table) is known to be above `low`, or equal to it where it is 0, and at most `high`.
struct bracket
{
    float low  = 0.0F;
    float high = std::numeric_limits<float>::infinity();
};

/// The one pass over all losses. Tokens without a threshold inside the bracket get their rung, are counted and have
/// their loss summed; the positions and losses of the others are kept for later.
template <std::size_t Count>
void decide(chunk const& tokens, bracket range) noexcept
{
    constexpr std::size_t capacity = Count == run_time ? max_rungs : Count;
    rung_table const& rungs        = *tokens.rungs;
    simd::floats const low         = simd::broadcast(range.low);
    simd::floats const high        = simd::broadcast(range.high);
    simd::ints const cheapest      = simd::broadcast(std::int32_t{rungs.index[0]});
    simd::ints taken_steps[capacity]{};
    chunk_state state;
    double_sum sum;
    index_t undecided = 0;
    for (index_t at = 0; at < tokens.count; at += simd::lanes)
    {
        index_t const left = tokens.count - at;
        token_vector<Count> v;
        state.non_finite += load_tokens(v, tokens, at);
        simd::ints rung     = cheapest;
        simd::floats chosen = v.loss[0];
        if constexpr (Count != 1)
        {
            token_thresholds<vector_operations, Count> steps;
            steps.first(rungs, v.loss);
            if (simd::any(steps.theta[1] > low))
            {
                steps.others(rungs, v.loss);
                simd::ints open = simd::broadcast(std::int32_t{0});
                for_steps<Count>(
                    rungs.count, [&](auto j) __attribute__((always_inline)) {
                        open |= (steps.theta[j] > low) & (steps.theta[j] <= high);
                    });
                for_steps<Count>(
                    rungs.count, [&](auto j) __attribute__((always_inline)) {
                        simd::ints const taken = (steps.theta[j] > high) & ~open;
                        taken_steps[j] -= taken;
                        chosen = simd::select(taken, v.loss[j], chosen);
                        rung   = simd::select(taken, simd::broadcast(std::int32_t{rungs.index[j]}), rung);
                    });
                std::uint32_t lanes = simd::bits(open);
                if (lanes != 0) { chosen = simd::select(open, simd::broadcast(0.0F), chosen); }
                for (; lanes != 0; lanes &= lanes - 1)
                {
                    index_t const position      = at + std::countr_zero(lanes);
                    tokens.undecided[undecided] = static_cast<std::uint16_t>(position);
                    if (undecided < copied_tokens)
                    {
                        for_rungs<Count>(
                            rungs.count, [&](auto r) __attribute__((always_inline)) {
                                tokens.copies[static_cast<index_t>(r) * copied_tokens + undecided] =
                                    tokens.loss[r][position];
                            });
                    }
                    ++undecided;
                }
            }
        }
        sum.add(chosen);
        store_rungs(tokens.rung + at, rung, left);
    }
    state.loss      = sum.total();
    state.undecided = static_cast<std::int32_t>(undecided);
    // A step is taken by the tokens of its rung and of all costlier ones.
    auto costlier = static_cast<std::int32_t>(tokens.count - undecided);
    for (std::size_t j = 0; j < rungs.count; ++j)
    {
        std::int32_t next = 0;
        if (j + 1 < rungs.count)
        {
            for (int i = 0; i < simd::lanes; ++i) { next += taken_steps[j + 1][i]; }
        }
        state.tokens[j] = costlier - next;
        costlier        = next;
    }
    *tokens.state = state;
}

/// Calls body(positions, how many, vector) for all undecided tokens of a chunk, in order, up to a vector at a time.
template <std::size_t Count, class Body>
void for_undecided(chunk const& tokens, Body const& body)
{
    std::size_t const rungs = tokens.rungs->count;
    index_t const total     = tokens.state->undecided;
    std::array<float const*, max_rungs> copies{};
    for (std::size_t r = 0; r < rungs; ++r) { copies[r] = tokens.copies + static_cast<index_t>(r) * copied_tokens; }
    for (index_t at = 0; at < total; at += simd::lanes)
    {
        std::uint16_t const* const positions = tokens.undecided + at;
        index_t const count                  = std::min<index_t>(total - at, simd::lanes);
        token_vector<Count> v;
        if (at + count <= copied_tokens) { v.load(copies, rungs, at, count); }
        else
        {
            for_rungs<Count>(rungs, [&](auto r) {
                float gathered[simd::lanes]{};
                for (index_t i = 0; i < count; ++i) { gathered[i] = tokens.loss[r][positions[i]]; }
                v.loss[r] = simd::load(gathered);
            });
        }
        body(positions, count, v);
    }
}

/// Gives the undecided tokens the rung they have at the multiplier, and notes whether a threshold equals it.
template <std::size_t Count>
void settle(chunk const& tokens, float multiplier)
{
    rung_table const& rungs = *tokens.rungs;
    simd::floats const m    = simd::broadcast(multiplier);
    simd::floats const near = simd::broadcast(mdkv::detail::plateau_begin(multiplier));
    chunk_state& state      = *tokens.state;
    state.plateau           = false;
    for_undecided<Count>(tokens, [&](std::uint16_t const* positions, index_t count, auto const& v) {
        token_thresholds<vector_operations, Count> steps;
        steps.first(rungs, v.loss);
        steps.others(rungs, v.loss);
        simd::ints rung     = simd::broadcast(std::int32_t{0});
        simd::floats chosen = v.loss[0];
        simd::ints equal    = rung;
        for_steps<Count>(
            rungs.count, [&](auto j) __attribute__((always_inline)) {
                simd::ints const taken = steps.theta[j] > m;
                rung -= taken;
                chosen = simd::select(taken, v.loss[j], chosen);
                equal |= (steps.theta[j] >= near) & ~taken;
            });
        state.plateau = state.plateau || simd::any(equal);
        for (index_t i = 0; i < count; ++i)
        {
            auto const r              = static_cast<std::size_t>(rung[i]);
            tokens.rung[positions[i]] = rungs.index[r];
            state.loss += double{chosen[i]};
            ++state.tokens[r];
        }
    });
}

} // namespace mdkv::cpu::dual
