/// \file prefill.hpp: a prompt through the model layer by layer, so that only one layer's keys and values are ever alive
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>

#include "eigen.hpp"
#include "element_rows.hpp"
#include "language_model.hpp"
#include "layers.hpp"
#include "matmul.hpp"
#include "prefill_attention.hpp"

namespace runner
{

/// What one layer's prefill hands to the caller. The memory is reused for the next layer.
template <mdkv::element T>
struct layer_kv
{
    std::int64_t layer, tokens, window;
    T const* keys;    // [kv_heads, tokens, key_dim], after rotation
    T const* values;  // [kv_heads, tokens, value_dim]
    T const* queries; // [query_heads, window, key_dim], of the last `window` tokens, after rotation
    float const* lse; // [query_heads, window], natural log-sum-exp of those rows' scaled logits over all visible keys
};

/// What prefill has when it has attended to one chunk of one layer's tokens. The memory is reused for the next chunk.
template <mdkv::element T>
struct layer_chunk
{
    std::int64_t layer, first, count; // tokens [first, first + count) of the prompt
    std::int64_t tokens;              // of the prompt; keys and values have been computed of the first `first + count`
    T const* keys;                    // [kv_heads, tokens, key_dim], after rotation
    T const* values;                  // [kv_heads, tokens, value_dim]
    T const* queries;                 // [count, query_heads, key_dim], after rotation
};

/// For prefills whose chunks are not looked at.
struct ignore_chunks
{};

/// The progress callback asked for an end.
struct prefill_cancelled : std::runtime_error
{
    prefill_cancelled()
        : std::runtime_error("the prefill was cancelled")
    {}
};

namespace detail
{

inline constexpr std::int64_t chunk_tokens = 512; // bounds the activations; a multiple of the attention's query block

template <mdkv::element T>
class prefill_run
{
public:
    prefill_run(language_model const& model, std::span<std::int32_t const> tokens, std::int64_t window,
        mdkv::cpu::executor_ref executor)
        : model_{model}
        , shape_{model.shape()}
        , executor_{executor}
        , tokens_{std::ssize(tokens)}
        , window_{std::min(window, tokens_)}
        , hidden_(tokens_, shape_.embedding)
        , angles_(tokens_, model.rotation().table_size())
        , keys_(static_cast<std::size_t>(shape_.kv_heads * tokens_ * shape_.key_dim))
        , values_(static_cast<std::size_t>(shape_.kv_heads * tokens_ * shape_.value_dim))
        , queries_(static_cast<std::size_t>(shape_.query_heads * window_ * shape_.key_dim))
        , lse_(static_cast<std::size_t>(shape_.query_heads * window_))
    {
        std::int64_t const rows = std::min(chunk_tokens, tokens_);
        normed_.resize(rows, shape_.embedding);
        query_.resize(rows, shape_.query_heads * shape_.key_dim);
        key_.resize(rows, shape_.kv_heads * shape_.key_dim);
        value_.resize(rows, shape_.kv_heads * shape_.value_dim);
        attended_.resize(rows, shape_.query_heads * shape_.value_dim);
        gate_.resize(rows, shape_.feed_forward);
        up_.resize(rows, shape_.feed_forward);
        each_row(tokens_, [&](std::int64_t i) {
            model_.embedding().dequantise_rows(tokens[static_cast<std::size_t>(i)], 1, hidden_.row(i).data());
            model_.rotation().angles(i, angles_.row(i).data());
        });
    }

