/// \file run_profile.hpp: mdkv_run profile: seconds, peak memory, duality gap and allocation of policies against context length
#pragma once

#include <mdkv/compress.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "process_memory.hpp"
#include "profile_log.hpp"
#include "profile_record.hpp"
#include "profile_tables.hpp"
#include "runner/common_options.hpp"
#include "runner/decode.hpp"
#include "runner/language_model.hpp"
#include "runner/option_texts.hpp"
#include "runner/policies.hpp"
#include "runner/prefill.hpp"
#include "runner/scratch_memory.hpp"
#include "runner/sequence_cache.hpp"
#include "runner/session.hpp"
#include "runner/terminal.hpp"

namespace runner
{

struct profile_options
{
    std::string text_path;
    std::vector<std::int64_t> contexts{512, 1024, 2048, 4096};
    std::vector<std::int64_t> generated{1, 32, 128};
    std::string policies = "full,snapkv,paper";
    std::vector<std::string> sizes{"128"};
    std::int64_t samples = 1; // stretches of the text that tables are means over
    std::string out;          // folder; empty: nothing is filed
};

inline void add_profile_options(CLI::App& command, profile_options& options)
{
    command.add_option("--text", options.text_path, "text to read and go on with")->required();
    command.add_option("--context", options.contexts, "tokens to read and compress, comma-separated")
        ->capture_default_str()
        ->delimiter(',')
        ->check(CLI::Range(1, 1 << 24));
    command.add_option("--generate", options.generated, "counts of tokens to tell the time for, comma-separated")
        ->capture_default_str()
        ->delimiter(',')
        ->check(CLI::Range(1, 1 << 24));
    command.add_option("--policies", options.policies, "comma-separated; see: mdkv_run policies")
        ->capture_default_str();
    command
        .add_option("--kv-size", options.sizes, "tokens per KV head, or 10% or 1/16 of the full cache, comma-separated")
        ->capture_default_str()
        ->delimiter(',');
    command.add_option("--samples", options.samples, "stretches of the text to take means over")
        ->capture_default_str()
        ->check(CLI::Range(1, 1 << 16));
    command.add_option("--out", options.out, "folder for measurements and tables; a run started again goes on in it");
}

/// "128": so many tokens per KV head; "10%", "1/16": a part of the whole cache.
/// \throws mdkv::invalid_argument   it is neither
[[nodiscard]] inline mdkv::budget profile_budget(std::string const& size)
{
    if (size.find_first_of("%/") != std::string::npos) { return parse_budget(size); }
    return mdkv::budget::kv_size(parse_integer<std::int64_t>("kv-size", size));
}

namespace detail
{

/// One measurement to be made.
struct profile_task
{
    policy chosen;
    mdkv::budget limit;
    profile_key key;
    std::span<std::int32_t const> tokens; // of the prompt, and those fed after it
};

/// Hexadecimal digits that change with the tokens.
[[nodiscard]] inline std::string mark_of(std::span<std::int32_t const> tokens)
{
    std::uint64_t hash = 0xCBF29CE484222325U; // FNV-1a, a token at a time
    for (std::int32_t const token : tokens) { hash = (hash ^ static_cast<std::uint32_t>(token)) * 0x100000001B3U; }
    char text[20];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
    return text;
}

/// Every context, and in it every policy at every size and sample; the whole cache at one size. Samples are stretches of
/// the text, one behind the other, as long as the longest context needs.
[[nodiscard]] inline std::vector<profile_task> profile_tasks(common_options const& common,
    profile_options const& options, profile_key const& shared, std::span<std::int32_t const> tokens)
{
    std::vector<profile_task> tasks;
    auto const stretch = tokens.size() / static_cast<std::size_t>(options.samples);
    for (std::int64_t const context : options.contexts)
    {
        mdkv::expects(context + shared.steps <= static_cast<std::int64_t>(stretch), "profile: samples of ", stretch,
            " tokens are shorter than the context of ", context, " and ", shared.steps, " tokens after it");
    }
    auto const add = [&](policy const& chosen, std::int64_t context, std::string const& size, mdkv::budget limit) {
        for (std::int64_t sample = 0; sample < options.samples; ++sample)
        {
            auto const own = tokens.subspan(
                static_cast<std::size_t>(sample) * stretch, static_cast<std::size_t>(context + shared.steps));
            profile_key key = shared;
            key.context     = context;
            key.policy      = chosen.label;
            key.size        = size;
            key.sample      = sample;
            key.text += " " + mark_of(own);
            bool const known =
                std::any_of(tasks.begin(), tasks.end(), [&](auto const& task) { return task.key == key; });
            if (!known) { tasks.push_back({chosen, limit, key, own}); }
        }
    };
    for (std::int64_t const context : options.contexts)
    {
        for (std::string const& spec : split_policies(options.policies, !common.head_scores.empty()))
        {
            policy const chosen = chosen_policy(spec, common);
            if (chosen.whole()) { add(chosen, context, "whole", mdkv::budget::fraction(1, 1)); }
            for (std::string const& size : options.sizes)
            {
                if (!chosen.whole()) { add(chosen, context, size, profile_budget(size)); }
            }
        }
    }
    return tasks;
}

inline void take_reports(std::vector<mdkv::compress_report> const& reports, policy const& chosen, profile_record& into)
{
    into.mixed = chosen.kind == cache_kind::mixed;
    // Neither the whole cache nor one at a single rank distributes tokens among rungs.
    bool const has_rungs = !chosen.whole() && chosen.kind != cache_kind::low_rank;
    for (mdkv::rung const& rung : chosen.ratios)
    {
        if (has_rungs) { into.rungs.push_back(text_of(rung)); }
    }
    for (mdkv::compress_report const& report : reports)
    {
        mdkv::allocation const& made = report.chosen;
        auto const rungs             = static_cast<std::ptrdiff_t>(into.rungs.size());
        into.layers.push_back({text_of(made.status), {made.tokens.begin(), made.tokens.begin() + rungs},
            made.multiplier, made.loss, made.gap()});
    }
}

} // namespace detail

/// One prompt through one policy, and the text's next tokens after it. To be called in a process of its own, because what
/// it takes at its peak is told of the process.
///
/// \param title   of the line of progress on standard error
/// \throws interrupted   after Ctrl-C, and what the stages throw
template <mdkv::element T>
[[nodiscard]] profile_record measure_profile(language_model const& model, std::span<std::int32_t const> tokens,
    policy const& chosen, mdkv::budget limit, profile_key const& key, mdkv::cpu::executor_ref executor,
    std::string const& title)
{
    process_memory const before = memory_of_this_process();
    auto const now              = [] { return std::chrono::steady_clock::now(); };
    auto const seconds          = [](auto span) { return std::chrono::duration<double>(span).count(); };
    profile_record record{.key = key};
    sequence_cache<T> cache{model, chosen, limit, key.window, key.steps};
    auto const context = static_cast<std::size_t>(key.context);
    progress_bar bar{title};
    double compressing = 0;
    auto const start   = now();
    if (chosen.while_reading)
    {
        static_cast<void>(read_showing_progress(cache, tokens.first(context), executor, title + ": "));
        compressing = cache.compress_seconds();
    }
    else
    {
        scratch_memory scratch;
        static_cast<void>(prefill<T>(
            model, tokens.first(context), queries_to_keep(chosen, key.window, key.context), executor,
            [&](layer_kv<T> const& kv) {
                auto const begun = now();
                cache.compress_layer(kv, executor, scratch);
                compressing += seconds(now() - begun);
            },
            [&](std::int64_t done, std::int64_t total) {
                bar.show(done, total);
                if (interrupt_requested()) { throw interrupted{}; }
                return true;
            },
            [&](layer_chunk<T> const& chunk) {
                auto const begun = now();
                cache.score_chunk(chunk, chunk.tokens, executor, scratch);
                compressing += seconds(now() - begun);
            }));
    }
    record.prefill_s      = seconds(now() - start) - compressing;
    record.compress_s     = compressing;
    record.resident_bytes = cache.resident_bytes(); // before decoding, in which some policies go on evicting
    record.full_bytes     = cache.full_bytes();

    decode_workspace space;
    std::vector<float> logits(static_cast<std::size_t>(model.shape().vocabulary));
    for (std::int64_t step = 0; step < key.steps; ++step)
    {
        if (interrupt_requested()) { throw interrupted{}; }
        auto const position      = key.context + step;
        std::int32_t const token = tokens[static_cast<std::size_t>(position)];
        auto const begun         = now();
        decode_step(
            model, std::span{&token, 1}, std::span{&position, 1}, executor,
            [&](std::int64_t layer, std::int64_t, float const* query, float const* one_key, float const* value,
                float* out) { cache.attend(layer, query, one_key, value, out, executor); },
            logits, space);
        record.step_s.push_back(seconds(now() - begun));
        bar.show(step + 1, key.steps);
    }
    record.attend_s = cache.attend_seconds();
    detail::take_reports(cache.reports(), chosen, record);
    process_memory const after = memory_of_this_process();
    record.peak_bytes          = after.peak;
    record.model_bytes         = before.anonymous + after.file; // a mapped file becomes resident as it is read
    return record;
}

namespace detail
{

/// \throws mdkv::error   an option is out of its range, before anything is run
inline void expect_profile(profile_options const& options, model_shape const& shape)
{
    mdkv::expects(!options.contexts.empty(), "context: none is given");
    mdkv::expects(options.samples >= 1, "samples: ", options.samples, " is not at least 1");
    mdkv::expects(!options.generated.empty(), "generate: none is given");
    for (std::int64_t const count : options.generated)
    {
        mdkv::expects(count >= 1, "generate: ", count, " is not at least 1");
    }
    std::int64_t const most = *std::max_element(options.generated.begin(), options.generated.end());
    for (std::int64_t const context : options.contexts)
    {
        mdkv::expects(context >= 1, "context: ", context, " is not at least 1");
        mdkv::expects(most - 1 <= shape.context && context <= shape.context - (most - 1), "context: ", context,
            " tokens and ", most, " to make after them are more than the model's context of ", shape.context);
    }
}

/// \throws mdkv::error   the file cannot be written
inline void write_file(std::filesystem::path const& path, std::string const& text)
{
    std::ofstream file{path};
    file << text;
    if (!file.flush()) { throw mdkv::error{path.string() + ": cannot be written"}; }
}

/// The tables are of means over the samples, the JSON has every measurement.
inline void write_profile(std::filesystem::path const& folder, std::vector<profile_record> const& all,
    std::vector<std::int64_t> const& generated)
{
    std::vector<profile_record> const records = merged(all);
    auto const both                           = [&](char const* name, table const& made) {
        write_file(folder / (std::string{name} + ".md"), made.markdown());
        write_file(folder / (std::string{name} + ".csv"), made.csv());
    };
    both("efficiency", efficiency_table(records));
    both("latency", latency_table(records, generated));
    both("peak_memory", peak_table(records));
    both("cache_size", cache_table(records));
    both("duality_gap", gap_table(records));
    both("duality_gap_layers", gap_layers_table(records));
    both("allocation", allocation_table(records));
    write_file(folder / "allocation_layers.csv", allocation_layers_table(records).csv());
    nlohmann::json array = nlohmann::json::array();
    for (profile_record const& one : all) { array.push_back(nlohmann::json::parse(line_of(one))); }
    write_file(folder / "profile.json", array.dump(1) + "\n");
}

inline void print_profile(std::vector<profile_record> const& records, std::vector<std::int64_t> const& generated)
{
    auto const show = [](char const* title, table const& made) { std::printf("\n%s\n%s", title, made.text().c_str()); };
    show("Time and memory", efficiency_table(records));
    show("Latency: prompt, compression and the tokens made", latency_table(records, generated));
    show("Peak resident memory beside the model", peak_table(records));
    bool const any_mixed = std::any_of(records.begin(), records.end(), [](auto const& one) { return one.mixed; });
    if (any_mixed)
    {
        show("Duality gap, summed over the layers", gap_table(records));
        show("Duality gap, layer by layer", gap_layers_table(records));
    }
    show("Allocation", allocation_table(records));
}

} // namespace detail

/// Measures what the folder does not have yet, each in a process of its own, and prints and files the tables.
/// \return 1 where a measurement's process was killed (it is told and left out, and made anew by the next run), else 0
/// \throws interrupted   after Ctrl-C; what was measured is kept
/// \throws mdkv::error, and what the stages throw
template <mdkv::element T>
int run_profile(session& run, common_options const& common, profile_options const& options)
{
    detail::expect_profile(options, run.model().shape());
    std::int64_t const steps = *std::max_element(options.generated.begin(), options.generated.end()) - 1;
    std::int64_t const most  = *std::max_element(options.contexts.begin(), options.contexts.end()) + steps;
    auto const tokens = first_tokens(run.words(), options.text_path, mdkv::checked_multiply(options.samples, most),
        std::to_string(options.samples) + " times the longest context and " + std::to_string(steps)
            + " tokens after it");
    auto const name   = [](std::string const& path) { return std::filesystem::path{path}.filename().string(); };
    profile_key const shared{.steps = steps,
        .element                    = mdkv::element_name<T>(),
        .window                     = common.window,
        .threads                    = run.threads(),
        .text                       = name(options.text_path),
        .model                      = name(common.model_path),
        .mapped                     = common.map_file};
    auto const tasks = detail::profile_tasks(common, options, shared, tokens);
    std::filesystem::path const folder{options.out};
    if (!options.out.empty()) { std::filesystem::create_directories(folder); }
    std::string const log_path = options.out.empty() ? "" : (folder / "profile.jsonl").string();
    auto const log = log_path.empty() ? std::make_unique<profile_log>() : std::make_unique<profile_log>(log_path);

    std::vector<profile_record> records;
    int killed = 0;
    for (std::size_t i = 0; i < tasks.size(); ++i)
    {
        detail::profile_task const& task = tasks[i];
        std::string const title = "profile " + std::to_string(i + 1) + " of " + std::to_string(tasks.size()) + ": "
                                  + task.chosen.label + " at " + task.key.size + ", " + std::to_string(task.key.context)
                                  + " tokens, sample " + std::to_string(task.key.sample + 1);
        try
        {
            if (!log->has(task.key))
            {
                progress_bar{title}.show(static_cast<std::int64_t>(i), std::ssize(tasks)); // a child has its own bars
                log->add(profile_record_of(in_child_process([&] {
                    mdkv::cpu::thread_pool threads{run.threads()}; // the session's stayed in the parent
                    return line_of(measure_profile<T>(
                        run.model(), task.tokens, task.chosen, task.limit, task.key, threads, title));
                })));
            }
            records.push_back(log->at(task.key));
        }
        catch (child_ended const& problem)
        {
            ++killed;
            std::fprintf(stderr, "%s: %s\n", title.c_str(), problem.what());
        }
        catch (interrupted const&)
        {
            throw;
        }
        catch (mdkv::error const& problem)
        {
            throw mdkv::error{title + ": " + problem.what()};
        }
        if (interrupt_requested()) { throw interrupted{}; }
    }
    std::printf("%s on %s: cache element %s, window %lld, %d threads\n", shared.model.c_str(), shared.text.c_str(),
        shared.element.c_str(), static_cast<long long>(shared.window), run.threads());
    detail::print_profile(merged(records), options.generated);
    if (!options.out.empty()) { detail::write_profile(folder, records, options.generated); }
    return killed > 0 ? 1 : 0;
}

} // namespace runner
