/// \file sample_file.cpp: lines become samples, bad files are told, long prompts lose their middle
#include "evaluation/sample_file.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>
#include <rapidcheck.h>

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

using support::message_of;

std::uint64_t fnv1a(std::string_view text, std::uint64_t hash = 0xCBF29CE484222325U)
{
    for (char const c : text) { hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3U; }
    return hash;
}

runner::sample filled(std::string const& context, std::string const& question)
{
    runner::sample one;
    one.context  = context;
    one.question = question;
    return one;
}

} // namespace

TEST_CASE("samples: every key of a line has its place, and the others go to the answer's line")
{
    scratch_folder const folder;
    std::string const path = folder.write("x.jsonl",
        R"({"task": "vt", "id": "a", "context": "C {question}", "question": "Q", "answer_prefix": " P:", "answers": ["1", "2"],)"
        R"( "max_new_tokens": 7, "chat": true, "stop_at_newline": true, "length": 9, "all_classes": null})"
        "\r\n \n"
        R"({"task": "qa", "context": "c", "question": "", "answer": "one", "id": null, "answer_prefix": null})");
    auto const samples     = runner::read_sample_file(path, false);
    REQUIRE(samples.size() == 2);
    runner::sample const& s = samples[0];
    CHECK(s.task == "vt");
    CHECK(s.id == "a");
    CHECK(s.context == "C {question}");
    CHECK(s.question == "Q");
    CHECK(s.answer_prefix == " P:");
    CHECK(s.answers == std::vector<std::string>{"1", "2"});
    CHECK(s.max_new_tokens == 7);
    CHECK(s.min_new_tokens == 1);
    CHECK(s.chat);
    CHECK(s.stop_at_newline);
    CHECK(s.about == nlohmann::json{{"length", 9}, {"all_classes", nullptr}, {"answers", {"1", "2"}}});

    runner::sample const& other = samples[1];
    CHECK(other.id.starts_with("3-"));
    CHECK(other.id.size() == 18);
    CHECK(other.answer_prefix.empty());
    CHECK(other.answers == std::vector<std::string>{"one"});
    CHECK(other.max_new_tokens == 32);
    CHECK(other.min_new_tokens == 0);
    CHECK_FALSE(other.chat);
    CHECK_FALSE(other.stop_at_newline);
    CHECK(runner::read_sample_file(path, true)[1].chat);
    CHECK(runner::read_sample_file(path, true)[1].id == other.id);
}

TEST_CASE("samples: bad lines are refused by number and key, with what to do")
{
    scratch_folder const folder;
    nlohmann::json const good = {{"task", "t"}, {"context", "c"}, {"question", "q"}, {"answers", {"a"}}};
    auto const message        = [&](std::string const& line) {
        std::string const path  = folder.write("f.jsonl", good.dump() + "\n" + line + "\n");
        std::string const error = message_of([&] { (void)runner::read_sample_file(path, false); });
        return error.starts_with(path) ? error.substr(path.size()) : error;
    };
    auto const with = [&](std::string const& key, nlohmann::json const& value) {
        nlohmann::json line = good;
        line[key]           = value;
        return message(line.dump());
    };
    std::string const remedy = "; correct or remove that line; bench/quality/make_samples.py writes such files";
    CHECK(message(good.dump()) == "(nothing was thrown)");
    CHECK(message("no json") == ": line 2: is no JSON at byte 1: \"o json\"" + remedy);
    CHECK(message(good.dump().substr(0, 20)) == ": line 2: is cut short: no JSON value ends at byte 20" + remedy);
    CHECK(message("1e999") // found by tests/fuzz/samples.cpp
          == ": line 2: holds a number that is beyond a double's range: \"1e999\"" + remedy);
    CHECK(message("[]") == ": line 2: the whole value is array, it must be an object" + remedy);
    for (char const* const key : {"task", "context", "question", "answers"})
    {
        CAPTURE(key);
        nlohmann::json line = good;
        line.erase(key);
        CHECK(message(line.dump()) == ": line 2: the whole value has no key \"" + std::string(key) + "\"" + remedy);
    }
    for (char const* const key : {"task", "context", "question", "answer_prefix", "id"})
    {
        CAPTURE(key);
        CHECK(with(key, 5) == ": line 2: " + std::string(key) + " is number, it must be a string" + remedy);
    }
    CHECK(with("context", nullptr) == ": line 2: context is null, it must be a string" + remedy);
    CHECK(with("answers", 5) == ": line 2: answers is number, it must be an array" + remedy);
    CHECK(with("answers", nlohmann::json::array()) == ": line 2: answers is empty" + remedy);
    CHECK(with("answers", {"a", 7}) == ": line 2: answers[1] is number, it must be a string" + remedy);
    CHECK(with("answer", {"a", 7}) == ": line 2: answer[1] is number, it must be a string" + remedy);
    for (nlohmann::json const& bad : {nlohmann::json(0), nlohmann::json(-1), nlohmann::json(1.5), nlohmann::json("6"),
             nlohmann::json((1 << 24) + 1), nlohmann::json(~0ULL)})
    {
        CAPTURE(bad.dump());
        CHECK(with("max_new_tokens", bad) == ": line 2: max_new_tokens is no whole number from 1 to 16777216" + remedy);
    }
    for (char const* const key : {"chat", "stop_at_newline"})
    {
        CAPTURE(key);
        CHECK(with(key, "yes") == ": line 2: " + std::string(key) + " is string, it must be true or false" + remedy);
    }
    CHECK(message("{\"task\": \"\xFF\"}").find("is not UTF-8 from byte ") != std::string::npos);
    CHECK(message_of([&] { (void)runner::read_sample_file(folder.write("e", "\n \n"), false); })
          == folder.file("e") + ": holds no sample; bench/quality/make_samples.py writes such files");
    CHECK(message_of([&] { (void)runner::read_sample_file(folder.file("none"), false); }).find("none: cannot be opened")
          != std::string::npos);
}

