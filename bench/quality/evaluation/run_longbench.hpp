/// \file run_longbench.hpp: mdkv_run longbench: the 16 English tasks of LongBench, from its files
#pragma once

#include <mdkv/core/types.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "runner/common_options.hpp"
#include "runner/session.hpp"
#include "runner/tokenizer.hpp"
#include "longbench.hpp"
#include "longbench_tasks.hpp"
#include "metrics.hpp"
#include "needle.hpp"
#include "rouge.hpp"
#include "run_evaluation.hpp"
#include "sample.hpp"

namespace runner
{

struct longbench_command
{
    evaluation_options shared;
    std::string data;
    std::vector<std::string> tasks{"all"};
    std::int64_t max_length = 0; // 0: what the model's context leaves
    std::int64_t samples    = 0; // 0: all
    bool plain              = false;
};

inline void add_longbench_options(CLI::App& command, longbench_command& options)
{
    add_evaluation_options(command, options.shared);
    command.add_option("--data", options.data, "folder of TASK.jsonl, or the file of one task (THUDM/LongBench)")
        ->required();
    command.add_option("--tasks", options.tasks, "comma-separated, or all: the 16 English ones")
        ->capture_default_str()
        ->delimiter(',');
    command
        .add_option("--max-length", options.max_length,
            "tokens of a prompt beyond which its middle is cut out (public runs: 3500, 7500, 7950, 31500); 0: "
            "what the model's context leaves")
        ->capture_default_str()
        ->check(CLI::NonNegativeNumber);
    command.add_option("--samples", options.samples, "of every task at most; 0: all")
        ->capture_default_str()
        ->check(CLI::NonNegativeNumber);
    command.add_flag("--plain", options.plain, "no chat form around any prompt, as the HeadKV runs have it");
}

namespace detail
{

[[nodiscard]] inline double longbench_score(longbench_task const& task, sample const& one, std::string_view text)
{
    if (task.first_line) { text = first_line(text); }
    return best_of(one.answers, [&](std::string const& reference) {
        switch (task.metric)
        {
            case longbench_metric::f1:
                return token_f1(text, reference);
            case longbench_metric::rouge_l:
                return rouge_l(text, reference);
            case longbench_metric::classification:
                return classification_score(text, reference, one.classes);
            case longbench_metric::retrieval:
                return retrieval_score(text, reference);
            case longbench_metric::count:
                return count_score(text, reference);
            case longbench_metric::code_similarity:
                break;
        }
        return code_similarity(text, reference);
    });
}

[[nodiscard]] inline std::vector<sample> longbench_samples(
    tokenizer const& words, std::int64_t context, longbench_command const& options)
{
    constexpr std::int64_t drift = 64; // tokens a text cut in the middle may gain when it is read
    std::vector<std::string> names;
    for (std::string const& name : options.tasks)
    {
        if (name != "all")
        {
            names.push_back(name);
            continue;
        }
        for (longbench_task const& task : longbench_tasks()) { names.emplace_back(task.name); }
    }
    std::vector<sample> all;
    for (std::string const& name : names)
    {
        longbench_task const& task = find_longbench_task(name);
        bool const chat            = task.chat && !options.plain;
        std::int64_t const room    = context - task.max_new_tokens - tokens_around(words, chat) - drift;
        std::int64_t const most    = options.max_length > 0 ? options.max_length : room;
        add_samples(all, make_longbench_samples(words, task, options.data, most), options.samples, chat);
    }
    return all;
}

} // namespace detail

/// \return the process's exit status
template <mdkv::element T>
int run_longbench(session& run, common_options const& common, longbench_command const& options)
{
    evaluation_plan plan;
    plan.title        = "longbench";
    plan.make_samples = [&] { return detail::longbench_samples(run.words(), run.model().shape().context, options); };
    plan.score        = [](sample const& one, std::string const& text) {
        return std::map<std::string, double>{
            {"score", 100 * detail::longbench_score(find_longbench_task(one.task), one, text)}};
    };
    plan.metrics = {"score"};
    plan.options = {{"data", options.data}, {"tasks", options.tasks}, {"max_length", options.max_length},
        {"samples", options.samples}, {"plain", options.plain}};
    return run_evaluation<T>(run, common, options.shared, plan);
}

} // namespace runner
