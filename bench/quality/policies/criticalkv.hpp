/// \file criticalkv.hpp: CriticalKV's scores: attention first, then attention weighted by the projected value's norm
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/stages/pool.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "runner/eigen.hpp"
#include "runner/element_rows.hpp"
#include "runner/scratch_memory.hpp"
#include "prompt_layer.hpp"
#include "snapkv.hpp"
#include "top.hpp"

namespace runner
{

struct criticalkv_options
{
    double first_stage = 0.5;   // share of the budget given by the base score alone
    float epsilon      = 1e-4F; // added to the base score before weighting

    /// If true, the first stage's share refers to past and window tokens together, and the window takes its place in it
    /// first: in kvpress the window has the highest base score. If false, the share refers to the past tokens.
    bool window_in_first_stage = true;

    /// kvpress' SnapKV: the mean over 5 neighbours. The mean over rows is part of the rule, because epsilon is added.
    snapkv_options base{.pooling = {5, mdkv::pooling::mean}, .mean = true};
};

/// Mean, over the query heads that share a cached head, of the L1 norm of each past value after the head's part of the
/// output projection.
///
/// \return [heads, past]
/// \throws mdkv::invalid_argument   the layer lacks its output weights
template <mdkv::element T>
[[nodiscard]] std::vector<float> projected_value_norms(prompt_layer<T> const& layer, mdkv::cpu::executor_ref executor)
{
    mdkv::expects(layer.output_weights != nullptr, "projected_value_norms: the layer has no output_weights");
    constexpr std::int64_t block   = 256; // values and their projections stay in L2
    std::int64_t const blocks      = (layer.past() + block - 1) / block;
    std::int64_t const value_dim   = layer.value_dim;
    std::int64_t const weight_size = layer.heads * layer.group * value_dim;
    std::vector<float> norms(static_cast<std::size_t>(layer.heads * layer.past()));
    executor.parallel_for(layer.heads * blocks, [&](std::int64_t item) {
        std::int64_t const head  = item / blocks;
        std::int64_t const first = item % blocks * block;
        std::int64_t const count = std::min(block, layer.past() - first);
        float_matrix values(count, value_dim);
        widen_row(layer.values + (head * layer.tokens + first) * value_dim, count * value_dim, values.data());
        float_matrix projected(count, layer.embedding);
        row_view sums(norms.data() + head * layer.past() + first, count);
        sums.setZero();
        for (std::int64_t g = 0; g < layer.group; ++g)
        {
            const_matrix_view const weights(layer.output_weights + (head * layer.group + g) * value_dim,
                layer.embedding, value_dim, Eigen::OuterStride<>(weight_size));
            projected.noalias() = values * weights.transpose();
            sums += projected.cwiseAbs().rowwise().sum().array();
        }
        sums /= static_cast<float>(layer.group);
    });
    return norms;
}

/// The two stages over any base score (NVIDIA/kvpress, kvpress/presses/criticalkv_press.py; arXiv 2502.03805).
///
/// \param base     [heads, past], means of probabilities: epsilon is added to them
/// \param counts   [heads], past tokens that will be kept of the result
/// \return [heads, past]; infinite for tokens of the first stage
/// \throws mdkv::invalid_argument   sizes disagree, or the layer lacks its output weights
template <mdkv::element T>
[[nodiscard]] std::vector<float> two_stage_scores(prompt_layer<T> const& layer, std::vector<float> const& base,
    std::vector<std::int64_t> const& counts, criticalkv_options const& options, mdkv::cpu::executor_ref executor)
{
    auto const heads = static_cast<std::size_t>(layer.heads);
    auto const past  = static_cast<std::size_t>(layer.past());
    mdkv::expects(base.size() == heads * past && counts.size() == heads, "two_stage_scores: ", base.size(),
        " base scores and ", counts.size(), " counts for ", heads, " heads of ", past, " tokens");
    std::vector<float> scores = projected_value_norms(layer, executor);
    for (std::size_t i = 0; i < scores.size(); ++i) { scores[i] *= base[i] + options.epsilon; }
    std::int64_t const others = options.window_in_first_stage ? layer.window : 0;
    for (std::size_t h = 0; h < heads; ++h)
    {
        auto const share = static_cast<std::int64_t>(static_cast<double>(counts[h] + others) * options.first_stage);
        for (std::int64_t const t : top_indices(std::span{base}.subspan(h * past, past), share - others))
        {
            scores[h * past + static_cast<std::size_t>(t)] = std::numeric_limits<float>::infinity();
        }
    }
    return scores;
}

/// CriticalKV over SnapKV's scores.
///
/// \param counts   [heads], past tokens that will be kept of the result
/// \return [heads, past]
/// \throws mdkv::invalid_argument   as two_stage_scores and snapkv_scores
template <mdkv::element T>
[[nodiscard]] std::vector<float> criticalkv_scores(prompt_layer<T> const& layer,
    std::vector<std::int64_t> const& counts, criticalkv_options const& options, mdkv::cpu::executor_ref executor,
    scratch_memory& scratch)
{
    return two_stage_scores(layer, snapkv_scores(layer, options.base, executor, scratch), counts, options, executor);
}

} // namespace runner
