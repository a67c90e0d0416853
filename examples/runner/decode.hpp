/// \file decode.hpp: one further token of several independent sequences in lock step, so that weights are read once for all
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

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

/// The attention half of a layer, up to and including the residual.
template <class Attention>
void decode_attention(language_model const& model, std::int64_t layer, mdkv::cpu::executor_ref executor,
    Attention&& attention, decode_workspace& space)
{
    model_shape const& shape     = model.shape();
    layer_weights const& weights = model.layer(layer);
    std::int64_t const batch     = space.hidden.rows();
    for (std::int64_t b = 0; b < batch; ++b)
    {
        rms_norm(space.hidden.row(b).data(), weights.attention_norm.data(), shape.embedding, shape.rms_epsilon,
            space.normed.row(b).data());
    }
    multiply(executor,
        {{&weights.query, space.query.data()}, {&weights.key, space.key.data()}, {&weights.value, space.value.data()}},
        space.normed.data(), batch);
    for (std::int64_t b = 0; b < batch; ++b)
    {
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
    }
    executor.parallel_for(batch, [&](std::int64_t b) {
        attention(layer, b, static_cast<float const*>(space.query.row(b).data()),
            static_cast<float const*>(space.key.row(b).data()), static_cast<float const*>(space.value.row(b).data()),
            space.attended.row(b).data());
    });
    multiply(executor, weights.attention_output, space.attended.data(), batch, space.normed.data());
    space.hidden += space.normed;
}

inline void decode_feed_forward(
    language_model const& model, std::int64_t layer, mdkv::cpu::executor_ref executor, decode_workspace& space)
{
    model_shape const& shape     = model.shape();
    layer_weights const& weights = model.layer(layer);
    std::int64_t const batch     = space.hidden.rows();
    for (std::int64_t b = 0; b < batch; ++b)
    {
        rms_norm(space.hidden.row(b).data(), weights.feed_forward_norm.data(), shape.embedding, shape.rms_epsilon,
            space.normed.row(b).data());
    }
    multiply(
        executor, {{&weights.gate, space.gate.data()}, {&weights.up, space.up.data()}}, space.normed.data(), batch);
    gated_silu(space.gate.data(), space.up.data(), space.gate.size());
    multiply(executor, weights.down, space.gate.data(), batch, space.normed.data());
    space.hidden += space.normed;
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
    model_shape const& shape = model.shape();
    std::int64_t const batch = std::ssize(tokens);
    space.fit(shape, batch, model.rotation().table_size());
    for (std::int64_t b = 0; b < batch; ++b)
    {
        auto const i = static_cast<std::size_t>(b);
        model.embedding().dequantise_rows(tokens[i], 1, space.hidden.row(b).data());
        model.rotation().angles(positions[i], space.angles.row(b).data());
    }
    for (std::int64_t layer = 0; layer < shape.layers; ++layer)
    {
        detail::decode_attention(model, layer, executor, attention, space);
        detail::decode_feed_forward(model, layer, executor, space);
    }
    for (std::int64_t b = 0; b < batch; ++b)
    {
        rms_norm(space.hidden.row(b).data(), model.output_norm().data(), shape.embedding, shape.rms_epsilon,
            space.normed.row(b).data());
    }
    multiply(executor, model.output(), space.normed.data(), batch, logits.data());
}

} // namespace runner
