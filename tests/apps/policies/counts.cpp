#include "policies/counts.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <mdkv/core/error.hpp>

#include "policies/keep.hpp"
#include "support/host.hpp"
#include "support/random.hpp"

namespace
{

using counts = std::vector<std::int64_t>;

/// Scores of two heads of which the first has `first` of the best `of`, the second the others, with `past` tokens each.
std::vector<float> split_best(std::int64_t past, std::int64_t first, std::int64_t of)
{
    std::vector<float> scores(static_cast<std::size_t>(2 * past), 0.0F);
    for (std::int64_t i = 0; i < first; ++i) { scores[static_cast<std::size_t>(i)] = 1.0F; }
    for (std::int64_t i = first; i < of; ++i) { scores[static_cast<std::size_t>(past + i - first)] = 1.0F; }
    return scores;
}

} // namespace

TEST_CASE("a uniform count is the same for every head and stops at the past")
{
    CHECK(runner::uniform_counts(3, 10, 4) == counts{4, 4, 4});
    CHECK(runner::uniform_counts(2, 10, 11) == counts{10, 10});
    CHECK(runner::uniform_counts(2, 10, -1) == counts{0, 0});
    CHECK(runner::uniform_counts(0, 10, 4).empty());
}

TEST_CASE(
    "adaptive counts are AdaKV's: the layer's best by head, a floor, halves rounded to even, and no making up for it")
{
    SUBCASE("worked by hand: 4 and 2 of the best 6; floor int(0.2 * 3) = 0; 3.2 and 1.6 round to 3 and 2")
    {
        CHECK(runner::adaptive_counts({9, 8, 7, 6, 1, 0, 5, 4, 0, 0, 0, 0}, 2, 3) == counts{3, 2});
    }
    SUBCASE("17 and 3 of the best 20; floor 2; 15.6 and 4.4 round to 16 and 4")
    {
        CHECK(runner::adaptive_counts(split_best(20, 17, 20), 2, 10) == counts{16, 4});
    }
    SUBCASE("all 20 in one head; floor 2: the other keeps its floor")
    {
        CHECK(runner::adaptive_counts(split_best(20, 20, 20), 2, 10) == counts{18, 2});
    }
    SUBCASE("halves: floor ratio 0.5 of 3 is 1; 3.5 and 1.5 round to 4 and 2")
    {
        CHECK(runner::adaptive_counts(split_best(9, 5, 6), 2, 3, {.floor_ratio = 0.5}) == counts{4, 2});
    }
    SUBCASE("halves: floor ratio 0.5 of 4 is 2; 5.5 and 2.5 round to 6 and 2")
    {
        CHECK(runner::adaptive_counts(split_best(9, 7, 8), 2, 4, {.floor_ratio = 0.5}) == counts{6, 2});
    }
    SUBCASE("a floor of everything is the uniform count, none the plain vote")
    {
        CHECK(runner::adaptive_counts(split_best(20, 17, 20), 2, 10, {.floor_ratio = 1.0}) == counts{10, 10});
        CHECK(runner::adaptive_counts(split_best(20, 17, 20), 2, 10, {.floor_ratio = 0.0}) == counts{17, 3});
    }
}

TEST_CASE("equal scores are counted in the lower head first")
{
    CHECK(runner::adaptive_counts(std::vector<float>(12, 1.0F), 3, 2, {.floor_ratio = 0.0}) == counts{4, 2, 0});
}

TEST_CASE("a count beyond the past keeps everything, as AdaKV leaves such a layer alone")
{
    CHECK(runner::adaptive_counts({3, 2, 1, 0, 0, 0}, 2, 4) == counts{3, 3});
    CHECK(runner::adaptive_counts({3, 2, 1, 0, 0, 0}, 2, 3) == counts{2, 2}); // b = N - W: 0.8 * 3 + int(0.6) = 2.4
    CHECK(runner::adaptive_counts({3, 2, 1, 0, 0, 0}, 2, 0) == counts{0, 0});
    CHECK(runner::adaptive_counts({}, 2, 4) == counts{0, 0});
}

TEST_CASE("normalising weighs a head by the part of its scores that its best tokens hold")
{
    // The best two of head 0 hold half of its sum, so that its 4 counts as 2; those of head 1 hold all of it.
    std::vector<float> const scores{4, 4, 4, 4, 3, 3, 0, 0};
    CHECK(runner::adaptive_counts(scores, 2, 2, {.floor_ratio = 0.0}) == counts{4, 0});
    CHECK(runner::adaptive_counts(scores, 2, 2, {.floor_ratio = 0.0, .normalise = true}) == counts{2, 2});
    CHECK(runner::adaptive_counts(std::vector<float>(8, 0.0F), 2, 2, {.normalise = true}) == counts{3, 0}); // no 0 / 0
}

TEST_CASE("adaptive counts keep the floor, stay within the past and miss the total by rounding alone")
{
    support::source random{"adaptive"};
    CAPTURE(support::seed());
    for (int round = 0; round < 100; ++round)
    {
        auto const heads = 1 + random.below(5);
        auto const past  = 1 + random.below(60);
        auto const kept  = random.below(past + 1);
        std::vector<float> scores;
        for (std::int64_t i = 0; i < heads * past; ++i)
        {
            scores.push_back(static_cast<float>(std::exp(3.0 * random.normal() + static_cast<double>(i / past))));
        }
        auto const got = runner::adaptive_counts(scores, heads, kept);
        REQUIRE(std::ssize(got) == heads);
        std::int64_t total = 0;
        for (std::int64_t const count : got)
        {
            REQUIRE(count >= static_cast<std::int64_t>(static_cast<double>(kept) * 0.2));
            REQUIRE(count <= past);
            total += count;
        }
        // int() takes less than a token a head, rounding half a token more or less.
        REQUIRE(static_cast<double>(total) <= static_cast<double>(heads) * (static_cast<double>(kept) + 0.5));
        REQUIRE(static_cast<double>(total) >= static_cast<double>(heads) * (static_cast<double>(kept) - 1.5));
        std::int64_t marked = 0;
        for (auto const mark : runner::keep_best(scores, got)) { marked += mark; }
        REQUIRE(marked == total);
    }
}

TEST_CASE("adaptive counts refuse scores that do not fit, a floor outside 0 and 1, and a negative count")
{
    auto const refused = [](std::int64_t heads, std::int64_t kept, double floor) {
        return support::error_text<mdkv::invalid_argument>([&] {
            static_cast<void>(runner::adaptive_counts({1, 2, 3, 4}, heads, kept, {.floor_ratio = floor}));
        });
    };
    CHECK(refused(3, 1, 0.2) == "adaptive_counts: 4 scores are no whole number of tokens for 3 heads");
    CHECK(refused(0, 1, 0.2) == "adaptive_counts: 4 scores are no whole number of tokens for 0 heads");
    CHECK(refused(2, 1, 1.5) == "adaptive_counts: floor_ratio is 1.5; it must lie in [0, 1]");
    CHECK(refused(2, 1, std::nan("")) == "adaptive_counts: floor_ratio is nan; it must lie in [0, 1]");
    CHECK(refused(2, -1, 0.2) == "adaptive_counts: kept is -1; it must not be negative");
}
