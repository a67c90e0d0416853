#include "evaluation/evaluate.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <mdkv/core/error.hpp>
#include <nlohmann/json.hpp>

#include "evaluation/answer_log.hpp"
#include "evaluation/sample.hpp"
#include "runner/decode.hpp"
#include "runner/language_model.hpp"
#include "runner/policies.hpp"
#include "runner/terminal.hpp"
#include "runner/tokenizer.hpp"
#include "support/byte_vocabulary.hpp"
#include "support/random.hpp"
#include "support/scratch_folder.hpp"
#include "support/synthetic_llama.hpp"

namespace
{

using runner::question_place;

/// A random model whose vocabulary is the 256 bytes and the chat form's control tokens, so that it answers with anything.
struct byte_model
{
    runner::tokenizer words = byte_vocabulary({}, false, "smollm", {"<bos>", "<|im_start|>", "<|im_end|>"});
    support::synthetic_llama llama{
        {.layers = 2, .feed_forward = 48, .key_dim = 8, .value_dim = 8, .vocabulary = words.size(), .context = 400}};
    runner::language_model model = runner::language_model::load(llama.writer().file());

    [[nodiscard]] runner::evaluation_setting setting(std::size_t most_at_once = 64) const
    {
        return {model, words, {}, {"synthetic.gguf", "f32", 8}, most_at_once};
    }
};

std::vector<runner::sample> some_samples(std::int64_t count)
{
    support::source random("samples of bytes", count);
    std::vector<runner::sample> samples;
    for (std::int64_t i = 0; i < count; ++i)
    {
        runner::sample one;
        one.task = "task";
        one.id   = std::to_string(i);
        for (auto left = 80 + random.below(60); left > 0; --left)
        {
            one.context += static_cast<char>('a' + random.below(26));
        }
        one.question       = " what is it?";
        one.answer_prefix  = "It is";
        one.max_new_tokens = 6;
        one.chat           = i % 2 == 0;
        samples.push_back(one);
    }
    return samples;
}

std::vector<runner::entrant> some_entrants(
    std::vector<question_place> const& places = {question_place::window, question_place::after})
{
    std::vector<runner::policy> policies;
    for (char const* name : {"snapkv", "paper", "h2o", "random"}) { policies.push_back(runner::parse_policy(name)); }
    return runner::entrants_of(policies, {16, 24, 48}, places);
}

std::map<std::string, double> length_score(runner::sample const&, std::string const& text)
{
    return {{"bytes", static_cast<double>(text.size())}};
}

/// Its lines in order, without what differs from run to run.
std::vector<std::string> answers_in(std::string const& content)
{
    std::vector<std::string> lines;
    std::istringstream in{content};
    for (std::string line; std::getline(in, line);)
    {
        nlohmann::json json = nlohmann::json::parse(line);
        json.erase("seconds");
        lines.push_back(json.dump());
    }
    std::ranges::sort(lines);
    return lines;
}

std::vector<std::string> run_whole(byte_model const& model, std::span<runner::sample const> samples,
    std::span<runner::entrant const> entrants, std::size_t most_at_once)
{
    scratch_folder const folder;
    {
        runner::answer_log log{folder.file("answers.jsonl")};
        runner::evaluate<float>(model.setting(most_at_once), "test", samples, entrants, log, length_score);
    }
    return answers_in(folder.read("answers.jsonl"));
}

} // namespace

TEST_CASE("entrants are the full cache once for every question place, and every other policy at every size, once")
{
    std::vector<runner::policy> const policies{
        runner::parse_policy("snapkv"), runner::parse_policy("full"), runner::parse_policy("snapkv")};
    auto const all = runner::entrants_of(policies, {64, 128}, {question_place::window, question_place::after});
    REQUIRE(all.size() == 2 + 4);
    CHECK(all[0].chosen.whole());
    CHECK(all[1].chosen.whole());
    CHECK(all[1].question == question_place::after);
    CHECK(all[2].chosen.label == "snapkv");
    CHECK(all[4].kv_size == 128);
    CHECK_THROWS_AS(static_cast<void>(runner::entrants_of(policies, {0}, {question_place::window})), mdkv::error);
}

TEST_CASE("every sample is answered once for every entrant, however many share a prefill")
{
    byte_model const model;
    auto const samples  = some_samples(2);
    auto const entrants = some_entrants();
    REQUIRE(entrants.size() > runner::detail::lock_step(1)); // some steps have more rows than others
    auto const all = run_whole(model, samples, entrants, 64);
    CHECK(all.size() == samples.size() * entrants.size());
    CHECK(std::set<std::string>(all.begin(), all.end()).size() == all.size());
    for (std::size_t const at_once : {std::size_t{1}, std::size_t{5}, std::size_t{22}})
    {
        CAPTURE(at_once);
        CHECK(run_whole(model, samples, entrants, at_once) == all);
    }
}

