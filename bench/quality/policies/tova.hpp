/// \file tova.hpp: TOVA's scores: the attention of the last query, the same for all heads of a layer
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runner/scratch_memory.hpp"
#include "attention_scores.hpp"
#include "prompt_layer.hpp"

namespace runner
{

/// arXiv 2401.06104; NVIDIA/kvpress, kvpress/presses/tova_press.py: the mean over all query heads of the layer, so that
/// every head keeps the same tokens.
///
/// \return [heads, past]
template <mdkv::element T>
[[nodiscard]] std::vector<float> tova_scores(
    prompt_layer<T> const& layer, mdkv::cpu::executor_ref executor, scratch_memory& scratch)
{
    std::vector<float> scores = received_attention(layer, layer.query_tokens - 1, 1, executor, scratch);
    auto const past           = static_cast<std::size_t>(layer.past());
    auto const heads          = static_cast<std::size_t>(layer.heads);
    auto const query_heads    = static_cast<float>(layer.heads * layer.group);
    for (std::size_t t = 0; t < past; ++t)
    {
        float sum = 0;
        for (std::size_t h = 0; h < heads; ++h) { sum += scores[h * past + t]; }
        for (std::size_t h = 0; h < heads; ++h) { scores[h * past + t] = sum / query_heads; }
    }
    return scores;
}

} // namespace runner
