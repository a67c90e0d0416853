/// \file top.hpp: the best of many scores, exactly and always the same ones
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

namespace runner
{

/// Indices of the `count` highest scores (all of them if there are fewer), in no particular order. Among equal scores the
/// earlier is higher; a NaN is lower than any number. The set is therefore the same on every machine.
[[nodiscard]] inline std::vector<std::int64_t> top_indices(std::span<float const> scores, std::int64_t count)
{
    std::vector<std::int64_t> order(scores.size());
    std::iota(order.begin(), order.end(), std::int64_t{0});
    auto const size = static_cast<std::int64_t>(scores.size());
    count           = std::clamp<std::int64_t>(count, 0, size);
    if (count == size) { return order; }
    auto const higher = [&](std::int64_t a, std::int64_t b) {
        float const x = scores[static_cast<std::size_t>(a)];
        float const y = scores[static_cast<std::size_t>(b)];
        if (std::isnan(x) || std::isnan(y)) { return std::isnan(x) == std::isnan(y) ? a < b : std::isnan(y); }
        return x == y ? a < b : x > y;
    };
    std::nth_element(order.begin(), order.begin() + count, order.end(), higher);
    order.resize(static_cast<std::size_t>(count));
    return order;
}

} // namespace runner
