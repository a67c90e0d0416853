#include "runner/policies.hpp"

#include <doctest/doctest.h>

#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>

#include <cstdint>
#include <set>
#include <string>

namespace
{

constexpr mdkv::layer_shape layer{2, 3, 1000, 24, {64, 64}, 2};

} // namespace

TEST_CASE("every policy is found by its own name, and names are different")
{
    std::set<std::string> names;
    for (runner::policy const& p : runner::all_policies())
    {
        CHECK(runner::find_policy(p.name).summary == p.summary);
        CHECK(names.insert(p.name).second);
    }
    CHECK(names.size() == 4);
}

TEST_CASE("an unknown policy is refused with the list of those there are")
{
    CHECK_THROWS_WITH_AS(static_cast<void>(runner::find_policy("papr")),
        "policy \"papr\" is unknown; there are full, paper, paper_literal, evict", mdkv::invalid_argument);
}

TEST_CASE("the presets are those of the method: ratio set and pooling")
{
    CHECK(runner::text_of(runner::find_policy("paper").ratios) == "0,1/8,1/4,1");
    CHECK(runner::find_policy("paper").pooling.width == 7);
    CHECK(runner::text_of(runner::find_policy("paper_literal").ratios) == "0,1/8,1/4,1");
    CHECK(runner::find_policy("paper_literal").pooling.width == 1);
    CHECK(runner::text_of(runner::find_policy("evict").ratios) == "0,1");
    CHECK(runner::find_policy("evict").pooling.width == 1);
    CHECK(runner::find_policy("full").whole);
}

TEST_CASE("a ratio set reads as it is written, with or without its storage")
{
    CHECK(runner::text_of(runner::parse_ratios("0,1/16,1/2,1")) == "0,1/16,1/2,1");
    CHECK(runner::text_of(runner::parse_ratios("0,1/4:plain,1:plain")) == "0,1/4,1");
}

TEST_CASE("a ratio set that cannot be read is refused by the part at fault")
{
    CHECK_THROWS_WITH_AS(static_cast<void>(runner::parse_ratios("0,1/x")),
        "ratios: \"x\" is not a whole number in range", mdkv::invalid_argument);
    CHECK_THROWS_WITH_AS(static_cast<void>(runner::parse_ratios("0,1:int2")),
        "ratios: \"1:int2\" names an unknown storage; there is plain", mdkv::invalid_argument);
    CHECK_THROWS_WITH_AS(static_cast<void>(runner::parse_ratios("0,1/2/3")), "ratios: \"1/2/3\" is not a fraction",
        mdkv::invalid_argument);
    CHECK_THROWS_AS(static_cast<void>(runner::parse_ratios("1,0")), mdkv::invalid_argument);
    CHECK_THROWS_AS(static_cast<void>(runner::parse_ratios("")), mdkv::invalid_argument);
}

TEST_CASE("a budget reads as a percentage, a fraction or bytes, exactly")
{
    std::int64_t const whole = layer.full_bytes();
    CHECK(runner::parse_budget("10%").in_bytes(layer) == whole / 10);
    CHECK(runner::parse_budget("12.5%").in_bytes(layer) == whole / 8);
    CHECK(runner::parse_budget("1/16").in_bytes(layer) == whole / 16);
    CHECK(runner::parse_budget("4096").in_bytes(layer) == 4096);
    CHECK(runner::parse_budget("100%").in_bytes(layer) == whole);
}

TEST_CASE("a budget that cannot be read or leaves the cache is refused")
{
    CHECK_THROWS_WITH_AS(static_cast<void>(runner::parse_budget("101%")), "budget: 101% is not within 0% and 100%",
        mdkv::invalid_argument);
    CHECK_THROWS_AS(static_cast<void>(runner::parse_budget("ten")), mdkv::invalid_argument);
    CHECK_THROWS_AS(static_cast<void>(runner::parse_budget("1/0")), mdkv::invalid_argument);
    CHECK_THROWS_AS(static_cast<void>(runner::parse_budget("-5")), mdkv::invalid_argument);
    CHECK_THROWS_AS(static_cast<void>(runner::parse_budget("1.2.3%")), mdkv::invalid_argument);
}
