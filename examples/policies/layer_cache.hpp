/// \file layer_cache.hpp: what every policy's cache of one layer can do: take a token and attend
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>

#include <cstdint>

#include "../runner/scratch_memory.hpp"

namespace runner
{

/// Made by a policy from a prompt_layer; heads and group are those of that layer.
class layer_cache
{
public:
    virtual ~layer_cache() = default;

    /// Appends one token's key [heads * key_dim] and value [heads * value_dim], already rotated, and writes the attention
    /// of its query [heads * group * key_dim] over all that is cached to output [heads * group * value_dim].
    virtual void attend(mdkv::cpu::executor_ref executor, scratch_memory& scratch, float const* query, float const* key,
        float const* value, float* output) = 0;

    /// Bytes held for the prompt, whatever the policy keeps beside keys and values (projections, running scores, channel
    /// lists) included, appended tokens and the library's directory of some bytes a head excluded: what a budget is
    /// charged for. For a policy that goes on evicting: of all tokens held.
    [[nodiscard]] virtual std::int64_t resident_bytes() const noexcept = 0;
};

} // namespace runner