    template <class OnLayer, class Progress, class OnChunk>
    std::vector<float> run(OnLayer&& on_layer, Progress&& progress, OnChunk&& on_chunk)
    {
        constexpr bool shows_chunks = !std::same_as<std::remove_cvref_t<OnChunk>, ignore_chunks>;
        if (shows_chunks) { chunk_queries_.resize(static_cast<std::size_t>(query_.size())); }
        for (std::int64_t layer = 0; layer < shape_.layers; ++layer)
        {
            for (std::int64_t first = 0; first < tokens_; first += chunk_tokens)
            {
                std::int64_t const count = std::min(chunk_tokens, tokens_ - first);
                run_attention(model_.layer(layer), first, count);
                if constexpr (shows_chunks)
                {
                    narrow_row(query_.data(), count * query_.cols(), chunk_queries_.data());
                    on_chunk(layer_chunk<T>{
                        layer, first, count, tokens_, keys_.data(), values_.data(), chunk_queries_.data()});
                }
                run_feed_forward(model_.layer(layer), first, count);
                if (!progress(layer * tokens_ + first + count, shape_.layers * tokens_)) { throw prefill_cancelled{}; }
            }
            on_layer(layer_kv<T>{layer, tokens_, window_, keys_.data(), values_.data(), queries_.data(), lse_.data()});
        }
        rms_norm(hidden_.row(tokens_ - 1).data(), model_.output_norm().data(), shape_.embedding, shape_.rms_epsilon,
            normed_.data());
        std::vector<float> logits(static_cast<std::size_t>(shape_.vocabulary));
        multiply(executor_, model_.output(), normed_.data(), 1, logits.data());
        return logits;
    }

private:
    /// body(i) for i in [0, count), some rows per piece of work.
    template <class Body>
    void each_row(std::int64_t count, Body const& body) const
    {
        constexpr std::int64_t rows = 32;
        executor_.parallel_for((count + rows - 1) / rows, [&](std::int64_t piece) {
            for (std::int64_t i = piece * rows; i < std::min(count, (piece + 1) * rows); ++i) { body(i); }
        });
    }

    void normalise(std::vector<float> const& weight, std::int64_t first, std::int64_t count)
    {
        each_row(count, [&](std::int64_t i) {
            rms_norm(hidden_.row(first + i).data(), weight.data(), shape_.embedding, shape_.rms_epsilon,
                normed_.row(i).data());
        });
    }

    void add_to_hidden(float_matrix const& change, std::int64_t first, std::int64_t count)
    {
        each_row(count, [&](std::int64_t i) { hidden_.row(first + i) += change.row(i); });
    }

    void run_attention(layer_weights const& weights, std::int64_t first, std::int64_t count)
    {
        normalise(weights.attention_norm, first, count);
        multiply(executor_,
            {{&weights.query, query_.data()}, {&weights.key, key_.data()}, {&weights.value, value_.data()}},
            normed_.data(), count);
        each_row(count, [&](std::int64_t i) { place_token(weights, first + i, i); });
        attend_causally<T>(executor_, {.query_heads  = shape_.query_heads,
                                          .kv_heads  = shape_.kv_heads,
                                          .key_dim   = shape_.key_dim,
                                          .value_dim = shape_.value_dim,
                                          .first     = first,
                                          .count     = count,
                                          .tokens    = tokens_,
                                          .queries   = query_.data(),
                                          .keys      = keys_.data(),
                                          .values    = values_.data(),
                                          .out       = attended_.data(),
                                          .lse_first = tokens_ - window_,
                                          .lse_count = window_,
                                          .lse       = lse_.data()});
        multiply(executor_, weights.attention_output, attended_.data(), count, normed_.data());
        add_to_hidden(normed_, first, count);
    }

    /// Adds biases to row `i` of the chunk, which is the token at `position`, rotates and rounds it, and stores what
    /// outlives the chunk.
    void place_token(layer_weights const& weights, std::int64_t position, std::int64_t i)
    {
        add_bias(weights.query_bias, query_.row(i).data());
        add_bias(weights.key_bias, key_.row(i).data());
        add_bias(weights.value_bias, value_.row(i).data());
        float const* const angles = angles_.row(position).data();
        for (std::int64_t h = 0; h < shape_.query_heads; ++h)
        {
            float* const query = query_.row(i).data() + h * shape_.key_dim;
            model_.rotation().turn(query, angles);
            round_row<T>(query, shape_.key_dim);
            std::int64_t const row = position - (tokens_ - window_);
            if (row >= 0) { narrow_row(query, shape_.key_dim, queries_.data() + (h * window_ + row) * shape_.key_dim); }
        }
        for (std::int64_t h = 0; h < shape_.kv_heads; ++h)
        {
            float* const key          = key_.row(i).data() + h * shape_.key_dim;
            std::int64_t const stored = h * tokens_ + position;
            model_.rotation().turn(key, angles);
            narrow_row(key, shape_.key_dim, keys_.data() + stored * shape_.key_dim);
            narrow_row(value_.row(i).data() + h * shape_.value_dim, shape_.value_dim,
                values_.data() + stored * shape_.value_dim);
        }
    }

