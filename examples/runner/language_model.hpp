/// \file language_model.hpp: a model of a known architecture as a GGUF file describes it: its shape and its weights
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "architecture.hpp"
#include "dequantise.hpp"
#include "file_error.hpp"
#include "gguf.hpp"
#include "layers.hpp"
#include "matmul.hpp"

namespace runner
{

struct model_shape
{
    std::int64_t layers, embedding, feed_forward, query_heads, kv_heads, key_dim, value_dim, vocabulary, context;
    float rms_epsilon, rope_base;
};

struct layer_weights
{
    std::vector<float> attention_norm; // [embedding]
    weight_matrix query, key, value;   // [query_heads * key_dim], [kv_heads * key_dim], [kv_heads * value_dim]
    std::vector<float> query_bias, key_bias, value_bias; // one for each row of these; empty: none
    weight_matrix attention_output;                      // [embedding] of query_heads * value_dim
    std::vector<float> feed_forward_norm;                // [embedding]
    weight_matrix gate, up, down;                        // [feed_forward], [feed_forward], [embedding]
};

/// Keeps the file's bytes alive and refers to the matrices in them. Refuses what it would compute wrongly.
class language_model
{
public:
    /// \throws file_error   another architecture, an unsupported variant of one, tensors that are absent, misshapen or
    ///                      not read, another number of tokens than the embedding has rows
    [[nodiscard]] static language_model load(gguf_file const& file) { return language_model(file); }

    [[nodiscard]] model_shape const& shape() const noexcept { return shape_; }
    [[nodiscard]] rotary const& rotation() const noexcept { return rotation_; }
    [[nodiscard]] layer_weights const& layer(std::int64_t index) const
    {
        return layers_[static_cast<std::size_t>(index)];
    }
    [[nodiscard]] weight_matrix const& embedding() const noexcept { return embedding_; } // [vocabulary, embedding]
    [[nodiscard]] std::vector<float> const& output_norm() const noexcept { return output_norm_; }
    [[nodiscard]] weight_matrix const& output() const noexcept { return output_; } // [vocabulary, embedding]

private:
    static constexpr std::int64_t most_layers = 4096; // no such model is near it; keeps hostile counts harmless
    static constexpr std::int64_t most_extent = std::int64_t{1} << 24;

    explicit language_model(gguf_file const& file)
        : file_{file}
        , architecture_{architecture_of(file_)}
    {
        expect_known_keys(file_, architecture_);
        read_shape();
        read_rotation();
        embedding_        = matrix("token_embd.weight", file_.tensor("token_embd.weight").dims[1], shape_.embedding);
        shape_.vocabulary = embedding_.rows();
        expect_token_count();
        for (std::int64_t i = 0; i < shape_.layers; ++i) { read_layer(i); }
        output_norm_    = vector("output_norm.weight", shape_.embedding);
        bool const tied = file_.find_tensor("output.weight") == nullptr;
        output_         = tied ? embedding_ : matrix("output.weight", shape_.vocabulary, shape_.embedding);
        refuse_unread_tensors();
    }

    /// A token without a row could not be fed, and a row without a token could be made but not written.
    void expect_token_count() const
    {
        constexpr std::string_view key = "tokenizer.ggml.tokens";
        if (!file_.has(key)) { return; }
        auto const tokens = static_cast<std::int64_t>(file_.array_length(key));
        if (tokens != shape_.vocabulary)
        {
            file_.refuse(key, "has another number of entries than tensor \"token_embd.weight\" has rows",
                std::to_string(tokens), std::to_string(shape_.vocabulary));
        }
    }

    /// A tensor beyond those of the architecture stands for a step that is not computed: a bias, a norm, another layer.
    void refuse_unread_tensors() const
    {
        for (tensor_info const& tensor : file_.tensors())
        {
            if (read_.contains(tensor.name)) { continue; }
            throw file_error(file_.name(),
                joined("tensor ", quoted(tensor.name), " is not supported: no step of the computation reads it"));
        }
    }

    void read_shape()
    {
        shape_.layers       = extent(full_key("block_count"), most_layers);
        shape_.embedding    = extent(full_key("embedding_length"), most_extent);
        shape_.feed_forward = extent(full_key("feed_forward_length"), most_extent);
        shape_.query_heads  = extent(full_key("attention.head_count"), most_extent);
        shape_.kv_heads     = extent(full_key("attention.head_count_kv"), most_extent, shape_.query_heads);
        shape_.context      = extent(full_key("context_length"), std::numeric_limits<std::int32_t>::max());
        if (shape_.query_heads % shape_.kv_heads != 0)
        {
            file_.refuse(full_key("attention.head_count_kv"), "does not divide the number of query heads",
                std::to_string(shape_.kv_heads), std::to_string(shape_.query_heads));
        }
        bool const has_dims =
            file_.has(full_key("attention.key_length")) && file_.has(full_key("attention.value_length"));
        if (!has_dims && shape_.embedding % shape_.query_heads != 0)
        {
            file_.refuse(full_key("attention.head_count"), "does not divide the embedding length",
                std::to_string(shape_.query_heads), std::to_string(shape_.embedding));
        }
        std::int64_t const head_dim = shape_.embedding / shape_.query_heads;
        shape_.key_dim              = extent(full_key("attention.key_length"), most_extent, head_dim);
        shape_.value_dim            = extent(full_key("attention.value_length"), most_extent, head_dim);
        shape_.rms_epsilon          = positive(
            full_key("attention.layer_norm_rms_epsilon"), file_.number(full_key("attention.layer_norm_rms_epsilon")));
        shape_.rope_base =
            positive(full_key("rope.freq_base"), file_.find_number(full_key("rope.freq_base")).value_or(10000));
    }

