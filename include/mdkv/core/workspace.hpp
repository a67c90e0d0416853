/// \file workspace.hpp: scratch memory, lent by the caller or growing, and the dry run that counts it.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace MDKV_NAMESPACE
{

/// A bump allocator for the scratch memory of calls, over memory that the caller lends, or that it takes itself and keeps:
///
///     workspace scratch{cpu::host_memory{}}; // grows to what its calls need; gpu::stream_memory on a GPU
///     workspace scratch{std::span{bytes}};   // lent: a call that needs more is refused
///     workspace counting;                    // no memory: a call computes nothing, and bytes() is then its need
///
/// Use a workspace for one call at a time.
class workspace
{
public:
    /// Alignment of all memory, in bytes.
    static constexpr std::size_t alignment = 64;

    /// Counts only.
    workspace() noexcept = default;

    /// \throws invalid_argument   the memory is not aligned to `alignment`
    explicit workspace(std::span<std::byte> memory)
        : memory_{memory.data()}
        , end_{memory.size()}
        , counting_{false}
    {
        auto const address = reinterpret_cast<std::uintptr_t>(memory.data());
        expects(address % alignment == 0, "workspace: memory must be aligned to ", alignment, " bytes; it is off by ",
            address % alignment);
    }

    /// Grows: a call first takes what it lacks, an eighth more than its need if it replaces memory that was too small, and
    /// the workspace keeps it. A call for which there is no memory throws what `allocate` does and changes nothing else.
    /// \param memory  `allocate(bytes)` and `release(data, bytes)`, of at least `alignment`: `cpu::host_memory`, or
    ///                `gpu::stream_memory`, which releases in the order of its stream. Its resource outlives the workspace
    template <class Memory>
        requires requires(Memory const& memory, void* data, std::size_t bytes) {
            static_cast<std::byte*>(memory.allocate(bytes));
            memory.release(data, bytes);
        }
    explicit workspace(Memory const& memory)
        : allocate_{[](std::byte const* from, std::size_t bytes) {
            return static_cast<std::byte*>(std::bit_cast<Memory>(copy_of<Memory>(from)).allocate(bytes));
        }}
        , release_{[](std::byte const* from, void* data, std::size_t bytes) noexcept {
            std::bit_cast<Memory>(copy_of<Memory>(from)).release(data, bytes);
        }}
        , counting_{false}
    {
        static_assert(Memory::alignment >= alignment && sizeof(Memory) <= sizeof source_);
        auto const bytes = std::bit_cast<array<std::byte, sizeof(Memory)>>(memory);
        for (std::size_t i = 0; i < sizeof(Memory); ++i) { source_[i] = bytes[i]; }
    }

    /// A copy would lend the same memory twice.
    workspace(workspace const&)            = delete;
    workspace& operator=(workspace const&) = delete;
    ~workspace() { release_down_to(nullptr); }

    /// Largest need so far, in bytes.
    [[nodiscard]] std::size_t bytes() const noexcept { return peak_; }
    /// Bytes of its memory; 0 while counting.
    [[nodiscard]] std::size_t size() const noexcept { return last_ == nullptr ? end_ : last_->end; }
    [[nodiscard]] bool counting() const noexcept { return counting_; }

    /// Memory that a call may still take without growth; empty while counting.
    [[nodiscard]] std::span<std::byte const> free_memory() const noexcept
    {
        std::size_t const used = used_ < end_ ? used_ : end_;
        return {memory_ + (used - begin_), end_ - used};
    }

    /// Makes room for a call's whole need before the call changes anything.
    /// \throws insufficient_workspace   lent memory is too small; the message names the size needed
    MDKV_OUTLINE void expects_room(char const* stage, std::size_t need)
    {
        join_blocks(need);
        if (allocate_ != nullptr && need > end_ - used_) { grow(need); }
        std::size_t const used = end_ - free_memory().size(); // a prompt's state, e.g.
        expects<insufficient_workspace>(
            need <= end_ - used, stage, ": the workspace holds ", end_, " bytes, ", need + used, " are needed");
    }

    /// The scratch of one call, returned at the end of the scope. Take all memory first, then check `ready()`. Frames may
    /// end in any order: the memory of one that ends before a later frame is free when that one ends, too.
    class frame
    {
    public:
        frame(workspace& owner, char const* stage) noexcept
            : owner_{owner}
            , stage_{stage}
            , mark_{owner.used_}
            , below_{owner.top_}
        {
            owner.top_ = this;
        }
        ~frame()
        {
            if (owner_.top_ != this)
            {
                leave_to_next();
                return;
            }
            owner_.top_ = below_;
            owner_.return_to(mark_);
        }
        frame(frame const&)            = delete;
        frame& operator=(frame const&) = delete;

        /// Room for `count` objects, uninitialised; null while counting or when there is no room (then ready() throws).
        template <class T>
            requires std::is_trivially_destructible_v<T>
        [[nodiscard]] T* take(index_t count)
        {
            static_assert(alignof(T) <= alignment, "workspace: this type needs a stricter alignment");
            return reinterpret_cast<T*>(take_bytes(count, index_t{sizeof(T)}));
        }

        /// False in a dry run: the call must return without a read or a write.
        /// \throws insufficient_workspace   the memory is too small; the message names the size needed
        [[nodiscard]] MDKV_OUTLINE bool ready() const
        {
            if (owner_.counting_) { return false; }
            expects<insufficient_workspace>(owner_.used_ <= owner_.end_, stage_, ": the workspace holds ", owner_.end_,
                " bytes, ", owner_.used_, " are needed");
            return true;
        }

    private:
        MDKV_OUTLINE std::byte* take_bytes(index_t count, index_t size)
        {
            index_t const bytes = checked_multiply(count > 0 ? count : 0, size);
            return owner_.take((static_cast<std::size_t>(bytes) + alignment - 1) / alignment * alignment);
        }

        /// Has the next later frame give back the memory of this one with its own.
        MDKV_OUTLINE void leave_to_next() noexcept
        {
            frame* next = owner_.top_;
            while (next->below_ != this) { next = next->below_; }
            next->mark_  = mark_;
            next->below_ = below_;
        }

        workspace& owner_;
        char const* stage_;
        std::size_t mark_; ///< bytes in use before this frame
        frame* below_;     ///< the frame before this one, or null
    };

private:
    /// Memory that was taken; the bytes of all blocks are numbered through.
    struct block
    {
        block* below;
        std::byte* data;
        std::size_t begin;
        std::size_t end;
    };

    template <class Memory>
    [[nodiscard]] static array<std::byte, sizeof(Memory)> copy_of(std::byte const* from) noexcept
    {
        array<std::byte, sizeof(Memory)> bytes{};
        for (std::size_t i = 0; i < sizeof(Memory); ++i) { bytes[i] = from[i]; }
        return bytes;
    }

    [[nodiscard]] std::byte* take(std::size_t bytes)
    {
        join_blocks(bytes);
        if (allocate_ != nullptr && bytes > end_ - used_) { grow(bytes); }
        std::size_t const at = used_;
        used_ += bytes;
        if (used_ > peak_) { peak_ = used_; }
        return !counting_ && used_ <= end_ ? memory_ + (at - begin_) : nullptr;
    }

    /// Blocks that earlier calls needed beside each other become one if none is in use.
    void join_blocks(std::size_t need)
    {
        if (used_ == 0 && last_ != nullptr && last_->below != nullptr) { grow(need > peak_ ? need : peak_); }
    }

    /// Goes on in a block with room for `bytes`: the one above all that is in use, or a new one in its place.
    MDKV_OUTLINE void grow(std::size_t bytes)
    {
        block* above = nullptr;
        block* below = last_; // the highest block that is in use
        for (; below != nullptr && below->begin >= used_; below = below->below) { above = below; }
        if (above == nullptr || above->end - above->begin < bytes)
        {
            std::size_t const more = above == nullptr ? 0 : bytes / 8 / alignment * alignment;
            release_down_to(below);
            std::size_t const begin = below == nullptr ? 0 : below->end;
            last_ = above = new block{below, nullptr, begin, begin};
            above->data   = allocate_(source_, bytes + more);
            above->end += bytes + more;
        }
        used_ = above->begin;
        enter(*above);
    }

    void enter(block const& now) noexcept
    {
        memory_ = now.data;
        begin_  = now.begin;
        end_    = now.end;
    }

    void return_to(std::size_t used) noexcept
    {
        used_            = used;
        block const* now = last_;
        while (now != nullptr && now->begin > used) { now = now->below; }
        if (now != nullptr) { enter(*now); }
    }

    void release_down_to(block const* kept) noexcept
    {
        while (last_ != kept)
        {
            block* const gone = last_;
            last_             = gone->below;
            if (gone->end > gone->begin) { release_(source_, gone->data, gone->end - gone->begin); }
            delete gone;
        }
        if (allocate_ == nullptr) { return; }
        memory_ = nullptr;
        begin_ = end_ = used_;
        return_to(used_);
    }

    std::byte* memory_{}; ///< lent memory, or that of the block in use
    std::size_t begin_{}; ///< number of its first byte
    std::size_t end_{};
    std::size_t used_{};
    std::size_t peak_{};
    frame* top_{}; ///< the last frame that has not ended
    std::byte* (*allocate_)(std::byte const* source, std::size_t bytes)               = nullptr;
    void (*release_)(std::byte const* source, void* data, std::size_t bytes) noexcept = nullptr;
    std::byte source_[2 * sizeof(void*)]{}; ///< a copy of the given `Memory`
    block* last_ = nullptr;                 ///< the highest block
    bool counting_{true};
};

} // namespace MDKV_NAMESPACE
