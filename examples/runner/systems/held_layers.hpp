/// \file held_layers.hpp: keys, values and last queries of all layers of a prompt, held until the prompt is compressed
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <vector>

#include "prompt_layer.hpp"

namespace runner
{

/// Prefill hands over one layer after the other in the same memory; layers that share a budget are kept until the last one.
template <mdkv::element T>
class held_layers
{
public:
    /// Copies a layer's keys, values, queries and log-sum-exps.
    /// \throws mdkv::invalid_argument   the layer has other sizes than the first one
    void add(prompt_layer<T> const& layer)
    {
        prompt_layer<T> const& first = layers_.empty() ? layer : layers_.front();
        mdkv::expects(layer.heads == first.heads && layer.past() == first.past(), "one budget for all layers: layer ",
            layer.layer, " has ", layer.heads, " heads of ", layer.past(), " tokens, the first has ", first.heads,
            " of ", first.past());
        auto const tokens = layer.heads * layer.tokens;
        auto const rows   = layer.heads * layer.group * layer.query_tokens;
        layers_.push_back(layer);
        layers_.back().keys    = keys_.emplace_back(layer.keys, layer.keys + tokens * layer.key_dim).data();
        layers_.back().values  = values_.emplace_back(layer.values, layer.values + tokens * layer.value_dim).data();
        layers_.back().queries = queries_.emplace_back(layer.queries, layer.queries + rows * layer.key_dim).data();
        layers_.back().lse     = lse_.emplace_back(layer.lse, layer.lse + rows).data();
    }

    /// Layers in the order in which they were added; their other pointers are invalid.
    [[nodiscard]] std::vector<prompt_layer<T>> const& all() const noexcept { return layers_; }

private:
    std::vector<prompt_layer<T>> layers_;
    std::vector<std::vector<T>> keys_, values_; // [layers][heads, tokens, D]
    std::vector<std::vector<T>> queries_;       // [layers][heads * group, query_tokens, D]
    std::vector<std::vector<float>> lse_;       // [layers][heads * group, query_tokens]
};

} // namespace runner
