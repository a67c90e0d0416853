#include "policies/criticalkv.hpp"
#include "policies/expected_attention.hpp"
#include "policies/h2o.hpp"
#include "policies/keydiff.hpp"
#include "policies/random.hpp"
#include "policies/snapkv.hpp"
#include "policies/streaming.hpp"
#include "policies/tova.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numbers>
#include <string>
#include <utility>
#include <vector>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/thread_pool.hpp>
#include <mdkv/stages/pool.hpp>

#include "policies/keep.hpp"
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

template <class T>
std::vector<double> naive_keydiff(scored_prompt<T> const& prompt)
{
    auto const& layer = prompt.layer;
    std::vector<double> scores;
    for (std::int64_t h = 0; h < layer.heads; ++h)
    {
        auto const length = [&](std::int64_t t) {
            double square = 0;
            for (std::int64_t d = 0; d < layer.key_dim; ++d) { square += prompt.key(h, t, d) * prompt.key(h, t, d); }
            return std::sqrt(square);
        };
        std::vector<double> mean(static_cast<std::size_t>(layer.key_dim), 0.0);
        for (std::int64_t t = 0; t < layer.tokens; ++t)
        {
            for (std::int64_t d = 0; d < layer.key_dim; ++d)
            {
                mean[static_cast<std::size_t>(d)] +=
                    prompt.key(h, t, d) / length(t) / static_cast<double>(layer.tokens);
            }
        }
        double square = 0;
        for (double const x : mean) { square += x * x; }
        for (std::int64_t t = 0; t < layer.past(); ++t)
        {
            double product = 0;
            for (std::int64_t d = 0; d < layer.key_dim; ++d)
            {
                product += prompt.key(h, t, d) * mean[static_cast<std::size_t>(d)];
            }
            scores.push_back(-product / length(t) / std::sqrt(square));
        }
    }
    return scores;
}

using matrix = std::vector<std::vector<double>>;

/// The rotation of a position, as scored_prompt has it: base 100, three quarters of the coordinates.
template <class T>
matrix rotation_at(scored_prompt<T> const& prompt, std::int64_t position)
{
    std::int64_t const dim = prompt.layer.key_dim;
    bool const halves      = prompt.rotation->pairs() == mdkv::rotary_pairs::halves;
    auto const size        = static_cast<std::size_t>(dim);
    matrix r(size, std::vector<double>(size, 0.0));
    for (std::size_t d = 0; d < size; ++d) { r[d][d] = 1; }
    std::size_t const turning = size / 4 * 3;
    for (std::size_t d = 0; d < turning; d += 2)
    {
        double const angle =
            static_cast<double>(position) * std::pow(100.0, -static_cast<double>(d) / static_cast<double>(turning));
        std::size_t const i = halves ? d / 2 : d;
        std::size_t const j = halves ? (d + turning) / 2 : d + 1;
        r[i][i] = r[j][j] = std::cos(angle);
        r[i][j]           = -std::sin(angle);
        r[j][i]           = std::sin(angle);
    }
    return r;
}

