/// \file merge.hpp: contract of merge_attention: joins the attention over two sets of keys into that over both (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/contract.hpp>

namespace mdkv
{

/// Attention over keys A and keys B, from the attention over each and its log-sum-exp: what lets a caller keep further
/// segments (a paged recent window, another device's share) beside the packed cache.
///
/// \param on             backend: threads
/// \param[in]  output_a  [rows, Dv]  attention over A, of any element type U
/// \param[in]  lse_a     [rows]      natural logarithm of A's sum of exponentials; -infinity where A is empty
/// \param[in]  output_b  [rows, Dv]  likewise over B
/// \param[in]  lse_b     [rows]
/// \param[out] output    [rows, Dv]  may be output_a itself (same memory, same strides): the merge is then in place
/// \param[out] lse       [rows]      may be lse_a itself. Two empty sides give zeros and -infinity
/// \cost   reads and writes every row once; no scratch
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads; rows of an empty side leave the other's bits
/// \throws invalid_argument   a shape disagrees, an output overlaps anything but its own input (nothing was changed)
/// \see    tests/merge.cpp
template <backend B, element U>
void merge_attention(B const& on, in_view<U, 2, B> output_a, in_view<float, 1, B> lse_a, in_view<U, 2, B> output_b,
    in_view<float, 1, B> lse_b, out_view<U, 2, B> output, out_view<float, 1, B> lse)
{
    static_assert(
        requires { merge_attention_impl(on, output_a, lse_a, output_b, lse_b, output, lse); },
        MDKV_DETAIL_NO_IMPLEMENTATION(merge, merge_attention));
    bool const dry = detail::dry_run(on);
    detail::argument const oa{"merge_attention", "output_a", output_a};
    detail::argument const la{"merge_attention", "lse_a", lse_a};
    detail::argument const ob{"merge_attention", "output_b", output_b};
    detail::argument const lb{"merge_attention", "lse_b", lse_b};
    detail::argument const o{"merge_attention", "output", output};
    detail::argument const l{"merge_attention", "lse", lse};
    index_t const rows = output_a.extent(0);
    index_t const dim  = output_a.extent(1);
    oa.data(dry).aligned();
    la.shape({rows}, "rows").data(dry).aligned();
    ob.shape({rows, dim}, "rows,Dv").data(dry).aligned();
    lb.shape({rows}, "rows").data(dry).aligned();
    o.shape({rows, dim}, "rows,Dv").data(dry).aligned().unique().apart_from(la).apart_from(ob).apart_from(lb);
    l.shape({rows}, "rows").data(dry).aligned().unique().apart_from(oa).apart_from(ob).apart_from(lb).apart_from(o);
    if (output.data_handle() != output_a.data_handle() || output.mapping().stride(0) != output_a.mapping().stride(0))
    {
        o.apart_from(oa);
    }
    if (lse.data_handle() != lse_a.data_handle() || lse.mapping().stride(0) != lse_a.mapping().stride(0))
    {
        l.apart_from(la);
    }
    merge_attention_impl(on, output_a, lse_a, output_b, lse_b, output, lse);
}

} // namespace mdkv
