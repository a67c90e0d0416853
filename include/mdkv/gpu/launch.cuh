/// \file launch.cuh: the one way a kernel is started, and what a failed start throws.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/device.cuh>

#include <cuda_runtime_api.h>

namespace mdkv::gpu
{

/// A call into the CUDA runtime failed; nothing is known of what the stream did before.
class cuda_error : public error
{
public:
    cuda_error(char const* what, cudaError_t code)
        : error{std::string{what} + ": " + cudaGetErrorString(code)}
        , code_{code}
    {}
    [[nodiscard]] cudaError_t code() const noexcept { return code_; }

private:
    cudaError_t code_;
};

inline void check(cudaError_t code, char const* what)
{
    if (code != cudaSuccess) { throw cuda_error{what, code}; }
}

namespace kernels
{

/// Every kernel is an object that is copied to the device and called by every thread.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::threads) entry(Kernel const kernel)
{
    kernel();
}

} // namespace kernels

/// Enqueues `blocks` blocks of Kernel::threads threads; none where blocks is 0. A kernel says how much shared memory a
/// block needs with a member `shared_bytes()`, counted and cut with `device::shared_carver`.
/// \throws cuda_error   the start failed, e.g. because a block cannot have that much shared memory
template <class Kernel>
void launch(backend const& on, Kernel const& kernel, index_t blocks)
{
    static_assert(Kernel::threads % device::warp_size == 0 && Kernel::threads <= 1024,
        "launch: Kernel::threads must be a multiple of a warp and at most 1024");
    if (blocks <= 0) { return; }
    expects(blocks <= INT32_MAX, Kernel::name, ": ", blocks, " blocks are more than a grid may have");
    index_t shared = 0;
    if constexpr (requires { kernel.shared_bytes(); }) { shared = kernel.shared_bytes(); }
    constexpr index_t shared_by_default = 48 * 1024; // more must be asked for
    if (shared > shared_by_default)
    {
        check(cudaFuncSetAttribute(kernels::entry<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                  static_cast<int>(shared)),
            Kernel::name);
    }
    kernels::entry<Kernel><<<static_cast<unsigned>(blocks), Kernel::threads, static_cast<std::size_t>(shared),
        on.stream>>>(kernel);
    check(cudaPeekAtLastError(), Kernel::name);
}

} // namespace mdkv::gpu
