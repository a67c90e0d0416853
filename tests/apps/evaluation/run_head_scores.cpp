/// \file run_head_scores.cpp: attention to a needle is counted by the definition, and a killed detection ends in the same file
#include "evaluation/run_head_scores.hpp"

#include <mdkv/core/error.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "evaluation/head_detection.hpp"
#include "evaluation/hidden_statements.hpp"
#include "runner/tokenizer.hpp"
#include "support/byte_vocabulary.hpp"
#include "support/message.hpp"
#include "support/random.hpp"
#include "support/scratch_folder.hpp"
#include "support/synthetic_llama.hpp"

namespace
{

using support::message_of;
using support::says;

/// One token for every byte, and one that ends a text.
runner::tokenizer byte_words()
{
    return byte_vocabulary({}, false, "smollm", {"<|endoftext|>"});
}

constexpr support::llama_sizes sizes{.vocabulary = 257};

std::string prose()
{
    std::string text;
    for (int i = 0; i < 60; ++i)
    {
        text += "Sentence number " + std::to_string(i) + " says little. And less.\nA new line. ";
    }
    return text;
}

/// A folder with some prose in it.
struct prose_folder : scratch_folder
{
    prose_folder() { write("prose.txt", prose()); }

    [[nodiscard]] runner::head_scores_options options(std::string const& out) const
    {
        return {.text_path = file("prose.txt"),
            .out_path      = file(out),
            .lengths       = {500, 600},
            .depths        = 3,
            .samples       = 5,
            .seed          = 7,
            .least_f1      = -1,
            .raw           = true,
            .digits        = 17};
    }
};

/// Runs everything in order until it has had enough.
class failing_executor
{
public:
    explicit failing_executor(std::int64_t pieces)
        : left_{pieces}
    {}
    void parallel_for(std::int64_t count, mdkv::cpu::executor_ref::task_function task, void* context)
    {
        for (std::int64_t i = 0; i < count; ++i)
        {
            if (--left_ < 0) { throw std::runtime_error("killed"); }
            task(context, i);
        }
    }
    [[nodiscard]] static int threads() { return 1; }
    [[nodiscard]] std::int64_t left() const { return left_; }

private:
    std::int64_t left_;
};

/// By sorting: equal weights in the order of their positions.
double needle_attention_slowly(std::vector<float> const& attention, runner::token_span needle)
{
    std::vector<std::int64_t> order(attention.size());
    std::iota(order.begin(), order.end(), std::int64_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
        return attention[static_cast<std::size_t>(a)] > attention[static_cast<std::size_t>(b)];
    });
    double sum = 0;
    for (std::int64_t k = 0; k < needle.size(); ++k)
    {
        auto const at = order[static_cast<std::size_t>(k)];
        if (needle.begin <= at && at < needle.end) { sum += double{attention[static_cast<std::size_t>(at)]}; }
    }
    return sum / static_cast<double>(needle.size());
}

} // namespace

TEST_CASE("of as many strongest weights as the needle has tokens, those on the needle count")
{
    std::vector<float> const attention{0.3F, 0.0625F, 0.25F, 0.05F, 0.2F, 0.1375F};
    // The two strongest are 0 and 2; of the needle 1, 2 only the second is among them.
    CHECK(runner::needle_attention(attention, {1, 3}) == 0.25 / 2);
    CHECK(runner::needle_attention(attention, {4, 6}) == 0);
    CHECK(runner::needle_attention(attention, {0, 1}) == double{0.3F});
    CHECK(runner::needle_attention(attention, {0, 6}) == doctest::Approx(1.0 / 6));
    CHECK(runner::strongest_position(attention) == 0);

    std::vector<float> const even(4, 0.25F); // of equal weights the first two
    CHECK(runner::needle_attention(even, {0, 2}) == 0.25);
    CHECK(runner::needle_attention(even, {1, 3}) == 0.125);
    CHECK(runner::needle_attention(even, {2, 4}) == 0);
    CHECK(runner::strongest_position(even) == 0);
}

