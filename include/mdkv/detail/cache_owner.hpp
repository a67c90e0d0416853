/// \file cache_owner.hpp: the owner of one layer's packed cache, over memory of any backend (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/detail/tile_loops.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
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
        : memory_{memory}
    {
        expects(size >= 0, "bytes of a backend's memory: size is ", size, "; it must not be negative");
        if (size > 0) { data_ = static_cast<std::byte*>(memory_.allocate(static_cast<std::size_t>(size))); }
        size_ = size;
    }

    owned_bytes(owned_bytes&& other) noexcept
        : memory_{other.memory_}
        , data_{std::exchange(other.data_, nullptr)}
        , size_{std::exchange(other.size_, 0)}
    {}
    owned_bytes& operator=(owned_bytes&& other) noexcept
    {
        owned_bytes taken{std::move(other)};
        std::swap(memory_, taken.memory_);
        std::swap(data_, taken.data_);
        std::swap(size_, taken.size_);
        return *this;
    }
    ~owned_bytes()
    {
        if (size_ > 0) { memory_.release(data_, static_cast<std::size_t>(size_)); }
    }

    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    [[nodiscard]] index_t size() const noexcept { return size_; }

private:
    Memory memory_{};
    std::byte* data_ = nullptr;
    index_t size_    = 0;
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
    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
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

    /// Room for `arena_bytes` of packed tokens (as many as `packed_bytes` returns; a budget's are enough) and `tail_tokens`
    /// appended ones.
    /// \param of   the arguments of `Memory::of`: (cpu) a std::pmr::memory_resource*, or none; (gpu) a stream and a memory resource
    /// \throws invalid_argument   a size is negative
    /// \throws size_overflow      a size leaves 64 bits
    /// \throws std::bad_alloc     (or an exception of the memory; gpu: cuda_error)
    template <class... Of>
    cache_owner(cache_layout const& layout, index_t arena_bytes, index_t tail_tokens = 0, Of&&... of)
        : memory_{Memory::of(of...)}
        , arena_{checked(arena_bytes, "arena_bytes"), memory_}
        , directory_{directory_size(layout), memory_}
        , tail_{tail_size(layout, checked(tail_tokens, "tail_tokens")), memory_}
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
        if (directory_bytes() == 0) { return {}; }
        cache_owner other = like(layout(), arena_bytes(), tail_capacity());
        copy_to(other, [](std::byte const* from, std::byte* to, index_t bytes) {
            if (bytes > 0) { std::memcpy(to, from, static_cast<std::size_t>(bytes)); }
        });
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
        owned_bytes<Memory> larger{tail_size(view_.layout, tokens), memory_};
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

    /// Calls copy(from, to, bytes) for each block of memory; `other` has the same sizes.
    template <class Other, class Copy>
    void copy_to(Other& other, Copy const& copy) const
    {
        auto const to = other.view();
        copy(arena_.data(), to.arena, arena_.size());
        copy(tail_.data(), to.tail, tail_.size());
        copy(directory_.data(), reinterpret_cast<std::byte*>(to.heads), directory_.size());
        other.fold_limit = fold_limit;
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

    Memory memory_{};
    owned_bytes<Memory> arena_;
    owned_bytes<Memory> directory_; // [H] entries, then the number of appended tokens
    owned_bytes<Memory> tail_;
    cache_view<T, S> view_; // arena, directory and tail
};

} // namespace MDKV_NAMESPACE::detail
