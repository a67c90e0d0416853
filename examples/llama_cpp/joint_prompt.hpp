/// \file joint_prompt.hpp: layers compressed by one prompt of the library: all layers that share a budget, or one alone
#pragma once

#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/prompt.hpp>

#include <algorithm>
#include <memory>
#include <vector>

#include "attention_node.hpp"
#include "cell_list.hpp"
#include "gathered_cells.hpp"
#include "last_queries.hpp"
#include "layer_prompt.hpp"
#include "memory_plan.hpp"
#include "own_prompt.hpp"
#include "shared.hpp"

namespace mdkv_ggml
{

/// The prompt of layers that share a budget, or of one layer. Each layer is packed when the engine computes it.
class joint_prompt
{
    using host = own_prompt::host;

public:
    /// Chooses the rungs of a layer's first `tokens` tokens. If the preset shares its budget, rungs are chosen for all layers
    /// that are alike and whose past tokens were replayed; a layer alone is scored by its last queries.
    /// \param layers   gives the layer_prompt of all layers of the sequence, in order
    /// \throws mdkv::error   the limit does not hold the window, or a loss is non-finite
    template <class Layers>
    static void choose(layer_prompt& one, Layers const& layers, cell_list const& cells, index_t tokens, shared& with)
    {
        mdkv::preset preset       = with.chosen.preset;
        attention_node const node = one.node.get();
        memory_plan const plan{node, tokens, 1.0, with};
        preset.stand_ins     = 0; // with folds they are worse at 28 % of the bytes (docs/decisions.md, 116)
        preset.refitted.reset(); // prompt::take_losses brings no queries to fit to
        index_t const window = std::min(preset.window, tokens);
        bool const whole     = plan.whole || plan.arena >= tokens * node.token_bytes();
        one.joint.reset();
        if (preset.shared && !whole && plan.arena > window * node.token_bytes())
        {
            try
            {
                make(alike(layers(), cells, tokens, tokens - window), preset, cells, tokens, plan.limit(), with);
            }
            catch (mdkv::error const&) // another layer's losses may be non-finite
            {}
        }
        if (one.joint) { return; }
        preset.replayed.reset();
        preset.shared.reset();
        if (whole) { preset.queries = 1; } // losses decide nothing
        make({&one}, preset, cells, tokens, plan.limit(), with);
    }

    joint_prompt(mdkv::preset const& preset, mdkv::prompt_shape<host> const& shape)
        : preset_{preset}
        , tokens_{shape.tokens}
        , prompt_{preset, shape}
    {}

    [[nodiscard]] index_t tokens() const noexcept { return tokens_; }
    [[nodiscard]] bool shares() const noexcept { return preset_.shared.has_value(); }

    /// Packs a layer.
    void pack(attention_node const& node, layer_prompt const& layer, cell_list const& cells, shared& with,
        mdkv::cpu::cache<mdkv::half>& to)
    {
        gathered_cells const all{with.threads, node, cells, 0, tokens_};
        last_queries const by{node, layer.queries, tokens_, preset_.queries};
        with.lend([&](host on) { return prompt_->pack(on, layer.place, by.rows(on, all), to); });
    }

private:
    /// Layers like the first one whose tokens before the window were replayed.
    [[nodiscard]] static std::vector<layer_prompt*> alike(
        std::vector<layer_prompt*> layers, cell_list const& cells, index_t tokens, index_t past)
    {
        layer_prompt* like = nullptr;
        std::erase_if(layers, [&](layer_prompt* one) {
            if (one->node.empty()) { return true; }
            attention_node const node = one->node.get();
            if (!one->replayed.are_of(node, cells, past) || !one->queries.is_of(node, cells)
                || one->queries.count_before(tokens, most_fold_queries) < most_fold_queries)
            {
                return true;
            }
            if (like == nullptr) { like = one; }
            return !node.is_like(like->node.get());
        });
        return layers;
    }

    /// Chooses the rungs of layers that are alike.
    static void make(std::vector<layer_prompt*> const& layers, mdkv::preset preset, cell_list const& cells,
        index_t tokens, mdkv::budget limit, shared& with)
    {
        if (layers.empty()) { return; }
        attention_node const first = layers.front()->node.get();
        preset.scale               = first.scale();
        mdkv::prompt_shape<host> const shape{.layers = std::ssize(layers),
            .heads                                   = first.heads(),
            .group                                   = first.query_heads() / first.heads(),
            .dims                                    = first.dims(),
            .tokens                                  = tokens,
            .on_non_finite                           = mdkv::non_finite::unchecked};
        auto const made    = std::make_shared<joint_prompt>(preset, shape);
        own_prompt& prompt = made->prompt_;
        for (index_t i = 0; layer_prompt* const one : layers)
        {
            attention_node const node = one->node.get();
            gathered_cells const all{with.threads, node, cells, 0, tokens};
            last_queries const by{node, one->queries, tokens, preset.queries};
            if (preset.replayed)
            {
                auto const replayed = one->replayed.first(prompt->losses_of(i).extent(2));
                with.lend([&](host on) { prompt->take_losses(on, i, replayed); });
            }
            with.lend([&](host on) { prompt->finish_layer(on, i, by.rows(on, all)); });
            ++i;
        }
        with.lend([&](host on) { return prompt->allocate(on, limit); });
        for (index_t i = 0; layer_prompt* const one : layers)
        {
            one->joint = made;
            one->place = i++;
        }
    }

    mdkv::preset preset_;
    index_t tokens_;
    own_prompt prompt_;
};

} // namespace mdkv_ggml
