#include <mdkv/gpu/memory.cuh>

#include <mdkv/core/error.hpp>

#include <new>
#include <type_traits>
#include <utility>

#include "gpu/support/device.hpp"
#include "support/host.hpp"

#include <cuda/stream_ref>
#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using support::device_resource;
using bytes = gpu::device_bytes<device_resource>;

/// The shape of RMM's resources before 26.06, and with a stream of CCCL's that of later ones and of CCCL's own.
struct stream_last
{
    device_resource& in;
    void* allocate_async(std::size_t n, std::size_t to, cudaStream_t on) { return in.allocate(on, n, to); }
    void deallocate_async(void* p, std::size_t n, std::size_t to, cudaStream_t on) noexcept
    {
        in.deallocate(on, p, n, to);
    }
};
struct stream_of_cccl
{
    device_resource& in;
    void* allocate(cuda::stream_ref on, std::size_t n, std::size_t to) { return in.allocate(on.get(), n, to); }
    void deallocate(cuda::stream_ref on, void* p, std::size_t n, std::size_t to) noexcept
    {
        in.deallocate(on.get(), p, n, to);
    }
};

static_assert(gpu::memory_resource<gpu::pool_resource>);
static_assert(!gpu::memory_resource<int>);
static_assert(!std::is_copy_constructible_v<bytes>);
static_assert(gpu::stream_memory<device_resource>::alignment % 16 == 0); // what attend asks of an arena

} // namespace

TEST_CASE("device bytes go back to the resource they came from, once, also when they were moved")
{
    device_resource resource;
    {
        bytes one{100, {nullptr, &resource}};
        bytes const empty{0, {nullptr, &resource}};
        CHECK(resource.outstanding() == 1);
        CHECK(empty.data() == nullptr);
        bytes other{std::move(one)};
        CHECK(other.size() == 100);
        CHECK(one.data() == nullptr); // NOLINT: what it is left as is what is asked
        other = bytes{200, {nullptr, &resource}};
        CHECK(resource.outstanding() == 1);
    }
    CHECK(resource.outstanding() == 0);
}

TEST_CASE_TEMPLATE("resources of other libraries are used as they are", R, stream_last, stream_of_cccl)
{
    device_resource pieces;
    R resource{pieces};
    {
        gpu::device_bytes<R> const one{100, {nullptr, &resource}};
        CHECK(pieces.outstanding() == 1);
    }
    CHECK(pieces.outstanding() == 0);
}

TEST_CASE("a resource that has nothing left, and a negative size, leave nothing behind")
{
    device_resource resource;
    resource.fail_after(0);
    CHECK_THROWS_AS((bytes{1, {nullptr, &resource}}), std::bad_alloc);
    CHECK(support::error_text<invalid_argument>([&] {
        bytes const bad{-1, {nullptr, &resource}};
    }) == "bytes of a backend's memory: size is -1; it must not be negative");
    CHECK(resource.outstanding() == 0);
}
