/// \file keep.hpp: the past tokens a selecting policy keeps: each head's best, up to the head's count
#pragma once

#include <mdkv/core/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "top.hpp"

namespace runner
{

/// \param kept   past tokens of each head: the policy's KV size less its window
/// \return [heads]
[[nodiscard]] inline std::vector<std::int64_t> uniform_counts(std::int64_t heads, std::int64_t past, std::int64_t kept)
{
    return std::vector<std::int64_t>(static_cast<std::size_t>(heads), std::clamp<std::int64_t>(kept, 0, past));
}

/// Rungs of mdkv::evict_ratios, [heads, past]: 1 for the counts[h] highest scores of head h, 0 for the others. A count
/// above the number of tokens keeps all of them: the surplus is lost, as in the policies' own code.
///
/// \param scores   [heads, past], higher is kept; among equal scores the earlier token
/// \param counts   [heads]
/// \throws mdkv::invalid_argument   the heads do not divide the scores, or a count is negative
[[nodiscard]] inline std::vector<std::uint8_t> keep_best(
    std::vector<float> const& scores, std::vector<std::int64_t> const& counts)
{
    std::size_t const heads = counts.size();
    mdkv::expects(heads > 0 ? scores.size() % heads == 0 : scores.empty(), "keep_best: ", scores.size(),
        " scores are no whole number of tokens for ", heads, " heads");
    for (std::size_t h = 0; h < heads; ++h)
    {
        mdkv::expects(
            counts[h] >= 0, "keep_best: the count of head ", h, " is ", counts[h], "; it must not be negative");
    }
    std::size_t const past = heads == 0 ? 0 : scores.size() / heads;
    std::vector<std::uint8_t> rungs(scores.size(), std::uint8_t{0});
    for (std::size_t h = 0; h < heads; ++h)
    {
        for (std::int64_t const token : top_indices(std::span{scores}.subspan(h * past, past), counts[h]))
        {
            rungs[h * past + static_cast<std::size_t>(token)] = 1;
        }
    }
    return rungs;
}

} // namespace runner
