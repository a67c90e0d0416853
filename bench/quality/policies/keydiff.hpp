/// \file keydiff.hpp: KeyDiff's scores: the dissimilarity of a key and the average key
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "runner/element_rows.hpp"
#include "runner/scratch_memory.hpp"
#include "prompt_layer.hpp"

namespace runner
{

/// arXiv 2504.15364; NVIDIA/kvpress, kvpress/presses/keydiff_press.py: minus the cosine between a key, after position
/// encoding, and the mean of all keys of the head, each normalised to length 1, window included. Smaller lengths are
/// replaced by 1e-8 in the cosine, by 1e-12 in the mean. The whole prompt is scored at once, as in kvpress; the paper goes
/// block by block.
///
/// \return [heads, past]
template <mdkv::element T>
[[nodiscard]] std::vector<float> keydiff_scores(
    prompt_layer<T> const& layer, mdkv::cpu::executor_ref executor, scratch_memory&)
{
    std::vector<float> scores(static_cast<std::size_t>(layer.heads * layer.past()));
    executor.parallel_for(layer.heads, [&](std::int64_t head) {
        auto const dim = static_cast<std::size_t>(layer.key_dim);
        std::vector<float> key(dim);
        auto const read = [&](std::int64_t token) { // reads a key and returns its length
            widen_row(layer.keys + (head * layer.tokens + token) * layer.key_dim, layer.key_dim, key.data());
            double square = 0;
            for (float const x : key) { square += double{x} * double{x}; }
            return std::sqrt(square);
        };
        std::vector<double> anchor(dim, 0.0);
        for (std::int64_t t = 0; t < layer.tokens; ++t)
        {
            double const length = std::max(read(t), 1e-12);
            for (std::size_t d = 0; d < dim; ++d) { anchor[d] += double{key[d]} / length; }
        }
        double square = 0;
        for (double& x : anchor)
        {
            x /= static_cast<double>(layer.tokens);
            square += x * x;
        }
        double const anchor_length = std::max(std::sqrt(square), 1e-8);
        for (std::int64_t t = 0; t < layer.past(); ++t)
        {
            double const length = std::max(read(t), 1e-8);
            double product      = 0;
            for (std::size_t d = 0; d < dim; ++d) { product += double{key[d]} * anchor[d]; }
            scores[static_cast<std::size_t>(head * layer.past() + t)] =
                static_cast<float>(-product / (length * anchor_length));
        }
    });
    return scores;
}

} // namespace runner
