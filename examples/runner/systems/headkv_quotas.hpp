/// \file headkv_quotas.hpp: head scores become capacities in tokens (HeadKV) or quotas in bytes (MixedDimKV-H; arXiv 2603.20616, section 4.4)
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "head_scores.hpp"
#include "quotas.hpp"

namespace runner
{

namespace detail
{

/// Python's a // b for floats, with a >= 0 and b > 0. For 110 // 1.1 the floor of the rounded quotient would be 100; but
/// 1.1, a little larger in binary, goes into 110 only 99 times.
[[nodiscard]] inline double floor_quotient(double a, double b)
{
    double const quotient = (a - std::fmod(a, b)) / b;
    double const whole    = std::floor(quotient);
    return quotient - whole > 0.5 ? whole + 1 : whole;
}

[[nodiscard]] inline double round_half_to_even(double value)
{
    double const whole = std::floor(value);
    double const rest  = value - whole;
    if (rest != 0.5) { return rest < 0.5 ? whole : whole + 1; }
    return std::fmod(whole, 2) == 0 ? whole : whole + 1;
}

inline void expects_scores(char const* caller, head_scores const& scores, double beta)
{
    mdkv::expects(scores.layers >= 1 && scores.heads >= 1 && std::ssize(scores.mean) == scores.layers * scores.heads,
        caller, ": scores has ", scores.mean.size(), " values for ", scores.layers, " layers of ", scores.heads,
        " heads");
    mdkv::expects(std::isfinite(beta) && beta >= 1, caller, ": beta is ", beta, "; it must be at least 1");
}

} // namespace detail

/// Every query head's share, [layers, heads], adding up to 1: scores over their sum.
/// \throws mdkv::invalid_argument   a score is negative or not finite, or all are 0
[[nodiscard]] inline std::vector<double> head_shares(head_scores const& scores)
{
    detail::expects_scores("head_shares", scores, 1);
    std::vector<double> shares = scores.mean;
    double sum                 = 0;
    for (std::size_t i = 0; i < shares.size(); ++i)
    {
        mdkv::expects(std::isfinite(shares[i]) && shares[i] >= 0, "head_shares: scores.mean[", i, "] is ", shares[i],
            "; it must be finite and not negative");
        sum += shares[i];
    }
    mdkv::expects(
        std::isfinite(sum) && sum > 0, "head_shares: the scores add up to ", sum, "; there is nothing to share by");
    for (double& share : shares) { share /= sum; }
    return shares;
}

/// HeadKV's rule (FYYFU/HeadKV, headkv/snapkv_utils.py, ReasonSnapKVCluster): of b = kv_size - window tokens each head
/// keeps b - b // beta for sure. The remaining tokens of all heads of the model are one pool, shared by score. Every
/// capacity is rounded for itself, half to even, so the total differs from b per head by some tokens: that is the authors'
/// rule, not corrected here. The window comes on top.
///
/// \param beta   1: everything is shared by score; larger: more equal (the authors sweep 1.005 to 10)
/// \return   [layers, heads] past tokens of every query head
/// \throws mdkv::invalid_argument   naming the parameter out of range, and what head_shares throws
[[nodiscard]] inline std::vector<mdkv::index_t> headkv_capacities(
    head_scores const& scores, std::int64_t kv_size, std::int64_t window, double beta = 1.1)
{
    detail::expects_scores("headkv_capacities", scores, beta);
    mdkv::expects(window >= 0, "headkv_capacities: window is ", window, "; it must not be negative");
    mdkv::expects(kv_size > window && kv_size <= std::int64_t{1} << 32, "headkv_capacities: kv_size is ", kv_size,
        "; it must be above the window of ", window, " and at most 2^32");
    auto const past     = static_cast<double>(kv_size - window);
    double const pooled = detail::floor_quotient(past, beta);
    double const pool   = pooled * static_cast<double>(scores.mean.size());
    std::vector<mdkv::index_t> capacities;
    for (double const share : head_shares(scores))
    {
        double const tokens = share * pool + (past - pooled);
        capacities.push_back(static_cast<mdkv::index_t>(detail::round_half_to_even(tokens)));
    }
    return capacities;
}

/// Capacities of the cached heads if `group` query heads share each: their mean, rounded half to even, by the rule of
/// KVCache-Factory's kv_head mode. The bytes shrink by the group.
/// \throws mdkv::invalid_argument   the group does not divide the heads
[[nodiscard]] inline std::vector<mdkv::index_t> headkv_capacities_of_kv_heads(
    std::span<mdkv::index_t const> query_heads, std::int64_t group)
{
    mdkv::expects(group >= 1, "headkv_capacities_of_kv_heads: group is ", group, "; it must be at least 1");
    auto const members = static_cast<std::size_t>(group);
    mdkv::expects(query_heads.size() % members == 0, "headkv_capacities_of_kv_heads: ", query_heads.size(),
        " query heads cannot be cut into groups of ", group);
    std::vector<mdkv::index_t> capacities;
    for (std::size_t q = 0; q < query_heads.size(); q += members)
    {
        auto const own   = query_heads.subspan(q, members);
        double const sum = static_cast<double>(std::accumulate(own.begin(), own.end(), mdkv::index_t{0}));
        capacities.push_back(static_cast<mdkv::index_t>(detail::round_half_to_even(sum / static_cast<double>(group))));
    }
    return capacities;
}

/// MixedDimKV-H: two parts, one equal and one by score, of all bytes the model's heads may spend on tokens and
/// projections, exact to the byte. Bytes that a head cannot use go to other heads.
///
/// \param group            query heads that share a cached head, whose score is the sum of their scores
/// \param total_bytes      bytes of all cached heads of all layers together, windows not counted
/// \param capacity_bytes   [layers, heads / group] the most bytes each cached head can use
/// \return   [layers, heads / group] adding up to total_bytes, or to all capacities if their sum is less
/// \throws mdkv::invalid_argument   naming the parameter out of range, and what head_shares throws
[[nodiscard]] inline std::vector<mdkv::index_t> mixed_head_quotas(head_scores const& scores, std::int64_t group,
    mdkv::index_t total_bytes, std::span<mdkv::index_t const> capacity_bytes, double beta = 1.1)
{
    detail::expects_scores("mixed_head_quotas", scores, beta);
    mdkv::expects(group >= 1 && scores.heads % group == 0, "mixed_head_quotas: group is ", group,
        ", which does not divide the ", scores.heads, " query heads");
    auto const members       = static_cast<std::size_t>(group);
    std::size_t const cached = scores.mean.size() / members;
    mdkv::expects(capacity_bytes.size() == cached, "mixed_head_quotas: capacity_bytes has ", capacity_bytes.size(),
        " values for ", cached, " cached heads");
    mdkv::expects(total_bytes >= 0, "mixed_head_quotas: total_bytes is ", total_bytes, "; it must not be negative");

    std::vector<double> const shares = head_shares(scores);
    std::vector<double> weights(cached, (1 - 1 / beta) / static_cast<double>(cached));
    for (std::size_t q = 0; q < shares.size(); ++q) { weights[q / members] += shares[q] / beta; }
    std::vector<mdkv::index_t> quotas(cached);
    split_exactly(total_bytes, weights, quotas);
    static_cast<void>(spread_surplus(quotas, capacity_bytes)); // bytes left over cannot be used by any head
    return quotas;
}

} // namespace runner
