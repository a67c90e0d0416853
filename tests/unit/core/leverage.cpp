#include <mdkv/core/leverage.hpp>

#include <cmath>
#include <initializer_list>
#include <limits>

#include <doctest/doctest.h>

using namespace mdkv;

TEST_CASE("a leverage is rounded to a unit, and comes back as a float")
{
    CHECK(leverage_sum_of(0) == 0);
    CHECK(leverage_sum_of(1) == leverage_sum{1} << 36);
    CHECK(leverage_sum_of(0.4 / leverage_units) == 0);
    CHECK(leverage_sum_of(1.5 / leverage_units) == 2);
    CHECK(leverage_of(leverage_sum_of(0.375)) == 0.375F);
    CHECK(leverage_of(sum_of_leverages(leverage_sum_of(0.375), leverage_sum_of(1))) == 1.375F);
}

TEST_CASE("a leverage that is not finite makes each sum NaN, after sums on 2,047 ranks, too")
{
    constexpr double infinity = std::numeric_limits<double>::infinity();
    for (double const bad : {infinity, -infinity, std::numeric_limits<double>::quiet_NaN(), -1.0, 0x1p15})
    {
        CHECK(leverage_sum_of(bad) == non_finite_leverage);
    }
    leverage_sum const one = sum_of_leverages(non_finite_leverage, leverage_sum_of(1));
    CHECK(one == non_finite_leverage);
    CHECK(sum_of_leverages(leverage_sum_of(1), one) == one);
    CHECK(sum_of_leverages(one, one) == one);
    CHECK(std::isnan(leverage_of(one)));
    CHECK(std::isnan(leverage_of(2047 * one)));
    CHECK(std::isnan(leverage_of(-1)));
    leverage_sum most = 0; // of heads in all
    for (int i = 0; i < 65535; ++i) { most += leverage_sum_of(1); }
    CHECK(leverage_of(most) == 65535.0F);
}
