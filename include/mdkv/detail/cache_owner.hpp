/// \file cache_owner.hpp: the owner of one layer's packed cache, over memory of any backend (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/team.hpp>

#include <algorithm>
#include <cstddef>
#include <utility>

namespace mdkv::detail
{

/// A directory without tokens, as one has it before pack.
struct clear_directory
{
    static constexpr char const* name = "clear_directory";

    head_entry* heads; // [H]
    index_t count;     // H
    index_t* appended; // [1]

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t) const
    {
        for (index_t h = t.rank(); h < count; h += t.size()) { heads[h] = head_entry{}; }
        if (t.rank() == 0) { *appended = 0; }
    }
};

/// Appended tokens into a tail of another capacity: one item a tile of a head. The last tile may have another width. Where
/// more tokens were appended than the old tail holds, the count falls to its capacity.
template <element T, space S>
struct move_tail
{
    static constexpr char const* name = "move_tail";
    static constexpr int threads      = 128;

    cache_view<T, S> from;
    cache_view<T, S> to;

    [[nodiscard]] index_t items() const noexcept
    {
        return from.layout.heads * std::max<index_t>((from.tail_capacity + tile_tokens - 1) / tile_tokens, 1);
    }
    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        // An item that reads the count before it falls finds the same minimum as one that reads it after.
        index_t const appended = *from.appended;
        index_t const tokens   = appended < from.tail_capacity ? appended : from.tail_capacity;
        if (item == 0 && t.rank() == 0 && tokens != appended) { *from.appended = tokens; }
        index_t const h     = item % from.layout.heads;
        index_t const first = item / from.layout.heads * tile_tokens;
        stored_run const a  = run_of_head(from, h, from.layout.rungs + 1);
        stored_run const b  = run_of_head(to, h, to.layout.rungs + 1);
        for (index_t i = first; i < tokens && i < first + tile_tokens; ++i)
        {
            copy_token<T>(t, a.keys, i, b.keys, i);
            copy_token<T>(t, a.values, i, b.values, i);
        }
    }
};

/// Owns arena, directory and tail. `Memory` is a backend's: `bytes(n)` makes an owner of n bytes with data() and size(),
/// `run(job, items)` runs a job where the bytes lie, `wait()` waits for the stream they were taken on. The default-made and the moved-from owner have no heads and no memory.
template <element T, space S, class Memory>
class cache_owner
{
public:
    using view_type = cache_view<T, S>;

    cache_owner() noexcept = default;

    /// Room for `arena_bytes` of packed tokens and `tail_tokens` appended ones.
    /// \throws invalid_argument, size_overflow   a size is negative or too large
    /// \throws whatever the memory throws
    cache_owner(cache_layout const& layout, index_t arena_bytes, index_t tail_tokens, Memory memory)
        : layout_{layout}
        , memory_{memory}
        , arena_{memory_.bytes(checked(arena_bytes, "arena_bytes"))}
        , directory_{memory_.bytes(directory_size(layout))}
        , tail_{memory_.bytes(tail_size(layout, checked(tail_tokens, "tail_tokens")))}
        , tail_capacity_{tail_tokens}
    {
        memory_.run(clear_directory{heads(), layout.heads, count()}, 1);
    }

    cache_owner(cache_owner&& other) noexcept { swap(other); }
    cache_owner& operator=(cache_owner&& other) noexcept
    {
        cache_owner taken{std::move(other)};
        swap(taken);
        return *this;
    }
    cache_owner(cache_owner const&)            = delete;
    cache_owner& operator=(cache_owner const&) = delete;
    ~cache_owner()                             = default;

    /// For the stages that write.
    [[nodiscard]] view_type view() noexcept { return make_view(); }
    /// For reading only.
    [[nodiscard]] view_type view() const noexcept { return make_view(); }

    [[nodiscard]] cache_layout const& layout() const noexcept { return layout_; }
    [[nodiscard]] Memory const& memory() const noexcept { return memory_; }
    [[nodiscard]] index_t arena_bytes() const noexcept { return arena_.size(); }
    [[nodiscard]] index_t directory_bytes() const noexcept { return directory_.size(); }
    [[nodiscard]] index_t tail_bytes() const noexcept { return tail_.size(); }
    [[nodiscard]] index_t tail_capacity() const noexcept { return tail_capacity_; }

    /// Makes room for at least `tokens` appended tokens in all, keeping those that are there; on a GPU without waiting, on
    /// the cache's stream. Views made before are stale afterwards. If it throws, nothing has changed.
    /// \throws invalid_argument, size_overflow   tokens is negative or too large, or the cache has no heads
    /// \throws whatever the memory throws
    void reserve_tail(index_t tokens)
    {
        if (checked(tokens, "tokens") <= tail_capacity_) { return; }
        expects(directory_.size() > 0, "cache: a cache without a layout has no room for ", tokens, " tokens");
        auto larger         = memory_.bytes(tail_size(layout_, tokens));
        view_type const old = make_view();
        view_type grown     = old;
        grown.tail          = larger.data();
        grown.tail_capacity = tokens;
        move_tail<T, S> const job{old, grown};
        memory_.run(job, job.items());
        tail_          = std::move(larger);
        tail_capacity_ = tokens;
    }

    /// On a GPU waits for the cache's stream: work on other streams may then use it. Nothing on a CPU.
    void wait() const { memory_.wait(); }

    /// Calls copy(from, to, bytes) for each piece of memory; `other` has the same sizes.
    template <class Other, class Copy>
    void copy_to(Other& other, Copy const& copy) const
    {
        auto const to = other.view();
        copy(arena_.data(), to.arena, arena_.size());
        copy(tail_.data(), to.tail, tail_.size());
        copy(directory_.data(), reinterpret_cast<std::byte*>(to.heads), directory_.size());
    }

private:
    [[nodiscard]] static index_t checked(index_t size, char const* name)
    {
        expects(size >= 0, "cache: ", name, " is ", size, "; it must not be negative");
        return size;
    }
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
    [[nodiscard]] index_t* count() const noexcept
    {
        return reinterpret_cast<index_t*>(directory_.data() + layout_.heads * index_t{sizeof(head_entry)});
    }

    [[nodiscard]] view_type make_view() const noexcept
    {
        if (directory_.size() == 0) { return {}; }
        return {layout_, arena_.data(), arena_.size(), heads(), tail_.data(), tail_capacity_, count()};
    }

    void swap(cache_owner& other) noexcept
    {
        std::swap(layout_, other.layout_);
        std::swap(memory_, other.memory_);
        std::swap(arena_, other.arena_);
        std::swap(directory_, other.directory_);
        std::swap(tail_, other.tail_);
        std::swap(tail_capacity_, other.tail_capacity_);
    }

    using owned = decltype(std::declval<Memory&>().bytes(index_t{}));

    cache_layout layout_;
    Memory memory_{};
    owned arena_;
    owned directory_;
    owned tail_;
    index_t tail_capacity_ = 0;
};

} // namespace mdkv::detail
