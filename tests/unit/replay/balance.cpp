#include <mdkv/replay/balance.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/replay/leverage.hpp>

#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/random.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

namespace
{

using namespace mdkv;
using support::error_text;
using support::tensor;
using host    = cpu::backend;
using options = balance_options<host>;

/// [layers, heads, rungs, tokens], positive and very uneven; each layer's of another size.
tensor<float, 4> random_layers(std::array<index_t, 4> shape)
{
    support::source random{"layers", shape[3]};
    tensor<float, 4> losses{shape};
    std::vector<float> all;
    for (index_t i = 0; i < losses.count(); ++i)
    {
        auto const layer = i / (shape[1] * shape[2] * shape[3]);
        all.push_back(static_cast<float>(std::exp(2 * random.normal() + 5.0 * static_cast<double>(layer % 5))));
    }
    losses.assign(all);
    return losses;
}

/// [tokens], positive, with some far above the others.
tensor<leverage_sum, 1> random_leverages(index_t tokens)
{
    support::source random{"leverages", tokens};
    tensor<leverage_sum, 1> leverages{{tokens}};
    for (index_t i = 0; i < tokens; ++i) { leverages.set(leverage_sum_of(std::exp(1.5 * random.normal())), i); }
    return leverages;
}

tensor<float, 4> balanced(
    tensor<float, 4> const& losses, options const& how, cpu::executor_ref threads = {}, support::placement where = {})
{
    auto copy = losses.relaid(where);
    support::run([&](host const& on) { balance(on, copy.out(), how); }, threads);
    return copy;
}

/// The factor of each token as the header defines it.
std::vector<double> factors_of(tensor<leverage_sum, 1> const& leverages, double odd)
{
    constexpr index_t reach = 8;
    auto const n            = leverages.extent(0);
    double total            = 0;
    for (leverage_sum const x : leverages.elements()) { total += double{leverage_of(x)}; }
    std::vector<double> factors;
    for (index_t i = 0; i < n; ++i)
    {
        double sum  = 0;
        int counted = 0;
        for (index_t j = std::max<index_t>(0, i - reach); j < n && j - i <= reach; ++j, ++counted)
        {
            sum += double{leverage_of(leverages.get(j))};
        }
        double const surroundings = total == 0 ? 1.0 : sum / counted * static_cast<double>(n) / total;
        factors.push_back(std::pow(std::max(1.0, surroundings), odd));
    }
    return factors;
}

support::worst_error error_of(
    tensor<float, 4> const& got, tensor<float, 4> const& losses, double depth, std::vector<double> const& factors = {})
{
    support::worst_error worst;
    for (index_t l = 0; l < losses.extent(0); ++l)
    {
        double total = 0;
        for (index_t h = 0; h < losses.extent(1); ++h)
        {
            for (index_t i = 0; i < losses.extent(3); ++i) { total += double{losses.get(l, h, 0, i)}; }
        }
        double const mean = total / static_cast<double>(losses.extent(1) * losses.extent(3));
        double const late = std::exp(depth * static_cast<double>(l) / static_cast<double>(losses.extent(0)));
        for (index_t h = 0; h < losses.extent(1); ++h)
        {
            for (index_t r = 0; r < losses.extent(2); ++r)
            {
                for (index_t i = 0; i < losses.extent(3); ++i)
                {
                    double const factor = factors.empty() ? 1.0 : factors[static_cast<std::size_t>(i)];
                    double const want   = double{losses.get(l, h, r, i)} / mean * late * factor;
                    worst.add(got.get(l, h, r, i), want, std::max(want, 0x1p-126), i);
                }
            }
        }
    }
    return worst;
}

} // namespace

TEST_CASE("losses of each layer are in units of their mean at rung 0, and those of late layers count more")
{
    for (index_t const tokens : {1, 7, 4097})
    {
        for (float const depth : {0.0F, 1.0F, -3.0F, 40.0F})
        {
            CAPTURE(tokens);
            CAPTURE(depth);
            auto const losses = random_layers({3, 2, 4, tokens});
            auto const worst  = error_of(balanced(losses, {.depth = depth}), losses, double{depth});
            CHECK_MESSAGE(worst.within(0x1p-23), worst);
        }
    }
}

TEST_CASE("losses count by a power of the mean leverage around a token, where that is above the mean of all")
{
    for (index_t const tokens : {1, 5, 17, 1025, 5000})
    {
        for (float const odd : {1.0F, 2.5F, 16.0F})
        {
            CAPTURE(tokens);
            CAPTURE(odd);
            auto const losses    = random_layers({2, 2, 3, tokens});
            auto const leverages = random_leverages(tokens);
            auto const got     = balanced(losses, {.depth = 1.0F, .leverage_power = odd, .leverages = leverages.in()});
            auto factors       = factors_of(leverages, double{odd});
            auto const at_most = 0x1p127 / (static_cast<double>(2 * tokens) * std::exp(1.0));
            for (double& x : factors) { x = std::min(x, at_most); }
            auto const worst = error_of(got, losses, 1.0, factors);
            CHECK_MESSAGE(worst.within(0x1p-23), worst);
        }
    }
}