    void read_rotation()
    {
        std::string const name         = full_key("rope.dimension_count");
        std::int64_t const coordinates = extent(name, shape_.key_dim, shape_.key_dim);
        if (coordinates % 2 != 0) { file_.refuse(name, "is odd", std::to_string(coordinates)); }
        std::vector<float> factors;
        if (file_.find_tensor("rope_freqs.weight") != nullptr)
        {
            factors = vector("rope_freqs.weight", coordinates / 2);
            for (float const factor : factors)
            {
                if (!(factor > 0) || !std::isfinite(factor))
                {
                    throw file_error(file_.name(), "tensor \"rope_freqs.weight\" holds a factor that is not positive",
                        {}, std::to_string(factor));
                }
            }
        }
        rotation_ = rotary(coordinates, double{shape_.rope_base}, factors, architecture_.pairs);
    }

    void read_layer(std::int64_t index)
    {
        std::string const prefix = "blk." + std::to_string(index) + ".";
        model_shape const& s     = shape_;
        layer_weights weights;
        weights.attention_norm = vector(prefix + "attn_norm.weight", s.embedding);
        weights.query          = matrix(prefix + "attn_q.weight", s.query_heads * s.key_dim, s.embedding);
        weights.key            = matrix(prefix + "attn_k.weight", s.kv_heads * s.key_dim, s.embedding);
        weights.value          = matrix(prefix + "attn_v.weight", s.kv_heads * s.value_dim, s.embedding);
        if (architecture_.biases)
        {
            weights.query_bias = vector(prefix + "attn_q.bias", s.query_heads * s.key_dim);
            weights.key_bias   = vector(prefix + "attn_k.bias", s.kv_heads * s.key_dim);
            weights.value_bias = vector(prefix + "attn_v.bias", s.kv_heads * s.value_dim);
        }
        weights.attention_output  = matrix(prefix + "attn_output.weight", s.embedding, s.query_heads * s.value_dim);
        weights.feed_forward_norm = vector(prefix + "ffn_norm.weight", s.embedding);
        weights.gate              = matrix(prefix + "ffn_gate.weight", s.feed_forward, s.embedding);
        weights.up                = matrix(prefix + "ffn_up.weight", s.feed_forward, s.embedding);
        weights.down              = matrix(prefix + "ffn_down.weight", s.embedding, s.feed_forward);
        layers_.push_back(std::move(weights));
    }

    /// A metadata key of the architecture.
    [[nodiscard]] std::string full_key(std::string_view name) const { return joined(architecture_.name, ".", name); }

    /// A count of at least 1 and at most `most`.
    [[nodiscard]] std::int64_t extent(std::string_view key, std::int64_t most, std::int64_t when_absent = 0) const
    {
        std::int64_t const value = when_absent > 0 ? file_.find_integer(key).value_or(when_absent) : file_.integer(key);
        if (value < 1 || value > most)
        {
            file_.refuse(key, "is out of range", std::to_string(value), "1 to " + std::to_string(most));
        }
        return value;
    }

    [[nodiscard]] float positive(std::string_view key, double value) const
    {
        auto const single = static_cast<float>(value);
        if (!(single > 0) || !std::isfinite(single))
        {
            file_.refuse(key, "is not a positive number", std::to_string(value));
        }
        return single;
    }

    /// The tensor of that name, which the computation reads.
    [[nodiscard]] tensor_info const& take(std::string const& name)
    {
        tensor_info const& tensor = file_.tensor(name);
        read_.insert(tensor.name);
        return tensor;
    }

    [[nodiscard]] std::vector<float> vector(std::string const& name, std::int64_t count)
    {
        tensor_info const& tensor = take(name);
        if (tensor.n_dims != 1 || tensor.dims[0] != count)
        {
            throw file_error(file_.name(), "tensor \"" + name + "\" has another number of elements", {},
                std::to_string(tensor.elements()), std::to_string(count));
        }
        std::vector<float> out(static_cast<std::size_t>(count));
        dequantise(tensor.type, tensor.data.data(), count, out.data());
        return out;
    }

    [[nodiscard]] weight_matrix matrix(std::string const& name, std::int64_t rows, std::int64_t columns)
    {
        tensor_info const& tensor = take(name);
        if (tensor.n_dims != 2 || tensor.dims[0] != columns || tensor.dims[1] != rows)
        {
            throw file_error(file_.name(), "tensor \"" + name + "\" has another shape", {},
                std::to_string(tensor.dims[0]) + " x " + std::to_string(tensor.dims[1]),
                std::to_string(columns) + " x " + std::to_string(rows));
        }
        return weight_matrix(tensor);
    }

    gguf_file file_;
    architecture architecture_;
    model_shape shape_{};
    rotary rotation_;
    std::vector<layer_weights> layers_;
    weight_matrix embedding_;
    weight_matrix output_;
    std::vector<float> output_norm_;
    std::set<std::string_view> read_; // names of the tensors that the computation reads
};

/// \throws std::invalid_argument   a token is outside the model's vocabulary; `caller` begins the message
inline void expect_tokens(language_model const& model, std::span<std::int32_t const> tokens, std::string const& caller)
{
    for (std::int32_t const token : tokens)
    {
        if (token < 0 || token >= model.shape().vocabulary)
        {
            throw std::invalid_argument(caller + ": token " + std::to_string(token) + " is outside the vocabulary of "
                                        + std::to_string(model.shape().vocabulary));
        }
    }
}

} // namespace runner