TEST_CASE("attention on the needle is what sorting all weights gives, ties included")
{
    support::source random{"needle attention"};
    CAPTURE(support::seed());
    for (int round = 0; round < 2000; ++round)
    {
        std::vector<float> attention(static_cast<std::size_t>(1 + random.below(20)));
        for (float& weight : attention) { weight = static_cast<float>(random.below(6)) / 8; }
        auto const tokens = std::ssize(attention);
        auto const begin  = random.below(tokens);
        runner::token_span const needle{begin, begin + 1 + random.below(tokens - begin)};
        REQUIRE(runner::needle_attention(attention, needle) == needle_attention_slowly(attention, needle));
    }
}

TEST_CASE("a watched answer's tokens and scores are those of the forward pass by the definition")
{
    for (auto const kind : {runner::head_kind::r2, runner::head_kind::r})
    {
        CAPTURE(static_cast<int>(kind));
        support::synthetic_llama const reference{sizes, 3};
        auto const model = runner::language_model::load(reference.writer().file());
        auto const words = byte_words();
        auto prompt      = support::random_tokens(40, 256, 3);
        std::fill(prompt.begin() + 10, prompt.begin() + 22, prompt[0]); // so that something can be copied
        runner::token_span const needle{8, 30};
        mdkv::cpu::thread_pool pool{3};
        auto const got = runner::watch_answer<float>(model, words, pool, prompt, needle, 6, kind, [] {});

        std::vector<double> want(static_cast<std::size_t>(sizes.layers * sizes.query_heads));
        auto sequence = prompt;
        std::vector<std::int32_t> answer;
        for (int step = 0; step < 6; ++step)
        {
            auto const pass   = reference.run(sequence);
            auto const& last  = pass.logits.back();
            auto const chosen = static_cast<std::int32_t>(std::max_element(last.begin(), last.end()) - last.begin());
            for (std::size_t at = 0; at < want.size(); ++at)
            {
                std::size_t const layer = at / static_cast<std::size_t>(sizes.query_heads);
                std::size_t const head  = at % static_cast<std::size_t>(sizes.query_heads);
                std::size_t const kv    = head / static_cast<std::size_t>(sizes.query_heads / sizes.kv_heads);
                auto const d            = static_cast<std::size_t>(sizes.key_dim);
                std::vector<float> attention;
                for (auto const& keys : pass.keys[layer])
                {
                    double logit = 0;
                    for (std::size_t c = 0; c < d; ++c)
                    {
                        logit += pass.queries[layer].back()[head * d + c] * keys[kv * d + c];
                    }
                    attention.push_back(static_cast<float>(
                        std::exp(logit / std::sqrt(static_cast<double>(d)) - pass.lse[layer].back()[head])));
                }
                if (kind == runner::head_kind::r2) { want[at] += needle_attention_slowly(attention, needle); }
                else
                {
                    auto const first = std::max_element(attention.begin(), attention.end()) - attention.begin();
                    bool const hit   = needle.holds(first) && prompt[static_cast<std::size_t>(first)] == chosen;
                    want[at] += hit ? 1.0 / static_cast<double>(needle.size()) : 0;
                }
            }
            if (chosen == 256) { break; }
            answer.push_back(chosen);
            if (chosen == '\n') { break; }
            sequence.push_back(chosen);
        }
        CHECK(got.tokens == answer);
        REQUIRE(got.scores.size() == want.size());
        for (std::size_t at = 0; at < want.size(); ++at)
        {
            CAPTURE(at);
            CHECK(got.scores[at] == doctest::Approx(want[at]).epsilon(1e-4));
        }
        if (kind == runner::head_kind::r2) { CHECK(*std::max_element(want.begin(), want.end()) > 0); }
    }
}

