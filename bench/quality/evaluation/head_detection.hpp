/// \file head_detection.hpp: an answer with the full cache, during which every query head's attention to the needle is counted
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "runner/decode.hpp"
#include "runner/eigen.hpp"
#include "runner/element_rows.hpp"
#include "runner/language_model.hpp"
#include "runner/prefill.hpp"
#include "runner/sampler.hpp"
#include "runner/tokenizer.hpp"

namespace runner
{

/// Tokens [begin, end) of a prompt.
struct token_span
{
    std::int64_t begin = 0, end = 0;

    [[nodiscard]] std::int64_t size() const noexcept { return end - begin; }
    [[nodiscard]] bool holds(std::int64_t token) const noexcept { return begin <= token && token < end; }
};

/// Which heads count as important.
enum class head_kind
{
    r2, // HeadKV's retrieval-reasoning score: attention to the needle among the strongest
    r   // the retrieval score: the strongest attention is on the needle's token that is then copied
};

/// The R2 score of one row: of the k strongest attention weights, k being the needle's tokens, the sum of those on the
/// needle, over k. Of equal weights the lower position is stronger.
[[nodiscard]] inline double needle_attention(std::span<float const> attention, token_span needle)
{
    auto const k = std::min(static_cast<std::size_t>(needle.size()), attention.size());
    if (k == 0) { return 0; }
    std::vector<float> strongest(attention.begin(), attention.end());
    std::nth_element(
        strongest.begin(), strongest.begin() + static_cast<std::ptrdiff_t>(k) - 1, strongest.end(), std::greater<>{});
    float const least = strongest[k - 1];
    auto equal        = static_cast<std::int64_t>(k); // places left for weights just as strong as the k-th
    for (float const weight : attention) { equal -= weight > least ? 1 : 0; }
    double sum = 0;
    for (std::int64_t i = 0; i < needle.end; ++i)
    {
        float const weight = attention[static_cast<std::size_t>(i)];
        bool const among   = weight > least || (weight == least && equal-- > 0);
        if (among && needle.holds(i)) { sum += double{weight}; }
    }
    return sum / static_cast<double>(needle.size());
}

/// Position of the strongest weight, the first of equal ones.
[[nodiscard]] inline std::int64_t strongest_position(std::span<float const> attention)
{
    return std::max_element(attention.begin(), attention.end()) - attention.begin();
}

/// The whole cache of a sequence; shows the attention it computes.
template <mdkv::element T>
class watched_cache
{
public:
    watched_cache(model_shape const& shape, std::int64_t tokens)
        : shape_{shape}
        , most_tokens_{tokens}
        , lengths_(static_cast<std::size_t>(shape.layers))
        , keys_(static_cast<std::size_t>(shape.layers * shape.kv_heads))
        , values_(keys_.size())
    {}

    void load(layer_kv<T> const& kv)
    {
        lengths_[static_cast<std::size_t>(kv.layer)] = kv.tokens;
        for (std::int64_t h = 0; h < shape_.kv_heads; ++h)
        {
            append(keys_, kv.layer, h, kv.keys + h * kv.tokens * shape_.key_dim, kv.tokens * shape_.key_dim);
            append(values_, kv.layer, h, kv.values + h * kv.tokens * shape_.value_dim, kv.tokens * shape_.value_dim);
        }
    }

    /// decode_step's callback for a batch of one.
    /// \param watch   void(query head, attention [tokens]), from the executor's threads
    template <class Watch>
    void attend(mdkv::cpu::executor_ref executor, std::int64_t layer, float const* query, float const* key,
        float const* value, float* out, Watch const& watch)
    {
        std::int64_t const tokens = ++lengths_[static_cast<std::size_t>(layer)];
        executor.parallel_for(shape_.kv_heads, [&](std::int64_t h) {
            append_narrow(keys_, layer, h, key + h * shape_.key_dim, shape_.key_dim);
            append_narrow(values_, layer, h, value + h * shape_.value_dim, shape_.value_dim);
            attend_group(layer, h, tokens, query, out, watch);
        });
    }

private:
    using rows = std::vector<std::vector<T>>; // [layers * kv_heads] of [tokens * D]

    [[nodiscard]] std::vector<T>& of(rows& all, std::int64_t layer, std::int64_t head) const
    {
        return all[static_cast<std::size_t>(layer * shape_.kv_heads + head)];
    }
    void append(rows& all, std::int64_t layer, std::int64_t head, T const* first, std::int64_t count)
    {
        std::vector<T>& row = of(all, layer, head);
        row.reserve(static_cast<std::size_t>(most_tokens_ * std::max(shape_.key_dim, shape_.value_dim)));
        row.insert(row.end(), first, first + count);
    }
    void append_narrow(rows& all, std::int64_t layer, std::int64_t head, float const* first, std::int64_t count)
    {
        std::vector<T>& row       = of(all, layer, head);
        std::size_t const already = row.size();
        row.resize(already + static_cast<std::size_t>(count));
        narrow_row(first, count, row.data() + already);
    }