TEST_CASE("a step's bits do not depend on how many sequences share it")
{
    byte_model const model;
    auto const vocabulary = static_cast<std::size_t>(model.model.shape().vocabulary);
    runner::decode_workspace space;
    std::vector<float> first; // logits of the first sequence in the smallest step
    for (std::size_t live = 1; live <= 70; live += 3)
    {
        CAPTURE(live);
        std::size_t const rows = runner::detail::lock_step(live);
        REQUIRE(rows >= live);
        std::vector<std::int32_t> tokens(rows, 'x');
        std::vector<std::int64_t> const positions(rows, 9);
        tokens[0] = tokens[live - 1] = 'a';
        std::vector<float> logits(rows * vocabulary);
        runner::decode_step(
            model.model, tokens, positions, {},
            [&](std::int64_t, std::int64_t, float const* query, float const*, float const*, float* out) {
                std::copy_n(query, 6 * 8, out);
            },
            logits, space);
        if (first.empty()) { first.assign(logits.begin(), logits.begin() + static_cast<std::ptrdiff_t>(vocabulary)); }
        CHECK(std::equal(first.begin(), first.end(), logits.begin()));
        CHECK(std::equal(
            first.begin(), first.end(), logits.begin() + static_cast<std::ptrdiff_t>((live - 1) * vocabulary)));
    }
}

