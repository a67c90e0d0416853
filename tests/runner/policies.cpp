#include "runner/policies.hpp"

#include <doctest/doctest.h>

#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace
{

constexpr mdkv::layer_shape layer{2, 3, 1000, 24, {64, 64}, 2};

} // namespace

TEST_CASE("every policy is found by its own name, names are different, and all but the whole cache name a source")
{
    std::set<std::string> names;
    for (runner::policy const& p : runner::all_policies())
    {
        CAPTURE(p.name);
        CHECK(runner::find_policy(p.name).keeps == p.keeps);
        CHECK(runner::parse_policy(p.name).label == p.name);
        CHECK(names.insert(p.name).second);
        CHECK(!p.keeps.empty());
        CHECK((p.source.empty() == (p.whole() || p.name == "random")));
    }
    CHECK(names.size() == 19);
}

TEST_CASE("an unknown policy is refused with the list of those there are")
{
    CHECK_THROWS_WITH_AS(static_cast<void>(runner::find_policy("papr")),
        "policy \"papr\" is unknown; there are full, random, streaming, h2o, h2o_decode, snapkv, pyramidkv, adakv, "
        "criticalkv, headkv, keydiff, tova, expected_attention, think, low_rank, paper, paper_h, paper_literal, evict",
        mdkv::invalid_argument);
}

TEST_CASE("the presets are those of the method: ratio set and pooling")
{
    CHECK(runner::text_of(runner::find_policy("paper").ratios) == "0,1/8,1/4,1");
    CHECK(runner::find_policy("paper").pooling.width == 7);
    CHECK(runner::text_of(runner::find_policy("paper_literal").ratios) == "0,1/8,1/4,1");
    CHECK(runner::find_policy("paper_literal").pooling.width == 1);
    CHECK(runner::text_of(runner::find_policy("evict").ratios) == "0,1");
    CHECK(runner::find_policy("evict").pooling.width == 1);
    CHECK(runner::find_policy("full").whole());
}

TEST_CASE("the baselines' parameters are their authors'")
{
    CHECK(runner::find_policy("snapkv").pooling.width == 7);
    CHECK(runner::find_policy("snapkv").pooling.kind == mdkv::pooling::max);
    CHECK(runner::find_policy("criticalkv").pooling.width == 5);
    CHECK(runner::find_policy("criticalkv").pooling.kind == mdkv::pooling::mean);
    CHECK(runner::find_policy("pyramidkv").beta == 20);
    CHECK(runner::find_policy("headkv").beta == 1.1);
    CHECK(runner::find_policy("paper_h").beta == 1.1);
    CHECK(runner::find_policy("adakv").floor == 0.2);
    CHECK(runner::find_policy("streaming").sinks == 4);
    CHECK(runner::find_policy("think").channels == 0.4);
    CHECK(runner::find_policy("h2o").reads_all_queries());
    CHECK(!runner::find_policy("snapkv").reads_all_queries());
}

TEST_CASE("a policy's parameters are set in brackets, and its label says so")
{
    auto const p = runner::parse_policy("paper[pool=13+pooling=mean+ratios=0,1/4,1+heads=query]");
    CHECK(p.name == "paper");
    CHECK(p.label == "paper[pool=13+pooling=mean+ratios=0,1/4,1+heads=query]");
    CHECK(p.pooling.width == 13);
    CHECK(p.pooling.kind == mdkv::pooling::mean);
    CHECK(runner::text_of(p.ratios) == "0,1/4,1");
    CHECK(p.per_query_head);
    CHECK(runner::parse_policy("headkv[beta=1.5+scores=/some/where/r2.json]").label == "headkv[beta=1.5+scores=r2]");
    CHECK(runner::parse_policy("random[seed=7]").seed == 7);
    CHECK(runner::parse_policy("adakv[floor=0.5]").floor == 0.5);
}

TEST_CASE("a policy's text that cannot be read is refused by the part at fault")
{
    auto const refuses = [](char const* text, char const* message) {
        CHECK_THROWS_WITH_AS(static_cast<void>(runner::parse_policy(text)), message, mdkv::invalid_argument);
    };
    refuses("snapkv[pool=7", "policy \"snapkv[pool=7\": the closing ] is missing");
    refuses("snapkv[pool]", "policy \"snapkv[pool]\": \"pool\" is not of the form parameter=value");
    refuses("snapkv[pool=6]", "policy snapkv: pool = 6: must be odd and at least 1");
    refuses("streaming[pool=7]", "policy streaming: pool = 7: unknown parameter; there are heads, sinks");
    refuses("adakv[floor=2]", "policy adakv: floor = 2: must be a number between 0 and 1");
    refuses("adakv[floor=0.2x]", "policy adakv: floor = 0.2x: must be a number between 0 and 1");
    refuses("tova[heads=all]", "policy tova: heads = all: must be kv or query");
    CHECK_THROWS_AS(static_cast<void>(runner::parse_policy("paper[ratios=1,0]")), mdkv::invalid_argument);
}

TEST_CASE("a list of policies is cut at the commas outside of brackets, and all stands for every policy")
{
    CHECK(runner::split_policies("full,paper[ratios=0,1/4,1+pool=3],evict")
          == std::vector<std::string>{"full", "paper[ratios=0,1/4,1+pool=3]", "evict"});
    CHECK(runner::split_policies("all").size() == runner::all_policies().size());
    CHECK(runner::split_policies("all", false).size() == runner::all_policies().size() - 2); // headkv and paper_h
    CHECK(runner::split_policies("headkv", false) == std::vector<std::string>{"headkv"});    // asked for by name
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