    /// All query heads that share KV head h.
    template <class Watch>
    void attend_group(
        std::int64_t layer, std::int64_t h, std::int64_t tokens, float const* query, float* out, Watch const& watch)
    {
        std::int64_t const group = shape_.query_heads / shape_.kv_heads;
        std::int64_t const first = h * group; // query head
        float_matrix queries     = const_matrix_view(
            query + first * shape_.key_dim, group, shape_.key_dim, Eigen::OuterStride<>(shape_.key_dim));
        round_row<T>(queries.data(), queries.size()); // as in the prefill
        queries *= 1 / std::sqrt(static_cast<float>(shape_.key_dim));
        float_matrix attention(group, tokens);
        each_block(of(keys_, layer, h), shape_.key_dim, tokens, [&](std::int64_t begin, float_matrix const& keys) {
            attention.middleCols(begin, keys.rows()).noalias() = queries * keys.transpose();
        });
        for (std::int64_t g = 0; g < group; ++g)
        {
            row_view row(attention.row(g).data(), tokens);
            row = (row - row.maxCoeff()).exp();
            row /= row.sum();
            watch(first + g, std::span<float const>(row.data(), static_cast<std::size_t>(tokens)));
        }
        matrix_view attended(
            out + first * shape_.value_dim, group, shape_.value_dim, Eigen::OuterStride<>(shape_.value_dim));
        attended.setZero();
        each_block(
            of(values_, layer, h), shape_.value_dim, tokens, [&](std::int64_t begin, float_matrix const& values) {
                attended.noalias() += attention.middleCols(begin, values.rows()) * values;
            });
    }

    template <class Body>
    static void each_block(std::vector<T> const& all, std::int64_t dim, std::int64_t tokens, Body const& body)
    {
        constexpr std::int64_t most = 512; // rows as floats at once
        float_matrix block;
        for (std::int64_t begin = 0; begin < tokens; begin += most)
        {
            block.resize(std::min(most, tokens - begin), dim);
            widen_row(all.data() + begin * dim, block.size(), block.data());
            body(begin, block);
        }
    }

    model_shape shape_;
    std::int64_t most_tokens_;
    std::vector<std::int64_t> lengths_; // [layers]
    rows keys_, values_;
};

/// What a model said, and how every query head looked at the needle meanwhile.
struct watched_answer
{
    std::vector<std::int32_t> tokens;
    std::vector<double> scores; // [layers, query_heads], summed over the steps
};

/// Answers greedily until the text ends, a line does, or there are `most_tokens`. The prompt's last token is the first
/// step, as in HeadKV's detection: its attention leads to the first token of the answer.
///
/// \param progress   void(), now and then; may throw
template <mdkv::element T, class Progress>
[[nodiscard]] watched_answer watch_answer(language_model const& model, tokenizer const& words,
    mdkv::cpu::executor_ref executor, std::span<std::int32_t const> prompt, token_span needle, std::int64_t most_tokens,
    head_kind kind, Progress const& progress)
{
    model_shape const& shape = model.shape();
    auto position            = std::ssize(prompt) - 1;
    watched_cache<T> cache{shape, std::ssize(prompt) + most_tokens};
    static_cast<void>(prefill<T>(
        model, prompt.first(static_cast<std::size_t>(position)), 0, executor,
        [&](layer_kv<T> const& kv) { cache.load(kv); },
        [&](std::int64_t, std::int64_t) {
            progress();
            return true;
        }));

    watched_answer answer;
    answer.scores.resize(static_cast<std::size_t>(shape.layers * shape.query_heads));
    std::vector<std::int64_t> strongest(answer.scores.size());
    std::vector<float> logits(static_cast<std::size_t>(shape.vocabulary));
    decode_workspace space;
    std::int32_t token = prompt.back();
    while (std::ssize(answer.tokens) < most_tokens)
    {
        progress();
        decode_step(
            model, std::span{&token, 1}, std::span{&position, 1}, executor,
            [&](std::int64_t layer, std::int64_t, float const* query, float const* key, float const* value,
                float* out) {
                cache.attend(
                    executor, layer, query, key, value, out, [&](std::int64_t head, std::span<float const> attention) {
                        auto const at = static_cast<std::size_t>(layer * shape.query_heads + head);
                        if (kind == head_kind::r2) { answer.scores[at] += needle_attention(attention, needle); }
                        else { strongest[at] = strongest_position(attention); }
                    });
            },
            logits, space);
        ++position;
        token = greedy_token(logits);
        for (std::size_t at = 0; kind == head_kind::r && at < strongest.size(); ++at)
        {
            bool const copied = needle.holds(strongest[at]) && prompt[static_cast<std::size_t>(strongest[at])] == token;
            if (copied) { answer.scores[at] += 1 / static_cast<double>(needle.size()); }
        }
        if (words.is_end_of_generation(token)) { break; }
        answer.tokens.push_back(token);
        if (words.decode_one(token).find('\n') != std::string_view::npos) { break; }
    }
    return answer;
}

} // namespace runner
