/// \file allocate_fixed.hpp: the dual of one limit when the rungs open to every head are given (arXiv 2603.20616, section 4.3)
#pragma once

#include <mdkv/allocate.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/detail/allocate_equal.hpp>
#include <mdkv/cpu/detail/allocate_leftover.hpp>
#include <mdkv/cpu/detail/allocate_multiplier.hpp>
#include <mdkv/cpu/detail/allocate_problem.hpp>
#include <mdkv/cpu/detail/allocate_tokens.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

// 1. A sample of the thresholds tells roughly where the multiplier lies (guess_bracket).
// 2. One pass over the losses gives every token whose thresholds are all outside that bracket its rung, and keeps the
//    others (decide). Should the guess be wrong, the pass is made once more with what was learned.
// 3. Among the thresholds of the others, the multiplier is selected exactly (select_multiplier); they get their rungs
//    (settle).
// 4. What is left is spent (spender).
//
// All byte counts are integers, so no result depends on the number of threads; losses are added in double in pieces of
// fixed size, and the pieces in order.

namespace mdkv::cpu::dual
{

/// Everything that the steps above take scratch memory for.
struct room
{
    chunk_state* chunks      = nullptr;
    std::uint16_t* undecided = nullptr;
    float* copies            = nullptr;
    bins counters;
    upgrade* upgrades = nullptr;
    shortlist* lists  = nullptr;
    equal_room equal;

    room(workspace::frame& frame, backend const& on, problem const& p, std::size_t rungs, allocate_options options)
    {
        index_t const n     = p.chunk_count();
        index_t const slots = on.slots(n);
        chunks              = frame.take<chunk_state>(n);
        undecided           = frame.take<std::uint16_t>(n * chunk_tokens);
        copies              = frame.take<float>(n * copied_tokens * static_cast<index_t>(rungs));
        counters.sample     = frame.take<index_t>(bins::sample_count);
        counters.exact      = frame.take<index_t>(slots * bins::exact_count);
        counters.above      = frame.take<index_t>(slots);
        upgrades            = frame.take<upgrade>((slots + 1) * candidates);
        lists               = frame.take<shortlist>(slots);
        if (options.same_count_per_head)
        {
            index_t const workers = on.slots(p.heads);
            equal.keys            = frame.take<float>(workers * p.tokens_per_head());
            equal.sorted          = frame.take<float>(workers * p.tokens_per_head());
            equal.heads           = frame.take<head_upgrade>(p.heads * static_cast<index_t>(rungs * rungs));
        }
    }
};

/// Counts and sums over the chunks, in their order.
inline void sum_up(backend const& on, problem const& p, allocation& report)
{
    on.for_each(p.chunk_count(), [&](index_t n, index_t) {
        chunk const tokens{p, n};
        if (tokens.state->upgraded) { tokens.state->loss = chosen_loss(tokens); }
        tokens.state->upgraded = false;
    });
    report.loss        = 0;
    report.token_bytes = 0;
    report.tokens.fill(0);
    for (index_t n = 0; n < p.chunk_count(); ++n)
    {
        rung_table const& rungs = p.rungs_of(p.head_of(n));
        report.loss += p.chunks[n].loss;
        for (std::size_t r = 0; r < rungs.count; ++r)
        {
            report.tokens[rungs.index[r]] += p.chunks[n].tokens[r];
            report.token_bytes += p.chunks[n].tokens[r] * rungs.cost[r];
        }
        if (p.chunks[n].non_finite > 0 && report.status != allocation_status::over_limit
            && report.status != allocation_status::everything_kept)
        {
            report.status = allocation_status::non_finite_loss;
        }
    }
}

/// Every token the same rung of the ratio set, without a search. All heads have the same rungs open.
inline void assign_everywhere(backend const& on, problem const& p, std::size_t rung, allocation& report)
{
    // At the multiplier 0 every token has its least loss: the dual of a limit that does not bind.
    on.for_each(p.chunk_count(), [&](index_t n, index_t) { decide_at(p, chunk{p, n}, 0.0); });
    sum_up(on, p, report);
    report.dual = report.loss;
    on.for_each(p.chunk_count(), [&](index_t n, index_t) {
        chunk const tokens{p, n};
        std::memset(tokens.rung, static_cast<int>(rung), static_cast<std::size_t>(tokens.count));
        tokens.state->upgraded = true;
        tokens.state->tokens.fill(0);
        tokens.state->tokens[tokens.open->place[rung]] = static_cast<std::int32_t>(tokens.count);
    });
    sum_up(on, p, report);
    // No allocation keeps a limit that is too low, so there is nothing to bound.
    if (report.status == allocation_status::over_limit) { report.dual = report.loss; }
}

/// Finds the multiplier, assigns, and spends what is left.
/// \param spare  bytes there are beyond the projections and every token's cheapest rung
template <std::size_t Capacity>
void assign(backend const& on, problem const& p, index_t spare, allocate_options options, room const& scratch,
    allocation& report)
{
    auto const unit = static_cast<double>(std::max<index_t>(p.unit(), 1));
    float cap       = 0; // the multiplier in units of the table
    float trust     = std::numeric_limits<float>::infinity();
    if (options.search == search::bisection)
    {
        report.multiplier = bisect_multiplier(on, p, spare);
        cap               = static_cast<float>(report.multiplier * unit);
    }
    else
    {
        bracket range;
        cap = select_multiplier<Capacity>(on, p, spare, scratch.counters, range);
        on.for_each(p.chunk_count(), [&](index_t n, index_t) {
            chunk const tokens{p, n};
            with_rungs<Capacity>(tokens.rungs->count, [&](auto count) { settle<decltype(count)::value>(tokens, cap); });
        });
        report.multiplier = double{std::min(cap, std::numeric_limits<float>::max())} / unit;
        // A decided token's best upgrade equals its next threshold but for rounding.
        trust = range.low == 0.0F ? 0.0F : range.low * (1 + 0x1p-20F) + 0x1p-120F;
    }
    sum_up(on, p, report);
    // Every token has the rung of its least loss + multiplier * bytes.
    index_t leftover = spare - (report.token_bytes - p.cheapest());
    report.dual      = report.loss - report.multiplier * static_cast<double>(leftover);
    if (options.spend_leftover && cap > 0)
    {
        leftover = spender<Capacity>{on, p, leftover, cap, trust, scratch.upgrades, scratch.lists}.spend();
    }
    if (options.same_count_per_head) { equalise(on, p, spare, options.spend_leftover, scratch.equal); }
    sum_up(on, p, report);
}

/// Spends what has become free after `assign`, whose multiplier is in the report.
template <std::size_t Capacity>
void assign_more(backend const& on, problem const& p, index_t leftover, allocate_options options, room const& scratch,
    allocation& report)
{
    auto const cap = static_cast<float>(report.multiplier * static_cast<double>(p.unit()));
    if (options.same_count_per_head)
    {
        upgrade_equally(on, p, leftover, scratch.equal);
        recount(on, p);
    }
    else if (cap > 0)
    {
        // Nothing is undecided any more: all tokens are looked at.
        constexpr float all = std::numeric_limits<float>::infinity();
        spender<Capacity>{on, p, leftover, cap, all, scratch.upgrades, scratch.lists}.spend();
    }
    sum_up(on, p, report);
}

} // namespace mdkv::cpu::dual
