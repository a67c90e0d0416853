// What is undefined or an error on a GPU is an exception on the emulated one: a test of the tests.
#include <emulation/machine.hpp>

#include <mdkv/gpu/device.cuh>
#include <mdkv/gpu/launch.cuh>

#include "support/host.hpp"

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

#include <vector_types.h>

#include <doctest/doctest.h>

namespace
{

namespace device = mdkv::gpu::device;
using mdkv::index_t;

template <class Body>
struct kernel
{
    static constexpr char const* name = "misused";
    static constexpr int threads      = 64;

    Body body;
    index_t shared = 0;

    [[nodiscard]] index_t shared_bytes() const { return shared; }
    void operator()() const { body(); }
};

template <class Body>
std::string told_of(Body const& body, index_t shared = 0)
{
    return support::error_text<std::logic_error>([&] {
        mdkv::gpu::launch(mdkv::gpu::backend{}, kernel<Body>{body, shared}, 1);
    });
}

bool has(std::string const& text, char const* part)
{
    return text.find(part) != std::string::npos;
}

} // namespace

TEST_CASE("a barrier that some threads never reach is told of by kernel, block and thread")
{
    std::string const text = told_of([] {
        if (device::thread() != 40) { device::sync(); }
    });
    CHECK(has(text, "misused, block 0, thread "));
    CHECK(has(text, "thread 40 has ended"));
}

TEST_CASE("a warp function without all lanes of the warp, or two at once, are told of")
{
    CHECK(has(told_of([] {
        if (device::thread() < 7) { static_cast<void>(device::shuffle_xor(1, 1)); }
    }),
        "of its warp has ended"));
    CHECK(has(told_of([] {
        if (device::thread() < 7) { static_cast<void>(device::ballot(true)); }
        else { device::sync(); }
    }),
        "waits for the block"));
    CHECK(has(told_of([] {
        if (device::thread() % 2 == 0) { static_cast<void>(device::ballot(true)); }
        else { static_cast<void>(device::shuffle_xor(1, 1)); }
    }),
        "is in "));
}

TEST_CASE("a copy that nobody waited for and an address it cannot have are told of")
{
    alignas(16) static float const numbers[8]{};
    CHECK(has(told_of([] { device::copy_async<16>(device::shared_memory() + 16 * device::thread(), numbers); }, 1024),
        "ended without waiting for a copy"));
    CHECK(has(told_of([] { device::copy_async<16>(device::shared_memory() + 4, numbers); }, 1024), "multiple of 16"));
}

TEST_CASE("a vector at an address that is no multiple of its size is told of")
{
    CHECK(has(told_of([] { static_cast<void>(device::load<uint4>(device::shared_memory() + 8)); }, 1024),
        "load: an address"));
    CHECK(has(told_of([] { device::store(device::shared_memory() + 4, uint2{}); }, 1024), "store: an address"));
}

TEST_CASE("a copy is there when it is waited for, and may be there before or not")
{
    alignas(16) static std::uint32_t const number[4]{1, 2, 3, 4};
    for (auto const which : {emulation::order::ascending, emulation::order::descending})
    {
        emulation::use(which);
        std::uint32_t before = 0;
        std::uint32_t after  = 0;
        auto copy            = [&] {
            auto* const to = device::shared_memory() + 16 * device::thread();
            device::copy_async<16>(to, number);
            device::copy_async_commit();
            before = device::load<std::uint32_t>(to);
            device::copy_async_wait<0>();
            after = device::load<std::uint32_t>(to);
        };
        mdkv::gpu::launch(mdkv::gpu::backend{}, kernel<decltype(copy)>{copy, 1024}, 1);
        CHECK((before == 1) == (which == emulation::order::descending));
        CHECK(after == 1);
    }
    emulation::use(emulation::order::ascending);
}

TEST_CASE("shared memory is not a number until it is written, and what a thread throws reaches the caller")
{
    CHECK(has(told_of(
                  [] {
                      auto const* const x = reinterpret_cast<float const*>(device::shared_memory());
                      if (device::thread() == 3 && std::isnan(x[5])) { throw std::logic_error{"not a number"}; }
                      device::sync();
                  },
                  1024),
        "not a number"));
}

TEST_CASE("threads run in the order asked for, and their results show where that matters")
{
    for (auto const which : {emulation::order::ascending, emulation::order::descending})
    {
        emulation::use(which);
        int last    = -1;
        auto record = [&last] { last = device::thread(); };
        mdkv::gpu::launch(mdkv::gpu::backend{}, kernel<decltype(record)>{record}, 1);
        CHECK(last == (which == emulation::order::ascending ? 63 : 0));
    }
    emulation::use(emulation::order::ascending);
}
