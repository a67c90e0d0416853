/// \file shared_budget.hpp: one budget for all layers of a sequence, as some presets have it
#pragma once

#include <mdkv/allocate.hpp>
#include <mdkv/balance.hpp>
#include <mdkv/cache.hpp>
#include <mdkv/core/allocation.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/basis.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/join.hpp>
#include <mdkv/leverage.hpp>
#include <mdkv/pool.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/score.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
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

/// One budget for the layers of a sequence, as presets that are `shared` have it.
class shared_budget
{
public:
    /// \param layers   of the sequence, in order; those without replayed losses of its first `tokens` get no rungs
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
                               && node.dims() == first.dims();
            if (alike && one->replayed.are_of(node, cells, past_)
                && one->queries.count_before(tokens, most_fold_queries) == most_fold_queries
                && one->queries.is_of(node, cells))
            {
                layers_.push_back(one);
            }
        }
    }

    /// Gives each layer its rungs; none where they cannot be chosen, as of losses that are not finite, or need not be.
    void share()
    {
        if (layers_.empty() || past_ == 0) { return; }
        attention_node const first = layers_.front()->node.get();
        mdkv::preset const& p      = with_.chosen.preset;
        auto const [L, H, R]       = std::array{std::ssize(layers_), first.heads(), std::ssize(p.ratios)};
        std::vector<float> losses(static_cast<std::size_t>(L * H * R * past_));
        std::vector<float> leverages(static_cast<std::size_t>(past_));
        for (index_t i = 0; i < L; ++i)
        {
            score(*layers_[static_cast<std::size_t>(i)], losses.data() + i * H * R * past_, leverages);
        }
        mdkv::layer_shape const shape{
            H, first.query_heads() / H, past_, tokens_ - past_, first.dims(), index_t{sizeof(mdkv::half)}};
        memory_plan const plan{first, tokens_, 1.0, with_};
        index_t const limit = L * (plan.arena - shape.window_bytes());
        // Nothing fits, or everything.
        if (limit <= 0 || limit >= L * (shape.full_bytes() - shape.window_bytes())) { return; }
        std::vector<std::uint8_t> rungs(static_cast<std::size_t>(L * H * past_));
        mdkv::allocation report;
        with_.lend([&](mdkv::cpu::backend on) {
            using mdkv::in;
            using mdkv::out;
            mdkv::balance(on, out(on, losses.data(), L, H, R, past_),
                p.balance<mdkv::cpu::backend>(in(on, std::as_const(leverages).data(), past_)));
            mdkv::allocate(on, in(on, std::as_const(losses).data(), L * H, R, past_),
                mdkv::rung_costs{p.ratios, shape.dims, shape.element_bytes}, in(on, &limit, 1), {},
                out(on, rungs.data(), L * H, past_), out(on, &report, 1));
        });
        if (report.status == mdkv::allocation_status::non_finite_loss
            || report.status == mdkv::allocation_status::over_limit)
        {
            return;
        }
        for (index_t i = 0; i < L; ++i)
        {
            auto const begin = rungs.begin() + i * H * past_;
            layers_[static_cast<std::size_t>(i)]->rungs.assign(begin, begin + H * past_);
        }
    }

private:
    /// \param losses   [H, R, past]
    void score(layer_prompt& layer, float* losses, std::vector<float>& leverages)
    {
        mdkv::preset const& p     = with_.chosen.preset;
        attention_node const node = layer.node.get();
        auto const [H, R]         = std::pair{node.heads(), std::ssize(p.ratios)};
        gathered_cells const all{with_.threads, node, cells_, 0, tokens_};
        last_queries const by{node, layer.queries, tokens_, p.queries, p};
        std::vector<float> replayed(static_cast<std::size_t>(H * R * past_));
        layer.replayed.write(past_, replayed.data());
        std::vector<float> window(p.last_queries_score() ? replayed.size() : 0);
        with_.lend([&](mdkv::cpu::backend on) {
            using mdkv::in;
            using mdkv::out;
            using mdkv::slice;
            auto const keys = all.keys(on);
            auto const to   = out(on, losses, H, R, past_);
            auto const read = in(on, std::as_const(replayed).data(), H, R, past_);
            if (p.odd() > 0) { mdkv::add_leverage(on, slice<1>(keys, 0, past_), out(on, leverages.data(), past_)); }
            if (!p.last_queries_score()) { return mdkv::pool(on, read, p.pooling, to); }
            auto const none   = in(on, static_cast<float const*>(nullptr), 0, 0, 0);
            auto const pooled = out(on, window.data(), H, R, past_);
            mdkv::score(on, by.queries(on), slice<1>(keys, 0, past_), slice<1>(all.values(on), 0, past_),
                slice<1>(keys, past_, tokens_ - past_), none, none, p.ratios, by.options(on), to);
            mdkv::pool(on, mdkv::as_input(to), p.pooling, pooled);
            mdkv::join(on, read, mdkv::as_input(pooled), p.replayed->join, to);
        });
    }

    cell_list const& cells_;
    index_t tokens_;
    index_t past_;
    shared& with_;
    std::vector<layer_prompt*> layers_;
};

} // namespace mdkv_ggml
