/// \file cache_owner.hpp: the owner of one layer's packed cache, over memory of any backend (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/detail/tile_loops.hpp>

#include <algorithm>
#include <memory>
#include <utility>

namespace MDKV_NAMESPACE::detail
{

/// Bytes of a backend's memory, which has `allocate(bytes)` and `release(data, bytes)`. 0 bytes allocate nothing.
template <class Memory>
class owned_bytes
{
public:
    owned_bytes() noexcept = default;

    /// \throws invalid_argument   the size is negative
    /// \throws the memory's exceptions
    owned_bytes(index_t size, Memory const& memory)
        : data_{nullptr, {memory, static_cast<std::size_t>(size)}}
    {
        expects(size >= 0, "bytes of a backend's memory: size is ", size, "; it must not be negative");
        if (size > 0) { data_.reset(static_cast<std::byte*>(memory.allocate(static_cast<std::size_t>(size)))); }
    }

    [[nodiscard]] std::byte* data() const noexcept { return data_.get(); }
    [[nodiscard]] index_t size() const noexcept
    {
        return data_ == nullptr ? 0 : static_cast<index_t>(data_.get_deleter().size);
    }

private:
    struct releaser
    {
        Memory memory{};
        std::size_t size = 0;

        void operator()(std::byte* data) const noexcept { memory.release(data, size); }
    };

    std::unique_ptr<std::byte, releaser> data_;
};

/// Moves appended tokens into a tail of another capacity, whose last tile may have another width: one item a token of a
/// head. If more tokens were appended than the old tail holds, the count falls to its capacity.
template <element T, space S>
struct move_tail
{
    static constexpr char const* name = "move_tail";
    static constexpr int threads      = 128;

    cache_view<T, S> from;
    cache_view<T, S> to;

    [[nodiscard]] index_t items() const noexcept
    {
        return from.layout.heads * (std::max<index_t>)(from.tail_capacity, 1);
    }
    MDKV_HD void operator()(team auto const& t, index_t item) const
    {
        // race: an item that reads the count before it falls finds the same minimum as one that reads it after
        index_t const appended = *from.appended;
        index_t const tokens   = appended < from.tail_capacity ? appended : from.tail_capacity;
        // race: so does one that reads it in between
        if (item == 0 && t.rank() == 0 && tokens != appended) { *from.appended = tokens; }
        index_t const h = item % from.layout.heads;
        index_t const i = item / from.layout.heads;
        if (i >= tokens) { return; }
        stored_run const a = run_of_head(from, h, from.layout.rungs + 1);
        stored_run const b = run_of_head(to, h, to.layout.rungs + 1);
        copy_token<T>(t, a.keys, i, b.keys, i);
        copy_token<T>(t, a.values, i, b.values, i);
    }
};

/// Owns arena, directory and tail of one layer; every stage works on its view. No layout and no heads until `compress` or
/// `pack` fills it; a moved-from owner has none either. All memory comes from the resource given at construction, which
/// outlives the cache; on a GPU in the order of a stream, and when the cache is destroyed, other streams' work on it must be
/// over, or be waited for by its own. Any number of threads may read a const cache at once.
///
/// \tparam Memory  a backend's: `of` makes it, `allocate(bytes)` and `release(data, bytes)` serve bytes, `run(job, items)` runs a
///                 job where they lie, `wait()` waits for the stream they were taken on
template <element T, space S, class Memory>
class cache_owner
{
public:
    /// A cache without heads.
    cache_owner() noexcept = default;

    /// Room for packed tokens and appended ones.
    /// \param layout,arena_bytes,tail_tokens  packed tokens (bytes by `packed_bytes`; a budget's are enough), number of appended ones
    /// \param of   the arguments of `Memory::of`: (cpu) a std::pmr::memory_resource*, or none; (gpu) a stream and a memory resource
    /// \throws invalid_argument   a size is negative
    /// \throws size_overflow      a size leaves 64 bits
    /// \throws std::bad_alloc     (or an exception of the memory; gpu: cuda_error)
    template <class... Of>
    cache_owner(cache_layout const& layout, index_t arena_bytes, index_t tail_tokens = 0, Of&&... of)
        : memory_{Memory::of(of...)}
        , arena_{checked(arena_bytes, "arena_bytes"), memory_}
        , directory_{checked_add(checked_multiply(layout.heads, sizeof(head_entry)), sizeof(index_t)), memory_}
        , tail_{layout.tail_bytes(checked(tail_tokens, "tail_tokens"), sizeof(T)), memory_}
    {
        auto* const heads    = reinterpret_cast<head_entry*>(directory_.data());
        auto* const appended = reinterpret_cast<index_t*>(heads + layout.heads);
        view_                = {layout, arena_.data(), arena_bytes, heads, tail_.data(), tail_tokens, appended};
        fill<head_entry> const clear{heads, {}, layout.heads};
        memory_.run(clear, clear.items());
        memory_.run(fill<index_t>{appended, 0, 1}, 1);
    }

