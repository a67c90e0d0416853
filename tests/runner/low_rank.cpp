#include "runner/systems/low_rank.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <mdkv/compress.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/score.hpp>

#include "runner/systems/packed_cache.hpp"
#include "support/host.hpp"
#include "support/prompt.hpp"

namespace
{

template <class T>
std::vector<std::vector<support::whole_token>> all_tokens(runner::prompt_layer<T> const& layer)
{
    std::vector<std::vector<support::whole_token>> heads(static_cast<std::size_t>(layer.heads));
    for (std::int64_t i = 0; i < layer.heads * layer.tokens; ++i)
    {
        heads[static_cast<std::size_t>(i / layer.tokens)].push_back(
            support::token_of(layer, i / layer.tokens, i % layer.tokens));
    }
    return heads;
}

/// Error of one decode step over a layer at that rank, against the whole layer.
template <class T>
double error_at_rank(support::random_prompt<T>& prompt, support::decode_step_rows const& step, std::int64_t rank)
{
    auto const& layer = prompt.layer;
    runner::scratch_memory scratch;
    runner::packed_cache<T> cache{runner::low_rank_cache({}, scratch, layer, rank), layer.group};
    auto tokens = all_tokens(layer);
    for (std::int64_t h = 0; h < layer.heads; ++h)
    {
        tokens[static_cast<std::size_t>(h)].push_back(step.token(layer, h));
    }
    std::vector<float> output(static_cast<std::size_t>(layer.heads * layer.group * layer.value_dim));
    cache.attend({}, scratch, step.query.data(), step.key.data(), step.value.data(), output.data());
    return support::attention_error(layer, step, tokens, output);
}

} // namespace

TEST_CASE_TEMPLATE("at full rank the attention is exact", T, float, mdkv::half)
{
    support::random_prompt<T> prompt{{.value_dim = 8}};
    support::decode_step_rows const step{prompt.random, prompt.layer};
    CHECK(error_at_rank(prompt, step, prompt.layer.key_dim) < 1e-5);
    CHECK(error_at_rank(prompt, step, 1) > 1e-3); // the check can fail
}

TEST_CASE("keys and values of rank r are served exactly at rank r")
{
    support::random_prompt<float> prompt{{}};
    auto& layer            = prompt.layer;
    std::int64_t const dim = layer.key_dim;
    for (std::vector<float>* rows : {&prompt.keys, &prompt.values})
    {
        for (std::int64_t h = 0; h < layer.heads; ++h)
        {
            auto const directions = support::random_rows<float>(prompt.random, 3 * dim);
            for (std::int64_t t = 0; t < layer.tokens; ++t)
            {
                auto const mix   = support::random_rows<float>(prompt.random, 3);
                float* const row = rows->data() + (h * layer.tokens + t) * dim;
                for (std::int64_t d = 0; d < dim; ++d)
                {
                    row[d] = 0;
                    for (std::int64_t i = 0; i < 3; ++i)
                    {
                        row[d] += mix[static_cast<std::size_t>(i)] * directions[static_cast<std::size_t>(i * dim + d)];
                    }
                }
            }
        }
    }
    support::decode_step_rows const step{prompt.random, layer};
    CHECK(error_at_rank(prompt, step, 3) < 1e-4);
    CHECK(error_at_rank(prompt, step, 2) > 1e-3);
}

