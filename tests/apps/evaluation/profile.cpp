#include "evaluation/run_profile.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include "runner/language_model.hpp"
#include "runner/policies.hpp"
#include "runner/terminal.hpp"
#include "support/host.hpp"
#include "support/scratch_folder.hpp"
#include "support/standard_error.hpp"
#include "support/synthetic_llama.hpp"

namespace
{

runner::profile_record example(std::string const& policy, std::int64_t context)
{
    runner::profile_record one;
    one.key.context    = context;
    one.key.policy     = policy;
    one.key.size       = "128";
    one.key.steps      = 2;
    one.key.element    = "f16";
    one.key.window     = 32;
    one.key.threads    = 2;
    one.key.text       = "a.txt 0123";
    one.key.model      = "m.gguf";
    one.mixed          = true;
    one.prefill_s      = 2;
    one.compress_s     = 0.5;
    one.attend_s       = 0.01;
    one.step_s         = {0.25, 0.125};
    one.peak_bytes     = 30 << 20;
    one.model_bytes    = 20 << 20;
    one.resident_bytes = 1 << 20;
    one.full_bytes     = 4 << 20;
    one.rungs          = {"0", "1/4", "1"};
    one.layers         = {{"optimal", {70, 10, 20}, 0.5, 8, 0.5}, {"unprojected_only", {80, 0, 20}, 0.25, 2, 0}};
    return one;
}

} // namespace

TEST_CASE("a measurement survives the way through its line")
{
    auto const one   = example("paper", 512);
    auto const again = runner::profile_record_of(runner::line_of(one));
    CHECK(again.key == one.key);
    CHECK(runner::line_of(again) == runner::line_of(one));
    CHECK(again.layers.size() == 2);
    CHECK(again.layers[1].tokens == one.layers[1].tokens);
    CHECK(runner::line_of(one).starts_with(runner::profile_line.begin));
}

TEST_CASE("the latency of so many tokens is prompt, compression and one step less than tokens")
{
    auto const one = example("paper", 512);
    CHECK(one.latency(1) == 2.5);
    CHECK(one.latency(2) == 2.75);
    CHECK(one.latency(3) == 2.875);
    CHECK(one.latency(4) == -1);
    CHECK(one.step() == 0.1875);
    CHECK(one.working_bytes() == 10 << 20);
}

TEST_CASE("a log that is opened again has what was added, without the line a killed run left half written")
{
    scratch_folder const folder;
    auto const one = example("paper", 512);
    auto const two = example("paper", 1024);
    {
        runner::profile_log log{folder.file("profile.jsonl")};
        log.add(one);
    }
    std::string const whole = folder.read("profile.jsonl");
    std::string const other = runner::line_of(two);
    for (std::size_t const cut : {std::size_t{1}, std::size_t{8}, std::size_t{40}, other.size() - 1})
    {
        CAPTURE(cut);
        folder.write("profile.jsonl", whole + other.substr(0, cut));
        runner::profile_log const log{folder.file("profile.jsonl")};
        CHECK(log.has(one.key));
        CHECK(!log.has(two.key));
        CHECK(log.size() == 1);
        CHECK(folder.read("profile.jsonl") == whole);
    }
}

TEST_CASE("a log that is no log is refused with its line and left as it is")
{
    scratch_folder const folder;
    std::string const good = runner::line_of(example("paper", 512)) + "\n";
    for (std::string const bad : {"no JSON\n", "{\"context\":1}\n", "[]\n", "precious", "{\"context\":\"1\",\n"})
    {
        CAPTURE(bad);
        folder.write("profile.jsonl", good + bad);
        auto const text =
            support::error_text<mdkv::error>([&] { runner::profile_log const log{folder.file("profile.jsonl")}; });
        CHECK(text.find("profile.jsonl:2: is no measurement") != std::string::npos);
        CHECK(folder.read("profile.jsonl") == good + bad);
    }
}

TEST_CASE("tables show what the measurements add up to")
{
    std::vector<runner::profile_record> records{example("paper", 512), example("paper", 1024)};
    records[1].layers[0].gap = 1;
    CHECK(runner::gap_table(records).csv()
          == "system,context,primal loss,gap upper bound,relative gap %\n"
             "paper at 128,512,1.00e+01,5.00e-01,5.0000\n"
             "paper at 128,1024,1.00e+01,1.00e+00,10.0000\n");
    CHECK(runner::allocation_table(records).csv().find("paper at 128,512,\"0: 75.00, 1/4: 5.00, 1: 20.00\",1\n")
          != std::string::npos);
    CHECK(runner::peak_table(records).csv()
          == "\"system, peak MiB beside the model\",512,1024\npaper at 128,10.0,10.0\n");
    CHECK(runner::latency_table(records, {1, 3, 9}).csv().find("paper at 128,2.50,2.88,-\n") != std::string::npos);
    CHECK(runner::efficiency_table(records).csv().find("paper,128,2.00,0.50,187.50,5.00,30.0,20.0,10.0,1.00,25.00\n")
          != std::string::npos);
    CHECK(runner::allocation_layers_table(records).csv().find(
              "paper,128,512,0,1/4,10,5.00e-01,8.00e+00,5.00e-01,optimal\n")
          != std::string::npos);
}

