/// \file layer.hpp: layer_view: one layer of a finished prompt as the stages take it, tokens and window apart (arXiv 2603.20616, section 4).
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>

namespace MDKV_NAMESPACE
{

/// One layer of one sequence after prefill. The N tokens come first, the W window tokens follow them.
template <backend B, element T, element U = T>
struct layer_view
{
    in_view<U, 3, B> queries;       ///< [H*G, Q, D]  the last ones, by whose attention tokens are scored
    in_view<T, 3, B> keys;          ///< [H, N, D]    after position encoding
    in_view<T, 3, B> values;        ///< [H, N, Dv]
    in_view<T, 3, B> window_keys;   ///< [H, W, D]
    in_view<T, 3, B> window_values; ///< [H, W, Dv]
};

/// Cuts a prompt's keys and values [H, N + W, ...] into N tokens for compression and the window.
/// \throws invalid_argument   window is negative; a shorter prompt is all window
template <backend B, element T, element U>
[[nodiscard]] layer_view<B, T, U> split_window(B const&, in_view<U, 3, B> const& queries, in_view<T, 3, B> const& keys,
    in_view<T, 3, B> const& values, index_t window)
{
    expects(window >= 0, "split_window: window is ", window, "; it must not be negative");
    index_t const kept  = window < keys.extent(1) ? window : keys.extent(1);
    index_t const first = keys.extent(1) - kept;
    expects(values.extent(1) == keys.extent(1), "split_window: values have ", values.extent(1), " tokens, keys ",
        keys.extent(1));
    return {queries, slice<1>(keys, 0, first), slice<1>(values, 0, first), slice<1>(keys, first, kept),
        slice<1>(values, first, kept)};
}

} // namespace MDKV_NAMESPACE
