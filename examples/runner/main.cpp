/// \file main.cpp: mdkv_run: a reference runner that shows the library on a real language model.
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <CLI/CLI.hpp>

#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "common_options.hpp"
#include "compare.hpp"
#include "compiled_for.hpp"
#include "device_layers.hpp"
#include "generate.hpp"
#include "needle.hpp"
#include "policies.hpp"
#include "session.hpp"
#include "terminal.hpp"

namespace
{

void add_common(CLI::App& command, runner::common_options& common)
{
    command.add_option("--model", common.model_path, "GGUF file of a model of the llama or qwen2 architecture")
        ->required();
    command.add_option("--threads", common.threads, "threads to use; 0: as many as the machine has")
        ->check(CLI::Range(0, 1024));
    command.add_option("--element", common.element, "element type of the cache: f16 or f32")->capture_default_str();
    command.add_option("--window", common.window, "last tokens kept as they are")
        ->capture_default_str()
        ->check(CLI::Range(1, 1 << 20));
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
        std::string text;
        for (std::string const& one : p.parameters) { text += (text.empty() ? "; parameters: " : ", ") + one; }
        std::printf("%-18s %s%s%s%s\n", p.name.c_str(), p.keeps.c_str(), p.source.empty() ? "" : "; ", p.source.c_str(),
            text.c_str());
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
    generate_command.add_option("--budget", generate.budget, "instead: 10%, 1/16 of the full cache, or bytes a layer")
        ->excludes(size);
    generate_command.add_option("--max-tokens", generate.max_tokens, "tokens to make at most")
        ->capture_default_str()
        ->check(CLI::Range(1, 1 << 24));
    generate_command.add_flag("--while-reading", generate.while_reading,
        "compress the prompt while it is read, in memory that does not grow with it (policies that replay: best, "
        "any_question)");
    generate_command.add_flag("--raw", generate.raw, "the prompt as it is, without the model's chat form");

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
    compare_command.add_option("--json", compare.json_path, "file for the same figures as JSON");
    compare_command.add_flag("--control-tokens", compare.control_tokens,
        "texts of control tokens, such as <|im_end|>, stand for these: for chats in a model's template");

    runner::needle_options needle;
    CLI::App& needle_command = *app.add_subcommand("needle", "find a sentence hidden in a long text");
    add_common(needle_command, common);
    needle_command.add_option("--text", needle.text_paths, "texts to hide it in, each by itself")->required();
    needle_command.add_option("--lengths", needle.lengths, "tokens of the prompts, comma-separated")
        ->capture_default_str()
        ->delimiter(',');
    needle_command.add_option("--depths", needle.depths, "percent of the text before it, comma-separated")
        ->capture_default_str()
        ->delimiter(',');
    needle_command
        .add_option("--needle", needle.hidden, "number (another one in every prompt) or sentence (the public one)")
        ->capture_default_str();
    needle_command
        .add_option("--question", needle.question, "prompt: compressed with the question in it; later: without; both")
        ->capture_default_str();
    needle_command.add_option("--policies", needle.policies, "comma-separated; see: mdkv_run policies")
        ->capture_default_str();
    needle_command.add_option("--kv-size", needle.kv_sizes, "tokens per KV head, comma-separated")
        ->capture_default_str()
        ->delimiter(',');
    needle_command.add_option("--seed", needle.seed, "seed of the numbers")->capture_default_str();
    needle_command.add_option("--json", needle.json_path, "file for a line of JSON for each answer");

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

    std::fprintf(stderr, "mdkv_run: compiled for %s\n", runner::vector_instructions());
    runner::catch_interrupts();
    return runner::with_element(common.element, [&]<mdkv::element T>() {
        expect_backend<T>(common, policies);
        runner::session session{common};
        if (generate_command.parsed()) { return runner::run_generate<T>(session, common, generate); }
        if (compare_command.parsed()) { return runner::run_compare<T>(session, common, compare); }
        return runner::run_needle<T>(session, common, needle);
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
