/// \file run_evaluation.hpp: what the commands needle, ruler and answers share: options, the run, and what it leaves in its folder
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "runner/common_options.hpp"
#include "runner/file_replacement.hpp"
#include "runner/policies.hpp"
#include "runner/session.hpp"
#include "runner/terminal.hpp"
#include "answer_log.hpp"
#include "evaluate.hpp"
#include "sample.hpp"
#include "summary.hpp"

namespace runner
{

struct evaluation_options
{
    std::string policies = "all";
    std::vector<std::int64_t> kv_sizes{64, 128, 256, 512};
    std::string question = "both";
    std::string folder;
    std::size_t most_at_once = 64;
    double least_full        = 25;
};

inline void add_evaluation_options(CLI::App& command, evaluation_options& options)
{
    command
        .add_option("--out", options.folder,
            "folder for answers.jsonl, summary.json, table.md and table.csv; answers that are there already are "
            "not made again")
        ->required();
    command
        .add_option("--policies", options.policies,
            "comma-separated, with parameters such as snapkv[pool=5]; all of them by default, those that need "
            "head scores only with --head-scores. See: mdkv_run policies")
        ->capture_default_str();
    command.add_option("--kv-size", options.kv_sizes, "tokens per KV head, comma-separated")
        ->capture_default_str()
        ->delimiter(',');
    command
        .add_option("--question", options.question,
            "window: caches are compressed with the question at the prompt's end; after: without it; both")
        ->capture_default_str()
        ->check(CLI::IsMember({"window", "after", "both"}));
    command.add_option("--at-once", options.most_at_once, "caches in memory at most; more of them share a prefill")
        ->capture_default_str()
        ->check(CLI::Range(1, 1 << 16));
    command
        .add_option(
            "--least-full", options.least_full, "a column on which the full cache scores less is left out of averages")
        ->capture_default_str()
        ->check(CLI::Range(0.0, 100.0));
}

/// One evaluation, as its command describes it to the shared part.
struct evaluation_plan
{
    std::string title;                                 // the command's name
    std::function<std::vector<sample>()> make_samples; // called when everything cheaper has been checked
    std::function<std::map<std::string, double>(sample const&, std::string const&)> score;
    std::vector<std::string> metrics; // that the scores have; the first one is printed
    std::function<std::string(sample const&)> column = [](sample const& one) { return one.task; };
    std::function<std::string(sample const&)> group  = [](sample const&) { return std::string{}; };
    // Prints more before the tables.
    std::function<void(answer_log const&, summary_request const&)> print_more = [](answer_log const&,
                                                                                    summary_request const&) {};
    nlohmann::json options = nlohmann::json::object(); // the command's own, for the record
};

namespace detail
{

[[nodiscard]] inline std::string utc_now()
{
    std::time_t const now = std::time(nullptr);
    std::tm parts{};
    gmtime_r(&now, &parts);
    char text[32];
    std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
    return text;
}

[[nodiscard]] inline std::vector<question_place> places_of(std::string const& question)
{
    if (question == "window") { return {question_place::window}; }
    if (question == "after") { return {question_place::after}; }
    mdkv::expects(question == "both", "question: \"", question, "\" is unknown; there are window, after, both");
    return {question_place::window, question_place::after};
}

/// summary.json, table.md, table.csv
inline void write_summary(std::filesystem::path const& folder, evaluation_plan const& plan,
    evaluation_options const& options, answer_log const& log, summary_request request)
{
    nlohmann::json json{{"command", plan.title}, {"date", utc_now()}, {"model", request.origin.model},
        {"element", request.origin.element}, {"window", request.origin.window}, {"policies", request.policies},
        {"kv_sizes", options.kv_sizes}, {"question", options.question}, {"least_full", options.least_full},
        {"options", plan.options}, {"tables", nlohmann::json::array()}};
    std::string markdown;
    std::vector<summary_table> all;
    for (std::string const& metric : plan.metrics)
    {
        request.metric = metric;
        for (summary_table& shown : summarise(log, request))
        {
            json["tables"].push_back(summary_json(shown));
            markdown += "### " + title_of(shown, plan.title) + "\n\n" + table_of(shown).markdown() + "\n";
            for (std::string const& note : notes_of(shown, options.least_full)) { markdown += note + "\n\n"; }
            all.push_back(std::move(shown));
        }
    }
    replace_file(folder / "summary.json", json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
    replace_file(folder / "table.md", markdown);
    replace_file(folder / "table.csv", csv_of(all));
}

inline void print_summary(evaluation_plan const& plan, evaluation_options const& options, answer_log const& log,
    summary_request const& request)
{
    for (summary_table const& shown : summarise(log, request))
    {
        std::printf("%s\n%s", title_of(shown, plan.title).c_str(), table_of(shown).text().c_str());
        for (std::string const& note : notes_of(shown, options.least_full)) { std::printf("%s\n", note.c_str()); }
        std::fputs("\n", stdout);
    }
}

} // namespace detail

/// Opens the folder's log, makes what is missing, prints the tables and writes them.
/// \throws interrupted   after Ctrl-C; finished answers are kept
template <mdkv::element T>
int run_evaluation(
    session& run, common_options const& common, evaluation_options const& options, evaluation_plan const& plan)
{
    std::vector<policy> policies;
    std::vector<std::string> labels;
    for (std::string const& text : split_policies(options.policies, !common.head_scores.empty()))
    {
        policies.push_back(chosen_policy(text, common));
        labels.push_back(policies.back().label);
    }
    auto const entrants = entrants_of(policies, options.kv_sizes, detail::places_of(options.question));

    std::filesystem::path const folder{options.folder};
    std::error_code problem;
    std::filesystem::create_directories(folder, problem);
    if (problem) { throw mdkv::error{"out: " + options.folder + " cannot be made: " + problem.message()}; }
    answer_log log{(folder / "answers.jsonl").string()};
    if (log.cut() > 0)
    {
        std::fprintf(
            stderr, "%s: the last line was not finished; its %zu bytes were cut off\n", log.path().c_str(), log.cut());
    }
    answer_origin const origin{
        std::filesystem::path{common.model_path}.filename().string(), common.element, common.window};
    evaluation_setting const setting{run.model(), run.words(), run.executor(), origin, options.most_at_once};
    std::size_t const before          = log.answers().size();
    std::vector<sample> const samples = plan.make_samples();
    try
    {
        evaluate<T>(setting, plan.title, samples, entrants, log, plan.score);
    }
    catch (interrupted const&)
    {
        std::fprintf(stderr, "%s keeps %zu answers; the same command goes on from there\n", log.path().c_str(),
            log.answers().size());
        throw;
    }
    summary_request const request{
        samples, origin, plan.metrics.at(0), plan.column, plan.group, labels, options.least_full};
    plan.print_more(log, request);
    detail::print_summary(plan, options, log, request);
    detail::write_summary(folder, plan, options, log, request);
    std::printf("%zu samples, %zu systems, %zu answers made now; model %s, cache element %s, window %lld\n"
                "answers, summary and tables: %s\n",
        samples.size(), entrants.size(), log.answers().size() - before, origin.model.c_str(), origin.element.c_str(),
        static_cast<long long>(origin.window), options.folder.c_str());
    return 0;
}

} // namespace runner
