/// \file run_ruler.hpp: mdkv_run ruler: RULER's tasks, generated
#pragma once

#include <mdkv/core/types.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <iterator>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runner/common_options.hpp"
#include "runner/session.hpp"
#include "runner/tokenizer.hpp"
#include "metrics.hpp"
#include "needle.hpp"
#include "ruler.hpp"
#include "ruler_tasks.hpp"
#include "run_evaluation.hpp"
#include "sample.hpp"

namespace runner
{

struct ruler_command
{
    evaluation_options shared;
    ruler_options made; // its samples and lengths are those below
    std::int64_t samples = 20;
    std::vector<std::int64_t> lengths{4096};
    std::vector<std::string> tasks{"niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2",
        "niah_multiquery", "niah_multivalue", "vt"};
    bool chat = false;
};

inline void add_ruler_options(CLI::App& command, ruler_command& options)
{
    add_evaluation_options(command, options.shared);
    command.add_option("--tasks", options.tasks, "to generate, comma-separated, or all: the 13 of RULER")
        ->capture_default_str()
        ->delimiter(',');
    command.add_option("--lengths", options.lengths, "tokens of prompt and answer together, comma-separated")
        ->capture_default_str()
        ->delimiter(',');
    command.add_option("--samples", options.samples, "of every task and length")
        ->capture_default_str()
        ->check(CLI::Range(1, 1 << 20));
    command.add_option("--seed", options.made.seed, "of the generator")->capture_default_str();
    command.add_flag("--chat", options.chat, "prompts in the model's chat form; as they are otherwise");
    command.add_flag("--close-fit", options.made.close_fit,
        "prompts as long as fits; the public generator shrinks in steps that leave short ones much shorter");
    command.add_option("--words", options.made.words_folder,
        "folder of adjectivelist.txt, nounlist.txt, verblist.txt, for niah_* and cwe (bash examples/setup.sh words)");
    command.add_option("--more-words", options.made.more_words_path, "one word a line, for long cwe");
    command.add_option("--essay", options.made.essay_path, "prose, for the niah_* in essays");
    command.add_option("--squad", options.made.squad_path, "SQuAD's dev-v2.0.json, for qa_1");
    command.add_option("--hotpot", options.made.hotpot_path, "hotpot_dev_distractor_v1.json, for qa_2");
}

namespace detail
{

[[nodiscard]] inline std::map<std::string, double> ruler_scores(sample const& one, std::string const& text)
{
    bool const part = ruler::find_task(one.task).family == ruler::family::documents;
    return {{"match", 100 * (part ? string_match_part(text, one.answers) : string_match_all(text, one.answers))}};
}

[[nodiscard]] inline std::vector<sample> ruler_samples(tokenizer const& words, ruler_command const& options)
{
    std::vector<sample> all;
    std::vector<std::string> tasks;
    for (std::string const& name : options.tasks)
    {
        if (name != "all") { tasks.push_back(name); }
        else { tasks = ruler_task_names(); }
    }
    auto const count = [&](std::string_view text) { return std::ssize(words.encode(text)); };
    for (std::int64_t const length : options.lengths)
    {
        ruler_options made   = options.made;
        made.max_length      = length;
        made.samples         = options.samples;
        made.template_tokens = tokens_around(words, options.chat);
        for (std::string const& name : tasks)
        {
            for (sample& one : make_ruler_samples(made, name, count))
            {
                one.chat = options.chat;
                all.push_back(std::move(one));
            }
        }
    }
    return all;
}

} // namespace detail

/// \return the process's exit status
template <mdkv::element T>
int run_ruler(session& run, common_options const& common, ruler_command const& options)
{
    evaluation_plan plan;
    plan.title        = "ruler";
    plan.make_samples = [&] { return detail::ruler_samples(run.words(), options); };
    plan.score        = detail::ruler_scores;
    plan.metrics      = {"match"};
    plan.group        = [](sample const& one) {
        return std::to_string(one.about.at("max_length").template get<std::int64_t>()) + " tokens";
    };
    plan.options = {{"tasks", options.tasks}, {"lengths", options.lengths}, {"samples", options.samples},
        {"seed", options.made.seed}, {"chat", options.chat}, {"close_fit", options.made.close_fit}};
    return run_evaluation<T>(run, common, options.shared, plan);
}

} // namespace runner