TEST_CASE("a run that is killed and goes on leaves the same answers as one in one go")
{
    byte_model const model;
    auto const samples  = some_samples(3);
    auto const entrants = some_entrants();
    auto const expected = run_whole(model, samples, entrants, 7);
    scratch_folder const folder;
    std::string const path = folder.file("answers.jsonl");
    std::size_t before     = 0;
    for (std::size_t const allowed : {std::size_t{3}, entrants.size() + 5, std::size_t{100'000}})
    {
        std::size_t left = allowed;
        auto const dying = [&](runner::sample const& one, std::string const& text) {
            if (left-- == 0) { throw std::runtime_error("killed"); }
            return length_score(one, text);
        };
        try
        {
            runner::answer_log log{path};
            runner::evaluate<float>(model.setting(), "test", samples, entrants, log, dying);
        }
        catch (std::runtime_error const& problem)
        {
            CHECK(std::string{problem.what()} == "killed");
        }
        std::string const content = folder.read("answers.jsonl");
        CHECK(answers_in(content).size() >= before);
        before = answers_in(content).size();
        CHECK(before == (allowed < entrants.size() ? 0 : allowed < 1000 ? entrants.size() : expected.size()));
        if (before < expected.size()) { folder.write("answers.jsonl", content + R"({"task":"task","id":"1","pol)"); }
    }
    CHECK(answers_in(folder.read("answers.jsonl")) == expected);

    runner::answer_log log{path};
    runner::evaluate<float>(model.setting(), "test", samples, entrants, log,
        [](runner::sample const&, std::string const&) -> std::map<std::string, double> {
            throw std::runtime_error("asked again");
        });
}

TEST_CASE("policies and sizes added later are all that is run")
{
    byte_model const model;
    auto const samples = some_samples(1);
    auto const more    = some_entrants();
    auto const few     = std::span{more}.first(5);
    scratch_folder const folder;
    runner::answer_log log{folder.file("answers.jsonl")};
    runner::evaluate<float>(model.setting(), "test", samples, few, log, length_score);
    std::size_t asked  = 0;
    auto const counted = [&](runner::sample const& one, std::string const& text) {
        ++asked;
        return length_score(one, text);
    };
    runner::evaluate<float>(model.setting(), "test", samples, more, log, counted);
    CHECK(asked == more.size() - few.size());
    CHECK(answers_in(folder.read("answers.jsonl")) == run_whole(model, samples, more, 64));
}

TEST_CASE("the full cache answers the same with the question in the window and behind it")
{
    byte_model const model;
    auto const samples  = some_samples(6);
    auto const entrants = runner::entrants_of({}, {}, {question_place::window, question_place::after});
    scratch_folder const folder;
    runner::answer_log log{folder.file("answers.jsonl")};
    runner::evaluate<float>(model.setting(), "test", samples, entrants, log, length_score);
    REQUIRE(log.answers().size() == 12);
    std::set<std::string> texts;
    for (auto const& [key, given] : log.answers())
    {
        runner::answer_key other = key;
        other.question           = "window";
        CHECK(given.text == log.answers().at(other).text);
        texts.insert(given.text);
    }
    CHECK(texts.size() > 3); // or the comparison would mean little
}

TEST_CASE("a second question is read behind the first answer, through the same cache")
{
    byte_model const model;
    auto const entrants = some_entrants();
    auto const answers  = [&](std::vector<runner::sample> const& samples) {
        scratch_folder const folder;
        runner::answer_log log{folder.file("answers.jsonl")};
        runner::evaluate<float>(model.setting(), "test", samples, entrants, log, length_score);
        return log.answers();
    };
    std::vector<runner::sample> both = some_samples(4);
    for (runner::sample& one : both)
    {
        one.chat            = false;
        one.stop_at_newline = true;
        one.next_question   = "and?";
    }
    std::size_t compared = 0;
    for (auto const& [key, given] : answers(both))
    {
        std::size_t const line = given.text.find('\n');
        REQUIRE(line != std::string::npos);
        CHECK(given.text.find('\n', line + 1) == std::string::npos);
        std::string const first = given.text.substr(0, line);
        // As one question that holds the first answer. Shorter answers may have ended in more than one way.
        if (key.question != "after" || std::ssize(first) < both[0].max_new_tokens || compared >= 8) { continue; }
        runner::sample one = both[static_cast<std::size_t>(std::stoi(key.id))];
        one.question += one.answer_prefix + first + "\nand?\n";
        one.answer_prefix.clear();
        one.next_question.clear();
        runner::answer_key alone = key;
        alone.prompt             = runner::sample_mark(one);
        auto const expected      = answers({one});
        CHECK(given.text.substr(line + 1) == expected.at(alone).text);
        CHECK(given.resident_bytes == expected.at(alone).resident_bytes);
        ++compared;
    }
    CHECK(compared == 8);

    both[0].stop_at_newline = false;
    CHECK_THROWS_AS(static_cast<void>(answers(both)), mdkv::error);
    both[0].stop_at_newline = true;
    both[0].next_question   = std::string(300, 'x');
    CHECK_THROWS_AS(static_cast<void>(answers(both)), mdkv::error);
}

TEST_CASE("a lane that goes on reads the answer's last token first, unless that ends a turn")
{
    byte_model const model;
    runner::entrant const who{runner::find_policy("full")};
    std::vector<std::int32_t> const question = runner::encode_next_question(model.words, "and?", true);
    auto const read                          = [&](std::vector<std::int32_t> const& answer) {
        runner::sample one;
        one.max_new_tokens  = 3;
        one.stop_at_newline = true;
        runner::detail::lane<float> at{
            &who, runner::sequence_cache<float>{model.model, who.chosen, mdkv::budget::fraction(1, 1), 8, 0}, 0};
        for (std::int32_t const token : answer) { runner::detail::take_token(at, token, model.words, one); }
        REQUIRE(at.done);
        runner::detail::ask_next(at, answer.back(), model.words, question);
        CHECK_FALSE(at.done);
        CHECK(at.text.empty());
        CHECK(at.made == 0);
        CHECK(at.next_asked);
        std::ranges::reverse(at.reading);
        return at.before + "|" + model.words.decode(at.reading);
    };
    std::string const turn = "<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n";
    CHECK(read({'a', 'b', model.words.find_control("<|im_end|>").value()}) == "ab\n|" + turn);
    CHECK(read({'a', 'b', 'c'}) == "abc\n|c" + turn);
    CHECK(read({'a', '\n'}) == "a\n|\n" + turn);
}

TEST_CASE("a cache compressed before the question holds fewer tokens, and its budget is that of its size")
{
    byte_model const model;
    auto const samples = some_samples(1);
    scratch_folder const folder;
    runner::answer_log log{folder.file("answers.jsonl")};
    auto const entrants = some_entrants();
    runner::evaluate<float>(model.setting(), "test", samples, entrants, log, length_score);
    for (auto const& [key, given] : log.answers())
    {
        CAPTURE(key.policy);
        CAPTURE(key.kv_size);
        auto const tokens = given.full_bytes / (2 * 2 * (8 + 8) * 4); // layers, heads, D + Dv, bytes
        auto const expected =
            std::ssize(model.words.encode(samples[0].context)) + (key.question == "window" ? 12 + 5 : 0);
        CHECK(tokens > expected); // the chat form's come on top
        CHECK(tokens < expected + 60);
        std::int64_t const share = key.kv_size == 0 ? given.full_bytes : given.full_bytes * key.kv_size / tokens;
        CHECK(given.resident_bytes <= share + 4096); // what a policy keeps beside keys and values
        CHECK(given.resident_bytes > share / 2);
    }
}

TEST_CASE("a sample longer than the model's context is refused by name before anything is run, and answers stay")
{
    byte_model const model;
    auto samples        = some_samples(2);
    auto const entrants = some_entrants({question_place::window});
    scratch_folder const folder;
    runner::answer_log log{folder.file("answers.jsonl")};
    runner::evaluate<float>(model.setting(), "test", std::span{samples}.first(1), entrants, log, length_score);
    std::string const content = folder.read("answers.jsonl");
    samples[1].context.resize(390, 'x');
    std::string problem;
    try
    {
        runner::evaluate<float>(model.setting(), "test", samples, entrants, log, length_score);
    }
    catch (mdkv::error const& caught)
    {
        problem = caught.what();
    }
    CHECK(
        problem.starts_with("task task, sample 1: a prompt of 407 tokens and an answer of up to 6 are longer than the "
                            "model's context of 400; "));
    CHECK(folder.read("answers.jsonl") == content);

    samples[1].context.clear();
    samples[1].chat = false;
    CHECK_THROWS_AS(
        runner::evaluate<float>(model.setting(), "test", samples, entrants, log, length_score), mdkv::error);
    samples[1]                = some_samples(2)[1];
    samples[1].max_new_tokens = 0;
    CHECK_THROWS_AS(
        runner::evaluate<float>(model.setting(), "test", samples, entrants, log, length_score), mdkv::error);
}

TEST_CASE("Ctrl-C ends an evaluation, and finished answers are kept")
{
    byte_model const model;
    auto const samples  = some_samples(2);
    auto const entrants = some_entrants({question_place::window});
    scratch_folder const folder;
    {
        runner::answer_log log{folder.file("answers.jsonl")};
        std::size_t scored = 0;
        auto const pressed = [&](runner::sample const& one, std::string const& text) {
            if (++scored == entrants.size()) { runner::detail::interrupt_seen = 1; }
            return length_score(one, text);
        };
        CHECK_THROWS_AS(
            runner::evaluate<float>(model.setting(), "test", samples, entrants, log, pressed), runner::interrupted);
        runner::detail::interrupt_seen = 0;
    }
    CHECK(answers_in(folder.read("answers.jsonl")).size() == entrants.size());
}

TEST_CASE("an answer ends at an end-of-generation token, at its last token, or at a line end where that is asked for")
{
    byte_model const model;
    runner::sample one;
    one.max_new_tokens = 3;
    auto const taken   = [&](std::vector<std::int32_t> const& tokens) {
        runner::entrant const who{runner::find_policy("full")};
        runner::detail::lane<float> at{
            &who, runner::sequence_cache<float>{model.model, who.chosen, mdkv::budget::fraction(1, 1), 8, 0}, 0};
        std::string text;
        for (std::int32_t const token : tokens)
        {
            CHECK_FALSE(at.done);
            runner::detail::take_token(at, token, model.words, one);
        }
        return at.text + (at.done ? "|" : "");
    };
    std::int32_t const start = model.words.find_control("<|im_start|>").value();
    std::int32_t const end   = model.words.find_control("<|im_end|>").value();
    CHECK(taken({'a', 'b'}) == "ab");
    CHECK(taken({'a', 'b', 'c'}) == "abc|");
    CHECK(taken({'a', end}) == "a|");
    CHECK(taken({end}) == "|");
    CHECK(taken({'a', start, 'b'}) == "ab|"); // a control token counts, but is no text
    CHECK(taken({'a', '\n', 'b'}) == "a\nb|");
    one.stop_at_newline = true;
    CHECK(taken({'a', '\n'}) == "a|");
}

TEST_CASE("an answer that must go on takes the likeliest token that does not end it")
{
    byte_model const at;
    runner::sample one;
    one.min_new_tokens = 1;
    std::vector<float> logits(static_cast<std::size_t>(at.words.size()), 0.0F);
    auto const newline = at.words.encode("\n").at(0);
    auto const end     = at.words.find_control("<|im_end|>").value();
    auto const letter  = at.words.encode("a").at(0);
    REQUIRE(at.words.is_end_of_generation(end));
    logits[static_cast<std::size_t>(end)]     = 3;
    logits[static_cast<std::size_t>(newline)] = 2;
    logits[static_cast<std::size_t>(letter)]  = 1;
    CHECK(runner::detail::chosen_token(logits, at.words, one, 0) == newline); // which ends nothing here
    one.stop_at_newline = true;
    CHECK(runner::detail::chosen_token(logits, at.words, one, 0) == letter);
    CHECK(runner::detail::chosen_token(logits, at.words, one, 1) == end);
    one.min_new_tokens = 0;
    CHECK(runner::detail::chosen_token(logits, at.words, one, 0) == end);
}
