/// \file cache.hpp: an owner for one layer's packed cache in host memory (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <memory_resource>
#include <utility>

namespace mdkv::cpu
{

namespace detail
{

/// Bytes from a memory resource, aligned to a cache line; empty ones ask for nothing.
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

    owned_bytes(owned_bytes&& other) noexcept { swap(other); }
    owned_bytes& operator=(owned_bytes&& other) noexcept
    {
        owned_bytes taken{std::move(other)};
        swap(taken);
        return *this;
    }
    owned_bytes(owned_bytes const&)            = delete;
    owned_bytes& operator=(owned_bytes const&) = delete;

    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    [[nodiscard]] index_t size() const noexcept { return size_; }

private:
    void swap(owned_bytes& other) noexcept
    {
        std::swap(resource_, other.resource_);
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
    }

    std::pmr::memory_resource* resource_{};
    std::byte* data_{};
    index_t size_{};
};

} // namespace detail

/// Owns arena, directory and tail of one layer; every stage works on its view. Empty until `pack` fills it. All memory
/// comes from the resource given at construction, which must outlive the cache. A const cache may be read from any number
/// of threads at once.
template <element T>
class cache
{
public:
    using view_type = cache_view<T, space::host>;

    /// A cache without heads.
    cache() noexcept = default;

    /// Room for `arena_bytes` of packed tokens (`packed_bytes` says how many) and `tail_tokens` appended ones.
    /// \throws invalid_argument, size_overflow   a size is negative or too large
    /// \throws std::bad_alloc                    (or what the resource throws)
    cache(cache_layout const& layout, index_t arena_bytes, index_t tail_tokens = 0,
        std::pmr::memory_resource* resource = std::pmr::get_default_resource())
        : layout_{layout}
        , resource_{resource}
        , arena_{checked(arena_bytes, "arena_bytes"), resource}
        , directory_{directory_size(layout), resource}
        , tail_{tail_size(layout, checked(tail_tokens, "tail_tokens")), resource}
        , tail_capacity_{tail_tokens}
    {
        auto* const heads = reinterpret_cast<head_entry*>(directory_.data());
        std::uninitialized_fill_n(heads, layout.heads, head_entry{});
        std::construct_at(appended_counter(), index_t{0});
    }

    /// An equal cache in memory of its own. Copying is a named function because it costs as much as the cache is large.
    /// \throws std::bad_alloc   (or what the resource throws)
    [[nodiscard]] cache copy(std::pmr::memory_resource* resource) const
    {
        if (directory_.size() == 0) { return {}; }
        cache other{layout_, arena_.size(), tail_capacity_, resource};
        copy_bytes(arena_, other.arena_);
        copy_bytes(directory_, other.directory_);
        copy_bytes(tail_, other.tail_);
        return other;
    }
    [[nodiscard]] cache copy() const { return copy(resource_); }

    /// What the stages take. From a const cache it is for reading only.
    [[nodiscard]] view_type view() noexcept { return make_view(); }
    [[nodiscard]] view_type view() const noexcept { return make_view(); }

    [[nodiscard]] cache_layout const& layout() const noexcept { return layout_; }
    [[nodiscard]] std::pmr::memory_resource* resource() const noexcept { return resource_; }
    [[nodiscard]] index_t arena_bytes() const noexcept { return arena_.size(); }
    [[nodiscard]] index_t directory_bytes() const noexcept { return directory_.size(); }
    [[nodiscard]] index_t tail_bytes() const noexcept { return tail_.size(); }
    [[nodiscard]] index_t tail_capacity() const noexcept { return tail_capacity_; }

    /// Tokens appended since pack.
    [[nodiscard]] index_t appended() const noexcept { return directory_.size() == 0 ? 0 : *appended_counter(); }

    /// Forgets the appended tokens.
    void clear_tail() noexcept
    {
        if (directory_.size() > 0) { *appended_counter() = 0; }
    }

    /// Makes room for at least `tokens` appended tokens in all, keeping those that are there. Views made before are stale
    /// afterwards. If it throws, nothing has changed.
    /// \throws invalid_argument, size_overflow   tokens is negative or too large
    /// \throws std::bad_alloc                    (or what the resource throws)
    void reserve_tail(index_t tokens)
    {
        if (checked(tokens, "tokens") <= tail_capacity_) { return; }
        detail::owned_bytes larger{tail_size(layout_, tokens), resource_};
        index_t const head_bytes = (layout_.dims.keys + layout_.dims.values) * index_t{sizeof(T)};
        for (index_t h = 0; h < layout_.heads; ++h)
        {
            move_head(tail_.data() + h * tail_capacity_ * head_bytes, larger.data() + h * tokens * head_bytes, tokens);
        }
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

    static void copy_bytes(detail::owned_bytes const& from, detail::owned_bytes const& to)
    {
        if (from.size() > 0) { std::memcpy(to.data(), from.data(), static_cast<std::size_t>(from.size())); }
    }

    [[nodiscard]] index_t* appended_counter() const noexcept
    {
        return reinterpret_cast<index_t*>(directory_.data() + layout_.heads * index_t{sizeof(head_entry)});
    }

    /// Copies one head's appended tokens into a tail of another capacity. Only a last, narrow tile is laid out anew.
    void move_head(std::byte const* from, std::byte* to, index_t capacity) const noexcept
    {
        constexpr index_t bytes = sizeof(T);
        head_dims const dims    = layout_.dims;
        index_t const tokens    = appended();
        for (index_t first = 0; first < tokens; first += tile_tokens)
        {
            index_t const old_width = std::min(tile_tokens, tail_capacity_ - first);
            index_t const new_width = std::min(tile_tokens, capacity - first);
            index_t const used      = std::min(old_width, tokens - first);
            if (used <= 0) { break; } // never: what was appended fits the tail; g++ 12 warns where it cannot see that
            std::byte const* const a = from + first * dims.keys * bytes;
            std::byte* const b       = to + first * dims.keys * bytes;
            for (index_t d = 0; d < dims.keys; ++d)
            {
                std::memcpy(
                    b + d * new_width * bytes, a + d * old_width * bytes, static_cast<std::size_t>(used * bytes));
            }
        }
        if (tokens > 0)
        {
            std::memcpy(to + capacity * dims.keys * bytes, from + tail_capacity_ * dims.keys * bytes,
                static_cast<std::size_t>(tokens * dims.values * bytes));
        }
    }

    [[nodiscard]] view_type make_view() const noexcept
    {
        if (directory_.size() == 0) { return {}; }
        return {layout_, arena_.data(), arena_.size(), reinterpret_cast<head_entry*>(directory_.data()), tail_.data(),
            tail_capacity_, appended_counter()};
    }

    cache_layout layout_;
    std::pmr::memory_resource* resource_ = std::pmr::get_default_resource();
    detail::owned_bytes arena_;
    detail::owned_bytes directory_;
    detail::owned_bytes tail_;
    index_t tail_capacity_ = 0;
};

} // namespace mdkv::cpu
