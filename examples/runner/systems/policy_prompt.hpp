/// \file policy_prompt.hpp: a policy as a preset of the library, and a prompt that it compresses, with memory of its own
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/prompt.hpp>
#include <mdkv/replay/replay.hpp>

#include <algorithm>
#include <cstdint>
#include <string>

#include "prompt_layer.hpp"
#include "runner/layers.hpp"
#include "runner/policies.hpp"
#include "runner/prefill.hpp"
#include "runner/scratch_memory.hpp"

namespace runner
{

static_assert(detail::chunk_tokens == prefill_chunk);

/// The options of a policy for a prompt.
/// \param window     last tokens that stay as they are
/// \param question   last queries that count most
[[nodiscard]] inline mdkv::preset preset_of(policy const& p, std::int64_t window, std::int64_t question)
{
    mdkv::preset made = p.options;
    made.name         = "mdkv_run";
    made.window       = window;
    made.question     = std::max(question, window);
    made.queries      = std::max<std::int64_t>({made.question, p.more_queries(), 1});
    if (!p.one_budget()) { made.stand_ins = 0; }
    return made;
}

[[nodiscard]] inline mdkv::rotary_encoding<mdkv::cpu::backend> encoding_of(rotary const& rotation)
{
    auto const frequencies = rotation.frequencies();
    return {.rotating = 2 * std::ssize(frequencies),
        .pairs        = rotation.pairs(),
        .frequencies  = mdkv::in(mdkv::cpu::backend{}, frequencies.data(), std::ssize(frequencies))};
}

/// The prompt of all layers that share a budget, or of one layer.
template <mdkv::element T>
class policy_prompt
{
    using host = mdkv::cpu::backend;

public:
    using rows = mdkv::prompt_rows<host, T>;

    /// \param layer    the sizes of all layers, the prompt's length, position encoding
    /// \param layers   number of the prompt's layers
    policy_prompt(policy const& chosen, prompt_layer<T> const& layer, std::int64_t layers)
        : label_{chosen.label}
        , unread_{chosen.replays()}
        , prompt_{host{&state_}, preset_of(chosen, layer.window, layer.question), shape_of(layer, layers)}
    {}

    [[nodiscard]] mdkv::prompt<host, T>& operator*() noexcept { return prompt_; }
    [[nodiscard]] mdkv::prompt<host, T>* operator->() noexcept { return &prompt_; }

    /// Reads one chunk of prefill, which may reach beyond the prompt.
    /// \param place    number of the layer in this prompt
    /// \param layer    layer of the prompt that is compressed
    void read(std::int64_t place, prompt_layer<T> const& layer, layer_chunk<T> const& chunk,
        mdkv::cpu::executor_ref executor, scratch_memory& scratch)
    {
        std::int64_t const count = std::min(chunk.count, layer.tokens - chunk.first);
        if (count <= 0) { return; }
        unread_                        = false;
        std::int64_t const query_heads = layer.heads * layer.group;
        scratch.run(executor, [&](host const& on) {
            using mdkv::in;
            using mdkv::slice;
            prompt_.read_chunk(on, place, chunk.first,
                {in(on, chunk.queries, {query_heads, count, layer.key_dim},
                     {layer.key_dim, query_heads * layer.key_dim, 1}),
                    slice<1>(in(on, chunk.keys, layer.heads, chunk.tokens, layer.key_dim), chunk.first, count),
                    slice<1>(in(on, chunk.values, layer.heads, chunk.tokens, layer.value_dim), chunk.first, count)});
        });
    }

    /// Finds the losses of a layer that was read.
    /// \throws mdkv::invalid_argument   the policy replays, and nothing was read
    void finish(
        std::int64_t place, prompt_layer<T> const& layer, mdkv::cpu::executor_ref executor, scratch_memory& scratch)
    {
        mdkv::expects(!unread_ || layer.past() == 0, "policy ", label_, ": nothing has been replayed for it");
        scratch.run(executor, [&](host const& on) { prompt_.finish_layer(on, place, rows_of(on, layer)); });
    }

    [[nodiscard]] static rows rows_of(host const& on, prompt_layer<T> const& layer)
    {
        using mdkv::in;
        return {in(on, layer.queries, layer.heads * layer.group, layer.query_tokens, layer.key_dim),
            in(on, layer.keys, layer.heads, layer.tokens, layer.key_dim),
            in(on, layer.values, layer.heads, layer.tokens, layer.value_dim),
            in(on, layer.lse, layer.heads * layer.group, layer.query_tokens)};
    }

private:
    [[nodiscard]] static mdkv::prompt_shape<host> shape_of(prompt_layer<T> const& layer, std::int64_t layers)
    {
        mdkv::prompt_shape<host> shape{.layers = layers,
            .heads                             = layer.heads,
            .group                             = layer.group,
            .dims                              = {layer.key_dim, layer.value_dim},
            .tokens                            = layer.tokens,
            .first_layer                       = layers == 1 ? layer.layer : 0};
        if (layer.rotation != nullptr) { shape.encoding = encoding_of(*layer.rotation); }
        return shape;
    }

    std::string label_;
    bool unread_; // whether the policy replays and nothing was read
    mdkv::workspace state_{mdkv::cpu::host_memory{}};
    mdkv::prompt<host, T> prompt_;
};

} // namespace runner
