/// \file allocate.hpp: allocate on the CPU: the exact dual in one pass over the losses, whatever the losses (arXiv 2603.20616, sections 4.3, 4.4)
#pragma once

#include <mdkv/allocate.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/detail/allocate_equal.hpp>
#include <mdkv/cpu/detail/allocate_leftover.hpp>
#include <mdkv/cpu/detail/allocate_multiplier.hpp>
#include <mdkv/cpu/detail/allocate_tokens.hpp>
#include <mdkv/detail/threshold.hpp>

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

namespace mdkv::cpu
{

namespace dual
{

/// What one limit allows before any loss is looked at.
struct terms
{
    allocation_status status = allocation_status::optimal;
    index_t charged          = 0; ///< for projections
    index_t spare            = 0; ///< bytes beyond every token's cheapest rung
    std::size_t everywhere   = 0; ///< the rung of all tokens, unless status asks for the search
    [[nodiscard]] bool settled() const noexcept
    {
        return status == allocation_status::everything_kept || status == allocation_status::over_limit;
    }
};

/// Opens to the problem's tokens the rungs that its limit can pay for. Projections are charged to every head as soon as
/// one projected rung is open.
template <std::size_t R>
[[nodiscard]] terms open_rungs(problem& p, rung_costs<R> const& costs, index_t limit)
{
    std::size_t const last = costs.size() - 1;
    index_t const tokens   = p.token_count();
    index_t const charge   = tokens > 0 ? p.heads * costs.projection : 0;
    p.rungs                = rung_table{costs.bytes[last] - costs.bytes[0]};
    auto const open        = [&](bool projected_too) {
        for (std::size_t r = 0; r <= last; ++r)
        {
            if (projected_too || !costs.projected[r]) { p.allow(r, costs.bytes[r]); }
        }
    };
    terms t;
    t.charged = costs.projected[last] ? charge : 0;
    if (tokens * costs.bytes[last] + t.charged <= limit)
    {
        open(true);
        t.status     = allocation_status::everything_kept;
        t.everywhere = last;
        return t;
    }
    t.charged = costs.any_projected() ? charge : 0;
    t.spare   = limit - t.charged - tokens * costs.bytes[0];
    if (t.spare >= 0)
    {
        open(true);
        return t;
    }
    bool const only_projected = std::all_of(costs.projected.begin(),
        costs.projected.begin() + static_cast<index_t>(last) + 1, [](bool projected) { return projected; });
    open(only_projected);
    t.charged    = only_projected ? charge : 0;
    t.spare      = limit - t.charged - tokens * p.rungs.cost[0];
    t.everywhere = p.rungs.index[0];
    t.status     = t.spare >= 0 ? allocation_status::unprojected_only : allocation_status::over_limit;
    return t;
}

/// Everything that scratch memory is taken for.
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
        if (tokens.state->upgraded) { tokens.state->loss = chosen_loss(p, tokens); }
        tokens.state->upgraded = false;
    });
    report.loss        = 0;
    report.token_bytes = 0;
    report.tokens.fill(0);
    for (index_t n = 0; n < p.chunk_count(); ++n)
    {
        report.loss += p.chunks[n].loss;
        for (std::size_t r = 0; r < p.rungs.count; ++r)
        {
            report.tokens[p.rungs.index[r]] += p.chunks[n].tokens[r];
            report.token_bytes += p.chunks[n].tokens[r] * p.rungs.cost[r];
        }
    }
}

/// Every token the same rung.
inline void assign_everywhere(backend const& on, problem const& p, terms const& t, allocation& report)
{
    // At the multiplier 0 every token has its least loss: the dual of a limit that does not bind.
    on.for_each(p.chunk_count(), [&](index_t n, index_t) { decide_at(p, chunk{p, n}, 0.0); });
    sum_up(on, p, report);
    report.dual = report.loss;
    on.for_each(p.chunk_count(), [&](index_t n, index_t) {
        chunk const tokens{p, n};
        std::memset(tokens.rung, static_cast<int>(t.everywhere), static_cast<std::size_t>(tokens.count));
        tokens.state->upgraded = true;
        tokens.state->tokens.fill(0);
        tokens.state->tokens[p.place[t.everywhere]] = static_cast<std::int32_t>(tokens.count);
    });
    sum_up(on, p, report);
    // No allocation keeps a limit that is too low, so there is nothing to bound.
    if (t.status == allocation_status::over_limit) { report.dual = report.loss; }
}