TEST_CASE("without leverages all tokens count alike, as they do where no token has any")
{
    auto const losses = random_layers({3, 2, 3, 50});
    tensor<leverage_sum, 1> none{{50}};
    none.assign(std::vector<leverage_sum>(50));
    auto const want = balanced(losses, {.depth = 2.0F}).elements();
    CHECK(support::same_bits(
        balanced(losses, {.depth = 2.0F, .leverage_power = 16.0F, .leverages = none.in()}).elements(), want));
    auto const leverages = random_leverages(50); // not read
    CHECK(support::same_bits(balanced(losses, {.depth = 2.0F, .leverages = leverages.in()}).elements(), want));
}

TEST_CASE("a layer that loses nothing at rung 0 gets zeros, and the others what they get without it")
{
    auto losses = random_layers({3, 2, 3, 60});
    for (index_t h = 0; h < 2; ++h)
    {
        for (index_t i = 0; i < 60; ++i) { losses.set(0.0F, 1, h, 0, i); }
    }
    auto const got = balanced(losses, {});
    for (index_t h = 0; h < 2; ++h)
    {
        for (index_t i = 0; i < 60; ++i)
        {
            CHECK(got.get(1, h, 2, i) == 0.0F);
            CHECK(got.get(0, h, 2, i) > 0.0F);
            CHECK(got.get(2, h, 2, i) > 0.0F);
        }
    }
}

TEST_CASE("what is not finite stays so, spoils its layer from rung 0, and all of them as a leverage")
{
    for (float const bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()})
    {
        CAPTURE(bad);
        auto losses = random_layers({2, 2, 3, 20});
        losses.set(bad, 1, 0, 2, 5);
        auto const stays = balanced(losses, {});
        for (index_t i = 0; i < 20; ++i)
        {
            CHECK(std::isfinite(stays.get(1, 0, 2, i)) == (i != 5));
            CHECK(std::isfinite(stays.get(1, 1, 2, i)));
        }
        losses.set(bad, 0, 1, 0, 5);
        auto const spoilt = balanced(losses, {});
        CHECK_FALSE(std::isfinite(spoilt.get(0, 1, 0, 5)));
        CHECK(std::isfinite(spoilt.get(1, 1, 0, 5)));
        auto leverages = random_leverages(20);
        leverages.set(leverage_sum_of(double{bad}), 3);
        for (float const x : balanced(losses, {.leverage_power = 2.0F, .leverages = leverages.in()}).elements())
        {
            CHECK(std::isnan(x));
        }
    }
}

TEST_CASE("no factor makes a loss at rung 0 infinite, however odd its token, and order stays")
{
    // One token has all the loss of its layer and nearly all the leverage, the next a tenth of both.
    constexpr index_t tokens = 4000;
    for (float const depth : {-40.0F, 0.0F, 40.0F})
    {
        for (float const odd : {16.0F, 1000.0F, std::numeric_limits<float>::max()})
        {
            CAPTURE(depth);
            CAPTURE(odd);
            tensor<float, 4> losses{{8, 2, 2, tokens}};
            std::vector<float> all(static_cast<std::size_t>(losses.count()), 0.0F);
            for (std::size_t row = 0; row < 32; ++row)
            {
                all[row * tokens + 40] = row % 2 == 0 ? 1e30F : 1e29F;
                all[row * tokens + 80] = row % 2 == 0 ? 1e29F : 1e28F;
            }
            losses.assign(all);
            tensor<leverage_sum, 1> leverages{{tokens}};
            leverages.assign(std::vector<leverage_sum>(tokens, leverage_sum_of(1e-3)));
            leverages.set(leverage_sum_of(900), 40);
            leverages.set(leverage_sum_of(90), 80);
            auto const got = balanced(losses, {.depth = depth, .leverage_power = odd, .leverages = leverages.in()});
            for (float const x : got.elements()) { CHECK(std::isfinite(x)); }
            CHECK(got.get(7, 0, 0, 40) > got.get(7, 0, 0, 80));
            CHECK(got.get(7, 0, 0, 80) > got.get(7, 0, 0, 120));
            CHECK(got.get(7, 0, 0, 40) > got.get(7, 0, 1, 40)); // or the token would be dropped
        }
    }
}

TEST_CASE("balance refuses options out of their range, by name")
{
    auto losses        = random_layers({2, 2, 3, 8});
    auto const before  = losses.memory();
    auto const refusal = [&](options const& how) {
        return error_text<invalid_argument>(
            [&] { support::run([&](host const& on) { balance(on, losses.out(), how); }); });
    };
    CHECK(refusal({.depth = 41.0F}) == "balance: depth is 41; it must be between -40 and 40");
    CHECK(refusal({.depth = -41.0F}) == "balance: depth is -41; it must be between -40 and 40");
    CHECK(refusal({.leverage_power = 1.0F}) == "balance: leverage_power is 1 without leverages");
    CHECK(losses.memory() == before);
}
