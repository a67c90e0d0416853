#include "runner/policies.hpp"

#include "runner/common_options.hpp"
#include "runner/systems/policy_prompt.hpp"

#include <doctest/doctest.h>

#include <mdkv/core/error.hpp>
#include <mdkv/presets.hpp>

#include <set>
#include <string>
#include <utility>
#include <vector>

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
        CHECK((p.source.empty() == p.whole()));
    }
    CHECK(names.size() == 14);
}

TEST_CASE("an unknown policy is refused with the list of those there are")
{
    CHECK_THROWS_WITH_AS(static_cast<void>(runner::find_policy("papr")),
        "policy \"papr\" is unknown; there are full, h2o, snapkv, pyramidkv, headkv, low_rank, paper, paper_h, "
        "paper_literal, evict, by_window, by_window_h, best, any_question",
        mdkv::invalid_argument);
}

TEST_CASE("policies of the library's presets have their options, and the window of all policies if it is smaller")
{
    for (auto const& [name, preset] : {std::pair{"paper", &mdkv::presets::paper}, {"paper_h", &mdkv::presets::paper},
             {"paper_literal", &mdkv::presets::paper_literal}, {"evict", &mdkv::presets::evict},
             {"by_window", &mdkv::presets::by_window}, {"by_window_h", &mdkv::presets::by_window},
             {"best", &mdkv::presets::best}, {"any_question", &mdkv::presets::any_question}})
    {
        CAPTURE(name);
        CHECK(runner::find_policy(name).options.name == preset->name);
    }
    CHECK(runner::find_policy("full").whole());
    runner::policy const by_window = runner::find_policy("by_window");
    CHECK(by_window.kept_window(32) == mdkv::presets::by_window.window);
    CHECK(by_window.kept_window(4) == 4);
    CHECK(by_window.more_queries() == mdkv::presets::by_window.queries);
    CHECK(!by_window.one_budget());
    CHECK(runner::find_policy("best").one_budget());
    CHECK(runner::find_policy("paper").kept_window(32) == 32);
    CHECK(runner::find_policy("paper").more_queries() == 0);
    auto const made = runner::preset_of(runner::find_policy("best"), 8, 32);
    CHECK(made.window == 8);
    CHECK(made.question == 32);
    CHECK(made.queries == mdkv::presets::best.queries);
}

TEST_CASE("the baselines' parameters are their authors'")
{
    CHECK(runner::find_policy("snapkv").options.pooling.width == 7);
    CHECK(runner::find_policy("snapkv").options.pooling.kind == mdkv::pooling::max);
    CHECK(runner::find_policy("pyramidkv").beta == 20);
    CHECK(runner::find_policy("headkv").beta == 1.1);
    CHECK(runner::find_policy("paper_h").beta == 1.1);
    CHECK(runner::find_policy("h2o").reads_all_queries());
    CHECK(!runner::find_policy("snapkv").reads_all_queries());
}

TEST_CASE("a policy's parameters are set in brackets, and its label says so")
{
    auto const p = runner::parse_policy("paper[pool=13+pooling=mean+ratios=0,1/4:int8,1]");
    CHECK(p.name == "paper");
    CHECK(p.label == "paper[pool=13+pooling=mean+ratios=0,1/4:int8,1]");
    CHECK(p.options.pooling.width == 13);
    CHECK(p.options.pooling.kind == mdkv::pooling::mean);
    CHECK(runner::text_of(p.options.ratios) == "0,1/4:int8,1");
    CHECK(runner::parse_policy("headkv[beta=1.5+scores=/some/where/r2.json]").label == "headkv[beta=1.5+scores=r2]");
    CHECK(runner::parse_policy("paper[pooling=adaptive]").options.pooling.kind == mdkv::pooling::adaptive);
    CHECK(runner::parse_policy("pyramidkv[beta=10]").beta == 10);

    auto const replayed =
        runner::parse_policy("best[chunk=128+ahead=9+join=0.5+budget=layer+slack=0+while_reading=yes]");
    CHECK(replayed.options.replayed->chunk == 128);
    CHECK(replayed.options.replayed->ahead == 9);
    CHECK(replayed.options.replayed->join == 0.5F);
    CHECK(!replayed.one_budget());
    CHECK(replayed.slack == 0.0F);
    CHECK(replayed.while_reading);
    CHECK(runner::parse_policy("by_window[budget=model]").one_budget());
    CHECK(runner::parse_policy("by_window[budget=model]").runs_on_device());
    auto const parts =
        runner::parse_policy("best[stand_ins=3+stand_in_part=5+coded_stand_ins=no+window_part=9+refit=no]").options;
    CHECK(parts.stand_ins == 3);
    CHECK(parts.stand_in_part == 5);
    CHECK(!parts.coded_stand_ins);
    CHECK(parts.window_part == 9);
    CHECK(!parts.refitted);
    CHECK(runner::parse_policy("best[refit=yes]").options.refitted);
}

