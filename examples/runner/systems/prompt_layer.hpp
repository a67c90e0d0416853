/// \file prompt_layer.hpp: the input of a policy: one layer of a prompt
#pragma once

#include <mdkv/core/types.hpp>

#include <cstdint>

namespace runner
{

/// Last queries of a prompt to which the channels of its keys are fitted.
inline constexpr std::int64_t fitting_queries = 64;

class rotary; // layers.hpp

/// Heads are cached heads: the model's KV heads or, in most policies' own code, one for every query head with repeated
/// keys and values (group 1). The first `past()` tokens may be dropped, the last `window` stay.
template <mdkv::element T>
struct prompt_layer
{
    std::int64_t layer = 0, layers = 1;
    std::int64_t heads = 0, group = 1;   // cached heads, query heads that share each
    std::int64_t tokens = 0, window = 0; // tokens of the prompt; window <= tokens
    std::int64_t question = 0;           // last queries that count most to a policy that weighs them; 0: the window's
    std::int64_t key_dim = 0, value_dim = 0;
    T const* keys             = nullptr; // [heads, tokens, key_dim], after position encoding
    T const* values           = nullptr; // [heads, tokens, value_dim]
    T const* queries          = nullptr; // [heads * group, query_tokens, key_dim], last query_tokens tokens
    float const* lse          = nullptr; // [heads * group, query_tokens], natural, over all keys each query sees
    std::int64_t query_tokens = 0;       // window, or tokens for a policy that reads every query
    rotary const* rotation    = nullptr; // for policies that read it

    [[nodiscard]] std::int64_t past() const noexcept { return tokens - window; }
};

} // namespace runner
