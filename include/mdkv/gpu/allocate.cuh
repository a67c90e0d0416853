/// \file allocate.cuh: allocate on the GPU: the choice of the CPU's, by passes that a record in device memory asks for (arXiv 2603.20616, sections 4.3, 4.4)
#pragma once

#include <mdkv/allocate.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/allocate_offers.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/collectives.cuh>
#include <mdkv/gpu/detail/allocate_block.cuh>
#include <mdkv/gpu/detail/allocate_passes.cuh>
#include <mdkv/gpu/detail/allocate_payers.cuh>
#include <mdkv/gpu/detail/allocate_state.cuh>
#include <mdkv/gpu/device.cuh>
#include <mdkv/gpu/launch.cuh>

#include <cstddef>
#include <cstdint>

namespace mdkv::gpu
{

namespace kernels
{

/// What heads choose from when they pay for what they use; the same for all limits.
struct allocate_menu
{
    static constexpr char const* name = "allocate_menu";
    static constexpr int threads      = 32;

    dual::work all;

    __device__ void operator()() const
    {
        if (device::thread() == 0) { all.offered->arrange(all.costs); }
        device::sync();
        auto const k = static_cast<std::size_t>(device::thread());
        if (k < all.offered->count) { all.offered->make(k, all.costs); }
    }
};

/// What each limit allows before any loss is looked at.
struct allocate_begin
{
    static constexpr char const* name = "allocate_begin";
    static constexpr int threads      = 256;

    dual::work all;

    [[nodiscard]] index_t shared_bytes() const { return sizeof(mdkv::detail::terms); }

    __device__ void operator()() const
    {
        dual::problem const p{all, device::block()};
        auto& plan = *reinterpret_cast<mdkv::detail::terms*>(device::shared_memory());
        if (device::thread() == 0)
        {
            index_t const limit  = all.limits(p.number());
            index_t const usable = limit < 0 ? -1 : limit; // too low, and far from what a sum of bytes cannot hold
            if (all.by_use)
            {
                plan = mdkv::detail::charge_by_use(all.heads, all.tokens(), *all.offered, all.costs, usable, false);
            }
            else
            {
                index_t const tokens = all.heads * all.tokens();
                plan = mdkv::detail::charge_all(all.heads, tokens, all.given[p.number()], all.costs, usable);
            }
            begin(p, plan, limit);
        }
        device::sync();
        for (index_t h = device::thread(); h < all.heads; h += threads) { p.offer_of()[h] = offer_at_first(plan); }
        for (index_t b = device::thread(); b < dual::exact_bins; b += threads) { p.bins()[b] = 0; }
    }

private:
    [[nodiscard]] __device__ std::uint8_t offer_at_first(mdkv::detail::terms const& plan) const
    {
        if (!all.by_use || !plan.settled()) { return 0; }
        return static_cast<std::uint8_t>(plan.status == allocation_status::everything_kept
                                             ? all.offered->count - 1
                                             : all.offered->cheapest(all.tokens()));
    }

    __device__ void begin(dual::problem const& p, mdkv::detail::terms const& plan, index_t limit) const
    {
        bool const chooses = all.by_use && !plan.settled() && plan.status != allocation_status::unprojected_only;
        dual::limit_state s{};
        s.limit             = limit;
        s.now.limit         = limit;
        s.now.status        = plan.status;
        s.now.charged_bytes = plan.charged;
        s.everywhere        = plan.everywhere;
        s.spare             = plan.spare;
        s.narrowest_step    = 1;
        s.shift             = dual::first_shift;
        s.low = s.high = s.last = -1;
        s.at                    = chooses ? dual::stage::guess_begins : dual::stage::plain;
        s.next                  = plan.settled() ? dual::pass::settle : chooses ? dual::pass::none : dual::pass::weigh;
        if (chooses) { s.steepest = steepest_multiplier(); }
        if (all.pieces == 0) // there is no token to make a pass for
        {
            s.at = dual::stage::over;
            if (limit < 0) { s.now.status = allocation_status::over_limit; }
            all.report(p.number()) = s.now;
        }
        p.state() = s;
    }

    /// Above it prices would leave the range of float.
    [[nodiscard]] __device__ double steepest_multiplier() const
    {
        return 1e37 / static_cast<double>(1 + all.costs.bytes[all.costs.rungs - 1]);
    }
};

/// The pass that every limit asks for, a block a piece of tokens; the limit's last block to finish decides what comes next.
/// Or, where the rest is asked for, one block a limit makes passes and decides until all is done.
struct allocate_passes
{
    static constexpr char const* name              = "allocate_passes";
    static constexpr int threads                   = dual::threads;
    static constexpr int blocks_per_multiprocessor = 2;

    dual::work all;
    bool rest = false;

    [[nodiscard]] index_t shared_bytes() const { return dual::block_room{device::shared_carver{nullptr}}.bytes; }
    [[nodiscard]] index_t blocks() const { return all.limit_count() * (rest ? index_t{all.pieces > 0} : all.pieces); }

