/// \file attend.hpp: contract of attend: one decode step's attention, straight from the packed cache (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/check.hpp>

namespace mdkv
{

struct attend_options
{
    /// Factor of q.k; 0 means 1/sqrt(D), D the original dimension, for every rung.
    float scale = 0.0F;
};

/// Attention of one token's queries over the whole cache: all rungs, window and tail are one softmax. The query is
/// projected once per head, compressed keys are not reconstructed, and the latent part of the output is projected back
/// once.
///
/// \param on            backend: threads, scratch
/// \param[in]  queries  [H*G, D]   after position encoding, of any element type U; rows of one KV head are neighbours
/// \param[in]  cache    read only
/// \param[in]  options  scale
/// \param[out] output   [H*G, Dv]  weighted mean of the values; zeros where the cache is empty
/// \param[out] lse      [H*G]      natural logarithm of sum exp(scale*q.k); -infinity where the cache is empty. Merge
///                                 further segments with `merge_attention`
/// \cost   reads every stored byte once, for any G; O(D*r) per query head for the projections; scratch, no allocation
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads
/// \throws invalid_argument        a shape disagrees, an output overlaps, query heads are no multiple of KV heads
/// \throws insufficient_workspace  naming the size needed; nothing was changed in either case
/// \see    tests/attend.cpp, docs/numerics.md
template <backend B, class T, element U>
void attend(B const& on, in_view<U, 2, B> queries, cache_view<T, B::memory_space> const& cache, attend_options options,
    out_view<U, 2, B> output, out_view<float, 1, B> lse)
{
    static_assert(
        requires { attend_impl(on, queries, detail::without_const(cache), options, output, lse); },
        MDKV_DETAIL_NO_IMPLEMENTATION(attend, attend));
    cache_layout const& layout = cache.layout;
    index_t const rows         = queries.extent(0);
    expects(layout.heads == 0 ? rows == 0 : rows % layout.heads == 0 && rows >= layout.heads,
        "attend: queries [H*G, D] has ", rows, " query heads, which ", layout.heads, " KV heads do not divide");
    expects(options.scale >= 0.0F, "attend: scale is ", options.scale, "; it must not be negative");
    expects(detail::dry_run(on) || layout.heads == 0 || (cache.heads != nullptr && cache.appended != nullptr),
        "attend: cache has no directory");
    detail::check{on, "attend"}
        .rows("queries", queries, {rows, layout.dims.keys}, "H*G,D")
        .bytes("cache.arena", cache.arena, cache.arena_bytes, false)
        .bytes("cache.tail", cache.tail, layout.heads * cache.tail_head_bytes(), false)
        .out("output", output, {rows, layout.dims.values}, "H*G,Dv")
        .out("lse", lse, {rows}, "H*G");
    attend_impl(on, queries, detail::without_const(cache), options, output, lse);
}

} // namespace mdkv