TEST_CASE("a system that was not measured at a context has a gap in its row")
{
    std::vector<runner::profile_record> const records{example("a", 512), example("b", 512), example("b", 1024)};
    CHECK(runner::cache_table(records).csv()
          == "\"system, MiB of the cache\",512,1024\na at 128,1.00,-\nb at 128,1.00,1.00\n");
}

TEST_CASE("layers are summed up by quantiles between their values")
{
    CHECK(runner::detail::quantile({3, 1, 2}, 0.5) == 2);
    CHECK(runner::detail::quantile({3, 1}, 0.25) == 1.5);
    CHECK(runner::detail::quantile({7}, 0.75) == 7);
    auto const text = runner::gap_layers_table({example("paper", 512)}).csv();
    CHECK(text.find("relative gap %,0.0000,1.5625,3.1250,4.6875,6.2500\n") != std::string::npos);
}

TEST_CASE("every policy is measured at every size and context once, the whole cache once a context")
{
    runner::profile_options options;
    options.contexts = {10, 20};
    options.policies = "full,evict,paper,evict";
    options.sizes    = {"4", "10%"};
    std::vector<std::int32_t> tokens(25);
    for (std::size_t i = 0; i < tokens.size(); ++i) { tokens[i] = static_cast<std::int32_t>(i); }
    runner::profile_key const shared{.steps = 5};
    auto const tasks = runner::detail::profile_tasks({}, options, shared, tokens);
    CHECK(tasks.size() == 2 * (1 + 2 * 2));
    CHECK(tasks[0].key.size == "whole");
    CHECK(tasks[1].key.policy == "evict");
    CHECK(tasks[2].key.size == "10%");
    CHECK(tasks[0].key.text == tasks[1].key.text);
    CHECK(tasks[0].key.text != tasks[5].key.text); // another context: other tokens
    tokens[12] = 99;                               // among the tokens fed after the first context
    CHECK(runner::detail::profile_tasks({}, options, shared, tokens)[0].key.text != tasks[0].key.text);
}

TEST_CASE("samples are stretches of the text, one behind the other")
{
    runner::profile_options options;
    options.contexts = {4, 6};
    options.policies = "evict";
    options.samples  = 2;
    std::vector<std::int32_t> tokens(16);
    for (std::size_t i = 0; i < tokens.size(); ++i) { tokens[i] = static_cast<std::int32_t>(i); }
    auto const tasks = runner::detail::profile_tasks({}, options, {.steps = 2}, tokens);
    REQUIRE(tasks.size() == 4);
    CHECK(tasks[0].tokens.front() == 0);
    CHECK(tasks[0].tokens.size() == 6);
    CHECK(tasks[1].tokens.front() == 8);
    CHECK(tasks[3].tokens.size() == 8);
    CHECK(tasks[3].tokens.back() == 15);
    tokens.pop_back();
    auto const text = support::error_text<mdkv::invalid_argument>(
        [&] { static_cast<void>(runner::detail::profile_tasks({}, options, {.steps = 2}, tokens)); });
    CHECK(text.find("samples of 7 tokens are shorter than the context of 6") != std::string::npos);
}

TEST_CASE("samples are merged into means, sums of tokens and the highest peak")
{
    auto one = example("paper", 512), two = one, three = one, other = example("paper", 1024);
    two.key.sample         = 1;
    two.key.text           = "a.txt 4567";
    two.prefill_s          = 5;
    two.step_s[1]          = 0.5;
    two.layers[0].loss     = 2;
    two.peak_bytes         = 40 << 20;
    three.key.sample       = 2;
    three.layers[0].status = "over_limit";
    auto const all         = runner::merged({one, two, other, three});
    REQUIRE(all.size() == 2);
    CHECK(all[0].prefill_s == doctest::Approx(3));
    CHECK(all[0].step_s[1] == doctest::Approx(0.25));
    CHECK(all[0].layers[0].loss == doctest::Approx(6));
    CHECK(all[0].layers[0].tokens == std::vector<std::int64_t>{210, 30, 60});
    CHECK(all[0].layers[0].status == "over_limit");
    CHECK(all[0].working_bytes() == 20 << 20);
    CHECK(all[1].key.context == 1024);
    CHECK(all[1].prefill_s == 2);
}

