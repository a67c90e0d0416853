#include "policies/evicting_cache.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include "support/host.hpp"
#include "support/prompt.hpp"

namespace
{

/// The authors' rule on one head, as plainly as it can be written: a list of tokens and their sums.
struct naive_h2o
{
    std::int64_t heavy, recent;
    std::vector<support::whole_token> tokens;
    std::vector<double> sums;

    void evict()
    {
        auto const count = std::ssize(tokens);
        if (count <= heavy + recent) { return; }
        std::vector<std::pair<double, std::int64_t>> older;
        for (std::int64_t i = 0; i < count - recent; ++i) { older.emplace_back(sums[static_cast<std::size_t>(i)], i); }
        std::sort(older.rbegin(), older.rend());
        older.resize(static_cast<std::size_t>(heavy));
        std::vector<std::int64_t> stay;
        for (auto const& one : older) { stay.push_back(one.second); }
        std::sort(stay.begin(), stay.end());
        for (std::int64_t i = count - recent; i < count; ++i) { stay.push_back(i); }
        std::vector<support::whole_token> kept;
        std::vector<double> kept_sums;
        for (std::int64_t const i : stay)
        {
            kept.push_back(tokens[static_cast<std::size_t>(i)]);
            kept_sums.push_back(sums[static_cast<std::size_t>(i)]);
        }
        tokens = std::move(kept);
        sums   = std::move(kept_sums);
    }

    /// Adds the probabilities that a query gives the tokens.
    void observe(std::vector<double> const& query)
    {
        std::vector<double> p;
        double total = 0;
        for (auto const& token : tokens)
        {
            double dot = 0;
            for (std::size_t d = 0; d < query.size(); ++d) { dot += query[d] * token.key[d]; }
            p.push_back(std::exp(dot / std::sqrt(static_cast<double>(query.size()))));
            total += p.back();
        }
        for (std::size_t i = 0; i < p.size(); ++i) { sums[i] += p[i] / total; }
    }
};

std::vector<float> random_sums(support::source& random, std::int64_t count)
{
    std::vector<float> sums;
    for (std::int64_t i = 0; i < count; ++i) { sums.push_back(static_cast<float>(random.uniform(0.0, 3.0))); }
    return sums;
}

} // namespace

TEST_CASE_TEMPLATE("H2O evicts step by step what its authors' rule evicts", T, float, mdkv::half)
{
    support::random_prompt<T> prompt{{.tokens = 30, .key_dim = 8, .value_dim = 12}};
    auto const& layer = prompt.layer;
    auto const sums   = random_sums(prompt.random, layer.heads * layer.tokens);
    runner::heavy_hitters limit{7, 5};
    SUBCASE("a prompt longer than the limit")
    {}
    SUBCASE("a prompt shorter than the limit, reached while decoding")
    {
        limit = {20, 15};
    }
    SUBCASE("no recent tokens: even the newest may go at once")
    {
        limit = {9, 0};
    }
    SUBCASE("no heavy tokens: a sliding window")
    {
        limit = {0, 9};
    }

    std::vector<naive_h2o> heads;
    for (std::int64_t h = 0; h < layer.heads; ++h)
    {
        naive_h2o head{limit.heavy, limit.recent, {}, {}};
        for (std::int64_t t = 0; t < layer.tokens; ++t)
        {
            head.tokens.push_back(support::token_of(layer, h, t));
            head.sums.push_back(double{sums[static_cast<std::size_t>(h * layer.tokens + t)]});
        }
        head.evict();
        heads.push_back(std::move(head));
    }
    runner::evicting_cache<T> cache{layer, sums, limit};
    runner::scratch_memory scratch;
    mdkv::cpu::thread_pool threads{2};
    std::vector<float> output(static_cast<std::size_t>(layer.heads * layer.group * layer.value_dim));
    for (int step = 0; step < 50; ++step)
    {
        CAPTURE(step);
        support::decode_step_rows const rows{prompt.random, layer};
        std::vector<std::vector<support::whole_token>> seen; // what this step attends over
        for (std::int64_t h = 0; h < layer.heads; ++h)
        {
            auto& head = heads[static_cast<std::size_t>(h)];
            head.tokens.push_back(rows.token(layer, h));
            head.sums.push_back(0);
            for (std::int64_t g = 0; g < layer.group; ++g)
            {
                head.observe(rows.query_row(h * layer.group + g, layer.key_dim));
            }
            seen.push_back(head.tokens);
            head.evict();
        }
        cache.attend(threads, scratch, rows.query.data(), rows.key.data(), rows.value.data(), output.data());
        CHECK(support::attention_error(layer, rows, seen, output) < 1e-5);
        for (std::int64_t h = 0; h < layer.heads; ++h)
        {
            auto const& expected = heads[static_cast<std::size_t>(h)].sums;
            REQUIRE(cache.sums(h).size() == expected.size());
            for (std::size_t i = 0; i < expected.size(); ++i)
            {
                CHECK(double{cache.sums(h)[i]} == doctest::Approx(expected[i]).epsilon(1e-4));
            }
        }
    }
}

