#include "policies/think.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include "policies/packed_cache.hpp"
#include "support/host.hpp"
#include "support/prompt.hpp"

namespace
{

template <class T>
bool stays(runner::prompt_layer<T> const& layer, std::vector<std::uint8_t> const& kept, std::int64_t h, std::int64_t t)
{
    return t >= layer.past() || kept[static_cast<std::size_t>(h * layer.past() + t)] != 0;
}

/// The channels of head h that go, by the definition with means.
template <class T>
std::vector<std::size_t> dropped_channels(runner::prompt_layer<T> const& layer, std::vector<std::uint8_t> const& kept,
    std::int64_t h, std::int64_t count, std::int64_t scoring)
{
    std::vector<std::pair<double, std::size_t>> scores;
    for (std::int64_t d = 0; d < layer.key_dim; ++d)
    {
        double queries = 0, keys = 0;
        std::int64_t query_rows = 0, key_rows = 0;
        for (std::int64_t row = h * layer.group; row < (h + 1) * layer.group; ++row)
        {
            for (std::int64_t q = std::max<std::int64_t>(0, layer.query_tokens - scoring); q < layer.query_tokens; ++q)
            {
                double const x = double{mdkv::widen(layer.queries[(row * layer.query_tokens + q) * layer.key_dim + d])};
                queries += x * x;
                ++query_rows;
            }
        }
        for (std::int64_t t = 0; t < layer.tokens; ++t)
        {
            if (!stays(layer, kept, h, t)) { continue; }
            double const x = double{mdkv::widen(layer.keys[(h * layer.tokens + t) * layer.key_dim + d])};
            keys += x * x;
            ++key_rows;
        }
        scores.emplace_back(queries / static_cast<double>(query_rows) * keys / static_cast<double>(key_rows),
            static_cast<std::size_t>(d));
    }
    std::sort(scores.begin(), scores.end());
    std::vector<std::size_t> dropped;
    for (std::int64_t i = 0; i < count; ++i) { dropped.push_back(scores[static_cast<std::size_t>(i)].second); }
    return dropped;
}

/// What each head attends over: kept tokens, the dropped channels zero in all but the last `recent`.
template <class T>
std::vector<std::vector<support::whole_token>> zeroed_tokens(runner::prompt_layer<T> const& layer,
    std::vector<std::uint8_t> const& kept, std::int64_t dropped, runner::think_options const& options)
{
    std::vector<std::vector<support::whole_token>> heads(static_cast<std::size_t>(layer.heads));
    for (std::int64_t h = 0; h < layer.heads; ++h)
    {
        auto const channels = dropped_channels(layer, kept, h, dropped, options.scoring_queries);
        auto& tokens        = heads[static_cast<std::size_t>(h)];
        for (std::int64_t t = 0; t < layer.tokens; ++t)
        {
            if (stays(layer, kept, h, t)) { tokens.push_back(support::token_of(layer, h, t)); }
        }
        for (std::int64_t i = 0; i < std::ssize(tokens) - options.recent; ++i)
        {
            for (std::size_t const d : channels) { tokens[static_cast<std::size_t>(i)].key[d] = 0; }
        }
    }
    return heads;
}

template <class T>
void check_against_zeroed(
    support::prompt_sizes const& sizes, runner::think_options const& options, std::int64_t dropped)
{
    support::random_prompt<T> prompt{sizes};
    auto const& layer = prompt.layer;
    auto const kept   = prompt.some_tokens(0.4);
    runner::scratch_memory scratch;
    runner::think_cache<T> cache{{}, scratch, layer, kept, options};
    support::check_appended(cache, scratch, prompt, zeroed_tokens(layer, kept, dropped, options), 20);
}

} // namespace

