#include "runner/divergence.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <vector>

TEST_CASE("a distribution does not diverge from itself, nor from itself shifted by a constant")
{
    std::vector<float> const logits{0.5F, -1.0F, 2.0F, 0.0F};
    std::vector<float> shifted;
    for (float const x : logits) { shifted.push_back(x + 3.0F); }
    runner::divergence d;
    d.add(logits, logits, 1);
    d.add(logits, shifted, 2);
    CHECK(d.kl() == doctest::Approx(0.0));
    CHECK(d.nll_difference() == doctest::Approx(0.0));
    CHECK(d.top1_agreement() == 1.0);
}

TEST_CASE("KL, agreement and NLL difference of two coins are those of the textbook")
{
    // p = (3/4, 1/4), q = (1/4, 3/4)
    auto const log3 = static_cast<float>(std::log(3.0));
    std::vector<float> const p{log3, 0.0F};
    std::vector<float> const q{0.0F, log3};
    runner::divergence d;
    d.add(p, q, 0);
    CHECK(d.kl() == doctest::Approx(0.5 * std::log(3.0)).epsilon(1e-6));
    CHECK(d.nll_difference() == doctest::Approx(std::log(3.0)).epsilon(1e-6));
    CHECK(d.top1_agreement() == 0.0);
}

TEST_CASE("means are over the positions added")
{
    auto const log3 = static_cast<float>(std::log(3.0));
    std::vector<float> const p{log3, 0.0F};
    std::vector<float> const q{0.0F, log3};
    runner::divergence d;
    d.add(p, q, 1);
    d.add(p, p, 1);
    CHECK(d.kl() == doctest::Approx(0.25 * std::log(3.0)).epsilon(1e-6));
    CHECK(d.nll_difference() == doctest::Approx(-0.5 * std::log(3.0)).epsilon(1e-6));
    CHECK(d.top1_agreement() == 0.5);
}

TEST_CASE("large logits do not overflow")
{
    runner::divergence d;
    d.add(std::vector<float>{3000.0F, 2999.0F}, std::vector<float>{-3000.0F, -3001.0F}, 0);
    CHECK(d.kl() == doctest::Approx(0.0));
}