TEST_CASE("a statement stands whole in the prompt, between sentences, at its depth, and its tokens are found")
{
    auto const words  = byte_words();
    auto const tokens = words.encode(prose());
    prose_folder const place;
    auto const options = place.options("scores.json");
    double before      = -1;
    for (std::int64_t const index : {0, 2, 4})
    {
        auto const task        = runner::detail::make_retrieval_task(words, tokens, options, index);
        std::string const text = words.decode(task.prompt);
        std::string const span = words.decode(
            std::span(task.prompt)
                .subspan(static_cast<std::size_t>(task.needle.begin), static_cast<std::size_t>(task.needle.size())));
        CHECK(span == task.hidden.statement); // a token is a byte here
        says(text, task.hidden.decoy);
        says(text, task.hidden.question);
        CHECK(task.hidden.decoy != task.hidden.statement);
        std::size_t const at = text.find(task.hidden.statement);
        CHECK(text.find(task.hidden.statement, at + 1) == std::string::npos);
        char const ahead = text[at - 1];
        CHECK((ahead == ' ' || ahead == '\n'));
        CHECK(std::ssize(task.prompt) == doctest::Approx(500).epsilon(0.02));
        double const depth = static_cast<double>(task.needle.begin);
        CHECK(depth > before);
        before = depth;
    }
    auto const one   = runner::detail::make_retrieval_task(words, tokens, options, 3);
    auto const again = runner::detail::make_retrieval_task(words, tokens, options, 3);
    CHECK(one.prompt == again.prompt);
    CHECK(one.length == 600);
    auto other = options;
    other.seed = 8;
    CHECK(runner::detail::make_retrieval_task(words, tokens, other, 3).prompt != one.prompt);
}

TEST_CASE("sentences begin behind a full stop and a space, or a new line")
{
    std::string const text = "One two. Three 4.5 six.\nSeven";
    CHECK(runner::sentence_break(text, 0) == 0);
    CHECK(runner::sentence_break(text, 6) == 9);
    CHECK(runner::sentence_break(text, 17) == 24);
    CHECK(runner::sentence_break(text, 28) == text.size());
    CHECK(runner::sentence_break(text, 1000) == text.size());
    CHECK(runner::sentence_break("", 3) == 0);

    runner::hidden_statement const hidden{"Here it is.", "There it was.", ""};
    CHECK(runner::hide(text, hidden, 30, 97) == "One two. Here it is. Three 4.5 six.\nSeven There it was.");
    CHECK(runner::hide(text, hidden, 100, 0) == "There it was. One two. Three 4.5 six.\nSeven Here it is.");
}

TEST_CASE("a detection that was killed anywhere, even in the middle of a line, ends in the same file")
{
    support::synthetic_llama const reference{sizes, 5};
    auto const model = runner::language_model::load(reference.writer().file());
    auto const words = byte_words();
    prose_folder const place;
    mdkv::cpu::thread_pool pool{2};
    auto const options = place.options("whole.json");
    REQUIRE(runner::detect_head_scores<float>(model, words, pool, "tiny", options, nullptr) == 0);
    std::string const whole = place.read("whole.json");
    CHECK_FALSE(std::filesystem::exists(options.out_path + ".partial"));
    auto const scores = runner::read_head_scores(options.out_path, sizes.layers, sizes.query_heads);
    CHECK(scores.samples[0] == 5);

    auto const resumed = place.options("resumed.json");
    failing_executor counting{INT64_MAX};
    REQUIRE(runner::detect_head_scores<float>(model, words, counting, "tiny", resumed, nullptr) == 0);
    CHECK(place.read("resumed.json") == whole); // whatever the threads
    std::filesystem::remove(resumed.out_path);
    std::int64_t const work = INT64_MAX - counting.left();
    int kills               = 0;
    std::size_t kept        = 0;
    while (!std::filesystem::exists(resumed.out_path))
    {
        REQUIRE(++kills < 20);
        failing_executor some{2 * work / 5};
        bool const killed = message_of([&] {
            static_cast<void>(runner::detect_head_scores<float>(model, words, some, "tiny", resumed, nullptr));
        }) == "killed";
        if (!killed) { break; }
        std::string const partial = place.read("resumed.json.partial");
        auto const lines          = static_cast<std::size_t>(std::count(partial.begin(), partial.end(), '\n'));
        CHECK(lines > kept); // each run got further
        kept = lines;
        std::ofstream{resumed.out_path + ".partial", std::ios::app} << R"({"counts": true, "f1": 9)";
    }
    CHECK(kills >= 3);
    CHECK(place.read("resumed.json") == whole);
    CHECK_FALSE(std::filesystem::exists(resumed.out_path + ".partial"));
}