TEST_CASE_TEMPLATE("ThinK attends over keys whose weakest channels are zero in all but the recent tokens", T, float,
    mdkv::half, mdkv::bfloat16)
{
    SUBCASE("a window as long as what stays whole")
    {
        check_against_zeroed<T>({}, {.recent = 8}, 6);
    }
    SUBCASE("a longer window, its old end thinned")
    {
        check_against_zeroed<T>({}, {.recent = 3}, 6);
    }
    SUBCASE("a shorter window, filled up with chosen tokens")
    {
        check_against_zeroed<T>({}, {.recent = 20}, 6);
    }
    SUBCASE("nothing stays whole but what is appended")
    {
        check_against_zeroed<T>({}, {.recent = 0}, 6);
    }
    SUBCASE("everything stays whole")
    {
        check_against_zeroed<T>({}, {.recent = 100}, 6);
    }
    SUBCASE("fewer queries score than the window has")
    {
        check_against_zeroed<T>({}, {.recent = 8, .scoring_queries = 2}, 6);
    }
    SUBCASE("one query head a cached head, keys and values of different sizes, half of the channels")
    {
        check_against_zeroed<T>(
            {.heads = 3, .group = 1, .key_dim = 20, .value_dim = 8}, {.ratio = 0.5, .recent = 8}, 10);
    }
}

TEST_CASE("with no channel to drop ThinK is plain token selection")
{
    support::random_prompt<float> prompt{{}};
    auto const& layer = prompt.layer;
    auto const kept   = prompt.some_tokens(0.4);
    runner::scratch_memory scratch;
    runner::think_cache<float> think{{}, scratch, layer, kept, {.ratio = 0, .recent = 8}};
    runner::packed_cache<float> plain{{}, scratch, layer, kept};
    CHECK(think.resident_bytes() == plain.resident_bytes() + layer.heads * layer.key_dim * 2); // and its channel lists
    std::vector<float> a(static_cast<std::size_t>(layer.heads * layer.group * layer.value_dim)), b(a.size());
    support::decode_step_rows const rows{prompt.random, layer};
    think.attend({}, scratch, rows.query.data(), rows.key.data(), rows.value.data(), a.data());
    plain.attend({}, scratch, rows.query.data(), rows.key.data(), rows.value.data(), b.data());
    for (std::size_t i = 0; i < a.size(); ++i) { CHECK(a[i] == doctest::Approx(b[i]).epsilon(1e-5)); }
}

TEST_CASE("ThinK's bytes are what its formula says, and the tokens chosen by it fill a limit without exceeding it")
{
    support::random_prompt<mdkv::half> prompt{{.tokens = 100}};
    auto const& layer = prompt.layer;
    runner::scratch_memory scratch;
    for (std::int64_t const recent : {0, 4, 8, 30})
    {
        runner::think_options const options{.recent = recent};
        for (std::int64_t const limit : {100, 1200, 2000, 3000, 5000, 100000})
        {
            CAPTURE(recent);
            CAPTURE(limit);
            std::int64_t const chosen = runner::think_tokens(layer, limit, options);
            if (chosen < 0)
            {
                CHECK(runner::think_bytes(layer, 0, options) > limit);
                continue;
            }
            std::vector<std::uint8_t> kept(static_cast<std::size_t>(layer.heads * layer.past()), 0);
            for (std::int64_t h = 0; h < layer.heads; ++h)
            {
                std::fill_n(kept.begin() + h * layer.past(), chosen, std::uint8_t{1});
            }
            runner::think_cache<mdkv::half> const cache{{}, scratch, layer, kept, options};
            CHECK(cache.resident_bytes() == runner::think_bytes(layer, chosen, options));
            CHECK(cache.resident_bytes() <= limit);
            CHECK((chosen == layer.past() || runner::think_bytes(layer, chosen + 1, options) > limit));
        }
    }
}

TEST_CASE("the authors' ratio of 0.4 leaves 39 of 64 and 77 of 128 channels")
{
    CHECK(runner::think_channels(64, {}) == 39);
    CHECK(runner::think_channels(128, {}) == 77);
}

TEST_CASE("ThinK refuses ratios outside 0 and 1 and marks of another size")
{
    support::random_prompt<float> prompt{{}};
    runner::scratch_memory scratch;
    auto kept       = prompt.some_tokens(0.5);
    auto const make = [&](double ratio) {
        return support::error_text<mdkv::invalid_argument>([&] {
            runner::think_cache<float> const cache{{}, scratch, prompt.layer, kept, {.ratio = ratio}};
        });
    };
    CHECK(make(1.0).find("ratio 1") != std::string::npos);
    CHECK(make(-0.5).find("ratio -0.5") != std::string::npos);
    kept.pop_back();
    CHECK(make(0.4).find("[heads, past] is [2, 52]") != std::string::npos);
}
