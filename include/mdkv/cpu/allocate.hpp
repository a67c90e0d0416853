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
#include <mdkv/detail/allocate_offers.hpp>

#include <cstddef>
#include <cstdint>

namespace mdkv::cpu
{

namespace dual
{

using mdkv::detail::charge_all;
using mdkv::detail::charge_by_use;
using mdkv::detail::terms;

/// One limit's tokens, every head charged, or none.
template <std::size_t R>
void solve_charging_all(backend const& on, problem& p, rung_costs<R> const& costs, allocate_options options,
    room const& scratch, allocation& report)
{
    offer made;
    terms const plan     = charge_all(p.heads, p.token_count(), made, costs, report.limit);
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
    terms const plan =
        charge_by_use(p.heads, p.tokens_per_head(), offered, costs, report.limit, options.same_count_per_head);
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
