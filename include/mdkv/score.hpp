/// \file score.hpp: contract of score: what every token would lose at every rung (arXiv 2603.20616, section 4.2, algorithm 1).
#pragma once

#include <mdkv/basis.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/contract.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>

namespace mdkv
{

/// The loss of quantised rungs that keep all coordinates.
enum class quantisation_loss : std::uint8_t
{
    bound,     ///< as that of every rung, the paper's bound: sum |P' - P| |v| + P |v - v'|
    value_only ///< sum P |v - v'|, because the first term overstates what keys lose; costs no products with k'
};

template <backend B>
struct score_options
{
    /// Factor of q.k; 0 means 1/sqrt(D).
    float scale = 0.0F;

    /// Place of the first query among the N tokens and the W window tokens after them: query i sees the keys up to
    /// place first_query + i. Unset: the queries are the last ones, N + W - Q. N + W or more: they see every key.
    std::optional<index_t> first_query = std::nullopt;

    /// [H*G, Q]  natural logarithm of sum exp(scale*q.k) over all keys each query sees, as a flash prefill has it at
    /// hand. Saves a third of the work. Unset: computed.
    std::optional<in_view<float, 2, B>> lse = std::nullopt;

    /// [Q]  how much each query counts, the same for every query head: its part of every sum is multiplied by it. >= 0.
    /// Unset: 1. With more queries than the window's, lets the question weigh more than what was read before it.
    std::optional<in_view<float, 1, B>> query_weights = std::nullopt;