/// Logits of one query head for all keys, by the formulas of the paper, all in double.
template <class T>
std::vector<double> naive_expected_logits(
    scored_prompt<T> const& prompt, std::int64_t head, runner::expected_attention_options const& options)
{
    auto const& layer = prompt.layer;
    auto const dim    = static_cast<std::size_t>(layer.key_dim);
    matrix queries; // before rotation: the transposed rotation turns back
    for (std::int64_t t = options.sinks; t < layer.tokens; ++t)
    {
        matrix const r = rotation_at(prompt, t);
        std::vector<double> q(dim, 0.0);
        for (std::size_t i = 0; i < dim; ++i)
        {
            for (std::size_t j = 0; j < dim; ++j)
            {
                q[i] += r[j][i] * prompt.query(head, t, static_cast<std::int64_t>(j));
            }
        }
        queries.push_back(q);
    }
    auto const count = static_cast<double>(queries.size());
    std::vector<double> mean(dim, 0.0);
    for (auto const& q : queries)
    {
        for (std::size_t i = 0; i < dim; ++i) { mean[i] += q[i] / count; }
    }
    matrix average(dim, std::vector<double>(dim, 0.0));
    for (std::int64_t f = 0; f < options.future; ++f)
    {
        matrix const r = rotation_at(prompt, layer.tokens + f);
        for (std::size_t i = 0; i < dim; ++i)
        {
            for (std::size_t j = 0; j < dim; ++j) { average[i][j] += r[i][j] / static_cast<double>(options.future); }
        }
    }
    std::vector<double> logits;
    for (std::int64_t t = options.sinks; t < layer.tokens; ++t)
    {
        std::vector<double> key(dim, 0.0); // turned: k'Rm = (R'k)'m, and k'RCR'k = (R'k)'C(R'k)
        for (std::size_t i = 0; i < dim; ++i)
        {
            for (std::size_t j = 0; j < dim; ++j)
            {
                key[i] += average[j][i] * prompt.key(head / layer.group, t, static_cast<std::int64_t>(j));
            }
        }
        double first = 0, second = 0;
        for (std::size_t i = 0; i < dim; ++i) { first += key[i] * mean[i]; }
        for (auto const& q : queries)
        {
            double product = 0;
            for (std::size_t i = 0; i < dim; ++i) { product += key[i] * (q[i] - mean[i]); }
            second += product * product / count;
        }
        auto const d = static_cast<double>(dim);
        logits.push_back(first / std::sqrt(d) + (options.covariance ? second / d / 2 : 0.0));
    }
    return logits;
}

template <class T>
std::vector<double> naive_expected_attention(
    scored_prompt<T> const& prompt, runner::expected_attention_options const& options)
{
    auto const& layer = prompt.layer;
    std::vector<double> scores;
    double largest = 0;
    for (std::int64_t h = 0; h < layer.heads; ++h)
    {
        std::vector<double> mean(static_cast<std::size_t>(layer.tokens), 0.0);
        for (std::int64_t g = 0; g < layer.group; ++g)
        {
            auto const logits = naive_expected_logits(prompt, h * layer.group + g, options);
            double total      = 0;
            for (double const x : logits) { total += std::exp(x); }
            for (std::size_t i = 0; i < logits.size(); ++i)
            {
                mean[i + static_cast<std::size_t>(options.sinks)] +=
                    std::exp(logits[i]) / total / static_cast<double>(layer.group);
            }
        }
        for (std::int64_t t = 0; t < layer.tokens; ++t)
        {
            double square = 0;
            for (std::int64_t d = 0; d < layer.value_dim; ++d)
            {
                square += prompt.value(h, t, d) * prompt.value(h, t, d);
            }
            double& score = mean[static_cast<std::size_t>(t)];
            if (t < options.sinks) { continue; }
            if (options.value_norms) { score = (score + double{options.epsilon}) * std::sqrt(square); }
            largest = std::max(largest, score);
        }
        scores.insert(scores.end(), mean.begin(), mean.begin() + layer.past());
    }
    for (std::int64_t h = 0; h < layer.heads; ++h)
    {
        for (std::int64_t t = 0; t < options.sinks; ++t)
        {
            scores[static_cast<std::size_t>(h * layer.past() + t)] = largest + 1;
        }
    }
    return scores;
}

template <class T>
std::vector<double> naive_projected_norms(scored_prompt<T> const& prompt)
{
    auto const& layer          = prompt.layer;
    std::int64_t const columns = layer.heads * layer.group * layer.value_dim;
    std::vector<double> norms;
    for (std::int64_t h = 0; h < layer.heads; ++h)
    {
        for (std::int64_t t = 0; t < layer.past(); ++t)
        {
            double sum = 0;
            for (std::int64_t head = h * layer.group; head < (h + 1) * layer.group; ++head)
            {
                for (std::int64_t e = 0; e < layer.embedding; ++e)
                {
                    double product = 0;
                    for (std::int64_t d = 0; d < layer.value_dim; ++d)
                    {
                        product += double{layer.output_weights[e * columns + head * layer.value_dim + d]}
                                   * prompt.value(h, t, d);
                    }
                    sum += std::fabs(product);
                }
            }
            norms.push_back(sum / static_cast<double>(layer.group));
        }
    }
    return norms;
}

