#include "sequence_cache.hpp"

#include <mdkv/append.hpp>
#include <mdkv/attend.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/append.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/compress.hpp>

#include <chrono>
#include <utility>

#include "terminal.hpp"

namespace runner
{

template <mdkv::element T>
sequence_cache<T>::sequence_cache(model_shape const& model, policy chosen, mdkv::budget limit, std::int64_t tail_tokens)
    : model_{model}
    , policy_{std::move(chosen)}
    , limit_{policy_.whole ? mdkv::budget::fraction(1, 1) : limit}
    , tail_tokens_{tail_tokens}
    , layers_(static_cast<std::size_t>(model.layers))
{}

template <mdkv::element T>
mdkv::compress_report sequence_cache<T>::compress_layer(
    layer_kv<T> const& kv, mdkv::cpu::executor_ref executor, scratch_memory& scratch, std::uint8_t* rungs)
{
    auto const start  = std::chrono::steady_clock::now();
    auto& cache       = layers_[static_cast<std::size_t>(kv.layer)];
    auto go_on        = [](char const*, mdkv::index_t, mdkv::index_t) { return !interrupt_requested(); };
    auto const report = scratch.run(executor, [&](mdkv::cpu::backend on) {
        using mdkv::in;
        auto const H       = model_.kv_heads;
        auto const keys    = in(on, kv.keys, H, kv.tokens, model_.key_dim);
        auto const values  = in(on, kv.values, H, kv.tokens, model_.value_dim);
        auto const queries = in(on, kv.queries, model_.query_heads, kv.window, model_.key_dim);
        auto const layer   = mdkv::split_window(on, queries, keys, values, kv.window);
        mdkv::compress_options<mdkv::cpu::backend> options{
            .limit    = limit_,
            .pooling  = policy_.pooling,
            .scoring  = {.lse = in(on, kv.lse, model_.query_heads, kv.window)},
            .progress = go_on,
            .layer    = kv.layer,
        };
        if (rungs != nullptr) { options.rungs = mdkv::out(on, rungs, H, kv.tokens - kv.window); }
        return mdkv::compress(on, layer, policy_.ratios, options, cache);
    });
    if (report.status == mdkv::compress_status::cancelled) { throw interrupted{}; }
    cache.reserve_tail(tail_tokens_);
    compress_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    resident_bytes_ += report.resident_bytes;
    full_bytes_ += report.full_bytes;
    reports_.push_back(report);
    return report;
}

template <mdkv::element T>
void sequence_cache<T>::attend(std::int64_t layer, float const* query, float const* key, float const* value,
    float* output, mdkv::cpu::executor_ref executor)
{
    auto const start = std::chrono::steady_clock::now();
    auto& cache      = layers_[static_cast<std::size_t>(layer)];
    if (cache.appended() == cache.tail_capacity()) { cache.reserve_tail(2 * cache.tail_capacity() + 16); }
    lse_.resize(static_cast<std::size_t>(model_.query_heads));
    scratch_.run(executor, [&](mdkv::cpu::backend on) {
        using mdkv::in;
        using mdkv::out;
        mdkv::append(on, in(on, key, model_.kv_heads, model_.key_dim), in(on, value, model_.kv_heads, model_.value_dim),
            cache.view());
        mdkv::attend(on, in(on, query, model_.query_heads, model_.key_dim), cache.view(), {},
            out(on, output, model_.query_heads, model_.value_dim), out(on, lse_.data(), model_.query_heads));
        return 0;
    });
    attend_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

template class sequence_cache<float>;
template class sequence_cache<mdkv::half>;
template class sequence_cache<mdkv::bfloat16>;

} // namespace runner
