/// \file sampler.hpp: the next token from the logits: the likeliest, or drawn at a temperature
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace runner
{

/// The token with the largest logit, the lower id on ties. NaN never wins.
/// \throws std::invalid_argument   `logits` is empty
[[nodiscard]] inline std::int32_t greedy_token(std::span<float const> logits)
{
    if (logits.empty()) { throw std::invalid_argument("greedy_token: logits is empty"); }
    std::size_t best = 0;
    for (std::size_t i = 1; i < logits.size(); ++i)
    {
        if (logits[i] > logits[best] || (std::isnan(logits[best]) && !std::isnan(logits[i]))) { best = i; }
    }
    return static_cast<std::int32_t>(best);
}

/// Chooses tokens one after another; equal seeds, temperatures and logits choose equal tokens on every machine.
class sampler
{
public:
    /// \param temperature   0 always takes the likeliest token; larger values are more even
    /// \throws std::invalid_argument   the temperature is negative or not finite
    explicit sampler(double temperature = 0, std::uint64_t seed = 0)
        : temperature_{temperature}
        , random_{seed}
    {
        if (!(temperature >= 0) || !std::isfinite(temperature))
        {
            throw std::invalid_argument(
                "sampler: temperature is " + std::to_string(temperature) + ", it must be finite and at least 0");
        }
    }

    /// \throws std::invalid_argument   `logits` is empty or its largest value is no finite number
    [[nodiscard]] std::int32_t next(std::span<float const> logits)
    {
        std::int32_t const likeliest = greedy_token(logits);
        double const largest         = double{logits[static_cast<std::size_t>(likeliest)]};
        if (!std::isfinite(largest))
        {
            throw std::invalid_argument(
                "sampler: the largest logit is " + std::to_string(largest) + ", token " + std::to_string(likeliest));
        }
        if (temperature_ == 0) { return likeliest; }
        cumulative_.clear();
        double total = 0;
        for (float const logit : logits)
        {
            double const weight = std::exp((double{logit} - largest) / temperature_);
            if (!std::isnan(weight)) { total += weight; }
            cumulative_.push_back(total);
        }
        // 53 random bits by hand: the standard library's distributions differ from one implementation to the next.
        double const point = static_cast<double>(random_() >> 11) * 0x1p-53 * total;
        auto const found   = std::upper_bound(cumulative_.begin(), cumulative_.end(), point);
        if (found == cumulative_.end()) { return likeliest; } // rounding took the point to the very end
        return static_cast<std::int32_t>(found - cumulative_.begin());
    }

private:
    double temperature_;
    std::mt19937_64 random_;
    std::vector<double> cumulative_; // [vocabulary]
};

} // namespace runner
