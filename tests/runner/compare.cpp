#include "runner/compare.hpp"

#include "runner/compare_means.hpp"
#include "runner/compare_options.hpp"

#include <doctest/doctest.h>

#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runner/language_model.hpp"
#include "runner/policies.hpp"
#include "support/message.hpp"
#include "support/synthetic_llama.hpp"

using support::message_of;
using support::says;

namespace
{

/// Two policies at two budgets on three texts.
std::vector<runner::mean_cell> measured()
{
    double const kl[4][3] = {{1, 2, 4}, {0.5, 0.5, 0}, {0.5, 0.5, 3}, {0.25, 0.5, 1}};
    std::vector<runner::mean_cell> cells;
    for (int c = 0; c < 4; ++c)
    {
        cells.push_back({c < 2 ? "paper" : "best", c % 2 == 0 ? "KV 64" : "5%", {}, {}, {}, {}});
        for (double const one : kl[c])
        {
            cells.back().kl.add(one);
            cells.back().share.add(c % 2 == 0 ? 0.03125 : 0.05);
        }
    }
    return cells;
}

} // namespace

TEST_CASE("with --fold-every all caches but the full one fold, in as many bytes as the budget has in all layers")
{
    auto const model = runner::language_model::load(
        support::synthetic_llama{{.layers = 3, .key_dim = 16, .value_dim = 16}}.writer().file());
    runner::common_options common;
    common.window = 8;
    runner::compare_options options;
    options.context    = 100;
    options.policies   = "full,by_window";
    options.kv_sizes   = {80};
    options.fold_every = 12;
    auto const folding = runner::detail::contestants<mdkv::half>(model, common, options);
    REQUIRE(folding.size() == 2);
    CHECK(folding[0].cache.folds() == nullptr);
    CHECK(folding[1].cache.folds() != nullptr);
    options.kv_sizes = {10}; // fewer tokens than are fed between two folds
    CHECK_THROWS_AS(
        static_cast<void>(runner::detail::contestants<mdkv::half>(model, common, options)), mdkv::invalid_argument);
    options.policies = "best";
    says(message_of([&] { static_cast<void>(runner::detail::contestants<mdkv::half>(model, common, options)); }),
        "--fold-every at KV 10: policy best shares bytes among the heads of all layers");
    options.policies = "best[budget=layer+while_reading=yes]";
    says(message_of([&] { static_cast<void>(runner::detail::contestants<mdkv::half>(model, common, options)); }),
        "--fold-every at KV 10: policy " + options.policies + " is compressed while it is read");
    options.policies   = "full,by_window";
    options.fold_every = 0;
    CHECK(runner::detail::contestants<mdkv::half>(model, common, options)[1].cache.folds() == nullptr);
}

TEST_CASE("tokens per rung are all tokens, dropped ones included, but those of a window stored whole")
{
    auto const model = runner::language_model::load(
        support::synthetic_llama{{.layers = 3, .key_dim = 16, .value_dim = 16}}.writer().file());
    runner::common_options common;
    common.window = 8;
    runner::compare_options options;
    options.context = 400;
    options.policies =
        "best[while_reading=yes+chunk=32],any_question[while_reading=yes+chunk=32],best[while_reading=yes]";
    options.budgets = {"1/8", "1/3", "1/1"};
    std::vector<std::int32_t> text;
    for (std::int32_t i = 0; i < 400; ++i) { text.push_back(i * (i + 3) % 50); }
    for (auto& one : runner::detail::contestants<mdkv::half>(model, common, options))
    {
        if (!one.cache.chosen().while_reading) { continue; }
        CAPTURE(one.cache.chosen().label + " " + one.budget);
        static_cast<void>(one.cache.read(text, {}, [](std::int64_t, std::int64_t) {}));
        auto const tokens         = runner::detail::summary_of(one.cache).tokens;
        bool const coded          = one.cache.chosen().label.starts_with("best") && one.budget != "1/1";
        std::int64_t const window = coded ? 0 : one.cache.window(); // `best` gives its tokens rungs at small budgets
        std::int64_t all = 0, bytes = 3 * 2 * window * 64;          // the windows'
        for (std::size_t r = 0; r < tokens.size(); ++r)
        {
            CHECK(tokens[r] >= 0);
            all += tokens[r];
            bytes += tokens[r] * one.cache.chosen().options.ratios.bytes(r, {16, 16}, 2);
        }
        CHECK(all == 3 * 2 * (400 - window));
        CHECK(bytes <= one.cache.resident_bytes()); // which channels and stand-ins take, too
        CHECK((tokens[0] == 0) == (one.budget == "1/1"));
        CHECK(tokens[0] * 100 >= (one.budget == "1/8" ? 40 : 0) * all); // 4 bits a coordinate are .28 of the bytes
    }
}

