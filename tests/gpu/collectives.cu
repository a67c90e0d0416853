#include <mdkv/gpu/collectives.cuh>

#include <mdkv/core/types.hpp>
#include <mdkv/gpu/launch.cuh>

#include "gpu/support/device.hpp"
#include "support/host.hpp"

#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using support::device_tensor;

struct sums
{
    static constexpr char const* name = "sums";
    static constexpr int threads      = 96;

    out_view<int, 2, gpu::backend> to; // [5, 96]

    [[nodiscard]] MDKV_HD int* carve(gpu::device::shared_carver& memory) const
    {
        static_cast<void>(memory.template take<char>(3)); // what follows stays aligned
        return memory.template take<int>(threads / gpu::device::warp_size);
    }
    [[nodiscard]] index_t shared_bytes() const
    {
        gpu::device::shared_carver count{nullptr};
        static_cast<void>(carve(count));
        return count.bytes();
    }

    __device__ void operator()() const
    {
        gpu::device::shared_carver memory{gpu::device::shared_memory()};
        int* const part = carve(memory);
        int const t     = gpu::device::thread();
        to(0, t)        = gpu::device::warp_sum(t);
        to(1, t)        = gpu::device::block_sum(t, part);
        auto const all  = gpu::device::block_prefix(t % 5, part);
        to(2, t)        = all.before;
        to(3, t)        = all.total;
        to(4, t)        = static_cast<int>(gpu::device::warp_max(static_cast<float>(t % 7)));
    }
};

} // namespace

TEST_CASE("sums, prefixes and maxima of warps and blocks are those of their threads")
{
    CHECK(sums{}.shared_bytes() == 32);
    device_tensor<int, 2> to{{5, 96}};
    support::run_on_device([&](gpu::backend const& on) {
        if (!on.scratch->counting()) { gpu::launch(on, sums{to.out()}, 1); }
    });
    auto const got = to.host();
    int before     = 0;
    int total      = 0;
    for (int t = 0; t < 96; ++t) { total += t % 5; }
    for (int t = 0; t < 96; ++t)
    {
        int const first = t / 32 * 32;
        CHECK(got.get(0, t) == 32 * first + 31 * 16);
        CHECK(got.get(1, t) == 95 * 48);
        CHECK(got.get(2, t) == before);
        CHECK(got.get(3, t) == total);
        CHECK(got.get(4, t) == 6);
        before += t % 5;
    }
}