    cache_owner(cache_owner&& other) noexcept { *this = std::move(other); }
    cache_owner& operator=(cache_owner&& other) noexcept
    {
        memory_    = other.memory_;
        arena_     = std::move(other.arena_);
        directory_ = std::move(other.directory_);
        tail_      = std::move(other.tail_);
        view_      = std::exchange(other.view_, {});
        fold_limit = std::exchange(other.fold_limit, 0);
        return *this;
    }
    cache_owner(cache_owner const&)            = delete;
    cache_owner& operator=(cache_owner const&) = delete;
    ~cache_owner()                             = default;

    /// Limit of the arena for folds that are given none, as `prompt`, `reader` or `compress` left it: the layer's budget, or if
    /// layers share one and tokens were lowered, the bytes that the layer got. Over ranks it is that of this
    /// rank's heads. 0: the cache was filled otherwise. May be set.
    index_t fold_limit = 0;

    /// An empty cache of other sizes, out of the same memory.
    [[nodiscard]] cache_owner like(cache_layout const& layout, index_t arena_bytes, index_t tail_tokens) const
    {
        return {layout, arena_bytes, tail_tokens, memory_};
    }
    /// An equal cache in memory of its own. Copying is a named function because its cost grows with the cache's bytes.
    /// \throws std::bad_alloc   (or an exception of the resource)
    [[nodiscard]] cache_owner copy() const
        requires(S == space::host)
    {
        return copied<cache_owner>(
            [](std::byte const* from, std::byte* to, index_t bytes) { std::copy_n(from, bytes, to); }, memory_);
    }
    /// An equal cache of another type, which has the arguments `of` for its memory; copy(from, to, bytes) is called for each
    /// block of memory.
    template <class Other, class Copy, class... Of>
    [[nodiscard]] Other copied(Copy const& copy, Of&&... of) const
    {
        if (directory_bytes() == 0) { return {}; }
        Other other{layout(), arena_bytes(), tail_capacity(), of...};
        auto const to = other.view();
        copy(arena_.data(), to.arena, arena_.size());
        copy(tail_.data(), to.tail, tail_.size());
        copy(directory_.data(), reinterpret_cast<std::byte*>(to.heads), directory_.size());
        other.fold_limit = fold_limit;
        return other;
    }

    /// The view for stages that write.
    [[nodiscard]] cache_view<T, S> view() noexcept { return view_; }
    /// The view for reading only.
    [[nodiscard]] cache_view<T const, S> view() const noexcept { return view_; }

    [[nodiscard]] cache_layout const& layout() const noexcept { return view_.layout; }
    [[nodiscard]] Memory const& memory() const noexcept { return memory_; }
    [[nodiscard]] index_t arena_bytes() const noexcept { return arena_.size(); }
    [[nodiscard]] index_t directory_bytes() const noexcept { return directory_.size(); }
    [[nodiscard]] index_t tail_bytes() const noexcept { return tail_.size(); }
    [[nodiscard]] index_t tail_capacity() const noexcept { return view_.tail_capacity; }
    /// Tokens appended since pack.
    [[nodiscard]] index_t appended() const noexcept
        requires(S == space::host)
    {
        return view_.appended == nullptr ? 0 : *view_.appended;
    }

    /// Makes room for at least `tokens` appended tokens in all, keeping the present ones; on a GPU without waiting, on
    /// the cache's stream. Views made before are stale afterwards. If it throws, nothing has changed.
    /// \throws invalid_argument   tokens is negative, or the cache has no heads
    /// \throws size_overflow      the tail's bytes leave 64 bits
    /// \throws std::bad_alloc     (or an exception of the memory)
    void reserve_tail(index_t tokens)
    {
        if (checked(tokens, "tokens") <= view_.tail_capacity) { return; }
        expects(directory_.size() > 0, "cache: a cache without a layout has no room for ", tokens, " tokens");
        owned_bytes<Memory> larger{view_.layout.tail_bytes(tokens, sizeof(T)), memory_};
        cache_view<T, S> grown = view_;
        grown.tail             = larger.data();
        grown.tail_capacity    = tokens;
        move_tail<T, S> const job{view_, grown};
        memory_.run(job, job.items());
        tail_ = std::move(larger);
        view_ = grown;
    }

    /// On a GPU waits for the cache's stream: work on other streams may then use the cache. On a CPU does nothing.
    void wait() const { memory_.wait(); }

private:
    [[nodiscard]] static index_t checked(index_t size, char const* name)
    {
        expects(size >= 0, "cache: ", name, " is ", size, "; it must not be negative");
        return size;
    }

    Memory memory_{};
    owned_bytes<Memory> arena_;
    owned_bytes<Memory> directory_; // [H] entries, then the number of appended tokens
    owned_bytes<Memory> tail_;
    cache_view<T, S> view_; // arena, directory and tail
};

} // namespace MDKV_NAMESPACE::detail
