#include "runner/systems/packed_cache.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include "support/host.hpp"
#include "support/prompt.hpp"

namespace
{

template <class T>
std::vector<std::vector<support::whole_token>> kept_tokens(
    runner::prompt_layer<T> const& layer, std::vector<std::uint8_t> const& kept)
{
    std::vector<std::vector<support::whole_token>> heads(static_cast<std::size_t>(layer.heads));
    for (std::int64_t h = 0; h < layer.heads; ++h)
    {
        for (std::int64_t t = 0; t < layer.tokens; ++t)
        {
            bool const stays = t >= layer.past() || kept[static_cast<std::size_t>(h * layer.past() + t)] != 0;
            if (stays) { heads[static_cast<std::size_t>(h)].push_back(support::token_of(layer, h, t)); }
        }
    }
    return heads;
}

} // namespace

TEST_CASE_TEMPLATE(
    "a packed cache attends over the kept tokens, the window and what was appended", T, float, mdkv::half)
{
    support::random_prompt<T> prompt{{.value_dim = 8}};
    auto const& layer = prompt.layer;
    auto const kept   = prompt.some_tokens(0.3);
    runner::scratch_memory scratch;
    runner::packed_cache<T> cache{{}, scratch, layer, kept, 3};
    // 40 are far beyond the three that room was made for.
    support::check_appended(cache, scratch, prompt, kept_tokens(layer, kept), 40);
}

TEST_CASE("a packed cache's bytes are those of kept tokens and window, whatever is appended")
{
    support::random_prompt<mdkv::half> prompt{{}};
    auto const& layer = prompt.layer;
    auto const kept   = prompt.some_tokens(0.5);
    std::int64_t rows = layer.heads * layer.window;
    for (std::uint8_t const k : kept) { rows += k; }
    runner::scratch_memory scratch;
    runner::packed_cache<mdkv::half> cache{{}, scratch, layer, kept};
    std::int64_t const before = cache.resident_bytes();
    CHECK(before == rows * (layer.key_dim + layer.value_dim) * 2);
    std::vector<float> output(static_cast<std::size_t>(layer.heads * layer.group * layer.value_dim));
    support::decode_step_rows const step{prompt.random, layer};
    cache.attend({}, scratch, step.query.data(), step.key.data(), step.value.data(), output.data());
    CHECK(cache.resident_bytes() == before);
}

TEST_CASE("a packed cache that keeps nothing but an empty window answers with the appended token's value")
{
    support::random_prompt<float> prompt{{.window = 0}};
    auto const& layer = prompt.layer;
    runner::scratch_memory scratch;
    std::vector<std::uint8_t> const none(static_cast<std::size_t>(layer.heads * layer.past()), 0);
    runner::packed_cache<float> cache{{}, scratch, layer, none};
    CHECK(cache.resident_bytes() == 0);
    support::decode_step_rows const step{prompt.random, layer};
    std::vector<float> output(static_cast<std::size_t>(layer.heads * layer.group * layer.value_dim));
    cache.attend({}, scratch, step.query.data(), step.key.data(), step.value.data(), output.data());
    for (std::int64_t i = 0; i < layer.heads * layer.group * layer.value_dim; ++i)
    {
        auto const head  = i / (layer.group * layer.value_dim);
        auto const place = static_cast<std::size_t>(head * layer.value_dim + i % layer.value_dim);
        CHECK(output[static_cast<std::size_t>(i)] == step.value[place]);
    }
}

TEST_CASE("marks of another size or outside the ratio set are refused")
{
    support::random_prompt<float> prompt{{}};
    runner::scratch_memory scratch;
    auto kept       = prompt.some_tokens(0.5);
    auto const make = [&] { runner::packed_cache<float> const cache{{}, scratch, prompt.layer, kept}; };
    kept[5]         = 2;
    CHECK(support::error_text<mdkv::invalid_argument>(make).find("rung") != std::string::npos);
    kept[5] = 0;
    kept.pop_back();
    CHECK(support::error_text<mdkv::invalid_argument>(make).find("[heads, past] is [2, 52]") != std::string::npos);
}
