/// \file model_budget.hpp: one budget for all layers of a prompt: layers are held until the losses of the last one are known
#pragma once

#include <mdkv/allocate.hpp>
#include <mdkv/core/allocation.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/executor.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "../runner/scratch_memory.hpp"
#include "oddness.hpp"
#include "prompt_layer.hpp"

namespace runner
{

/// Takes the memory of all layers' keys and values, as an engine has it anyway, and of their losses.
template <mdkv::element T>
class model_budget
{
public:
    /// Copies a layer's keys and values, and takes its losses [heads, R, past] in units of their mean at rung 0. Losses of
    /// different layers are not of one measure; so they are, but for how much a layer's output counts later: the losses of
    /// the last layer are taken e^depth times as high as those of the first.
    void hold(prompt_layer<T> const& layer, std::span<float const> losses, double depth)
    {
        prompt_layer<T> const& first = layers_.empty() ? layer : layers_.front();
        mdkv::expects(layer.heads == first.heads && layer.past() == first.past(), "one budget for all layers: layer ",
            layer.layer, " has ", layer.heads, " heads of ", layer.past(), " tokens, the first has ", first.heads,
            " of ", first.past());
        auto const past = static_cast<std::size_t>(layer.past());
        auto const head = layer.heads == 0 ? 0 : losses.size() / static_cast<std::size_t>(layer.heads); // R * past
        double total    = 0;
        for (std::size_t h = 0; h < losses.size(); h += head)
        {
            for (float const loss : losses.subspan(h, past)) { total += double{loss}; }
        }
        double const late = std::exp(depth * static_cast<double>(layer.layer) / static_cast<double>(layer.layers));
        double const unit = total == 0 ? 0 : late * static_cast<double>(layer.heads * layer.past()) / total;
        losses_.reserve(losses.size() * static_cast<std::size_t>(layer.layers));
        for (float const loss : losses) { losses_.push_back(static_cast<float>(double{loss} * unit)); }
        auto const tokens = layer.heads * layer.tokens;
        keys_.emplace_back(layer.keys, layer.keys + tokens * layer.key_dim);
        values_.emplace_back(layer.values, layer.values + tokens * layer.value_dim);
        layers_.push_back(layer);
        layers_.back().keys   = keys_.back().data();
        layers_.back().values = values_.back().data();
    }

    /// Takes a layer's part in how odd the prompt's tokens are, before `allocate` is told to weigh it.
    void compare_keys(prompt_layer<T> const& layer, mdkv::cpu::executor_ref executor, scratch_memory& scratch)
    {
        leverages_.resize(static_cast<std::size_t>(layer.past()));
        add_leverages(layer, executor, scratch, leverages_);
    }

    /// Chooses every token's rung, of all layers at once.
    /// \param odd     losses are multiplied by this power of how odd a token's surroundings are in units of the mean, in all
    ///                layers alike; 0: by nothing. A statement that is like nothing else in the prompt is what a question
    ///                asked later is about more often than its own queries tell.
    /// \param limit   bytes of all layers beside their windows
    [[nodiscard]] mdkv::allocation allocate(mdkv::cpu::executor_ref executor, scratch_memory& scratch,
        mdkv::ratio_set const& ratios, mdkv::rung_costs const& costs, mdkv::index_t limit, double odd)
    {
        if (odd > 0) { weigh(odd); }
        auto const heads = std::ssize(layers_) * layers_.front().heads;
        auto const past  = layers_.front().past();
        mdkv::allocation report;
        rungs_.resize(static_cast<std::size_t>(heads * past));
        scratch.run(executor, [&](mdkv::cpu::backend on) {
            mdkv::allocate(on,
                mdkv::in(on, std::as_const(losses_).data(), heads, static_cast<mdkv::index_t>(ratios.size()), past),
                costs, mdkv::in(on, &std::as_const(limit), 1), {}, mdkv::out(on, rungs_.data(), heads, past),
                mdkv::out(on, &report, 1));
            return 0;
        });
        return report;
    }

    /// The layers in order; keys and values are those held, what else they point to is gone.
    [[nodiscard]] std::vector<prompt_layer<T>> const& layers() const noexcept { return layers_; }

    /// [heads, past], those chosen for the i-th layer.
    [[nodiscard]] std::span<std::uint8_t const> rungs(std::size_t i) const noexcept
    {
        auto const each = rungs_.size() / layers_.size();
        return std::span{rungs_}.subspan(i * each, each);
    }

private:
    void weigh(double odd)
    {
        constexpr std::int64_t reach = 8; // tokens to each side: a statement of some words
        auto factors                 = surroundings(leverages_, reach);
        for (double& one : factors) { one = std::pow(one, odd); }
        for (std::size_t i = 0; i < losses_.size(); ++i)
        {
            losses_[i] = static_cast<float>(double{losses_[i]} * factors[i % factors.size()]);
        }
    }

    std::vector<prompt_layer<T>> layers_;
    std::vector<std::vector<T>> keys_, values_; // of each layer, [heads, tokens, D]
    std::vector<float> losses_;                 // [layers * heads, R, past]
    std::vector<double> leverages_;             // [past], of tokens, summed over the heads of all layers
    std::vector<std::uint8_t> rungs_;           // [layers * heads, past]
};

} // namespace runner
