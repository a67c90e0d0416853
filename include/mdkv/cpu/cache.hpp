/// \file cache.hpp: an owner for one layer's packed cache in host memory (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/detail/cache_owner.hpp>

#include <cstddef>
#include <cstring>
#include <memory_resource>

namespace MDKV_NAMESPACE::cpu
{

/// Host memory out of a memory resource, aligned to a cache line, as a cache's owner takes it.
struct host_memory
{
    static constexpr std::size_t alignment = 64;

    std::pmr::memory_resource* resource = std::pmr::get_default_resource();

    [[nodiscard]] void* allocate(std::size_t bytes) const { return resource->allocate(bytes, alignment); }
    void release(void* data, std::size_t bytes) const noexcept { resource->deallocate(data, bytes, alignment); }

    template <class Job>
    void run(Job const& job, index_t items) const
    {
        workspace none{*this};
        mdkv::cpu::run(backend{&none}, job, items);
    }
    static void wait() noexcept {}
};

/// Owns arena, directory and tail of one layer; every stage works on its view. No layout and no heads until `compress` or
/// `pack` fills it. All memory comes from the resource given at construction, which must outlive the cache. Any number of
/// threads may read a const cache at once.
template <element T>
class cache : public mdkv::detail::cache_owner<T, space::host, host_memory>
{
    using owner = mdkv::detail::cache_owner<T, space::host, host_memory>;

public:
    /// A cache without heads.
    cache() noexcept = default;

    /// Room for `arena_bytes` of packed tokens (as many as `packed_bytes` returns) and `tail_tokens` appended ones.
    /// \throws invalid_argument   a size is negative
    /// \throws size_overflow      a size leaves 64 bits
    /// \throws std::bad_alloc     (or an exception of the resource)
    cache(cache_layout const& layout, index_t arena_bytes, index_t tail_tokens = 0,
        std::pmr::memory_resource* resource = std::pmr::get_default_resource())
        : owner{layout, arena_bytes, tail_tokens, host_memory{resource}}
    {}

    /// An equal cache in its own memory. Copying is a named function because its cost grows with the cache's bytes.
    /// \throws std::bad_alloc   (or an exception of the resource)
    [[nodiscard]] cache copy(std::pmr::memory_resource* resource) const
    {
        if (this->directory_bytes() == 0) { return {}; }
        cache other{this->layout(), this->arena_bytes(), this->tail_capacity(), resource};
        this->copy_to(other, [](std::byte const* from, std::byte* to, index_t bytes) {
            if (bytes > 0) { std::memcpy(to, from, static_cast<std::size_t>(bytes)); }
        });
        return other;
    }
    [[nodiscard]] cache copy() const { return copy(resource()); }

    /// An empty cache of other sizes, out of the same memory resource.
    [[nodiscard]] cache like(cache_layout const& layout, index_t arena_bytes, index_t tail_tokens) const
    {
        return {layout, arena_bytes, tail_tokens, resource()};
    }

    [[nodiscard]] std::pmr::memory_resource* resource() const noexcept { return this->memory().resource; }

    /// Tokens appended since pack.
    [[nodiscard]] index_t appended() const noexcept
    {
        auto const view = this->view();
        return view.appended == nullptr ? 0 : *view.appended;
    }
};

} // namespace MDKV_NAMESPACE::cpu