TEST_CASE("samples: a prompt too long becomes its first and last half of the tokens")
{
    auto const words = byte_vocabulary(); // tokens are bytes
    auto const cut   = [&](std::int64_t most) {
        auto const p = runner::cut_in_the_middle(words, filled("abcdefghij", "UVWXYZ"), most);
        return (p.about["cut"] == true ? "" : "whole ") + p.context + "|" + p.question;
    };
    CHECK(cut(17) == "whole abcdefghij|UVWXYZ");
    CHECK(cut(16) == "whole abcdefghij|UVWXYZ");
    CHECK(cut(15) == "abcdefgj|UVWXYZ"); // int(15 / 2) = 7
    CHECK(cut(14) == "abcdefgj|UVWXYZ");
    CHECK(cut(12) == "abcdef|UVWXYZ");
    CHECK(cut(10) == "abcde|VWXYZ"); // the question is longer than a half
    CHECK(cut(2) == "a|Z");
    CHECK(runner::cut_in_the_middle(words, filled("abcdefghij", "UVWXYZ"), 10).about["whole_tokens"] == 16);
    // Both halves within a question: nothing of the context is lost.
    auto const long_question = runner::cut_in_the_middle(words, filled("ab", "UVWXYZUVWXYZ"), 8);
    CHECK(long_question.context == "ab");
    CHECK(long_question.question == "UVWXYZ");
    // A beginning-of-sequence token takes a place in the first half.
    auto const with_bos = byte_vocabulary({}, true);
    auto const led      = runner::cut_in_the_middle(with_bos, filled("abcdefghij", "UVWXYZ"), 16);
    CHECK(led.about["whole_tokens"] == 17);
    CHECK(led.context + "|" + led.question == "abcdefgij|UVWXYZ");
    CHECK(runner::cut_in_the_middle(with_bos, filled("abcdefghij", "UVWXYZ"), 17).about["cut"] == false);
    CHECK(message_of([&] { static_cast<void>(cut(1)); }) == "max-length: 1 is not at least 2");
}

TEST_CASE("samples: tokens are counted in the whole prompt, not in its parts")
{
    auto const words = byte_vocabulary({"j U"}); // one token over the seam
    auto const p     = runner::cut_in_the_middle(words, filled("abcdefghij", "UVWXYZ"), 14);
    CHECK(p.about["whole_tokens"] == 15);
    CHECK(p.context == "abcdefgij");
    CHECK(p.question == "UVWXYZ");
    CHECK(runner::cut_in_the_middle(words, filled("abcdefghij", "UVWXYZ"), 15).about["cut"] == false);
}

TEST_CASE("samples: a character cut through is replaced as the public tokenizers do it")
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

