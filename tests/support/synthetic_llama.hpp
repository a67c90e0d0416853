/// \file synthetic_llama.hpp: a tiny random llama or qwen2, as a GGUF file and as a forward pass by the definition in double
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "support/gguf_writer.hpp"
#include "support/random.hpp"

namespace support
{

struct llama_sizes
{
    std::int64_t layers = 2, embedding = 24, feed_forward = 40, query_heads = 6, kv_heads = 2;
    std::int64_t key_dim = 8, value_dim = 12, rotated = 8, vocabulary = 50, context = 2048;
    bool rope_factors = true, own_output = true;
    bool qwen2 = false; // biases of queries, keys and values; the halves of a head's rotated coordinates are pairs
};

/// What the definition gives for a text: everything the runner hands out, at every position.
struct naive_result
{
    std::vector<std::vector<double>> logits;                             // [tokens] of [vocabulary]
    std::vector<std::vector<std::vector<double>>> queries, keys, values; // [layers][tokens] of [heads * D], rotated
    std::vector<std::vector<std::vector<double>>> lse;                   // [layers][tokens] of [query_heads]
};

class synthetic_llama
{
public:
    explicit synthetic_llama(llama_sizes const& sizes, std::int64_t salt = 0)
        : sizes_{sizes}
    {
        source random("synthetic llama", salt);
        auto const add = [&](std::string const& name, std::int64_t rows, std::int64_t columns, double spread) {
            for (std::int64_t i = 0; i < rows * columns; ++i)
            {
                weights_[name].push_back(static_cast<float>(spread * random.normal()));
            }
        };
        auto const add_bias = [&](std::string const& name, std::int64_t count) {
            if (sizes_.qwen2) { add(name, 1, count, 1.0); }
        };
        auto const add_norm = [&](std::string const& name) {
            for (std::int64_t i = 0; i < sizes_.embedding; ++i)
            {
                weights_[name].push_back(static_cast<float>(random.uniform(0.5, 1.5)));
            }
        };
        std::int64_t const e = sizes_.embedding;
        add("token_embd.weight", sizes_.vocabulary, e, 1.0);
        for (std::int64_t layer = 0; layer < sizes_.layers; ++layer)
        {
            std::string const b = "blk." + std::to_string(layer) + ".";
            add_norm(b + "attn_norm.weight");
            add(b + "attn_q.weight", sizes_.query_heads * sizes_.key_dim, e, 0.3);
            add(b + "attn_k.weight", sizes_.kv_heads * sizes_.key_dim, e, 0.3);
            add(b + "attn_v.weight", sizes_.kv_heads * sizes_.value_dim, e, 0.3);
            add_bias(b + "attn_q.bias", sizes_.query_heads * sizes_.key_dim);
            add_bias(b + "attn_k.bias", sizes_.kv_heads * sizes_.key_dim);
            add_bias(b + "attn_v.bias", sizes_.kv_heads * sizes_.value_dim);
            add(b + "attn_output.weight", e, sizes_.query_heads * sizes_.value_dim, 0.2);
            add_norm(b + "ffn_norm.weight");
            add(b + "ffn_gate.weight", sizes_.feed_forward, e, 0.3);
            add(b + "ffn_up.weight", sizes_.feed_forward, e, 0.3);
            add(b + "ffn_down.weight", e, sizes_.feed_forward, 0.2);
        }
        add_norm("output_norm.weight");
        if (sizes_.own_output) { add("output.weight", sizes_.vocabulary, e, 0.3); }
        for (std::int64_t i = 0; sizes_.rope_factors && i < sizes_.rotated / 2; ++i)
        {
            weights_["rope_freqs.weight"].push_back(static_cast<float>(random.uniform(1.0, 8.0)));
        }
    }

    [[nodiscard]] llama_sizes const& sizes() const { return sizes_; }

