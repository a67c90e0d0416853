/// \file streaming.hpp: StreamingLLM's scores: the first tokens, then the latest
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runner/scratch_memory.hpp"
#include "prompt_layer.hpp"

namespace runner
{

/// mit-han-lab/streaming-llm, streaming_llm/kv_cache.py: the first `sinks` tokens and the latest. A KV size T counts the
/// window and leaves the T - sinks latest: the window and the past tokens next to it. Positions stay the prompt's
/// positions; the original turns keys anew at every step, so that positions count cached tokens.
///
/// \return [heads, past]
template <mdkv::element T>
[[nodiscard]] std::vector<float> streaming_scores(
    prompt_layer<T> const& layer, std::int64_t sinks, mdkv::cpu::executor_ref, scratch_memory&)
{
    std::vector<float> scores;
    scores.reserve(static_cast<std::size_t>(layer.heads * layer.past()));
    for (std::int64_t h = 0; h < layer.heads; ++h)
    {
        // Positions are exact in float up to 2^24, and a sink is above all of them.
        for (std::int64_t t = 0; t < layer.past(); ++t)
        {
            scores.push_back(static_cast<float>(t < sinks ? layer.tokens : t));
        }
    }
    return scores;
}

} // namespace runner
