/// \file stand_in_tokens.hpp: tokens that stand for those that a layer drops, for the tail of its cache
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/stand_in.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "../runner/scratch_memory.hpp"
#include "prompt_layer.hpp"

namespace runner
{

/// As many of each head as were wanted, or as all heads can have (mdkv::fewest_dropped).
struct stand_in_tokens
{
    std::int64_t count = 0;    // of each head
    std::vector<float> keys;   // [heads, count, key_dim]
    std::vector<float> values; // [heads, count, value_dim]

    /// \param rungs     [heads, past]
    template <mdkv::element T>
    stand_in_tokens(mdkv::cpu::executor_ref executor, scratch_memory& scratch, prompt_layer<T> const& layer,
        std::span<std::uint8_t const> rungs, std::int64_t wanted)
        : count{scratch.run(executor,
            [&](mdkv::cpu::backend on) {
                return std::min(
                    wanted, mdkv::fewest_dropped(on, mdkv::in(on, rungs.data(), layer.heads, layer.past())));
            })}
        , keys(static_cast<std::size_t>(layer.heads * count * layer.key_dim))
        , values(static_cast<std::size_t>(layer.heads * count * layer.value_dim))
    {
        if (count == 0) { return; }
        scratch.run(executor, [&](mdkv::cpu::backend on) {
            using mdkv::in;
            using mdkv::slice;
            auto const H    = layer.heads;
            auto const all  = layer.query_tokens;
            auto const rows = std::min<std::int64_t>(mdkv::stand_in_queries, all);
            auto const past = layer.past();
            mdkv::stand_in(on, slice<1>(in(on, layer.queries, H * layer.group, all, layer.key_dim), all - rows, rows),
                slice<1>(in(on, layer.keys, H, layer.tokens, layer.key_dim), 0, past),
                slice<1>(in(on, layer.values, H, layer.tokens, layer.value_dim), 0, past),
                in(on, rungs.data(), H, past), slice<1>(in(on, layer.lse, H * layer.group, all), all - rows, rows),
                layer.tokens, {}, mdkv::out(on, keys.data(), H, count, layer.key_dim),
                mdkv::out(on, values.data(), H, count, layer.value_dim));
            return 0;
        });
    }
};

} // namespace runner
