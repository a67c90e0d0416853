/// \file run_answers.hpp: mdkv_run answers: answers to the samples of files, for bench/quality/score_answers.py to score
#pragma once

#include <mdkv/core/types.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ruler_tasks.hpp"
#include "run_evaluation.hpp"
#include "run_ruler.hpp"
#include "runner/common_options.hpp"
#include "runner/session.hpp"
#include "runner/tokenizer.hpp"
#include "sample.hpp"
#include "sample_file.hpp"

namespace runner
{

struct answers_command
{
    evaluation_options shared;
    std::vector<std::string> files;
    std::int64_t max_length = 0; // 0: prompts are never cut
    std::int64_t samples    = 0; // 0: all
    bool chat               = false;
};

inline void add_answers_options(CLI::App& command, answers_command& options)
{
    add_evaluation_options(command, options.shared);
    command
        .add_option("--file", options.files,
            "lines of JSON: task, context, question, answers, and as far as they are there id, answer_prefix, "
            "max_new_tokens, chat, stop_at_newline (bench/quality/make_samples.py writes them)")
        ->required();
    command
        .add_option("--max-length", options.max_length,
            "tokens of a prompt beyond which its middle is cut out (LongBench's runs: 3500, 7500, 7950, 31500); 0: "
            "prompts stay whole")
        ->capture_default_str()
        ->check(CLI::NonNegativeNumber);
    command.add_option("--samples", options.samples, "of every task at most; 0: all")
        ->capture_default_str()
        ->check(CLI::NonNegativeNumber);
    command.add_flag("--chat", options.chat, "prompts whose lines do not say in the model's chat form");
}

namespace detail
{

[[nodiscard]] inline std::vector<sample> samples_of_files(tokenizer const& words, answers_command const& options)
{
    std::vector<sample> all;
    std::map<std::string, std::int64_t> taken; // by task
    for (std::string const& file : options.files)
    {
        for (sample& one : read_sample_file(file, options.chat))
        {
            if (options.samples > 0 && taken[one.task]++ >= options.samples) { continue; }
            all.push_back(
                options.max_length > 0 ? cut_in_the_middle(words, std::move(one), options.max_length) : std::move(one));
        }
    }
    return all;
}

} // namespace detail

/// \return the process's exit status
template <mdkv::element T>
int run_answers(session& run, common_options const& common, answers_command const& options)
{
    evaluation_plan plan;
    plan.title        = "answers";
    plan.make_samples = [&] { return detail::samples_of_files(run.words(), options); };
    plan.score        = [](sample const& one, std::string const& text) {
        bool const of_ruler = std::ranges::find(ruler::tasks, one.task, &ruler::task::name) != ruler::tasks.end();
        return of_ruler ? detail::ruler_scores(one, text) : std::map<std::string, double>{};
    };
    plan.metrics = {"match"};
    plan.options = {{"files", options.files}, {"max_length", options.max_length}, {"samples", options.samples},
        {"chat", options.chat}};
    return run_evaluation<T>(run, common, options.shared, plan);
}

} // namespace runner
