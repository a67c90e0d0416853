/// \file run_needle.hpp: mdkv_run needle: one sentence hidden in a long book, found through every policy's cache or not
#pragma once

#include <mdkv/core/types.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

#include "runner/common_options.hpp"
#include "runner/session.hpp"
#include "answer_log.hpp"
#include "heatmap.hpp"
#include "metrics.hpp"
#include "needle.hpp"
#include "needle_haystack.hpp"
#include "needle_options.hpp"
#include "run_evaluation.hpp"
#include "sample.hpp"
#include "summary.hpp"

namespace runner
{

struct needle_command
{
    evaluation_options shared;
    std::vector<std::string> texts;
    std::string lengths = "512,1024,2048,4096";
    std::string depths; // empty: 10 even ones
    std::string prompt  = "original";
    std::string kind    = "sandwich";
    std::string fit     = "exact";
    std::int64_t buffer = 200;
    std::uint64_t seed  = 0;
    std::int64_t digits = needle_options{}.digits;
    bool heatmaps       = true;
};

inline void add_needle_options(CLI::App& command, needle_command& options)
{
    add_evaluation_options(command, options.shared);
    command.add_option("--text", options.texts, "haystack: text files, or folders of *.txt")->required();
    command.add_option("--lengths", options.lengths, "tokens of the prompts: 512,1024 or FIRST:LAST:STEP")
        ->capture_default_str();
    command.add_option("--depths", options.depths, "percent, comma-separated; ten from 0 to 100 by default");
    command.add_option("--prompt", options.prompt, "original (in the chat form) or headkv (plain)")
        ->capture_default_str();
    command
        .add_option("--needle", options.kind,
            "sandwich (the public one), number (another one in every sample), or pair (both, asked one after the "
            "other)")
        ->capture_default_str();
    command.add_option("--fit", options.fit, "exact: prompts have these lengths; buffer: the public rule")
        ->capture_default_str();
    command.add_option("--buffer", options.buffer, "tokens the public rule keeps free")->capture_default_str();
    command.add_option("--seed", options.seed, "of the numbers")->capture_default_str();
    command.add_option("--digits", options.digits, "of a number")->check(CLI::Range(1, 1000))->capture_default_str();
    command.add_flag("!--no-heatmaps", options.heatmaps, "print tables only");
}

namespace detail
{

[[nodiscard]] inline needle_options needles_of(needle_command const& command)
{
    needle_options needles;
    needles.lengths = parse_needle_lengths(command.lengths);
    if (!command.depths.empty()) { needles.depths = parse_needle_depths(command.depths); }
    needles.form   = parse_needle_form(command.prompt);
    needles.kind   = parse_needle_kind(command.kind);
    needles.fit    = parse_needle_fit(command.fit);
    needles.buffer = command.buffer;
    needles.seed   = command.seed;
    needles.digits = command.digits;
    return needles;
}

/// The sandwich by its words, as the public programs draw it; a number is there or not. A pair's answers have scores of
/// their own. ROUGE-1 of the whole needle: bench/quality/score_answers.py.
[[nodiscard]] inline std::map<std::string, double> needle_scores(sample const& one, std::string const& text)
{
    if (one.about.at("needle_kind") == text_of(needle_kind::pair))
    {
        std::string const first  = text.substr(0, text.find('\n'));
        std::string const second = text.substr(std::min(text.size(), first.size() + 1));
        return {{"first", 100 * word_recall(first, one.answers.at(0))},
            {"second", 100 * string_match_all(second, one.next_answers)}};
    }
    if (one.about.at("needle_kind") == text_of(needle_kind::number))
    {
        return {{"match", 100 * string_match_all(text, one.answers)}};
    }
    return {{"recall", 100 * word_recall(text, one.answers.at(0))}};
}

[[nodiscard]] inline std::vector<std::string> needle_metrics(needle_kind kind)
{
    if (kind == needle_kind::pair) { return {"first", "second"}; }
    return {kind == needle_kind::number ? "match" : "recall"};
}

} // namespace detail

/// \return the process's exit status
template <mdkv::element T>
int run_needle(session& run, common_options const& common, needle_command const& options)
{
    constexpr std::size_t most_columns = 12; // of lengths; the heatmaps show more
    needle_options const needles       = detail::needles_of(options);
    evaluation_plan plan;
    plan.title        = "needle";
    plan.make_samples = [&] { return make_needle_samples(run.words(), read_haystack(options.texts), needles); };
    plan.score        = detail::needle_scores;
    plan.metrics      = detail::needle_metrics(needles.kind);
    if (needles.lengths.size() <= most_columns)
    {
        plan.column = [](sample const& one) { return std::to_string(one.about.at("length").get<std::int64_t>()); };
    }
    plan.options = {{"text", options.texts}, {"lengths", needles.lengths}, {"depths", needles.depths},
        {"prompt", options.prompt}, {"needle", options.kind}, {"fit", options.fit}, {"seed", options.seed},
        {"digits", options.digits}};
    if (needles.fit == needle_fit::buffer) { plan.options["buffer"] = options.buffer; }
    if (options.heatmaps)
    {
        plan.print_more = [](answer_log const& log, summary_request const& request) {
            for (heatmap const& map : heatmaps_of(log, request))
            {
                std::printf("%s\n", heatmap_text(map, isatty(STDOUT_FILENO) != 0).c_str());
            }
            std::puts("depth down, length across; a digit: tens of points, *: all 100");
        };
    }
    return run_evaluation<T>(run, common, options.shared, plan);
}

} // namespace runner
