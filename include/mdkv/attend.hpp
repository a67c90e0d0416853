/// \file attend.hpp: contract of attend: decoding steps' attention, straight from packed caches (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/detail/check.hpp>

#include <concepts>
#include <optional>
#include <span>
#include <type_traits>

namespace MDKV_NAMESPACE
{

template <backend B>
struct attend_options
{
    /// Factor of q.k for this call; 0 means cache_layout::scale, with which the cache's tokens were scored.
    float scale = 0.0F;

    /// [H*G, n] or [H*G, 1]  see score_options::lse_elsewhere: keys that are not in the cache take their part of each softmax.
    /// The caller adds their values' part of the output; sink logits have none: `in(on, logits, H*G, 1)`.
    std::optional<in_view<float, 2, B>> lse_elsewhere = std::nullopt;
};

/// One sequence of a batch.
template <element T, space S>
struct sequence_view
{
    cache_view<T const, S> cache;
    index_t queries = 1; ///< queries of its last appended tokens; 0: the sequence takes no part
};

namespace detail
{

/// Name of sequence i in messages.
[[nodiscard]] MDKV_OUTLINE inline message attend_name(index_t i, bool of_batch)
{
    message name;
    name.add(of_batch ? "attend: sequence " : "attend");
    if (of_batch) { name.add_number(i); }
    return name;
}

/// Checks and starts sequences whose queries follow one another: one, or a batch of any number.
template <backend B, element T, element U, std::size_t N>
void attend_sequences(B const& on, in_view<U, 3, B> queries,
    std::span<sequence_view<T, B::memory_space> const, N> sequences, attend_options<B> const& options,
    out_view<U, 3, B> output, out_view<float, 2, B> lse)
{
    static_assert(
        requires { attend_impl(on, queries, sequences, options, output, lse); },
        MDKV_DETAIL_NO_IMPLEMENTATION(attend, attend));
    expects_not_negative("attend", "scale", options.scale);
    index_t const rows = queries.extent(0);
    index_t const all  = queries.extent(1);
    for (std::size_t i = 0; i < sequences.size(); ++i)
    {
        auto const& [cache, n]   = sequences[i];
        message const name       = attend_name(static_cast<index_t>(i), N != 1);
        index_t const heads      = cache.layout.heads;
        auto const [dim, values] = cache.layout.dims;
        expects(rows == 0 || cache.layout.rungs > 0, name.text,
            ": the cache has no layout: nothing was packed into it, or it was moved from");
        expects(heads == 0 ? rows == 0 : rows % heads == 0 && rows >= heads, name.text, ": queries [H*G, n, D] has ",
            rows, " query heads, which ", heads, " KV heads do not divide");
        expects_not_negative(name.text, "cache.layout.scale", cache.layout.scale);
        expects(
            heads == 0 || (cache.heads != nullptr && cache.appended != nullptr), name.text, ": cache has no directory");
        if constexpr (B::memory_space == space::host)
        {
            expects(heads == 0 || n <= 1 || n <= *cache.appended, name.text, ": queries [H*G, n, D] are of ", n,
                " tokens, but ", heads == 0 ? 0 : *cache.appended, " were appended");
        }
        checks{on, name.text}
            .rows("queries", queries, {rows, all, dim}, "H*G,n,D")
            .bytes("cache.arena", cache.arena, cache.arena_bytes, false)
            .bytes("cache.tail", cache.tail, heads * cache.tail_head_bytes(), false)
            .of_queries("options.lse_elsewhere", options.lse_elsewhere, rows, all, "H*G,n")
            .out("output", output, {rows, all, values}, "H*G,n,Dv")
            .out("lse", lse, {rows, all}, "H*G,n");
    }
    attend_impl(on, queries, sequences, options, output, lse);
}

} // namespace detail

/// Attention of one token's queries over the whole cache, or causal attention of its last n appended tokens, e.g. a second
/// prompt or drafts of speculative decoding: n tokens equal n calls for one token each, but for rounding. All rungs, window and
/// tail are one softmax. Compressed keys are not reconstructed.
///
/// \param on            backend: threads, scratch
/// \param[in]  queries  [H*G, D] or [H*G, n, D]   after position encoding, of any element type U; rows of one KV head are
///                                 neighbours; rounded for products with codes (docs/numerics.md)
/// \param[in]  over     the cache's view, or its owner, with a layout; its last n tokens are the queries' (`append` comes first)
/// \param[in]  options  scale, if not the cache's; sink logits, or keys elsewhere
/// \param[out] output   [H*G, Dv] or [H*G, n, Dv]   weighted means of the values, in the queries' type; zeros if no token is stored
/// \param[out] lse      [H*G] or [H*G, n]   natural logarithm of sum exp(scale*q.k), with the keys elsewhere; -infinity if there
///                                 are none and no token is stored. Merge further segments with `merge_attention`
/// \cost   reads every stored byte once, for any G and n (cpu: once for each panel of 32 rows; a token has G rows); O(D*r) a query
///         for the projections. Scratch, no allocation; it grows with G*n (gpu), or ends at 32 query heads a KV head or G (cpu)
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads
/// \throws invalid_argument        the cache has no layout, a shape disagrees, an output overlaps, query heads are no multiple of
///                                 KV heads, a scale is negative or not finite, n is below 1 or beyond the tokens appended (gpu:
///                                 not checked; queries without a token in the tail attend to the arena alone); nothing was changed
/// \see    tests/unit/attend.cpp, docs/numerics.md
template <backend B, element U, std::size_t Rank, cache_on<B> Cache>
    requires(Rank == 2 || Rank == 3)
void attend(B const& on, view<U const, Rank, B::memory_space> queries, Cache const& over,
    std::type_identity_t<attend_options<B>> const& options, view<U, Rank, B::memory_space> output,
    view<float, Rank - 1, B::memory_space> lse)
{
    auto const cache = over.view();
    auto const rows  = detail::with_tokens<3>(queries);
    index_t const n  = rows.extent(1);
    expects(n >= 1, "attend: queries [H*G, n, D] are of ", n, " tokens; there must be at least 1");
    sequence_view<typename decltype(cache)::element_type, B::memory_space> const one[]{{cache, n}};
    detail::attend_sequences(
        on, rows, std::span{one}, options, detail::with_tokens<3>(output), detail::with_tokens<2>(lse));
}

/// Attention of a batch: several sequences at once, each over its own cache, as engines with continuous batching decode.
/// Gives the bits of a call for each sequence with its part of the queries, without their barriers and launches.
///
/// \param on              backend: threads, scratch
/// \param[in]  queries    [H*G, n, D]   queries of one sequence after another, n in all. An engine's [n, H*G, D] is a
///                                     choice of strides
/// \param[in]  sequences  all with the same query heads and head dimensions; numbers of tokens and rungs may differ
/// \param[in]  options    scale, if not the caches'; sink logits, or keys elsewhere
/// \param[out] output     [H*G, n, Dv]
/// \param[out] lse        [H*G, n]
/// \cost   the cost of separate calls, with all heads of all sequences side by side. gpu: two launches for up to 48 neighbours
///         whose caches are laid out alike (`cache_layout`, with any window); no copies to the device
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \throws invalid_argument   the errors of one token, naming the sequence; or n is not the sum of the sequences' queries
template <backend B, class Sequence, element U>
    requires std::same_as<std::remove_const_t<Sequence>,
        sequence_view<typename decltype(Sequence::cache)::element_type, B::memory_space>>
void attend(B const& on, in_view<U, 3, B> queries, std::span<Sequence> sequences,
    std::type_identity_t<attend_options<B>> const& options, out_view<U, 3, B> output, out_view<float, 2, B> lse)
{
    index_t sum = 0;
    for (std::size_t i = 0; i < sequences.size(); ++i)
    {
        expects(sequences[i].queries >= 0, "attend: sequence ", i, ": queries is ", sequences[i].queries,
            "; it must not be negative");
        sum = checked_add(sum, sequences[i].queries);
    }
    expects(sum == queries.extent(1), "attend: queries [H*G, n, D] are of ", queries.extent(1),
        " tokens, those of the sequences of ", sum);
    detail::attend_sequences(on, queries, std::span<Sequence const>{sequences}, options, output, lse);
}

} // namespace MDKV_NAMESPACE