TEST_CASE("the rank that fits is the largest, and the cache made at it takes the bytes that were told")
{
    support::random_prompt<mdkv::half> prompt{{.tokens = 200, .value_dim = 8}};
    auto const& layer = prompt.layer;
    auto const shape  = runner::shape_of(layer);
    runner::scratch_memory scratch;
    std::int64_t previous = 0;
    for (std::int64_t limit = shape.window_bytes(); limit <= shape.full_bytes() + 500; limit += 251)
    {
        CAPTURE(limit);
        std::int64_t const rank = runner::low_rank_that_fits(shape, limit);
        std::int64_t const told = runner::low_rank_bytes(shape, rank);
        CHECK(told <= limit);
        CHECK(rank >= previous);
        for (std::int64_t above = rank + 1; above <= layer.key_dim; ++above)
        {
            CHECK(runner::low_rank_bytes(shape, above) > limit);
        }
        runner::packed_cache<mdkv::half> const cache{runner::low_rank_cache({}, scratch, layer, rank), layer.group};
        CHECK(cache.resident_bytes() == told);
        previous = rank;
    }
    CHECK(previous == layer.key_dim);
    auto const text = support::error_text<mdkv::invalid_argument>(
        [&] { static_cast<void>(runner::low_rank_that_fits(shape, shape.window_bytes() - 1)); });
    CHECK(text.find("do not hold the window") != std::string::npos);
}

TEST_CASE("full rank is chosen where its tokens fit and the projections of lower ranks do not")
{
    // 4 tokens of 16 coordinates: rank 15 would need 4 * 30 + 2 * 16 * 15 elements a head, full rank 4 * 32.
    support::random_prompt<float> prompt{{.tokens = 12, .window = 8}};
    auto const shape = runner::shape_of(prompt.layer);
    CHECK(runner::low_rank_that_fits(shape, shape.full_bytes()) == prompt.layer.key_dim);
    CHECK(runner::low_rank_bytes(shape, 15) > shape.full_bytes());
}

TEST_CASE("rank 0 leaves the window alone")
{
    support::random_prompt<float> prompt{{}};
    runner::scratch_memory scratch;
    auto const cache = runner::low_rank_cache({}, scratch, prompt.layer, 0);
    CHECK(cache.arena_bytes() == runner::shape_of(prompt.layer).window_bytes());
}

TEST_CASE("compress takes the one-rung set and makes the same cache, bit for bit")
{
    support::random_prompt<mdkv::half> prompt{{.tokens = 120}};
    auto& layer = prompt.layer;
    // any finite log-sum-exps serve: with one rung there is nothing to choose
    std::fill(prompt.lse.begin(), prompt.lse.end(), 3.0F);
    auto const shape = runner::shape_of(layer);
    for (std::int64_t const rank : {1, 5, 8, 11})
    {
        CAPTURE(rank);
        runner::scratch_memory scratch;
        auto const direct = runner::low_rank_cache({}, scratch, layer, rank);
        mdkv::cpu::cache<mdkv::half> whole;
        auto const report = scratch.run({}, [&](mdkv::cpu::backend on) {
            using mdkv::in;
            std::int64_t const heads = layer.heads;
            mdkv::prompt_rows<mdkv::cpu::backend, mdkv::half> const rows{
                in(on, layer.queries, heads * layer.group, layer.window, layer.key_dim),
                in(on, layer.keys, heads, layer.tokens, layer.key_dim),
                in(on, layer.values, heads, layer.tokens, layer.value_dim),
                in(on, layer.lse, heads * layer.group, layer.window)};
            mdkv::preset const one{.name = "low_rank",
                .ratios                  = runner::low_rank_set(rank, layer.key_dim),
                .pooling                 = {1},
                .window                  = layer.window,
                .queries                 = layer.window};
            return mdkv::compress(on, rows, one, mdkv::budget::bytes(runner::low_rank_bytes(shape, rank)), whole);
        });
        CHECK(report.status == mdkv::compress_status::compressed);
        CHECK(report.resident_bytes == runner::low_rank_bytes(shape, rank));
        REQUIRE(whole.arena_bytes() == direct.arena_bytes());
        CHECK(std::memcmp(whole.view().arena, direct.view().arena, static_cast<std::size_t>(whole.arena_bytes())) == 0);
    }
}

TEST_CASE("a rank outside the dimension is refused")
{
    support::random_prompt<float> prompt{{}};
    runner::scratch_memory scratch;
    auto const text = support::error_text<mdkv::invalid_argument>(
        [&] { static_cast<void>(runner::low_rank_cache({}, scratch, prompt.layer, 17)); });
    CHECK(text.find("rank 17 is not within 0 and 16") != std::string::npos);
}
