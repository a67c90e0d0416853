/// \file own_prompt.hpp: a prompt of the library in memory of its own
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/basis.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/prompt.hpp>

#include <cstddef>
#include <memory>
#include <span>

#include "shared.hpp"

namespace mdkv_ggml
{

/// A prompt's memory is not touched before it is written: a prompt of fewer tokens than the largest possible number takes
/// few pages.
class own_prompt
{
public:
    using host = mdkv::cpu::backend;
    using type = mdkv::prompt<host, mdkv::half, float>;
    using rows = type::rows_of_layer;

    own_prompt(mdkv::preset const& chosen, mdkv::prompt_shape<host> const& shape)
        : size_{size_of(chosen, shape)}
        , lines_{std::make_unique_for_overwrite<shared::line[]>(size_)}
        , state_{std::as_writable_bytes(std::span{lines_.get(), size_})}
        , prompt_{host{&state_}, chosen, shape}
    {}

    [[nodiscard]] type* operator->() noexcept { return &prompt_; }
    [[nodiscard]] type const* operator->() const noexcept { return &prompt_; }

private:
    [[nodiscard]] static std::size_t size_of(mdkv::preset const& chosen, mdkv::prompt_shape<host> const& shape)
    {
        mdkv::workspace counting;
        static_cast<void>(type{host{&counting}, chosen, shape});
        return counting.bytes() / sizeof(shared::line);
    }

    std::size_t size_; // lines
    std::unique_ptr<shared::line[]> lines_;
    mdkv::workspace state_;
    type prompt_;
};

} // namespace mdkv_ggml
