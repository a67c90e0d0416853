/// \file join.hpp: join: the losses that two sets of rows give the same tokens, made one.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/ranks.hpp>
#include <mdkv/detail/team.hpp>

namespace MDKV_NAMESPACE
{

namespace detail
{

/// Adds both sets, each in units of its mean. An item is one row.
template <backend B>
struct add_losses
{
    static constexpr char const* name = "add_losses";

    in_view<float, 3, B> first;
    in_view<float, 3, B> second;
    sum_pieces<B> of_first; // sums at rung 0 of all heads, on all ranks
    sum_pieces<B> of_second;
    float weight;
    out_view<float, 3, B> joined;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const h = item / joined.extent(1);
        index_t const r = item % joined.extent(1);
        double const a  = unit(of_first.total(t, 0)); // leaves float's range if losses are below its normal numbers
        double const b  = unit(of_second.total(t, 0)) * double{weight};
        for (index_t i = t.rank(); i < joined.extent(2); i += t.size())
        {
            joined(h, r, i) = static_cast<float>(double{first(h, r, i)} * a + double{second(h, r, i)} * b);
        }
    }

private:
    /// One over the mean; 0 if no token would lose anything.
    [[nodiscard]] MDKV_HD double unit(double total) const
    {
        return total == 0 ? 0.0 : static_cast<double>(of_first.heads * joined.extent(2)) / total;
    }
};

/// The body of join, for heads of which other ranks may have further ones.
template <backend B>
void join_losses(B const& on, head_share const& heads, in_view<float, 3, B> first, in_view<float, 3, B> second,
    float weight, out_view<float, 3, B> joined)
{
    workspace::frame frame{*on.scratch, "join"};
    auto const at_rung_0 = [&](in_view<float, 3, B> const& x) {
        sum_pieces<B> of{
            {x.data_handle(), {1, x.extent(0), x.extent(2)}, {0, x.stride(0), 1}}, nullptr, heads.all, heads.first};
        of.sums = frame.template take<double>(of.room());
        return of;
    };
    auto const of_first  = at_rung_0(first);
    auto const of_second = at_rung_0(second);
    static_cast<void>(frame.ready());
    if (joined.extent(1) == 0) { return; }
    sum_over_ranks(on, heads.with, of_first);
    sum_over_ranks(on, heads.with, of_second);
    run(on, add_losses<B>{first, second, of_first, of_second, weight, joined}, joined.extent(0) * joined.extent(1));
}

} // namespace detail

/// Joins losses by two sets of rows. One set may have many rows of one kind (all of a prompt's queries, replayed), the
/// other few rows (the last ones, which are most like the next), so each set is measured by its own mean:
///
///     joined = first / mean(first) + weight * second / mean(second)
///
/// with the means over all heads and tokens of the losses at rung 0, which drops tokens if any rung does.
///
/// \param on            backend: threads, scratch
/// \param[in]  first    [H, R, N]
/// \param[in]  second   [H, R, N]  losses at the same rungs
/// \param[in]  weight   factor of the second set; >= 0
/// \param[out] joined   [H, R, N]  may be `first` itself. A set whose mean is 0 adds nothing; a NaN at rung 0 makes all NaN
/// \cost   reads and writes every loss once; scratch O(H*N / 4,096)
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads; in double
/// \throws invalid_argument        a shape disagrees, weight is negative or non-finite, output overlaps more than `first`
/// \throws insufficient_workspace  naming the size needed; nothing was changed in either case
/// \see    tests/unit/replay/join.cpp; docs/lab/2026-11/quality.md compares other ways to join
template <backend B>
void join(
    B const& on, in_view<float, 3, B> first, in_view<float, 3, B> second, float weight, out_view<float, 3, B> joined)
{
    detail::expects_not_negative("join", "weight", weight);
    array<index_t, 3> const shape = first.extents();
    detail::checks arguments{on, "join"};
    // In place, `first` is also the output, whose check covers it.
    if (joined.data_handle() != first.data_handle() || joined.strides() != first.strides())
    {
        arguments.in("first", first, shape, "H,R,N");
    }
    arguments.in("second", second, shape, "H,R,N").out("joined", joined, shape, "H,R,N");
    detail::join_losses(on, {nullptr, 1, shape[0]}, first, second, weight, joined);
}

} // namespace MDKV_NAMESPACE
