#include <mdkv/stages/pool.hpp>

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/gpu/backend.cuh>

#include "gpu/support/device.hpp"
#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/random.hpp"

#include <cmath>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using mdkv::index_t;
using mdkv::pool_options;
using mdkv::pooling;
using support::device_tensor;
using support::source;
using support::tensor;

tensor<float, 3> on_cpu(tensor<float, 3> const& loss, pool_options options)
{
    tensor<float, 3> result{{loss.extent(0), loss.extent(1), loss.extent(2)}};
    support::run([&](mdkv::cpu::backend const& on) { mdkv::pool(on, loss.in(), options, result.out()); });
    return result;
}

tensor<float, 3> on_gpu(tensor<float, 3> const& loss, pool_options options, support::placement how = {})
{
    device_tensor<float, 3> const from{loss};
    device_tensor<float, 3> to{{loss.extent(0), loss.extent(1), loss.extent(2)}, how};
    support::run_on_device([&](mdkv::gpu::backend const& on) { mdkv::pool(on, from.in(), options, to.out()); });
    return to.host();
}

tensor<float, 3> random_losses(
    source& random, index_t heads, index_t rungs, index_t tokens, support::placement how = {})
{
    tensor<float, 3> loss{{heads, rungs, tokens}, how};
    for (index_t h = 0; h < heads; ++h)
    {
        for (index_t r = 0; r < rungs; ++r)
        {
            for (index_t i = 0; i < tokens; ++i) { loss.set(static_cast<float>(random.normal()), h, r, i); }
        }
    }
    return loss;
}

} // namespace

TEST_CASE("pool on the GPU gives the CPU's bits, whatever the kind, the width and the number of tokens")
{
    source random{"gpu/pool"};
    for (index_t const tokens : {1, 7, 16, 255, 2047, 2049, 5000})
    {
        for (index_t const width : {1, 3, 7, 25, 101, 1023, 10001})
        {
            if (tokens > 256 && width > 25) { continue; }
            tensor<float, 3> const loss = random_losses(random, 2, 2, tokens, {.swapped = tokens == 7, .slack = 3});
            CAPTURE(tokens);
            CAPTURE(width);
            for (pooling const kind : {pooling::max, pooling::mean, pooling::adaptive})
            {
                CHECK(support::same_bits(
                    on_gpu(loss, {width, kind}, {.slack = 2}).elements(), on_cpu(loss, {width, kind}).elements()));
            }
        }
    }
}

TEST_CASE("pool on the GPU hands a NaN and infinities on as the CPU does")
{
    source random{"gpu/pool nan"};
    tensor<float, 3> loss = random_losses(random, 1, 4, 2500);
    loss.set(std::numeric_limits<float>::quiet_NaN(), 0, 1, 2100);
    loss.set(std::numeric_limits<float>::infinity(), 0, 2, 100);
    loss.set(-std::numeric_limits<float>::infinity(), 0, 3, 2499);
    for (pooling const kind : {pooling::max, pooling::mean, pooling::adaptive})
    {
        std::vector<float> const got  = on_gpu(loss, {5, kind}).elements();
        std::vector<float> const want = on_cpu(loss, {5, kind}).elements();
        index_t differ                = 0;
        for (std::size_t i = 0; i < want.size(); ++i)
        {
            differ += std::isnan(got[i]) == std::isnan(want[i]) && (std::isnan(got[i]) || got[i] == want[i]) ? 0 : 1;
        }
        CHECK(differ == 0);
    }
}
