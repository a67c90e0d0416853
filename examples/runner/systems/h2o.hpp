/// \file h2o.hpp: H2O's scores at the end of a prompt: the attention of all its queries
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>

#include <vector>

#include "attention_scores.hpp"
#include "prompt_layer.hpp"
#include "runner/scratch_memory.hpp"

namespace runner
{

/// The heavy hitters of FMInference/H2O, chosen once, after the prompt, by the rule of Zefan-Cai/KVCache-Factory
/// (pyramidkv/pyramidkv_utils.py, H2OKVCluster): sums over all queries, no pooling. Each query sees the keys up to its own
/// token, as in H2O. KVCache-Factory hides later keys from the window's queries only; other queries see all keys.
///
/// \return [heads, past]
/// \throws mdkv::invalid_argument   the layer does not have the queries of all tokens
template <mdkv::element T>
[[nodiscard]] std::vector<float> h2o_scores(
    prompt_layer<T> const& layer, mdkv::cpu::executor_ref executor, scratch_memory& scratch)
{
    mdkv::expects(layer.query_tokens == layer.tokens, "h2o_scores: the layer has the queries of ", layer.query_tokens,
        " tokens; all ", layer.tokens, " are needed");
    return received_attention(layer, 0, layer.tokens, executor, scratch);
}

} // namespace runner
