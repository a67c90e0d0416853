/// \file make_cache.hpp: the definitions of cache_maker: the parts of each kind of policy
#pragma once

#include <mdkv/compress.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/stages/pool.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "cache_maker.hpp"
#include "fold_plan.hpp"
#include "folding_cache.hpp"
#include "h2o.hpp"
#include "head_scores.hpp"
#include "headkv_quotas.hpp"
#include "keep.hpp"
#include "layer_cache.hpp"
#include "low_rank.hpp"
#include "packed_cache.hpp"
#include "policy_prompt.hpp"
#include "prompt_layer.hpp"
#include "pyramid.hpp"
#include "runner/policies.hpp"
#include "runner/scratch_memory.hpp"
#include "runner/terminal.hpp"
#include "snapkv.hpp"

namespace runner
{

template <mdkv::element T>
cache_maker<T>::cache_maker(
    policy chosen, mdkv::budget limit, std::int64_t layers, std::int64_t query_heads, fold_ledger* ledger)
    : policy_{std::move(chosen)}
    , limit_{policy_.whole() ? mdkv::budget::fraction(1, 1) : limit}
    , ledger_{ledger}
{
    if (policy_.share == sharing::head_scores) { scores_ = read_head_scores(policy_.head_scores, layers, query_heads); }
    if (policy_.backend == backend_kind::cuda) { device_ = make_device_layers<T>(); }
}

template <mdkv::element T>
cache_maker<T>::cache_maker(policy chosen, fold_plan const& plan, fold_ledger& ledger)
    : policy_{std::move(chosen)}
    , limit_{mdkv::budget::bytes(plan.arena)}
    , plan_{plan}
    , ledger_{&ledger}
{
    mdkv::expects(policy_.backend == backend_kind::cpu, "--backend cuda: policy ", policy_.label,
        " folds what is appended on the CPU only");
}

template <mdkv::element T>
std::vector<made_cache> cache_maker<T>::make(prompt_layer<T> const& layer, mdkv::layer_shape const& shape,
    std::int64_t tail_tokens, mdkv::cpu::executor_ref executor, scratch_memory& scratch, std::uint8_t* rungs)
{
    std::vector<made_cache> made;
    if (!policy_.one_budget())
    {
        made.push_back(one_layer(layer, shape, tail_tokens, executor, scratch, rungs));
        return made;
    }
    mdkv::expects(limit_.in_bytes(shape) >= shape.window_bytes(), "policy ", policy_.label, ": ",
        limit_.in_bytes(shape), " bytes a layer do not hold the window of ", shape.window_bytes());
    if (interrupt_requested()) { throw interrupted{}; }
    prompt_of(layer).finish(place_of(layer), layer, executor, scratch);
    held_.add(layer);
    asked_.push_back(rungs);
    if (layer.layer + 1 == layer.layers) { made = all_layers(shape, tail_tokens, executor, scratch); }
    return made;
}

template <mdkv::element T>
std::vector<made_cache> cache_maker<T>::all_layers(
    mdkv::layer_shape const& shape, std::int64_t tail_tokens, mdkv::cpu::executor_ref executor, scratch_memory& scratch)
{
    auto const layers = std::ssize(held_.all());
    auto& prompt      = **prompt_;
    auto const limit  = mdkv::budget::bytes(limit_.in_bytes(shape)); // bytes of the model's own cache
    auto const chosen = scratch.run(executor, [&](mdkv::cpu::backend on) { return prompt.allocate(on, limit); });
    std::vector<made_cache> made(static_cast<std::size_t>(layers));
    for (std::size_t i = 0; i < made.size(); ++i)
    {
        if (interrupt_requested()) { throw interrupted{}; }
        prompt_layer<T> const& layer = held_.all()[i];
        auto const place             = static_cast<std::int64_t>(i);
        mdkv::cpu::cache<T> packed;
        made[i].report = scratch.run(executor, [&](mdkv::cpu::backend on) {
            return prompt.pack(on, place, policy_prompt<T>::rows_of(on, layer), packed);
        });
        if (device_ != nullptr)
        {
            packed.reserve_tail(tail_tokens);
            made[i].cache = device_->copy(packed, layer.group);
        }
        else { made[i].cache = of_rungs(std::move(packed), layer, tail_tokens); }
        if (asked_[i] != nullptr) { copy_rungs(prompt.rungs_of(place), layer.past(), asked_[i]); }
    }
    made.back().report.chosen.loss = chosen.loss; // reports of layers are added up
    made.back().report.chosen.dual = chosen.dual;
    held_                          = {};
    prompt_.reset();
    asked_.clear();
    return made;
}

template <mdkv::element T>
void cache_maker<T>::read(prompt_layer<T> const& layer, layer_chunk<T> const& chunk, mdkv::cpu::executor_ref executor,
    scratch_memory& scratch)
{
    prompt_of(layer).read(place_of(layer), layer, chunk, executor, scratch);
}

template <mdkv::element T>
policy_prompt<T>& cache_maker<T>::prompt_of(prompt_layer<T> const& layer)
{
    if (prompt_ == nullptr)
    {
        prompt_ = std::make_unique<policy_prompt<T>>(policy_, layer, policy_.one_budget() ? layer.layers : 1);
    }
    return *prompt_;
}

template <mdkv::element T>
made_cache cache_maker<T>::one_layer(prompt_layer<T> const& layer, mdkv::layer_shape const& shape,
    std::int64_t tail_tokens, mdkv::cpu::executor_ref executor, scratch_memory& scratch, std::uint8_t* rungs)
{
    std::int64_t const bytes = limit_.in_bytes(shape);
    if (policy_.kind == cache_kind::whole || policy_.kind == cache_kind::mixed)
    {
        return mixed(layer, bytes, tail_tokens, executor, scratch, rungs);
    }
    mdkv::expects(rungs == nullptr || policy_.kind == cache_kind::selected, "policy ", policy_.label,
        ": its tokens have no rungs to show");
    made_cache made;
    mdkv::ratio_set const kept_or_not = mdkv::evict_ratios;
    std::int64_t const whole          = layer.heads * shape.token_bytes();
    std::int64_t const stored         = layer.heads * kept_or_not.bytes(1, shape.dims, shape.element_bytes);
    mdkv::expects(bytes >= layer.window * whole, "policy ", policy_.label, ": ", bytes, " bytes a layer are ",
        bytes / whole, " tokens of each cached head, fewer than the window of ", layer.window);
    std::int64_t const channels = layer.heads * mdkv::rung_costs{kept_or_not, shape.dims, shape.element_bytes}.channels;
    std::int64_t const beyond   = std::max<std::int64_t>(bytes - layer.window * whole - channels, 0);
    std::int64_t const size     = std::min(layer.window + beyond / stored, layer.tokens); // T
    if (policy_.kind == cache_kind::selected)
    {
        auto const kept = chosen_tokens(layer, size, executor, scratch);
        made.cache      = std::make_unique<packed_cache<T>>(
            pack_layer(executor, scratch, layer, kept_or_not, {}, kept), layer.group, tail_tokens);
        count_rungs(kept, made.report);
        if (rungs != nullptr) { std::copy(kept.begin(), kept.end(), rungs); }
    }
    else
    {
        auto const rank = low_rank_that_fits(shape_of(layer), bytes);
        made.cache =
            std::make_unique<packed_cache<T>>(low_rank_cache(executor, scratch, layer, rank), layer.group, tail_tokens);
        made.report.chosen.tokens[rank == 0 ? 0 : 1] = layer.heads * layer.past();
    }
    made.report.shape          = shape;
    made.report.budget_bytes   = bytes;
    made.report.window_bytes   = shape.window_bytes();
    made.report.resident_bytes = made.cache->resident_bytes();
    made.report.full_bytes     = shape.full_bytes();
    return made;
}

template <mdkv::element T>
made_cache cache_maker<T>::mixed(prompt_layer<T> const& layer, std::int64_t bytes, std::int64_t tail_tokens,
    mdkv::cpu::executor_ref executor, scratch_memory& scratch, std::uint8_t* rungs)
{
    mdkv::index_t limit   = bytes;
    mdkv::index_t* quotas = nullptr;
    if (scores_)
    {
        if (quotas_.empty()) { share_among_heads(layer, bytes); }
        quotas = quotas_.data() + layer.layer * layer.heads;
        limit  = shape_of(layer).window_bytes() + std::accumulate(quotas, quotas + layer.heads, mdkv::index_t{0});
    }
    if (interrupt_requested()) { throw interrupted{}; }
    made_cache made;
    if (device_ != nullptr)
    {
        made.cache = device_->compress(layer,
            {.by             = preset_of(policy_, layer.window, layer.question),
                .bytes       = limit,
                .rungs       = rungs,
                .tail_tokens = tail_tokens},
            made.report);
        return made;
    }
    auto& prompt = prompt_of(layer);
    prompt.finish(0, layer, executor, scratch);
    mdkv::cpu::cache<T> cache;
    if (ledger_ != nullptr) { cache = mdkv::cpu::cache<T>{mdkv::cache_layout{}, 0, 0, &ledger_->memory}; }
    scratch.run(executor, [&](mdkv::cpu::backend on) {
        auto const chosen  = quotas != nullptr ? prompt->allocate(
                                on, mdkv::in(on, static_cast<mdkv::index_t const*>(quotas), 1, layer.heads))
                                               : prompt->allocate(on, mdkv::budget::bytes(limit));
        made.report        = prompt->pack(on, 0, policy_prompt<T>::rows_of(on, layer), cache);
        made.report.chosen = chosen;
    });
    if (rungs != nullptr) { copy_rungs(prompt->rungs_of(0), layer.past(), rungs); }
    prompt_.reset();
    made.cache = of_rungs(std::move(cache), layer, tail_tokens);
    return made;
}

template <mdkv::element T>
std::unique_ptr<layer_cache> cache_maker<T>::of_rungs(
    mdkv::cpu::cache<T> packed, prompt_layer<T> const& layer, std::int64_t tail_tokens)
{
    if (ledger_ == nullptr) { return std::make_unique<packed_cache<T>>(std::move(packed), layer.group, tail_tokens); }
    fold_plan const own{
        packed.fold_limit, policy_.tail, std::min(most_fold_queries, policy_.tail), policy_.grows ? layer.tokens : 0};
    return std::make_unique<folding_cache<T>>(
        std::move(packed), layer.group, policy_, policy_.tail > 0 ? own : plan_, *ledger_);
}

/// Bytes of every head of the model, decided once: at the first layer, when the prompt's length is known.
template <mdkv::element T>
void cache_maker<T>::share_among_heads(prompt_layer<T> const& layer, std::int64_t bytes)
{
    mdkv::layer_shape const shape = shape_of(layer);
    std::int64_t const beyond     = bytes - shape.window_bytes();
    mdkv::expects(beyond >= 0, "policy ", policy_.label, ": ", bytes, " bytes a layer do not hold the window of ",
        shape.window_bytes());
    std::vector<mdkv::index_t> const most(
        static_cast<std::size_t>(layer.layers * layer.heads), layer.past() * shape.token_bytes());
    quotas_ = mixed_head_quotas(*scores_, layer.group, layer.layers * beyond, most, policy_.beta);
}

template <mdkv::element T>
std::vector<std::uint8_t> cache_maker<T>::chosen_tokens(
    prompt_layer<T> const& layer, std::int64_t size, mdkv::cpu::executor_ref executor, scratch_memory& scratch) const
{
    std::int64_t const past = size - layer.window; // b: past tokens of an average head
    if (past >= layer.past())
    {
        return std::vector<std::uint8_t>(static_cast<std::size_t>(layer.heads * layer.past()), std::uint8_t{1});
    }
    auto const even   = uniform_counts(layer.heads, layer.past(), past);
    auto const scores = ranked(layer, executor, scratch);
    switch (policy_.share)
    {
        case sharing::pyramid:
        {
            if (past == 0) { break; }
            auto const own = pyramid_capacity(
                past, layer.tokens, layer.window, layer.layer, layer.layers, static_cast<std::int64_t>(policy_.beta));
            return keep_best(scores, uniform_counts(layer.heads, layer.past(), own.value_or(layer.past())));
        }
        case sharing::head_scores:
        {
            if (past == 0) { break; }
            auto const all = headkv_capacities_of_kv_heads(
                headkv_capacities(*scores_, size, layer.window, policy_.beta), layer.group);
            auto const first = all.begin() + static_cast<std::ptrdiff_t>(layer.layer * layer.heads);
            return keep_best(scores, std::vector<std::int64_t>(first, first + layer.heads));
        }
        case sharing::uniform:
            break;
    }
    return keep_best(scores, even);
}

template <mdkv::element T>
std::vector<float> cache_maker<T>::ranked(
    prompt_layer<T> const& layer, mdkv::cpu::executor_ref executor, scratch_memory& scratch) const
{
    if (policy_.rank == ranking::all_attention) { return h2o_scores(layer, executor, scratch); }
    return snapkv_scores(layer, {.pooling = policy_.options.pooling, .mean = true}, executor, scratch);
}

template <mdkv::element T>
void cache_maker<T>::copy_rungs(
    mdkv::in_view<std::uint8_t, 2, mdkv::cpu::backend> from, mdkv::index_t past, std::uint8_t* to)
{
    for (mdkv::index_t h = 0; h < from.extent(0); ++h) { to = std::copy_n(from.row(h), past, to); }
}

template <mdkv::element T>
void cache_maker<T>::count_rungs(std::span<std::uint8_t const> rungs, mdkv::compress_report& report)
{
    for (std::uint8_t const rung : rungs) { ++report.chosen.tokens[rung]; }
}

} // namespace runner