    void run_feed_forward(layer_weights const& weights, std::int64_t first, std::int64_t count)
    {
        normalise(weights.feed_forward_norm, first, count);
        multiply(executor_, {{&weights.gate, gate_.data()}, {&weights.up, up_.data()}}, normed_.data(), count);
        each_row(
            count, [&](std::int64_t i) { gated_silu(gate_.row(i).data(), up_.row(i).data(), shape_.feed_forward); });
        multiply(executor_, weights.down, gate_.data(), count, normed_.data());
        add_to_hidden(normed_, first, count);
    }

    language_model const& model_;
    model_shape const& shape_;
    mdkv::cpu::executor_ref executor_;
    std::int64_t tokens_, window_;
    float_matrix hidden_;                         // [tokens, embedding], the residual stream
    float_matrix angles_;                         // [tokens, key_dim or less]
    std::vector<T> keys_;                         // [kv_heads, tokens, key_dim]
    std::vector<T> values_;                       // [kv_heads, tokens, value_dim]
    std::vector<T> queries_;                      // [query_heads, window, key_dim]
    std::vector<T> chunk_queries_;                // [chunk, query_heads, key_dim], if chunks are shown
    std::vector<float> lse_;                      // [query_heads, window]
    float_matrix normed_;                         // [chunk, embedding]
    float_matrix query_, key_, value_, attended_; // [chunk, heads * D]
    float_matrix gate_, up_;                      // [chunk, feed_forward]
};

} // namespace detail

/// Runs the prompt and returns the logits [vocabulary] of its last token. Keys, values and queries are rounded to T as
/// soon as they are computed, and the attention reads the rounded ones: a cache of T made from them continues exactly
/// what was computed here. All arithmetic is in float.
///
/// \param window     how many last tokens' queries and log-sum-exps `on_layer` receives; cut to the number of tokens
/// \param on_layer   void(layer_kv<T> const&), after each layer, in the calling thread
/// \param progress   bool(done, total), in token-layers, in the calling thread; false cancels
/// \param on_chunk   void(layer_chunk<T> const&), after each chunk's attention, in the calling thread; or ignore_chunks
/// \cost   memory: the residual stream and one layer's keys and values for all tokens, activations of one chunk
/// \throws std::invalid_argument   no tokens, more than the model's context, one outside the vocabulary, window < 0
/// \throws prefill_cancelled       `progress` returned false
template <mdkv::element T, class OnLayer, class Progress, class OnChunk = ignore_chunks>
[[nodiscard]] std::vector<float> prefill(language_model const& model, std::span<std::int32_t const> tokens,
    std::int64_t window, mdkv::cpu::executor_ref executor, OnLayer&& on_layer, Progress&& progress,
    OnChunk&& on_chunk = {})
{
    if (tokens.empty()) { throw std::invalid_argument("prefill: there are no tokens"); }
    if (std::ssize(tokens) > model.shape().context)
    {
        throw std::invalid_argument("prefill: " + std::to_string(tokens.size()) + " tokens are more than the model's "
                                    + std::to_string(model.shape().context) + " tokens of context");
    }
    if (window < 0) { throw std::invalid_argument("prefill: window is " + std::to_string(window) + ", below 0"); }
    expect_tokens(model, tokens, "prefill");
    return detail::prefill_run<T>(model, tokens, window, executor).run(on_layer, progress, on_chunk);
}

} // namespace runner
