/// \file divergence.hpp: how far one next-token distribution is from another, added up over positions
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "greedy.hpp"

namespace runner
{

/// log of the sum of exp(logits), in double.
[[nodiscard]] inline double log_sum_exp(std::span<float const> logits)
{
    double const largest = double{*std::max_element(logits.begin(), logits.end())};
    double total         = 0;
    for (float const logit : logits) { total += std::exp(double{logit} - largest); }
    return largest + std::log(total);
}

/// Means over the positions seen so far.
class divergence
{
public:
    /// \param reference  logits of the full cache
    /// \param tested     logits of the policy
    /// \param next       the token that follows in the text
    void add(std::span<float const> reference, std::span<float const> tested, std::int32_t next)
    {
        double const norm_reference = log_sum_exp(reference);
        double const norm_tested    = log_sum_exp(tested);
        double kl                   = 0;
        for (std::size_t i = 0; i < reference.size(); ++i)
        {
            double const log_p = double{reference[i]} - norm_reference;
            double const log_q = double{tested[i]} - norm_tested;
            kl += std::exp(log_p) * (log_p - log_q);
        }
        auto const target = static_cast<std::size_t>(next);
        kl_ += kl;
        nll_difference_ += (norm_tested - double{tested[target]}) - (norm_reference - double{reference[target]});
        agreed_ += greedy_token(reference) == greedy_token(tested) ? 1 : 0;
        ++positions_;
    }

    [[nodiscard]] double kl() const noexcept { return mean(kl_); }                         // nats
    [[nodiscard]] double nll_difference() const noexcept { return mean(nll_difference_); } // nats
    [[nodiscard]] double top1_agreement() const noexcept { return mean(static_cast<double>(agreed_)); }

private:
    [[nodiscard]] double mean(double sum) const noexcept
    {
        return positions_ == 0 ? 0.0 : sum / static_cast<double>(positions_);
    }

    double kl_              = 0;
    double nll_difference_  = 0;
    std::int64_t agreed_    = 0;
    std::int64_t positions_ = 0;
};

} // namespace runner
