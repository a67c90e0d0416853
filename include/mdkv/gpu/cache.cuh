/// \file cache.cuh: an owner for one layer's packed cache in device memory, and its copies from and to the host (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/detail/cache_owner.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/launch.cuh>
#include <mdkv/gpu/memory.cuh>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <memory_resource>

namespace MDKV_NAMESPACE::gpu
{

/// Owns arena, directory and tail of one layer; every stage works on its view. Empty until `pack` fills it. All memory
/// comes from the resource, in the order of the stream; both are given at construction and must outlive the cache. When
/// the cache is destroyed, other streams' work on it must be over, or be waited for by its own stream.
template <element T, memory_resource Resource = pool_resource>
class cache : public mdkv::detail::cache_owner<T, space::device, stream_memory<Resource>>
{
    using owner = mdkv::detail::cache_owner<T, space::device, stream_memory<Resource>>;

public:
    /// A cache without heads.
    cache() noexcept = default;

    /// Room for `arena_bytes` of packed tokens and `tail_tokens` appended ones. The budget's bytes are enough: pack writes
    /// no more bytes than allocate was given.
    /// \throws invalid_argument   a size is negative
    /// \throws size_overflow      a size leaves 64 bits
    /// \throws cuda_error         the directory could not be cleared (or an exception of the resource)
    cache(cache_layout const& layout, index_t arena_bytes, index_t tail_tokens, cudaStream_t stream, Resource& resource)
        : owner{layout, arena_bytes, tail_tokens, stream_memory<Resource>{stream, std::addressof(resource)}}
    {}

    /// An empty cache of other sizes, of the same stream and memory resource.
    [[nodiscard]] cache like(cache_layout const& layout, index_t arena_bytes, index_t tail_tokens) const
    {
        return {layout, arena_bytes, tail_tokens, stream(), resource()};
    }

    [[nodiscard]] cudaStream_t stream() const noexcept { return this->memory().stream; }
    /// The memory resource, of a cache with heads only.
    [[nodiscard]] Resource& resource() const noexcept { return *this->memory().resource; }
};

/// The same cache in host memory, to inspect, to keep or to decode there. Waits for the stream; the cache's last work must
/// have been enqueued on it, or waited for. If more tokens were appended than the tail holds, the copy's tail is full.
/// \throws cuda_error   (or an exception of the resource)
template <element T, class Resource>
[[nodiscard]] cpu::cache<T> to_host(cache<T, Resource> const& from, cudaStream_t stream,
    std::pmr::memory_resource* resource = std::pmr::get_default_resource())
{
    if (from.directory_bytes() == 0) { return {}; }
    cpu::cache<T> made{from.layout(), from.arena_bytes(), from.tail_capacity(), resource};
    from.copy_to(made, [&](std::byte const* there, std::byte* here, index_t bytes) {
        copy(backend{stream, nullptr}, there, here, bytes);
    });
    index_t& appended = *made.view().appended;
    appended          = (std::min)(appended, from.tail_capacity());
    return made;
}

/// The same cache in device memory; the copy is complete when this returns.
/// \throws cuda_error   (or an exception of the resource)
template <element T, class Resource>
[[nodiscard]] cache<T, Resource> to_device(cpu::cache<T> const& from, cudaStream_t stream, Resource& resource)
{
    if (from.directory_bytes() == 0) { return {}; }
    cache<T, Resource> made{from.layout(), from.arena_bytes(), from.tail_capacity(), stream, resource};
    from.copy_to(made, [&](std::byte const* here, std::byte* there, index_t bytes) {
        copy(backend{stream, nullptr}, here, there, bytes);
    });
    return made;
}

} // namespace MDKV_NAMESPACE::gpu
