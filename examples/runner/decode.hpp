/// \file decode.hpp: one further token of several independent sequences in lock step, so that weights are read once for all
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

#include <mdkv/cpu/executor.hpp>

#include "eigen.hpp"
#include "language_model.hpp"
#include "layers.hpp"
#include "matmul.hpp"

namespace runner
{

/// The activations of a step; it can be used again and allocates only when the batch changes.
class decode_workspace
{
public:
    float_matrix hidden, normed;              // [batch, embedding]
    float_matrix query, key, value, attended; // [batch, heads * D]
    float_matrix gate, up;                    // [batch, feed_forward]
    float_matrix angles;                      // [batch, rotated coordinates]

    void fit(model_shape const& s, std::int64_t batch, std::int64_t rotated)
    {
        hidden.resize(batch, s.embedding);
        normed.resize(batch, s.embedding);
        query.resize(batch, s.query_heads * s.key_dim);
        key.resize(batch, s.kv_heads * s.key_dim);
        value.resize(batch, s.kv_heads * s.value_dim);
        attended.resize(batch, s.query_heads * s.value_dim);
        gate.resize(batch, s.feed_forward);
        up.resize(batch, s.feed_forward);
        angles.resize(batch, rotated);
    }
};

namespace detail
{

/// Shapes, tokens and positions of a step, before anything is computed.
inline void expect_step(language_model const& model, std::span<std::int32_t const> tokens,
    std::span<std::int64_t const> positions, std::span<float> logits)
{
    if (tokens.empty()) { throw std::invalid_argument("decode_step: there are no sequences"); }
    if (positions.size() != tokens.size())
    {
        throw std::invalid_argument("decode_step: " + std::to_string(positions.size()) + " positions for "
                                    + std::to_string(tokens.size()) + " tokens");
    }
    if (std::ssize(logits) != std::ssize(tokens) * model.shape().vocabulary)
    {
        throw std::invalid_argument("decode_step: logits has room for " + std::to_string(logits.size())
                                    + " values, needed are "
                                    + std::to_string(std::ssize(tokens) * model.shape().vocabulary));
    }
    for (std::int64_t const position : positions)
    {
        if (position < 0 || position >= model.shape().context)
        {
            throw std::invalid_argument("decode_step: position " + std::to_string(position)
                                        + " is outside the model's context of "
                                        + std::to_string(model.shape().context));
        }
    }
    expect_tokens(model, tokens, "decode_step");
}

/// body(i) for i in [0, count), some rows per piece of work.
template <class Body>
void for_rows(mdkv::cpu::executor_ref executor, std::int64_t count, Body const& body)
{
    constexpr std::int64_t rows = 32;
    executor.parallel_for((count + rows - 1) / rows, [&](std::int64_t piece) {
        for (std::int64_t i = piece * rows; i < std::min(count, (piece + 1) * rows); ++i) { body(i); }
    });
}

/// The attention half of a layer, up to and including the residual.
/// \param attention   void(layer): reads `query`, `key` and `value` of `space`, and writes `attended`
template <class Attention>
void attention_half(language_model const& model, std::int64_t layer, mdkv::cpu::executor_ref executor,
    Attention const& attention, decode_workspace& space)
{
    model_shape const& shape     = model.shape();
    layer_weights const& weights = model.layer(layer);
    std::int64_t const batch     = space.hidden.rows();
    for_rows(executor, batch, [&](std::int64_t b) {
        rms_norm(space.hidden.row(b).data(), weights.attention_norm.data(), shape.embedding, shape.rms_epsilon,
            space.normed.row(b).data());
    });
    multiply(executor,
        {{&weights.query, space.query.data()}, {&weights.key, space.key.data()}, {&weights.value, space.value.data()}},
        space.normed.data(), batch);
    for_rows(executor, batch, [&](std::int64_t b) {
        add_bias(weights.query_bias, space.query.row(b).data());
        add_bias(weights.key_bias, space.key.row(b).data());
        add_bias(weights.value_bias, space.value.row(b).data());
        float const* const angles = space.angles.row(b).data();
        for (std::int64_t h = 0; h < shape.query_heads; ++h)
        {
            model.rotation().turn(space.query.row(b).data() + h * shape.key_dim, angles);
        }
        for (std::int64_t h = 0; h < shape.kv_heads; ++h)
        {
            model.rotation().turn(space.key.row(b).data() + h * shape.key_dim, angles);
        }
    });
    attention(layer);
    multiply(executor, weights.attention_output, space.attended.data(), batch, space.normed.data());
    for_rows(executor, batch, [&](std::int64_t b) { space.hidden.row(b) += space.normed.row(b); });
}

inline void feed_forward_half(
    language_model const& model, std::int64_t layer, mdkv::cpu::executor_ref executor, decode_workspace& space)
{
    model_shape const& shape     = model.shape();
    layer_weights const& weights = model.layer(layer);
    std::int64_t const batch     = space.hidden.rows();
    for_rows(executor, batch, [&](std::int64_t b) {
        rms_norm(space.hidden.row(b).data(), weights.feed_forward_norm.data(), shape.embedding, shape.rms_epsilon,
            space.normed.row(b).data());
    });
    multiply(
        executor, {{&weights.gate, space.gate.data()}, {&weights.up, space.up.data()}}, space.normed.data(), batch);
    for_rows(executor, batch,
        [&](std::int64_t b) { gated_silu(space.gate.row(b).data(), space.up.row(b).data(), shape.feed_forward); });
    multiply(executor, weights.down, space.gate.data(), batch, space.normed.data());
    for_rows(executor, batch, [&](std::int64_t b) { space.hidden.row(b) += space.normed.row(b); });
}

/// Token ids [B] at positions [B] through all layers: their last hidden states are `space.hidden`.
/// \param attention   see attention_half
template <class Attention>
void run_layers(language_model const& model, std::span<std::int32_t const> tokens,
    std::span<std::int64_t const> positions, mdkv::cpu::executor_ref executor, Attention const& attention,
    decode_workspace& space)
{
    space.fit(model.shape(), std::ssize(tokens), model.rotation().table_size());
    for (std::size_t b = 0; b < tokens.size(); ++b)
    {
        auto const row = static_cast<std::int64_t>(b);
        model.embedding().dequantise_rows(tokens[b], 1, space.hidden.row(row).data());
        model.rotation().angles(positions[b], space.angles.row(row).data());
    }
    for (std::int64_t layer = 0; layer < model.shape().layers; ++layer)
    {
        attention_half(model, layer, executor, attention, space);
        feed_forward_half(model, layer, executor, space);
    }
}

/// Logits [B, vocabulary] of the last B rows of `space.hidden`.
inline void find_logits(language_model const& model, std::int64_t batch, mdkv::cpu::executor_ref executor,
    std::span<float> logits, decode_workspace& space)
{
    model_shape const& shape = model.shape();
    std::int64_t const first = space.hidden.rows() - batch;
    for (std::int64_t b = 0; b < batch; ++b)
    {
        rms_norm(space.hidden.row(first + b).data(), model.output_norm().data(), shape.embedding, shape.rms_epsilon,
            space.normed.row(b).data());
    }
    multiply(executor, model.output(), space.normed.data(), batch, logits.data());
}

} // namespace detail

/// One step of B independent sequences: token ids [B] at positions [B] give logits [B, vocabulary].
///
/// \param attention   void(layer, b, query, key, value, out), called once for every layer and sequence b: appends
///                    key [kv_heads * key_dim] and value [kv_heads * value_dim] to the cache of b, then writes the
///                    attention of query [query_heads * key_dim] over that cache to out [query_heads * value_dim].
///                    Keys and queries are rotated. With B > 1 it is called for several b at once from the executor's
///                    threads, so it must not start a loop on the same executor; with B = 1 it may.
/// \order  bits do not depend on the executor; they may differ with the size of the batch
/// \throws std::invalid_argument   sizes disagree, a token is outside the vocabulary or a position outside the context
template <class Attention>
void decode_step(language_model const& model, std::span<std::int32_t const> tokens,
    std::span<std::int64_t const> positions, mdkv::cpu::executor_ref executor, Attention&& attention,
    std::span<float> logits, decode_workspace& space)
{
    detail::expect_step(model, tokens, positions, logits);
    std::int64_t const batch = std::ssize(tokens);
    auto const of_layer      = [&](std::int64_t layer) {
        executor.parallel_for(batch, [&](std::int64_t b) {
            attention(layer, b, static_cast<float const*>(space.query.row(b).data()),
                     static_cast<float const*>(space.key.row(b).data()),
                     static_cast<float const*>(space.value.row(b).data()), space.attended.row(b).data());
        });
    };
    detail::run_layers(model, tokens, positions, executor, of_layer, space);
    detail::find_logits(model, batch, executor, logits, space);
}

} // namespace runner
