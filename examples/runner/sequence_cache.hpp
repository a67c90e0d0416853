/// \file sequence_cache.hpp: the compressed caches of all layers of one sequence: made layer by layer, read while decoding
#pragma once

#include <mdkv/compress.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "language_model.hpp"
#include "policies.hpp"
#include "prefill.hpp"
#include "scratch_memory.hpp"
#include "systems/cache_maker.hpp"
#include "systems/fold_plan.hpp"
#include "systems/layer_cache.hpp"
#include "terminal.hpp"

namespace runner
{

/// One sequence's cache under one policy.
template <mdkv::element T>
class sequence_cache
{
public:
    /// \param model         must outlive the cache
    /// \param window        last prompt tokens that are kept as they are, where the policy does not say fewer
    /// \param tail_tokens   room made for appended tokens; more of them cost a copy of the tail
    sequence_cache(
        language_model const& model, policy chosen, mdkv::budget limit, std::int64_t window, std::int64_t tail_tokens);

    /// A cache that never takes more than max_bytes, all its buffers included: it folds the tokens that are appended.
    /// \param every    tokens to append before they are folded
    /// \param option   option that asks for folds, for messages
    /// \throws mdkv::invalid_argument   as share_memory
    [[nodiscard]] static sequence_cache folding(language_model const& model, policy chosen, std::int64_t max_bytes,
        std::int64_t every, std::int64_t window, std::string const& option);

    ~sequence_cache();
    sequence_cache(sequence_cache&&) noexcept;
    sequence_cache& operator=(sequence_cache&&) = delete; // layers must go before their memory's count

    /// Takes one chunk of a layer from prefill, before the layer itself, for policies that replay. Policies that compress
    /// while reading take nothing from prefill: `read`.
    /// \param tokens   of the prompt that is compressed, the first ones of prefill's
    void score_chunk(
        layer_chunk<T> const& chunk, std::int64_t tokens, mdkv::cpu::executor_ref executor, scratch_memory& scratch);

    /// Takes one layer from prefill, which may hand over more queries than the window's (see `queries_to_keep`).
    /// \param rungs   [H, N] receives every token's rung of the policy's ratio set, or null; not for policies whose caches
    ///                are not made of rungs of KV heads. With one budget for all layers when the last one has come
    /// \throws interrupted   after Ctrl-C, and what compress throws
    void compress_layer(layer_kv<T> const& kv, mdkv::cpu::executor_ref executor, scratch_memory& scratch,
        std::uint8_t* rungs = nullptr);

    /// Reads a prompt chunk by chunk instead of taking layers from prefill, for policies that compress while reading.
    /// \param progress   see read_in_chunks
    /// \return logits [vocabulary] of the last token
    [[nodiscard]] std::vector<float> read(std::span<std::int32_t const> tokens, mdkv::cpu::executor_ref executor,
        std::function<void(std::int64_t, std::int64_t)> const& progress);

    /// Appends one token's key [H * D] and value [H * Dv] and attends with its query [Hq * D]; the tail grows as needed.
    void attend(std::int64_t layer, float const* query, float const* key, float const* value, float* output,
        mdkv::cpu::executor_ref executor);

    /// Last prompt tokens that are kept as they are.
    [[nodiscard]] std::int64_t window() const noexcept { return policy_.kept_window(window_); }
    [[nodiscard]] policy const& chosen() const noexcept { return policy_; }
    /// Of the prompt in all layers, as measured from the buffers; what was appended is excluded.
    [[nodiscard]] std::int64_t resident_bytes() const noexcept;
    /// What folding did, and how much memory the cache took at most; null for a cache that does not fold.
    [[nodiscard]] fold_ledger const* folds() const noexcept { return ledger_.get(); }
    [[nodiscard]] std::int64_t full_bytes() const noexcept { return full_bytes_; } // of the model's cache, uncompressed
    [[nodiscard]] double compress_seconds() const noexcept { return compress_seconds_; }
    /// The most bytes that caches and losses took at any time while the prompt was read; 0 if it was not read in chunks.
    [[nodiscard]] std::int64_t most_bytes() const noexcept { return most_bytes_; }
    [[nodiscard]] double attend_seconds() const noexcept { return attend_seconds_; }
    /// What was chosen for the prompt.
    [[nodiscard]] std::vector<mdkv::compress_report> const& reports() const noexcept { return reports_; }
    /// [rungs] tokens of all layers and heads as they are stored now, dropped ones included. Windows that are stored whole and
    /// tokens that were not folded yet are left out.
    [[nodiscard]] std::vector<std::int64_t> tokens_by_rung() const;

private:
    sequence_cache(language_model const& model, policy chosen, fold_plan const& plan, std::int64_t window);

    [[nodiscard]] prompt_layer<T> layer_of(layer_kv<T> const& kv) const;
    language_model const* model_;
    policy policy_;
    mdkv::budget limit_;
    std::unique_ptr<fold_ledger> ledger_; // the memory of layers that fold: made before them, gone after them
    cache_maker<T> maker_;
    std::int64_t window_;
    std::int64_t tail_tokens_;
    std::vector<std::unique_ptr<layer_cache>> layers_; // [layers]
    std::vector<mdkv::compress_report> reports_;
    scratch_memory scratch_;
    std::int64_t tokens_     = 0; // tokens of the prompt, and those appended to the first layer
    std::int64_t full_bytes_ = 0;
    std::int64_t most_bytes_ = 0;
    double compress_seconds_ = 0;
    double attend_seconds_   = 0;
};

/// Reads a prompt into a cache that is compressed while it is read, with a line of progress.
/// \param what   begins the line
/// \return logits [vocabulary] of the last token
/// \throws interrupted   after Ctrl-C
template <mdkv::element T>
std::vector<float> read_showing_progress(sequence_cache<T>& cache, std::span<std::int32_t const> tokens,
    mdkv::cpu::executor_ref executor, std::string const& what = "")
{
    std::string const title = what + "reading " + std::to_string(tokens.size()) + " tokens while compressing them";
    progress_bar bar{title};
    return cache.read(tokens, executor, [&](std::int64_t done, std::int64_t held) {
        bar.rename(title + ", " + size_text(held) + " held");
        bar.show(done, std::ssize(tokens));
        if (interrupt_requested()) { throw interrupted{}; }
    });
}

/// Queries that prefill must hand over for these policies: those of the window, the last ones, or those of the whole prompt.
[[nodiscard]] inline std::int64_t queries_to_keep(policy const& one, std::int64_t window, std::int64_t tokens) noexcept
{
    return one.reads_all_queries() ? tokens : std::max(window, one.more_queries());
}

// Compiled once, in sequence_cache.cpp: this is where the library is instantiated.
extern template class sequence_cache<float>;
extern template class sequence_cache<mdkv::half>;

} // namespace runner
