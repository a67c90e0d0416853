/// \file launch.cuh: the one way a kernel is started, and the one way bytes go between host and device.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/device.cuh>
#include <mdkv/gpu/error.cuh>

#include <cuda_runtime_api.h>

namespace mdkv::inline MDKV_MACHINE::gpu
{

namespace kernels
{

/// Blocks that a kernel is planned to have on a multiprocessor at once; the compiler must leave registers for them.
template <class Kernel>
[[nodiscard]] constexpr int planned_blocks()
{
    if constexpr (requires { Kernel::blocks_per_multiprocessor; }) { return Kernel::blocks_per_multiprocessor; }
    else { return 1; }
}

/// Every kernel is an object that is copied to the device and called by every thread. (As a grid constant its address may
/// be taken without a copy for every thread.)
template <class Kernel>
__global__ void __launch_bounds__(Kernel::threads, planned_blocks<Kernel>())
    entry(__grid_constant__ Kernel const kernel)
{
    kernel();
}

} // namespace kernels

/// The most shared memory a block of the current device can have, in bytes.
[[nodiscard]] inline index_t most_shared_memory()
{
    int device = 0;
    int bytes  = 0;
    check(cudaGetDevice(&device), "most_shared_memory");
    check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "most_shared_memory");
    return bytes;
}

/// Enqueues `blocks` blocks of Kernel::threads threads, or nothing if `blocks` is 0. Two members are optional:
/// Kernel::blocks_per_multiprocessor, the number of blocks to run at once, and `shared_bytes()`, the shared memory that a
/// block needs.
/// \throws invalid_argument   a block needs more shared memory than the device gives it
/// \throws cuda_error         the start failed
template <class Kernel>
void launch(backend const& on, Kernel const& kernel, index_t blocks)
{
    static_assert(Kernel::threads % device::warp_size == 0 && Kernel::threads <= 1024,
        "launch: Kernel::threads must be a multiple of a warp and at most 1024");
    if (blocks <= 0) { return; }
    expects(blocks <= INT32_MAX, Kernel::name, ": ", blocks, " blocks are more than a grid may have");
    index_t shared = 0;
    if constexpr (requires { kernel.shared_bytes(); }) { shared = kernel.shared_bytes(); }
    constexpr index_t shared_by_default = 48 * 1024; // more must be requested
    if (shared > shared_by_default)
    {
        // Request the maximum, so that a concurrent caller cannot lower it before the launch.
        index_t const most = most_shared_memory();
        expects(shared <= most, Kernel::name, ": a block needs ", shared, " bytes of shared memory; this GPU gives it ",
            most);
        check(cudaFuncSetAttribute(
                  kernels::entry<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most)),
            Kernel::name);
    }
    // Not by <<<>>>: its error is the thread's last error, which may come from an earlier call.
    void* arguments[] = {const_cast<Kernel*>(&kernel)};
    check(cudaLaunchKernel(kernels::entry<Kernel>, dim3(static_cast<unsigned>(blocks)), dim3(Kernel::threads),
              arguments, static_cast<std::size_t>(shared), on.stream),
        Kernel::name);
}

/// Copies `bytes` between host and device, after all work enqueued before, and waits for both.
/// \throws cuda_error   the copy failed, or something before it did
inline void copy(backend const& on, void const* from, void* to, index_t bytes)
{
    if (bytes > 0)
    {
        check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, on.stream), "copy");
    }
    check(cudaStreamSynchronize(on.stream), "copy");
}

} // namespace mdkv::inline MDKV_MACHINE::gpu