TEST_CASE("an unfinished run of other settings or with a damaged line is refused and left as it is")
{
    support::synthetic_llama const reference{sizes, 5};
    auto const model = runner::language_model::load(reference.writer().file());
    auto const words = byte_words();
    prose_folder const place;
    auto options   = place.options("scores.json");
    auto const run = [&] {
        static_cast<void>(runner::detect_head_scores<float>(model, words, {}, "tiny", options, nullptr));
    };
    options.samples  = 2;
    options.least_f1 = 99;
    says(message_of(run), "none of the 2 statements was found");
    std::string const partial = place.read("scores.json.partial");
    CHECK(std::count(partial.begin(), partial.end(), '\n') == 3);
    CHECK_FALSE(std::filesystem::exists(options.out_path));

    options.seed = 9;
    says(message_of(run), "scores.json.partial: is an unfinished run with other settings; remove it");
    CHECK(place.read("scores.json.partial") == partial);
    options.seed = 7;

    for (std::string const line : {"[1]\n", "{}\n", "no JSON\n",
             R"({"f1": 60, "counts": true, "scores": [1, 2]})"
             "\n",
             R"({"f1": 60, "counts": false, "scores": [-1]})"
             "\n"})
    {
        CAPTURE(line);
        place.write("scores.json.partial", partial + line);
        says(message_of(run), "scores.json.partial: line 4 is no sample of this run");
        CHECK(place.read("scores.json.partial") == partial + line);
    }
}

TEST_CASE("a bad option is named with its value before anything is run")
{
    support::synthetic_llama const reference{sizes, 5};
    auto const model = runner::language_model::load(reference.writer().file());
    auto const words = byte_words();
    prose_folder const place;
    auto const refusal = [&](auto const& change) {
        auto options = place.options("scores.json");
        change(options);
        std::string const message = message_of(
            [&] { static_cast<void>(runner::detect_head_scores<float>(model, words, {}, "tiny", options, nullptr)); });
        CHECK_FALSE(std::filesystem::exists(place.file("scores.json")));
        return message;
    };
    says(refusal([](auto& o) { o.kind = "r3"; }), "kind: \"r3\"");
    says(refusal([](auto& o) { o.out_path = ""; }), "out: no file");
    says(refusal([](auto& o) { o.lengths = {}; }), "lengths: none");
    says(refusal([](auto& o) { o.lengths = {500, 2000}; }), "lengths: 2000 tokens and an answer do not fit");
    says(refusal([](auto& o) { o.lengths = {-5}; }), "lengths: -5");
    says(refusal([](auto& o) { o.lengths = {100}; }), "lengths: a prompt of 100 tokens leaves");
    says(refusal([](auto& o) { o.depths = 0; }), "depths: 0");
    says(refusal([](auto& o) { o.samples = 0; }), "samples: 0");
    says(refusal([](auto& o) { o.least_f1 = 100; }), "least-f1: 100");
    says(refusal([](auto& o) { o.digits = 18; }), "digits: 18");
    says(refusal([](auto& o) { o.text_path += ".gone"; }), "prose.txt.gone: cannot be");
    says(refusal([&](auto& o) { o.text_path = place.write("short.txt", "Too short."); }),
        "short.txt has 10 tokens; 600 are needed");
    says(refusal([](auto& o) { o.out_path = "/nowhere/scores.json"; }),
        "/nowhere/scores.json.partial: cannot be written");
}

TEST_CASE("the reference model's kept scores are whole, and some of its heads stand out")
{
    for (char const* const name : {"smollm2-135m-instruct.json", "smollm2-135m-instruct-r.json"})
    {
        CAPTURE(name);
        std::string const folder_path = std::string{MDKV_TEST_DATA_DIR} + "/../../bench/quality/head_scores/";
        auto const scores             = runner::read_head_scores(folder_path + name, 30, 9);
        auto const [least, most]      = std::minmax_element(scores.samples.begin(), scores.samples.end());
        CHECK(*least == *most);
        CHECK(*least >= 20);
        double const mean =
            std::accumulate(scores.mean.begin(), scores.mean.end(), 0.0) / static_cast<double>(scores.mean.size());
        CHECK(*std::max_element(scores.mean.begin(), scores.mean.end()) > 3 * mean);
    }
}