TEST_CASE("a policy's text that cannot be read is refused by the part at fault")
{
    auto const refuses = [](char const* text, char const* message) {
        CHECK_THROWS_WITH_AS(static_cast<void>(runner::parse_policy(text)), message, mdkv::invalid_argument);
    };
    refuses("snapkv[pool=7", "policy \"snapkv[pool=7\": the closing ] is missing");
    refuses("snapkv[pool]", "policy \"snapkv[pool]\": \"pool\" is not of the form parameter=value");
    refuses("snapkv[pool=6]", "policy snapkv: pool = 6: must be odd");
    refuses("snapkv[pool=-1]", "policy snapkv: pool = -1: must be at least 1");
    refuses("snapkv[beta=1]", "policy snapkv: beta = 1: unknown parameter; there are pool, pooling");
    refuses("h2o[pool=7]", "policy h2o: pool = 7: unknown parameter; there are none");
    refuses("headkv[beta=0.5]", "policy headkv: beta = 0.5: must be a number between 1 and 1000000");
    refuses("headkv[beta=2x]", "policy headkv: beta = 2x: must be a number between 1 and 1000000");
    refuses("best[chunk=96]", "policy best: chunk = 96: must divide 512, the tokens of a chunk of prefill");
    refuses("best[coded_stand_ins=8]", "policy best: coded_stand_ins = 8: must be yes or no");
    refuses("by_window[budget=all]", "policy by_window: budget = all: must be model or layer");
    refuses("by_window_h[budget=model]", "policy by_window_h: budget = model: heads share by their scores");
    refuses("paper[budget=model]", "policy \"paper[budget=model]\": projected rungs, whose bases are known at the "
                                   "prompt's end, have neither replayed rows nor one budget");
    CHECK_THROWS_AS(
        static_cast<void>(runner::parse_policy("best[ratios=0,1/4,1+budget=layer]")), mdkv::invalid_argument);
    CHECK_THROWS_AS(static_cast<void>(runner::parse_policy("paper[ratios=1,0]")), mdkv::invalid_argument);
}

TEST_CASE("a list of policies is cut at the commas outside of brackets, and all stands for every policy")
{
    CHECK(runner::split_policies("full,paper[ratios=0,1/4,1+pool=3],evict")
          == std::vector<std::string>{"full", "paper[ratios=0,1/4,1+pool=3]", "evict"});
    CHECK(runner::split_policies("all").size() == runner::all_policies().size());
    CHECK(runner::split_policies("all", false).size() == runner::all_policies().size() - 3); // headkv and paper_h
    CHECK(runner::split_policies("headkv", false) == std::vector<std::string>{"headkv"});    // asked for by name
}

TEST_CASE("on a device run the policies that go through compress layer by layer, and the others are refused by name")
{
    runner::common_options common;
    CHECK(runner::chosen_policy("snapkv", common).backend == runner::backend_kind::cpu);
    common.backend = "cuda";
    for (char const* const text : {"paper", "paper_literal", "evict", "by_window", "full", "by_window[pool=5]"})
    {
        CAPTURE(text);
        CHECK(runner::chosen_policy(text, common).backend == runner::backend_kind::cuda);
        CHECK(runner::chosen_policy(text, common).label == text);
    }
    for (char const* const text :
        {"snapkv", "h2o", "low_rank", "headkv[scores=x]", "by_window_h[scores=x]", "best[budget=layer]"})
    {
        CAPTURE(text);
        CHECK_THROWS_WITH_AS(static_cast<void>(runner::chosen_policy(text, common)),
            ("--backend cuda: policy " + std::string{text}
                + " runs on the CPU only; paper, paper_literal, evict, by_window, best and any_question run on the "
                  "device")
                .c_str(),
            mdkv::invalid_argument);
    }
    common.backend = "rocm";
    CHECK_THROWS_WITH_AS(static_cast<void>(runner::chosen_policy("paper", common)),
        "backend: \"rocm\" is unknown; there are cpu, cuda", mdkv::invalid_argument);
}

TEST_CASE("a file of head scores is that of the options if the policy's text names none")
{
    runner::common_options common;
    CHECK_THROWS_AS(static_cast<void>(runner::chosen_policy("paper_h", common)), mdkv::invalid_argument);
    common.head_scores = "all.json";
    CHECK(runner::chosen_policy("paper_h", common).head_scores == "all.json");
    CHECK(runner::chosen_policy("paper_h[scores=own.json]", common).head_scores == "own.json");
    CHECK(runner::chosen_policy("h2o", common).head_scores.empty());
}
