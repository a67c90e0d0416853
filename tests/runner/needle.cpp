/// \file needle.cpp: a needle stands where it should, the prompt is as long as asked, and a model with the whole cache finds it
#include "runner/needle.hpp"

#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <mdkv/core/budget.hpp>
#include <mdkv/core/types.hpp>

#include "support/byte_vocabulary.hpp"
#include "support/message.hpp"
#include "support/reference_model.hpp"

namespace
{

std::string prose(int sentences)
{
    std::string out;
    for (int i = 0; i < sentences; ++i) { out += "Sentence " + std::to_string(i) + " has a few words. "; }
    return out;
}

} // namespace

TEST_CASE("a prompt has exactly its length; the needle stands behind the full stop before its depth, and is asked for "
          "at the end")
{
    runner::needle const hidden = runner::make_needle("number", 3, 50);
    std::string const text      = prose(100);
    for (bool const chat : {false, true})
    {
        auto const words = byte_vocabulary({}, true, "smollm",
            chat ? std::vector<std::string>{"<bos>", "<|im_start|>", "<|im_end|>"} : std::vector<std::string>{"<bos>"});
        for (double const depth : {0.0, 33.0, 100.0})
        {
            CAPTURE(depth);
            auto const prompt = runner::make_needle_prompt(words, text, hidden, 1500, depth);
            CHECK(prompt.context.size() + prompt.question.size() == 1500);
            std::string const context = words.decode(prompt.context), question = words.decode(prompt.question);
            auto const at    = context.find(hidden.text);
            auto const first = context.find("Sentence 0");
            REQUIRE(at != std::string::npos);
            CHECK(context.find("answers questions for a user") < first);
            if (depth == 0) { CHECK(at < first); }
            else if (depth == 100) { CHECK(at + hidden.text.size() == context.size()); }
            else
            {
                CHECK(context[at - 1] == '.');
                auto const hay = context.size() - hidden.text.size() - first;
                CHECK(at - first <= hay * 33 / 100);
                CHECK(at - first + 40 > hay * 33 / 100); // a sentence is shorter
            }
            CHECK(question == hidden.question + (chat ? "<|im_end|>\n<|im_start|>assistant\n" : ""));
            CHECK(context.starts_with(chat ? "<|im_start|>user\nYou are" : "<bos>You are"));
        }
    }
    auto const words = byte_vocabulary();
    auto const twice = runner::make_needle_prompt(words, "One sentence. ", hidden, 800, 50); // the text is repeated
    CHECK(words.decode(twice.context).find("One sentence. One sentence. ") != std::string::npos);
}

TEST_CASE("a number is the same for the same seed and depth, and another one elsewhere; the sentence is the public one")
{
    auto const number = [](std::uint64_t seed, double depth) {
        return runner::make_needle("number", seed, depth).wanted;
    };
    CHECK(number(0, 10) == number(0, 10));
    CHECK(number(0, 10) != number(1, 10));
    CHECK(number(0, 10) != number(0, 10.5));
    CHECK(number(0, 10).size() == 7);
    CHECK(runner::make_needle("sentence", 0, 10).text.find("eat a sandwich and sit in Dolores Park")
          != std::string::npos);
}

TEST_CASE("needles that cannot be made are refused by name")
{
    auto const words  = byte_vocabulary();
    auto const hidden = runner::make_needle("number", 0, 0);
    using support::message_of;
    using support::says;
    says(message_of([&] { (void)runner::make_needle("pair", 0, 0); }), "needle: \"pair\" is unknown");
    says(message_of([&] { (void)runner::make_needle_prompt(words, "a", hidden, 100, 0); }),
        "needle: length 100 leaves nothing of the text");
    says(
        message_of([&] { (void)runner::make_needle_prompt(words, "", hidden, 1000, 0); }), "needle: the text is empty");
    says(message_of([&] { (void)runner::make_needle_prompt(words, "a", hidden, 1000, 101); }), "needle: depth is 101");
}

TEST_CASE("the reference model finds a number, asked for in the prompt or later, with all of its cache")
{
    if (skipped_without_reference_model("needle: the reference model")) { return; }
    runner::common_options common;
    common.model_path = reference_model_path();
    runner::session run{common};
    auto const hidden = runner::make_needle("number", 0, 50);
    auto const prompt = runner::make_needle_prompt(run.words(), prose(100), hidden, 400, 50);
    for (bool const later : {false, true})
    {
        CAPTURE(later);
        std::vector<runner::needle_lane<mdkv::half>> lanes;
        for (char const* const name : {"full", "any_question"})
        {
            lanes.push_back({400, runner::sequence_cache<mdkv::half>{run.model(), runner::find_policy(name),
                                      mdkv::budget::fraction(1, 1), common.window, 128}});
        }
        runner::scratch_memory scratch;
        runner::answer_needle(run, prompt, later, common.window, lanes, scratch);
        for (auto const& lane : lanes)
        {
            CAPTURE(lane.answer);
            CHECK(lane.finds(hidden.wanted));
        }
    }
}
