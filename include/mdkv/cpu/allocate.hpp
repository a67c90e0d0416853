/// \file allocate.hpp: allocate on the CPU: the exact dual in one pass over the losses, whatever the losses (arXiv 2603.20616, sections 4.3, 4.4)
#pragma once

#include <mdkv/allocate.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/detail/allocate_charge.hpp>
#include <mdkv/cpu/detail/allocate_fixed.hpp>
#include <mdkv/cpu/detail/allocate_menu.hpp>
#include <mdkv/cpu/detail/allocate_problem.hpp>
#include <mdkv/detail/threshold.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

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

/// Makes the offer that the limit can pay for: all rungs, and every head is charged for the widest projections; or those
/// that need none.
template <std::size_t R>
[[nodiscard]] terms charge_all(problem const& p, offer& made, rung_costs<R> const& costs, index_t limit)
{
    std::size_t const last = costs.size() - 1;
    index_t const tokens   = p.token_count();
    index_t const charge   = tokens > 0 ? p.heads * costs.widest_projection() : 0;
    made.rungs             = rung_table{costs.bytes[last] - costs.bytes[0]};
    auto const open        = [&](bool projected_too) {
        for (std::size_t r = 0; r <= last; ++r)
        {
            if (projected_too || !costs.projected[r]) { made.allow(r, costs.bytes[r]); }
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
    t.charged = charge;
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
    t.spare      = limit - t.charged - tokens * made.rungs.cost[0];
    t.everywhere = made.rungs.index[0];
    t.status     = t.spare >= 0 ? allocation_status::unprojected_only : allocation_status::over_limit;
    return t;
}

/// What a limit allows when heads pay for what they use; p has tokens.
template <std::size_t R>
[[nodiscard]] terms charge_by_use(
    problem const& p, menu const& offered, rung_costs<R> const& costs, index_t limit, bool all_alike)
{
    std::size_t const last = costs.size() - 1;
    index_t const tokens   = p.tokens_per_head();
    terms t;
    auto const settle = [&](allocation_status status, std::size_t rung) {
        t.status     = status;
        t.everywhere = rung;
        t.charged    = p.heads * costs.projection[rung];
        return t;
    };
    if (p.heads * (tokens * costs.bytes[last] + costs.projection[last]) <= limit)
    {
        return settle(allocation_status::everything_kept, last);
    }
    std::size_t const cheapest = offered.cheapest(tokens);
    index_t const others       = p.heads * offered.least_bytes(cheapest, tokens);
    if (others > limit) { return settle(allocation_status::over_limit, offered.offers[cheapest].rungs.index[0]); }
    bool projections = false;
    for (std::size_t k = 0; k < offered.count; ++k)
    {
        index_t const paying = all_alike ? p.heads : 1;
        index_t const more   = offered.least_bytes(k, tokens) - offered.least_bytes(cheapest, tokens);
        projections          = projections || (offered.offers[k].charge > 0 && others + paying * more <= limit);
    }
    if (!projections)
    {
        t.status = allocation_status::unprojected_only;
        t.spare  = limit - others;
    }
    return t;
}

/// One limit's tokens, every head charged, or none.
template <std::size_t R>
void solve_charging_all(backend const& on, problem& p, rung_costs<R> const& costs, allocate_options options,
    room const& scratch, allocation& report)
{
    offer made;
    terms const plan     = charge_all(p, made, costs, report.limit);
    p.offers             = &made;
    report.status        = plan.status;
    report.charged_bytes = plan.charged;
    if (plan.settled()) { assign_everywhere(on, p, plan.everywhere, report); }
    else { assign<rung_costs<R>::capacity>(on, p, plan.spare, options, scratch, report); }
}

/// One limit's tokens, heads charged for what they use.
template <std::size_t R>
void solve_charging_by_use(backend const& on, problem& p, menu const& offered, rung_costs<R> const& costs,
    allocate_options options, room const& scratch, charge_room const& own, allocation& report)
{
    terms const plan     = charge_by_use(p, offered, costs, report.limit, options.same_count_per_head);
    p.offers             = offered.offers.data();
    report.status        = plan.status;
    report.charged_bytes = plan.charged;
    if (plan.settled())
    {
        if (plan.status == allocation_status::everything_kept) { p.offers += offered.count - 1; }
        else { p.offers += offered.cheapest(p.tokens_per_head()); }
        assign_everywhere(on, p, plan.everywhere, report);
        return;
    }
    constexpr std::size_t capacity = rung_costs<R>::capacity;
    if (plan.status == allocation_status::unprojected_only)
    {
        assign<capacity>(on, p, plan.spare, options, scratch, report);
        return;
    }
    payers<capacity>{on, p, offered, report.limit, options, scratch, own}.solve(report);
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
    index_t const widest = costs.widest_projection();
    static_cast<void>(checked_add(most, checked_multiply(loss.extent(0), widest)));

    bool const by_use = options.charge == projection_charge::by_use && widest > 0 && loss.extent(2) > 0;
    dual::menu const offered{costs};
    workspace::frame frame{*on.scratch, "allocate"};
    dual::room const scratch{frame, on, p, costs.size(), options};
    dual::charge_room const own = by_use ? dual::charge_room{frame, p, offered} : dual::charge_room{};
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
        dual::problem one = p;
        one.first_head    = i;
        allocation result;
        result.limit = limits(i);
        if (by_use) { dual::solve_charging_by_use(on, one, offered, costs, options, scratch, own, result); }
        else { dual::solve_charging_all(on, one, costs, options, scratch, result); }
        report(i) = result;
    }
}

} // namespace mdkv::cpu
