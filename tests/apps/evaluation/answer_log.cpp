#include "evaluation/answer_log.hpp"

#include <doctest/doctest.h>

#include <mdkv/core/error.hpp>

#include <cstddef>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "support/scratch_folder.hpp"

namespace
{

runner::answer some_answer(std::string const& id)
{
    return {{"task", id, "0123456789abcdef", "snapkv[pool=5]", 128, "window", {"a model.gguf", "f16", 32}},
        "a \"text\"\nof two lines", {{"recall", 62.5}, {"rouge1", 1.0 / 3}}, 1000, 64000, {{"length", 512}}, 0.25};
}

/// What the log says about a file with this content; the file must be as it was.
std::string refusal(std::string const& content)
{
    scratch_folder const folder;
    folder.write("answers.jsonl", content);
    try
    {
        runner::answer_log const log{folder.file("answers.jsonl")};
    }
    catch (mdkv::error const& problem)
    {
        CHECK(folder.read("answers.jsonl") == content);
        std::string what = problem.what();
        REQUIRE(what.starts_with(folder.file("answers.jsonl")));
        return what.substr(folder.file("answers.jsonl").size());
    }
    FAIL_CHECK("a log was accepted that should be refused");
    return {};
}

} // namespace

TEST_CASE("answers are there again when the log is opened again, digit for digit")
{
    scratch_folder const folder;
    std::vector<runner::answer> const answers{some_answer("1"), some_answer("2")};
    {
        runner::answer_log log{folder.file("answers.jsonl")};
        log.add(std::span{answers}.first(1));
        CHECK(log.has(answers[0].key));
        CHECK_FALSE(log.has(answers[1].key));
        log.add(std::span{answers}.last(1));
    }
    std::string const content = folder.read("answers.jsonl");
    CHECK(content.starts_with(R"({"task":"task","id":"1","policy":"snapkv[pool=5]","kv_size":128,"question":"window",)"
                              R"("element":"f16","window":32,"answer":"a \"text\"\nof two lines",)"));
    runner::answer_log const log{folder.file("answers.jsonl")};
    CHECK(log.cut() == 0);
    REQUIRE(log.answers().size() == 2);
    runner::answer const& again = log.answers().at(answers[1].key);
    CHECK(again.text == answers[1].text);
    CHECK(again.scores == answers[1].scores);
    CHECK(again.resident_bytes == 1000);
    CHECK(again.full_bytes == 64000);
    CHECK(again.about == answers[1].about);
    CHECK(again.seconds == 0.25);
    CHECK(folder.read("answers.jsonl") == content);
}

TEST_CASE("a line that was being written when the run was killed is cut off, at whatever byte that was")
{
    runner::answer const whole = some_answer("1"), other = some_answer("2");
    std::string const first = runner::detail::line_of(whole), second = runner::detail::line_of(other);
    for (std::size_t bytes = 1; bytes + 1 < second.size(); ++bytes)
    {
        CAPTURE(bytes);
        scratch_folder const folder;
        folder.write("answers.jsonl", first + second.substr(0, bytes));
        runner::answer_log log{folder.file("answers.jsonl")};
        CHECK(log.cut() == bytes);
        CHECK(log.has(whole.key));
        CHECK_FALSE(log.has(other.key));
        log.add(std::span{&other, 1});
        CHECK(folder.read("answers.jsonl") == first + second);
    }
}

TEST_CASE("a line that is no answer is refused with file, line and remedy, and the file stays as it was")
{
    std::string const good = runner::detail::line_of(some_answer("1"));
    CHECK(refusal(good + "garbage\n" + good) == ":2: is no JSON: \"garbage\"; remove the line, or give another --out");
    CHECK(refusal(good + good.substr(0, 40) + "\n").starts_with(":2: is no JSON: "));
    CHECK(refusal("\n" + good).starts_with(":1: is no JSON: \"\""));
    CHECK(refusal("text of somebody's, without a line end").starts_with(":1: is no JSON: "));
    CHECK(refusal("[1]\n").starts_with(":1: is no answer of an evaluation"));
    std::string without = good;
    without.replace(without.find("\"policy\""), 8, "\"polity\"");
    CHECK(refusal(good + without).starts_with(":2: is no answer of an evaluation"));
    CHECK(refusal(good + without).find("'policy'") != std::string::npos);
    std::string other = good;
    other.replace(other.find("\"kv_size\":128"), 13, "\"kv_size\":\"x\"");
    CHECK(refusal(other).starts_with(":1: is no answer of an evaluation"));
}

TEST_CASE("an answer that stops within a character is filed, and the file stays UTF-8")
{
    scratch_folder const folder;
    runner::answer one = some_answer("1");
    one.text           = "caf\xC3";
    {
        runner::answer_log log{folder.file("answers.jsonl")};
        log.add(std::span{&one, 1});
    }
    runner::answer_log const log{folder.file("answers.jsonl")};
    CHECK(log.answers().at(one.key).text == "caf\xEF\xBF\xBD");
}

TEST_CASE("a sample's mark changes with everything an answer or its score depends on, and with nothing else")
{
    runner::sample one;
    one.task          = "task";
    one.id            = "id";
    one.context       = "context";
    one.question      = "question";
    one.answer_prefix = "prefix";
    one.answers       = {"answer"};
    std::set<std::string> marks{runner::sample_mark(one)};
    CHECK(marks.begin()->size() == 16);
    auto const changed = [&](std::function<void(runner::sample&)> const& change) {
        runner::sample other = one;
        change(other);
        return runner::sample_mark(other);
    };
    std::vector<std::function<void(runner::sample&)>> const changes{[](auto& s) { s.context += "x"; },
        [](auto& s) { s.question += "x"; }, [](auto& s) { s.context += "q", s.question = "uestion"; },
        [](auto& s) { s.answer_prefix.clear(); }, [](auto& s) { s.answers.push_back("x"); },
        [](auto& s) { s.answers[0] = "x"; }, [](auto& s) { s.max_new_tokens = 31; },
        [](auto& s) { s.stop_at_newline = true; }, [](auto& s) { s.chat = true; },
        [](auto& s) { s.next_question = "x"; }, [](auto& s) { s.next_question = "x", s.next_answers = {"y"}; }};
    for (auto const& change : changes) { CHECK(marks.insert(changed(change)).second); }
    CHECK(changed([](auto& s) { s.about["length"] = 1, s.id = "other"; }) == runner::sample_mark(one));
}
