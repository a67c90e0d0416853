/// \file replayed_losses.hpp: losses of a prompt's tokens by the queries of a second prefill, in which it is read once more
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/stages/score.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runner/language_model.hpp"
#include "runner/policies.hpp"
#include "runner/prefill.hpp"
#include "runner/scratch_memory.hpp"

namespace runner
{

/// [heads, R, past]  losses of a layer's first `past` tokens by the last queries of `kv`, which see all tokens before
/// them.
template <mdkv::element T>
[[nodiscard]] std::vector<float> really_replayed_losses(policy const& chosen, model_shape const& shape,
    layer_kv<T> const& kv, std::int64_t past, mdkv::cpu::executor_ref executor, scratch_memory& scratch)
{
    auto const rungs = static_cast<std::int64_t>(chosen.ratios.size());
    std::vector<float> losses(static_cast<std::size_t>(shape.kv_heads * rungs * past));
    scratch.run(executor, [&](mdkv::cpu::backend on) {
        using mdkv::in;
        using mdkv::slice;
        auto const keys   = in(on, kv.keys, shape.kv_heads, kv.tokens, shape.key_dim);
        auto const values = in(on, kv.values, shape.kv_heads, kv.tokens, shape.value_dim);
        auto const none   = in(on, static_cast<float const*>(nullptr), 0, 0, 0);
        mdkv::score(on, in(on, kv.queries, shape.query_heads, kv.window, shape.key_dim), slice<1>(keys, 0, past),
            slice<1>(values, 0, past), slice<1>(keys, past, kv.tokens - past), none, none, chosen.ratios,
            {.first_query = kv.tokens - kv.window,
                .lse      = in(on, kv.lse, shape.query_heads, kv.window),
                .norm     = chosen.norm},
            mdkv::out(on, losses.data(), shape.kv_heads, rungs, past));
        return 0;
    });
    return losses;
}

} // namespace runner
