/// \file launch.cuh: stands in for <mdkv/gpu/launch.cuh> on the host: runs a kernel to its end on the emulated GPU.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/device.cuh>

#include <emulation/machine.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace MDKV_NAMESPACE::gpu
{

[[nodiscard]] inline index_t most_shared_memory(backend const& = {})
{
    return emulation::most_shared;
}

template <class Kernel>
void launch(backend const&, Kernel const& kernel, index_t blocks)
{
    static_assert(Kernel::threads % device::warp_size == 0 && Kernel::threads <= 1024,
        "launch: Kernel::threads must be a multiple of a warp and at most 1024");
    static_assert(std::is_trivially_copyable_v<Kernel>, "launch: a kernel is copied to the device as bytes");
    static_assert(sizeof(Kernel) <= 4096, "launch: a kernel's members are its parameters, of 4,096 bytes at most");
    if (blocks <= 0) { return; }
    expects(blocks <= INT32_MAX, Kernel::name, ": ", blocks, " blocks are more than a grid may have");
    index_t shared = 0;
    if constexpr (requires { kernel.shared_bytes(); }) { shared = kernel.shared_bytes(); }
    index_t const most = most_shared_memory();
    expects(
        shared <= most, Kernel::name, ": a block needs ", shared, " bytes of shared memory; this GPU gives it ", most);
    emulation::run({Kernel::name, Kernel::threads, blocks, shared}, [&] { kernel(); });
}

/// Work is done as it is enqueued.
inline void copy(backend const&, void const* from, void* to, index_t bytes)
{
    if (bytes > 0) { std::memcpy(to, from, static_cast<std::size_t>(bytes)); }
}

} // namespace MDKV_NAMESPACE::gpu
