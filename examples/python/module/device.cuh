/// \file device.cuh: a CUDA device as a place for prompts and caches: a stream, and memory in its order
#pragma once

#include <mdkv/compress.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/cache_owner.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/memory.cuh>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include <cuda_runtime_api.h>

#include "engine.hpp"
#include "host.hpp"

namespace mdkv_python
{

/// What outlives scratch memory and caches.
struct device_state
{
    cudaStream_t stream = nullptr;       ///< stream of the call that has the turn
    std::unique_ptr<device_source> from; ///< null: the pool, and one stream
    mdkv::gpu::pool_resource pool;
};

/// Memory of a device in the order of its stream, which may be another one in each call.
class device_memory
{
public:
    static constexpr std::size_t alignment = 256;

    device_memory() = default;
    explicit device_memory(device_state& of)
        : of_{&of}
    {}
    [[nodiscard]] static device_memory of(device_memory const& same) noexcept { return same; }

    [[nodiscard]] void* allocate(std::size_t bytes) const
    {
        return of_->from ? of_->from->allocate(bytes) : of_->pool.allocate(of_->stream, bytes, alignment);
    }
    void release(void* data, std::size_t bytes) const noexcept
    {
        if (of_->from) { of_->from->release(data); }
        else { of_->pool.deallocate(of_->stream, data, bytes, alignment); }
    }
    void run(auto const& job, index_t items) const { mdkv::gpu::run({of_->stream}, job, items); }
    void wait() const { mdkv::gpu::copy({of_->stream}, nullptr, nullptr, 0); }

private:
    device_state* of_ = nullptr;
};

template <>
struct place_types<device>
{
    using backend = mdkv::gpu::backend;
    using source  = device_memory;
    using memory  = mdkv::detail::owned_bytes<device_memory>;
    template <mdkv::element T>
    using cache = mdkv::detail::cache_owner<T, mdkv::space::device, device_memory>;

    /// Its device is the thread's current one; the outermost one has asked for the call's stream.
    class inside
    {
    public:
        explicit inside(device& on);
        inside(inside const&)            = delete;
        inside& operator=(inside const&) = delete;
        ~inside();

    private:
        device& on_;
    };
};

/// A stream of a device, in whose order all work and all memory are. Tensors must be ready in that order, too.
class device : device_state, public place_of<device>
{
    using types = place_types<device>;

public:
    device(std::uintptr_t stream, std::unique_ptr<device_source> from)
        : device_state{reinterpret_cast<cudaStream_t>(stream), std::move(from), {}}
        , place_of{device_memory{*this}}
    {}

    [[nodiscard]] types::backend with(mdkv::workspace& scratch) const noexcept { return {stream, &scratch}; }
    void copy(std::byte const* from_there, std::byte* to, index_t bytes) const
    {
        mdkv::gpu::copy({stream, nullptr}, from_there, to, bytes);
    }

    /// A cache without heads, of this stream and memory.
    template <mdkv::element T>
    [[nodiscard]] types::cache<T> empty_cache() const
    {
        return {mdkv::cache_layout{}, 0, 0, source()};
    }

private:
    friend types::inside;

    void enter()
    {
        if (from != nullptr && turns_ == 0)
        {
            stream = reinterpret_cast<cudaStream_t>(from->stream());
            mdkv::gpu::expects_success(cudaGetDevice(&current_before_), "CudaBackend");
            mdkv::gpu::expects_success(cudaSetDevice(from->number()), "CudaBackend");
        }
        turns_ += 1;
    }
    void leave() noexcept
    {
        turns_ -= 1;
        if (from != nullptr && turns_ == 0) { static_cast<void>(cudaSetDevice(current_before_)); }
    }

    int turns_          = 0; // turns of the thread that has them
    int current_before_ = 0;
};

inline place_types<device>::inside::inside(device& on)
    : on_{on}
{
    on_.enter();
}
inline place_types<device>::inside::~inside()
{
    on_.leave();
}

} // namespace mdkv_python
