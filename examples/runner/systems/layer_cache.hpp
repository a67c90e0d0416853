/// \file layer_cache.hpp: interface of every policy's cache of one layer: take a token and attend
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>

#include <cstdint>

#include "runner/scratch_memory.hpp"

namespace runner
{

/// Made by a policy from a prompt_layer, whose heads and group it has.
class layer_cache
{
public:
    virtual ~layer_cache() = default;

    /// Appends one token's key [heads * key_dim] and value [heads * value_dim], already rotated. Its query [heads * group
    /// * key_dim] then attends to all cached tokens; the result goes to output [heads * group * value_dim].
    virtual void attend(mdkv::cpu::executor_ref executor, scratch_memory& scratch, float const* query, float const* key,
        float const* value, float* output) = 0;

    /// Bytes held for the prompt, for which a budget is charged: everything that the policy keeps beside keys and values
    /// included (projections, running scores, channel lists), appended tokens and the library's directory of some bytes a
    /// head excluded. For a policy that goes on evicting: bytes of all tokens held.
    [[nodiscard]] virtual std::int64_t resident_bytes() const noexcept = 0;
};

} // namespace runner
