#include "policies/oddness.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "policies/prompt_layer.hpp"
#include "runner/scratch_memory.hpp"

TEST_CASE(
    "the leverage of keys along axes is each one's share of its axis, summed over heads and added to what is there")
{
    constexpr std::int64_t dim = 8, tokens = 600, window = 10;
    // Token t of head h is `length` times axis a: many of all axes but the last, which one token has for itself.
    auto const axis   = [](std::int64_t h, std::int64_t t) { return t == 300 + h ? dim - 1 : (t + h) % (dim - 1); };
    auto const length = [](std::int64_t h, std::int64_t a) {
        return a == dim - 1 ? 2.0 : 1.0 + static_cast<double>(a + h);
    };
    std::vector<float> keys(2 * tokens * dim, 0.0F);
    std::vector<double> energies(2 * dim, 0.0), expected(tokens - window, 5.0);
    for (std::int64_t h = 0; h < 2; ++h)
    {
        for (std::int64_t t = 0; t < tokens; ++t)
        {
            auto const a                                               = axis(h, t);
            keys[static_cast<std::size_t>((h * tokens + t) * dim + a)] = static_cast<float>(length(h, a));
            energies[static_cast<std::size_t>(h * dim + a)] += length(h, a) * length(h, a);
        }
        auto const first    = energies.begin() + h * dim;
        double const lambda = 1e-3 * std::accumulate(first, first + dim, 0.0) / dim;
        for (std::int64_t t = 0; t < tokens - window; ++t)
        {
            auto const a = axis(h, t);
            expected[static_cast<std::size_t>(t)] +=
                length(h, a) * length(h, a) / (energies[static_cast<std::size_t>(h * dim + a)] + lambda);
        }
    }
    runner::prompt_layer<float> const layer{
        .heads = 2, .tokens = tokens, .window = window, .key_dim = dim, .keys = keys.data()};
    runner::scratch_memory scratch;
    std::vector<double> sums(tokens - window, 5.0);
    runner::add_leverages(layer, {}, scratch, sums);
    for (std::size_t t = 0; t < sums.size(); ++t)
    {
        CAPTURE(t);
        CHECK(sums[t] == doctest::Approx(expected[t]).epsilon(1e-5));
    }
    CHECK(sums[300] > 5.5); // its own axis in one of the heads
    CHECK(sums[299] < 5.1);

    std::vector<float> const none(keys.size(), 0.0F); // keys without a direction have no leverage, not a NaN
    auto zero = layer;
    zero.keys = none.data();
    std::vector<double> still(tokens - window, 0.0);
    runner::add_leverages(zero, {}, scratch, still);
    CHECK(still == std::vector<double>(tokens - window, 0.0));
}

TEST_CASE("surroundings are means of the neighbours there are, in units of the mean of all")
{
    std::vector<double> const of_tokens{4, 0, 2, 0, 14};
    auto const found = runner::surroundings(of_tokens, 1);
    std::vector<double> const expected{0.5, 0.5, 1.0 / 6, 16.0 / 12, 7.0 / 4}; // of a mean of 4
    REQUIRE(found.size() == expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) { CHECK(found[i] == doctest::Approx(expected[i])); }
    CHECK(runner::surroundings(std::vector<double>(3, 0.0), 8) == std::vector<double>(3, 1.0));
    CHECK(runner::surroundings({}, 8).empty());
}
