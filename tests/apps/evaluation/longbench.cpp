/// \file longbench.cpp: the tasks are the public ones to the byte, long prompts lose their middle, bad files are told
#include "evaluation/longbench.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>
#include <rapidcheck.h>

#include "evaluation/longbench_file.hpp"
#include "evaluation/longbench_tasks.hpp"
#include "evaluation/lossy_utf8.hpp"
#include "evaluation/sample.hpp"
#include "runner/gguf.hpp"
#include "runner/tokenizer.hpp"
#include "runner/utf8.hpp"
#include "support/byte_vocabulary.hpp"
#include "support/message.hpp"
#include "support/reference_model.hpp"
#include "support/scratch_folder.hpp"

namespace
{

using metric = runner::longbench_metric;
using support::message_of;

std::uint64_t fnv1a(std::string_view text, std::uint64_t hash = 0xCBF29CE484222325U)
{
    for (char const c : text) { hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3U; }
    return hash;
}

/// A line as the public files have them.
nlohmann::json line_of(std::string const& task, std::string const& id)
{
    return {{"input", "What is {context} of " + task + "?"}, {"context", "A book.\nWith {input} in it.\n"},
        {"answers", {"first", "second"}}, {"length", 6}, {"dataset", task}, {"language", "en"},
        {"all_classes", nullptr}, {"_id", id}};
}

runner::longbench_prompt filled(std::string const& context, std::string const& question)
{
    runner::longbench_prompt prompt;
    prompt.context  = context;
    prompt.question = question;
    return prompt;
}

} // namespace

TEST_CASE("longbench: every task is the public one")
{
    struct expectation
    {
        std::string_view name;
        metric how;
        std::int64_t max_new_tokens;
        std::size_t prompt_bytes;
        std::uint64_t prompt_hash; // FNV-1a of its bytes in the public dataset2prompt.json
    };
    expectation const expected[] = {
        {"narrativeqa", metric::f1, 128, 378, 0x6B833EC5A5521200U},
        {"qasper", metric::f1, 128, 725, 0xE0BBE61B9CC50AA0U},
        {"multifieldqa_en", metric::f1, 64, 201, 0x21A552B1C54137EFU},
        {"hotpotqa", metric::f1, 32, 288, 0x3D89CF4BEB38CF14U},
        {"2wikimqa", metric::f1, 32, 288, 0x3D89CF4BEB38CF14U},
        {"musique", metric::f1, 32, 288, 0x3D89CF4BEB38CF14U},
        {"gov_report", metric::rouge_l, 512, 161, 0x6DA71A89083BCDB7U},
        {"qmsum", metric::rouge_l, 512, 261, 0x283893300103C98BU},
        {"multi_news", metric::rouge_l, 512, 150, 0x369529E042466304U},
        {"trec", metric::classification, 64, 104, 0x1F912DCF0E42E076U},
        {"triviaqa", metric::f1, 32, 159, 0x09E8FEC6928E0DBFU},
        {"samsum", metric::rouge_l, 128, 103, 0x358DAFFEE1841A64U},
        {"passage_count", metric::count, 32, 464, 0xD1C215A163713511U},
        {"passage_retrieval_en", metric::retrieval, 32, 320, 0xF231DF536A3FD1D8U},
        {"lcc", metric::code_similarity, 64, 67, 0x62330C8D81C725FCU},
        {"repobench-p", metric::code_similarity, 64, 74, 0xB4ADFFB9B130F528U},
    };
    auto const tasks = runner::longbench_tasks();
    REQUIRE(tasks.size() == std::size(expected));
    for (std::size_t i = 0; i < tasks.size(); ++i)
    {
        runner::longbench_task const& task = tasks[i];
        CAPTURE(task.name);
        CHECK(task.name == expected[i].name);
        CHECK(task.metric == expected[i].how);
        CHECK(task.max_new_tokens == expected[i].max_new_tokens);
        CHECK(task.prompt.size() == expected[i].prompt_bytes);
        CHECK(fnv1a(task.prompt) == expected[i].prompt_hash);
        auto const among = [&](std::vector<std::string_view> const& names) {
            return std::find(names.begin(), names.end(), task.name) != names.end();
        };
        CHECK(task.chat == !among({"trec", "triviaqa", "samsum", "lcc", "repobench-p"}));
        CHECK(task.first_line == among({"trec", "triviaqa", "samsum"}));
        CHECK(task.stop_at_newline == among({"samsum"}));
        CHECK(&runner::find_longbench_task(task.name) == &task);
    }
}

