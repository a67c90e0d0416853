/// \file sequence_cache.hpp: the compressed caches of all layers of one sequence: made layer by layer, read while decoding
#pragma once

#include <mdkv/append.hpp>
#include <mdkv/attend.hpp>
#include <mdkv/compress.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/progress.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/append.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/compress.hpp>
#include <mdkv/cpu/executor.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "llama_model.hpp"
#include "policies.hpp"
#include "prefill.hpp"
#include "terminal.hpp"

namespace runner
{

/// Scratch memory that grows to what a call needs and is kept for the next one.
class scratch_memory
{
public:
    /// Runs `call(backend)` once to count and once for real.
    template <class Call>
    auto run(mdkv::cpu::executor_ref executor, Call const& call)
    {
        mdkv::workspace counting;
        static_cast<void>(call(mdkv::cpu::backend{&counting, executor}));
        if (counting.bytes() > size_)
        {
            memory_.reset(static_cast<std::byte*>(
                ::operator new[](counting.bytes(), std::align_val_t{mdkv::workspace::alignment})));
            size_ = counting.bytes();
        }
        mdkv::workspace lent{std::span{memory_.get(), size_}};
        return call(mdkv::cpu::backend{&lent, executor});
    }

    [[nodiscard]] std::size_t bytes() const noexcept { return size_; }

private:
    struct release
    {
        void operator()(std::byte* memory) const noexcept
        {
            ::operator delete[](memory, std::align_val_t{mdkv::workspace::alignment});
        }
    };
    std::unique_ptr<std::byte[], release> memory_;
    std::size_t size_ = 0;
};

/// One sequence's cache under one policy.
template <mdkv::element T>
class sequence_cache
{
public:
    sequence_cache(model_shape const& model, policy chosen, mdkv::budget limit, std::int64_t tail_tokens)
        : model_{model}
        , policy_{std::move(chosen)}
        , limit_{policy_.whole ? mdkv::budget::fraction(1, 1) : limit}
        , tail_tokens_{tail_tokens}
        , layers_(static_cast<std::size_t>(model.layers))
    {}

    /// Takes one layer from prefill.
    /// \param rungs   [H, N] receives the rung of every token, or null
    mdkv::compress_report compress_layer(
        layer_kv<T> const& kv, mdkv::cpu::executor_ref executor, scratch_memory& scratch, std::uint8_t* rungs = nullptr)
    {
        auto const start = std::chrono::steady_clock::now();
        auto& cache      = layers_[static_cast<std::size_t>(kv.layer)];
        auto go_on       = [](char const*, mdkv::index_t, mdkv::index_t) { return !interrupt_requested(); };
        auto const report = scratch.run(executor, [&](mdkv::cpu::backend on) {
            using mdkv::in;
            auto const H     = model_.kv_heads;
            auto const keys  = in(on, kv.keys, H, kv.tokens, model_.key_dim);
            auto const values = in(on, kv.values, H, kv.tokens, model_.value_dim);
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

    /// Appends one token's key [H * D] and value [H * Dv] and attends with its query [Hq * D].
    void attend(std::int64_t layer, float const* query, float const* key, float const* value, float* output,
        mdkv::cpu::executor_ref executor)
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

    [[nodiscard]] policy const& chosen() const noexcept { return policy_; }
    [[nodiscard]] std::int64_t resident_bytes() const noexcept { return resident_bytes_; } // of all layers, tails excluded
    [[nodiscard]] std::int64_t full_bytes() const noexcept { return full_bytes_; }
    [[nodiscard]] double compress_seconds() const noexcept { return compress_seconds_; }
    [[nodiscard]] double attend_seconds() const noexcept { return attend_seconds_; }
    [[nodiscard]] std::vector<mdkv::compress_report> const& reports() const noexcept { return reports_; }

private:
    model_shape model_;
    policy policy_;
    mdkv::budget limit_;
    std::int64_t tail_tokens_;
    std::vector<mdkv::cpu::cache<T>> layers_; // [layers]
    std::vector<mdkv::compress_report> reports_;
    std::vector<float> lse_; // [query_heads], not used here
    scratch_memory scratch_;
    std::int64_t resident_bytes_ = 0;
    std::int64_t full_bytes_     = 0;
    double compress_seconds_     = 0;
    double attend_seconds_       = 0;
};

} // namespace runner