TEST_CASE("sizes are KV sizes or parts of the whole cache")
{
    mdkv::layer_shape const shape{2, 1, 68, 32, {8, 8}, 2};
    CHECK(runner::profile_budget("50").in_bytes(shape) == 2 * 50 * 32);
    CHECK(runner::profile_budget("50%").in_bytes(shape) == 2 * 50 * 32);
    CHECK(runner::profile_budget("1/2").in_bytes(shape) == 2 * 50 * 32);
    CHECK(support::error_text<mdkv::invalid_argument>([] {
        static_cast<void>(runner::profile_budget("many"));
    }).find("kv-size: \"many\"")
          != std::string::npos);
}

TEST_CASE("contexts beyond the model's are refused before anything is run")
{
    runner::model_shape shape{};
    shape.context     = 100;
    auto const refuse = [&](std::vector<std::int64_t> contexts, std::vector<std::int64_t> generated) {
        runner::profile_options options;
        options.contexts  = std::move(contexts);
        options.generated = std::move(generated);
        return support::error_text<mdkv::invalid_argument>([&] { runner::detail::expect_profile(options, shape); });
    };
    CHECK(refuse({50, 100}, {1}) == "threw nothing");
    CHECK(refuse({50, 100}, {2}).find("more than the model's context of 100") != std::string::npos);
    CHECK(refuse({50}, {INT64_MAX}).find("more than the model's context of 100") != std::string::npos);
    CHECK(refuse({0}, {1}).find("context: 0") != std::string::npos);
    CHECK(refuse({}, {1}).find("context: none") != std::string::npos);
    CHECK(refuse({50}, {}).find("generate: none") != std::string::npos);
}

TEST_CASE("a prompt that is profiled while it is compressed shows its progress, and all of its tokens have rungs")
{
    support::synthetic_llama const llama{{.layers = 3, .key_dim = 8, .value_dim = 16}};
    auto const model = runner::language_model::load(llama.writer().file());
    std::vector<std::int32_t> tokens;
    for (std::int32_t i = 0; i < 304; ++i) { tokens.push_back(i * 17 % 50); }
    auto const chosen = runner::parse_policy("best[while_reading=yes+chunk=32]");
    runner::profile_key const key{.context = 300, .policy = "best", .size = "1/8", .steps = 4, .window = 8};
    auto const kept                   = runner::progress_bar::plain_every;
    runner::progress_bar::plain_every = {};
    runner::profile_record one;
    auto const text = support::standard_error_of([&] {
        one = runner::measure_profile<mdkv::half>(
            model, tokens, chosen, mdkv::budget::fraction(1, 8), key, {}, "profile 1 of 1");
    });
    runner::progress_bar::plain_every = kept;
    CHECK(text.find("profile 1 of 1: reading 300 tokens while compressing them, ") != std::string::npos);
    CHECK(text.find("profile 1 of 1: 100 %, ") != std::string::npos); // tokens fed
    REQUIRE(one.layers.size() == 3);
    for (auto const& layer : one.layers)
    {
        CHECK(std::accumulate(layer.tokens.begin(), layer.tokens.end(), std::int64_t{0}) == 2 * (300 - 8));
        CHECK(layer.tokens[0] > 0);
    }
}

TEST_CASE("a measured policy reports its bytes, its steps and its layers' allocations")
{
    support::synthetic_llama const llama{{.layers = 3, .key_dim = 8, .value_dim = 16}};
    auto const model = runner::language_model::load(llama.writer().file());
    std::vector<std::int32_t> tokens;
    for (std::int32_t i = 0; i < 104; ++i) { tokens.push_back(i * 17 % 50); }
    for (char const* name : {"full", "paper", "snapkv", "h2o"})
    {
        CAPTURE(name);
        auto const chosen = runner::find_policy(name);
        auto const limit  = chosen.whole() ? mdkv::budget::fraction(1, 1) : mdkv::budget::kv_size(40);
        runner::profile_key const key{.context = 100, .policy = name, .size = "40", .steps = 4, .window = 8};
        auto const one = runner::profile_record_of(runner::in_child_process([&] {
            return runner::line_of(runner::measure_profile<mdkv::half>(model, tokens, chosen, limit, key, {}, name));
        }));
        CHECK(one.key == key);
        CHECK(one.mixed == (std::string{name} == "paper"));
        CHECK(one.step_s.size() == 4);
        CHECK(one.layers.size() == 3);
        CHECK(one.full_bytes == 3 * 2 * 100 * (8 + 16) * 2);
        CHECK(one.peak_bytes > one.model_bytes);
        CHECK(one.resident_bytes > 0);
        if (one.mixed)
        {
            for (auto const& layer : one.layers)
            {
                std::int64_t tokens_of_layer = 0;
                for (std::int64_t const count : layer.tokens) { tokens_of_layer += count; }
                CHECK(tokens_of_layer == 2 * 92);
                CHECK(layer.gap >= 0);
            }
        }
    }
}
