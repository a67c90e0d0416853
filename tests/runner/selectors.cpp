#include "runner/systems/h2o.hpp"
#include "runner/systems/snapkv.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/stages/pool.hpp>

#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/scored_prompt.hpp"

namespace
{

using support::prompt_sizes;
using support::scored_prompt;

constexpr prompt_sizes small{.heads = 2, .group = 3, .tokens = 50, .window = 8, .key_dim = 16, .value_dim = 12};

/// Largest error relative to the wanted score; a thousandth of the largest one is the least that counts.
support::worst_error compared(std::vector<float> const& got, std::vector<double> const& want)
{
    support::worst_error worst;
    REQUIRE(got.size() == want.size());
    REQUIRE(!want.empty());
    double const largest = *std::max_element(want.begin(), want.end());
    for (std::size_t i = 0; i < got.size(); ++i)
    {
        worst.add(got[i], want[i], std::max(std::fabs(want[i]), 1e-3 * largest), static_cast<std::int64_t>(i));
    }
    return worst;
}

/// By the definition; `past` scores a head.
std::vector<double> pooled(std::vector<double> const& scores, std::int64_t past, std::int64_t width, bool largest)
{
    std::vector<double> out;
    for (std::int64_t i = 0; i < std::ssize(scores); ++i)
    {
        std::int64_t const head = i / past;
        double sum              = 0;
        double most             = -std::numeric_limits<double>::infinity();
        for (std::int64_t j = i - width / 2; j <= i + width / 2; ++j)
        {
            if (j < head * past || j >= (head + 1) * past) { continue; }
            sum += scores[static_cast<std::size_t>(j)];
            most = std::max(most, scores[static_cast<std::size_t>(j)]);
        }
        out.push_back(largest ? most : sum / static_cast<double>(width));
    }
    return out;
}

} // namespace

TEST_CASE_TEMPLATE(
    "SnapKV is the window's attention, pooled: by default the largest of 7, as a sum", T, float, mdkv::half)
{
    CAPTURE(support::seed());
    scored_prompt<T> const prompt{small, small.window};
    runner::scratch_memory scratch;
    auto const sums = prompt.received(0, small.window);
    SUBCASE("defaults")
    {
        auto const worst =
            compared(runner::snapkv_scores(prompt.layer, {}, {}, scratch), pooled(sums, prompt.layer.past(), 7, true));
        CHECK_MESSAGE(worst.within(1e-4), worst);
    }
    SUBCASE("the mean over 5, and over rows and query heads")
    {
        auto want = pooled(sums, prompt.layer.past(), 5, false);
        for (double& x : want) { x /= 8 * 3; }
        auto const worst =
            compared(runner::snapkv_scores(prompt.layer, {{5, mdkv::pooling::mean}, true}, {}, scratch), want);
        CHECK_MESSAGE(worst.within(1e-4), worst);
    }
    SUBCASE("where more queries are at hand than the window's, the same")
    {
        scored_prompt<T> const all{small, small.tokens};
        auto const worst = compared(runner::snapkv_scores(all.layer, {}, {}, scratch),
            pooled(all.received(small.tokens - small.window, small.window), all.layer.past(), 7, true));
        CHECK_MESSAGE(worst.within(1e-4), worst);
    }
}

TEST_CASE("SnapKV of repeated heads has the sum of its shared heads before pooling")
{
    scored_prompt<float> const shared{small, small.window};
    auto const each = shared.repeated();
    runner::scratch_memory scratch;
    runner::snapkv_options const options{.pooling = {5, mdkv::pooling::mean}}; // a sum: it may come before or after
    auto const of_group = runner::snapkv_scores(shared.layer, options, {}, scratch);
    auto const of_each  = runner::snapkv_scores(each.layer, options, {}, scratch);
    auto const past     = static_cast<std::size_t>(shared.layer.past());
    std::vector<double> want(of_group.size(), 0.0);
    for (std::size_t i = 0; i < of_each.size(); ++i) { want[i / past / 3 * past + i % past] += double{of_each[i]}; }
    auto const worst = compared(of_group, want);
    CHECK_MESSAGE(worst.within(1e-4), worst);
}

TEST_CASE_TEMPLATE("H2O is the attention of all queries, causal and unpooled", T, float, mdkv::half)
{
    scored_prompt<T> const prompt{small, small.tokens};
    runner::scratch_memory scratch;
    auto const worst = compared(runner::h2o_scores(prompt.layer, {}, scratch), prompt.received(0, small.tokens));
    CHECK_MESSAGE(worst.within(1e-4), worst);
}

TEST_CASE("a prompt that is all window leaves every policy nothing to score")
{
    scored_prompt<float> prompt{small, small.tokens};
    prompt.layer.window = prompt.layer.tokens;
    runner::scratch_memory scratch;
    CHECK(runner::snapkv_scores(prompt.layer, {}, {}, scratch).empty());
    CHECK(runner::h2o_scores(prompt.layer, {}, scratch).empty());
}

TEST_CASE("a layer that lacks what a policy reads is refused, naming it")
{
    scored_prompt<float> prompt{small, small.window};
    runner::scratch_memory scratch;
    auto const refused = [](auto const& call) {
        return support::error_text<mdkv::invalid_argument>([&] { static_cast<void>(call()); });
    };
    CHECK(refused([&] { return runner::h2o_scores(prompt.layer, {}, scratch); })
          == "h2o_scores: the layer has the queries of 8 tokens; all 50 are needed");
    CHECK(refused([&] {
        return runner::snapkv_scores(prompt.layer, {.pooling = {6, mdkv::pooling::max}}, {}, scratch);
    }) == "pool: width is 6; it must be odd and at least 1");
    prompt.layer.window = 0;
    CHECK(refused([&] { return runner::snapkv_scores(prompt.layer, {}, {}, scratch); })
          == "snapkv_scores: the layer has 8 queries for a window of 0");
}
