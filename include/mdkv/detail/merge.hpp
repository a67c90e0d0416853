/// \file merge.hpp: merge_attention, written once over run and team: two weights a row, then the row (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/detail/team.hpp>

namespace mdkv::detail
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

    /// Of an item. On the CPU as many as take longer to merge than to wake another thread, 1 MiB; a block takes one.
    [[nodiscard]] MDKV_HD index_t rows_each() const noexcept
    {
        index_t const bytes = 2 * output.extent(1) * index_t{sizeof(U)} + 1;
        return B::memory_space == space::host ? (index_t{1} << 20) / bytes + 1 : 1;
    }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
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
            for (index_t c = t.rank(); c < output.extent(1); c += t.size())
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

template <backend B, element U>
void merge_attention_impl(B const& on, in_view<U, 2, B> output_a, in_view<float, 1, B> lse_a, in_view<U, 2, B> output_b,
    in_view<float, 1, B> lse_b, out_view<U, 2, B> output, out_view<float, 1, B> lse)
{
    merge_rows<B, U> const job{output_a, lse_a, output_b, lse_b, output, lse};
    run(on, job, (output.extent(0) + job.rows_each() - 1) / job.rows_each());
}

} // namespace mdkv::detail
