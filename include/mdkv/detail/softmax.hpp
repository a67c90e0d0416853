/// \file softmax.hpp: the scale of logits, and the state of a softmax over a set of keys, which can be merged with another set's (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/float_environment.hpp>
#include <mdkv/core/types.hpp>

#include <cmath>
#include <limits>

namespace MDKV_NAMESPACE::detail
{

inline constexpr float ln_2   = 0.693147180559945309F;
inline constexpr float log2_e = 1.44269504088896341F;

/// The scale for logits in base 2, of the one that an option or a cache gives; 0 means 1/sqrt(D).
[[nodiscard]] inline float scale_in_base_two(float given, index_t dim) noexcept
{
    float_environment const standard;
    return log2_e * (given > 0.0F ? given : 1.0F / std::sqrt(static_cast<float>(dim)));
}

/// Log-sum-exp of no keys. A constant: device code may not call numeric_limits.
inline constexpr float empty_lse = -std::numeric_limits<float>::infinity();

/// Factors by which two unnormalised sums are multiplied before they are added.
struct merge_factors
{
    float first  = 1.0F;
    float second = 1.0F;
};

/// Largest exponent seen and the sum of 2^(x - largest): logits are kept in base 2, where the exponential is cheapest.
struct softmax_state
{
    float largest = empty_lse;
    float sum     = 0.0F;

    [[nodiscard]] MDKV_HD bool empty() const noexcept { return sum == 0.0F; }

    /// log(sum of exp): natural logarithm; -infinity if nothing was seen.
    [[nodiscard]] MDKV_HD float lse() const noexcept { return empty() ? empty_lse : ln_2 * (largest + log2f(sum)); }

    /// Takes in another state and returns the factors of the weighted sums that belong to the two. An empty side
    /// contributes nothing, and two empty ones stay empty: no infinity is subtracted from another.
    MDKV_HD merge_factors merge(softmax_state const& other) noexcept
    {
        if (other.empty()) { return {1.0F, 0.0F}; }
        float const top = largest < other.largest ? other.largest : largest;
        merge_factors const by{exp2f(largest - top), exp2f(other.largest - top)};
        sum     = sum * by.first + other.sum * by.second;
        largest = top;
        return by;
    }
};

/// The state of keys that have this natural log-sum-exp; -infinity stands for none.
[[nodiscard]] MDKV_HD inline softmax_state softmax_of(float lse) noexcept
{
    return lse == empty_lse ? softmax_state{} : softmax_state{log2_e * lse, 1.0F};
}

/// Weights of two segments' normalised outputs, and the log-sum-exp of both.
struct lse_merge
{
    float first  = 0.0F;
    float second = 0.0F;
    float lse    = empty_lse;
};

/// Merges natural log-sum-exps; -infinity stands for an empty segment, and two empty segments make an empty one.
[[nodiscard]] MDKV_HD inline lse_merge merge_lse(float a, float b) noexcept
{
    if (b == empty_lse) { return {a == empty_lse ? 0.0F : 1.0F, 0.0F, a}; }
    if (a == empty_lse) { return {0.0F, 1.0F, b}; }
    float const top = a < b ? b : a;
    float const x   = expf(a - top);
    float const y   = expf(b - top);
    return {x / (x + y), y / (x + y), top + logf(x + y)};
}

} // namespace MDKV_NAMESPACE::detail
