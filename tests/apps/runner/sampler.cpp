#include "runner/sampler.hpp"

#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

TEST_CASE("greedy takes the largest logit, the first of equal ones, and never a NaN")
{
    CHECK(runner::greedy_token(std::vector<float>{1, 3, 2, 3}) == 1);
    CHECK(runner::greedy_token(std::vector<float>{-5}) == 0);
    CHECK(runner::greedy_token(std::vector<float>{NAN, -1, NAN, 2}) == 3);
    CHECK_THROWS_WITH_AS((void)runner::greedy_token({}), "greedy_token: logits is empty", std::invalid_argument);
}

TEST_CASE("temperature 0 is greedy, whatever the seed")
{
    std::vector<float> const logits = {0.5F, 0.6F, 0.1F};
    for (std::uint64_t const seed : {0U, 1U, 99U}) { CHECK(runner::sampler(0, seed).next(logits) == 1); }
}

TEST_CASE("a seed fixes the tokens, another seed gives others")
{
    std::vector<float> const logits(64, 1.0F);
    auto const draw = [&](std::uint64_t seed) {
        runner::sampler sampler(1.0, seed);
        std::vector<std::int32_t> out;
        for (int i = 0; i < 32; ++i) { out.push_back(sampler.next(logits)); }
        return out;
    };
    CHECK(draw(5) == draw(5));
    CHECK(draw(5) != draw(6));
}

TEST_CASE("draws follow the softmax at the temperature")
{
    constexpr int draws = 40000;
    for (double const temperature : {0.5, 1.0, 2.0})
    {
        CAPTURE(temperature);
        std::array<float, 4> const logits = {1.0F, 0.0F, -1.0F, -std::numeric_limits<float>::infinity()};
        std::array<double, 4> expected{};
        double total = 0;
        for (std::size_t i = 0; i < 4; ++i) { total += expected[i] = std::exp(double{logits[i]} / temperature); }
        std::array<int, 4> seen{};
        runner::sampler sampler(temperature, 3);
        for (int i = 0; i < draws; ++i) { ++seen[static_cast<std::size_t>(sampler.next(logits))]; }
        for (std::size_t i = 0; i < 4; ++i)
        {
            double const share = expected[i] / total;
            double const sigma = std::sqrt(share * (1 - share) / draws);
            CHECK(std::abs(seen[i] / double{draws} - share) <= 5 * sigma); // the seed is fixed: no chance involved
        }
        CHECK(seen[3] == 0);
    }
}

TEST_CASE("logits of any size and a NaN among them do no harm, logits without a finite largest are refused")
{
    runner::sampler sampler(0.01, 1);
    CHECK(sampler.next(std::vector<float>{-3e38F, 3e38F, NAN}) == 1);
    CHECK_THROWS_AS((void)sampler.next(std::vector<float>{NAN, NAN}), std::invalid_argument);
    CHECK_THROWS_AS(
        (void)sampler.next(std::vector<float>{0, std::numeric_limits<float>::infinity()}), std::invalid_argument);
    CHECK_THROWS_AS((void)sampler.next({}), std::invalid_argument);
}

TEST_CASE("a temperature that is negative or no number is refused by value")
{
    for (double const temperature : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()})
    {
        CHECK_THROWS_AS(runner::sampler{temperature}, std::invalid_argument);
    }
    CHECK_THROWS_WITH(runner::sampler(-0.5), "sampler: temperature is -0.500000, it must be finite and at least 0");
}
