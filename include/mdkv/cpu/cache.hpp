/// \file cache.hpp: an owner for one layer's packed cache in host memory (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/detail/cache_owner.hpp>

#include <memory_resource>

namespace MDKV_NAMESPACE::cpu
{

/// Host memory out of a memory resource, aligned to a cache line, as a cache's owner takes it.
struct host_memory
{
    static constexpr std::size_t alignment = 64;

    std::pmr::memory_resource* resource = std::pmr::get_default_resource();

    [[nodiscard]] static host_memory of(host_memory const& same) noexcept { return same; }
    [[nodiscard]] static host_memory of(std::pmr::memory_resource* from = std::pmr::get_default_resource()) noexcept
    {
        return {from};
    }

    [[nodiscard]] void* allocate(std::size_t bytes) const { return resource->allocate(bytes, alignment); }
    void release(void* data, std::size_t bytes) const noexcept { resource->deallocate(data, bytes, alignment); }

    void run(auto const& job, index_t items) const
    {
        workspace none{*this};
        mdkv::cpu::run(backend{&none}, job, items);
    }
    static void wait() noexcept {}
};

/// `cache<T>{layout, arena_bytes, tail_tokens, resource}`; without a resource, out of the default one.
template <element T>
using cache = mdkv::detail::cache_owner<T, space::host, host_memory>;

} // namespace MDKV_NAMESPACE::cpu
