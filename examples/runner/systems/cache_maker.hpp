/// \file cache_maker.hpp: makes the caches of a prompt's layers by a policy and a budget
#pragma once

#include <mdkv/compress.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "fold_plan.hpp"
#include "head_scores.hpp"
#include "held_layers.hpp"
#include "layer_cache.hpp"
#include "policy_prompt.hpp"
#include "prompt_layer.hpp"
#include "runner/device_layers.hpp"
#include "runner/policies.hpp"
#include "runner/prefill.hpp"
#include "runner/scratch_memory.hpp"

namespace runner
{

struct made_cache
{
    std::unique_ptr<layer_cache> cache;
    mdkv::compress_report report; // tokens counted by rung; multiplier, loss and dual for mixed policies only
};

/// One for a sequence, because some policies share the budget among the heads of all layers. Every policy gets the same
/// bytes a layer, or the same bytes in all if it shares them among layers; its authors' rule decides how they are used.
template <mdkv::element T>
class cache_maker
{
public:
    /// \param ledger   for policies that fold (policy::tail), otherwise null; must outlive the caches
    /// \throws mdkv::error   the policy is to run on a device, and there is none
    cache_maker(policy chosen, mdkv::budget limit, std::int64_t layers, std::int64_t query_heads, fold_ledger* ledger);

    /// Makes caches that fold appended tokens. The plan comes from `share_memory` for this policy.
    /// \param ledger   must outlive the caches
    cache_maker(policy chosen, fold_plan const& plan, fold_ledger& ledger);

    /// Takes one chunk of a layer from prefill, before the layer itself, if the policy replays.
    /// \param layer   without its rows, which need not be there yet
    void read(prompt_layer<T> const& layer, layer_chunk<T> const& chunk, mdkv::cpu::executor_ref executor,
        scratch_memory& scratch);

    /// \param shape   shape of the model's own cache, for budgets; the layer's heads may be query heads
    /// \param rungs   [heads, past] receives the tokens' rungs, or null; lives until its cache is made
    /// \return the layer's cache. With one budget for all layers: none until the last layer, then all caches in order
    /// \throws mdkv::invalid_argument   the budget is below the window; rungs are asked of a policy that has none
    [[nodiscard]] std::vector<made_cache> make(prompt_layer<T> const& layer, mdkv::layer_shape const& shape,
        std::int64_t tail_tokens, mdkv::cpu::executor_ref executor, scratch_memory& scratch, std::uint8_t* rungs);

private:
    [[nodiscard]] made_cache one_layer(prompt_layer<T> const& layer, mdkv::layer_shape const& shape,
        std::int64_t tail_tokens, mdkv::cpu::executor_ref executor, scratch_memory& scratch, std::uint8_t* rungs);
    [[nodiscard]] std::vector<made_cache> all_layers(mdkv::layer_shape const& shape, std::int64_t tail_tokens,
        mdkv::cpu::executor_ref executor, scratch_memory& scratch);
    [[nodiscard]] made_cache mixed(prompt_layer<T> const& layer, std::int64_t bytes, std::int64_t tail_tokens,
        mdkv::cpu::executor_ref executor, scratch_memory& scratch, std::uint8_t* rungs);
    /// The prompt that a layer is read into: one for all layers if they share one budget, otherwise one for this layer
    /// alone.
    [[nodiscard]] policy_prompt<T>& prompt_of(prompt_layer<T> const& layer);
    [[nodiscard]] std::int64_t place_of(prompt_layer<T> const& layer) const noexcept
    {
        return policy_.one_budget() ? layer.layer : 0;
    }
    /// The cache of a packed layer, which folds if there is a ledger.
    [[nodiscard]] std::unique_ptr<layer_cache> of_rungs(
        mdkv::cpu::cache<T> packed, prompt_layer<T> const& layer, std::int64_t tail_tokens);
    void share_among_heads(prompt_layer<T> const& layer, std::int64_t bytes);
    /// [heads, past] 1 for tokens that stay: `size` tokens a head, the window among them.
    [[nodiscard]] std::vector<std::uint8_t> chosen_tokens(prompt_layer<T> const& layer, std::int64_t size,
        mdkv::cpu::executor_ref executor, scratch_memory& scratch) const;
    /// [heads, past] scores by the policy's ranking.
    [[nodiscard]] std::vector<float> ranked(
        prompt_layer<T> const& layer, mdkv::cpu::executor_ref executor, scratch_memory& scratch) const;
    /// \param from   [heads, past]
    /// Copies the rungs of the tokens before the window, which has rungs, too, if it is in codes.
    static void copy_rungs(
        mdkv::in_view<std::uint8_t, 2, mdkv::cpu::backend> from, mdkv::index_t past, std::uint8_t* to);
    static void count_rungs(std::span<std::uint8_t const> rungs, mdkv::compress_report& report);

    policy policy_;
    mdkv::budget limit_;
    std::unique_ptr<device_layers<T>> device_; // if the policy runs on a device; caches must go before it
    fold_plan plan_{};
    fold_ledger* ledger_ = nullptr;            // for caches that fold
    std::optional<head_scores> scores_;        // if heads share by scores
    std::vector<mdkv::index_t> quotas_;        // [layers, heads] bytes, for mixed caches shared by scores
    std::unique_ptr<policy_prompt<T>> prompt_; // for policies that replay, or have one budget for all layers
    held_layers<T> held_;                      // for policies with one budget for all layers
    std::vector<std::uint8_t*> asked_;         // [layers held] destinations of their rungs, or null
};

} // namespace runner
