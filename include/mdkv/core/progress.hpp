/// \file progress.hpp: how a long call tells its caller where it is, and how the caller stops it.
#pragma once

#include <mdkv/core/types.hpp>

#include <concepts>
#include <memory>
#include <type_traits>

namespace mdkv
{

/// A non-owning reference to the caller's `bool(char const* stage, index_t done, index_t total)`. Called between pieces of
/// work from the calling thread; false stops the call, which then changes nothing. Default-made: never stops.
class progress_ref
{
public:
    progress_ref() noexcept = default;

    template <class Callback>
        requires(!std::same_as<std::remove_cv_t<Callback>, progress_ref>)
                    && std::is_invocable_r_v<bool, Callback&, char const*, index_t, index_t>
    progress_ref(Callback& callback) noexcept
        : target_{const_cast<void*>(static_cast<void const*>(std::addressof(callback)))}
        , call_{[](void* target, char const* stage, index_t done, index_t total) -> bool {
            return (*static_cast<Callback*>(target))(stage, done, total);
        }}
    {}

    /// True to go on.
    [[nodiscard]] bool operator()(char const* stage, index_t done, index_t total) const
    {
        return call_ == nullptr || call_(target_, stage, done, total);
    }

private:
    void* target_{};
    bool (*call_)(void*, char const*, index_t, index_t){};
};

} // namespace mdkv
