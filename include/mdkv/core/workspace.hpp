/// \file workspace.hpp: scratch memory lent by the caller, and the dry run that counts it.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace MDKV_NAMESPACE
{

/// A bump allocator over the caller's memory. A default-constructed workspace has no memory and only counts: a call
/// with it computes nothing, and `bytes()` is then the need of the same call with the same shapes. Use a workspace for
/// one call at a time.
class workspace
{
public:
    /// Alignment of the caller's memory, in bytes.
    static constexpr std::size_t alignment = 64;

    /// Counts only.
    workspace() noexcept = default;

    /// \throws invalid_argument   the memory is not aligned to `alignment`
    explicit workspace(std::span<std::byte> memory)
        : memory_{memory.data()}
        , capacity_{memory.size()}
        , counting_{false}
    {
        auto const address = reinterpret_cast<std::uintptr_t>(memory.data());
        expects(address % alignment == 0, "workspace: memory must be aligned to ", alignment, " bytes; it is off by ",
            address % alignment);
    }

    /// A copy would lend the same memory twice.
    workspace(workspace const&)            = delete;
    workspace& operator=(workspace const&) = delete;
    ~workspace()                           = default;

    /// Largest need so far, in bytes.
    [[nodiscard]] std::size_t bytes() const noexcept { return peak_; }
    /// Bytes of the caller's memory; 0 while counting.
    [[nodiscard]] std::size_t size() const noexcept { return capacity_; }
    [[nodiscard]] bool counting() const noexcept { return counting_; }

    /// Memory that a call may still take; empty while counting.
    [[nodiscard]] std::span<std::byte const> free_memory() const noexcept
    {
        std::size_t const used = used_ < capacity_ ? used_ : capacity_;
        return {memory_ + used, capacity_ - used};
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
            owner_.used_ = mark_;
            owner_.top_  = below_;
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
            expects<insufficient_workspace>(owner_.used_ <= owner_.capacity_, stage_, ": the workspace holds ",
                owner_.capacity_, " bytes, ", owner_.used_, " are needed");
            return true;
        }

    private:
        MDKV_OUTLINE std::byte* take_bytes(index_t count, index_t size)
        {
            index_t const bytes  = checked_multiply(count > 0 ? count : 0, size);
            std::size_t const at = owner_.used_;
            owner_.used_ += (static_cast<std::size_t>(bytes) + alignment - 1) / alignment * alignment;
            if (owner_.used_ > owner_.peak_) { owner_.peak_ = owner_.used_; }
            bool const fits = !owner_.counting_ && owner_.used_ <= owner_.capacity_;
            return fits ? owner_.memory_ + at : nullptr;
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
    std::byte* memory_{};
    std::size_t capacity_{};
    std::size_t used_{};
    std::size_t peak_{};
    frame* top_{}; ///< the last frame that has not ended
    bool counting_{true};
};

} // namespace MDKV_NAMESPACE
