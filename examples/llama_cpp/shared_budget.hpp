/// \file shared_budget.hpp: one budget for all layers of a sequence, as some presets have it
#pragma once

#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/basis.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/prompt.hpp>

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "attention_node.hpp"
#include "cell_list.hpp"
#include "gathered_cells.hpp"
#include "last_queries.hpp"
#include "layer_prompt.hpp"
#include "memory_plan.hpp"
#include "shared.hpp"

namespace mdkv_ggml
{

/// One budget for the layers of a sequence, for presets that are `shared`.
class shared_budget
{
public:
    /// \param layers   layers of the sequence, in order; a layer without replayed losses of its past tokens gets no rungs
    shared_budget(std::vector<layer_prompt*> layers, cell_list const& cells, index_t tokens, shared& with)
        : cells_{cells}
        , tokens_{tokens}
        , past_{std::max<index_t>(0, tokens - with.chosen.preset.window)}
        , with_{with}
    {
        for (layer_prompt* const one : layers)
        {
            if (one->node.empty()) { continue; }
            attention_node const node  = one->node.get();
            attention_node const first = layers_.empty() ? node : layers_.front()->node.get();
            bool const alike           = node.heads() == first.heads() && node.query_heads() == first.query_heads()
                               && node.dims() == first.dims() && node.scale() == first.scale();
            if (alike && one->replayed.are_of(node, cells, past_)
                && one->queries.count_before(tokens, most_fold_queries) == most_fold_queries
                && one->queries.is_of(node, cells))
            {
                layers_.push_back(one);
            }
        }
    }

    /// Gives each layer its rungs, or none if they cannot be chosen (losses are non-finite) or need not be.
    void share()
    {
        if (layers_.empty() || past_ == 0) { return; }
        attention_node const first = layers_.front()->node.get();
        mdkv::preset p             = with_.chosen.preset;
        p.scale                    = first.scale();
        p.stand_ins                = 0; // a layer is packed by its rungs alone
        mdkv::prompt_shape<host> const shape{.layers = std::ssize(layers_),
            .heads                                   = first.heads(),
            .group                                   = first.query_heads() / first.heads(),
            .dims                                    = first.dims(),
            .tokens                                  = tokens_,
            .on_non_finite                           = mdkv::non_finite::unchecked};
        memory_plan const plan{first, tokens_, 1.0, with_};
        index_t const token = first.heads() * (first.dims().keys + first.dims().values) * index_t{sizeof(mdkv::half)};
        // The limit holds nothing of the past, or everything.
        if (plan.arena <= (tokens_ - past_) * token || plan.arena >= tokens_ * token) { return; }
        mdkv::workspace counting;
        static_cast<void>(prompt{host{&counting}, p, shape});
        std::vector<shared::line> memory(counting.bytes() / sizeof(shared::line));
        mdkv::workspace state{std::as_writable_bytes(std::span{memory})};
        prompt all{host{&state}, p, shape};
        for (index_t i = 0; i < shape.layers; ++i) { add(all, i, *layers_[static_cast<std::size_t>(i)]); }
        try
        {
            with_.lend([&](host on) { return all.allocate(on, mdkv::budget::bytes(plan.arena)); });
        }
        catch (mdkv::error const&)
        {
            return;
        }
        for (index_t i = 0; i < shape.layers; ++i)
        {
            auto const chosen = all.rungs_of(i); // [H, past]
            auto& rungs       = layers_[static_cast<std::size_t>(i)]->rungs;
            rungs.assign(chosen.data_handle(), chosen.data_handle() + chosen.required_span_size());
        }
    }

private:
    using host   = mdkv::cpu::backend;
    using prompt = mdkv::prompt<host, mdkv::half>;

    void add(prompt& all, index_t i, layer_prompt& layer)
    {
        attention_node const node = layer.node.get();
        index_t const rungs       = all.losses_of(i).extent(1);
        std::vector<float> replayed(static_cast<std::size_t>(node.heads() * rungs * past_));
        layer.replayed.write(past_, replayed.data());
        gathered_cells const cells{with_.threads, node, cells_, 0, tokens_};
        last_queries const by{node, layer.queries, tokens_, with_.chosen.preset.queries, with_.chosen.preset};
        with_.lend([&](host on) {
            all.take_losses(on, i, mdkv::in(on, std::as_const(replayed).data(), node.heads(), rungs, past_));
        });
        with_.lend([&](host on) {
            all.finish_layer(on, i,
                {.queries          = by.queries(on),
                    .keys          = cells.keys(on),
                    .values        = cells.values(on),
                    .lse_elsewhere = by.sinks(on)});
        });
    }

    cell_list const& cells_;
    index_t tokens_;
    index_t past_;
    shared& with_;
    std::vector<layer_prompt*> layers_;
};

} // namespace mdkv_ggml