    /// Everything a loader needs; a test may add or leave out more through the returned writer.
    [[nodiscard]] gguf_writer writer() const
    {
        gguf_writer out;
        std::string const own = sizes_.qwen2 ? "qwen2" : "llama";
        auto const count      = [&](char const* key, std::int64_t value) {
            out.u32(own + key, static_cast<std::uint32_t>(value));
        };
        out.text("general.architecture", own);
        count(".block_count", sizes_.layers);
        count(".embedding_length", sizes_.embedding);
        count(".feed_forward_length", sizes_.feed_forward);
        count(".attention.head_count", sizes_.query_heads);
        count(".attention.head_count_kv", sizes_.kv_heads);
        count(".attention.key_length", sizes_.key_dim);
        count(".attention.value_length", sizes_.value_dim);
        count(".rope.dimension_count", sizes_.rotated);
        out.u64(own + ".context_length", static_cast<std::uint64_t>(sizes_.context));
        out.f32(own + ".attention.layer_norm_rms_epsilon", epsilon);
        out.f32(own + ".rope.freq_base", base);
        for (auto const& [name, values] : weights_)
        {
            auto const columns = static_cast<std::uint64_t>(columns_of(name));
            if (columns == values.size()) { out.tensor(name, {columns}, values); }
            else { out.tensor(name, {columns, values.size() / columns}, values); }
        }
        return out;
    }

    /// The forward pass of the architecture, one position after another.
    [[nodiscard]] naive_result run(std::vector<std::int32_t> const& tokens) const
    {
        naive_result out;
        out.queries.resize(static_cast<std::size_t>(sizes_.layers));
        out.keys = out.values = out.lse = out.queries;
        for (std::size_t t = 0; t < tokens.size(); ++t)
        {
            auto const* const row = weights_.at("token_embd.weight").data() + tokens[t] * sizes_.embedding;
            std::vector<double> x(row, row + sizes_.embedding);
            for (std::int64_t layer = 0; layer < sizes_.layers; ++layer) { run_layer(layer, t, x, out); }
            x = normed(x, "output_norm.weight");
            out.logits.push_back(times(sizes_.own_output ? "output.weight" : "token_embd.weight", x));
        }
        return out;
    }

private:
    static constexpr float epsilon = 1e-5F;
    static constexpr float base    = 5000.0F;

    [[nodiscard]] std::int64_t columns_of(std::string const& name) const
    {
        if (name.ends_with("norm.weight")) { return sizes_.embedding; }
        if (name == "rope_freqs.weight") { return sizes_.rotated / 2; }
        if (name.ends_with(".bias")) { return static_cast<std::int64_t>(weights_.at(name).size()); }
        if (name.ends_with("attn_output.weight")) { return sizes_.query_heads * sizes_.value_dim; }
        return name.ends_with("ffn_down.weight") ? sizes_.feed_forward : sizes_.embedding;
    }

    [[nodiscard]] std::vector<double> times(std::string const& name, std::vector<double> const& x) const
    {
        std::vector<float> const& w = weights_.at(name);
        std::vector<double> out(w.size() / x.size());
        for (std::size_t r = 0; r < out.size(); ++r)
        {
            for (std::size_t c = 0; c < x.size(); ++c) { out[r] += double{w[r * x.size() + c]} * x[c]; }
        }
        return out;
    }

    /// The product with the weights of that name, and its bias added, where it has one.
    [[nodiscard]] std::vector<double> projected(std::string const& name, std::vector<double> const& x) const
    {
        std::vector<double> out = times(name + ".weight", x);
        for (std::size_t i = 0; sizes_.qwen2 && i < out.size(); ++i)
        {
            out[i] += double{weights_.at(name + ".bias")[i]};
        }
        return out;
    }

    [[nodiscard]] std::vector<double> normed(std::vector<double> const& x, std::string const& name) const
    {
        double squares = 0;
        for (double const value : x) { squares += value * value; }
        std::vector<double> out;
        for (std::size_t i = 0; i < x.size(); ++i)
        {
            double const rms = std::sqrt(squares / static_cast<double>(x.size()) + double{epsilon});
            out.push_back(x[i] / rms * double{weights_.at(name)[i]});
        }
        return out;
    }

