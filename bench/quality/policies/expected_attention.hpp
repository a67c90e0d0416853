/// \file expected_attention.hpp: Expected Attention's scores: attention of future queries that resemble those so far
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "runner/eigen.hpp"
#include "runner/element_rows.hpp"
#include "runner/layers.hpp"
#include "runner/scratch_memory.hpp"
#include "prompt_layer.hpp"

namespace runner
{

/// Defaults of NVIDIA/kvpress, kvpress/presses/expected_attention_press.py.
struct expected_attention_options
{
    std::int64_t future = 512; // positions over which the rotation is averaged
    std::int64_t sinks  = 4;   // first tokens: always best, and in no statistics
    bool covariance     = true;
    bool value_norms    = true;
    float epsilon       = 0.0F; // added before the value norms
};

namespace detail
{

/// The rotary encoding of a prompt in the forms that Expected Attention needs.
class prompt_rotations
{
public:
    prompt_rotations(rotary const& rotation, std::int64_t dim, std::int64_t tokens, std::int64_t future)
        : rotation_{rotation}
        , size_{rotation.table_size()}
        , back_(static_cast<std::size_t>(tokens * size_))
        , average_{float_matrix::Identity(dim, dim)}
    {
        for (std::int64_t t = 0; t < tokens; ++t) { rotation.angles(-t, back_.data() + t * size_); }
        std::vector<double> sums(static_cast<std::size_t>(size_), 0.0);
        std::vector<float> table(sums.size());
        for (std::int64_t t = tokens; t < tokens + future; ++t)
        {
            rotation.angles(t, table.data());
            for (std::size_t i = 0; i < table.size(); ++i) { sums[i] += double{table[i]}; }
        }
        for (std::int64_t i = 0; i < size_ / 2; ++i)
        {
            auto const mean = [&](std::int64_t k) {
                return static_cast<float>(sums[static_cast<std::size_t>(k)] / static_cast<double>(future));
            };
            auto const [x, y] = rotation.coordinates(i);
            average_(x, x)    = mean(2 * i);
            average_(x, y)    = -mean(2 * i + 1);
            average_(y, x)    = mean(2 * i + 1);
            average_(y, y)    = mean(2 * i);
        }
    }

    /// Turns the vector of token t back to its value before position encoding.
    void undo(float* vector, std::int64_t t) const { rotation_.turn(vector, back_.data() + t * size_); }

    /// [dim, dim]  mean of the rotations of the positions that follow. A mean shortens vectors, unlike a rotation.
    [[nodiscard]] float_matrix const& average() const { return average_; }

private:
    rotary const& rotation_;
    std::int64_t size_;
    std::vector<float> back_; // [tokens, size]
    float_matrix average_;
};

/// Expected logits of queries that have the mean and covariance of one query head's queries so far.
template <mdkv::element T>
[[nodiscard]] Eigen::VectorXf expected_logits(prompt_layer<T> const& layer, std::int64_t query_head,
    float_matrix const& keys, prompt_rotations const& rotations, expected_attention_options const& options)
{
    std::int64_t const dim   = layer.key_dim;
    std::int64_t const count = keys.rows();
    float_matrix queries(count, dim);
    T const* const from = layer.queries + (query_head * layer.tokens + options.sinks) * dim;
    widen_row(from, count * dim, queries.data());
    for (std::int64_t i = 0; i < count; ++i) { rotations.undo(queries.data() + i * dim, options.sinks + i); }

    Eigen::VectorXf const mean = queries.colwise().mean().transpose();
    auto const scale           = 1.0F / std::sqrt(static_cast<float>(dim));
    Eigen::VectorXf logits     = keys * (rotations.average() * mean) * scale;
    if (options.covariance)
    {
        // The mean of exp(q.k) over normal q is exp(mean.k + k.covariance.k / 2).
        queries.rowwise() -= mean.transpose();
        float_matrix const covariance = queries.transpose() * queries / static_cast<float>(count);
        float_matrix const turned     = rotations.average() * covariance * rotations.average().transpose();
        queries.noalias()             = keys * turned;
        logits += queries.cwiseProduct(keys).rowwise().sum() * (scale * scale / 2.0F);
    }
    return logits;
}

} // namespace detail

/// NVIDIA/kvpress, kvpress/presses/expected_attention_press.py. kvpress takes queries before position encoding; here
/// encoded queries are turned back. The softmax runs over all keys but the sinks, the window's keys included.
///
/// \return [heads, past]; sinks are above all others
/// \throws mdkv::invalid_argument   the layer lacks its rotation or the queries of some tokens; an option is out of
///                                  range
template <mdkv::element T>
[[nodiscard]] std::vector<float> expected_attention_scores(prompt_layer<T> const& layer,
    expected_attention_options const& options, mdkv::cpu::executor_ref executor, scratch_memory&)
{
    mdkv::expects(layer.rotation != nullptr, "expected_attention_scores: the layer has no rotation");
    mdkv::expects(layer.query_tokens == layer.tokens, "expected_attention_scores: the layer has the queries of ",
        layer.query_tokens, " tokens; all ", layer.tokens, " are needed");
    mdkv::expects(options.future >= 1 && options.sinks >= 0, "expected_attention_scores: future is ", options.future,
        " and sinks is ", options.sinks, "; they must be at least 1 and 0");
    std::int64_t const past  = layer.past();
    std::int64_t const count = layer.tokens - options.sinks;
    std::vector<float> scores(static_cast<std::size_t>(layer.heads * past), 0.0F);
    if (past <= options.sinks) { return scores; } // sinks only

    detail::prompt_rotations const rotations{*layer.rotation, layer.key_dim, layer.tokens, options.future};
    std::vector<float> best(static_cast<std::size_t>(layer.heads), 0.0F);
    executor.parallel_for(layer.heads, [&](std::int64_t head) {
        std::int64_t const start = head * layer.tokens + options.sinks;
        float_matrix keys(count, layer.key_dim);
        widen_row(layer.keys + start * layer.key_dim, count * layer.key_dim, keys.data());
        Eigen::VectorXf mean = Eigen::VectorXf::Zero(count);
        for (std::int64_t g = 0; g < layer.group; ++g)
        {
            Eigen::VectorXf const logits =
                detail::expected_logits(layer, head * layer.group + g, keys, rotations, options);
            Eigen::VectorXf const weights = (logits.array() - logits.maxCoeff()).exp().matrix();
            mean += weights / (weights.sum() * static_cast<float>(layer.group));
        }
        if (options.value_norms)
        {
            float_matrix values(count, layer.value_dim);
            widen_row(layer.values + start * layer.value_dim, count * layer.value_dim, values.data());
            mean = (mean.array() + options.epsilon) * values.rowwise().norm().array();
        }
        std::copy_n(mean.data(), past - options.sinks, scores.data() + head * past + options.sinks);
        best[static_cast<std::size_t>(head)] = mean.maxCoeff();
    });
    float const sink = *std::max_element(best.begin(), best.end()) + 1.0F;
    for (std::int64_t head = 0; head < layer.heads; ++head)
    {
        std::fill_n(scores.data() + head * past, options.sinks, sink);
    }
    return scores;
}

} // namespace runner
