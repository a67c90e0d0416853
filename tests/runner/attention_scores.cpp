#include "runner/systems/attention_scores.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/thread_pool.hpp>
#include <mdkv/stages/pool.hpp>

#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/scored_prompt.hpp"

namespace
{

using support::prompt_sizes;
using support::scored_prompt;

constexpr prompt_sizes small{.heads = 2, .group = 3, .tokens = 50, .window = 8, .key_dim = 16, .value_dim = 16};

template <class T>
std::vector<float> received(runner::prompt_layer<T> const& layer, std::int64_t first_row, std::int64_t rows,
    mdkv::cpu::executor_ref executor = {})
{
    runner::scratch_memory scratch;
    return runner::received_attention(layer, first_row, rows, executor, scratch);
}

/// Error of each sum in units of the number of probabilities in it.
support::worst_error compared(std::vector<float> const& got, std::vector<double> const& want, double magnitude)
{
    support::worst_error worst;
    REQUIRE(got.size() == want.size());
    for (std::size_t i = 0; i < got.size(); ++i)
    {
        worst.add(got[i], want[i], magnitude, static_cast<std::int64_t>(i));
    }
    return worst;
}

std::vector<float> pooled(std::vector<float> const& scores, std::int64_t heads, mdkv::pool_options options)
{
    runner::scratch_memory scratch;
    return runner::pooled_scores(scores, heads, options, {}, scratch);
}

} // namespace

TEST_CASE_TEMPLATE(
    "attention received, by the library's score, is the direct sum of softmax probabilities", T, float, mdkv::half)
{
    CAPTURE(support::seed());
    SUBCASE("of the window's rows")
    {
        scored_prompt<T> const prompt{small, small.window};
        auto const worst = compared(received(prompt.layer, 0, small.window), prompt.received(0, small.window), 1.0);
        CHECK_MESSAGE(worst.within(1e-5), worst);
    }
    SUBCASE("of the last row, of rows in the midst and of all rows, where all are at hand")
    {
        scored_prompt<T> const prompt{small, small.tokens};
        for (auto const& [first, rows] :
            {std::pair{small.tokens - 1, std::int64_t{1}}, std::pair{std::int64_t{5}, std::int64_t{20}},
                std::pair{std::int64_t{30}, std::int64_t{15}}, std::pair{std::int64_t{0}, small.tokens}})
        {
            CAPTURE(first);
            auto const worst = compared(received(prompt.layer, first, rows), prompt.received(first, rows), 1.0);
            CHECK_MESSAGE(worst.within(1e-5), worst);
        }
    }
    SUBCASE("where the log-sum-exps are not known")
    {
        scored_prompt<T> prompt{small, small.tokens};
        prompt.layer.lse = nullptr;
        auto const worst = compared(received(prompt.layer, 0, small.tokens), prompt.received(0, small.tokens), 1.0);
        CHECK_MESSAGE(worst.within(1e-5), worst);
    }
}

TEST_CASE("the window's keys take part in the softmax")
{
    scored_prompt<float> const prompt{small, small.window};
    auto const got     = received(prompt.layer, 0, small.window);
    auto const with    = compared(got, prompt.received(0, small.window, true), 1.0);
    auto const without = compared(got, prompt.received(0, small.window, false), 1.0);
    CHECK_MESSAGE(with.within(1e-5), with);
    CHECK_MESSAGE(without.value() > 0.1, without);
}

TEST_CASE("more rows than one call takes are added up, to the same bits for any number of threads")
{
    prompt_sizes const sizes{
        .heads = 2, .group = 2, .tokens = 2 * runner::detail::attention_rows + 70, .window = 9, .key_dim = 8};
    scored_prompt<float> const prompt{sizes, sizes.tokens};
    auto const got   = received(prompt.layer, 0, sizes.tokens);
    auto const worst = compared(got, prompt.received(0, sizes.tokens), static_cast<double>(sizes.tokens));
    CHECK_MESSAGE(worst.within(1e-7), worst);
    mdkv::cpu::thread_pool pool{3};
    CHECK(support::same_bits(got, received(prompt.layer, 0, sizes.tokens, pool)));
}

TEST_CASE("a window of no tokens scores all of them, and every row gives away exactly 1")
{
    scored_prompt<float> prompt{small, small.tokens};
    prompt.layer.window = 0;
    auto const got      = received(prompt.layer, 10, 25);
    REQUIRE(std::ssize(got) == small.heads * small.tokens);
    double const total = std::accumulate(got.begin(), got.end(), 0.0);
    CHECK(total == doctest::Approx(static_cast<double>(25 * small.heads * small.group)).epsilon(1e-6));
    auto const worst = compared(got, prompt.received(10, 25), 1.0);
    CHECK_MESSAGE(worst.within(1e-5), worst);
}

TEST_CASE("what a shared head receives is the sum over the query heads that share it")
{
    scored_prompt<float> const shared{small, small.window};
    scored_prompt<float> const each = shared.repeated();
    auto const of_group             = received(shared.layer, 0, small.window);
    auto const of_each              = received(each.layer, 0, small.window);
    auto const past                 = static_cast<std::size_t>(shared.layer.past());
    REQUIRE(of_each.size() == 3 * of_group.size());
    support::worst_error worst;
    for (std::size_t i = 0; i < of_group.size(); ++i)
    {
        double sum = 0;
        for (std::size_t g = 0; g < 3; ++g) { sum += double{of_each[(i / past * 3 + g) * past + i % past]}; }
        worst.add(of_group[i], sum, 1.0);
    }
    CHECK_MESSAGE(worst.within(1e-5), worst);
}

TEST_CASE("a prompt that is all window has nothing to score, and rows outside the queries are refused")
{
    scored_prompt<float> prompt{small, small.window};
    CHECK(support::error_text<mdkv::invalid_argument>([&] { static_cast<void>(received(prompt.layer, 0, 9)); })
          == "received_attention: rows 0 to 8 leave the 8 queries of the layer");
    CHECK(support::error_text<mdkv::invalid_argument>([&] { static_cast<void>(received(prompt.layer, -1, 2)); })
          == "received_attention: rows -1 to 0 leave the 8 queries of the layer");
    prompt.layer.window = prompt.layer.tokens;
    CHECK(received(prompt.layer, 0, small.window).empty());
}

TEST_CASE("neighbours share their scores within their head only")
{
    std::vector<float> const scores{1, 6, 2, 0, 0, 9, 3, 0, 0, 3};
    CHECK(pooled(scores, 2, {3, mdkv::pooling::max}) == std::vector<float>{6, 6, 6, 2, 0, 9, 9, 3, 3, 3});
    CHECK(pooled(scores, 2, {3, mdkv::pooling::mean})
          == std::vector<float>{7.0F / 3, 3, 8.0F / 3, 2.0F / 3, 0, 4, 4, 1, 1, 1});
    CHECK(pooled(scores, 1, {1, mdkv::pooling::max}) == scores);
    CHECK(pooled({}, 2, {7, mdkv::pooling::max}).empty());
    CHECK(support::error_text<mdkv::invalid_argument>([&] {
        static_cast<void>(pooled(scores, 3, {3, mdkv::pooling::max}));
    }) == "pooled_scores: 10 scores are no whole number of tokens for 3 heads");
    CHECK(support::error_text<mdkv::invalid_argument>([&] {
        static_cast<void>(pooled(scores, 2, {4, mdkv::pooling::max}));
    }) == "pool: width is 4; it must be odd and at least 1");
}
