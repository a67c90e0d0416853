#include <mdkv/balance.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/random.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
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
tensor<float, 1> random_leverages(index_t tokens)
{
    support::source random{"leverages", tokens};
    tensor<float, 1> leverages{{tokens}};
    for (index_t i = 0; i < tokens; ++i) { leverages.set(static_cast<float>(std::exp(1.5 * random.normal())), i); }
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
std::vector<double> factors_of(tensor<float, 1> const& leverages, double odd, index_t reach)
{
    auto const n = leverages.extent(0);
    double total = 0;
    for (float const x : leverages.elements()) { total += double{x}; }
    std::vector<double> factors;
    for (index_t i = 0; i < n; ++i)
    {
        double sum  = 0;
        int counted = 0;
        for (index_t j = std::max<index_t>(0, i - reach); j < n && j - i <= reach; ++j, ++counted)
        {
            sum += double{leverages.get(j)};
        }
        factors.push_back(total == 0 ? 1.0 : std::pow(sum / counted * static_cast<double>(n) / total, odd));
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

TEST_CASE("losses count by a power of the mean leverage around a token")
{
    for (index_t const tokens : {1, 5, 17, 1025, 5000})
    {
        for (index_t const reach : {0, 1, 8, 10000})
        {
            for (float const odd : {1.0F, 2.5F, 16.0F})
            {
                CAPTURE(tokens);
                CAPTURE(reach);
                CAPTURE(odd);
                auto const losses    = random_layers({2, 2, 3, tokens});
                auto const leverages = random_leverages(tokens);
                auto const got =
                    balanced(losses, {.depth = 1.0F, .odd = odd, .leverages = leverages.in(), .reach = reach});
                auto factors       = factors_of(leverages, double{odd}, reach);
                auto const at_most = 0x1p127 / (static_cast<double>(2 * tokens) * std::exp(1.0));
                for (double& x : factors) { x = std::min(x, at_most); }
                auto const worst = error_of(got, losses, 1.0, factors);
                CHECK_MESSAGE(worst.within(0x1p-20), worst);
            }
        }
    }
}
