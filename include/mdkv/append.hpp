/// \file append.hpp: contract of append: one new token into the cache's tail, uncompressed.
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/check.hpp>

namespace mdkv
{

/// Adds one token to every head's tail, in place.
///
/// \param on         backend
/// \param[in] key    [H, D]   after position encoding (positions go on from the prompt's true length), any element type
/// \param[in] value  [H, Dv]
/// \param     cache  the tail must have room
/// \cost   writes one token; no scratch, no allocation
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  deterministic
/// \throws invalid_argument        a shape disagrees
/// \throws insufficient_workspace  the tail is full (naming its capacity); grow it with `reserve_tail` of its owner.
///                                 Nothing was changed in either case. gpu: the token is not written, and counted
///                                 beyond the capacity
/// \see    tests/append.cpp
template <backend B, element T, element U>
void append(B const& on, in_view<U, 2, B> key, in_view<U, 2, B> value, cache_view<T, B::memory_space> const& cache)
{
    static_assert(
        requires { append_impl(on, key, value, cache); }, MDKV_DETAIL_NO_IMPLEMENTATION(append, append));
    detail::check arguments{on, "append"};
    expects(detail::dry_run(on) || cache.appended != nullptr, "append: cache has no directory");
    arguments.rows("key", key, {cache.layout.heads, cache.layout.dims.keys}, "H,D")
        .rows("value", value, {cache.layout.heads, cache.layout.dims.values}, "H,Dv")
        .bytes("cache.tail", cache.tail, cache.layout.heads * cache.tail_head_bytes(), true)
        .bytes("cache.appended", cache.appended, sizeof(index_t), true);
    append_impl(on, key, value, cache);
}

} // namespace mdkv
