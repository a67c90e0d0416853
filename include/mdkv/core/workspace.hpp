/// \file workspace.hpp: scratch memory lent by the caller, and the dry run that says how much a call needs.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

namespace mdkv
{

/// A bump allocator over memory the caller owns. A default-made workspace has none and only counts: a call made with it
/// computes nothing, and `bytes()` then says what the same call with the same shapes needs. One workspace serves one
/// call at a time.
class workspace
{
public:
    /// What the caller's memory must be aligned to, in bytes.
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

    /// Largest need seen so far, in bytes.
    [[nodiscard]] std::size_t bytes() const noexcept { return peak_; }
    [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }
    [[nodiscard]] bool counting() const noexcept { return counting_; }

    /// What a call may still take; empty while counting.
    [[nodiscard]] std::span<std::byte const> free_memory() const noexcept
    {
        return used_ < capacity_ ? std::span<std::byte const>{memory_ + used_, capacity_ - used_}
                                 : std::span<std::byte const>{};
    }

    /// The scratch of one call; given back when it goes out of scope. Take everything first, then ask `ready()`.
    class frame
    {
    public:
        frame(workspace& owner, std::string_view stage) noexcept
            : owner_{owner}
            , stage_{stage}
            , mark_{owner.used_}
        {}
        ~frame() { owner_.used_ = mark_; }
        frame(frame const&)            = delete;
        frame& operator=(frame const&) = delete;

        /// Room for `count` objects, uninitialised; null while counting or when there is no room (then ready() throws).
        template <class T>
            requires std::is_trivially_destructible_v<T>
        [[nodiscard]] T* take(index_t count)
        {
            static_assert(alignof(T) <= alignment, "workspace: this type needs a stricter alignment");
            index_t const bytes  = checked_multiply(std::max<index_t>(count, 0), index_t{sizeof(T)});
            auto const rounded   = (static_cast<std::size_t>(bytes) + alignment - 1) / alignment * alignment;
            std::size_t const at = owner_.used_;
            owner_.used_ += rounded;
            owner_.peak_    = std::max(owner_.peak_, owner_.used_);
            needed_         = std::max(needed_, owner_.used_);
            bool const fits = !owner_.counting_ && owner_.used_ <= owner_.capacity_;
            return fits ? reinterpret_cast<T*>(owner_.memory_ + at) : nullptr;
        }

        /// False in a dry run: the call must return without touching anything.
        /// \throws insufficient_workspace   the memory is too small; the message names the size needed
        [[nodiscard]] bool ready() const
        {
            if (owner_.counting_) { return false; }
            expects<insufficient_workspace>(needed_ <= owner_.capacity_, stage_, ": the workspace holds ",
                owner_.capacity_, " bytes, ", needed_, " are needed");
            return true;
        }

    private:
        workspace& owner_;
        std::string_view stage_;
        std::size_t mark_;
        std::size_t needed_{};
    };

private:
    std::byte* memory_{};
    std::size_t capacity_{};
    std::size_t used_{};
    std::size_t peak_{};
    bool counting_{true};
};

} // namespace mdkv