TEST_CASE("longbench: an unknown task is refused with the names of those there are")
{
    CHECK(
        message_of([] { static_cast<void>(runner::find_longbench_task("squad")); })
        == "longbench: task \"squad\" is unknown; there are narrativeqa, qasper, multifieldqa_en, hotpotqa, 2wikimqa, "
           "musique, gov_report, qmsum, multi_news, trec, triviaqa, samsum, passage_count, passage_retrieval_en, lcc, "
           "repobench-p");
}

TEST_CASE("longbench: every task is read from its file and asked in its words")
{
    auto const words = byte_vocabulary();
    scratch_folder const folder;
    for (runner::longbench_task const& task : runner::longbench_tasks())
    {
        CAPTURE(task.name);
        std::string const name(task.name);
        nlohmann::json first  = line_of(name, "id-1");
        nlohmann::json second = line_of(name + "_e", "id-2");
        if (task.metric == metric::classification)
        {
            first["all_classes"]  = {"Food", "Date"};
            second["all_classes"] = {"Food", "Date"};
        }
        std::string const file = folder.write(name + ".jsonl", first.dump() + "\r\n\n" + second.dump());
        auto const samples     = runner::make_longbench_samples(words, task, folder.path(), 100'000);
        REQUIRE(samples.size() == 2);
        runner::sample const& s = samples[0];
        CHECK(s.task == task.name);
        CHECK(s.id == "id-1");
        CHECK(samples[1].id == "id-2");
        CHECK(s.answers == std::vector<std::string>{"first", "second"});
        CHECK(s.classes.size() == (task.metric == metric::classification ? 2 : 0));
        CHECK(s.max_new_tokens == task.max_new_tokens);
        CHECK(s.chat == task.chat);
        CHECK(s.stop_at_newline == task.stop_at_newline);
        CHECK(s.answer_prefix.empty());

        // The prompt, put together by hand.
        std::string_view const form = task.prompt;
        std::size_t const at        = form.find("{context}");
        std::string const context   = first["context"];
        CHECK(s.context == std::string(form.substr(0, at)) + context);
        std::string question(form.substr(at + 9));
        if (std::size_t const mark = question.find("{input}"); mark != std::string::npos)
        {
            question = question.substr(0, mark) + first["input"].get<std::string>() + question.substr(mark + 7);
        }
        CHECK(s.question == question);

        CHECK(s.about["line"] == 1);
        CHECK(samples[1].about["line"] == 3);
        CHECK(s.about["length"] == 6);
        CHECK(s.about["language"] == "en");
        CHECK(s.about["cut"] == false);
        CHECK(s.about["whole_tokens"] == s.context.size() + s.question.size());
        CHECK(runner::make_longbench_samples(words, task, file, 100'000).size() == 2);
    }
}

TEST_CASE("longbench: three prompts in full")
{
    auto const ask = [](std::string_view task) {
        auto const p = runner::fill_longbench_prompt(runner::find_longbench_task(task), "CONTEXT", "INPUT");
        return p.context + "|" + p.question;
    };
    CHECK(
        ask("trec")
        == "Please determine the type of the question below. Here are some examples of questions.\n\nCONTEXT|\nINPUT");
    CHECK(ask("lcc") == "Please complete the code given below. \nCONTEXT|Next line of code:\n");
    CHECK(ask("repobench-p") == "Please complete the code given below. \nCONTEXT|INPUTNext line of code:\n");
}

TEST_CASE("longbench: a prompt too long becomes its first and last half of the tokens")
{
    auto const words = byte_vocabulary(); // tokens are bytes
    auto const cut   = [&](std::int64_t most) {
        auto const p = runner::cut_in_the_middle(words, filled("abcdefghij", "UVWXYZ"), most);
        return (p.cut ? "" : "whole ") + p.context + "|" + p.question;
    };
    CHECK(cut(17) == "whole abcdefghij|UVWXYZ");
    CHECK(cut(16) == "whole abcdefghij|UVWXYZ");
    CHECK(cut(15) == "abcdefgj|UVWXYZ"); // int(15 / 2) = 7
    CHECK(cut(14) == "abcdefgj|UVWXYZ");
    CHECK(cut(12) == "abcdef|UVWXYZ");
    CHECK(cut(10) == "abcde|VWXYZ"); // the question is longer than a half
    CHECK(cut(2) == "a|Z");
    CHECK(runner::cut_in_the_middle(words, filled("abcdefghij", "UVWXYZ"), 10).whole_tokens == 16);
    // Both halves within a question: nothing of the context is lost.
    auto const long_question = runner::cut_in_the_middle(words, filled("ab", "UVWXYZUVWXYZ"), 8);
    CHECK(long_question.context == "ab");
    CHECK(long_question.question == "UVWXYZ");
    // A beginning-of-sequence token takes a place in the first half.
    auto const with_bos = byte_vocabulary({}, true);
    auto const led      = runner::cut_in_the_middle(with_bos, filled("abcdefghij", "UVWXYZ"), 16);
    CHECK(led.whole_tokens == 17);
    CHECK(led.context + "|" + led.question == "abcdefgij|UVWXYZ");
    CHECK(runner::cut_in_the_middle(with_bos, filled("abcdefghij", "UVWXYZ"), 17).cut == false);
    CHECK(message_of([&] { static_cast<void>(cut(1)); }) == "longbench: max_length is 1, not at least 2");
}

TEST_CASE("longbench: tokens are counted in the whole prompt, not in its parts")
{
    auto const words = byte_vocabulary({"j U"}); // one token over the seam
    auto const p     = runner::cut_in_the_middle(words, filled("abcdefghij", "UVWXYZ"), 14);
    CHECK(p.whole_tokens == 15);
    CHECK(p.context == "abcdefgij");
    CHECK(p.question == "UVWXYZ");
    CHECK(runner::cut_in_the_middle(words, filled("abcdefghij", "UVWXYZ"), 15).cut == false);
}

TEST_CASE("longbench: a character cut through is replaced as the public tokenizers do it")
{
    auto const words         = byte_vocabulary();
    std::string const smile  = "\U0001F600"; // four bytes
    std::string const broken = "\uFFFD";
    auto const cut           = [&](std::string const& context, std::string const& question, std::int64_t most) {
        auto const p = runner::cut_in_the_middle(words, filled(context, question), most);
        return p.context + "|" + p.question;
    };
    CHECK(cut("abc" + smile + "defgh", "XY", 8) == "abc" + broken + "gh|XY");        // "abc" and a byte
    CHECK(cut("ab" + smile + "cdefg", "XY", 10) == "ab" + broken + "efg|XY");        // three bytes are one
    CHECK(cut("abcdefg" + smile + "h", "X", 8) == "abcd" + broken + broken + "h|X"); // each is one
    CHECK(cut("abcdefg", smile + "X", 6) == "abc|" + broken + broken + "X");
    CHECK(cut("a", smile + "bcdefgh", 6) == "a|" + broken + "fgh");
}

TEST_CASE("longbench: where a character has lost a byte no token stands for, the text around it stays")
{
    auto const words = byte_vocabulary({}, false, "smollm", {"<bos>"}, 0xF0); // as in real files, nothing from 0xF0 on
    auto const p     = runner::cut_in_the_middle(words, filled("ab\U000E0067cdefghijklmn", "\U0001F600XY"), 20);
    CHECK(p.whole_tokens == 22);
    CHECK(p.context == "ab\uFFFD\uFFFD\uFFFDcdefgjklmn");
    CHECK(p.question == "\uFFFD\uFFFD\uFFFDXY");
}

TEST_CASE("longbench: what is no UTF-8 is replaced piece by piece")
{
    // The examples of the Unicode Standard, section 3.9, tables 3-8 to 3-11.
    std::string const r = "\uFFFD";
    CHECK(runner::lossy_utf8("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82"
                             "A")
          == r + r + r + r + r + r + r + r + "A");
    CHECK(runner::lossy_utf8("\xED\xA0\x80\xED\xBF\xBF\xED\xAF"
                             "A")
          == r + r + r + r + r + r + r + r + "A");
    CHECK(runner::lossy_utf8("\xF4\x91\x92\x93\xFF"
                             "A"
                             "\x80\xBF"
                             "B")
          == r + r + r + r + r + "A" + r + r + "B");
    CHECK(runner::lossy_utf8("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF"
                             "A")
          == r + r + r + r + "A");
    CHECK(runner::lossy_utf8("").empty());
    CHECK(rc::check([](std::string const& any) {
        std::string const text = runner::lossy_utf8(any);
        RC_ASSERT(runner::valid_utf8_prefix(text) == text.size());
        RC_ASSERT(runner::lossy_utf8(text) == text);
    }));
}

TEST_CASE("longbench: whatever is cut, what is left is the beginning and the end, in parts that are what they were")
{
    auto const words = byte_vocabulary({"a b", "ab a", "b a"}, false, "smollm", {"<bos>"}, 128); // no token from 128 on
    auto const text  = rc::gen::container<std::string>(rc::gen::element('a', 'b', ' ', '\xC3', 'c'));
    CHECK(rc::check([&] {
        std::string const context  = *text;
        std::string const question = *text;
        auto const most            = *rc::gen::inRange<std::int64_t>(2, 40);
        auto const ids             = words.encode(context + question);
        auto const cut             = runner::cut_in_the_middle(words, filled(context, question), most);
        RC_ASSERT(cut.whole_tokens == std::ssize(ids));
        RC_ASSERT(cut.cut == (std::ssize(ids) > most));
        if (!cut.cut)
        {
            RC_ASSERT(cut.context == context);
            RC_ASSERT(cut.question == question);
            return;
        }
        std::vector<std::int32_t> kept(ids.begin(), ids.begin() + most / 2);
        kept.insert(kept.end(), ids.end() - most / 2, ids.end());
        RC_ASSERT(cut.context + cut.question == words.decode(kept));
        // Bytes without a token are gone; of the others each part keeps a beginning and an end.
        auto const is_cut_of = [&](std::string const& part, std::string const& whole) {
            std::string const read = words.decode(words.encode(whole));
            for (std::size_t i = 0; i <= part.size(); ++i)
            {
                if (read.starts_with(part.substr(0, i)) && read.ends_with(part.substr(i))) { return true; }
            }
            return false;
        };
        RC_ASSERT(is_cut_of(cut.context, context));
        RC_ASSERT(is_cut_of(cut.question, question));
    }));
}

TEST_CASE("longbench: the reference model's prompts are cut as another tokenizer cuts them")
{
    if (skipped_without_reference_model("longbench: truncation")) { return; }
    runner::tokenizer const words(runner::gguf_file::open(reference_model_path()));
    runner::longbench_item item;
    item.context = "Passage 1: The caf\u00E9 of \u4E2D\u6587 \U0001F600\U0001F680 was founded in 1873.\nPassage 2: Its "
                   "founder, Zo\u00EB \u017D\u00EDt\u00E9, na\u00EFvely sold 12,345 \U0001F9C0 cheeses.\n";
    item.context += item.context;
    item.input   = "Who founded the caf\u00E9 of \u4E2D\u6587?";
    item.answers = {"Zo\u00EB"};
    // Recorded from the PyPI package tokenizers 0.23.3: a BPE of the file's vocabulary and merges, digits apart, byte
    // level; decode(ids[:half]) + decode(ids[-half:]), the texts for every max_length from 2 to 199 hashed one after
    // the other, a zero byte behind each.
    struct expectation
    {
        std::string_view task;
        std::int64_t whole_tokens;
        std::uint64_t hash;
    };
    expectation const expected[] = {
        {"trec", 144, 0xF9CBAFAD5EEEF3F1U},
        {"hotpotqa", 186, 0x3662CF181901D829U},
        {"lcc", 131, 0x1880F55965FF7C55U},
    };
    for (expectation const& e : expected)
    {
        std::uint64_t hash = fnv1a("");
        for (std::int64_t most = 2; most < 200; ++most)
        {
            auto const s = runner::make_longbench_sample(words, runner::find_longbench_task(e.task), item, most);
            CHECK(s.about["whole_tokens"] == e.whole_tokens);
            hash = fnv1a(s.context + s.question, hash);
            hash = fnv1a(std::string_view("\0", 1), hash);
        }
        CAPTURE(e.task);
        CHECK(hash == e.hash);
    }
    auto const s = runner::make_longbench_sample(words, runner::find_longbench_task("trec"), item, 62);
    CHECK(s.context
          == "Please determine the type of the question below. Here are some examples of questions.\n\nPassage 1: The "
             "caf\u00E9 of \u4E2D\u6587 \U0001F600\uFFFD\u00EDt\u00E9, na\u00EFvely sold 12,345 \U0001F9C0 cheeses.\n");
    CHECK(s.question == "\n" + item.input);
}

TEST_CASE("longbench: keys that may be absent are, and what is no LongBench is refused with file, line and key")
{
    scratch_folder const folder;
    auto const& qasper     = runner::find_longbench_task("qasper");
    std::string const good = line_of("qasper", "good").dump();
    std::string const file = folder.file("x.jsonl");
    auto const refusal     = [&](std::string const& second_line, std::string_view task = "qasper") {
        std::string const first = task == "qasper" ? good + "\n" : "\n";
        folder.write("x.jsonl", first + second_line);
        return message_of([&] { static_cast<void>(runner::read_longbench(file, runner::find_longbench_task(task))); });
    };
    auto const without = [&](std::string const& key) {
        auto line = line_of("qasper", "b");
        line.erase(key);
        return line.dump();
    };
    auto const with = [&](std::string const& key, nlohmann::json const& value) {
        auto line = line_of("qasper", "b");
        line[key] = value;
        return line.dump();
    };

    for (std::string const key : {"length", "dataset", "language", "all_classes", "_id"})
    {
        CAPTURE(key);
        CHECK(refusal(without(key)) == "(nothing was thrown)");
        CHECK(refusal(with(key, nullptr)) == "(nothing was thrown)");
    }
    folder.write("x.jsonl", without("_id"));
    auto const items = runner::read_longbench(file, qasper);
    REQUIRE(items.size() == 1);
    CHECK(items[0].id == "line-1");

    for (std::string const key : {"input", "context", "answers"})
    {
        CAPTURE(key);
        CHECK(refusal(without(key))
              == file + ": line 2: key \"" + key
                     + "\" is missing; each line needs input, context and answers, as the public files have them");
    }
    CHECK(refusal(with("input", 5)) == file + ": line 2: key \"input\" is number, not a string");
    CHECK(refusal(with("context", nullptr)) == file + ": line 2: key \"context\" is null, not a string");
    CHECK(refusal(with("answers", "x")) == file + ": line 2: key \"answers\" is string, not an array of strings");
    CHECK(
        refusal(with("answers", {"x", 7})) == file + ": line 2: key \"answers\" holds number as entry 1, not a string");
    CHECK(refusal(with("answers", nlohmann::json::array()))
          == file + ": line 2: key \"answers\" is empty; at least one entry is needed to score an answer");
    CHECK(refusal(with("all_classes", {1}))
          == file + ": line 2: key \"all_classes\" holds number as entry 0, not a string");
    for (nlohmann::json const& bad :
        {nlohmann::json(-1), nlohmann::json(1.5), nlohmann::json("6"), nlohmann::json(~0ULL)})
    {
        CHECK(refusal(with("length", bad)) == file + ": line 2: key \"length\" is not a whole number of at least 0");
    }
    CHECK(refusal(with("dataset", "trec"))
          == file + ": line 2: key \"dataset\" is \"trec\", but the task is qasper; give this task's own file");
    CHECK(refusal(with("_id", "good"))
          == file
                 + ": line 2: key \"_id\" is \"good\" as in line 1; answers are told apart by it: delete one of the "
                   "lines");
    std::string const damaged =
        file + ": line 2 is not JSON; the file may be damaged or cut short: get it again, or delete this line";
    CHECK(refusal(good.substr(0, good.size() / 2)) == damaged);
    CHECK(refusal("{\"input\": \"\xFF\"}") == damaged);
    CHECK(refusal(std::string(100'000, '[')) == damaged);
    CHECK(refusal(std::string(1, '\0')) == damaged);
    CHECK(refusal("[1, 2]") == file + ": line 2 is JSON, but no object; this is no file of LongBench");
    // A class is needed where answers are classes.
    CHECK(refusal(line_of("trec", "a").dump(), "trec")
          == file + ": line 2: key \"all_classes\" is null, not an array of strings");

    folder.write("x.jsonl", "\n  \n");
    CHECK(message_of([&] { static_cast<void>(runner::read_longbench(file, qasper)); })
          == file + ": holds no sample; the file may be damaged: get it again");
    CHECK(message_of([&] { static_cast<void>(runner::read_longbench(folder.path(), qasper)); })
          == folder.path()
                 + "/qasper.jsonl: does not exist; unpack data.zip of the data set THUDM/LongBench, which holds "
                   "qasper.jsonl, and give that file or its folder");
}
