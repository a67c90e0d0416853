// Kernels that are wrong, each in one way, and what the executor says of them; and some that look wrong and are not.
#include "ptx/memory.hpp"

#include <mdkv/gpu/device.cuh>
#include <mdkv/gpu/error.cuh>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <cuda_runtime_api.h>

namespace
{

namespace device = mdkv::gpu::device;

constexpr int threads = 64;

/// What one kernel does: `memory` is fresh from cudaMalloc, `zeros` is written.
struct arguments
{
    unsigned* memory;
    unsigned* zeros;
};
constexpr std::size_t words = 1024;

template <class Body>
__global__ void entry(arguments a)
{
    Body::run(a);
}

/// Runs some blocks; the kinds of faults that are reported.
template <class Body>
std::vector<std::string> faults_of(int blocks = 1)
{
    arguments a{};
    mdkv::gpu::expects_success(cudaMalloc(reinterpret_cast<void**>(&a.memory), words * sizeof(unsigned)), "cudaMalloc");
    mdkv::gpu::expects_success(cudaMalloc(reinterpret_cast<void**>(&a.zeros), words * sizeof(unsigned)), "cudaMalloc");
    std::vector<unsigned> const zeros(words);
    mdkv::gpu::expects_success(
        cudaMemcpy(a.zeros, zeros.data(), words * sizeof(unsigned), cudaMemcpyHostToDevice), "cudaMemcpy");
    static_cast<void>(ptx::take_reports());
    void* given[] = {&a};
    mdkv::gpu::expects_success(
        cudaLaunchKernel(entry<Body>, dim3(static_cast<unsigned>(blocks)), dim3(threads), given, 1024, nullptr),
        "misuse");
    auto const kinds = ptx::take_reports();
    cudaFree(a.memory);
    cudaFree(a.zeros);
    return kinds;
}

/// Whether there are faults and all of one kind.
bool only(std::vector<std::string> const& kinds, std::string const& kind)
{
    auto const is_it = [&](std::string const& one) { return one.substr(0, kind.size()) == kind; };
    return !kinds.empty() && std::all_of(kinds.begin(), kinds.end(), is_it);
}

__device__ unsigned* shared()
{
    return reinterpret_cast<unsigned*>(device::shared_memory());
}

struct misaligned
{
    __device__ static void run(arguments a)
    {
        *reinterpret_cast<uint4*>(a.memory + 4 * device::thread() + 2) = uint4{};
    }
};
struct outside
{
    __device__ static void run(arguments a) { a.memory[words + static_cast<unsigned>(device::thread())] = 1; }
};
struct unwritten
{
    __device__ static void run(arguments a) { a.zeros[device::thread()] = a.memory[device::thread()]; }
};
struct unwritten_shared
{
    __device__ static void run(arguments a)
    {
        if (device::thread() < 63) { shared()[device::thread()] = 1; }
        device::sync();
        a.memory[device::thread()] = shared()[device::thread() ^ 1];
    }
};
struct no_wait
{
    __device__ static void run(arguments a)
    {
        device::copy_async<4>(shared() + device::thread(), a.zeros + device::thread());
        device::copy_async_commit();
        a.memory[device::thread()] = shared()[device::thread()];
        device::copy_async_wait<0>();
    }
};
struct never_waits
{
    __device__ static void run(arguments a)
    {
        device::copy_async<4>(shared() + device::thread(), a.zeros + device::thread());
    }
};
struct copied_twice
{
    __device__ static void run(arguments a)
    {
        if (device::thread() == 1) { a.zeros[1] = 1; }
        device::sync();
        device::copy_async<4>(shared() + device::thread() / 2, a.zeros + device::thread());
        device::copy_async_commit();
        device::copy_async_wait<0>();
    }
};
struct copied_twice_alike
{
    __device__ static void run(arguments a)
    {
        device::copy_async<4>(shared() + device::thread() / 2, a.zeros + device::thread());
        device::copy_async_commit();
        device::copy_async_wait<0>();
    }
};
template <bool Syncs>
struct neighbours
{
    __device__ static void run(arguments a)
    {
        shared()[device::thread()] = 0;
        device::sync();
        shared()[device::thread()] = static_cast<unsigned>(device::thread()) + 1;
        if (Syncs) { device::sync(); }
        a.memory[device::thread()] = shared()[device::thread() ^ 32];
    }
};
struct read_then_written
{
    __device__ static void run(arguments a)
    {
        a.memory[device::thread()]    = a.zeros[device::thread()];
        a.zeros[device::thread() ^ 1] = 1;
    }
};
template <bool Alike>
struct blocks_write
{
    __device__ static void run(arguments a)
    {
        a.memory[device::thread()] = Alike ? 7 : static_cast<unsigned>(device::block());
    }
};
/// A block reads what another one writes.
struct blocks_read
{
    __device__ static void run(arguments a)
    {
        auto const block = static_cast<unsigned>(device::block());
        if (device::thread() == 0) { a.zeros[block] = 1 + a.zeros[block ^ 1]; }
    }
};
struct half_a_barrier
{
    __device__ static void run(arguments a)
    {
        if (device::thread() >= 32) { return; }
        device::sync();
        a.memory[device::thread()] = 1;
    }
};
struct half_a_warp
{
    __device__ static void run(arguments a)
    {
        if (device::thread() % 32 >= 16) { return; }
        device::sync_warp();
        a.memory[device::thread()] = 1;
    }
};

} // namespace

TEST_CASE("the executor of PTX reports each fault, and what it is")
{
    CHECK(only(faults_of<misaligned>(), "misaligned access"));
    CHECK(only(faults_of<outside>(), "access outside of what is allocated"));
    CHECK(only(faults_of<unwritten>(), "unwritten memory is read"));
    CHECK(only(faults_of<unwritten_shared>(), "unwritten memory is read"));
    CHECK(only(faults_of<no_wait>(), "reads what a copy is on its way to"));
    CHECK(only(faults_of<never_waits>(), "ends without waiting for a copy"));
    CHECK(only(faults_of<copied_twice>(), "copies to where another copy is on its way to"));
    CHECK(only(faults_of<neighbours<false>>(), "race: "));
    CHECK(only(faults_of<read_then_written>(), "race: "));
    CHECK(only(faults_of<blocks_write<false>>(4), "race: writes what another thread writes"));
    CHECK(only(faults_of<blocks_read>(4), "race: "));
    CHECK(only(faults_of<half_a_barrier>(), "barrier that some threads never reach"));
    CHECK(only(faults_of<half_a_warp>(), "warp function without lanes that have ended"));
}

TEST_CASE("the executor of PTX reports nothing of equal values, equal copies and barriers")
{
    CHECK(faults_of<copied_twice_alike>().empty());
    CHECK(faults_of<neighbours<true>>().empty());
    CHECK(faults_of<blocks_write<true>>(4).empty());
}
