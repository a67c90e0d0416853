#include "runner/systems/folding_cache.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include "runner/language_model.hpp"
#include "runner/policies.hpp"
#include "runner/sequence_cache.hpp"
#include "runner/systems/fold_plan.hpp"
#include "support/continued.hpp"
#include "support/host.hpp"
#include "support/synthetic_llama.hpp"

namespace
{

using support::continue_compressed;
using support::error_text;

constexpr std::int64_t window = 8;
constexpr std::int64_t every  = 12;

runner::language_model small_model()
{
    return runner::language_model::load(
        support::synthetic_llama{{.layers = 3, .key_dim = 16, .value_dim = 16}}.writer().file());
}

} // namespace

TEST_CASE("a long generation's cache never takes more than it may, by the count of its memory, and comes close to it")
{
    auto const model  = small_model();
    auto const tokens = support::random_tokens(400, model.shape().vocabulary, 1);
    // From prompts that are compressed, stored whole, shorter than the window, and in every storage.
    for (auto const& [policy, context, bytes] : {std::tuple{"by_window", 150, 40000},
             std::tuple{"by_window", 20, 40000}, std::tuple{"by_window[ratios=0,1/4:int8,1:int8,1]", 150, 40000},
             std::tuple{"paper", 5, 60000}, std::tuple{"paper_literal", 150, 60000}, std::tuple{"evict", 40, 60000}})
    {
        CAPTURE(policy);
        CAPTURE(context);
        auto cache = runner::sequence_cache<mdkv::half>::folding(
            model, runner::parse_policy(policy), bytes, every, window, "--fold-every");
        for (float const x : continue_compressed(model, tokens, context, cache)) { REQUIRE(std::isfinite(x)); }
        runner::fold_ledger const& ledger = *cache.folds();
        CHECK(ledger.memory.most_bytes() <= bytes);
        CHECK(ledger.memory.most_bytes() > bytes * 3 / 4);
        CHECK(ledger.folds == model.shape().layers * ((400 - context - 1) / every));
        CHECK(cache.resident_bytes() < ledger.memory.bytes()); // which holds tails and queries too
        std::int64_t const tail = 400 - context - ledger.folds / model.shape().layers * every;
        std::int64_t counted    = 0; // those that folds dropped as well
        for (std::int64_t const tokens_at : cache.tokens_by_rung()) { counted += tokens_at; }
        CHECK(
            counted
            == model.shape().layers * model.shape().kv_heads * (400 - tail - std::min<std::int64_t>(window, context)));
    }
}

TEST_CASE("where the memory holds all there is, folding changes nothing but the order of sums")
{
    auto const model  = small_model();
    auto const tokens = support::random_tokens(130, model.shape().vocabulary, 2);
    auto folding      = runner::sequence_cache<float>::folding(
        model, runner::find_policy("by_window"), std::int64_t{1} << 20, every, window, "--fold-every");
    runner::sequence_cache<float> whole{model, runner::find_policy("full"), mdkv::budget::kv_size(1), window, 100};
    auto const found    = continue_compressed(model, tokens, 40, folding);
    auto const expected = continue_compressed(model, tokens, 40, whole);
    REQUIRE(found.size() == expected.size());
    double worst = 0;
    for (std::size_t i = 0; i < found.size(); ++i)
    {
        worst = std::max(worst, std::abs(double{found[i]} - double{expected[i]}));
    }
    CHECK(worst < 1e-4);
    CHECK(folding.folds()->folds == 3 * 7);
    CHECK(whole.folds() == nullptr);
}

TEST_CASE("tails are folded into their layers' own bytes, which stay or grow with the text")
{
    auto const model  = small_model();
    auto const tokens = support::random_tokens(400, model.shape().vocabulary, 1);
    for (std::string const policy :
        {"best[tail=16", "best[tail=16+grows=yes", "by_window[tail=16", "by_window[tail=16+grows=yes"})
    {
        auto const chosen = runner::parse_policy(policy + "]");
        runner::sequence_cache<mdkv::half> cache{model, chosen, mdkv::budget::fraction(1, 4), window, 0};
        for (float const x : continue_compressed(model, tokens, 200, cache)) { REQUIRE(std::isfinite(x)); }
        CHECK(cache.folds()->folds == 3 * 12);
        auto const limit = cache.full_bytes() / 4 * (chosen.grows ? 200 + 12 * 16 : 200) / 200;
        CHECK(cache.resident_bytes() <= limit);
        CHECK(cache.resident_bytes() > limit * 9 / 10);
    }
    auto const reading = runner::parse_policy("best[tail=16+while_reading=yes]");
    CHECK_THROWS_AS(
        (runner::sequence_cache<float>{model, reading, mdkv::budget::kv_size(9), 8, 0}), mdkv::invalid_argument);
}

TEST_CASE("memory that cannot be kept to is refused by name, and the least that can is enough")
{
    auto const model = small_model();
    auto const make  = [&](char const* policy, std::int64_t bytes) {
        return runner::sequence_cache<mdkv::half>::folding(
            model, runner::parse_policy(policy), bytes, every, window, "--fold-every");
    };
    auto const text = [&](char const* policy, std::int64_t bytes) {
        return error_text<mdkv::invalid_argument>([&] { static_cast<void>(make(policy, bytes)); });
    };
    CHECK(text("snapkv", 100000).find("--fold-every: policy snapkv cannot") != std::string::npos);
    CHECK(text("full", 100000).find("--fold-every: policy full cannot") != std::string::npos);
    CHECK(text("by_window_h", 100000).find("--fold-every: policy by_window_h shares") != std::string::npos);
    CHECK(text("paper[ratios=1/4,1]", 100000).find("drop") != std::string::npos);

    std::string const said  = text("by_window", 1000);
    std::string const named = "at least ";
    REQUIRE(said.find(named) != std::string::npos);
    auto const least = std::stoll(said.substr(said.find(named) + named.size()));
    CHECK(text("by_window", least - 1) != "threw nothing");
    auto cache = make("by_window", least);
    continue_compressed(model, support::random_tokens(60, model.shape().vocabulary, 3), 30, cache);
    CHECK(cache.folds()->memory.most_bytes() <= least);
    CHECK(cache.folds()->folds == 3 * 2);
}
