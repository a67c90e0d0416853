#include "runner/policies.hpp"

#include "runner/common_options.hpp"

#include <doctest/doctest.h>

#include <mdkv/core/error.hpp>

#include <set>
#include <string>
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

TEST_CASE("the presets are those of the method: ratio set and pooling")
{
    CHECK(runner::text_of(runner::find_policy("paper").ratios) == "0,1/8,1/4,1");
    CHECK(runner::find_policy("paper").pooling.width == 7);
    CHECK(runner::text_of(runner::find_policy("paper_literal").ratios) == "0,1/8,1/4,1");
    CHECK(runner::find_policy("paper_literal").pooling.width == 1);
    CHECK(runner::text_of(runner::find_policy("evict").ratios) == "0,1");
    CHECK(runner::find_policy("evict").pooling.width == 1);
    CHECK(runner::find_policy("full").whole());

    runner::policy const by_window = runner::find_policy("by_window");
    CHECK(runner::text_of(by_window.ratios) == "0,1:int4,1:int8,1");
    CHECK(by_window.pooling.kind == mdkv::pooling::adaptive);
    CHECK(by_window.kept_window(32) == mdkv::presets::by_window.window);
    CHECK(by_window.kept_window(4) == 4);
    CHECK(by_window.queries == mdkv::presets::by_window.queries);
    CHECK(by_window.rows == runner::scoring_rows::window);
    CHECK(!by_window.one_budget());
    runner::policy const best = runner::find_policy("best");
    CHECK(best.rows == runner::scoring_rows::both);
    CHECK(best.join == double{mdkv::presets::best.replayed->join});
    CHECK(best.join_norm == mdkv::presets::best.replayed->last);
    CHECK(runner::parse_policy("best[join_over=sum]").join_norm == mdkv::row_norm::sum);
    CHECK(best.norm == mdkv::row_norm::euclidean);
    CHECK(best.one_budget());
    runner::policy const any = runner::find_policy("any_question");
    CHECK(any.rows == runner::scoring_rows::replay);
    CHECK(any.own);
    CHECK(any.one_budget());
    CHECK(any.depth == 1);
    CHECK(any.odd == double{mdkv::presets::any_question.leverage_power()});
    CHECK(any.stand_ins == mdkv::presets::any_question.stand_ins);
    CHECK(runner::parse_policy("best[stand_ins=3]").stand_ins == 3);
    CHECK(runner::parse_policy("best[stand_in_part=5]").stand_in_part == 5);
    CHECK(runner::parse_policy("best[coded_stand_ins=yes]").coded_stand_ins);
    CHECK(!runner::parse_policy("best[coded_stand_ins=no]").coded_stand_ins);
    CHECK(runner::parse_policy("by_window[window_part=9]").window_part == 9);
    CHECK(runner::parse_policy("best[refit=yes]").refit);
    CHECK(!runner::parse_policy("best[refit=no]").refit);
    CHECK(runner::find_policy("by_window_h").share == runner::sharing::head_scores);
    CHECK(runner::find_policy("paper").kept_window(32) == 32);
    CHECK(runner::find_policy("paper").charge == mdkv::projection_charge::by_use);
    CHECK(runner::find_policy("paper_literal").charge == mdkv::projection_charge::always);
}

TEST_CASE("the baselines' parameters are their authors'")
{
    CHECK(runner::find_policy("snapkv").pooling.width == 7);
    CHECK(runner::find_policy("snapkv").pooling.kind == mdkv::pooling::max);
    CHECK(runner::find_policy("pyramidkv").beta == 20);
    CHECK(runner::find_policy("headkv").beta == 1.1);
    CHECK(runner::find_policy("paper_h").beta == 1.1);
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

    auto const mixed = runner::parse_policy(
        "paper[ratios=0,1/4:int8,1:int4+charge=always+keep=16+queries=64+early=0.5+even=4+fold_queries=16]");
    CHECK(runner::text_of(mixed.ratios) == "0,1/4:int8,1:int4");
    CHECK(mixed.charge == mdkv::projection_charge::always);
    CHECK(mixed.keep == 16);
    CHECK(mixed.queries == 64);
    CHECK(mixed.early == 0.5);
    CHECK(mixed.even == 4);
    CHECK(mixed.fold_queries == 16);
    CHECK_THROWS_AS(static_cast<void>(runner::parse_policy("paper[fold_queries=0]")), mdkv::invalid_argument);
    auto const replayed = runner::parse_policy("by_window[rows=both+over=rms+chunk=128+join=2]");
    CHECK(replayed.rows == runner::scoring_rows::both);
    CHECK(replayed.norm == mdkv::row_norm::euclidean);
    CHECK(replayed.chunk == 128);
    CHECK(replayed.join == 2);
    CHECK(!replayed.own);
    CHECK(!replayed.one_budget());
    auto const shared = runner::parse_policy("by_window[rows=both+own=yes+budget=model+depth=-0.5]");
    CHECK(shared.own);
    CHECK(shared.one_budget());
    CHECK(shared.depth == -0.5);
    CHECK(shared.runs_on_device());
    CHECK(shared.odd == 0);
    CHECK(runner::parse_policy("any_question[odd=8]").odd == 8);
    CHECK(runner::parse_policy("paper[pooling=adaptive]").pooling.kind == mdkv::pooling::adaptive);
    CHECK(runner::parse_policy("pyramidkv[beta=10]").beta == 10);
    CHECK(runner::parse_policy("snapkv[storage=int4]").stored == mdkv::storage::int4);
}

