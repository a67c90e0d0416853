#include <mdkv/engine/unpack.hpp>

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/cache.cuh>

#include "gpu/support/device.hpp"
#include "gpu/support/device_packed.hpp"
#include "support/compare.hpp"
#include "support/decoding.hpp"
#include "support/host.hpp"
#include "support/packed.hpp"
#include "support/random.hpp"

#include <utility>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using mdkv::half; // CUDA has a type of that name in the global namespace
using support::device_tensor;
using support::index_t;
using support::tensor;

TEST_CASE_TEMPLATE(
    "rows out of a cache are on the GPU those of the CPU, stand-ins and the tail included", T, float, half, bfloat16)
{
    support::source random{"gpu/unpack"};
    for (auto const& rungs :
        {std::vector{drop, fraction(1, 4), full_int4, full}, std::vector{drop, full_int4, full_int8, full}})
    {
        auto cache =
            support::packed_layer<T>{
                {.heads = 2, .tokens = 37, .window = 3, .dims = {24, 16}, .rungs = rungs, .stand_ins = 3}}
                .packed(20);
        support::append_random(cache, random, 18);
        index_t const rows = most_rows(std::as_const(cache).view()) + 1;
        tensor<T, 3> keys{{2, rows, 24}};
        tensor<T, 3> values{{2, rows, 16}};
        tensor<index_t, 1> kept{{2}};
        support::run([&](cpu::backend const& on) {
            unpack(on, std::as_const(cache).view(), keys.out(), values.out(), kept.out());
        });
        support::device_resource memory;
        auto const there = gpu::to_device(cache, nullptr, memory);
        device_tensor<T, 3> got_keys{{2, rows, 24}, {.slack = 3}};
        device_tensor<T, 3> got_values{{2, rows, 16}};
        device_tensor<index_t, 1> got_kept{{2}};
        support::run_on_device_now([&](gpu::backend const& on) {
            unpack(on, there.view(), got_keys.out(), got_values.out(), got_kept.out());
        });
        CHECK(got_kept.elements() == kept.elements());
        double const rounding = std::is_same_v<T, float> ? 1e-5 : std::is_same_v<T, half> ? 2e-3 : 2e-2;
        support::worst_error error;
        auto const add = [&](std::vector<T> const& ours, std::vector<T> const& theirs) {
            REQUIRE(ours.size() == theirs.size());
            for (std::size_t i = 0; i < ours.size(); ++i)
            {
                error.add(static_cast<long double>(widen(ours[i])), static_cast<long double>(widen(theirs[i])), 4);
            }
        };
        add(got_keys.elements(), keys.elements());
        add(got_values.elements(), values.elements());
        CHECK_MESSAGE(error.within(rounding), error);
    }
}

} // namespace
