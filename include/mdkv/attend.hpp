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

namespace detail
{

/// What both kinds of call ask of the cache, the options and the queries' rows, which it returns.
template <backend B, class T>
index_t expects_attendable(
    B const& on, index_t rows, index_t n, cache_view<T, B::memory_space> const& cache, attend_options const& options)
{
    index_t const heads = cache.layout.heads;
    expects(heads == 0 ? rows == 0 : rows % heads == 0 && rows >= heads, "attend: queries [H*G, D] has ", rows,
        " query heads, which ", heads, " KV heads do not divide");
    expects(options.scale >= 0.0F, "attend: scale is ", options.scale, "; it must not be negative");
    bool const dry = dry_run(on);
    expects(
        dry || heads == 0 || (cache.heads != nullptr && cache.appended != nullptr), "attend: cache has no directory");
    expects(n >= 1, "attend: queries [H*G, n, D] are of ", n, " tokens; there must be at least 1");
    if constexpr (B::memory_space == space::host)
    {
        expects(dry || heads == 0 || n == 1 || n <= *cache.appended, "attend: queries [H*G, n, D] are of ", n,
            " tokens, but ", dry || heads == 0 ? 0 : *cache.appended, " were appended");
    }
    return rows;
}

template <backend B, class T, element U>
auto attend_of_one(B const& on, in_view<U, 2, B> queries, cache_view<T, B::memory_space> const& cache,
    attend_options options, out_view<U, 2, B> output, out_view<float, 1, B> lse)
    -> decltype(attend_impl(on, of_one(queries), cache, options, of_one(output), out_view<float, 2, B>{}))
{
    return attend_impl(on, of_one(queries), cache, options, of_one(output),
        out_view<float, 2, B>{lse.data_handle(), {lse.extent(0), 1}, {1, 1}});
}

} // namespace detail

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
        requires { detail::attend_of_one(on, queries, detail::without_const(cache), options, output, lse); },
        MDKV_DETAIL_NO_IMPLEMENTATION(attend, attend));
    index_t const rows = detail::expects_attendable(on, queries.extent(0), 1, cache, options);
    detail::check{on, "attend"}
        .rows("queries", queries, {rows, cache.layout.dims.keys}, "H*G,D")
        .bytes("cache.arena", cache.arena, cache.arena_bytes, false)
        .bytes("cache.tail", cache.tail, cache.layout.heads * cache.tail_head_bytes(), false)
        .out("output", output, {rows, cache.layout.dims.values}, "H*G,Dv")
        .out("lse", lse, {rows}, "H*G");
    detail::attend_of_one(on, queries, detail::without_const(cache), options, output, lse);
}

/// Attention of the queries of the last n appended tokens at once, each over the whole cache but the tokens appended after
/// it: the answer's first tokens, a second prompt, drafts of speculative decoding. Equals n calls for one token each, but
/// for rounding, and reads every stored byte once for all of them.
///
/// \param[in]  queries  [H*G, n, D]
/// \param[in]  cache    whose last n tokens these are (`append` comes first)
/// \param[out] output   [H*G, n, Dv]
/// \param[out] lse      [H*G, n]
/// \cost   as for one token with G*n instead of G query heads; scratch grows with G*n
/// \throws invalid_argument   as above; or n is below 1 or beyond the tokens appended. gpu: only the device knows how many
///                            were appended; where they are fewer, the first of the queries see all that is not in the tail
template <backend B, class T, element U>
void attend(B const& on, in_view<U, 3, B> queries, cache_view<T, B::memory_space> const& cache, attend_options options,
    out_view<U, 3, B> output, out_view<float, 2, B> lse)
{
    static_assert(
        requires { attend_impl(on, queries, detail::without_const(cache), options, output, lse); },
        MDKV_DETAIL_NO_IMPLEMENTATION(attend, attend));
    index_t const n    = queries.extent(1);
    index_t const rows = detail::expects_attendable(on, queries.extent(0), n, cache, options);
    detail::check{on, "attend"}
        .rows("queries", queries, {rows, n, cache.layout.dims.keys}, "H*G,n,D")
        .bytes("cache.arena", cache.arena, cache.arena_bytes, false)
        .bytes("cache.tail", cache.tail, cache.layout.heads * cache.tail_head_bytes(), false)
        .out("output", output, {rows, n, cache.layout.dims.values}, "H*G,n,Dv")
        .out("lse", lse, {rows, n}, "H*G,n");
    attend_impl(on, queries, detail::without_const(cache), options, output, lse);
}

} // namespace mdkv
