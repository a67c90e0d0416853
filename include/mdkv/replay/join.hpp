/// \file join.hpp: join: the losses that two sets of rows give the same tokens, made one.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/ranks.hpp>
#include <mdkv/detail/team.hpp>

#include <cstdint>

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
        return total == 0 ? 0.0 : static_cast<double>(of_first.rows.extent(1) * joined.extent(2)) / total;
    }
};

/// One call of join, by itself or of a prompt.
/// \param agreed   made before the call's arguments were checked
/// \param prompt   see agreement::settle
template <backend B>
void join_losses(B const& on, char const* stage, agreement<B::memory_space>& agreed, prompt_numbers const* prompt,
    in_view<float, 3, B> first, in_view<float, 3, B> second, float weight, out_view<float, 3, B> joined)
{
    expects_not_negative("join", "weight", weight);
    array<index_t, 3> const shape = first.extents();
    checks arguments{on, "join"};
    // In place, `first` is also the output, whose check covers it.
    if (joined.data_handle() != first.data_handle() || joined.strides() != first.strides())
    {
        arguments.in("first", first, shape, "H,R,N");
    }
    arguments.in("second", second, shape, "H,R,N").out("joined", joined, shape, "H,R,N");
    workspace::frame frame{*on.scratch};
    auto const at_rung_0 = [&](in_view<float, 3, B> const& x) {
        return in_view<float, 3, B>{x.data_handle(), {1, shape[0], shape[2]}, {0, x.stride(0), 1}};
    };
    sum_pieces<B> of_first{at_rung_0(first), nullptr};
    sum_pieces<B> of_second{at_rung_0(second), nullptr};
    of_first.sums       = frame.template take<double>(of_first.items());
    of_second.sums      = frame.template take<double>(of_second.items());
    auto const numbers  = number_heads(on, "join", shape[0], 0);
    bool const ranks    = ranks_of(on) != nullptr;
    index_t const all   = numbers.all * of_first.pieces();
    auto* const sums    = frame.template take<double>(ranks ? 2 * all + 2 : 0);
    agreed.settle(stage,
        array<shared_number, 3>{
            {{"number N of tokens", shape[2]}, {"number R of rungs", shape[1]}, {"weight", weight}}},
        prompt);
    if (shape[1] == 0) { return; }
    run(on, of_first);
    run(on, of_second);
    if (ranks)
    {
        auto* const words = reinterpret_cast<std::int64_t*>(sums);
        expects_every_head(on, stage, numbers, words);
        scatter_sums(on, numbers, of_first, sums);
        scatter_sums(on, numbers, of_second, sums + all);
        sum_over_ranks(on, words, 2 * all);
        of_first.rows = of_second.rows = {first.data_handle(), {1, numbers.all, shape[2]}, {0, 0, 1}}; // for totals
        of_first.sums                  = sums;
        of_second.sums                 = sums + all;
    }
    run(on, add_losses<B>{first, second, of_first, of_second, weight, joined}, shape[0] * shape[1]);
}

} // namespace detail

/// Joins losses by two sets of rows. One set may have many rows of one kind (all of a prompt's queries, replayed), the
/// other few rows (the last ones, which are most like the next), so each set is measured by its own mean:
///
///     joined = first / mean(first) + weight * second / mean(second)
///
/// with the means over all heads and tokens of the losses at rung 0, which drops tokens if any rung does. Over ranks
/// (`mdkv::ranks`) the heads are this rank's, and means are over the heads of all ranks.
///
/// \param on            backend: threads, scratch, ranks
/// \param[in]  first    [H, R, N]
/// \param[in]  second   [H, R, N]  losses at the same rungs
/// \param[in]  weight   factor of the second set; >= 0
/// \param[out] joined   [H, R, N]  may be `first` itself. A set whose mean is 0 adds nothing; a NaN at rung 0 makes all NaN
/// \cost   reads and writes every loss once; scratch O(H*N / 4,096). Over ranks 3 exchanges, 16 bytes for 4,096 tokens of a head
/// \sync   returns when done (cpu); enqueued on the stream (gpu); over ranks a GPU is waited for
/// \order  bitwise reproducible for equal inputs, for any number of threads; in double
/// \throws invalid_argument        a shape disagrees, weight is negative or non-finite, output overlaps more than `first`;
///                                 over ranks as allocate's, on every rank; nothing was changed
/// \see    tests/unit/replay/join.cpp; docs/lab/2026-11/quality.md compares other ways to join
template <backend B>
void join(
    B const& on, in_view<float, 3, B> first, in_view<float, 3, B> second, float weight, out_view<float, 3, B> joined)
{
    detail::agreement agreed{on};
    detail::join_losses(on, "join", agreed, nullptr, first, second, weight, joined);
}

} // namespace MDKV_NAMESPACE
