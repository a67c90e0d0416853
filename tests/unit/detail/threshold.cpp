#include <mdkv/detail/allocate/work.hpp>

#include <mdkv/cpu/team.hpp>
#include <mdkv/detail/lanes.hpp>

#include "support/random.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>

#include <doctest/doctest.h>

using mdkv::index_t;
using mdkv::detail::rung_table;

namespace
{

/// Every threshold is the largest over c >= j of the least quotient over a < j.
template <std::size_t Lanes>
void check(support::source& random, std::size_t rungs)
{
    rung_table table;
    index_t const unit = 1 + random.below(900);
    index_t bytes      = random.below(5);
    for (std::size_t r = 0; r < rungs && r < mdkv::max_rungs; ++r, bytes += 1 + random.below(60))
    {
        table.add(r, bytes, unit);
    }
    using floats = mdkv::detail::lane_floats<static_cast<int>(Lanes)>;
    float loss[mdkv::max_rungs][Lanes];
    floats of_rungs[mdkv::max_rungs];
    for (std::size_t r = 0; r < rungs; ++r)
    {
        for (std::size_t l = 0; l < Lanes; ++l)
        {
            loss[r][l] = l == 1 ? static_cast<float>(random.below(3) - 1) * 3e38F : static_cast<float>(random.normal());
        }
        of_rungs[r] = mdkv::detail::load_lanes<floats>(loss[r]);
    }
    floats theta[mdkv::max_rungs];
    mdkv::detail::find_thresholds(table, of_rungs, theta);
    auto const threshold = [&](std::size_t j, std::size_t l) {
        return mdkv::detail::lane(theta[j], static_cast<int>(l));
    };
    for (std::size_t l = 0; l < Lanes; ++l)
    {
        for (std::size_t j = 1; j < rungs; ++j)
        {
            float most = 0;
            for (std::size_t c = j; c < rungs; ++c)
            {
                float least = std::numeric_limits<float>::infinity();
                for (std::size_t a = 0; a < j; ++a)
                {
                    auto const factor = static_cast<float>(
                        static_cast<double>(unit) / static_cast<double>(table.cost[c] - table.cost[a]));
                    least = std::min(least, (loss[a][l] - loss[c][l]) * factor);
                }
                most = std::max(most, least);
            }
            REQUIRE(threshold(j, l) == most);
            REQUIRE((j == 1 || threshold(j - 1, l) >= threshold(j, l)));
        }
    }
}

} // namespace

TEST_CASE(
    "thresholds are what their definition says, for any number of rungs and neighbours, and fall from step to step")
{
    support::source random{"thresholds"};
    for (int repeat = 0; repeat < 50; ++repeat)
    {
        for (std::size_t rungs = 1; rungs <= mdkv::max_rungs; ++rungs)
        {
            check<std::size_t{mdkv::cpu::team::register_lanes}>(random, rungs);
            check<1>(random, rungs);
        }
    }
}
