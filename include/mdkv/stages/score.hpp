/// \file score.hpp: contract of score: the loss of every token at every rung (arXiv 2603.20616, section 4.2, algorithm 1).
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/score_options.hpp>
#include <mdkv/detail/check.hpp>

namespace MDKV_NAMESPACE
{

namespace detail
{

/// The checks of score.
template <backend B, element T, element U>
void expects_score(B const& on, in_view<U, 3, B> queries, in_view<T, 3, B> keys, in_view<T, 3, B> values,
    in_view<T, 3, B> window_keys, in_view<float, 3, B> key_basis, in_view<float, 3, B> value_basis,
    ratio_set const& ratios, score_options<B> const& options, out_view<float, 3, B> loss)
{
    index_t const heads       = keys.extent(0);
    index_t const query_heads = queries.extent(0);
    index_t const per_head    = queries.extent(1);
    index_t const tokens      = keys.extent(1);
    index_t const dim         = keys.extent(2);
    index_t const value_dim   = values.extent(2);
    expects(heads == 0 || (query_heads >= heads && query_heads % heads == 0), "score: queries [H*G, Q, D] has ",
        query_heads, " query heads, which ", heads, " KV heads do not divide");
    expects(heads == 0 || per_head >= 1, "score: queries [H*G, Q, D] has Q = 0; without queries there is no loss");
    expects(heads == 0 || (dim >= 1 && value_dim >= 1), "score: head dimensions are ", dim, " and ", value_dim,
        "; they must be at least 1");
    expects_not_negative("score", "scale", options.scale);
    expects_not_negative("score", "uniform_queries", options.uniform_queries);
    expects_not_negative("score", "early_weight", options.early_weight);
    expects(options.question >= 0, "score: question is ", options.question, "; it must not be negative");
    expects(!options.first_query || *options.first_query >= 0, "score: first_query is ",
        options.first_query.value_or(0), "; it must not be negative");
    expects(options.first_query || per_head <= tokens + window_keys.extent(1), "score: ", per_head,
        " queries are more than the ", tokens, " + ", window_keys.extent(1),
        " tokens; say where they start (first_query)");
    if (heads > 0)
    {
        ratios.expects_fit("key", dim);
        ratios.expects_fit("value", value_dim);
    }
    checks all{on, "score"};
    all.rows("queries", queries, {query_heads, per_head, dim}, "H*G,Q,D");
    all.rows("keys", keys, {heads, tokens, dim}, "H,N,D");
    all.rows("values", values, {heads, tokens, value_dim}, "H,N,Dv");
    all.rows("window_keys", window_keys, {heads, window_keys.extent(1), dim}, "H,W,D");
    if (ratios.any_projected())
    {
        all.in("key_basis", key_basis, {heads, dim, dim}, "H,D,D");
        all.in("value_basis", value_basis, {heads, value_dim, value_dim}, "H,Dv,Dv");
    }
    all.in("options.channels", options.channels, {heads, 3, dim}, "H,3,D");
    all.in("options.lse", options.lse, {query_heads, per_head}, "H*G,Q");
    all.of_queries("options.lse_elsewhere", options.lse_elsewhere, query_heads, per_head, "H*G,Q");
    all.out("loss", loss, {heads, static_cast<index_t>(ratios.size()), tokens}, "H,R,N");
}

} // namespace detail

/// Loss of every token at every rung: how far the queries' attention output may move if all tokens were stored at that
/// rung, split by token (formulas and symbols: docs/method.md, "Losses"). P is a token's attention, d its value's length or,
/// if the set has codes of whole vectors, its distance from the mean value that attention weighs:
///
///     dropped                 2 ||P|| d
///     projected               ||P' - P|| d + ||P|| |v - v'|: the paper's bound
///     codes of whole vectors  ||P|| sqrt(|v - v'|^2 + noise of keys^2), as codes of projected coordinates have it, too
///     full                    0
///
/// A loss is at least the norm of the rows' own losses, and equal to it for `sum`.
///
/// \param on                backend: threads, scratch
/// \param[in]  queries      [H*G, Q, D]  after position encoding, of any element type U; rows of one KV head are neighbours
/// \param[in]  keys         [H, N, D]    the tokens that may be compressed, same encoding
/// \param[in]  values       [H, N, Dv]
/// \param[in]  window_keys  [H, W, D]    never compressed; follow the N tokens; W may be 0
/// \param[in]  key_basis    [H, D, D]    orthonormal rows, as fit_basis writes them; not read without projected rungs
/// \param[in]  value_basis  [H, Dv, Dv]  orthonormal rows
/// \param[in]  ratios       the rungs
/// \param[in]  options      scale, positions and weights of the queries, known log-sum-exps, the norm over rows
/// \param[out] loss         [H, R, N]    >= 0, in units of |v|; exactly 0 at the full rung
/// \pre    Q >= 1; D, Dv, Q and G*Q at most 2^24; keys, values, queries finite (see `expects_finite`)
/// \cost   O(H*G*Q*N*(D + r)) multiply-adds twice (D once if lse is given), r the coordinates of the widest projected
///         rung; keys read twice, values once (twice, and keys three times, with codes of whole vectors); scratch
///         O(H*G*Q*D + threads*(D + R)), with codes H*N*Dv/512 more, without a rung that has no basis H*N; G*Q*N only for heads
///         whose logits take at most 1 MiB each (cpu)
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads
/// \throws invalid_argument        a shape disagrees, a rung is no whole number of coordinates, an output overlaps; nothing
///                                 was changed
/// \see    tests/unit/stages/score.cpp, docs/numerics.md (accumulation, tolerance against the oracle)
template <backend B, element T, element U>
void score(B const& on, in_view<U, 3, B> queries, in_view<T, 3, B> keys, in_view<T, 3, B> values,
    in_view<T, 3, B> window_keys, in_view<float, 3, B> key_basis, in_view<float, 3, B> value_basis,
    ratio_set const& ratios, score_options<B> options, out_view<float, 3, B> loss)
{
    static_assert(
        requires { score_impl(on, queries, keys, values, window_keys, key_basis, value_basis, ratios, options, loss); },
        MDKV_DETAIL_NO_IMPLEMENTATION(score, score));
    detail::expects_score(on, queries, keys, values, window_keys, key_basis, value_basis, ratios, options, loss);
    score_impl(on, queries, keys, values, window_keys, key_basis, value_basis, ratios, options, loss);
}

} // namespace MDKV_NAMESPACE