    __device__ void operator()() const
    {
        index_t const shares = rest ? 1 : all.pieces; // of a limit's pieces
        index_t const share  = device::block() % shares;
        dual::problem const p{all, device::block() / shares};
        dual::limit_state& s = p.state();
        dual::block_room const own{device::shared_carver{device::shared_memory()}};
        do {
            device::sync();
            dual::pass const what = s.next;
            bool const over       = what == dual::pass::none && s.at == dual::stage::over;
            device::sync();
            if (over) { return; }
            for (index_t n = share; n < (rest ? all.pieces : share + 1); ++n)
            {
                make(p, own, n, what);
                device::sync();
            }
            if (!rest && !last_of_limit(s, own)) { return; }
            dual::payers{p, own}.decide();
        } while (rest);
    }

private:
    __device__ static void make(dual::problem const& p, dual::block_room const& own, index_t piece, dual::pass what)
    {
        dual::piece_pass const here{p, own, piece};
        switch (what)
        {
            case dual::pass::weigh:
                here.weigh();
                break;
            case dual::pass::assign:
                here.assign();
                break;
            case dual::pass::measure:
                here.measure();
                break;
            case dual::pass::survey:
                here.survey(piece < p.state().walked);
                break;
            case dual::pass::price:
                here.price();
                break;
            case dual::pass::settle:
                here.settle();
                break;
            case dual::pass::turn:
                here.turn();
                break;
            case dual::pass::restore:
                here.restore();
                break;
            default:
                break;
        }
    }

    /// Whether all other blocks of the limit have made the pass; what they wrote is then seen.
    [[nodiscard]] __device__ bool last_of_limit(dual::limit_state& s, dual::block_room const& own) const
    {
        if (device::thread() == 0)
        {
            device::fence();
            bool const last = device::atomic_add(&s.arrived, 1U) + 1 == static_cast<unsigned>(all.pieces);
            device::fence();
            own.found[0] = last ? 1 : 0;
            if (last) { s.arrived = 0; }
        }
        device::sync();
        bool const last = own.found[0] != 0;
        device::sync();
        return last;
    }
};

} // namespace kernels

namespace dual
{

/// Passes that are made by many blocks; those that are still missing then are made by one. Three and two are what a limit
/// needs at least, more are needed where what is left goes to several upgrades.
inline constexpr int steps_when_given = 10;
/// The same where heads pay for what they use: about four to guess, one to try, six to solve, one to try again, and as many
/// for every further combination of offers that comes near.
inline constexpr int steps_by_use = 48;

template <std::size_t R>
[[nodiscard]] rung_costs<run_time> at_run_time(rung_costs<R> const& costs)
{
    rung_costs<run_time> same;
    same.rungs = costs.size();
    for (std::size_t r = 0; r < costs.size(); ++r)
    {
        same.bytes[r]      = costs.bytes[r];
        same.projected[r]  = costs.projected[r];
        same.projection[r] = costs.projection[r];
    }
    return same;
}

} // namespace dual

/// Both searches are the one among the thresholds: that of the paper finds the same multiplier, to rounding. A negative limit
/// cannot be thrown for, as it is read on the device: its status is over_limit.
template <std::size_t R>
void allocate_impl(backend const& on, in_view<float, 3, backend> loss, rung_costs<R> const& costs,
    in_view<index_t, 1, backend> limits, allocate_options options, out_view<std::uint8_t, 2, backend> rung,
    out_view<allocation, 1, backend> report)
{
    expects(!options.same_count_per_head,
        "allocate: options.same_count_per_head is not served on the GPU; allocate on the "
        "CPU and copy the rungs, or give every head its own limit");
    index_t const heads = loss.extent(0);
    index_t const n     = loss.extent(2);
    // Every sum of bytes on the device is at most this one.
    index_t const most   = checked_multiply(checked_multiply(heads, n), costs.bytes[costs.size() - 1]);
    index_t const widest = costs.widest_projection();
    static_cast<void>(checked_add(most, checked_multiply(heads, widest)));

    dual::work all{.loss = loss, .limits = limits, .rung = rung, .report = report, .costs = dual::at_run_time(costs)};
    all.spend_leftover  = options.spend_leftover;
    all.by_use          = options.charge == projection_charge::by_use && widest > 0 && n > 0 && heads > 0;
    all.offers          = all.by_use ? static_cast<index_t>(mdkv::detail::menu{costs}.count) : 1;
    all.heads           = limits.extent(0) == 1 ? heads : 1;
    all.pieces_per_head = (n + dual::piece_tokens - 1) / dual::piece_tokens;
    all.pieces          = all.heads * all.pieces_per_head;
    expects(checked_multiply(limits.extent(0), all.pieces) <= INT32_MAX, "allocate: loss has ", heads, " heads of ", n,
        " tokens; a grid serves no more than ", INT32_MAX, " pieces of ", dual::piece_tokens);
    workspace::frame frame{*on.scratch, "allocate"};
    all.take_scratch(frame);
    if (!frame.ready()) { return; }
    if (all.by_use) { launch(on, kernels::allocate_menu{all}, 1); }
    launch(on, kernels::allocate_begin{all}, limits.extent(0));
    kernels::allocate_passes const step{all, false};
    int const steps = all.by_use ? dual::steps_by_use : dual::steps_when_given;
    for (int i = 0; i < steps; ++i) { launch(on, step, step.blocks()); }
    kernels::allocate_passes const rest{all, true};
    launch(on, rest, rest.blocks());
}

} // namespace mdkv::gpu
