/// \file compare_options.hpp: what mdkv_run compare is asked for: texts, policies and budgets
#pragma once

#include <mdkv/core/budget.hpp>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common_options.hpp"
#include "option_texts.hpp"
#include "policies.hpp"

namespace runner
{

struct compare_options
{
    std::vector<std::string> text_paths; // each by itself; with more than one the means are shown, too
    std::int64_t context      = 2048;
    std::int64_t continuation = 128;
    std::vector<std::int64_t> kv_sizes; // tokens per KV head
    std::vector<std::string> budgets;   // "5%", "1/16" or bytes a layer; without either: KV 64, 128, 256, 512
    std::int64_t fold_every = 0; // tokens after which caches fold them, tails within their bytes, too; 0: they grow
    std::string policies    = "full,best,any_question,by_window,paper,snapkv";
    std::string json_path;
    bool control_tokens = false; // texts of control tokens, such as <|im_end|>, stand for these
};

/// A budget and how tables call it.
struct named_budget
{
    std::string text;
    mdkv::budget limit;
};

[[nodiscard]] inline std::vector<named_budget> budgets_of(compare_options const& options)
{
    std::vector<named_budget> all;
    auto const add_size = [&](std::int64_t size) {
        all.push_back({"KV " + std::to_string(size), mdkv::budget::kv_size(size)});
    };
    for (std::int64_t const size : options.kv_sizes) { add_size(size); }
    for (std::string const& text : options.budgets) { all.push_back({text, parse_budget(text)}); }
    for (std::int64_t size = 64; options.kv_sizes.empty() && options.budgets.empty() && size <= 512; size *= 2)
    {
        add_size(size);
    }
    return all;
}

/// The policies to measure beside the full cache, which is always there.
[[nodiscard]] inline std::vector<policy> measured_policies(common_options const& common, compare_options const& options)
{
    std::vector<policy> all;
    for (std::string const& text : split_policies(options.policies, !common.head_scores.empty()))
    {
        policy chosen = chosen_policy(text, common);
        if (!chosen.whole()) { all.push_back(std::move(chosen)); }
    }
    return all;
}

} // namespace runner
