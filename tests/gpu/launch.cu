#include <mdkv/gpu/backend.cuh>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include "gpu/support/device.hpp"
#include "support/host.hpp"

#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using support::device_tensor;
using support::tensor;

/// Every block counts itself.
struct count_blocks
{
    static constexpr char const* name = "count_blocks";
    static constexpr int threads      = 32;

    out_view<int, 1, gpu::backend> to; // [blocks]
    index_t shared;

    [[nodiscard]] index_t shared_bytes() const { return shared; }

    __device__ void operator()() const
    {
        if (gpu::device::thread() == 0) { to(gpu::device::block()) += 1; }
    }
};

} // namespace

TEST_CASE("every block of a launch runs once, none where there are none, and more shared memory than by default is had")
{
    tensor<int, 1> zeros{{5}};
    zeros.assign(std::vector<int>(5, 0));
    device_tensor<int, 1> to{zeros};
    support::run_on_device([&](gpu::backend const& on) {
        gpu::launch(on, count_blocks{to.out(), 0}, 5);
        gpu::launch(on, count_blocks{to.out(), 0}, 0);
        gpu::launch(on, count_blocks{to.out(), 64 * 1024}, 2);
    });
    CHECK(to.elements() == std::vector<int>{2, 2, 1, 1, 1});
    CHECK_THROWS_AS(gpu::launch(gpu::backend{}, count_blocks{to.out(), 0}, index_t{1} << 31), invalid_argument);
    CHECK_THROWS_AS(gpu::launch(gpu::backend{}, count_blocks{to.out(), 1 << 20}, 1), invalid_argument);
}
