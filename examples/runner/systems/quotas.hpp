/// \file quotas.hpp: shares of a budget for each head, exact to the byte, for MixedDimKV-H (arXiv 2603.20616, section 4.4)
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

namespace runner
{

/// Splits `total` in proportion to the weights, by largest remainder: every part is its share rounded down, and the
/// remaining units go one by one to the largest remainders, ties to the lower index. The parts add up to `total`
/// exactly. Weights that are all zero count as equal.
/// \throws invalid_argument   the sizes differ, the total or a weight is negative, a weight or their sum is not finite,
///         or the total is positive and there are no parts
inline void split_exactly(mdkv::index_t total, std::span<double const> weights, std::span<mdkv::index_t> out)
{
    mdkv::expects(total >= 0, "split_exactly: total is ", total, "; it must not be negative");
    mdkv::expects(
        weights.size() == out.size(), "split_exactly: ", weights.size(), " weights for ", out.size(), " parts");
    mdkv::expects(total == 0 || !weights.empty(), "split_exactly: ", total, " cannot be split into no parts");
    double sum = 0;
    for (std::size_t i = 0; i < weights.size(); ++i)
    {
        mdkv::expects(std::isfinite(weights[i]) && weights[i] >= 0, "split_exactly: weights[", i, "] is ", weights[i],
            "; it must be finite and not negative");
        sum += weights[i];
    }
    mdkv::expects(std::isfinite(sum), "split_exactly: the weights add up to ", sum);

    std::vector<double> remainder(weights.size());
    std::vector<std::size_t> order;
    mdkv::index_t missing = total;
    for (std::size_t i = 0; i < weights.size(); ++i)
    {
        double const part  = sum > 0 ? weights[i] / sum : 1.0 / static_cast<double>(weights.size());
        double const share = static_cast<double>(total) * part;
        // The double of a total beyond 53 bits may exceed it.
        out[i]       = share >= static_cast<double>(missing) ? missing : static_cast<mdkv::index_t>(share);
        remainder[i] = share - std::floor(share);
        missing -= out[i];
        if (part > 0) { order.push_back(i); }
    }
    std::stable_sort(
        order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return remainder[a] > remainder[b]; });
    // More units remain than parts only if a total beyond 53 bits was rounded.
    auto const parts = static_cast<mdkv::index_t>(order.size());
    for (std::size_t k = 0; k < order.size(); ++k)
    {
        out[order[k]] += missing / parts + (static_cast<mdkv::index_t>(k) < missing % parts ? 1 : 0);
    }
}

/// Moves surplus above a head's capacity to the other heads, in proportion to their quotas (equally if these are 0), until
/// no quota exceeds its capacity. Returns the surplus beyond all capacities; quotas and surplus keep their sum. Allocates
/// vectors of one entry a head, like split_exactly: both are for the host, before any stage runs.
///
/// \param[in,out] quotas    [H]
/// \param[in]     capacity  [H]  the most each head can use
/// \throws invalid_argument   the sizes differ, a number is negative (nothing was changed)
[[nodiscard]] inline mdkv::index_t spread_surplus(
    std::span<mdkv::index_t> quotas, std::span<mdkv::index_t const> capacity)
{
    mdkv::expects(quotas.size() == capacity.size(), "spread_surplus: ", quotas.size(), " quotas and ", capacity.size(),
        " capacities");
    mdkv::index_t total = 0;
    for (std::size_t h = 0; h < quotas.size(); ++h)
    {
        mdkv::expects(quotas[h] >= 0, "spread_surplus: quotas[", h, "] is ", quotas[h], "; it must not be negative");
        mdkv::expects(
            capacity[h] >= 0, "spread_surplus: capacity[", h, "] is ", capacity[h], "; it must not be negative");
        total = mdkv::checked_add(total, quotas[h]);
    }
    while (true) // every round but the last fills at least one head
    {
        mdkv::index_t surplus = 0;
        std::vector<std::size_t> open;
        std::vector<double> weights;
        for (std::size_t h = 0; h < quotas.size(); ++h)
        {
            mdkv::index_t const over = std::max(quotas[h] - capacity[h], mdkv::index_t{0});
            surplus += over;
            quotas[h] -= over;
            if (quotas[h] == capacity[h]) { continue; }
            open.push_back(h);
            weights.push_back(static_cast<double>(quotas[h]));
        }
        if (surplus == 0 || open.empty()) { return surplus; }
        std::vector<mdkv::index_t> extra(open.size());
        split_exactly(surplus, weights, extra);
        for (std::size_t k = 0; k < open.size(); ++k) { quotas[open[k]] += extra[k]; }
    }
}

} // namespace runner
