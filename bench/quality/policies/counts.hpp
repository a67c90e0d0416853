/// \file counts.hpp: how many past tokens each head of a layer keeps: a uniform number, or more for spread attention
#pragma once

#include <mdkv/core/error.hpp>

#include <algorithm>
#include <cmath>
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

struct adaptive_options
{
    /// Share of the uniform count that no head goes below. AdaKV's scripts set 0.2, its README says 0.5.
    double floor_ratio = 0.2;

    /// If true, each head's scores are weighted by the share of them that its best `kept` tokens hold; off in AdaKV's
    /// scripts.
    bool normalise = false;
};

/// AdaKV's counts (FFY0/AdaKV, adaptive_snapkv/monkeypatch/snapkv_utils.py): the heads * kept best scores of the layer are
/// counted by head. A head keeps its floor and 1 - floor_ratio of its count, rounded half to even. Like AdaKV, this does
/// not make up for roundings: the sum may be off by half a token a head. If `kept` exceeds the past, all tokens stay.
///
/// \param scores   [heads, past], comparable between heads
/// \param kept     past tokens of an average head
/// \return [heads]
/// \throws mdkv::invalid_argument   the heads do not divide the scores, the floor leaves [0, 1], or kept is negative
[[nodiscard]] inline std::vector<std::int64_t> adaptive_counts(
    std::vector<float> scores, std::int64_t heads, std::int64_t kept, adaptive_options options = {})
{
    auto const size = static_cast<std::int64_t>(scores.size());
    mdkv::expects(heads > 0 && size % heads == 0, "adaptive_counts: ", size,
        " scores are no whole number of tokens for ", heads, " heads");
    mdkv::expects(options.floor_ratio >= 0.0 && options.floor_ratio <= 1.0, "adaptive_counts: floor_ratio is ",
        options.floor_ratio, "; it must lie in [0, 1]");
    mdkv::expects(kept >= 0, "adaptive_counts: kept is ", kept, "; it must not be negative");
    std::int64_t const past = size / heads;
    if (kept > past) { return uniform_counts(heads, past, past); }

    if (options.normalise)
    {
        for (std::int64_t h = 0; h < heads; ++h)
        {
            auto const head =
                std::span{scores}.subspan(static_cast<std::size_t>(h * past), static_cast<std::size_t>(past));
            double best = 0;
            double all  = 0;
            for (std::int64_t const t : top_indices(head, kept)) { best += double{head[static_cast<std::size_t>(t)]}; }
            for (float const score : head) { all += double{score}; }
            float const weight = all > 0 ? static_cast<float>(best / all) : 0.0F;
            for (float& score : head) { score *= weight; }
        }
    }
    std::vector<std::int64_t> counts(static_cast<std::size_t>(heads), 0);
    for (std::int64_t const i : top_indices(scores, heads * kept)) { ++counts[static_cast<std::size_t>(i / past)]; }
    auto const floor = static_cast<double>(static_cast<std::int64_t>(static_cast<double>(kept) * options.floor_ratio));
    for (std::int64_t& count : counts)
    {
        double const share = static_cast<double>(count) * (1.0 - options.floor_ratio) + floor;
        count              = std::min(past, static_cast<std::int64_t>(std::nearbyint(share)));
    }
    return counts;
}

} // namespace runner
