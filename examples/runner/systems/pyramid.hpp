/// \file pyramid.hpp: how many past tokens PyramidKV keeps in each layer: many in the first, few in the last
#pragma once

#include <mdkv/core/error.hpp>

#include <cstdint>
#include <limits>
#include <optional>

namespace runner
{

/// PyramidKV's rule in its authors' code (KVCache-Factory, pyramidkv/pyramidkv_utils.py, PyramidKVCluster). Layers lie on
/// a line from 2 * past_budget - past_budget / beta down to past_budget / beta, limited to the prompt's tokens. The step
/// from layer to layer is rounded down, so the layers' mean can exceed past_budget: that is the authors' rule, not
/// corrected here.
///
/// \param past_budget     tokens a layer may keep on the average, the window not counted
/// \param prompt_tokens   tokens of the whole prompt, the window included
/// \param layer           number of the layer; 0 is next to the input
/// \param beta            steepness; the authors' default is 20
/// \return   past tokens the layer keeps beside the window; nothing if the prompt is below past_budget + window and
///           stays whole
/// \throws mdkv::invalid_argument   naming the parameter out of range
[[nodiscard]] inline std::optional<std::int64_t> pyramid_capacity(std::int64_t past_budget, std::int64_t prompt_tokens,
    std::int64_t window, std::int64_t layer, std::int64_t layers, std::int64_t beta = 20)
{
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max() / 4; // sums and doubles stay in range
    mdkv::expects(past_budget >= 1 && past_budget <= most, "pyramid_capacity: past_budget is ", past_budget,
        "; it must be at least 1");
    mdkv::expects(window >= 0 && window <= most, "pyramid_capacity: window is ", window, "; it must not be negative");
    mdkv::expects(prompt_tokens >= 0 && prompt_tokens <= most, "pyramid_capacity: prompt_tokens is ", prompt_tokens,
        "; it must not be negative");
    mdkv::expects(
        layer >= 0 && layer < layers, "pyramid_capacity: layer is ", layer, ", outside the ", layers, " layers");
    mdkv::expects(beta >= 1, "pyramid_capacity: beta is ", beta, "; it must be at least 1");

    if (prompt_tokens < past_budget + window) { return std::nullopt; }
    // A single layer has no slope, and a prompt that is little longer than the budget is shared equally.
    if (layers == 1 || prompt_tokens < 2 * past_budget) { return past_budget; }
    std::int64_t smallest = past_budget / beta;
    std::int64_t largest  = 2 * past_budget - smallest;
    if (largest >= prompt_tokens - window)
    {
        largest  = prompt_tokens - window;
        smallest = 2 * past_budget - largest;
    }
    return largest - layer * ((largest - smallest) / (layers - 1));
}

} // namespace runner
