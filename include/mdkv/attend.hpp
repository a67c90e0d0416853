/// \file attend.hpp: contract of attend: one decode step's attention, straight from the packed cache (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/contract.hpp>

namespace mdkv
{

struct attend_options
{
    /// Factor of q.k; 0 means 1/sqrt(D), D the original dimension, for every rung.
    float scale = 0.0F;
};

/// Attention of one token's queries over everything the cache holds: all rungs, window and tail are one softmax. The
/// query is projected once per head; compressed keys are never reconstructed, and the latent part of the output is
/// projected back once.
///
/// \param on            backend: threads, scratch
/// \param[in]  queries  [H*G, D]   after position encoding, of any element type U; rows of one KV head are neighbours
/// \param[in]  cache    read only
/// \param[in]  options  scale
/// \param[out] output   [H*G, Dv]  weighted mean of the values; zeros where the cache is empty
/// \param[out] lse      [H*G]      natural logarithm of sum exp(scale*q.k); -infinity where the cache is empty. Merge
///                                 further segments with `merge_attention`
/// \cost   every stored byte is read once, whatever G; O(D*r) per query head for the projections; scratch, no allocation
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads
/// \throws invalid_argument        a shape disagrees, an output overlaps, query heads are no multiple of KV heads
/// \throws insufficient_workspace  naming the size needed; nothing was changed in either case
/// \see    tests/attend.cpp, docs/numerics.md
template <backend B, element T, element U>
void attend(B const& on, in_view<U, 2, B> queries, cache_view<T, B::memory_space> const& cache, attend_options options,
    out_view<U, 2, B> output, out_view<float, 1, B> lse)
{
    static_assert(
        requires { attend_impl(on, queries, cache, options, output, lse); },
        MDKV_DETAIL_NO_IMPLEMENTATION(attend, attend));
    bool const dry             = detail::dry_run(on);
    cache_layout const& layout = cache.layout;
    index_t const rows         = queries.extent(0);
    expects(layout.heads == 0 ? rows == 0 : rows % layout.heads == 0 && rows >= layout.heads,
        "attend: queries [H*G, D] has ", rows, " query heads, which ", layout.heads, " KV heads do not divide");
    expects(options.scale >= 0.0F, "attend: scale is ", options.scale, "; it must not be negative");
    expects(dry || layout.heads == 0 || (cache.heads != nullptr && cache.appended != nullptr),
        "attend: cache has no directory");
    detail::argument const q{"attend", "queries", queries};
    detail::argument const o{"attend", "output", output};
    detail::argument const l{"attend", "lse", lse};
    q.shape({rows, layout.dims.keys}, "H*G,D").data(dry).apart_from_scratch(on);
    o.shape({rows, layout.dims.values}, "H*G,Dv").data(dry).aligned().unique().apart_from(q).apart_from_scratch(on);
    l.shape({rows}, "H*G").data(dry).aligned().unique().apart_from(q).apart_from(o).apart_from_scratch(on);
    auto const stored   = cache.arena_bytes_view();
    auto const appended = cache.tail_bytes_view();
    detail::argument const a{"attend", "cache.arena", stored};
    detail::argument const t{"attend", "cache.tail", appended};
    o.apart_from(a).apart_from(t);
    l.apart_from(a).apart_from(t);
    attend_impl(on, queries, cache, options, output, lse);
}

} // namespace mdkv
