/// \file workspace.hpp: scratch memory of calls, which grows to what they need.
#pragma once

#include <mdkv/core/ground.hpp>

#include <new>
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
        : allocate_{[](void const* source, std::size_t bytes) {
            return static_cast<std::byte*>(static_cast<Memory const*>(source)->allocate(bytes));
        }}
        , release_{[](void const* source, void* data, std::size_t bytes) noexcept {
            static_cast<Memory const*>(source)->release(data, bytes);
        }}
    {
        static_assert(
            Memory::alignment >= alignment && sizeof(Memory) <= sizeof source_ && std::is_trivially_copyable_v<Memory>);
        new (source_) Memory(memory);
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
        /// A frame of a backend's workspace.
        /// \throws invalid_argument   the backend has none
        explicit frame(workspace* owner)
            : frame{
                (expects(owner != nullptr, "backend: it has no workspace, from which this call takes scratch"), *owner)}
        {}
        explicit frame(workspace& owner) noexcept
            : owner_{owner}
            , mark_{owner.now_}
            , below_{owner.top_}
        {
            owner.top_ = this;
        }
        ~frame() { owner_.end(*this); }
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
        friend workspace;
        workspace& owner_;
        place mark_;   ///< where free memory begins without this frame
        frame* below_; ///< the frame before this one, or null
    };

    /// Makes one block of the free memory that calls have needed beside what is in use, or throws what `allocate` does.
    void hold_peak() { static_cast<void>(frame{*this}.take<std::byte>(peak_ - now_.used)); }

private:
    [[nodiscard]] MDKV_OUTLINE std::byte* take(index_t count)
    {
        constexpr auto line = index_t{alignment};
        if (count == 0) { return reinterpret_cast<std::byte*>(alignment); } // offsets are added to it
        index_t const bytes = checked_add(count, line - 1) / line * line;
        if (now_.in == nullptr || bytes > now_.in->bytes - now_.at) // at most one block is free but in `~frame`
        {
            if (last_ == now_.in || last_->bytes < bytes)
            {
                index_t const gone = release_free();
                add(gone > bytes ? gone : bytes);
            }
            now_.in = last_;
            now_.at = 0;
        }
        std::byte* const taken = now_.in->data + now_.at;
        now_.at += bytes;
        now_.used += bytes;
        if (now_.used > peak_) { peak_ = now_.used; }
        return taken;
    }

    /// Gives back the memory of a frame, or leaves it to the next later one to do so. Several free blocks then become one of what
    /// calls have needed beside what is in use, and an eighth more, but of no more bytes than these had: calls find their memory
    /// again, and calls that need a little more each time do not take a block each time.
    MDKV_OUTLINE void end(frame const& ended) noexcept
    {
        frame* next = top_;
        while (next != &ended && next->below_ != &ended) { next = next->below_; }
        if (next != &ended)
        {
            next->mark_  = ended.mark_;
            next->below_ = ended.below_;
            return;
        }
        top_ = ended.below_;
        now_ = ended.mark_;
        if (last_ == now_.in || last_->below == now_.in) { return; }
        index_t const free = release_free();
        index_t const need = (peak_ - now_.used) / 8 * 9;
        detail::call_without_errors([&, this] { add(need < free ? need : free); }); // the next call takes memory again
    }

    void add(index_t bytes)
    {
        last_ = new block{last_, allocate_(source_, static_cast<std::size_t>(bytes)), bytes};
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
            release_(source_, gone->data, static_cast<std::size_t>(gone->bytes));
            delete gone;
        }
        return before - held_;
    }

    std::byte* (*allocate_)(void const* source, std::size_t bytes);
    void (*release_)(void const* source, void* data, std::size_t bytes) noexcept;
    alignas(void*) std::byte source_[2 * sizeof(void*)]; ///< a copy of the given `Memory`
    block* last_  = nullptr;                             ///< the highest block
    frame* top_   = nullptr;                             ///< the last frame that has not ended
    place now_    = {};
    index_t held_ = 0;
    index_t peak_ = 0;
};

} // namespace MDKV_NAMESPACE