TEST_CASE("a policy's text that cannot be read is refused by the part at fault")
{
    auto const refuses = [](char const* text, char const* message) {
        CHECK_THROWS_WITH_AS(static_cast<void>(runner::parse_policy(text)), message, mdkv::invalid_argument);
    };
    refuses("snapkv[pool=7", "policy \"snapkv[pool=7\": the closing ] is missing");
    refuses("snapkv[pool]", "policy \"snapkv[pool]\": \"pool\" is not of the form parameter=value");
    refuses("snapkv[pool=6]", "policy snapkv: pool = 6: must be odd and at least 1");
    refuses("h2o[pool=7]", "policy h2o: pool = 7: unknown parameter; there are heads, storage");
    refuses("headkv[beta=0.5]", "policy headkv: beta = 0.5: must be a number between 1 and 1000000");
    refuses("headkv[beta=2x]", "policy headkv: beta = 2x: must be a number between 1 and 1000000");
    refuses("by_window[rows=all]", "policy by_window: rows = all: must be window, replay or both");
    refuses("by_window[over=mean]", "policy by_window: over = mean: must be sum, rms or max");
    refuses("by_window[chunk=96]", "policy by_window: chunk = 96: must divide 512, the tokens of a chunk of prefill");
    refuses("by_window[join=-1]", "policy by_window: join = -1: must be a number between 0 and 1000000");
    refuses("paper[rows=both]", "policy \"paper[rows=both]\": replayed rows score neither projected rungs, whose bases "
                                "are known at the prompt's "
                                "end, nor heads=query");
    refuses("by_window[own=1]", "policy by_window: own = 1: must be yes or no");
    refuses("by_window[budget=all]", "policy by_window: budget = all: must be model or layer");
    refuses("best[stand_ins=-1]", "policy best: stand_ins = -1: must not be negative");
    refuses("best[stand_in_part=0]", "policy best: stand_in_part = 0: must be positive");
    refuses("best[window_part=-1]", "policy best: window_part = -1: must not be negative");
    refuses("best[coded_stand_ins=8]", "policy best: coded_stand_ins = 8: must be yes or no");
    refuses("by_window[stand_ins=4]",
        "policy \"by_window[stand_ins=4]\": stand_ins is for one budget for all layers; stand_ins=0 leaves it out");
    refuses("by_window[depth=x]", "policy by_window: depth = x: must be a number between -10 and 10");
    refuses("best[odd=-1]", "policy best: odd = -1: must be a number between 0 and 100");
    refuses("by_window[odd=8]",
        "policy \"by_window[odd=8]\": odd is for one budget for all layers, whose keys say together how "
        "odd tokens are; odd=0 leaves it out");
    refuses("by_window_h[budget=model]", "policy by_window_h: budget = model: heads share by their scores");
    refuses("paper[budget=model]",
        "policy \"paper[budget=model]\": one budget for all layers is for rungs without projections");
    refuses("h2o[heads=all]", "policy h2o: heads = all: must be kv or query");
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
    for (char const* const text :
        {"paper", "paper_literal", "evict", "by_window", "full", "by_window[heads=query+pool=5]"})
    {
        CAPTURE(text);
        CHECK(runner::chosen_policy(text, common).backend == runner::backend_kind::cuda);
        CHECK(runner::chosen_policy(text, common).label == text);
    }
    for (char const* const text :
        {"snapkv", "h2o", "low_rank", "headkv[scores=x]", "by_window_h[scores=x]", "by_window[rows=both]"})
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

TEST_CASE("options of all commands change what a policy's text leaves open, where the policy has it")
{
    runner::common_options common;
    common.pool               = 13;
    common.pooling            = "adaptive";
    common.ratios             = "0,1:int4,1";
    common.score_queries      = 128;
    runner::policy const best = runner::chosen_policy("by_window[pool=5]", common);
    CHECK(best.pooling.width == 5);
    CHECK(best.pooling.kind == mdkv::pooling::adaptive);
    CHECK(runner::text_of(best.ratios) == "0,1:int4,1");
    CHECK(best.queries == 128);
    CHECK(best.label == "by_window[pool=5+pooling=adaptive+ratios=0,1:int4,1+queries=128]");
    CHECK(runner::chosen_policy("h2o", common).label == "h2o");
    CHECK_THROWS_AS(static_cast<void>(runner::chosen_policy("paper_h", common)), mdkv::invalid_argument);
}
