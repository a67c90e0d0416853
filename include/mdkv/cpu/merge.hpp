/// \file merge.hpp: merge_attention on the CPU: two weights a row, then one pass over the row (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/merge.hpp>

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/detail/softmax.hpp>

namespace mdkv::cpu
{

namespace detail
{

/// Below this many bytes read, waking other threads costs more than they save.
inline constexpr index_t serial_merge_bytes = index_t{1} << 20;

} // namespace detail

template <element U>
void merge_attention_impl(backend const& on, in_view<U, 2, backend> output_a, in_view<float, 1, backend> lse_a,
    in_view<U, 2, backend> output_b, in_view<float, 1, backend> lse_b, out_view<U, 2, backend> output,
    out_view<float, 1, backend> lse)
{
    if (on.scratch->counting()) { return; }
    index_t const rows = output.extent(0);
    auto const merge   = [&](index_t i, index_t) {
        auto const by        = mdkv::detail::merge_lse(lse_a(i), lse_b(i));
        U const* const a     = output_a.data_handle() + output_a.mapping()(i, 0);
        U const* const b     = output_b.data_handle() + output_b.mapping()(i, 0);
        U* const to          = output.data_handle() + output.mapping()(i, 0);
        index_t const values = output.extent(1);
        // An empty side is left out rather than multiplied by 0: what its rows hold does not matter. Minus zero is what
        // even a minus zero can be added to.
        float const nothing = by.first == 0.0F && by.second == 0.0F ? 0.0F : -0.0F;
        for (index_t c = 0; c < values; ++c)
        {
            float sum = nothing;
            if (by.first != 0.0F) { sum += by.first * widen(a[c]); }
            if (by.second != 0.0F) { sum += by.second * widen(b[c]); }
            to[c] = narrow<U>(sum);
        }
        lse(i) = by.lse;
    };
    if (2 * rows * output.extent(1) * index_t{sizeof(U)} < detail::serial_merge_bytes)
    {
        backend{on.scratch}.for_each(rows, merge);
    }
    else { on.for_each(rows, merge); }
}

} // namespace mdkv::cpu