/// Positions kept of head `head`.
std::vector<std::int64_t> kept(std::vector<std::uint8_t> const& rungs, std::int64_t past, std::int64_t head)
{
    std::vector<std::int64_t> positions;
    for (std::int64_t t = 0; t < past; ++t)
    {
        if (rungs[static_cast<std::size_t>(head * past + t)] != 0) { positions.push_back(t); }
    }
    return positions;
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

TEST_CASE_TEMPLATE(
    "TOVA is the last query's attention, the mean over the layer's heads in every head", T, float, mdkv::half)
{
    scored_prompt<T> const prompt{small, small.window};
    runner::scratch_memory scratch;
    auto const got  = runner::tova_scores(prompt.layer, {}, scratch);
    auto const sums = prompt.received(small.window - 1, 1);
    auto const past = static_cast<std::size_t>(prompt.layer.past());
    std::vector<double> want;
    for (std::size_t i = 0; i < 2 * past; ++i) { want.push_back((sums[i % past] + sums[past + i % past]) / (2 * 3)); }
    auto const worst = compared(got, want);
    CHECK_MESSAGE(worst.within(1e-4), worst);
    CHECK(std::equal(got.begin(), got.begin() + prompt.layer.past(), got.begin() + prompt.layer.past()));

    auto const of_each        = runner::tova_scores(prompt.repeated().layer, {}, scratch); // the same mean
    auto const repeated_worst = compared(
        {of_each.begin(), of_each.begin() + prompt.layer.past()}, {want.begin(), want.begin() + prompt.layer.past()});
    CHECK_MESSAGE(repeated_worst.within(1e-4), repeated_worst);
}

TEST_CASE_TEMPLATE("KeyDiff is minus the cosine to the mean direction of all keys", T, float, mdkv::half)
{
    scored_prompt<T> prompt{small, small.window};
    runner::scratch_memory scratch;
    mdkv::cpu::thread_pool pool{2};
    auto const got   = runner::keydiff_scores(prompt.layer, pool, scratch);
    auto const worst = compared(got, naive_keydiff(prompt));
    CHECK_MESSAGE(worst.within(1e-5), worst);

    // A key of length 0 has no direction: its cosine counts as 0.
    std::fill_n(prompt.keys.begin(), small.key_dim, mdkv::narrow<T>(0.0F));
    CHECK(runner::keydiff_scores(prompt.layer, pool, scratch)[0] == 0.0F);
}

TEST_CASE_TEMPLATE(
    "Expected Attention is its formulas: queries turned back, the mean rotation of what follows, both moments", T,
    float, mdkv::half)
{
    CAPTURE(support::seed());
    scored_prompt<T> prompt{small, small.tokens};
    runner::scratch_memory scratch;
    mdkv::cpu::thread_pool pool{2};
    using enum mdkv::rotary_pairs;
    for (auto const& [pairs, options] : {std::pair{neighbours, runner::expected_attention_options{}},
             std::pair{halves, runner::expected_attention_options{}},
             std::pair{neighbours,
                 runner::expected_attention_options{.future = 7, .sinks = 0, .covariance = false, .epsilon = 0.5F}},
             std::pair{halves, runner::expected_attention_options{.future = 30, .sinks = 2, .value_norms = false}}})
    {
        CAPTURE(options.future);
        *prompt.rotation = runner::rotary{small.key_dim / 4 * 3, 100.0, {}, pairs};
        auto const worst = compared(runner::expected_attention_scores(prompt.layer, options, pool, scratch),
            naive_expected_attention(prompt, options));
        CHECK_MESSAGE(worst.within(2e-4), worst);
    }
}

TEST_CASE("Expected Attention keeps the sinks of every head before anything else")
{
    scored_prompt<float> const prompt{small, small.tokens};
    runner::scratch_memory scratch;
    auto const rungs = runner::keep_best(runner::expected_attention_scores(prompt.layer, {}, {}, scratch), {4, 4});
    for (std::int64_t h : {0, 1})
    {
        CHECK(kept(rungs, prompt.layer.past(), h) == std::vector<std::int64_t>{0, 1, 2, 3});
    }
}

TEST_CASE_TEMPLATE(
    "projected value norms are L1 norms after each query head's part of the output weights", T, float, mdkv::half)
{
    prompt_sizes sizes = small;
    sizes.tokens       = 300; // more than one block of values
    scored_prompt<T> const prompt{sizes, sizes.window};
    mdkv::cpu::thread_pool pool{2};
    auto const worst = compared(runner::projected_value_norms(prompt.layer, pool), naive_projected_norms(prompt));
    CHECK_MESSAGE(worst.within(1e-5), worst);
}

TEST_CASE("CriticalKV puts its first stage first and weighs the rest by projected norms")
{
    scored_prompt<float> const prompt{small, small.window};
    runner::scratch_memory scratch;
    auto const past  = static_cast<std::size_t>(prompt.layer.past());
    auto const norms = naive_projected_norms(prompt);
    auto const base =
        runner::snapkv_scores(prompt.layer, {.pooling = {5, mdkv::pooling::mean}, .mean = true}, {}, scratch);
    auto const first_stage = [&](std::int64_t count, bool window) {
        auto const got =
            runner::criticalkv_scores(prompt.layer, {count, count + 2}, {.window_in_first_stage = window}, {}, scratch);
        std::vector<std::int64_t> sizes;
        support::worst_error worst;
        for (std::size_t h : {0U, 1U})
        {
            auto const begin = got.begin() + static_cast<std::ptrdiff_t>(h * past);
            std::int64_t const top =
                std::count(begin, begin + prompt.layer.past(), std::numeric_limits<float>::infinity());
            sizes.push_back(top);
            std::vector<float> const of_head(base.begin() + static_cast<std::ptrdiff_t>(h * past),
                base.begin() + static_cast<std::ptrdiff_t>((h + 1) * past));
            auto const best = runner::keep_best(of_head, {top});
            for (std::size_t t = 0; t < past; ++t)
            {
                REQUIRE((best[t] != 0) == std::isinf(got[h * past + t]));
                double const want = (double{of_head[t]} + 1e-4) * norms[h * past + t];
                if (best[t] == 0) { worst.add(got[h * past + t], want, want); }
            }
        }
        CHECK_MESSAGE(worst.within(1e-5), worst);
        return sizes;
    };
    CHECK(first_stage(13, false) == std::vector<std::int64_t>{6, 7}); // int(13 / 2), int(15 / 2)
    CHECK(first_stage(13, true) == std::vector<std::int64_t>{2, 3});  // int((13 + 8) / 2) - 8, int((15 + 8) / 2) - 8
    CHECK(first_stage(4, true) == std::vector<std::int64_t>{0, 0});   // the window takes all of it
}

TEST_CASE("random scores depend on seed, layer, head and token alone, are the same everywhere, and uniform")
{
    CHECK(runner::mix_bits(0) == 0xe220a8397b1dcdafU); // splitmix64's first number of seed 0
    prompt_sizes sizes = small;
    sizes.tokens       = 4008;
    scored_prompt<float> prompt{sizes, 1};
    runner::scratch_memory scratch;
    auto const got = runner::random_scores(prompt.layer, 7, {}, scratch);
    REQUIRE(got.size() == 8000);
    CHECK(support::same_bits(got, runner::random_scores(prompt.layer, 7, {}, scratch)));
    CHECK_FALSE(support::same_bits(got, runner::random_scores(prompt.layer, 8, {}, scratch)));
    CHECK_FALSE(std::equal(got.begin(), got.begin() + 4000, got.begin() + 4000));
    auto other_layer = prompt.layer;
    ++other_layer.layer;
    CHECK_FALSE(support::same_bits(got, runner::random_scores(other_layer, 7, {}, scratch)));

    double sum = 0, low_half = 0;
    for (float const x : got)
    {
        REQUIRE(x >= 0.0F);
        REQUIRE(x < 1.0F);
        sum += double{x};
        low_half += x < 0.5F ? 1.0 : 0.0;
    }
    CHECK(sum / 8000 == doctest::Approx(0.5).epsilon(0.03));
    CHECK(low_half / 8000 == doctest::Approx(0.5).epsilon(0.05));
}

TEST_CASE("StreamingLLM keeps 4 sinks and, with the window, the T - 4 latest tokens")
{
    scored_prompt<float> const prompt{small, small.window};
    runner::scratch_memory scratch;
    auto const scores = runner::streaming_scores(prompt.layer, 4, {}, scratch);
    auto const of     = [&](std::int64_t size) { // the KV size, window included
        auto const past = size - small.window;
        return kept(runner::keep_best(scores, {past, past}), prompt.layer.past(), 1);
    };
    CHECK(of(16) == std::vector<std::int64_t>{0, 1, 2, 3, 38, 39, 40, 41}); // 38 .. 49 are 12 = 16 - 4 latest of 50
    CHECK(of(12) == std::vector<std::int64_t>{0, 1, 2, 3});
    CHECK(of(10) == std::vector<std::int64_t>{0, 1});
    CHECK(of(50).size() == 42);
    auto const no_sinks = runner::streaming_scores(prompt.layer, 0, {}, scratch);
    CHECK(kept(runner::keep_best(no_sinks, {3, 3}), prompt.layer.past(), 0) == std::vector<std::int64_t>{39, 40, 41});
}

TEST_CASE("a prompt that is all window leaves every policy nothing to score")
{
    scored_prompt<float> prompt{small, small.tokens};
    prompt.layer.window = prompt.layer.tokens;
    runner::scratch_memory scratch;
    CHECK(runner::snapkv_scores(prompt.layer, {}, {}, scratch).empty());
    CHECK(runner::h2o_scores(prompt.layer, {}, scratch).empty());
    CHECK(runner::tova_scores(prompt.layer, {}, scratch).empty());
    CHECK(runner::keydiff_scores(prompt.layer, {}, scratch).empty());
    CHECK(runner::expected_attention_scores(prompt.layer, {}, {}, scratch).empty());
    CHECK(runner::criticalkv_scores(prompt.layer, {0, 0}, {}, {}, scratch).empty());
    CHECK(runner::random_scores(prompt.layer, 1, {}, scratch).empty());
    CHECK(runner::streaming_scores(prompt.layer, 4, {}, scratch).empty());
}

TEST_CASE(
    "a prompt of sinks alone has equal scores in Expected Attention, and fewer past tokens than sinks are no trouble")
{
    scored_prompt<float> const prompt{{.heads = 2, .group = 1, .tokens = 11, .window = 8, .key_dim = 16}, 11};
    runner::scratch_memory scratch;
    CHECK(runner::expected_attention_scores(prompt.layer, {}, {}, scratch) == std::vector<float>(6, 0.0F));
    CHECK(kept(runner::keep_best(runner::streaming_scores(prompt.layer, 4, {}, scratch), {2, 2}), 3, 1)
          == std::vector<std::int64_t>{0, 1});
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
    CHECK(refused([&] { return runner::expected_attention_scores(prompt.layer, {}, {}, scratch); })
          == "expected_attention_scores: the layer has the queries of 8 tokens; all 50 are needed");
    CHECK(refused([&] { return runner::criticalkv_scores(prompt.layer, {4}, {}, {}, scratch); })
          == "two_stage_scores: 84 base scores and 1 counts for 2 heads of 42 tokens");
    CHECK(refused([&] {
        return runner::snapkv_scores(prompt.layer, {.pooling = {6, mdkv::pooling::max}}, {}, scratch);
    }) == "pool: width is 6; it must be odd and at least 1");
    prompt.layer.output_weights = nullptr;
    CHECK(refused([&] {
        return runner::criticalkv_scores(prompt.layer, {4, 4}, {}, {}, scratch);
    }) == "projected_value_norms: the layer has no output_weights");
    prompt.layer.rotation = nullptr;
    CHECK(refused([&] { return runner::expected_attention_scores(prompt.layer, {}, {}, scratch); })
          == "expected_attention_scores: the layer has no rotation");
    prompt.layer.window = 0;
    CHECK(refused([&] { return runner::snapkv_scores(prompt.layer, {}, {}, scratch); })
          == "snapkv_scores: the layer has 8 queries for a window of 0");
    scored_prompt<float> const all{small, small.tokens};
    CHECK(refused([&] { return runner::expected_attention_scores(all.layer, {.future = 0}, {}, scratch); })
          == "expected_attention_scores: future is 0 and sinks is 4; they must be at least 1 and 0");
}