TEST_CASE("of equal sums the older token goes, in the prompt and afterwards")
{
    // Equal keys give equal probabilities, so that only the order of the tokens tells them apart.
    support::random_prompt<float> prompt{
        {.heads = 1, .group = 1, .tokens = 6, .window = 1, .key_dim = 2, .value_dim = 1}};
    std::fill(prompt.keys.begin(), prompt.keys.end(), 0.0F);
    prompt.values       = {1, 2, 3, 4, 5, 6};
    prompt.layer.values = prompt.values.data();
    std::vector<float> const sums(6, 1.0F);
    runner::evicting_cache<float> cache{prompt.layer, sums, {2, 2}}; // 3 and 4, 5 and 6
    runner::scratch_memory scratch;
    std::vector<float> const zero(2, 0.0F);
    float const seven = 7, eight = 8;
    float output = 0;
    cache.attend({}, scratch, zero.data(), zero.data(), &seven, &output);
    CHECK(output == doctest::Approx((3 + 4 + 5 + 6 + 7) / 5.0)); // then 3 goes
    cache.attend({}, scratch, zero.data(), zero.data(), &eight, &output);
    CHECK(output == doctest::Approx((4 + 5 + 6 + 7 + 8) / 5.0));
}

TEST_CASE("H2O's memory is bounded by its limit however long it decodes")
{
    support::random_prompt<mdkv::half> prompt{{.tokens = 40}};
    auto const& layer = prompt.layer;
    auto const limit  = runner::heavy_hitters::of_size(17);
    CHECK(limit.heavy == 9);
    CHECK(limit.recent == 8);
    runner::evicting_cache<mdkv::half> cache{layer, random_sums(prompt.random, layer.heads * layer.tokens), limit};
    std::int64_t const row = (layer.key_dim + layer.value_dim) * 2 + 4;
    CHECK(cache.resident_bytes() == layer.heads * 17 * row);
    runner::scratch_memory scratch;
    std::vector<float> output(static_cast<std::size_t>(layer.heads * layer.group * layer.value_dim));
    for (int step = 0; step < 100; ++step)
    {
        support::decode_step_rows const rows{prompt.random, layer};
        cache.attend({}, scratch, rows.query.data(), rows.key.data(), rows.value.data(), output.data());
        CHECK(cache.tokens() == 17);
        CHECK(cache.resident_bytes() == layer.heads * 17 * row);
    }
}

TEST_CASE("a large cache decodes to the same bits on two threads as on one")
{
    support::random_prompt<float> prompt{{.tokens = 3000, .key_dim = 64, .value_dim = 64}};
    auto const& layer = prompt.layer;
    auto const sums   = random_sums(prompt.random, layer.heads * layer.tokens);
    runner::evicting_cache<float> one{layer, sums, {1400, 1400}};
    runner::evicting_cache<float> two{layer, sums, {1400, 1400}};
    REQUIRE(one.resident_bytes() > 2 << 20); // enough to be worth a second thread
    runner::scratch_memory scratch;
    mdkv::cpu::thread_pool threads{2};
    std::vector<float> a(static_cast<std::size_t>(layer.heads * layer.group * layer.value_dim)), b(a.size());
    for (int step = 0; step < 3; ++step)
    {
        support::decode_step_rows const rows{prompt.random, layer};
        one.attend({}, scratch, rows.query.data(), rows.key.data(), rows.value.data(), a.data());
        two.attend(threads, scratch, rows.query.data(), rows.key.data(), rows.value.data(), b.data());
        CHECK(a == b);
    }
}

TEST_CASE("H2O refuses sums of another size and limits that hold nothing")
{
    support::random_prompt<float> prompt{{}};
    std::vector<float> sums(static_cast<std::size_t>(prompt.layer.heads * prompt.layer.tokens), 1.0F);
    auto const make = [&](runner::heavy_hitters limit) {
        return support::error_text<mdkv::invalid_argument>([&] {
            runner::evicting_cache<float> const cache{prompt.layer, sums, limit};
        });
    };
    CHECK(make({0, 0}).find("0 heavy and 0 recent") != std::string::npos);
    CHECK(make({-1, 4}).find("-1 heavy") != std::string::npos);
    sums.pop_back();
    CHECK(make({4, 4}).find("[heads, tokens] is [2, 60]") != std::string::npos);
}
