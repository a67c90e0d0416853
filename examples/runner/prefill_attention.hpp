/// \file prefill_attention.hpp: causal attention of many query rows at once, streamed over blocks of keys
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <limits>
#include <vector>

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>

#include "eigen.hpp"
#include "element_rows.hpp"

namespace runner
{

/// Consecutive queries of a prompt and the keys and values of all tokens up to the last of them.
template <mdkv::element T>
struct causal_attention
{
    std::int64_t query_heads, kv_heads, key_dim, value_dim;
    std::int64_t first, count; // the queries are at positions [first, first + count)
    std::int64_t tokens;       // keys and values have room for so many tokens per head
    float const* queries;      // [count, query_heads * key_dim], after rotation
    T const* keys;             // [kv_heads, tokens, key_dim], after rotation
    T const* values;           // [kv_heads, tokens, value_dim]
    float* out;                // [count, query_heads * value_dim]
    std::int64_t lse_first;    // log-sum-exps are wanted of positions [lse_first, lse_first + lse_count)
    std::int64_t lse_count;
    float* lse; // [query_heads, lse_count]
};

namespace detail
{

inline constexpr std::int64_t query_block = 64;  // with the heads that share a KV head: the rows of one product
inline constexpr std::int64_t key_block   = 256; // its logits and float keys stay in L2

/// The online softmax of one block of queries of all query heads that share a KV head.
/// Row g * queries + i is query i of the block in the g-th head of the group.
template <mdkv::element T>
class attention_block
{
public:
    attention_block(causal_attention<T> const& task, std::int64_t kv_head, std::int64_t begin, std::int64_t end)
        : task_{task}
        , kv_head_{kv_head}
        , begin_{begin}
        , queries_{end - begin}
        , group_{task.query_heads / task.kv_heads}
        , query_(group_ * queries_, task.key_dim)
        , logits_(group_ * queries_, key_block)
        , sum_(float_matrix::Zero(group_ * queries_, task.value_dim))
        , largest_(static_cast<std::size_t>(query_.rows()), -std::numeric_limits<float>::infinity())
        , weight_(static_cast<std::size_t>(query_.rows()), 0.0F)
    {
        if constexpr (!std::same_as<T, float>)
        {
            key_.resize(key_block, task.key_dim);
            value_.resize(key_block, task.value_dim);
        }
    }

    void run()
    {
        load_queries();
        for (std::int64_t key = 0; key < begin_ + queries_; key += key_block)
        {
            absorb(key, std::min(key_block, begin_ + queries_ - key));
        }
        store();
    }

private:
    [[nodiscard]] std::int64_t query_head(std::int64_t g) const { return kv_head_ * group_ + g; }

    void load_queries()
    {
        float const scale = 1.0F / std::sqrt(static_cast<float>(task_.key_dim));
        for (std::int64_t g = 0; g < group_; ++g)
        {
            for (std::int64_t i = 0; i < queries_; ++i)
            {
                float const* const from =
                    task_.queries + ((begin_ - task_.first + i) * task_.query_heads + query_head(g)) * task_.key_dim;
                query_.row(g * queries_ + i).array() = const_row_view(from, task_.key_dim).transpose() * scale;
            }
        }
    }

    /// Rows of `elements` as floats: in place, or through `buffer`.
    static const_matrix_view floats(T const* elements, std::int64_t rows, std::int64_t columns, float_matrix& buffer)
    {
        float const* data = nullptr;
        if constexpr (std::same_as<T, float>) { data = elements; }
        else
        {
            widen_row(elements, rows * columns, buffer.data());
            data = buffer.data();
        }
        return {data, rows, columns, Eigen::OuterStride<>(columns)};
    }

    void absorb(std::int64_t first_key, std::int64_t count)
    {
        std::int64_t const start = kv_head_ * task_.tokens + first_key;
        auto const keys          = floats(task_.keys + start * task_.key_dim, count, task_.key_dim, key_);
        auto const values        = floats(task_.values + start * task_.value_dim, count, task_.value_dim, value_);
        matrix_view logits(logits_.data(), logits_.rows(), count, Eigen::OuterStride<>(key_block));
        logits.noalias() = query_ * keys.transpose();
        for (std::int64_t row = 0; row < logits_.rows(); ++row)
        {
            std::int64_t const position = begin_ + row % queries_;
            exponentiate(row, std::clamp<std::int64_t>(position + 1 - first_key, 0, count), count);
        }
        sum_.noalias() += logits * values;
    }

    /// Turns the first `visible` logits of a row into weights relative to the largest logit so far; the rest become 0.
    void exponentiate(std::int64_t row, std::int64_t visible, std::int64_t count)
    {
        float* const logits = logits_.data() + row * key_block;
        std::fill(logits + visible, logits + count, 0.0F);
        if (visible == 0) { return; }
        row_view seen(logits, visible);
        auto const r        = static_cast<std::size_t>(row);
        float const largest = std::max(largest_[r], seen.maxCoeff());
        if (largest > largest_[r])
        {
            float const shrink = std::exp(largest_[r] - largest);
            sum_.row(row) *= shrink;
            weight_[r] *= shrink;
            largest_[r] = largest;
        }
        // Weights below e^-80 change no sum, but below e^-87 they would be subnormal numbers, which are slow.
        seen = (seen - largest).max(-80.0F).exp();
        weight_[r] += seen.sum();
    }

    void store() const
    {
        for (std::int64_t row = 0; row < sum_.rows(); ++row)
        {
            auto const r                = static_cast<std::size_t>(row);
            std::int64_t const position = begin_ + row % queries_;
            std::int64_t const head     = query_head(row / queries_);
            float* const to = task_.out + ((position - task_.first) * task_.query_heads + head) * task_.value_dim;
            row_view(to, task_.value_dim) = sum_.row(row).array().transpose() / weight_[r];
            std::int64_t const wanted     = position - task_.lse_first;
            if (wanted >= 0 && wanted < task_.lse_count)
            {
                task_.lse[head * task_.lse_count + wanted] = largest_[r] + std::log(weight_[r]);
            }
        }
    }

    causal_attention<T> const& task_;
    std::int64_t kv_head_, begin_, queries_, group_;
    float_matrix query_;         // [rows, key_dim], scaled
    float_matrix logits_;        // [rows, key_block]
    float_matrix sum_;           // [rows, value_dim], of weights times values
    float_matrix key_, value_;   // [key_block, D], when the elements are no floats
    std::vector<float> largest_; // [rows], logit
    std::vector<float> weight_;  // [rows], sum of weights
};

} // namespace detail

/// Softmax attention of every query over the keys up to its own position, and the natural logarithm of the sum of
/// exponentials of its scaled logits. Memory: a few blocks per thread. Bits do not depend on the executor.
template <mdkv::element T>
void attend_causally(mdkv::cpu::executor_ref executor, causal_attention<T> const& task)
{
    std::int64_t const blocks = (task.count + detail::query_block - 1) / detail::query_block;
    executor.parallel_for(blocks * task.kv_heads, [&](std::int64_t index) {
        // Late blocks see the most keys: begun first, they leave no thread alone at the end.
        std::int64_t const block = blocks - 1 - index / task.kv_heads;
        std::int64_t const begin = task.first + block * detail::query_block;
        std::int64_t const end   = std::min(begin + detail::query_block, task.first + task.count);
        detail::attention_block<T>(task, index % task.kv_heads, begin, end).run();
    });
}

} // namespace runner
