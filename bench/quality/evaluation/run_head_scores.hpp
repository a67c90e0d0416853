/// \file run_head_scores.hpp: mdkv_run head-scores: finds out which query heads retrieve, on statements hidden in prose
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "policies/head_scores.hpp"
#include "runner/chat.hpp"
#include "runner/common_options.hpp"
#include "runner/file_bytes.hpp"
#include "runner/file_error.hpp"
#include "runner/language_model.hpp"
#include "runner/session.hpp"
#include "runner/terminal.hpp"
#include "runner/tokenizer.hpp"
#include "head_detection.hpp"
#include "hidden_statements.hpp"
#include "metrics.hpp"
#include "partial_scores.hpp"
#include "random.hpp"

namespace runner
{

struct head_scores_options
{
    std::string text_path;
    std::string out_path;
    std::string kind = "r2";
    std::vector<std::int64_t> lengths{512, 1024, 2048};
    std::int64_t depths  = 10;
    std::int64_t samples = 60;
    std::uint64_t seed   = 0;
    double least_f1      = 50; // percent; a sample counts above it, below 0 always
    bool raw             = false;
    int digits           = 4;
};

inline void add_head_scores_options(CLI::App& command, head_scores_options& options)
{
    command.add_option("--text", options.text_path, "prose to hide statements in")->required();
    command.add_option("--out", options.out_path, "file for the scores; FILE.partial keeps an unfinished run")
        ->required();
    command.add_option("--kind", options.kind, "r2: attention to the needle (HeadKV); r: copying heads")
        ->capture_default_str()
        ->check(CLI::IsMember({"r2", "r"}));
    command.add_option("--lengths", options.lengths, "tokens of the prompts, comma-separated")
        ->capture_default_str()
        ->delimiter(',');
    command.add_option("--depths", options.depths, "different depths, evenly from 0 to 100 %")
        ->capture_default_str()
        ->check(CLI::Range(1, 1000));
    command.add_option("--samples", options.samples, "prompts to try; lengths and depths take turns")
        ->capture_default_str()
        ->check(CLI::Range(1, 100000));
    command.add_option("--seed", options.seed, "of statements and places in the text")->capture_default_str();
    command
        .add_option("--least-f1", options.least_f1,
            "a sample counts if its answer's F1 is above this and nearer to the statement than to its look-alike; -1: "
            "always")
        ->capture_default_str()
        ->check(CLI::Range(-1.0, 100.0));
    command.add_flag("--raw", options.raw, "the prompts as plain text, without the model's chat form");
    command.add_option("--digits", options.digits, "significant digits of the scores")
        ->capture_default_str()
        ->check(CLI::Range(1, 17));
}

namespace detail
{

/// One prompt with a statement in it.
struct retrieval_task
{
    std::int64_t length = 0;
    double depth        = 0;
    hidden_statement hidden;
    std::vector<std::int32_t> prompt;
    token_span needle;
};

/// The tokens that hold any byte of `text`, which is in the prompt once.
[[nodiscard]] inline token_span span_of(
    tokenizer const& words, std::span<std::int32_t const> prompt, std::string const& text)
{
    std::size_t const first = words.decode(prompt).find(text);
    mdkv::expects(first != std::string::npos, "head-scores: the model has no tokens for the statement ", text);
    std::size_t const last = first + text.size();
    token_span span;
    std::size_t begin = 0; // byte of token i
    for (std::int64_t i = 0; i < std::ssize(prompt) && begin < last; ++i)
    {
        std::size_t const end = begin + words.decode_one(prompt[static_cast<std::size_t>(i)]).size();
        if (begin <= first) { span.begin = i; }
        span.end = i + 1;
        begin    = end;
    }
    return span;
}

/// Prompt `index` of the run: the same whatever was run before it.
[[nodiscard]] inline retrieval_task make_retrieval_task(
    tokenizer const& words, std::span<std::int32_t const> prose, head_scores_options const& options, std::int64_t index)
{
    auto const lengths = std::ssize(options.lengths);
    portable_random random{options.seed * 0x9E3779B97F4A7C15U + static_cast<std::uint64_t>(index)};
    retrieval_task task;
    task.length          = options.lengths[static_cast<std::size_t>(index % lengths)];
    task.depth           = options.depths == 1 ? 50
                                               : 100.0 * static_cast<double>(index / lengths % options.depths)
                                           / static_cast<double>(options.depths - 1);
    task.hidden          = make_hidden_statement(random);
    auto const prompt_of = [&](std::string const& book) {
        return encode_parts(words, "This is a very long book:\n<book>\n" + book + "\n</book>\n",
            "Based on the content of the book, answer the question with a full sentence.\nQuestion: "
                + task.hidden.question + (options.raw ? "\nAnswer:" : ""),
            "", !options.raw)
            .whole();
    };
    double const decoy_depth = static_cast<double>(random.between(0, 100));
    auto const around        = std::ssize(prompt_of(hide("", task.hidden, 0, 0)));
    std::int64_t const count = task.length - around;
    mdkv::expects(count >= 32, "lengths: a prompt of ", task.length, " tokens leaves ", count,
        " for the prose; there must be 32");
    std::int64_t const start = random.between(0, std::ssize(prose) - count);
    std::string const text =
        words.decode(prose.subspan(static_cast<std::size_t>(start), static_cast<std::size_t>(count)));
    task.prompt = prompt_of(hide(text, task.hidden, task.depth, decoy_depth));
    task.needle = span_of(words, task.prompt, task.hidden.statement);
    return task;
}

/// Throws before anything is run.
inline void expect_options(head_scores_options const& options, model_shape const& shape)
{
    mdkv::expects(!options.out_path.empty(), "out: no file is given");
    mdkv::expects(options.kind == "r2" || options.kind == "r", "kind: \"", options.kind, "\" is neither r2 nor r");
    mdkv::expects(!options.lengths.empty(), "lengths: none is given");
    constexpr std::int64_t answer = 64; // room for it; statements have about 25 tokens
    for (std::int64_t const length : options.lengths)
    {
        mdkv::expects(length >= 1 && length <= shape.context - answer, "lengths: ", length,
            " tokens and an answer do not fit the model's context of ", shape.context);
    }
    mdkv::expects(options.depths >= 1, "depths: ", options.depths, " is not positive");
    mdkv::expects(options.samples >= 1, "samples: ", options.samples, " is not positive");
    mdkv::expects(
        std::isfinite(options.least_f1) && options.least_f1 < 100, "least-f1: ", options.least_f1, " is not below 100");
    mdkv::expects(options.digits >= 1 && options.digits <= 17, "digits: ", options.digits, " is not in 1 to 17");
}

/// The heads with the largest means, such as "16-3 0.41".
[[nodiscard]] inline std::string most_important(
    std::vector<std::vector<double>> const& lists, std::int64_t heads, std::size_t count)
{
    std::vector<std::pair<double, std::size_t>> means;
    for (std::size_t i = 0; i < lists.size(); ++i)
    {
        double sum = 0;
        for (double const value : lists[i]) { sum += value; }
        means.emplace_back(-sum / static_cast<double>(lists[i].size()), i);
    }
    std::sort(means.begin(), means.end());
    std::string text;
    for (std::size_t k = 0; k < std::min(count, means.size()); ++k)
    {
        auto const head = static_cast<std::int64_t>(means[k].second);
        text += (k == 0 ? "" : ", ") + std::to_string(head / heads) + "-" + std::to_string(head % heads) + " "
                + fixed(-means[k].first, 4);
    }
    return text;
}

} // namespace detail

/// The command without the session, so that it can be run on any model.
/// \param model_name   what the unfinished run's file says it is of
/// \param log          where a line for every sample goes, or null
/// \throws mdkv::error, file_error, interrupted (what is finished stays in FILE.partial)
template <mdkv::element T>
int detect_head_scores(language_model const& model, tokenizer const& words, mdkv::cpu::executor_ref executor,
    std::string const& model_name, head_scores_options const& options, std::FILE* log = stdout)
{
    auto const say = [log](auto const&... pieces) {
        if (log == nullptr) { return; }
        std::fputs(joined(pieces..., "\n").c_str(), log);
        std::fflush(log);
    };
    model_shape const& shape = model.shape();
    detail::expect_options(options, shape);
    std::vector<std::int32_t> const prose = words.encode(read_text(options.text_path));
    std::int64_t const longest            = *std::max_element(options.lengths.begin(), options.lengths.end());
    mdkv::expects(std::ssize(prose) >= longest, options.text_path, " has ", prose.size(), " tokens; ", longest,
        " are needed for the longest prompt");
    head_kind const kind = options.kind == "r" ? head_kind::r : head_kind::r2;
    nlohmann::json const setting{{"model", model_name}, {"layers", shape.layers}, {"heads", shape.query_heads},
        {"element", mdkv::element_name<T>()}, {"text_tokens", prose.size()}, {"kind", options.kind},
        {"lengths", options.lengths}, {"depths", options.depths}, {"seed", options.seed},
        {"least_f1", options.least_f1}, {"raw", options.raw}};
    auto const heads = static_cast<std::size_t>(shape.layers * shape.query_heads);
    partial_scores done{options.out_path + ".partial", setting, heads};
    if (!done.entries().empty()) { say("going on after ", std::to_string(done.entries().size()), " finished samples"); }

    {
        progress_bar bar{"head scores: " + std::to_string(options.samples) + " prompts"};
        auto const before = std::ssize(done.entries());
        for (std::int64_t i = before; i < options.samples; ++i)
        {
            auto const task = detail::make_retrieval_task(words, prose, options, i);
            auto const most = std::ssize(words.encode(task.hidden.statement));
            watched_answer const answer =
                watch_answer<T>(model, words, executor, task.prompt, task.needle, most, kind, [&] {
                    bar.show(i - before, options.samples - before);
                    if (interrupt_requested()) { throw interrupted{}; }
                });
            std::string const text = words.decode(answer.tokens);
            partial_scores::entry one;
            one.f1 = 100 * token_f1(text, task.hidden.statement);
            one.counts =
                options.least_f1 < 0 || (one.f1 > options.least_f1 && one.f1 > 100 * token_f1(text, task.hidden.decoy));
            if (one.counts) { one.scores = answer.scores; }
            bar.clear();
            say(std::to_string(i + 1), " of ", std::to_string(options.samples), ": ",
                std::to_string(task.prompt.size()), " tokens, depth ", fixed(task.depth, 0), " %, F1 ",
                fixed(one.f1, 0), one.counts ? "" : ", does not count", ": ", printable(text));
            done.add(std::move(one),
                {{"sample", i}, {"tokens", task.prompt.size()}, {"depth", task.depth},
                    {"statement", task.hidden.statement}, {"decoy", task.hidden.decoy}, {"answer", text}});
        }
    }

    std::vector<std::vector<double>> lists(heads);
    for (std::size_t i = 0; i < static_cast<std::size_t>(options.samples); ++i)
    {
        auto const& scores = done.entries()[i].scores;
        for (std::size_t h = 0; h < scores.size(); ++h) { lists[h].push_back(scores[h]); }
    }
    mdkv::expects<mdkv::error>(!lists[0].empty(), "head-scores: none of the ", options.samples,
        " statements was found with an F1 above ", options.least_f1,
        "; try shorter --lengths, --raw, or more --samples (", options.out_path, ".partial keeps these)");
    write_head_scores(options.out_path, shape.layers, shape.query_heads, lists, options.digits);
    done.remove();
    say(options.out_path, ": ", std::to_string(lists[0].size()), " of ", std::to_string(options.samples),
        " samples count; most important query heads (layer-head): ",
        detail::most_important(lists, shape.query_heads, 8));
    return 0;
}

/// \return the process's exit status
template <mdkv::element T>
int run_head_scores(session& run, common_options const& common, head_scores_options const& options)
{
    std::string const name = std::filesystem::path{common.model_path}.filename().string();
    return detect_head_scores<T>(run.model(), run.words(), run.executor(), name, options);
}

} // namespace runner