    quantisation_loss quantisation = quantisation_loss::bound;
};

/// Loss of every token at every rung: the paper's bound on the change of the window's attention output if all tokens were
/// stored at that rung, split by token. P is the softmax of the queries over all keys they see, P' the same with the N
/// keys replaced by what would be stored of them; summed over the Q queries of the G query heads:
///   dropped               sum 2 P |v|
///   projected, quantised  sum |P' - P| |v| + P |v - v'|, k' and v' as they would be read again; see quantisation_loss
///   full                  0
///
/// \param on                backend: threads, scratch
/// \param[in]  queries      [H*G, Q, D]  after position encoding; rows of one KV head are neighbours
/// \param[in]  keys         [H, N, D]    the tokens that may be compressed, same encoding
/// \param[in]  values       [H, N, Dv]
/// \param[in]  window_keys  [H, W, D]    kept as they are; follow the N tokens; W may be 0
/// \param[in]  key_basis    [H, D, D]    orthonormal rows, as fit_basis writes them, or the two of fit_query_aware_basis;
///                                       not read without projected rungs
/// \param[in]  value_basis  [H, Dv, Dv]  orthonormal rows
/// \param[in]  ratios       the rungs
/// \param[in]  options      scale, place and weights of the queries, known log-sum-exps, rule for quantised rungs
/// \param[out] loss         [H, R, N]    >= 0, in units of |v|; exactly 0 at the full rung
/// \pre    Q >= 1; keys, values, queries finite (see `expects_finite`)
/// \cost   O(H*G*Q*N*(D + r + s)) multiply-adds twice (once of them less with lse given), r the widest plain projected
///         rung, s the coordinates of all quantised rungs whose loss has a first term; keys read twice, values once;
///         scratch O(H*G*Q*D + threads*R*D), never G*Q x N
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads
/// \throws invalid_argument        a shape disagrees, a rung is no whole number of coordinates, an output overlaps
/// \throws insufficient_workspace  naming the size needed; nothing was changed in either case
/// \see    tests/score.cpp, docs/numerics.md (accumulation, tolerance against the oracle)
template <backend B, element T, std::size_t R>
void score(B const& on, in_view<T, 3, B> queries, in_view<T, 3, B> keys, in_view<T, 3, B> values,
    in_view<T, 3, B> window_keys, std::type_identity_t<key_bases<B>> key_basis, in_view<float, 3, B> value_basis,
    ratio_set<R> const& ratios, score_options<B> options, out_view<float, 3, B> loss)
{
    static_assert(
        requires { score_impl(on, queries, keys, values, window_keys, key_basis, value_basis, ratios, options, loss); },
        MDKV_DETAIL_NO_IMPLEMENTATION(score, score));
    index_t const heads     = keys.extent(0);
    index_t const tokens    = keys.extent(1);
    index_t const dim       = keys.extent(2);
    index_t const value_dim = values.extent(2);
    bool const dry          = detail::dry_run(on);
    expects(heads == 0 || queries.extent(0) % heads == 0, "score: queries [H*G, Q, D] has ", queries.extent(0),
        " query heads, which ", heads, " KV heads do not divide");
    expects(heads == 0 || queries.extent(0) >= heads, "score: queries [H*G, Q, D] has ", queries.extent(0),
        " query heads for ", heads, " KV heads");
    expects(
        heads == 0 || queries.extent(1) >= 1, "score: queries [H*G, Q, D] has Q = 0; without queries there is no loss");
    expects(heads == 0 || (dim >= 1 && value_dim >= 1), "score: a head dimension is 0");
    expects(options.scale >= 0.0F, "score: scale is ", options.scale, "; it must not be negative");
    expects(!options.first_query || *options.first_query >= 0, "score: first_query is ",
        options.first_query.value_or(0), "; it must not be negative");
    expects(options.first_query || queries.extent(1) <= tokens + window_keys.extent(1), "score: ", queries.extent(1),
        " queries are more than the ", tokens, " + ", window_keys.extent(1),
        " tokens; say where they start (first_query)");
    if (heads > 0)
    {
        ratios.expects_fit("key", dim);
        ratios.expects_fit("value", value_dim);
    }

    detail::argument const q{"score", "queries", queries};
    detail::argument const k{"score", "keys", keys};
    detail::argument const v{"score", "values", values};
    detail::argument const w{"score", "window_keys", window_keys};
    detail::argument const uk{"score", "key_basis", key_basis.of_keys};
    detail::argument const uq{"score", "key_basis.of_queries", key_basis.of_queries};
    detail::argument const uv{"score", "value_basis", value_basis};
    detail::argument const l{"score", "loss", loss};
    q.shape({queries.extent(0), queries.extent(1), dim}, "H*G,Q,D").data(dry).apart_from_scratch(on);
    k.data(dry).apart_from_scratch(on);
    v.shape({heads, tokens, value_dim}, "H,N,Dv").data(dry).apart_from_scratch(on);
    w.shape({heads, window_keys.extent(1), dim}, "H,W,D").data(dry).apart_from_scratch(on);
    if (ratios.widest_projection(dim) > 0)
    {
        uk.shape({heads, dim, dim}, "H,D,D").data(dry).aligned().apart_from_scratch(on);
        uq.shape({heads, dim, dim}, "H,D,D").data(dry).aligned().apart_from_scratch(on);
        uv.shape({heads, value_dim, value_dim}, "H,Dv,Dv").data(dry).aligned().apart_from_scratch(on);
    }
    l.shape({heads, static_cast<index_t>(ratios.size()), tokens}, "H,R,N").data(dry).aligned().unique();
    l.apart_from_scratch(on).apart_from(q).apart_from(k).apart_from(v).apart_from(w).apart_from(uk).apart_from(uq);
    l.apart_from(uv);
    if (options.query_weights)
    {
        detail::argument const weights{"score", "options.query_weights", *options.query_weights};
        weights.shape({queries.extent(1)}, "Q").data(dry).aligned().apart_from_scratch(on);
        l.apart_from(weights);
    }
    if (options.lse)
    {
        detail::argument const s{"score", "options.lse", *options.lse};
        s.shape({queries.extent(0), queries.extent(1)}, "H*G,Q").data(dry).aligned().apart_from_scratch(on);
        l.apart_from(s);
    }
    score_impl(on, queries, keys, values, window_keys, key_basis, value_basis, ratios, options, loss);
}

} // namespace mdkv
