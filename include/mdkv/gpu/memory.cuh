/// \file memory.cuh: device memory in the order of a stream: an owner over any resource, and the resource CUDA has built in.
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/cache_owner.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/error.cuh>

#include <memory>
#include <new>

#include <cuda_runtime_api.h>

namespace MDKV_NAMESPACE::gpu
{

/// Where device memory comes from: memory allocated on a stream may be used by work enqueued there later, and memory freed there by
/// work enqueued before (a pool of an engine's, for one). CCCL's and newer RMM's take the stream first, others last.
template <class R>
concept memory_resource = requires(R& from, void* pointer, std::size_t number, cudaStream_t stream) {
    static_cast<void*>(from.allocate(stream, number, number));
    from.deallocate(stream, pointer, number, number);
} || requires(R& from, void* pointer, std::size_t number, cudaStream_t stream) {
    static_cast<void*>(from.allocate_async(number, number, stream));
    from.deallocate_async(pointer, number, number, stream);
};

/// The device's own pool (cudaMallocAsync). Its memory is aligned to 256 bytes.
class pool_resource
{
public:
    /// \throws std::bad_alloc   there is no memory
    /// \throws cuda_error       the call failed otherwise
    [[nodiscard]] void* allocate(cudaStream_t stream, std::size_t bytes, std::size_t)
    {
        void* pointer          = nullptr;
        cudaError_t const code = cudaMallocAsync(&pointer, bytes, stream);
        if (code == cudaErrorMemoryAllocation)
        {
            static_cast<void>(cudaGetLastError()); // clears the error, which the next call would return
            mdkv::detail::raise(std::bad_alloc{});
        }
        expects_success(code, "pool_resource");
        return pointer;
    }

    void deallocate(cudaStream_t stream, void* pointer, std::size_t, std::size_t) noexcept
    {
        static_cast<void>(cudaFreeAsync(pointer, stream)); // fails only if the context is gone, and its memory with it
    }
};

/// Device memory in the order of a stream, out of a resource, as a cache's owner takes it.
template <memory_resource Resource>
struct stream_memory
{
    static constexpr std::size_t alignment = 256;
    static constexpr bool by_stream        = requires(Resource& from) { from.allocate(cudaStream_t{}, 1, 1); };

    cudaStream_t stream = nullptr;
    Resource* resource  = nullptr;

    [[nodiscard]] static stream_memory of(stream_memory const& same) noexcept { return same; }
    [[nodiscard]] static stream_memory of(cudaStream_t stream_, Resource& from) noexcept
    {
        return {stream_, std::addressof(from)};
    }

    [[nodiscard]] void* allocate(std::size_t bytes) const
    {
        constexpr std::size_t to = alignment;
        if constexpr (by_stream) { return resource->allocate(stream, bytes, to); }
        else { return resource->allocate_async(bytes, to, stream); }
    }
    void release(void* data, std::size_t bytes) const noexcept
    {
        constexpr std::size_t to = alignment;
        if constexpr (by_stream) { resource->deallocate(stream, data, bytes, to); }
        else { resource->deallocate_async(data, bytes, to, stream); }
    }

    void run(auto const& job, index_t items) const { mdkv::gpu::run(backend{stream}, job, items); }
    void wait() const { copy(backend{stream, nullptr}, nullptr, nullptr, 0); }
};

/// Bytes on the device, freed on the stream on which they were allocated. Stream and resource must live until then, and
/// work on other streams must be over, or be waited for by that stream. An empty object has allocated nothing.
/// `device_bytes<R>{size, {stream, &resource}}` refuses a negative size, and passes on the resource's exceptions.
template <memory_resource Resource>
using device_bytes = mdkv::detail::owned_bytes<stream_memory<Resource>>;

} // namespace MDKV_NAMESPACE::gpu
