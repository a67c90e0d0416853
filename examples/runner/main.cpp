/// \file main.cpp: mdkv_run: a reference runner that shows the library on a real language model.
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <CLI/CLI.hpp>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "common_options.hpp"
#include "compare.hpp"
#include "compiled_for.hpp"
#include "device_layers.hpp"
#include "evaluation/run_answers.hpp"
#include "evaluation/run_head_scores.hpp"
#include "evaluation/run_needle.hpp"
#include "evaluation/run_profile.hpp"
#include "evaluation/run_ruler.hpp"
#include "generate.hpp"
#include "map.hpp"
#include "policies.hpp"
#include "session.hpp"
#include "terminal.hpp"

namespace
{

void add_common(CLI::App& command, runner::common_options& common)
{
    command.add_option("--model", common.model_path, "GGUF file of a model of the llama or qwen2 architecture")
        ->required();
    command.add_flag("--mmap", common.map_file, "map the file instead of reading it into memory");
    command.add_option("--threads", common.threads, "threads to use; 0: as many as the machine has")
        ->check(CLI::Range(0, 1024));
    command.add_option("--element", common.element, "element type of the cache: f16, bf16 or f32")
        ->capture_default_str();
    command.add_option("--window", common.window, "last tokens kept as they are")
        ->capture_default_str()
        ->check(CLI::Range(1, 1 << 20));
    command.add_option("--pool", common.pool, "neighbours that share a loss, odd; overrides the policy's");
    command.add_option("--pooling", common.pooling, "how they share it: max, mean or adaptive; overrides the policy's");
    command.add_option(
        "--ratios", common.ratios, "rungs such as 0,1/8,1/4,1 or 0,1:int4,1:int8,1; overrides the policy's");
    command.add_option("--score-queries", common.score_queries,
        "last queries that tell what tokens are worth, at least the window's; overrides the policy's");
    command.add_option(
        "--head-scores", common.head_scores, "file of measured head scores, for policies that read them");
}

void add_backend(CLI::App& command, runner::common_options& common)
{
    command
        .add_option("--backend", common.backend,
            "where policies made of rungs compress and attend: cpu or cuda; the rest of the model is on the CPU")
        ->capture_default_str();
}

/// Mistakes about the backend show before a model is read.
/// \throws mdkv::error   a policy does not run on it, or there is none
template <mdkv::element T>
void expect_backend(runner::common_options const& common, std::vector<std::string> const& policies)
{
    for (std::string const& text : policies) { static_cast<void>(runner::chosen_policy(text, common)); }
    if (runner::parse_backend(common.backend) == runner::backend_kind::cuda)
    {
        static_cast<void>(runner::make_device_layers<T>());
    }
}

int print_policies()
{
    for (runner::policy const& p : runner::all_policies())
    {
        std::string parameters;
        for (std::string const& one : p.parameters) { parameters += ", " + one; }
        std::printf("%-18s %s%s%s; parameters: heads%s\n", p.name.c_str(), p.keeps.c_str(),
            p.source.empty() ? "" : "; ", p.source.c_str(), parameters.c_str());
    }
    return 0;
}

int run(int argc, char** argv)
{
    CLI::App app{"mdkv_run: language models with a KV cache that gives each token as many bytes as it is worth"};
    app.require_subcommand(1);
    runner::common_options common;

    runner::generate_options generate;
    CLI::App& generate_command = *app.add_subcommand("generate", "answer a prompt from a compressed cache");
    add_common(generate_command, common);
    add_backend(generate_command, common);
    generate_command.add_option("--prompt-file", generate.prompt_path, "text to answer")->required();
    generate_command.add_option("--policy", generate.policy_name, "see: mdkv_run policies")->capture_default_str();
    CLI::Option* const size =
        generate_command.add_option("--kv-size", generate.kv_size, "tokens per KV head the cache may weigh (512)");
    CLI::Option* const share =
        generate_command
            .add_option("--budget", generate.budget, "instead: 10%, 1/16 of the full cache, or bytes a layer")
            ->excludes(size);
    CLI::Option* const most = generate_command.add_option("--max-bytes", generate.max_bytes,
        "instead: bytes the caches of all layers never exceed, however long the text: with what was made, the last "
        "queries, and one layer twice while it is folded");
    most->excludes(size)->excludes(share)->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 50));
    generate_command
        .add_option("--fold-every", generate.fold_every,
            "with --max-bytes: tokens made between two folds into the compressed part")
        ->capture_default_str()
        ->check(CLI::Range(1, 1 << 16))
        ->needs(most);
    generate_command.add_option("--max-tokens", generate.max_tokens, "tokens to make at most")
        ->capture_default_str()
        ->check(CLI::Range(1, 1 << 24));
    generate_command.add_option("--temperature", generate.temperature, "0 takes the likeliest token")
        ->capture_default_str();
    generate_command.add_option("--seed", generate.seed, "of the random choice")->capture_default_str();
    generate_command
        .add_flag("--while-reading", generate.while_reading,
            "compress the prompt while it is read, in memory that does not grow with it (policies that replay: best, "
            "any_question)")
        ->excludes(most);
    generate_command.add_flag("--raw", generate.raw, "the prompt as it is, without the model's chat form");
    generate_command.add_option(
        "--save", generate.save_path, "file for the compressed prompt, which takes an older one's place at once");
    generate_command
        .add_option("--load", generate.load_path,
            "file of --save, mapped: the prompt begins with the saved one, whose policy and budget stay")
        ->excludes("--save")
        ->excludes("--policy")
        ->excludes("--while-reading")
        ->excludes(size)
        ->excludes(share)
        ->excludes(most);

    runner::compare_options compare;
    CLI::App& compare_command = *app.add_subcommand("compare", "measure policies against the full cache on a text");
    add_common(compare_command, common);
    add_backend(compare_command, common);
    compare_command.add_option("--text", compare.text_paths, "text to read and go on with; several: means, too")
        ->required();
    compare_command.add_option("--context", compare.context, "tokens to read and compress")->capture_default_str();
    compare_command.add_option("--continue", compare.continuation, "tokens to feed after them")->capture_default_str();
    compare_command
        .add_option("--kv-size", compare.kv_sizes,
            "tokens per KV head, comma-separated (64,128,256,512 without --kv-size and --budgets)")
        ->delimiter(',');
    compare_command
        .add_option("--budgets", compare.budgets,
            "besides: budgets as shares of the full cache or bytes a layer, 5%,10%, comma-separated")
        ->delimiter(',');
    compare_command.add_option("--policies", compare.policies, "comma-separated; see: mdkv_run policies")
        ->capture_default_str();
    compare_command
        .add_option("--fold-every", compare.fold_every,
            "caches that never exceed their bytes, tails and all buffers included: tokens fed between two folds")
        ->check(CLI::Range(1, 1 << 16));
    compare_command.add_option(
        "--relative-to", compare.reference, "with several texts: every KL divided by that of this policy, too");
    compare_command.add_option("--json", compare.json_path, "file for the same figures as JSON");
    compare_command.add_flag("--control-tokens", compare.control_tokens,
        "texts of control tokens, such as <|im_end|>, stand for these: for chats in a model's template");
    compare_command.add_flag("--markdown", compare.markdown, "the tables over all texts as Markdown");

    runner::map_options map;
    CLI::App& map_command = *app.add_subcommand("map", "show how many bytes each token got");
    add_common(map_command, common);
    add_backend(map_command, common);
    map_command.add_option("--text", map.text_path, "text to read")->required();
    map_command.add_option("--context", map.context, "tokens to read and compress")->capture_default_str();
    map_command.add_option("--kv-size", map.kv_size, "tokens per KV head")->capture_default_str();
    map_command.add_option("--policy", map.policy_name, "see: mdkv_run policies")->capture_default_str();
    map_command.add_option("--csv", map.csv_path, "file for every token's bytes");
    map_command.add_option("--columns", map.columns, "cells across")->capture_default_str();

    runner::needle_command needle;
    CLI::App& needle_command = *app.add_subcommand("needle", "find a sentence hidden in a long text");
    add_common(needle_command, common);
    runner::add_needle_options(needle_command, needle);

    runner::ruler_command ruler;
    CLI::App& ruler_command = *app.add_subcommand("ruler", "RULER's synthetic tasks");
    add_common(ruler_command, common);
    runner::add_ruler_options(ruler_command, ruler);

    runner::answers_command answers;
    CLI::App& answers_command =
        *app.add_subcommand("answers", "answer questions from files of samples, such as LongBench's");
    add_common(answers_command, common);
    runner::add_answers_options(answers_command, answers);

    runner::head_scores_options head_scores;
    CLI::App& head_scores_command = *app.add_subcommand("head-scores", "measure which heads retrieve");
    add_common(head_scores_command, common);
    runner::add_head_scores_options(head_scores_command, head_scores);

    runner::profile_options profile;
    CLI::App& profile_command = *app.add_subcommand("profile", "seconds, memory and allocation against context length");
    add_common(profile_command, common);
    runner::add_profile_options(profile_command, profile);

    CLI::App& policies_command = *app.add_subcommand("policies", "list the policies");

    try
    {
        app.parse(argc, argv);
    }
    catch (CLI::ParseError const& problem)
    {
        return app.exit(problem);
    }
    if (policies_command.parsed()) { return print_policies(); }

    std::vector<std::string> policies; // of the commands that let one choose the backend
    if (generate_command.parsed()) { policies = {generate.policy_name}; }
    if (compare_command.parsed()) { policies = runner::split_policies(compare.policies, !common.head_scores.empty()); }
    if (map_command.parsed()) { policies = {map.policy_name}; }
    mdkv::expects(common.backend != "cuda" || !generate.max_bytes,
        "--backend cuda: --max-bytes folds on the CPU what is made; give --kv-size or --budget");

    std::fprintf(stderr, "mdkv_run: compiled for %s\n", runner::vector_instructions());
    runner::catch_interrupts();
    return runner::with_element(common.element, [&]<mdkv::element T>() {
        expect_backend<T>(common, policies);
        runner::session session{common};
        if (generate_command.parsed()) { return runner::run_generate<T>(session, common, generate); }
        if (compare_command.parsed()) { return runner::run_compare<T>(session, common, compare); }
        if (needle_command.parsed()) { return runner::run_needle<T>(session, common, needle); }
        if (ruler_command.parsed()) { return runner::run_ruler<T>(session, common, ruler); }
        if (answers_command.parsed()) { return runner::run_answers<T>(session, common, answers); }
        if (profile_command.parsed()) { return runner::run_profile<T>(session, common, profile); }
        if (head_scores_command.parsed()) { return runner::run_head_scores<T>(session, common, head_scores); }
        return runner::run_map<T>(session, common, map);
    });
}

} // namespace

int main(int argc, char** argv)
{
    try
    {
        return run(argc, argv);
    }
    catch (runner::interrupted const&)
    {
        std::fputs("stopped\n", stderr);
        return 130;
    }
    catch (std::bad_alloc const&)
    {
        std::fputs("mdkv_run: out of memory\n", stderr);
    }
    catch (std::exception const& problem)
    {
        std::fprintf(stderr, "mdkv_run: %s\n", problem.what());
    }
    return 1;
}
