/// \file finite.hpp: contract of expects_finite: refuses keys, values or queries that hold a NaN or an infinity.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/check.hpp>

namespace mdkv
{

/// One NaN would spoil a head's Gram matrix and every softmax; this search comes first.
///
/// \param on         backend: threads
/// \param[in] name   of the view, for the message
/// \param[in] rows   [H, N, D]
/// \cost   reads the view once
/// \sync   returns when done, on a GPU too: it waits for the device
/// \order  names the first offending row in (head, row) order, for any number of threads
/// \throws non_finite_input   naming the view, the head, the row and the layer (if not negative)
/// \see    tests/finite.cpp
template <backend B, element T>
void expects_finite(B const& on, char const* name, in_view<T, 3, B> rows, index_t layer = -1)
{
    static_assert(
        requires { expects_finite_impl(on, name, rows, layer); },
        MDKV_DETAIL_NO_IMPLEMENTATION(finite, expects_finite));
    detail::check{on, "expects_finite"}.rows(name, rows, {rows.extent(0), rows.extent(1), rows.extent(2)}, "H,N,D");
    expects_finite_impl(on, name, rows, layer);
}

} // namespace mdkv
