/// \file cache.cuh: an owner for one layer's packed cache in device memory, and its copies from and to the host (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/detail/cache_owner.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/memory.cuh>

#include <algorithm>
#include <memory_resource>

namespace MDKV_NAMESPACE::gpu
{

/// `cache<T>{layout, arena_bytes, tail_tokens, stream, resource}`.
template <element T, memory_resource Resource = pool_resource>
using cache = mdkv::detail::cache_owner<T, space::device, stream_memory<Resource>>;

/// The same cache in host memory, to inspect, to keep or to decode there. Waits for the stream; the cache's last work must
/// have been enqueued on it, or waited for. If more tokens were appended than the tail holds, the copy's tail is full.
/// \throws cuda_error   (or an exception of the resource)
template <element T, class Resource>
[[nodiscard]] cpu::cache<T> to_host(cache<T, Resource> const& from, cudaStream_t stream,
    std::pmr::memory_resource* resource = std::pmr::get_default_resource())
{
    auto made = from.template copied<cpu::cache<T>>(
        [&](std::byte const* there, std::byte* here, index_t bytes) { copy(backend{stream}, there, here, bytes); },
        resource);
    if (index_t* const appended = made.view().appended; appended != nullptr)
    {
        *appended = (std::min)(*appended, from.tail_capacity());
    }
    return made;
}

/// The same cache in device memory; the copy is complete when this returns.
/// \throws cuda_error   (or an exception of the resource)
template <element T, class Resource>
[[nodiscard]] cache<T, Resource> to_device(cpu::cache<T> const& from, cudaStream_t stream, Resource& resource)
{
    return from.template copied<cache<T, Resource>>(
        [&](std::byte const* here, std::byte* there, index_t bytes) { copy(backend{stream}, here, there, bytes); },
        stream, resource);
}

} // namespace MDKV_NAMESPACE::gpu
