/// \file own_prompt.hpp: a prompt or a reader of the library in memory of its own
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/prompt.hpp>
#include <mdkv/reader.hpp>

namespace mdkv_ggml
{

/// The memory of an object's state. It is not touched before it is written: a prompt of fewer tokens than the largest
/// possible number takes few pages.
template <class T>
class in_own_memory
{
public:
    using host = mdkv::cpu::backend;

    /// \param from   arguments of the object's constructor after the backend
    template <class... Arguments>
    explicit in_own_memory(Arguments const&... from)
        : made_{host{&state_}, from...}
    {}

    [[nodiscard]] T* operator->() noexcept { return &made_; }
    [[nodiscard]] T const* operator->() const noexcept { return &made_; }

private:
    mdkv::workspace state_{mdkv::cpu::host_memory{}};
    T made_;
};

using own_prompt = in_own_memory<mdkv::prompt<mdkv::cpu::backend, mdkv::half, float>>;
using own_reader = in_own_memory<mdkv::reader<mdkv::cpu::backend, mdkv::cpu::cache<mdkv::half>, float>>;

} // namespace mdkv_ggml
