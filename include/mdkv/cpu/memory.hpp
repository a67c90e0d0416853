/// \file memory.hpp: host memory of a cache, out of the caller's memory resource.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/width.hpp>

#include <cstddef>
#include <memory_resource>
#include <span>
#include <utility>

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
        : resource_{resource}
        , size_{size}
    {
        if (size > 0)
        {
            data_ = static_cast<std::byte*>(resource->allocate(static_cast<std::size_t>(size), alignment));
        }
    }
    ~owned_bytes()
    {
        if (data_ != nullptr) { resource_->deallocate(data_, static_cast<std::size_t>(size_), alignment); }
    }

    owned_bytes(owned_bytes&& other) noexcept
        : resource_{std::exchange(other.resource_, nullptr)}
        , data_{std::exchange(other.data_, nullptr)}
        , size_{std::exchange(other.size_, 0)}
    {}
    owned_bytes& operator=(owned_bytes&& other) noexcept
    {
        owned_bytes taken{std::move(other)};
        std::swap(resource_, taken.resource_);
        std::swap(data_, taken.data_);
        std::swap(size_, taken.size_);
        return *this;
    }
    owned_bytes(owned_bytes const&)            = delete;
    owned_bytes& operator=(owned_bytes const&) = delete;

    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    [[nodiscard]] index_t size() const noexcept { return size_; }

private:
    std::pmr::memory_resource* resource_{};
    std::byte* data_{};
    index_t size_{};
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