/// Finds the multiplier, assigns, and spends what is left.
template <std::size_t Count>
void assign(backend const& on, problem const& p, terms const& t, allocate_options options, room const& scratch,
    allocation& report)
{
    auto const unit = static_cast<double>(std::max<index_t>(p.rungs.unit, 1));
    float cap       = 0; // the multiplier in units of the table
    float trust     = std::numeric_limits<float>::infinity();
    if (options.search == search::bisection)
    {
        report.multiplier = bisect_multiplier(on, p, t.spare);
        cap               = static_cast<float>(report.multiplier * unit);
    }
    else
    {
        bracket range;
        cap = select_multiplier<Count>(on, p, t.spare, scratch.counters, range);
        on.for_each(p.chunk_count(), [&](index_t n, index_t) { settle<Count>(chunk{p, n}, cap); });
        report.multiplier = double{std::min(cap, std::numeric_limits<float>::max())} / unit;
        // A decided token's best upgrade equals its next threshold but for rounding.
        trust = range.low == 0.0F ? 0.0F : range.low * (1 + 0x1p-20F) + 0x1p-120F;
    }
    sum_up(on, p, report);
    // Every token has the rung of its least loss + multiplier * bytes.
    index_t const fixed = p.token_count() * p.rungs.cost[0];
    index_t leftover    = t.spare - (report.token_bytes - fixed);
    report.dual         = report.loss - report.multiplier * static_cast<double>(leftover);
    if (options.spend_leftover && cap > 0)
    {
        leftover = spender<Count>{on, p, leftover, cap, trust, scratch.upgrades, scratch.lists}.spend();
    }
    if (options.same_count_per_head) { equalise(on, p, t.spare, options.spend_leftover, scratch.equal); }
    sum_up(on, p, report);
    for (index_t n = 0; n < p.chunk_count(); ++n)
    {
        if (p.chunks[n].non_finite > 0) { report.status = allocation_status::non_finite_loss; }
    }
}

} // namespace dual

template <std::size_t R>
void allocate_impl(backend const& on, in_view<float, 3, backend> loss, rung_costs<R> const& costs,
    in_view<index_t, 1, backend> limits, allocate_options options, out_view<std::uint8_t, 2, backend> rung,
    out_view<allocation, 1, backend> report)
{
    bool const shared = limits.extent(0) == 1;
    dual::problem p;
    p.loss  = loss;
    p.rung  = rung;
    p.heads = shared ? loss.extent(0) : 1;
    // Every sum of bytes below is at most this one.
    index_t const most =
        checked_multiply(checked_multiply(loss.extent(0), loss.extent(2)), costs.bytes[costs.size() - 1]);
    static_cast<void>(checked_add(most, checked_multiply(loss.extent(0), costs.projection)));

    workspace::frame frame{*on.scratch, "allocate"};
    dual::room const scratch{frame, on, p, costs.size(), options};
    if (!frame.ready()) { return; }
    for (index_t i = 0; i < limits.extent(0); ++i)
    {
        expects(limits(i) >= 0, "allocate: limits[", i, "] is ", limits(i), "; it must not be negative");
    }
    p.chunks    = scratch.chunks;
    p.undecided = scratch.undecided;
    p.copies    = scratch.copies;
    for (index_t i = 0; i < limits.extent(0); ++i)
    {
        dual::problem own      = p;
        own.first_head         = i;
        dual::terms const plan = dual::open_rungs(own, costs, limits(i));
        allocation result;
        result.status        = plan.status;
        result.limit         = limits(i);
        result.charged_bytes = plan.charged;
        if (plan.settled()) { dual::assign_everywhere(on, own, plan, result); }
        else
        {
            dual::with_rungs<rung_costs<R>::capacity>(own.rungs.count,
                [&](auto count) { dual::assign<decltype(count)::value>(on, own, plan, options, scratch, result); });
        }
        report(i) = result;
    }
}

} // namespace mdkv::cpu
