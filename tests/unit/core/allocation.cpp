#include <mdkv/core/allocation.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>

#include "support/host.hpp"

#include <cstddef>

#include <doctest/doctest.h>

TEST_CASE("the costs of a ratio set are bytes of a token and of a head's projections")
{
    mdkv::rung_costs const costs{mdkv::paper_ratios, {128, 64}, 2};
    REQUIRE(costs.size() == 4);
    mdkv::index_t const bytes[]{0, (16 + 8) * 2, (32 + 16) * 2, (128 + 64) * 2};
    for (std::size_t r = 0; r < 4; ++r)
    {
        CHECK(costs.bytes[r] == bytes[r]);
        CHECK((costs.projection[r] > 0) == (r == 1 || r == 2));
    }
    CHECK(costs.projection[2] == 2 * costs.projection[1]);
    CHECK(costs.widest_projection() == costs.projection[2]);
}

TEST_CASE("sets with codes of whole vectors have the cost of channels, and no others")
{
    mdkv::rung_costs const bits{mdkv::bit_ratios, {128, 64}, 2};
    CHECK(bits.channels == (2 * 128 + 64) * 2);
    for (std::size_t r = 0; r < 4; ++r) { CHECK(bits.rotated[r] == (r == 1 || r == 2)); }
    CHECK(mdkv::rung_costs{mdkv::paper_ratios, {128, 64}, 2}.channels == 0);
    CHECK(
        mdkv::rung_costs{{mdkv::drop, mdkv::fraction(1, 4).as(mdkv::storage::int8), mdkv::full}, {128, 64}, 2}.channels
        == 0);
}

TEST_CASE("costs that do not ascend, or are negative, are refused by name")
{
    mdkv::rung_costs costs{mdkv::paper_ratios, {128, 64}, 2};
    costs.projection[3] = -5;
    CHECK(support::error_text<mdkv::invalid_argument>([&] { costs.expects_valid("caller"); })
          == "caller: costs.projection[3] is -5; it must not be negative");
    costs.projection[3] = 0;
    costs.bytes[2]      = costs.bytes[1];
    CHECK(support::error_text<mdkv::invalid_argument>([&] { costs.expects_valid("caller"); })
          == "caller: costs.bytes must ascend; [2] = 48 does not exceed 48");
    CHECK_THROWS_AS((mdkv::rung_costs{mdkv::paper_ratios, {12, 64}, 2}), mdkv::invalid_argument); // an eighth of 12
}

TEST_CASE("the gap of an allocation is its loss above the dual's")
{
    mdkv::allocation report;
    report.loss = 3.5;
    report.dual = 3.25;
    CHECK(report.gap() == 0.25);
}
