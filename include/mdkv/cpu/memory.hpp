/// \file memory.hpp: host memory of a cache, out of the caller's memory resource.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/run.hpp>
#include <mdkv/cpu/width.hpp>

#include <cstddef>
#include <memory>
#include <memory_resource>
#include <span>

namespace mdkv::cpu::inline MDKV_CPU_WIDTH
{

/// Bytes from a memory resource, aligned to a cache line; none ask for nothing.
class owned_bytes
{
public:
    static constexpr std::size_t alignment = 64;

    owned_bytes() noexcept = default;

    /// \throws whatever the resource throws
    owned_bytes(index_t size, std::pmr::memory_resource* resource)
        : data_{nullptr, give_back{resource, static_cast<std::size_t>(size)}}
    {
        if (size > 0)
        {
            data_.reset(static_cast<std::byte*>(resource->allocate(static_cast<std::size_t>(size), alignment)));
        }
    }

    [[nodiscard]] std::byte* data() const noexcept { return data_.get(); }
    [[nodiscard]] index_t size() const noexcept { return data_ ? static_cast<index_t>(data_.get_deleter().size) : 0; }

private:
    struct give_back
    {
        std::pmr::memory_resource* resource;
        std::size_t size;

        void operator()(std::byte* data) const noexcept { resource->deallocate(data, size, alignment); }
    };

    std::unique_ptr<std::byte, give_back> data_;
};

/// What a cache's owner asks of the host.
struct host_memory
{
    std::pmr::memory_resource* resource = std::pmr::get_default_resource();

    [[nodiscard]] owned_bytes bytes(index_t n) const { return {n, resource}; }

    template <class Job>
    void run(Job const& job, index_t items) const
    {
        workspace none{std::span<std::byte>{}};
        mdkv::cpu::run(backend{&none}, job, items);
    }
    static void wait() noexcept {}
};

} // namespace mdkv::cpu::inline MDKV_CPU_WIDTH