TEST_CASE("figures over texts have the mean and the sample's deviation")
{
    runner::figures one;
    CHECK(std::isnan(one.mean()));
    one.add(3);
    CHECK(one.deviation() == 0);
    for (double const value : {-1.0, 5.0, 5.0}) { one.add(value); }
    CHECK(one.mean() == 3);
    CHECK(one.deviation() == doctest::Approx(std::sqrt((0 + 16 + 4 + 4) / 3.0)));
    CHECK(one.json().at("mean") == 3);
}

TEST_CASE("the tables over texts have a row for every policy and a column for every budget")
{
    auto const cells = measured();
    CHECK(runner::table_of_means(cells, 2).text()
          == "KL nats, mean (standard deviation)            KV 64               5%\n"
             "--------------------------------------------------------------------\n"
             "paper                               2.3333 (1.5275)  0.3333 (0.2887)\n"
             "best                                1.3333 (1.4434)  0.5833 (0.3819)\n");
    CHECK(runner::table_of_shares(cells, 2).text()
          == "resident, % of full, mean  KV 64    5%\n"
             "--------------------------------------\n"
             "paper                       3.12  5.00\n"
             "best                        3.12  5.00\n");
}

TEST_CASE("the conclusion names the nearest policy at each budget, whichever it is, and counts the budgets")
{
    auto cells = measured();
    for (auto& cell : cells) { cell.top1.add(0.5); }
    CHECK(runner::conclusion(cells, 2)
          == "At KV 64 (3.1 % of the full cache's bytes) best is nearest to the full cache: KL 1.3333, the same "
             "likeliest token at 50.0 % of the tokens.\n  KL of paper is 1.8 times that.\n"
             "At 5% (5.0 % of the full cache's bytes) paper is nearest to the full cache: KL 0.3333, the same "
             "likeliest token at 50.0 % of the tokens.\n  KL of best is 1.8 times that.\n"
             "Conclusion, in the mean of 3 texts: paper is nearest to the full cache at 1 of 2 budgets, best at 1 of "
             "2.\n");
    cells.resize(1);
    CHECK(runner::conclusion(cells, 1)
          == "At KV 64 (3.1 % of the full cache's bytes) paper is nearest to the full cache: KL 2.3333, the same "
             "likeliest token at 50.0 % of the tokens.\n");
    CHECK(runner::conclusion({}, 2).empty());
}

TEST_CASE("the legend explains every row and column")
{
    auto const text = runner::detail::legend({runner::find_policy("best"), runner::find_policy("snapkv")}, 32);
    for (char const* part : {"KL nats: ", "top-1 %: ", "added NLL: ", "bytes: ", "tokens per rung %: ",
             "the last 32 are\n", "\n  best: as by_window", "; rungs 0,1:int4,1:int8,1\n",
             "\n  snapkv: tokens that received", "arXiv 2404.14469; rungs 0,1\n"})
    {
        says(text, part);
    }
}

TEST_CASE("budgets are KV sizes, then shares; four KV sizes where neither is given")
{
    auto const texts = [](runner::compare_options const& options) {
        std::string all;
        for (runner::named_budget const& one : runner::budgets_of(options)) { all += one.text + ";"; }
        return all;
    };
    runner::compare_options options;
    CHECK(texts(options) == "KV 64;KV 128;KV 256;KV 512;");
    options.budgets = {"5%", "1/16"};
    CHECK(texts(options) == "5%;1/16;");
    options.kv_sizes = {128};
    CHECK(texts(options) == "KV 128;5%;1/16;");
    constexpr mdkv::layer_shape layer{2, 3, 1000, 24, {64, 64}, 2};
    CHECK(runner::budgets_of(options)[0].limit.in_bytes(layer) == mdkv::index_t{2} * 128 * 256);
    CHECK(runner::budgets_of(options)[1].limit.in_bytes(layer) == layer.full_bytes() / 20);
    options.budgets = {"105%"};
    CHECK_THROWS_AS(static_cast<void>(runner::budgets_of(options)), mdkv::invalid_argument);
}