TEST_CASE("samples: where a character has lost a byte no token stands for, the text around it stays")
{
    auto const words = byte_vocabulary({}, false, "smollm", {"<bos>"}, 0xF0); // as in real files, nothing from 0xF0 on
    auto const p     = runner::cut_in_the_middle(words, filled("ab\U000E0067cdefghijklmn", "\U0001F600XY"), 20);
    CHECK(p.about["whole_tokens"] == 22);
    CHECK(p.context == "ab\uFFFD\uFFFD\uFFFDcdefgjklmn");
    CHECK(p.question == "\uFFFD\uFFFD\uFFFDXY");
}

TEST_CASE("what is no UTF-8 is replaced piece by piece")
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

TEST_CASE("samples: whatever is cut, what is left is the beginning and the end, in parts that are what they were")
{
    auto const words = byte_vocabulary({"a b", "ab a", "b a"}, false, "smollm", {"<bos>"}, 128); // no token from 128 on
    auto const text  = rc::gen::container<std::string>(rc::gen::element('a', 'b', ' ', '\xC3', 'c'));
    CHECK(rc::check([&] {
        std::string const context  = *text;
        std::string const question = *text;
        auto const most            = *rc::gen::inRange<std::int64_t>(2, 40);
        auto const ids             = words.encode(context + question);
        auto const cut             = runner::cut_in_the_middle(words, filled(context, question), most);
        RC_ASSERT(cut.about["whole_tokens"] == std::ssize(ids));
        RC_ASSERT((cut.about["cut"] == true) == (std::ssize(ids) > most));
        if (cut.about["cut"] == false)
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

TEST_CASE("samples: the reference model's prompts are cut as another tokenizer cuts them")
{
    if (skipped_without_reference_model("samples: truncation")) { return; }
    runner::tokenizer const words(runner::gguf_file::open(reference_model_path()));
    std::string book =
        "Passage 1: The caf\u00E9 of \u4E2D\u6587 \U0001F600\U0001F680 was founded in 1873.\nPassage 2: Its "
        "founder, Zo\u00EB \u017D\u00EDt\u00E9, na\u00EFvely sold 12,345 \U0001F9C0 cheeses.\n";
    book += book;
    std::string const input = "Who founded the caf\u00E9 of \u4E2D\u6587?";
    std::string const trec =
        "Please determine the type of the question below. Here are some examples of questions.\n\n";
    std::string const passages = "Answer the question based on the given passages. Only give me the answer and do not "
                                 "output any other words.\n\n";
    // Recorded from the PyPI package tokenizers 0.23.3: a BPE of the file's vocabulary and merges, digits apart, byte
    // level; decode(ids[:half]) + decode(ids[-half:]), the texts for every max_length from 2 to 199 hashed one after
    // the other, a zero byte behind each.
    struct expectation
    {
        std::string context, question;
        std::int64_t whole_tokens;
        std::uint64_t hash;
    };
    expectation const expected[] = {
        {trec + book, "\n" + input, 144, 0xF9CBAFAD5EEEF3F1U},
        {passages + "The following are given passages.\n" + book,
            "\n\n" + passages + "Question: " + input + "\nAnswer:", 186, 0x3662CF181901D829U},
        {"Please complete the code given below. \n" + book, "Next line of code:\n", 131, 0x1880F55965FF7C55U},
    };
    for (expectation const& e : expected)
    {
        std::uint64_t hash = fnv1a("");
        for (std::int64_t most = 2; most < 200; ++most)
        {
            auto const s = runner::cut_in_the_middle(words, filled(e.context, e.question), most);
            CHECK(s.about["whole_tokens"] == e.whole_tokens);
            hash = fnv1a(s.context + s.question, hash);
            hash = fnv1a(std::string_view("\0", 1), hash);
        }
        CAPTURE(e.question);
        CHECK(hash == e.hash);
    }
    auto const s = runner::cut_in_the_middle(words, filled(trec + book, "\n" + input), 62);
    CHECK(s.context
          == "Please determine the type of the question below. Here are some examples of questions.\n\nPassage 1: The "
             "caf\u00E9 of \u4E2D\u6587 \U0001F600\uFFFD\u00EDt\u00E9, na\u00EFvely sold 12,345 \U0001F9C0 cheeses.\n");
    CHECK(s.question == "\n" + input);
}
