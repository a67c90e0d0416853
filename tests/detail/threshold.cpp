#include <mdkv/detail/threshold.hpp>

#include "support/random.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

using mdkv::detail::multiplier_between;
using mdkv::detail::plateau_begin;

TEST_CASE("the multiplier to try lies between the two, nearer to the one whose bytes are nearer to the limit")
{
    support::source random{"detail/threshold between"};
    for (int i = 0; i < 200; ++i)
    {
        double const low   = std::exp(random.uniform(-100.0, 20.0));
        double const high  = low * std::exp(random.uniform(0.01, 30.0));
        double const over  = random.uniform(0.0, 1e6);
        double const under = random.uniform(0.0, 1e6);
        double const next  = multiplier_between(low, high, over, under);
        CAPTURE(low);
        CAPTURE(high);
        CAPTURE(over);
        CAPTURE(under);
        CHECK(next > low);
        CHECK(next < high);
        // In whole 32nds of the way between their logarithms, at least 2 from either end.
        double const share = 32 * std::log(next / low) / std::log(high / low);
        CHECK(std::fabs(share - std::round(share)) < 1e-6);
        CHECK(std::fabs(std::round(share) - 32 * over / (over + under)) <= 2.0);
    }
}

TEST_CASE(
    "next to a multiplier of 0 a thousandth of the other is tried, and no bytes on either side are no reason to stop")
{
    CHECK(multiplier_between(0.0, 4.0, 1.0, 1.0) == 4.0 / 1024);
    CHECK(multiplier_between(1.0, 65536.0, 0.0, 0.0) == 2.0);
    CHECK(multiplier_between(1.0, 4294967296.0, 1.0, 1.0) == 65536.0);
}

TEST_CASE(
    "thresholds that may equal a multiplier begin just below it, at 0 where floats have few bits, and at infinity")
{
    CHECK(plateau_begin(1.0F) == 1.0F - 0x1p-20F);
    CHECK(plateau_begin(0x1p-110F) == 0.0F);
    CHECK(plateau_begin(0.0F) == 0.0F);
    constexpr float infinity = std::numeric_limits<float>::infinity();
    CHECK(plateau_begin(infinity) == infinity);
    constexpr float largest = std::numeric_limits<float>::max();
    CHECK(plateau_begin(largest) < largest);
}
