/// \file snapkv.hpp: SnapKV's scores: the attention of the window's queries, shared among neighbours
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/stages/pool.hpp>

#include <vector>

#include "attention_scores.hpp"
#include "prompt_layer.hpp"
#include "runner/scratch_memory.hpp"

namespace runner
{

struct snapkv_options
{
    /// Pooling of the authors' LongBench runs; the defaults of their class are the mean over 5.
    mdkv::pool_options pooling{7, mdkv::pooling::max};

    /// If true, the mean over rows and query heads instead of their sum, the rule of AdaKV, HeadKV and kvpress. Ranks are
    /// the same; the difference matters if a constant is added to the scores.
    bool mean = false;
};

/// FasterDecoding/SnapKV, snapkv/monkeypatch/snapkv_utils.py. The query heads that share a cached head are added up
/// before pooling, as AdaKV does for grouped queries; SnapKV itself caches every query head.
///
/// \return [heads, past]
/// \throws mdkv::invalid_argument   the layer has no window, or fewer queries than that; the width is not odd
template <mdkv::element T>
[[nodiscard]] std::vector<float> snapkv_scores(
    prompt_layer<T> const& layer, snapkv_options options, mdkv::cpu::executor_ref executor, scratch_memory& scratch)
{
    mdkv::expects(layer.window >= 1 && layer.query_tokens >= layer.window, "snapkv_scores: the layer has ",
        layer.query_tokens, " queries for a window of ", layer.window);
    std::vector<float> scores =
        received_attention(layer, layer.query_tokens - layer.window, layer.window, executor, scratch);
    if (options.mean)
    {
        auto const rows = static_cast<float>(layer.window * layer.group);
        for (float& score : scores) { score /= rows; }
    }
    return pooled_scores(scores, layer.heads, options.pooling, executor, scratch);
}

} // namespace runner
