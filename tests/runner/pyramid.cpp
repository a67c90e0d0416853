/// \file pyramid.cpp: PyramidKV's capacities against the sums its authors' program gives
#include "runner/systems/pyramid.hpp"

#include <mdkv/core/error.hpp>

#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace
{

std::vector<std::int64_t> all_layers(
    std::int64_t past, std::int64_t tokens, std::int64_t window, std::int64_t layers, std::int64_t beta = 20)
{
    std::vector<std::int64_t> out;
    for (std::int64_t layer = 0; layer < layers; ++layer)
    {
        auto const capacity = runner::pyramid_capacity(past, tokens, window, layer, layers, beta);
        REQUIRE(capacity.has_value());
        out.push_back(*capacity);
    }
    return out;
}

double mean(std::vector<std::int64_t> const& values)
{
    double sum = 0;
    for (std::int64_t const value : values) { sum += static_cast<double>(value); }
    return sum / static_cast<double>(values.size());
}

} // namespace

TEST_CASE("a long prompt's layers lie on the authors' line, whose mean exceeds the budget by what the step rounds away")
{
    // Means over 32 layers, recorded from KVCache-Factory's rule.
    CHECK(mean(all_layers(120, 8000, 8, 32)) == 125.5);
    CHECK(mean(all_layers(96, 8000, 32, 32)) == 110.5);
    CHECK(mean(all_layers(248, 8000, 8, 32)) == 251.5);
    CHECK(mean(all_layers(504, 8000, 8, 32)) == 518);
    CHECK(mean(all_layers(2040, 8000, 8, 32)) == 2040.5);

    auto const layers = all_layers(120, 8000, 8, 32);
    CHECK(layers.front() == 234); // 2 * 120 - 120 / 20
    CHECK(layers[1] == 227);
    CHECK(layers.back() == 17); // 234 - 31 * 7, not the 6 the line would end at
}

TEST_CASE("a prompt too short for the first layer's capacity flattens the line")
{
    // 2 * 120 - 6 = 234 past tokens are more than the 192 there are: 192 down to 48 in steps of 144 / 31 = 4.
    auto const layers = all_layers(120, 240, 48, 32);
    CHECK(layers.front() == 192);
    CHECK(layers.back() == 192 - 31 * 4);
    // Just as many as there are takes the same branch and gives the same.
    CHECK(all_layers(120, 234 + 8, 8, 32) == all_layers(120, 8000, 8, 32));
}

TEST_CASE("the branches go by the prompt: whole below the budget, equal below twice the past budget")
{
    CHECK_FALSE(runner::pyramid_capacity(120, 127, 8, 0, 32).has_value());
    CHECK(all_layers(120, 128, 8, 32) == std::vector<std::int64_t>(32, 120));
    CHECK(all_layers(120, 239, 8, 32) == std::vector<std::int64_t>(32, 120));
    CHECK(runner::pyramid_capacity(120, 240, 8, 0, 32) == 232);
    CHECK(runner::pyramid_capacity(120, 8000, 8, 0, 1) == 120);
}

TEST_CASE("no layer of any prompt keeps more than the past or less than nothing")
{
    for (std::int64_t past = 1; past < 40; ++past)
    {
        for (std::int64_t tokens = past + 3; tokens < 120; ++tokens)
        {
            for (std::int64_t const beta : {1, 2, 20, 1000})
            {
                std::int64_t before = tokens;
                for (std::int64_t const capacity : all_layers(past, tokens, 3, 5, beta))
                {
                    REQUIRE(capacity >= 0);
                    REQUIRE(capacity <= tokens - 3);
                    REQUIRE(capacity <= before);
                    before = capacity;
                }
            }
        }
    }
}

TEST_CASE("a parameter out of range is named with its value")
{
    auto const message = [](auto... arguments) {
        try
        {
            static_cast<void>(runner::pyramid_capacity(arguments...));
        }
        catch (mdkv::invalid_argument const& error)
        {
            return std::string{error.what()};
        }
        return std::string{"(nothing was thrown)"};
    };
    CHECK(message(0, 100, 8, 0, 32).find("past_budget is 0") != std::string::npos);
    CHECK(message(120, -1, 8, 0, 32).find("prompt_tokens is -1") != std::string::npos);
    CHECK(message(120, 100, -8, 0, 32).find("window is -8") != std::string::npos);
    CHECK(message(120, 100, 8, 32, 32).find("layer is 32") != std::string::npos);
    CHECK(message(120, 100, 8, 0, 32, 0).find("beta is 0") != std::string::npos);
    CHECK(message(INT64_MAX, INT64_MAX, 8, 0, 32).find("past_budget is") != std::string::npos);
}
