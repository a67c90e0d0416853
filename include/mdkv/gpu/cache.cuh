/// \file cache.cuh: an owner for one layer's packed cache in device memory, and its copies from and to the host (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/device.cuh>
#include <mdkv/gpu/launch.cuh>
#include <mdkv/gpu/memory.cuh>

#include <algorithm>
#include <cstddef>
#include <memory_resource>
#include <utility>

namespace mdkv::gpu
{

namespace kernels
{

/// A directory without tokens, as one has it before pack.
struct clear_directory
{
    static constexpr char const* name = "clear_directory";
    static constexpr int threads      = 256;

    head_entry* heads; // [H]
    index_t count;     // H
    index_t* appended; // [1]

    __device__ void operator()() const
    {
        index_t const h = device::block() * threads + device::thread();
        if (h < count) { heads[h] = head_entry{}; }
        if (h == 0) { *appended = 0; }
    }
};

/// Appended tokens into a tail of another capacity; where more were appended than the old one holds, the count falls to
/// what it holds. One block a tile of a head. The last tile may have another width.
template <element T>
struct move_tail
{
    static constexpr char const* name = "move_tail";
    static constexpr int threads      = 128;

    cache_view<T, space::device> from;
    cache_view<T, space::device> to;

    [[nodiscard]] __device__ static int width(index_t capacity, index_t first)
    {
        return static_cast<int>(capacity - first < tile_tokens ? capacity - first : tile_tokens);
    }

    __device__ void operator()() const
    {
        // Whether a block reads the count before or after it falls, the smaller of the two is the same.
        index_t const appended = *from.appended;
        index_t const tokens   = appended < from.tail_capacity ? appended : from.tail_capacity;
        if (device::block() == 0 && device::thread() == 0) { *from.appended = tokens; }
        index_t const first = device::block() / from.layout.heads * tile_tokens;
        if (first >= tokens) { return; }
        index_t const h      = device::block() % from.layout.heads;
        auto const used      = width(tokens, first);
        auto const key_dim   = static_cast<int>(from.layout.dims.keys);
        auto const value_dim = static_cast<int>(from.layout.dims.values);
        auto const* const a  = reinterpret_cast<T const*>(from.tail + h * from.tail_head_bytes());
        auto* const b        = reinterpret_cast<T*>(to.tail + h * to.tail_head_bytes());
        int const a_width    = width(from.tail_capacity, first);
        int const b_width    = width(to.tail_capacity, first);
        int const t          = device::thread() % int{tile_tokens};
        for (int d = device::thread() / int{tile_tokens}; t < used && d < key_dim; d += threads / int{tile_tokens})
        {
            b[first * key_dim + d * b_width + t] = a[first * key_dim + d * a_width + t];
        }
        T const* const old_values = a + from.tail_capacity * key_dim + first * value_dim;
        T* const new_values       = b + to.tail_capacity * key_dim + first * value_dim;
        for (int i = device::thread(); i < used * value_dim; i += threads) { new_values[i] = old_values[i]; }
    }
};

} // namespace kernels

/// Owns arena, directory and tail of one layer; every stage works on its view. Empty until `pack` fills it. All memory
/// comes from the resource, in the order of the stream, both given at construction; both must outlive the cache, and work
/// of other streams on it must be over, or be waited for by that stream, when it is destroyed.
template <element T, memory_resource Resource = pool_resource>
class cache
{
public:
    using view_type = cache_view<T, space::device>;

    /// A cache without heads.
    cache() noexcept = default;

    /// Room for `arena_bytes` of packed tokens and `tail_tokens` appended ones. The budget's bytes are enough: what
    /// allocate keeps to is what pack fills.
    /// \throws invalid_argument, size_overflow   a size is negative or too large
    /// \throws cuda_error                        the directory could not be cleared (or what the resource throws)
    cache(cache_layout const& layout, index_t arena_bytes, index_t tail_tokens, cudaStream_t stream, Resource& resource)
        : layout_{layout}
        , arena_{checked(arena_bytes, "arena_bytes"), stream, resource}
        , directory_{directory_size(layout), stream, resource}
        , tail_{tail_size(layout, checked(tail_tokens, "tail_tokens")), stream, resource}
        , tail_capacity_{tail_tokens}
    {
        using kernel = kernels::clear_directory;
        launch(backend{stream, nullptr}, kernel{heads(), layout.heads, appended()}, layout.heads / kernel::threads + 1);
    }

    /// What the stages take. From a const cache it is for reading only.
    [[nodiscard]] view_type view() noexcept { return make_view(); }
    [[nodiscard]] view_type view() const noexcept { return make_view(); }

