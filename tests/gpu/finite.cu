#include <mdkv/engine/finite.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/gpu/backend.cuh>

#include "gpu/support/device.hpp"
#include "support/host.hpp"

#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using mdkv::half; // CUDA has a type of that name in the global namespace
using support::device_tensor;
using support::error_text;
using support::placement;
using support::tensor;

template <class T>
tensor<T, 3> ones(index_t heads, index_t count, index_t dim, placement how = {})
{
    tensor<T, 3> x{{heads, count, dim}, how};
    x.assign(std::vector<T>(static_cast<std::size_t>(x.count()), narrow<T>(1.0F)));
    return x;
}

template <class T>
std::string gpu_verdict(tensor<T, 3> const& x, index_t layer = -1)
{
    device_tensor<T, 3> const rows{x};
    return error_text<non_finite_input>([&] {
        support::run_on_device_now([&](gpu::backend const& on) { expects_finite(on, "keys", rows.in(), layer); });
    });
}

template <class T>
std::string cpu_verdict(tensor<T, 3> const& x, index_t layer = -1)
{
    return error_text<non_finite_input>(
        [&] { support::run([&](cpu::backend const& on) { expects_finite(on, "keys", x.in(), layer); }); });
}

TEST_CASE_TEMPLATE("the GPU says of every element and every layout as the CPU does", T, float, half, bfloat16)
{
    constexpr float infinity = std::numeric_limits<float>::infinity();
    constexpr float nan      = std::numeric_limits<float>::quiet_NaN();
    for (index_t const dim : {1, 7, 40, 64, 200})
    {
        for (placement const how :
            {placement{}, placement{.slack = 1}, placement{.swapped = true, .slack = 9, .misalign = sizeof(T)}})
        {
            CHECK(gpu_verdict(ones<T>(2, 5, dim, how)) == "threw nothing");
            for (float const bad : {infinity, -infinity, nan, -nan})
            {
                tensor<T, 3> x = ones<T>(2, 70, dim, how);
                x.set(narrow<T>(bad), 1, 66, dim / 2);
                x.set(narrow<T>(bad), 1, 67, 0);
                x.set(narrow<T>(-60000.0F), 0, 3, dim - 1);
                CHECK(gpu_verdict(x) == cpu_verdict(x));
                CHECK(gpu_verdict(x, 17) == cpu_verdict(x, 17));
                x.set(narrow<T>(bad), 0, 7, dim - 1);
                CHECK(gpu_verdict(x) == "keys: NaN or infinity in head 0, row 7");
            }
        }
    }
}

TEST_CASE("empty inputs are finite on the GPU")
{
    CHECK(gpu_verdict(ones<float>(0, 5, 8)) == "threw nothing");
    CHECK(gpu_verdict(ones<float>(2, 0, 8)) == "threw nothing");
    CHECK(gpu_verdict(ones<float>(2, 5, 0)) == "threw nothing");
}

} // namespace
