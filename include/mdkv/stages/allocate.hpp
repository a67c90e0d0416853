/// \file allocate.hpp: allocate: a rung for every token, at least total loss within a byte budget (arXiv 2603.20616, sections 4.3, 4.4).
#pragma once

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/float_environment.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/allocate/search.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/ranks.hpp>

namespace MDKV_NAMESPACE
{

/// Chooses every token's rung: least total loss with token bytes and projections within the limits, by the Lagrangian dual
/// (docs/method.md). Equal choices are settled by head and position. Limits are each for as many neighbouring heads: one is
/// shared by all heads (MixedDimKV), H of them are the heads' own (MixedDimKV-H). Over ranks (`allocate_options::ranks`) the losses
/// are of this rank's heads; limits and reports are those of all ranks' heads.
///
/// \param on            backend: threads, scratch
/// \param[in,out] of   losses, and the rungs that are chosen
/// \param[in]  costs    bytes of each rung; the cheapest takes none if heads have lists of their own
/// \param[in]  limits   [n]  bytes for tokens, projections and channels of keys (the window not included); n divides the heads
/// \param[in]  options  charge, ranks
/// \param[out] report   [n]  one for each limit; `status` has errors of the data: NaN losses, a limit below the cheapest rungs
/// \pre    costs ascend; 1 <= R <= 16; no head has more tokens than the longest
/// \cost   five passes over the losses, O(R^2) a token; scratch 16 KiB a limit, and for each head 128 bytes and 16 for 2,048
///         tokens of the longest. `if_better` with projections takes a second search. Over ranks 5 exchanges (docs/ranks.md),
///         and scratch for the heads of all ranks
/// \sync   returns when done (cpu); enqueued on the stream, 12 launches, or 25 (gpu); over ranks a GPU is waited for
/// \order  bitwise the same for equal inputs, any number of threads, every backend, and lists padded by tokens that lose nothing
/// \throws invalid_argument        a shape disagrees, costs do not ascend, a limit is negative (gpu: over_limit), or (cpu) lists
///                                 leave the tokens or are longer than the longest; nothing was changed
/// \see    tests/unit/stages/allocate.cpp, docs/numerics.md
template <backend B>
void allocate(B const& on, list_losses<B::memory_space> const& of, rung_costs const& costs,
    in_view<index_t, 1, B> limits, allocate_options options, out_view<allocation, 1, B> report)
{
    costs.expects_valid("allocate");
    bool const lists    = !of.first.empty();
    index_t const count = limits.extent(0);
    auto const R        = static_cast<index_t>(costs.size());
    expects(of.heads() >= 0, "allocate: first [H + 1] is empty");
    expects(of.longest() >= 0, "allocate: longest is ", of.longest(), "; it must not be negative");
    expects(!lists || costs.bytes[0] == 0, "allocate: the cheapest rung takes ", costs.bytes[0],
        " bytes a token; heads with different numbers of tokens need one that takes none");
    index_t const layers = options.ranks == nullptr ? 1 : options.layers;
    expects(
        layers >= 1 && of.heads() % layers == 0, "allocate: options.layers is ", layers, " of ", of.heads(), " heads");
    detail::head_share const heads{options.ranks, layers, of.heads() / layers};
    index_t const all = checked_multiply(heads.all, layers);
    expects(all == 0 || (count > 0 && all % count == 0), "allocate: limits has ", count,
        " entries, which do not divide the ", all, " heads");
    detail::checks arguments{on, "allocate"};
    if (lists)
    {
        in_view<float, 2, B> const loss{of.loss.data_handle(), {of.loss.extent(1), of.tokens}, {of.loss.stride(1), 1}};
        out_view<std::uint8_t, 1, B> const rung{of.rung.data_handle(), {of.rungs}, {1}};
        arguments.in("loss", loss, {R, of.tokens}, "R,M")
            .in("first", of.first, {of.heads() + 1}, "H+1")
            .out("rung", rung, {of.tokens}, "M");
    }
    else
    {
        arguments.in("loss", of.loss, {of.heads(), R, of.longest()}, "H,R,N")
            .out("rung", of.rung, {of.heads(), of.longest()}, "H,N");
    }
    arguments.in("limits", limits, {count}, "n").out("report", report, {count}, "n");
    if constexpr (B::memory_space == space::host)
    {
        for (index_t i = 0; i < count; ++i)
        {
            expects(limits(i) >= 0, "allocate: limits[", i, "] is ", limits(i), "; it must not be negative");
        }
        for (index_t h = 0; h < of.heads() && lists; ++h)
        {
            index_t const begin = of.first(h);
            index_t const end   = of.first(h + 1);
            expects(begin >= 0 && end >= begin && end <= of.tokens, "allocate: tokens of head ", h, " are ", begin,
                " to ", end, "; they must be among the ", of.tokens, " and follow those of the head before");
            expects(end - begin <= of.longest(), "allocate: head ", h, " has ", end - begin,
                " tokens, above longest = ", of.longest());
        }
    }
    using namespace detail::dual;
    index_t const widest = costs.bytes[costs.size() - 1];
    index_t const charge = costs.widest_projection();
    // Every sum of bytes is at most this one.
    index_t const tokens = checked_multiply(checked_multiply(all, of.longest()), widest);
    static_cast<void>(checked_add(tokens, checked_multiply(all, checked_add(charge, costs.channels))));
    work<B::memory_space> w{.costs = costs,
        .charge                    = charge,
        .widest_step               = widest > costs.bytes[0] ? widest - costs.bytes[0] : 1,
        .of                        = of,
        .limit_values              = limits.data_handle(),
        .report                    = report.data_handle(),
        .share                     = heads,
        .limits                    = count,
        .heads                     = count > 0 ? all / count : 0,
        .pieces_per_head           = (of.longest() + piece_tokens - 1) / piece_tokens};
    for (bool const projected : {false, true})
    {
        float_environment const standard; // for the factors
        std::size_t closed = costs.size();
        for (std::size_t r = 0; r < costs.size(); ++r)
        {
            if (projected || costs.projection[r] == 0) { w.open[projected].add(r, costs.bytes[r], w.widest_step); }
            else { w.open[projected].index[--closed] = static_cast<std::uint8_t>(r); }
        }
    }
    index_t const words = count * (bins + 2 * w.pieces() + w.heads * index_t{max_rungs} + 1); // from `histogram` on
    workspace::frame frame{on.scratch};
    w.histogram    = frame.template take<std::int64_t>(words);
    w.searches     = frame.template take<limit_search>(count);
    w.ties         = w.histogram + count * bins;
    w.counts       = w.ties + count * w.pieces();
    w.non_finite   = w.counts + all * index_t{max_rungs};
    w.piece_losses = reinterpret_cast<double*>(w.non_finite + count);
    solve(on, w, words, false);
    if (options.charge == projection_charge::if_better && charge > 0) { solve(on, w, words, true); }
}

} // namespace MDKV_NAMESPACE
