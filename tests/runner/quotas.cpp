#include "runner/systems/quotas.hpp"

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include "support/host.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <vector>

#include <doctest/doctest.h>
namespace
{

using mdkv::index_t;
using support::error_text;

std::vector<index_t> split(index_t total, std::vector<double> const& weights)
{
    std::vector<index_t> parts(weights.size());
    runner::split_exactly(total, weights, parts);
    return parts;
}

index_t sum_of(std::vector<index_t> const& parts)
{
    return std::accumulate(parts.begin(), parts.end(), index_t{0});
}

} // namespace

TEST_CASE("a total is split by largest remainder, ties to the lower index")
{
    CHECK(split(10, {1, 1, 1}) == std::vector<index_t>{4, 3, 3});
    CHECK(split(11, {1, 1, 1}) == std::vector<index_t>{4, 4, 3});
    CHECK(split(100, {0.5, 0.25, 0.25}) == std::vector<index_t>{50, 25, 25});
    CHECK(split(10, {5.4, 3.3, 1.3}) == std::vector<index_t>{6, 3, 1});
    CHECK(split(7, {0, 0, 0}) == std::vector<index_t>{3, 2, 2});
    CHECK(split(7, {0, 1, 0}) == std::vector<index_t>{0, 7, 0});
    CHECK(split(0, {1, 2}) == std::vector<index_t>{0, 0});
    CHECK(split(0, {}).empty());
}

TEST_CASE("the parts add up to the total, are within one of their shares, and nobody without weight gets any")
{
    for (int round = 1; round <= 100; ++round)
    {
        CAPTURE(round);
        support::source random{"split exactly", round};
        std::vector<double> weights;
        for (int i = 0; i < round; ++i)
        {
            weights.push_back(random.below(3) == 0 ? 0.0 : std::sqrt(static_cast<double>(random.below(1 << 16))));
        }
        index_t const total              = random.below(index_t{1} << 32);
        std::vector<index_t> const parts = split(total, weights);
        double const sum                 = std::accumulate(weights.begin(), weights.end(), 0.0);
        REQUIRE(sum_of(parts) == total);
        for (std::size_t i = 0; i < parts.size() && sum > 0; ++i)
        {
            REQUIRE(std::fabs(static_cast<double>(parts[i]) - static_cast<double>(total) * (weights[i] / sum))
                    < 1.0 + 1e-6);
            REQUIRE((weights[i] > 0 || parts[i] == 0));
        }
    }
}

TEST_CASE("totals beyond 53 bits still add up")
{
    for (index_t const total : {std::numeric_limits<index_t>::max(), (index_t{1} << 62) + 12345})
    {
        for (std::vector<double> const& weights :
            {std::vector<double>{1, 2, 3, 4, 5, 6, 7}, {1}, {1e-300, 1e300}, {0, 0}})
        {
            std::vector<index_t> const parts = split(total, weights);
            CHECK(sum_of(parts) == total);
            CHECK(std::all_of(parts.begin(), parts.end(), [](index_t p) { return p >= 0; }));
        }
    }
}

TEST_CASE("split_exactly names what is wrong with its arguments")
{
    std::vector<index_t> parts(2);
    auto const text = [&](index_t total, std::vector<double> const& weights) {
        return error_text<mdkv::invalid_argument>([&] { runner::split_exactly(total, weights, parts); });
    };
    CHECK(text(-1, {1, 1}) == "split_exactly: total is -1; it must not be negative");
    CHECK(text(5, {1}) == "split_exactly: 1 weights for 2 parts");
    CHECK(text(5, {1, -2}) == "split_exactly: weights[1] is -2; it must be finite and not negative");
    CHECK(text(5, {std::nan(""), 1}) == "split_exactly: weights[0] is nan; it must be finite and not negative");
    CHECK(text(5, {1e308, 1e308}) == "split_exactly: the weights add up to inf");
    CHECK(error_text<mdkv::invalid_argument>([] { split(5, {}); }) == "split_exactly: 5 cannot be split into no parts");
}

TEST_CASE("what a head cannot use goes to the others in proportion, until it settles")
{
    std::vector<index_t> quotas{100, 50, 25, 25};
    std::vector<index_t> const capacity{40, 1000, 30, 1000};
    // 60 over: 30, 15, 15 to the others; the third then has 10 over: 80 to 40 of it, so 7 and 3
    CHECK(runner::spread_surplus(quotas, capacity) == 0);
    CHECK(quotas == std::vector<index_t>{40, 87, 30, 43});

    std::vector<index_t> all_full{10, 10};
    std::vector<index_t> const small{3, 4};
    CHECK(runner::spread_surplus(all_full, small) == 13);
    CHECK(all_full == small);

    std::vector<index_t> none{10, 0, 0};
    std::vector<index_t> const room{2, 100, 3};
    CHECK(runner::spread_surplus(none, room) == 0);
    CHECK(none == std::vector<index_t>{2, 5, 3}); // equally among quotas of zero, then what the last cannot use
}

TEST_CASE("spreading loses nothing, exceeds no capacity, and leaves a surplus only when all are full")
{
    for (int round = 0; round < 100; ++round)
    {
        CAPTURE(round);
        support::source random{"spread surplus", round};
        std::vector<index_t> quotas;
        std::vector<index_t> capacity;
        for (int i = 0; i < round / 2; ++i)
        {
            quotas.push_back(random.below(5) == 0 ? 0 : random.below(1 << 16));
            capacity.push_back(random.below(1 << 16));
        }
        index_t const before              = sum_of(quotas);
        std::vector<index_t> const former = quotas;
        index_t const nobody              = runner::spread_surplus(quotas, capacity);
        REQUIRE(sum_of(quotas) + nobody == before);
        for (std::size_t h = 0; h < quotas.size(); ++h)
        {
            REQUIRE(quotas[h] <= capacity[h]);
            REQUIRE(quotas[h] >= std::min(former[h], capacity[h]));
            REQUIRE((nobody == 0 || quotas[h] == capacity[h]));
        }
    }
}

TEST_CASE("spread_surplus names what is wrong and changes nothing")
{
    std::vector<index_t> quotas{5, -1};
    std::vector<index_t> const capacity{1, 2};
    std::vector<index_t> const negative{1, -2};
    CHECK(error_text<mdkv::invalid_argument>([&] { static_cast<void>(runner::spread_surplus(quotas, capacity)); })
          == "spread_surplus: quotas[1] is -1; it must not be negative");
    CHECK(quotas == std::vector<index_t>{5, -1});
    quotas[1] = 7;
    CHECK(error_text<mdkv::invalid_argument>([&] { static_cast<void>(runner::spread_surplus(quotas, negative)); })
          == "spread_surplus: capacity[1] is -2; it must not be negative");
    std::vector<index_t> const one{1};
    CHECK(error_text<mdkv::invalid_argument>([&] { static_cast<void>(runner::spread_surplus(quotas, one)); })
          == "spread_surplus: 2 quotas and 1 capacities");
    CHECK(quotas == std::vector<index_t>{5, 7});
}