    void rotate(std::vector<double>& heads, std::size_t position) const
    {
        for (std::size_t at = 0; at < heads.size(); at += static_cast<std::size_t>(sizes_.key_dim))
        {
            for (std::int64_t i = 0; i < sizes_.rotated / 2; ++i)
            {
                double const power =
                    std::pow(double{base}, -2.0 * static_cast<double>(i) / static_cast<double>(sizes_.rotated));
                double const factor =
                    sizes_.rope_factors ? double{weights_.at("rope_freqs.weight")[static_cast<std::size_t>(i)]} : 1;
                double const angle = static_cast<double>(position) * power / factor;
                double& a          = heads[at + static_cast<std::size_t>(sizes_.qwen2 ? i : 2 * i)];
                double& b = heads[at + static_cast<std::size_t>(sizes_.qwen2 ? i + sizes_.rotated / 2 : 2 * i + 1)];
                double const before = a;
                a                   = before * std::cos(angle) - b * std::sin(angle);
                b                   = before * std::sin(angle) + b * std::cos(angle);
            }
        }
    }

    void run_layer(std::int64_t layer, std::size_t position, std::vector<double>& x, naive_result& out) const
    {
        std::string const b         = "blk." + std::to_string(layer) + ".";
        auto const l                = static_cast<std::size_t>(layer);
        std::vector<double> const h = normed(x, b + "attn_norm.weight");
        std::vector<double> queries = projected(b + "attn_q", h);
        std::vector<double> keys    = projected(b + "attn_k", h);
        rotate(queries, position);
        rotate(keys, position);
        out.keys[l].push_back(keys);
        out.values[l].push_back(projected(b + "attn_v", h));
        out.lse[l].emplace_back();
        std::vector<double> attended;
        for (std::int64_t head = 0; head < sizes_.query_heads; ++head)
        {
            attend(head, queries, out.keys[l], out.values[l], attended, out.lse[l].back());
        }
        out.queries[l].push_back(queries);
        add(x, times(b + "attn_output.weight", attended));
        std::vector<double> const f  = normed(x, b + "ffn_norm.weight");
        std::vector<double> gate     = times(b + "ffn_gate.weight", f);
        std::vector<double> const up = times(b + "ffn_up.weight", f);
        for (std::size_t i = 0; i < gate.size(); ++i) { gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i]; }
        add(x, times(b + "ffn_down.weight", gate));
    }

    static void add(std::vector<double>& x, std::vector<double> const& change)
    {
        for (std::size_t i = 0; i < x.size(); ++i) { x[i] += change[i]; }
    }

    void attend(std::int64_t head, std::vector<double> const& queries, std::vector<std::vector<double>> const& keys,
        std::vector<std::vector<double>> const& values, std::vector<double>& attended, std::vector<double>& lse) const
    {
        std::int64_t const kv_head = head / (sizes_.query_heads / sizes_.kv_heads);
        double const* const query  = queries.data() + head * sizes_.key_dim;
        std::vector<double> weights;
        double largest = 0;
        for (auto const& key : keys)
        {
            double logit = 0;
            for (std::int64_t d = 0; d < sizes_.key_dim; ++d)
            {
                logit += query[d] * key.data()[kv_head * sizes_.key_dim + d];
            }
            weights.push_back(logit / std::sqrt(static_cast<double>(sizes_.key_dim)));
            largest = weights.size() == 1 ? weights[0] : std::max(largest, weights.back());
        }
        double total = 0;
        for (double& weight : weights) { total += weight = std::exp(weight - largest); }
        lse.push_back(largest + std::log(total));
        for (std::int64_t d = 0; d < sizes_.value_dim; ++d)
        {
            double sum = 0;
            for (std::size_t t = 0; t < values.size(); ++t)
            {
                sum += weights[t] / total * values[t].data()[kv_head * sizes_.value_dim + d];
            }
            attended.push_back(sum);
        }
    }

    llama_sizes sizes_;
    std::map<std::string, std::vector<float>> weights_;
};

/// Random token ids of a text.
[[nodiscard]] inline std::vector<std::int32_t> random_tokens(
    std::int64_t count, std::int64_t vocabulary, std::int64_t salt)
{
    source random("random tokens", salt);
    std::vector<std::int32_t> out;
    for (std::int64_t i = 0; i < count; ++i) { out.push_back(static_cast<std::int32_t>(random.below(vocabulary))); }
    return out;
}

} // namespace support
