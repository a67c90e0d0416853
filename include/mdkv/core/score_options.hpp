/// \file score_options.hpp: options of score: the queries' mask and weights, known log-sum-exps, the norm over rows.
#pragma once

#include <mdkv/core/ground.hpp>

#include <optional>

namespace MDKV_NAMESPACE
{

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

/// Options of score: position and weights of the queries, log-sum-exps that are known, the norm over rows.
template <backend B>
struct score_options
{
    float scale = 0.0F; ///< factor of q.k; 0 means 1/sqrt(D)

    /// Place of the first query among the N tokens and the W window tokens after them: the causal mask of query i ends
    /// at position first_query + i. Unset: the queries are the last ones, N + W - Q. N + W or more: no mask.
    std::optional<index_t> first_query = std::nullopt;

    /// [H*G, Q]  natural logarithm of sum exp(scale*q.k) over the unmasked keys of each query, as a flash prefill
    /// computes it. Saves a third of the work. A NaN, a value beyond +-1e30 or one far too low makes its head's losses NaN or
    /// infinite (docs/numerics.md), which `allocate` reports; other wrong values are not noticed. Unset: computed.
    std::optional<in_view<float, 2, B>> lse = std::nullopt;

    /// [H*G, Q]  natural logarithm of sum exp(scale*q.k) over further keys that each query sees, e.g. tokens kept elsewhere,
    /// or a replay's own: these keys are never compressed and take part in every softmax. [H*G, 1]: the same for all queries of a
    /// head, e.g. sink logits. -infinity stands for none; a NaN or a value above 1e30 makes its head's losses NaN. `lse`, if given,
    /// must include them.
    std::optional<in_view<float, 2, B>> lse_elsewhere = std::nullopt;

    float early_weight = 1.0F; ///< factor of P and |P' - P| of the queries before the last `question` ones
    index_t question   = 32;   ///< more queries than these let the question weigh more than the text before it

    /// [H, 3, D]  channels from fit_channels, for the noise of codes. Unset: fitted to the keys and queries of this call.
    std::optional<in_view<float, 3, B>> channels = std::nullopt;

    row_norm norm = row_norm::sum; ///< over the rows of a head

    /// Number of additional queries in each query head, with weight 1 and uniform attention: P = P' = 1/(N+W) for every
    /// token. They stand for later queries, whose attention lies elsewhere; a large budget would otherwise
    /// store tokens of little attention in few bits. Finite, >= 0; for `maximum` any number above 0 is as good as one.
    float uniform_queries = 0.0F;
};

} // namespace MDKV_NAMESPACE
