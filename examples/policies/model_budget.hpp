/// \file model_budget.hpp: one budget for all layers of a prompt: layers are held until the losses of the last one are known
#pragma once

#include <mdkv/allocate.hpp>
#include <mdkv/balance.hpp>
#include <mdkv/core/allocation.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/basis.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/leverage.hpp>
#include <mdkv/presets.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "../runner/scratch_memory.hpp"
#include "prompt_layer.hpp"

namespace runner
{

/// Takes the memory of all layers' keys and values, as an engine has it anyway, and of their losses.
template <mdkv::element T>
class model_budget
{
public:
    /// Copies a layer's keys, values and queries, and takes its losses [heads, R, past].
    void hold(prompt_layer<T> const& layer, std::span<float const> losses)
    {
        prompt_layer<T> const& first = layers_.empty() ? layer : layers_.front();
        mdkv::expects(layer.heads == first.heads && layer.past() == first.past(), "one budget for all layers: layer ",
            layer.layer, " has ", layer.heads, " heads of ", layer.past(), " tokens, the first has ", first.heads,
            " of ", first.past());
        losses_.reserve(losses.size() * static_cast<std::size_t>(layer.layers));
        losses_.insert(losses_.end(), losses.begin(), losses.end());
        auto const tokens = layer.heads * layer.tokens;
        keys_.emplace_back(layer.keys, layer.keys + tokens * layer.key_dim);
        values_.emplace_back(layer.values, layer.values + tokens * layer.value_dim);
        layers_.push_back(layer);
        auto const rows = layer.heads * layer.group * layer.query_tokens;
        queries_.emplace_back(layer.queries, layer.queries + rows * layer.key_dim);
        lse_.emplace_back(layer.lse, layer.lse + rows);
        layers_.back().queries = queries_.back().data();
        layers_.back().lse     = lse_.back().data();
        layers_.back().keys    = keys_.back().data();
        layers_.back().values  = values_.back().data();
    }

    /// Takes a layer's part in how odd the prompt's tokens are, for an `allocate` that weighs it.
    void compare_keys(prompt_layer<T> const& layer, mdkv::cpu::executor_ref executor, scratch_memory& scratch)
    {
        leverages_.resize(static_cast<std::size_t>(layer.tokens));
        scratch.run(executor, [&](mdkv::cpu::backend on) {
            mdkv::add_leverage(on, mdkv::in(on, layer.keys, layer.heads, layer.tokens, layer.key_dim),
                mdkv::out(on, leverages_.data(), layer.tokens));
            return 0;
        });
    }

    /// Chooses every token's rung, of all layers at once: rung 1 for all where the limit holds that.
    /// \param depth   mdkv::balance_options::depth
    /// \param odd     mdkv::preset::odd
    /// \param limit   bytes of all layers beside their windows
    /// \param aside   bytes of them that are for something else if any token is dropped
    [[nodiscard]] mdkv::allocation allocate(mdkv::cpu::executor_ref executor, scratch_memory& scratch,
        mdkv::ratio_set const& ratios, mdkv::rung_costs const& costs, mdkv::index_t limit, double depth, double odd,
        mdkv::index_t aside = 0)
    {
        auto const layers = std::ssize(layers_);
        auto const heads  = layers_.front().heads;
        auto const rungs  = static_cast<mdkv::index_t>(ratios.size());
        auto const past   = layers_.front().past();
        rungs_.assign(static_cast<std::size_t>(layers * heads * past), static_cast<std::uint8_t>(rungs - 1));
        mdkv::allocation report;
        if (ratios[ratios.size() - 1].full() && limit >= layers * heads * past * costs.bytes[ratios.size() - 1])
        {
            report.status = mdkv::allocation_status::everything_kept;
            return report;
        }
        scratch.run(executor, [&](mdkv::cpu::backend on) {
            mdkv::balance_options<mdkv::cpu::backend> options{
                .depth = static_cast<float>(depth), .odd = mdkv::odd_power(static_cast<float>(odd), past)};
            if (odd > 0) { options.leverages = mdkv::in(on, std::as_const(leverages_).data(), past); }
            mdkv::balance(on, mdkv::out(on, losses_.data(), layers, heads, rungs, past), options);
            return 0;
        });
        auto const choose = [&](mdkv::cpu::backend on) {
            mdkv::allocate(on, mdkv::in(on, std::as_const(losses_).data(), layers * heads, rungs, past), costs,
                mdkv::in(on, &std::as_const(limit), 1), {}, mdkv::out(on, rungs_.data(), layers * heads, past),
                mdkv::out(on, &report, 1));
            return 0;
        };
        scratch.run(executor, choose);
        if (aside > 0 && report.tokens[0] > 0)
        {
            limit -= aside;
            scratch.run(executor, choose);
        }
        return report;
    }

    /// The layers in order; keys, values, queries and lse are those held, what else they point to is gone.
    [[nodiscard]] std::vector<prompt_layer<T>> const& layers() const noexcept { return layers_; }

    /// [heads, past], those chosen for the i-th layer.
    [[nodiscard]] std::span<std::uint8_t const> rungs(std::size_t i) const noexcept
    {
        auto const each = rungs_.size() / layers_.size();
        return std::span{rungs_}.subspan(i * each, each);
    }

private:
    std::vector<prompt_layer<T>> layers_;
    std::vector<std::vector<T>> keys_, values_; // of each layer, [heads, tokens, D]
    std::vector<std::vector<T>> queries_;       // of each layer, [heads * group, query_tokens, D]
    std::vector<std::vector<float>> lse_;       // of each layer, [heads * group, query_tokens]
    std::vector<float> losses_;                 // [layers * heads, R, past]
    std::vector<float> leverages_;              // [tokens], summed over the heads of all layers
    std::vector<std::uint8_t> rungs_;           // [layers * heads, past]
};

} // namespace runner
