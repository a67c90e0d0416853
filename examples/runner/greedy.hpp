/// \file greedy.hpp: the likeliest next token
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>

namespace runner
{

/// The token with the largest logit, the lower id on ties. NaN never wins.
/// \throws std::invalid_argument   `logits` is empty, or all of them are NaN
[[nodiscard]] inline std::int32_t greedy_token(std::span<float const> logits)
{
    std::size_t best = 0;
    for (std::size_t i = 1; i < logits.size(); ++i)
    {
        if (logits[i] > logits[best] || (std::isnan(logits[best]) && !std::isnan(logits[i]))) { best = i; }
    }
    if (logits.empty() || std::isnan(logits[best]))
    {
        throw std::invalid_argument("greedy_token: there are no logits but NaN");
    }
    return static_cast<std::int32_t>(best);
}

} // namespace runner