    [[nodiscard]] cache_layout const& layout() const noexcept { return layout_; }
    [[nodiscard]] cudaStream_t stream() const noexcept { return directory_.stream(); }
    /// Of a cache with heads.
    [[nodiscard]] Resource& resource() const noexcept { return directory_.resource(); }
    [[nodiscard]] index_t arena_bytes() const noexcept { return arena_.size(); }
    [[nodiscard]] index_t directory_bytes() const noexcept { return directory_.size(); }
    [[nodiscard]] index_t tail_bytes() const noexcept { return tail_.size(); }
    [[nodiscard]] index_t tail_capacity() const noexcept { return tail_capacity_; }

    /// Makes room for at least `tokens` appended tokens in all, keeping those that are there, without waiting: enqueued on
    /// the cache's stream. Views made before are stale afterwards. If it throws, nothing has changed.
    /// \throws invalid_argument, size_overflow   tokens is negative or too large
    /// \throws cuda_error                        (or what the resource throws)
    void reserve_tail(index_t tokens)
    {
        if (checked(tokens, "tokens") <= tail_capacity_) { return; }
        device_bytes<Resource> larger{tail_size(layout_, tokens), stream(), directory_.resource()};
        view_type const old_view = make_view();
        view_type new_view       = old_view;
        new_view.tail            = larger.data();
        new_view.tail_capacity   = tokens;
        index_t const tiles      = std::max<index_t>((tail_capacity_ + tile_tokens - 1) / tile_tokens, 1);
        launch(backend{stream(), nullptr}, kernels::move_tail<T>{old_view, new_view}, layout_.heads * tiles);
        tail_          = std::move(larger);
        tail_capacity_ = tokens;
    }

private:
    [[nodiscard]] static index_t checked(index_t size, char const* name)
    {
        expects(size >= 0, "cache: ", name, " is ", size, "; it must not be negative");
        return size;
    }

    /// The directory's heads, then the count of appended tokens.
    [[nodiscard]] static index_t directory_size(cache_layout const& layout)
    {
        return checked_add(checked_multiply(layout.heads, index_t{sizeof(head_entry)}), index_t{sizeof(index_t)});
    }

    [[nodiscard]] static index_t tail_size(cache_layout const& layout, index_t tokens)
    {
        index_t const token_bytes =
            checked_multiply(checked_add(layout.dims.keys, layout.dims.values), index_t{sizeof(T)});
        return checked_multiply(checked_multiply(layout.heads, token_bytes), tokens);
    }

    [[nodiscard]] head_entry* heads() const noexcept { return reinterpret_cast<head_entry*>(directory_.data()); }
    [[nodiscard]] index_t* appended() const noexcept
    {
        return reinterpret_cast<index_t*>(directory_.data() + layout_.heads * index_t{sizeof(head_entry)});
    }

    [[nodiscard]] view_type make_view() const noexcept
    {
        if (directory_.size() == 0) { return {}; }
        return {layout_, arena_.data(), arena_.size(), heads(), tail_.data(), tail_capacity_, appended()};
    }

    cache_layout layout_;
    device_bytes<Resource> arena_;
    device_bytes<Resource> directory_;
    device_bytes<Resource> tail_;
    index_t tail_capacity_ = 0;
};

/// The same cache in host memory, to look at, to keep or to decode there. Waits for the stream, on which the last work on
/// the cache must have been enqueued, or waited for. A tail that was asked to hold more than it can is full, no more.
/// \throws cuda_error   (or what the resource throws)
template <element T, class Resource>
[[nodiscard]] cpu::cache<T> to_host(cache<T, Resource> const& from, cudaStream_t stream,
    std::pmr::memory_resource* resource = std::pmr::get_default_resource())
{
    auto const source = from.view();
    if (source.heads == nullptr) { return {}; }
    cpu::cache<T> made{from.layout(), from.arena_bytes(), from.tail_capacity(), resource};
    auto const target = made.view();
    backend const on{stream, nullptr};
    read_back(on, source.arena, target.arena, from.arena_bytes());
    read_back(on, source.heads, target.heads, from.layout().heads * index_t{sizeof(head_entry)});
    read_back(on, source.tail, target.tail, from.tail_bytes());
    read_back(on, source.appended, target.appended, sizeof(index_t));
    *target.appended = std::min(*target.appended, from.tail_capacity());
    return made;
}

/// The same cache in device memory, there when this returns.
/// \throws cuda_error   (or what the resource throws)
template <element T, class Resource>
[[nodiscard]] cache<T, Resource> to_device(cpu::cache<T> const& from, cudaStream_t stream, Resource& resource)
{
    auto const source = from.view();
    if (source.heads == nullptr) { return {}; }
    cache<T, Resource> made{from.layout(), from.arena_bytes(), from.tail_capacity(), stream, resource};
    auto const target = made.view();
    backend const on{stream, nullptr};
    upload(on, source.arena, target.arena, from.arena_bytes());
    upload(on, source.heads, target.heads, from.layout().heads * index_t{sizeof(head_entry)});
    upload(on, source.tail, target.tail, from.tail_bytes());
    upload(on, source.appended, target.appended, sizeof(index_t));
    return made;
}

} // namespace mdkv::gpu
