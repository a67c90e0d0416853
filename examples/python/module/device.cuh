/// \file device.cuh: a CUDA device as a place for prompts and caches: a stream, and memory of the device's own pool
#pragma once

#include <mdkv/compress.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/cache.cuh>
#include <mdkv/gpu/memory.cuh>

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "engine.hpp"
#include "host.hpp"

namespace mdkv_python
{

template <>
struct place_types<device>
{
    using backend = mdkv::gpu::backend;
    using source  = mdkv::gpu::stream_memory<mdkv::gpu::pool_resource>;
    using memory  = mdkv::gpu::device_bytes<mdkv::gpu::pool_resource>;
    template <mdkv::element T>
    using cache = mdkv::gpu::cache<T>;
};

/// What outlives the scratch memory.
struct device_memory
{
    cudaStream_t stream = nullptr;
    mdkv::gpu::pool_resource pool;
};

/// A stream of a device, in whose order all work and all memory are. Tensors must be ready in that order, too.
class device : device_memory, public place_of<device>
{
    using types = place_types<device>;

public:
    explicit device(std::uintptr_t stream)
        : device_memory{reinterpret_cast<cudaStream_t>(stream), {}}
        , place_of{types::source{device_memory::stream, &pool}}
    {}

    [[nodiscard]] types::backend with(mdkv::workspace& scratch) const noexcept { return {stream, &scratch}; }
    void copy(std::byte const* from, std::byte* to, index_t bytes) const
    {
        mdkv::gpu::copy({stream, nullptr}, from, to, bytes);
    }

    /// A cache without heads, of this stream and memory.
    template <mdkv::element T>
    [[nodiscard]] mdkv::gpu::cache<T> empty_cache()
    {
        return {mdkv::cache_layout{}, 0, 0, stream, pool};
    }
};

} // namespace mdkv_python
