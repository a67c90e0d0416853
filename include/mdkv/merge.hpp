/// \file merge.hpp: merge_attention: joins the attention over two sets of keys into the attention over both (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/detail/team.hpp>

namespace MDKV_NAMESPACE
{

namespace detail
{

template <backend B, element U>
struct merge_rows
{
    static constexpr char const* name = "merge_attention";
    static constexpr int threads      = 128;

    in_view<U, 2, B> output_a;
    in_view<float, 1, B> lse_a;
    in_view<U, 2, B> output_b;
    in_view<float, 1, B> lse_b;
    out_view<U, 2, B> output;
    out_view<float, 1, B> lse;

    /// Rows of an item: 1 MiB on the CPU, which takes longer to merge than to wake another thread; a block takes one row.
    [[nodiscard]] MDKV_HD index_t rows_each() const noexcept
    {
        index_t const bytes = 2 * output.extent(1) * index_t{sizeof(U)} + 1;
        return B::memory_space == space::host ? (index_t{1} << 20) / bytes + 1 : 1;
    }

    MDKV_HD void operator()(team auto const& t, index_t item) const
    {
        index_t const begin = item * rows_each();
        index_t const end   = begin + rows_each() < output.extent(0) ? begin + rows_each() : output.extent(0);
        for (index_t i = begin; i < end; ++i)
        {
            auto const by = merge_lse(lse_a(i), lse_b(i));
            t.sync(); // lse may be lse_a itself
            // An empty side is left out rather than multiplied by 0: its rows may hold anything. Even a minus zero keeps
            // its bits when it is added to minus zero.
            float const nothing = by.first == 0.0F && by.second == 0.0F ? 0.0F : -0.0F;
            U const* const a    = output_a.row(i);
            U const* const b    = output_b.row(i);
            U* const to         = output.row(i);
            index_t const dim   = output.extent(1); // read once: elements may alias it
            for (index_t c = t.rank(); c < dim; c += t.size())
            {
                float sum = nothing;
                if (by.first != 0.0F) { sum += by.first * widen(a[c]); }
                if (by.second != 0.0F) { sum += by.second * widen(b[c]); }
                to[c] = narrow<U>(sum);
            }
            if (t.rank() == 0) { lse(i) = by.lse; }
        }
    }
};

} // namespace detail

/// Attention over keys A and keys B, from the attention over each and its log-sum-exp, so that a caller can keep
/// further segments (a paged recent window, another device's share) beside the packed cache.
///
/// \param on             backend: threads
/// \param[in]  output_a  [rows, Dv]  attention over A, of any element type U
/// \param[in]  lse_a     [rows]      natural logarithm of A's sum of exponentials; -infinity if A is empty
/// \param[in]  output_b  [rows, Dv]  attention over B
/// \param[in]  lse_b     [rows]
/// \param[out] output    [rows, Dv]  may be output_a itself (same memory, same strides): the merge is then in place
/// \param[out] lse       [rows]      may be lse_a itself. Two empty sides give zeros and -infinity
/// \cost   reads and writes every row once; no scratch
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads; an empty side leaves the other's bits unchanged
/// \throws invalid_argument   a shape disagrees, an output overlaps anything but its own input (nothing was changed)
/// \see    tests/unit/merge.cpp
template <backend B, element U>
void merge_attention(B const& on, in_view<U, 2, B> output_a, in_view<float, 1, B> lse_a, in_view<U, 2, B> output_b,
    in_view<float, 1, B> lse_b, out_view<U, 2, B> output, out_view<float, 1, B> lse)
{
    detail::checks arguments{on, "merge_attention"};
    index_t const rows = output_a.extent(0);
    index_t const dim  = output_a.extent(1);
    // In place, an input is also an output, whose check covers it.
    if (output.data_handle() != output_a.data_handle() || output.stride(0) != output_a.stride(0))
    {
        arguments.in("output_a", output_a, {rows, dim}, "rows,Dv");
    }
    if (lse.data_handle() != lse_a.data_handle() || lse.stride(0) != lse_a.stride(0) || lse_a.extent(0) != rows)
    {
        arguments.in("lse_a", lse_a, {rows}, "rows");
    }
    arguments.in("output_b", output_b, {rows, dim}, "rows,Dv")
        .in("lse_b", lse_b, {rows}, "rows")
        .out("output", output, {rows, dim}, "rows,Dv")
        .out("lse", lse, {rows}, "rows");
    detail::merge_rows<B, U> const job{output_a, lse_a, output_b, lse_b, output, lse};
    run(on, job, (rows + job.rows_each() - 1) / job.rows_each());
}

} // namespace MDKV_NAMESPACE
