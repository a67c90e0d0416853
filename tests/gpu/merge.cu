#include <mdkv/merge.hpp>

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/gpu/backend.cuh>

#include "gpu/support/device.hpp"
#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/random.hpp"

#include <limits>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using mdkv::half; // CUDA has a type of that name in the global namespace
using support::device_tensor;
using support::index_t;
using support::tensor;

TEST_CASE_TEMPLATE(
    "merge on the GPU is that of the CPU, empty sides and merging in place included", U, float, half, bfloat16)
{
    support::source random{"gpu/merge"};
    constexpr index_t rows = 9;
    constexpr index_t dim  = 70;
    tensor<U, 2> output[2]{tensor<U, 2>{{rows, dim}, {.slack = 3}}, tensor<U, 2>{{rows, dim}}};
    tensor<float, 1> lse[2]{tensor<float, 1>{{rows}}, tensor<float, 1>{{rows}}};
    constexpr float none = -std::numeric_limits<float>::infinity();
    for (index_t i = 0; i < rows; ++i)
    {
        for (index_t side = 0; side < 2; ++side)
        {
            bool const empty = i == 2 || (side == 0 && i == 3) || (side == 1 && i == 4);
            lse[side].set(empty ? none : static_cast<float>(random.uniform(-8.0, 8.0)), i);
            for (index_t c = 0; c < dim; ++c)
            {
                output[side].set(
                    narrow<U>(empty ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(random.normal())), i,
                    c);
            }
        }
    }
    tensor<U, 2> want{{rows, dim}};
    tensor<float, 1> want_lse{{rows}};
    support::run([&](cpu::backend const& on) {
        merge_attention(on, output[0].in(), lse[0].in(), output[1].in(), lse[1].in(), want.out(), want_lse.out());
    });
    device_tensor<U, 2> a{output[0]};
    device_tensor<U, 2> const b{output[1]};
    device_tensor<float, 1> lse_a{lse[0]};
    device_tensor<float, 1> const lse_b{lse[1]};
    support::run_on_device([&](gpu::backend const& on) {
        merge_attention(on, a.in(), lse_a.in(), b.in(), lse_b.in(), a.out(), lse_a.out()); // in place
    });
    double const rounding = std::same_as<U, float> ? 0x1p-22 : std::same_as<U, half> ? 0x1p-10 : 0x1p-7;
    support::worst_error error;
    auto const got     = a.host();
    auto const got_lse = lse_a.host();
    for (index_t i = 0; i < rows; ++i)
    {
        if (i == 2) { CHECK(got_lse.get(i) == none); }
        else { CHECK(got_lse.get(i) == doctest::Approx(want_lse.get(i)).epsilon(1e-6)); }
        for (index_t c = 0; c < dim; ++c)
        {
            error.add(static_cast<double>(widen(got.get(i, c))), static_cast<double>(widen(want.get(i, c))), 1.0L, i);
        }
    }
    CHECK_MESSAGE(error.within(4 * rounding), error);
}

} // namespace
