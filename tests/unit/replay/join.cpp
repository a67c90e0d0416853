#include <mdkv/replay/balance.hpp>

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/losses.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace
{

using namespace mdkv;
using support::random_losses;
using support::tensor;
using host = cpu::backend;

tensor<float, 3> joined(tensor<float, 3> const& first, tensor<float, 3> const& second, float weight,
    support::placement how = {}, cpu::executor_ref threads = {})
{
    tensor<float, 3> to{{first.extent(0), first.extent(1), first.extent(2)}, how};
    support::run([&](host const& on) { join(on, first.in(), second.in(), weight, to.out()); }, threads);
    return to;
}

/// Mean of the losses at rung 0.
double mean_of(tensor<float, 3> const& loss)
{
    double total = 0;
    for (index_t h = 0; h < loss.extent(0); ++h)
    {
        for (index_t i = 0; i < loss.extent(2); ++i) { total += double{loss.get(h, 0, i)}; }
    }
    return total / static_cast<double>(loss.extent(0) * loss.extent(2));
}

} // namespace

TEST_CASE("joined losses are the sum of both in units of their means over heads and tokens at rung 0")
{
    for (index_t const tokens : {1, 7, 4096, 4097, 10000})
    {
        for (float const weight : {0.0F, 0.3F, 1.0F, 4.0F})
        {
            CAPTURE(tokens);
            CAPTURE(weight);
            auto const a        = random_losses(3, 4, tokens, 1e-6F);
            auto const b        = random_losses(3, 4, tokens, 1e+4F);
            auto const got      = joined(a, b, weight);
            double const mean_a = mean_of(a);
            double const mean_b = mean_of(b);
            double most         = 0;
            for (index_t h = 0; h < 3; ++h)
            {
                for (index_t r = 0; r < 4; ++r)
                {
                    for (index_t i = 0; i < tokens; ++i)
                    {
                        double const want =
                            double{a.get(h, r, i)} / mean_a + double{weight} * double{b.get(h, r, i)} / mean_b;
                        most = std::max(most, std::fabs(double{got.get(h, r, i)} - want) / want);
                    }
                }
            }
            CHECK(most < 0x1p-21);
        }
    }
}

TEST_CASE("a set that loses nothing adds nothing, and a NaN at rung 0 spoils every loss")
{
    auto const a = random_losses(2, 3, 50, 1.0F);
    tensor<float, 3> nothing{{2, 3, 50}};
    nothing.assign(std::vector<float>(300, 0.0F));
    auto const alone = joined(a, nothing, 1.0F);
    CHECK(support::same_bits(joined(a, a, 0.0F).elements(), alone.elements()));
    CHECK(support::same_bits(joined(nothing, nothing, 1.0F).elements(), nothing.elements()));
    tensor<float, 3> bad = a.relaid({});
    bad.set(std::numeric_limits<float>::quiet_NaN(), 1, 0, 49);
    for (float const loss : joined(a, bad, 1.0F).elements()) { CHECK(std::isnan(loss)); }
}

TEST_CASE("losses below float's normal numbers are joined by their mean, and zeros among them stay zeros")
{
    for (float const size : {0x1p-100F, 0x1p-127F, 0x1p-129F, 0x1p-140F, 0x1p-149F})
    {
        CAPTURE(size);
        std::vector<float> all;
        for (int i = 0; i < 2 * 2 * 64; ++i)
        {
            all.push_back(i % 3 == 0 ? 0.0F : size * static_cast<float>(1 + i % 2));
        }
        tensor<float, 3> tiny{{2, 2, 64}};
        tiny.assign(all);
        auto const ones  = random_losses(2, 2, 64, 1.0F);
        auto const first = joined(tiny, ones, 0.5F), second = joined(ones, tiny, 3e38F);
        double const mean = mean_of(tiny), mean_of_ones = mean_of(ones);
        for (index_t h = 0; h < 2; ++h)
        {
            for (index_t r = 0; r < 2; ++r)
            {
                for (index_t i = 0; i < 64; ++i)
                {
                    double const a = double{tiny.get(h, r, i)} / mean, b = double{ones.get(h, r, i)} / mean_of_ones;
                    CHECK(first.get(h, r, i) == doctest::Approx(a + 0.5 * b).epsilon(1e-6));
                    CHECK((a > 1 ? second.get(h, r, i) > 3e38F : second.get(h, r, i) >= 0));
                    CHECK(!std::isnan(second.get(h, r, i)));
                }
            }
        }
    }
}

TEST_CASE("losses may lie anywhere, be joined in place and by any number of threads, with the same bits")
{
    auto const a    = random_losses(4, 3, 9000, 1.0F);
    auto const b    = random_losses(4, 3, 9000, 2.0F);
    auto const want = joined(a, b, 0.7F).elements();
    CHECK(support::same_bits(
        joined(a.relaid({.swapped = true}), b.relaid({.slack = 3}), 0.7F, {.slack = 1}).elements(), want));
    cpu::thread_pool three{3};
    CHECK(support::same_bits(joined(a, b, 0.7F, {}, three).elements(), want));
    tensor<float, 3> own = a.relaid({.slack = 5});
    support::run([&](host const& on) { join(on, own.in(), b.in(), 0.7F, own.out()); });
    CHECK(support::same_bits(own.elements(), want));
}
