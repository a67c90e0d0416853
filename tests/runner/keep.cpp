#include "runner/systems/keep.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <mdkv/core/error.hpp>

#include "runner/systems/top.hpp"
#include "support/host.hpp"
#include "support/random.hpp"

namespace
{

using marks = std::vector<std::uint8_t>;

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr float infinite     = std::numeric_limits<float>::infinity();

} // namespace

TEST_CASE("a uniform count is the same for every head and stops at the past")
{
    CHECK(runner::uniform_counts(3, 10, 4) == std::vector<std::int64_t>{4, 4, 4});
    CHECK(runner::uniform_counts(2, 10, 11) == std::vector<std::int64_t>{10, 10});
    CHECK(runner::uniform_counts(2, 10, -1) == std::vector<std::int64_t>{0, 0});
    CHECK(runner::uniform_counts(0, 10, 4).empty());
}

TEST_CASE("each head keeps its own best, of equal ones the earlier")
{
    std::vector<float> const scores{0.5F, 2, 1, 2, 2, /* second head */ 7, 7, 7, 7, 7};
    CHECK(runner::keep_best(scores, {2, 3}) == marks{0, 1, 0, 1, 0, 1, 1, 1, 0, 0});
    CHECK(runner::keep_best(scores, {4, 0}) == marks{0, 1, 1, 1, 1, 0, 0, 0, 0, 0});
}

TEST_CASE("a count beyond the tokens keeps them all and takes nothing from other heads")
{
    CHECK(runner::keep_best({3, 1, 2, 1, 2, 3}, {100, 1}) == marks{1, 1, 1, 0, 0, 1});
    CHECK(runner::keep_best({}, {5, 5}).empty());
    CHECK(runner::keep_best({}, {}).empty());
}

TEST_CASE("a NaN is kept after every number, minus infinity included, and does not disturb their order")
{
    std::vector<float> const scores{not_a_number, -infinite, 1, not_a_number, infinite, 0};
    CHECK(runner::keep_best(scores, {1}) == marks{0, 0, 0, 0, 1, 0});
    CHECK(runner::keep_best(scores, {3}) == marks{0, 0, 1, 0, 1, 1});
    CHECK(runner::keep_best(scores, {4}) == marks{0, 1, 1, 0, 1, 1});
    CHECK(runner::keep_best(scores, {5}) == marks{1, 1, 1, 0, 1, 1});
    CHECK(runner::keep_best({not_a_number, not_a_number, not_a_number}, {2}) == marks{1, 1, 0});
}

TEST_CASE("the best are those a stable sort puts first, with many ties and NaN among them")
{
    support::source random{"keep"};
    CAPTURE(support::seed());
    for (int round = 0; round < 200; ++round)
    {
        std::vector<float> scores(static_cast<std::size_t>(random.below(40)));
        for (float& score : scores)
        {
            score = random.uniform() < 0.1 ? not_a_number : static_cast<float>(random.below(6)) - 2.0F;
        }
        auto const count = random.below(45);
        std::vector<std::int64_t> order(scores.size());
        for (std::size_t i = 0; i < order.size(); ++i) { order[i] = static_cast<std::int64_t>(i); }
        auto const rank = [&](std::int64_t i) {
            float const score = scores[static_cast<std::size_t>(i)];
            return std::isnan(score) ? -100.0F : score;
        };
        std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return rank(a) > rank(b); });
        order.resize(std::min(order.size(), static_cast<std::size_t>(count)));
        std::sort(order.begin(), order.end());
        auto best = runner::top_indices(scores, count);
        std::sort(best.begin(), best.end());
        REQUIRE(best == order);
    }
}

TEST_CASE("scores that do not fit the heads and negative counts are refused")
{
    CHECK(support::error_text<mdkv::invalid_argument>([] {
        static_cast<void>(runner::keep_best({1, 2, 3}, {1, 1}));
    }) == "keep_best: 3 scores are no whole number of tokens for 2 heads");
    CHECK(support::error_text<mdkv::invalid_argument>([] { static_cast<void>(runner::keep_best({1}, {})); })
          == "keep_best: 1 scores are no whole number of tokens for 0 heads");
    CHECK(support::error_text<mdkv::invalid_argument>([] {
        static_cast<void>(runner::keep_best({1, 2}, {1, -1}));
    }) == "keep_best: the count of head 1 is -1; it must not be negative");
}
