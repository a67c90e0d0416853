/// \file workspace.hpp: scratch memory of calls, which grows to what they need.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <bit>
#include <cstddef>
#include <type_traits>

namespace MDKV_NAMESPACE
{

/// The scratch memory of calls: it takes what a call lacks, in blocks, and keeps them. A call that was made once needs no
/// further memory when it is made again:
///
///     workspace scratch{cpu::host_memory{}}; // gpu::stream_memory on a GPU, or an engine's own kind of memory
///
/// Use a workspace for one call at a time.
class workspace
{
    /// Memory that was taken.
    struct block
    {
        block* below;
        std::byte* data;
        index_t bytes;
    };

    /// Where free memory begins: in the highest block that is in use, if any is.
    struct place
    {
        block* in;
        index_t at;   ///< bytes of that block that are in use
        index_t used; ///< bytes of all blocks that are in use
    };

public:
    /// Alignment of all memory, in bytes.
    static constexpr std::size_t alignment = 64;

    /// Holds nothing yet.
    /// \param memory  `allocate(bytes)` and `release(data, bytes)`, of at least `alignment`: `cpu::host_memory`, or
    ///                `gpu::stream_memory`, which releases in the order of its stream. Its resource outlives the workspace.
    ///                A call for which there is no memory throws what `allocate` does
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
    {
        static_assert(Memory::alignment >= alignment && sizeof(Memory) <= sizeof source_);
        auto const bytes = std::bit_cast<array<std::byte, sizeof(Memory)>>(memory);
        for (std::size_t i = 0; i < sizeof(Memory); ++i) { source_[i] = bytes[i]; }
    }

    /// A copy would lend the same memory twice.
    workspace(workspace const&)            = delete;
    workspace& operator=(workspace const&) = delete;
    ~workspace()
    {
        now_.in = nullptr;
        release_free();
    }

    /// Bytes of its blocks.
    [[nodiscard]] index_t held() const noexcept { return held_; }
    /// Most bytes that frames have held at once: what its calls have needed.
    [[nodiscard]] index_t peak() const noexcept { return peak_; }

    /// The scratch of one call, given back at the end of the scope. Frames may end in any order: the memory of one that ends
    /// before a later frame is free when that one ends, too.
    class frame
    {
    public:
        explicit frame(workspace& owner) noexcept
            : owner_{owner}
            , mark_{owner.now_}
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
            owner_.now_ = mark_;
            if (owner_.last_ != mark_.in && owner_.last_->below != mark_.in) { owner_.join_free(); }
        }
        frame(frame const&)            = delete;
        frame& operator=(frame const&) = delete;

        /// Room for `count` objects, uninitialised; for none, an address that may not be read.
        template <class T>
            requires std::is_trivially_destructible_v<T>
        [[nodiscard]] T* take(index_t count)
        {
            static_assert(alignof(T) <= alignment, "workspace: this type needs a stricter alignment");
            return reinterpret_cast<T*>(owner_.take(checked_multiply(count > 0 ? count : 0, index_t{sizeof(T)})));
        }

    private:
        /// Has the next later frame give back the memory of this one with its own.
        MDKV_OUTLINE void leave_to_next() noexcept
        {
            frame* next = owner_.top_;
            while (next->below_ != this) { next = next->below_; }
            next->mark_  = mark_;
            next->below_ = below_;
        }

        workspace& owner_;
        place mark_;   ///< where free memory begins without this frame
        frame* below_; ///< the frame before this one, or null
    };

    /// Makes one block of the free memory that the calls so far have needed beside what is in use, or throws what `allocate`
    /// does: a call that was made before has its memory then.
    void hold_peak() { static_cast<void>(frame{*this}.take<std::byte>(peak_ - now_.used)); }

private:
    template <class Memory>
    [[nodiscard]] static array<std::byte, sizeof(Memory)> copy_of(std::byte const* from) noexcept
    {
        array<std::byte, sizeof(Memory)> bytes{};
        for (std::size_t i = 0; i < sizeof(Memory); ++i) { bytes[i] = from[i]; }
        return bytes;
    }

    [[nodiscard]] MDKV_OUTLINE std::byte* take(index_t count)
    {
        constexpr auto line = index_t{alignment};
        if (count == 0) { return reinterpret_cast<std::byte*>(alignment); } // offsets are added to it
        index_t const bytes = checked_add(count, line - 1) / line * line;
        if (now_.in == nullptr || bytes > now_.in->bytes - now_.at) { enter_free(bytes); }
        std::byte* const taken = now_.in->data + now_.at;
        now_.at += bytes;
        now_.used += bytes;
        if (now_.used > peak_) { peak_ = now_.used; }
        return taken;
    }

    /// Goes on in the free block, or in a larger one in its place. At most one block is free at any time but for `~frame`.
    void enter_free(index_t bytes)
    {
        if (last_ == now_.in || last_->bytes < bytes)
        {
            index_t const gone = release_free();
            add(gone > bytes ? gone : bytes);
        }
        now_.in = last_;
        now_.at = 0;
    }

    /// Several free blocks become one of what calls have needed beside what is in use, and an eighth more, but of no more bytes
    /// than these had: calls find their memory again, and calls that need a little more each time do not take a block each time.
    MDKV_OUTLINE void join_free() noexcept
    {
        index_t const free = release_free();
        index_t const need = (peak_ - now_.used) / 8 * 9;
#if defined(__cpp_exceptions)
        try
        {
            add(need < free ? need : free);
        }
        catch (...) // the next call takes memory again
        {}
#else
        add(need < free ? need : free);
#endif
    }

    void add(index_t bytes)
    {
        last_        = new block{last_, nullptr, 0};
        last_->data  = allocate_(source_, static_cast<std::size_t>(bytes));
        last_->bytes = bytes;
        held_ += bytes;
    }

    /// Gives back the blocks that are not in use; returns their bytes.
    index_t release_free() noexcept
    {
        index_t const before = held_;
        while (last_ != now_.in)
        {
            block* const gone = last_;
            last_             = gone->below;
            held_ -= gone->bytes;
            if (gone->bytes > 0) { release_(source_, gone->data, static_cast<std::size_t>(gone->bytes)); }
            delete gone;
        }
        return before - held_;
    }

    std::byte* (*allocate_)(std::byte const* source, std::size_t bytes);
    void (*release_)(std::byte const* source, void* data, std::size_t bytes) noexcept;
    std::byte source_[2 * sizeof(void*)]{}; ///< a copy of the given `Memory`
    block* last_  = nullptr;                ///< the highest block
    frame* top_   = nullptr;                ///< the last frame that has not ended
    place now_    = {};
    index_t held_ = 0;
    index_t peak_ = 0;
};

} // namespace MDKV_NAMESPACE
