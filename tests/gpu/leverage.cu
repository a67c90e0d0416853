// Tolerance: both sides add leverages up from Gram matrices that agree to a few units of float's rounding of their largest
// entries, against lambda, a thousandth of the mean energy; the rest is float's rounding of the products.
#include <mdkv/replay/leverage.hpp>

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/basis.hpp>
#include <mdkv/gpu/basis.cuh>

#include "gpu/support/device.hpp"
#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/random.hpp"

#include <array>
#include <cmath>
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
        tensor<float, 1> want{{tokens}};
        want.assign(std::vector<float>(static_cast<std::size_t>(tokens), 0.5F)); // of layers before
        device_tensor<float, 1> got{want};
        device_tensor<T, 3> const there{keys};
        support::run([&](cpu::backend const& on) { add_leverage(on, keys.in(), want.out()); });
        support::run_on_device([&](gpu::backend const& on) { add_leverage(on, there.in(), got.out()); });
        auto const a = got.elements();
        auto const b = want.elements();
        worst_error worst;
        for (std::size_t i = 0; i < a.size(); ++i) { worst.add(a[i], b[i], b[i] - 0.5F, static_cast<std::int64_t>(i)); }
        CHECK_MESSAGE(worst.within(0x1p-13), worst);
    }
}

TEST_CASE("on the GPU, too, keys of zeros have no leverage")
{
    tensor<float, 3> keys{{2, 20, 8}};
    keys.assign(std::vector<float>(320, 0.0F));
    device_tensor<float, 3> const there{keys};
    tensor<float, 1> sums{{20}};
    sums.assign(std::vector<float>(20, 2.0F));
    device_tensor<float, 1> got{sums};
    support::run_on_device([&](gpu::backend const& on) { add_leverage(on, there.in(), got.out()); });
    CHECK(got.elements() == std::vector<float>(20, 2.0F));
}

} // namespace
