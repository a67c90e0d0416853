#include "sequence_cache.hpp"

#include <mdkv/core/error.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "read_in_chunks.hpp"
#include "systems/make_cache.hpp"
#include "systems/packed_cache.hpp"

namespace runner
{

template <mdkv::element T>
sequence_cache<T>::sequence_cache(
    language_model const& model, policy chosen, mdkv::budget limit, std::int64_t window, std::int64_t tail_tokens)
    : model_{&model}
    , policy_{std::move(chosen)}
    , limit_{limit}
    , ledger_{policy_.tail > 0 ? std::make_unique<fold_ledger>() : nullptr}
    , maker_{policy_, limit, model.shape().layers, model.shape().query_heads, ledger_.get()}
    , window_{window}
    , tail_tokens_{tail_tokens}
    , layers_(static_cast<std::size_t>(model.shape().layers))
{
    mdkv::expects(policy_.tail == 0 || !policy_.while_reading, "policy ", policy_.label,
        ": a cache that is compressed while it is read does not fold its tail");
}

template <mdkv::element T>
sequence_cache<T>::sequence_cache(
    language_model const& model, policy chosen, fold_plan const& plan, std::int64_t window)
    : model_{&model}
    , policy_{std::move(chosen)}
    , limit_{mdkv::budget::bytes(plan.arena)}
    , ledger_{std::make_unique<fold_ledger>()}
    , maker_{policy_, plan, *ledger_}
    , window_{window}
    , tail_tokens_{plan.every}
    , layers_(static_cast<std::size_t>(model.shape().layers))
{}

template <mdkv::element T>
sequence_cache<T> sequence_cache<T>::folding(language_model const& model, policy chosen, std::int64_t max_bytes,
    std::int64_t every, std::int64_t window, std::string const& option)
{
    fold_plan const plan = share_memory<T>(max_bytes, every, window, chosen, model.shape(), option);
    return sequence_cache{model, std::move(chosen), plan, window};
}

template <mdkv::element T>
sequence_cache<T>::~sequence_cache() = default;
template <mdkv::element T>
sequence_cache<T>::sequence_cache(sequence_cache&&) noexcept = default;

template <mdkv::element T>
prompt_layer<T> sequence_cache<T>::layer_of(layer_kv<T> const& kv) const
{
    model_shape const& shape = model_->shape();
    return {.layer    = kv.layer,
        .layers       = shape.layers,
        .heads        = shape.kv_heads,
        .group        = shape.query_heads / shape.kv_heads,
        .tokens       = kv.tokens,
        .window       = std::min(window(), kv.tokens),
        .question     = std::min(window_, kv.tokens),
        .key_dim      = shape.key_dim,
        .value_dim    = shape.value_dim,
        .keys         = kv.keys,
        .values       = kv.values,
        .queries      = kv.queries,
        .lse          = kv.lse,
        .query_tokens = kv.window,
        .rotation     = &model_->rotation()};
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
    maker_.read(layer_of(unread), chunk, executor, scratch);
    compress_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

template <mdkv::element T>
void sequence_cache<T>::compress_layer(
    layer_kv<T> const& kv, mdkv::cpu::executor_ref executor, scratch_memory& scratch, std::uint8_t* rungs)
{
    if (policy_.while_reading) { return; }
    auto const start       = std::chrono::steady_clock::now();
    model_shape const& own = model_->shape();
    auto const layer       = layer_of(kv);
    mdkv::layer_shape const shape{own.kv_heads, own.query_heads / own.kv_heads, layer.past(), layer.window,
        {own.key_dim, own.value_dim}, std::int64_t{sizeof(T)}};
    auto made = maker_.make(layer, shape, tail_tokens_, executor, scratch, rungs);
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
        {.limit = limit_, .chunk = policy_.options.replayed->chunk, .slack = policy_.slack}, executor, scratch_,
        progress);
    tokens_                = std::ssize(tokens);
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
void sequence_cache<T>::attend(std::int64_t layer, float const* query, float const* key, float const* value,
    float* output, mdkv::cpu::executor_ref executor)
{
    auto const start = std::chrono::steady_clock::now();
    mdkv::expects(layers_[static_cast<std::size_t>(layer)] != nullptr, "policy ", policy_.label, ": layer ", layer,
        " holds no prompt; this command cannot compress while reading");
    layers_[static_cast<std::size_t>(layer)]->attend(executor, scratch_, query, key, value, output);
    tokens_ += layer == 0 ? 1 : 0;
    attend_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

template <mdkv::element T>
std::vector<std::int64_t> sequence_cache<T>::tokens_by_rung() const
{
    std::vector<std::int64_t> all(policy_.options.ratios.size());
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

} // namespace runner
