// Tolerance: both sides add leverages up from Gram matrices that agree to a few units of float's rounding of their largest
// entries, against lambda, a thousandth of the mean energy; the rest is float's rounding of the products.
#include <mdkv/replay/leverage.hpp>

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/gpu/backend.cuh>

#include "gpu/support/device.hpp"
#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/random.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using mdkv::half; // CUDA has a type of that name in the global namespace
using support::device_tensor;
using support::tensor;
using support::worst_error;

TEST_CASE_TEMPLATE("add_leverage on the GPU adds the CPU's leverages, to rounding", T, float, half, bfloat16)
{
    for (auto const& [heads, tokens, dim] :
        std::vector<std::array<index_t, 3>>{{1, 1, 1}, {2, 5, 7}, {3, 700, 64}, {2, 130, 128}, {1, 33, 80}})
    {
        CAPTURE(heads);
        CAPTURE(tokens);
        CAPTURE(dim);
        support::source random{"gpu/leverage keys", dim * 7919 + tokens};
        tensor<T, 3> keys{{heads, tokens, dim}, {.swapped = true, .slack = 3}};
        for (index_t h = 0; h < heads; ++h)
        {
            support::spectrum const shape{random, dim, 0.9, dim};
            for (index_t i = 0; i < tokens; ++i)
            {
                auto const k = shape.draw(random);
                for (index_t d = 0; d < dim; ++d)
                {
                    keys.set(narrow<T>(static_cast<float>(k[static_cast<std::size_t>(d)])), h, i, d);
                }
            }
        }
        tensor<leverage_sum, 1> want{{tokens}};
        leverage_sum const before = leverage_sum_of(0.5); // of layers before
        want.assign(std::vector<leverage_sum>(static_cast<std::size_t>(tokens), before));
        device_tensor<leverage_sum, 1> got{want};
        device_tensor<T, 3> const there{keys};
        support::run([&](cpu::backend const& on) { add_leverage(on, keys.in(), want.out()); });
        support::run_on_device([&](gpu::backend const& on) { add_leverage(on, there.in(), got.out()); });
        auto const a = got.elements();
        auto const b = want.elements();
        worst_error worst;
        for (std::size_t i = 0; i < a.size(); ++i)
        {
            worst.add(leverage_of(a[i]), leverage_of(b[i]), leverage_of(b[i] - before), static_cast<std::int64_t>(i));
        }
        CHECK_MESSAGE(worst.within(0x1p-13), worst);
    }
}

TEST_CASE("on the GPU, too, keys of zeros have no leverage")
{
    tensor<float, 3> keys{{2, 20, 8}};
    keys.assign(std::vector<float>(320, 0.0F));
    device_tensor<float, 3> const there{keys};
    tensor<leverage_sum, 1> sums{{20}};
    sums.assign(std::vector<leverage_sum>(20, leverage_sum_of(2)));
    device_tensor<leverage_sum, 1> got{sums};
    support::run_on_device([&](gpu::backend const& on) { add_leverage(on, there.in(), got.out()); });
    CHECK(got.elements() == std::vector<leverage_sum>(20, leverage_sum_of(2)));
}

} // namespace
