// Both sides add and multiply in double, in orders of their own; pow and exp are correct to a few units of it. What is left is
// one rounding to float, which may go either way.
#include <mdkv/replay/balance.hpp>

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/replay/leverage.hpp>

#include "gpu/support/device.hpp"
#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/random.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using support::device_tensor;
using support::tensor;

template <std::size_t Rank>
tensor<float, Rank> random_tensor(char const* name, std::array<index_t, Rank> shape, support::placement how = {})
{
    support::source random{name, shape[Rank - 1]};
    tensor<float, Rank> x{shape, how};
    std::vector<float> all;
    for (index_t i = 0; i < x.count(); ++i) { all.push_back(static_cast<float>(std::exp(2 * random.normal()))); }
    x.assign(all);
    return x;
}

TEST_CASE("balance on the GPU gives the CPU's losses, to a rounding")
{
    for (index_t const tokens : {1, 70, 5000})
    {
        for (float const odd : {0.0F, 16.0F, 1000.0F})
        {
            CAPTURE(tokens);
            CAPTURE(odd);
            support::source random{"leverages", tokens};
            tensor<leverage_sum, 1> leverages{{tokens}};
            for (index_t i = 0; i < tokens; ++i) { leverages.set(leverage_sum_of(std::exp(2 * random.normal())), i); }
            auto const losses = random_tensor<4>("layers", {3, 2, 4, tokens}, {.slack = 3});
            auto want         = losses.relaid({});
            support::run([&](cpu::backend const& on) {
                balance(on, want.out(), {.depth = 1.5F, .leverage_power = odd, .leverages = leverages.in()});
            });
            device_tensor<leverage_sum, 1> const device_leverages{leverages};
            device_tensor<float, 4> got{losses};
            support::run_on_device([&](gpu::backend const& on) {
                balance(on, got.out(), {.depth = 1.5F, .leverage_power = odd, .leverages = device_leverages.in()});
            });
            auto const a      = got.elements();
            auto const b      = want.elements();
            std::int64_t most = 0;
            for (std::size_t i = 0; i < a.size(); ++i) { most = std::max(most, support::ulps(a[i], b[i])); }
            CHECK(most <= 1);
        }
    }
}

TEST_CASE("on the GPU, too, layers without losses stay zero, tokens without leverages count alike, and NaN stays")
{
    tensor<float, 4> losses{{3, 1, 2, 6}};
    losses.assign(std::vector<float>{
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 1, 1, 1, NAN, 1, 1});
    tensor<leverage_sum, 1> none{{6}};
    none.assign(std::vector<leverage_sum>(6));
    device_tensor<leverage_sum, 1> const leverages{none};
    device_tensor<float, 4> got{losses};
    support::run_on_device([&](gpu::backend const& on) {
        balance(on, got.out(), {.leverage_power = 16.0F, .leverages = leverages.in()});
    });
    auto const elements = got.elements();
    for (std::size_t i = 0; i < elements.size(); ++i)
    {
        CAPTURE(i);
        if (i == 33) { CHECK(std::isnan(elements[i])); }
        else { CHECK(elements[i] == (i < 12 ? 0.0F : i % 12 < 6 ? 1.0F : 0.5F)); }
    }
}

} // namespace
