/// \file score.hpp: contract of score: the loss of every token at every rung (arXiv 2603.20616, section 4.2, algorithm 1).
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/check.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace mdkv::inline MDKV_MACHINE
{

/// The loss of quantised rungs that keep all coordinates. Other rungs, the paper's among them, always have the bound.
enum class quantisation_loss : std::uint8_t
{
    bound, ///< the paper's bound, which other rungs have, too: ||P' - P|| |v| + ||P|| |v - v'|. Here k' are codes
           ///< before centring; pack centres keys before coding, so real losses are smaller
    noise ///< ||P|| sqrt(|v - v'|^2 + key_noise^2 e^x (e^x - 1) |v|^2): x is the variance of a logit whose key is off by up
    ///< to half a step of its codes, uniformly, and e^x (e^x - 1) its weight's variance; saves the products with k'
};

/// Factor of the error by a key's codes (the spread of the token's weight) beside the error of its value. Less than 1:
/// the errors of many tokens add up as squares, while losses add up as norms (docs/lab/2026-11/quality.md).
inline constexpr float key_noise = 0.25F;

/// How the rows of a head, its G*Q queries, become one loss: a norm of their magnitudes x.
enum class row_norm : std::uint8_t
{
    sum,       ///< the paper's: sum x
    euclidean, ///< sqrt(sum x^2), which is sqrt(G*Q) times the root mean square
    maximum    ///< max x: the largest row decides
};

template <backend B>
struct score_options
{
    /// Factor of q.k; 0 means 1/sqrt(D).
    float scale = 0.0F;

    /// Place of the first query among the N tokens and the W window tokens after them: the causal mask of query i ends
    /// at place first_query + i. Unset: the queries are the last ones, N + W - Q. N + W or more: no mask.
    std::optional<index_t> first_query = std::nullopt;

    /// [H*G, Q]  natural logarithm of sum exp(scale*q.k) over the unmasked keys of each query, as a flash prefill
    /// computes it. Saves a third of the work. A query whose value is a NaN, not within +-1e30, or so low that a
    /// probability leaves float's range (2^128) makes its head's losses NaN or infinite at every rung but the full one,
    /// which `allocate` reports as non_finite_loss; other wrong values are not noticed. Unset: computed.
    std::optional<in_view<float, 2, B>> lse = std::nullopt;

    /// [H*G, Q]  natural logarithm of sum exp(scale*q.k) over further keys that each query sees, e.g. tokens kept elsewhere,
    /// or a replay's own: these keys are never compressed and take part in every softmax. -infinity stands for none; a value
    /// that is a NaN or above 1e30 makes its head's losses NaN. `lse`, if given, must include them.
    std::optional<in_view<float, 2, B>> lse_elsewhere = std::nullopt;

    /// [Q]  how much each query counts, the same for every query head: its P and |P' - P| are multiplied by it. >= 0.
    /// Unset: 1. With more queries than the window's, lets the question weigh more than the text before it.
    std::optional<in_view<float, 1, B>> query_weights = std::nullopt;

    quantisation_loss quantisation = quantisation_loss::noise;

    /// [H, 3, D]  channels from fit_channels, for the noise of codes. Unset: fitted to the keys and queries of this call.
    std::optional<in_view<float, 3, B>> channels = std::nullopt;

    row_norm over = row_norm::sum;

    /// Number of additional queries of weight 1 in each query head with uniform attention: P = P' = 1/(N+W) for every
    /// token. They stand for later queries, whose attention lies elsewhere; a large budget would otherwise
    /// store tokens of little attention in few bits. Finite, >= 0; for `maximum` any number above 0 is as good as one.
    float even_queries = 0.0F;
};

/// Loss of every token at every rung: the paper's bound on the change of the window's attention output if all tokens were
/// stored at that rung, split by token. P is the softmax of the queries over all keys they see, P' the same with the N
/// keys replaced by their stored form; ||x|| is the norm of x over the Q queries of the G query heads (`options.over`):
///
///     dropped                 2 ||P|| |v|
///     projected, quantised    ||P' - P|| |v| + ||P|| |v - v'|, k' and v' as read back
///     codes of whole vectors  see quantisation_loss
///     full                    0
///
/// By the triangle inequality a loss is at least the norm of the rows' own losses, and equal to it for `sum`.
///
/// Prefill can score chunk by chunk while it has the queries: `keys` and `values` are a chunk's, `window_keys` keys
/// that every row sees beside them (a prompt's first few), `first_query` N + W, `loss` the chunk's slice of a prompt's.
///
/// \param on                backend: threads, scratch
/// \param[in]  queries      [H*G, Q, D]  after position encoding, of any element type U; rows of one KV head are neighbours
/// \param[in]  keys         [H, N, D]    the tokens that may be compressed, same encoding
/// \param[in]  values       [H, N, Dv]
/// \param[in]  window_keys  [H, W, D]    never compressed; follow the N tokens; W may be 0
/// \param[in]  key_basis    [H, D, D]    orthonormal rows, as fit_basis writes them; not read without projected rungs
/// \param[in]  value_basis  [H, Dv, Dv]  orthonormal rows
/// \param[in]  ratios       the rungs
/// \param[in]  options      scale, place and weights of the queries, known log-sum-exps, rule for quantised rungs
/// \param[out] loss         [H, R, N]    >= 0, in units of |v|; exactly 0 at the full rung
/// \pre    Q >= 1; D, Dv, Q and G*Q at most 2^24; keys, values, queries finite (see `expects_finite`)
/// \cost   O(H*G*Q*N*(D + r + s)) multiply-adds twice (D once if lse is given), r the widest plain projected
///         rung, s the coordinates of all quantised rungs whose loss has a first term; keys read twice, values once;
///         scratch O(H*G*Q*D + threads*R*D); G*Q*N only for heads whose logits take
///         at most 1 MiB each (cpu)
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads
/// \throws invalid_argument        a shape disagrees, a rung is no whole number of coordinates, an output overlaps
/// \throws insufficient_workspace  naming the size needed; nothing was changed in either case
/// \see    tests/score.cpp, docs/numerics.md (accumulation, tolerance against the oracle)
template <backend B, element T, element U>
void score(B const& on, in_view<U, 3, B> queries, in_view<T, 3, B> keys, in_view<T, 3, B> values,
    in_view<T, 3, B> window_keys, in_view<float, 3, B> key_basis, in_view<float, 3, B> value_basis,
    ratio_set const& ratios, score_options<B> options, out_view<float, 3, B> loss)
{
    static_assert(
        requires { score_impl(on, queries, keys, values, window_keys, key_basis, value_basis, ratios, options, loss); },
        MDKV_DETAIL_NO_IMPLEMENTATION(score, score));
    index_t const heads       = keys.extent(0);
    index_t const query_heads = queries.extent(0);
    index_t const per_head    = queries.extent(1);
    index_t const tokens      = keys.extent(1);
    index_t const window      = window_keys.extent(1);
    index_t const dim         = keys.extent(2);
    index_t const value_dim   = values.extent(2);
    expects(heads == 0 || query_heads % heads == 0, "score: queries [H*G, Q, D] has ", query_heads,
        " query heads, which ", heads, " KV heads do not divide");
    expects(heads == 0 || query_heads >= heads, "score: queries [H*G, Q, D] has ", query_heads, " query heads for ",
        heads, " KV heads");
    expects(heads == 0 || per_head >= 1, "score: queries [H*G, Q, D] has Q = 0; without queries there is no loss");
    expects(heads == 0 || (dim >= 1 && value_dim >= 1), "score: head dimensions are ", dim, " and ", value_dim,
        "; they must be at least 1");
    detail::expects_not_negative("score", "scale", options.scale);
    detail::expects_not_negative("score", "even_queries", options.even_queries);
    expects(!options.first_query || *options.first_query >= 0, "score: first_query is ",
        options.first_query.value_or(0), "; it must not be negative");
    expects(options.first_query || per_head <= tokens + window, "score: ", per_head, " queries are more than the ",
        tokens, " + ", window, " tokens; say where they start (first_query)");
    if (heads > 0)
    {
        ratios.expects_fit("key", dim);
        ratios.expects_fit("value", value_dim);
    }
    detail::check all{on, "score"};
    all.rows("queries", queries, {query_heads, per_head, dim}, "H*G,Q,D");
    all.rows("keys", keys, {heads, tokens, dim}, "H,N,D");
    all.rows("values", values, {heads, tokens, value_dim}, "H,N,Dv");
    all.rows("window_keys", window_keys, {heads, window, dim}, "H,W,D");
    if (ratios.any_projected())
    {
        all.in("key_basis", key_basis, {heads, dim, dim}, "H,D,D");
        all.in("value_basis", value_basis, {heads, value_dim, value_dim}, "H,Dv,Dv");
    }
    all.in("options.query_weights", options.query_weights, {per_head}, "Q");
    all.in("options.channels", options.channels, {heads, 3, dim}, "H,3,D");
    all.in("options.lse", options.lse, {query_heads, per_head}, "H*G,Q");
    all.in("options.lse_elsewhere", options.lse_elsewhere, {query_heads, per_head}, "H*G,Q");
    all.out("loss", loss, {heads, static_cast<index_t>(ratios.size()), tokens}, "H,R,N");
    score_impl(on, queries, keys, values, window_keys, key_basis, value_basis, ratios, options, loss);
}

} // namespace mdkv::inline MDKV_MACHINE
