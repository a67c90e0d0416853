#include "sequence_cache.hpp"

#include <mdkv/core/error.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "policies/make_cache.hpp"
#include "policies/packed_cache.hpp"
#include "policies/shared_cache.hpp"
#include "policies/stored_cache.hpp"
#include "read_in_chunks.hpp"

namespace runner
{

namespace
{

/// Rows [heads, width] as [heads * group, width], every row `group` times.
template <class T>
void repeat_heads(T const* rows, std::int64_t heads, std::int64_t group, std::int64_t width, T* out)
{
    for (std::int64_t h = 0; h < heads * group; ++h) { std::copy_n(rows + h / group * width, width, out + h * width); }
}

} // namespace

template <mdkv::element T>
struct sequence_cache<T>::layer_memory
{
    std::vector<T> keys, values;       // [query_heads, tokens, D]
    std::vector<float> output_weights; // [embedding, query_heads * Dv]
};

template <mdkv::element T>
sequence_cache<T>::sequence_cache(
    language_model const& model, policy chosen, mdkv::budget limit, std::int64_t window, std::int64_t tail_tokens)
    : model_{&model}
    , policy_{std::move(chosen)}
    , limit_{limit}
    , window_{window}
    , tail_tokens_{tail_tokens}
    , layers_(static_cast<std::size_t>(model.shape().layers))
{
    model_shape const& shape = model.shape();
    mdkv::expects(shape.kv_heads % policy_.head_shares == 0, "policy ", policy_.label, ": head_shares is ",
        policy_.head_shares, ", which does not divide the model's ", shape.kv_heads, " KV heads");
    mdkv::expects(shape.layers % policy_.layer_shares == 0, "policy ", policy_.label, ": layer_shares is ",
        policy_.layer_shares, ", which does not divide the model's ", shape.layers, " layers");
    policy own = policy_;
    own.depth /= static_cast<double>(own.layer_shares); // about the weights that these layers have among all
    for (std::int64_t i = 0; i < policy_.shares(); ++i)
    {
        makers_.emplace_back(own, limit, shape.layers, shape.query_heads);
    }
}

template <mdkv::element T>
sequence_cache<T>::sequence_cache(
    language_model const& model, policy chosen, fold_plan const& plan, std::int64_t window)
    : model_{&model}
    , policy_{std::move(chosen)}
    , limit_{mdkv::budget::bytes(plan.arena)}
    , ledger_{std::make_unique<fold_ledger>()}
    , window_{window}
    , tail_tokens_{plan.every}
    , layers_(static_cast<std::size_t>(model.shape().layers))
{
    mdkv::expects(policy_.shares() == 1, "--fold-every: policy ", policy_.label, " has ", policy_.shares(),
        " shares of its budget; folds know one");
    makers_.emplace_back(policy_, plan, *ledger_);
}

template <mdkv::element T>
sequence_cache<T> sequence_cache<T>::folding(
    language_model const& model, policy chosen, std::int64_t max_bytes, std::int64_t every, std::int64_t window,
    std::string const& option)
{
    fold_plan const plan = share_memory<T>(max_bytes, every, window, chosen, model.shape(), option);
    return sequence_cache{model, std::move(chosen), plan, window};
}

template <mdkv::element T>
sequence_cache<T>::~sequence_cache() = default;
template <mdkv::element T>
sequence_cache<T>::sequence_cache(sequence_cache&&) noexcept = default;

template <mdkv::element T>
prompt_layer<T> sequence_cache<T>::layer_of(layer_kv<T> const& kv, layer_memory& memory) const
{
    model_shape const& shape = model_->shape();
    prompt_layer<T> layer{.layer = kv.layer,
        .layers                  = shape.layers,
        .heads                   = shape.kv_heads,
        .group                   = shape.query_heads / shape.kv_heads,
        .tokens                  = kv.tokens,
        .window                  = std::min(window(), kv.tokens),
        .question                = std::min(window_, kv.tokens),
        .key_dim                 = shape.key_dim,
        .value_dim               = shape.value_dim,
        .keys                    = kv.keys,
        .values                  = kv.values,
        .queries                 = kv.queries,
        .lse                     = kv.lse,
        .query_tokens            = kv.window,
        .embedding               = shape.embedding,
        .rotation                = &model_->rotation()};
    if (!really_replayed_.empty()) { layer.replayed = really_replayed_[static_cast<std::size_t>(kv.layer)].data(); }
    if (policy_.per_query_head && layer.group > 1)
    {
        auto const rows = static_cast<std::size_t>(shape.query_heads * kv.tokens);
        memory.keys.resize(rows * static_cast<std::size_t>(shape.key_dim));
        memory.values.resize(rows * static_cast<std::size_t>(shape.value_dim));
        repeat_heads(kv.keys, shape.kv_heads, layer.group, kv.tokens * shape.key_dim, memory.keys.data());
        repeat_heads(kv.values, shape.kv_heads, layer.group, kv.tokens * shape.value_dim, memory.values.data());
        layer.keys   = memory.keys.data();
        layer.values = memory.values.data();
        layer.heads  = shape.query_heads;
        layer.group  = 1;
    }
    if (policy_.output_weighted)
    {
        weight_matrix const& weights = model_->layer(kv.layer).attention_output;
        memory.output_weights.resize(static_cast<std::size_t>(weights.rows() * weights.columns()));
        weights.dequantise_rows(0, weights.rows(), memory.output_weights.data());
        layer.output_weights = memory.output_weights.data();
    }
    return layer;
}

template <mdkv::element T>
prompt_layer<T> sequence_cache<T>::share_of(prompt_layer<T> layer, std::int64_t share) const
{
    layer.layers /= policy_.layer_shares;
    layer.layer %= layer.layers;
    layer.heads /= policy_.head_shares;
    std::int64_t const first = share * layer.heads; // the share's first head
    auto const at            = [first](auto const* rows, std::int64_t each) {
        return rows == nullptr ? nullptr : rows + first * each;
    };
    layer.keys     = at(layer.keys, layer.tokens * layer.key_dim);
    layer.values   = at(layer.values, layer.tokens * layer.value_dim);
    layer.queries  = at(layer.queries, layer.group * layer.query_tokens * layer.key_dim);
    layer.lse      = at(layer.lse, layer.group * layer.query_tokens);
    layer.replayed = at(layer.replayed, static_cast<std::int64_t>(policy_.ratios.size()) * layer.past());
    return layer;
}

template <mdkv::element T>
cache_maker<T>& sequence_cache<T>::maker_of(std::int64_t layer, std::int64_t share)
{
    std::int64_t const part = layer / (model_->shape().layers / policy_.layer_shares);
    return makers_[static_cast<std::size_t>(part * policy_.head_shares + share)];
}

template <mdkv::element T>
void sequence_cache<T>::score_chunk(
    layer_chunk<T> const& chunk, std::int64_t tokens, mdkv::cpu::executor_ref executor, scratch_memory& scratch)
{
    if (!policy_.replays() || policy_.while_reading) { return; }
    auto const start = std::chrono::steady_clock::now();
    layer_kv<T> unread{};
    unread.layer  = chunk.layer;
    unread.tokens = tokens;
    layer_memory none;
    auto const whole = layer_of(unread, none);
    std::int64_t const share =
        model_->shape().query_heads / policy_.head_shares * whole.key_dim; // numbers of a token's queries
    std::vector<T> queries(policy_.head_shares > 1 ? static_cast<std::size_t>(chunk.count * share) : 0);
    for (std::int64_t s = 0; s < policy_.head_shares; ++s)
    {
        auto const layer    = share_of(whole, s);
        layer_chunk<T> part = chunk;
        part.keys += s * layer.heads * chunk.tokens * layer.key_dim;
        part.values += s * layer.heads * chunk.tokens * layer.value_dim;
        if (policy_.head_shares > 1)
        {
            for (std::int64_t i = 0; i < chunk.count; ++i)
            {
                std::copy_n(chunk.queries + (i * policy_.head_shares + s) * share, share, queries.data() + i * share);
            }
            part.queries = queries.data();
        }
        maker_of(chunk.layer, s).read(layer, part, executor, scratch);
    }
    compress_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

template <mdkv::element T>
void sequence_cache<T>::score_replay(
    layer_kv<T> const& kv, std::int64_t tokens, mdkv::cpu::executor_ref executor, scratch_memory& scratch)
{
    if (!policy_.replays_really()) { return; }
    really_replayed_.resize(layers_.size());
    really_replayed_[static_cast<std::size_t>(kv.layer)] =
        really_replayed_losses(policy_, model_->shape(), kv, tokens - std::min(window(), tokens), executor, scratch);
}

template <mdkv::element T>
void sequence_cache<T>::compress_layer(
    layer_kv<T> const& kv, mdkv::cpu::executor_ref executor, scratch_memory& scratch, std::uint8_t* rungs)
{
    if (policy_.while_reading) { return; }
    auto const start       = std::chrono::steady_clock::now();
    model_shape const& own = model_->shape();
    layer_memory memory;
    auto const whole = layer_of(kv, memory);
    mdkv::layer_shape const shape{own.kv_heads / policy_.head_shares, own.query_heads / own.kv_heads, whole.past(),
        whole.window, {own.key_dim, own.value_dim}, std::int64_t{sizeof(T)}};
    std::vector<std::vector<made_cache>> shares; // [head_shares][layers that are done]
    for (std::int64_t s = 0; s < policy_.head_shares; ++s)
    {
        shares.push_back(maker_of(kv.layer, s)
                             .make(share_of(whole, s), shape, tail_tokens_, executor, scratch,
                                 rungs == nullptr ? nullptr : rungs + s * shape.heads * shape.tokens));
    }
    auto made = policy_.head_shares == 1 ? std::move(shares[0]) : put_together(shares, shape);
    compress_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    tokens_ = kv.tokens;
    full_bytes_ += own.kv_heads * kv.tokens * (own.key_dim + own.value_dim) * std::int64_t{sizeof(T)};
    for (made_cache& one : made)
    {
        layers_[reports_.size()] = std::move(one.cache);
        reports_.push_back(one.report);
    }
}

template <mdkv::element T>
std::vector<float> sequence_cache<T>::read(std::span<std::int32_t const> tokens, mdkv::cpu::executor_ref executor,
    std::function<void(std::int64_t, std::int64_t)> const& progress)
{
    model_shape const& own = model_->shape();
    auto const kept        = std::min(window(), std::ssize(tokens));
    auto const question    = std::min(window_, std::ssize(tokens));
    mdkv::preset preset    = preset_of(policy_, kept, question);
    auto done              = read_in_chunks<T>(*model_, tokens, preset, encoding_of(model_->rotation()),
        {.limit = limit_, .chunk = policy_.chunk, .slack = policy_.slack}, executor, scratch_,
        progress);
    tokens_ = std::ssize(tokens);
    for (std::size_t i = 0; i < layers_.size(); ++i)
    {
        mdkv::compress_report report;
        if (i == 0) { report.chosen = done.report.chosen; }
        report.chosen.tokens = count_tokens(done.caches[i], tokens_); // the reader's are those left at its end
        layers_[i] =
            std::make_unique<packed_cache<T>>(std::move(done.caches[i]), own.query_heads / own.kv_heads, tail_tokens_);
        reports_.push_back(report);
    }
    most_bytes_       = done.most_bytes;
    compress_seconds_ = done.compress_seconds;
    full_bytes_ =
        own.layers * own.kv_heads * std::ssize(tokens) * (own.key_dim + own.value_dim) * std::int64_t{sizeof(T)};
    return std::move(done.logits);
}

template <mdkv::element T>
void sequence_cache<T>::load(mdkv::stored_caches<T> const& file, std::int64_t full_bytes)
{
    for (std::size_t i = 0; i < layers_.size(); ++i)
    {
        auto const cache = file.layer(static_cast<std::int64_t>(i));
        layers_[i] =
            std::make_unique<stored_cache<T>>(cache, model_->shape().query_heads / cache.layout.heads, tail_tokens_);
    }
    full_bytes_ = full_bytes;
}

template <mdkv::element T>
std::vector<mdkv::layer_to_write<T>> sequence_cache<T>::layers_to_write() const
{
    std::vector<mdkv::layer_to_write<T>> all;
    for (auto const& layer : layers_)
    {
        auto const* const packed = dynamic_cast<packed_cache<T> const*>(layer.get());
        mdkv::expects(packed != nullptr && ledger_ == nullptr, "policy ", policy_.label,
            ": its caches cannot be saved; those made of rungs or of whole tokens on the CPU can");
        all.push_back({packed->packed().view(), {}});
    }
    return all;
}

template <mdkv::element T>
void sequence_cache<T>::attend(std::int64_t layer, float const* query, float const* key, float const* value,
    float* output, mdkv::cpu::executor_ref executor)
{
    auto const start         = std::chrono::steady_clock::now();
    model_shape const& shape = model_->shape();
    mdkv::expects(layers_[static_cast<std::size_t>(layer)] != nullptr, "policy ", policy_.label, ": layer ", layer,
        " holds no prompt; this command cannot compress while reading");
    auto const group = shape.query_heads / shape.kv_heads;
    if (policy_.per_query_head && group > 1)
    {
        auto const keys = shape.query_heads * shape.key_dim;
        repeated_.resize(static_cast<std::size_t>(keys + shape.query_heads * shape.value_dim));
        repeat_heads(key, shape.kv_heads, group, shape.key_dim, repeated_.data());
        repeat_heads(value, shape.kv_heads, group, shape.value_dim, repeated_.data() + keys);
        key   = repeated_.data();
        value = repeated_.data() + keys;
    }
    layers_[static_cast<std::size_t>(layer)]->attend(executor, scratch_, query, key, value, output);
    tokens_ += layer == 0 ? 1 : 0;
    attend_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

template <mdkv::element T>
std::vector<std::int64_t> sequence_cache<T>::tokens_by_rung() const
{
    std::vector<std::int64_t> all(policy_.ratios.size());
    for (std::size_t i = 0; i < reports_.size(); ++i)
    {
        auto const* const packed = dynamic_cast<packed_cache<T> const*>(layers_[i].get());
        auto const tokens        = ledger_ != nullptr && packed != nullptr ? count_tokens(packed->packed(), tokens_)
                                                                           : reports_[i].chosen.tokens;
        for (std::size_t r = 0; r < all.size(); ++r) { all[r] += tokens[r]; }
    }
    return all;
}

template <mdkv::element T>
std::int64_t sequence_cache<T>::resident_bytes() const noexcept
{
    std::int64_t bytes = 0;
    for (auto const& layer : layers_) { bytes += layer ? layer->resident_bytes() : 0; }
    return bytes;
}

template class sequence_cache<float>;
template class sequence_cache<mdkv::half>;
template class sequence_cache<mdkv::bfloat16>;

} // namespace runner
