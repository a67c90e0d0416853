/// \file needle.cpp: a needle stands where it should, the prompt is as long as asked, and every byte of it is known
#include "evaluation/needle.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "evaluation/needle_haystack.hpp"
#include "evaluation/needle_options.hpp"
#include "evaluation/run_needle.hpp"
#include "evaluation/sample.hpp"
#include "runner/chat.hpp"
#include "runner/gguf.hpp"
#include "runner/tokenizer.hpp"
#include "runner/utf8.hpp"
#include "support/byte_vocabulary.hpp"
#include "support/message.hpp"
#include "support/reference_model.hpp"
#include "support/scratch_folder.hpp"

namespace
{

using ids = std::vector<std::int32_t>;
using support::message_of;

constexpr std::string_view sandwich =
    "\nThe best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.\n";
constexpr std::string_view story_before = "<|im_start|> This is a very long story book: <book> ";
constexpr std::string_view story_after =
    " </book>.\n Based on the content of the book, Question: The best thing to do in San Francisco is: \nAnswer:";

/// Sentences of different lengths, all ASCII.
std::string prose(int sentences)
{
    std::string out;
    for (int i = 0; i < sentences; ++i)
    {
        out += "Sentence " + std::to_string(i) + " of this book has ";
        for (int j = 0; j < i * 7 % 11; ++j) { out += "very "; }
        out += "many words. ";
    }
    return out;
}

/// As the prompt is read.
std::int64_t tokens_of(runner::tokenizer const& words, runner::sample const& s)
{
    auto const bos = words.add_bos() ? 1 : 0;
    if (!s.chat || runner::chat_form_of(words) == runner::chat_form::none)
    {
        return std::ssize(words.encode(s.context + s.question)) + bos;
    }
    return std::ssize(runner::encode_chat(words, std::nullopt, s.context + s.question));
}

runner::needle_options asked(std::vector<std::int64_t> lengths)
{
    runner::needle_options options;
    options.lengths = std::move(lengths);
    return options;
}

} // namespace

TEST_CASE("needle: the bytes of a prompt in HeadKV's form")
{
    auto const words             = byte_vocabulary();
    std::string const hay        = "One. Two. Three. Four. Five. Six.";
    runner::needle_options extra = asked({});
    // All tokens are bytes: a haystack of 20 bytes, "One. Two. Three. Fou", half way is byte 10, behind "Two." is byte
    // 9.
    std::int64_t const length = std::ssize(story_before) + 20 + std::ssize(sandwich) + std::ssize(story_after);
    extra.lengths             = {length};
    extra.depths              = {50};
    auto const made           = runner::make_needle_samples(words, hay, extra);
    REQUIRE(made.size() == 1);
    runner::sample const& s = made[0];
    CHECK(s.context == std::string(story_before) + "One. Two." + std::string(sandwich) + " Three. Fou");
    CHECK(s.question == story_after);
    CHECK(s.answer_prefix.empty());
    CHECK(s.task == "needle");
    CHECK(s.id == "headkv-" + std::to_string(length) + "-50");
    CHECK(s.answers == std::vector<std::string>{"eat a sandwich and sit in dolores park on a sunny day."});
    CHECK(s.max_new_tokens == 30);
    CHECK(s.stop_at_newline);
    CHECK_FALSE(s.chat);
    CHECK(s.about["length"] == length);
    CHECK(s.about["depth"].dump() == "50");
    CHECK(s.about["prompt"] == "headkv");
    CHECK(s.about["needle_kind"] == "sandwich");
    CHECK(s.about["needle"] == sandwich);
    CHECK(s.about["fit"] == "exact");
    CHECK(s.about["tokens"] == length);
    CHECK(s.about["haystack_from"] == 0);
    CHECK(s.about["haystack_tokens"] == 20);
    CHECK(s.about["needle_tokens"] == std::ssize(sandwich));
    CHECK(s.about["needle_at"] == 9);
    CHECK(s.about["needle_byte"] == std::ssize(story_before) + 9);
}

TEST_CASE("needle: the bytes of a prompt in the original form")
{
    auto const words = byte_vocabulary();
    constexpr std::string_view top =
        "You are a helpful AI bot that answers questions for a user. Keep your response short and direct\n\n";
    constexpr std::string_view end =
        "\n\nWhat is the best thing to do in San Francisco? Don't give information outside "
        "the document or repeat your findings";
    runner::needle_options options = asked({std::ssize(top) + 10 + std::ssize(sandwich) + std::ssize(end)});
    options.form                   = runner::needle_form::original;
    options.depths                 = {0, 99.5, 100};
    auto const made                = runner::make_needle_samples(words, "One. Two. Three. Four.", options);
    REQUIRE(made.size() == 3);
    CHECK(made[0].context == std::string(top) + std::string(sandwich) + "One. Two. ");
    CHECK(made[1].context == std::string(top) + "One. Two." + std::string(sandwich) + " ");
    CHECK(made[2].context == std::string(top) + "One. Two. " + std::string(sandwich));
    for (runner::sample const& s : made)
    {
        CHECK(s.question == end);
        CHECK(s.chat);
        CHECK(s.max_new_tokens == 30);
        CHECK(s.stop_at_newline);
    }
    CHECK(made[1].id == "original-" + std::to_string(options.lengths[0]) + "-99.5");
}

TEST_CASE("needle: a number is the same for the same seed and place and another one elsewhere")
{
    auto const words               = byte_vocabulary();
    runner::needle_options options = asked({1000, 1100});
    options.kind                   = runner::needle_kind::number;
    options.seed                   = 7;
    std::string const hay          = prose(40);
    auto const made                = runner::make_needle_samples(words, hay, options);
    auto const again               = runner::make_needle_samples(words, hay, options);
    options.seed                   = 8;
    auto const other               = runner::make_needle_samples(words, hay, options);
    REQUIRE(made.size() == 20);
    std::set<std::string> numbers;
    for (std::size_t i = 0; i < made.size(); ++i)
    {
        REQUIRE(made[i].answers.size() == 1);
        std::string const& number = made[i].answers[0];
        CHECK(number.size() == 7);
        CHECK(number[0] != '0');
        CHECK(number.find_first_not_of("0123456789") == std::string::npos);
        std::string const needle = "\nThe secret number of this book is " + number + ".\n";
        CHECK(made[i].context.substr(made[i].about["needle_byte"], needle.size()) == needle);
        CHECK(made[i].about["needle"] == needle);
        CHECK(made[i].about["seed"] == 7);
        CHECK(made[i].question.find("Question: The secret number of this book is: \nAnswer:") != std::string::npos);
        CHECK(again[i].context == made[i].context);
        CHECK(again[i].id == made[i].id);
        CHECK(other[i].id != made[i].id);
        numbers.insert(number);
        numbers.insert(other[i].answers[0]);
    }
    CHECK(numbers.size() == 40);
    CHECK(made[1].id == "headkv-number-1000-11-7");
    CHECK(runner::needle_number(0, 512, 0, 7) != runner::needle_number(0, 0, 0.512, 7));
    std::string const longer = runner::needle_number(7, 1000, 11, 50);
    CHECK(longer.size() == 50);
    CHECK(longer.starts_with(runner::needle_number(7, 1000, 11, 7)));
    CHECK(longer.find_first_not_of("0123456789") == std::string::npos);
}

TEST_CASE("needle: of a pair the number stands further on, and is asked for behind the first answer")
{
    auto const words               = byte_vocabulary({}, false, "smollm", {"<bos>", "<|im_start|>", "<|im_end|>"});
    runner::needle_options options = asked({700});
    options.form                   = runner::needle_form::original;
    options.kind                   = runner::needle_kind::pair;
    options.depths                 = {0, 30, 60, 60.5, 100};
    options.seed                   = 7;
    auto const made                = runner::make_needle_samples(words, prose(40), options);
    std::vector<double> const second{40, 70, 100, 0.5, 40};
    options.kind     = runner::needle_kind::sandwich;
    auto const alone = runner::make_needle_samples(words, prose(40), options);
    for (std::size_t i = 0; i < made.size(); ++i)
    {
        runner::sample const& s = made[i];
        CAPTURE(s.id);
        std::string const number = runner::needle_number(7, 700, second[i], 7);
        std::string const hidden = "\nThe secret number of this book is " + number + ".\n";
        CHECK(s.question == alone[i].question);
        CHECK(s.answers == alone[i].answers);
        CHECK(s.next_question
              == "What is the secret number of this book? Don't give information outside the document or repeat your "
                 "findings");
        CHECK(s.next_answers == std::vector<std::string>{number});
        CHECK(alone[i].next_question.empty());
        CHECK(tokens_of(words, s) == 700); // with the first question
        CHECK(s.about["second_depth"] == second[i]);
        CHECK(s.about["second_needle"] == hidden);
        CHECK(s.about["needle_tokens"] == std::ssize(sandwich) + std::ssize(hidden));
        std::size_t const first = s.about["needle_byte"];
        std::size_t const other = s.context.find(hidden);
        REQUIRE(other != std::string::npos);
        CHECK(s.context.substr(first, sandwich.size()) == sandwich);
        CHECK((other > first) == (second[i] > options.depths[i]));
        // Without them the book is the haystack's.
        std::string book = s.context;
        book.erase(std::max(first, other), other > first ? hidden.size() : sandwich.size());
        book.erase(std::min(first, other), other > first ? sandwich.size() : hidden.size());
        std::string_view const top = runner::frame_of(options.form).before_book;
        CHECK(book == std::string(top) + prose(40).substr(0, book.size() - top.size()));
    }
    CHECK(made[1].id == "original-pair-700-30-7");

    options.kind = runner::needle_kind::pair;
    options.form = runner::needle_form::headkv;
    CHECK(message_of([&] { static_cast<void>(runner::make_needle_samples(words, prose(40), options)); })
          == "needle: a pair is asked for in a conversation, and the prompt \"headkv\" is none; take the original one");
}

TEST_CASE("needle: each answer of a pair has its own scores")
{
    runner::sample one;
    one.answers       = {"eat a sandwich"};
    one.next_answers  = {"1234567"};
    one.about         = {{"needle_kind", "pair"}, {"needle", "to eat a sandwich"}, {"second_needle", "it is 1234567"}};
    auto const scores = [&](std::string const& text) {
        auto const all = runner::detail::needle_scores(one, text);
        REQUIRE(all.size() == 2);
        for (std::string const& metric : runner::detail::needle_metrics(runner::needle_kind::pair))
        {
            CHECK(all.contains(metric));
        }
        return std::vector<double>{all.at("first"), all.at("second")};
    };
    CHECK(scores("to eat a sandwich\nit is 1234567") == std::vector<double>{100, 100});
    CHECK(scores("it is 1234567\nto eat a sandwich") == std::vector<double>{0, 0});
    CHECK(scores("to eat a sandwich\n") == std::vector<double>{100, 0});
    CHECK(scores("\nit is 1234567") == std::vector<double>{0, 100});
    CHECK(scores("") == std::vector<double>{0, 0});
}

TEST_CASE("needle: it stands behind the full stop before its depth")
{
    // Tokens "." and " ." are full stops; ".." and ".x" are none.
    auto const words = byte_vocabulary({"\u0120 .", ". .", ". x"});
    auto const at    = [&](std::string_view hay, double depth) {
        ids const tokens = words.encode(hay);
        return runner::needle_position(words, tokens, depth);
    };
    CHECK(words.encode("a . b") == ids{'a', 256, ' ', 'b'});
    CHECK(at("aaaaaaaaaa", 50) == 0);
    CHECK(at("aaaaaaaaaa", 100) == 10);
    CHECK(at("aaaaaaaaaa", 99.9) == 0);
    CHECK(at("aaa.aaaaaa", 30) == 0);
    CHECK(at("aaa.aaaaaa", 39.9) == 0); // int(10 * 0.399) = 3
    CHECK(at("aaa.aaaaaa", 40) == 4);
    CHECK(at("aaa.aaaaaa", 100) == 10);
    CHECK(at("aa.a.aaaaa", 45) == 3);
    CHECK(at("a .bbbbbbb", 70) == 2); // 9 tokens
    CHECK(at("a..bbbbbbb", 70) == 0); // ".." is one token and no full stop
    CHECK(at(".aaaaaaaaa", 0) == 0);
    CHECK(at("", 50) == 0);
}

TEST_CASE("needle: depths and lengths are the public ones")
{
    CHECK(runner::even_depths(10) == std::vector<double>{0, 11, 22, 33, 44, 56, 67, 78, 89, 100});
    CHECK(runner::even_depths(1) == std::vector<double>{0});
    CHECK(runner::even_depths(5) == std::vector<double>{0, 25, 50, 75, 100});
    CHECK(runner::even_depths(9) == std::vector<double>{0, 12, 25, 38, 50, 62, 75, 88, 100}); // halves to even
    CHECK(runner::even_depths(35).size() == 35);
    CHECK(runner::needle_options{}.depths == runner::even_depths(10));
    CHECK(runner::needle_options{}.buffer == 200);
    CHECK(runner::parse_needle_lengths("512,1024") == std::vector<std::int64_t>{512, 1024});
    CHECK(runner::parse_needle_lengths("1000:1301:100") == std::vector<std::int64_t>{1000, 1100, 1200, 1300});
    CHECK(runner::parse_needle_lengths("64,100:300:100") == std::vector<std::int64_t>{64, 100, 200, 300});
    CHECK(runner::parse_needle_depths("0,50,99.5,100") == std::vector<double>{0, 50, 99.5, 100});
    CHECK(runner::parse_needle_form("original") == runner::needle_form::original);
    CHECK(runner::parse_needle_form("headkv") == runner::needle_form::headkv);
    CHECK(runner::parse_needle_kind("number") == runner::needle_kind::number);
    CHECK(runner::parse_needle_kind("pair") == runner::needle_kind::pair);
    CHECK(runner::parse_needle_fit("buffer") == runner::needle_fit::buffer);
}

TEST_CASE("needle: words that are no option are refused by name")
{
    auto const refused = [](auto const& parse, std::string const& text) {
        return message_of([&] { static_cast<void>(parse(text)); });
    };
    auto const lengths = [](std::string_view t) { return runner::parse_needle_lengths(t); };
    auto const depths  = [](std::string_view t) { return runner::parse_needle_depths(t); };
    CHECK(refused(lengths, "512,x") == "lengths: \"x\" is not a whole number in range");
    for (std::string const bad :
        {"0", "-5", "10:5:1", "10:20", "10:20:0", "10:20:5:1", "99999999999", "1:99999999999:1"})
    {
        CAPTURE(bad);
        CHECK(refused(lengths, bad)
              == "lengths: \"" + bad + "\" is neither a length nor FIRST:LAST:STEP within 1 and 16777216");
    }
    CHECK(refused(lengths, "1:16777216:1") == "lengths: \"1:16777216:1\" are more than 10000 lengths");
    for (std::string const bad : {"", "x", "-1", "100.5", "nan", "inf", "5x"})
    {
        CAPTURE(bad);
        CHECK(refused(depths, bad) == "depths: \"" + bad + "\" is not within 0 and 100");
    }
    CHECK(refused([](std::string_view t) { return runner::parse_needle_form(t); }, "x")
          == "prompt: \"x\" is unknown; there are original, headkv");
    CHECK(refused([](std::string_view t) { return runner::parse_needle_kind(t); }, "x")
          == "needle: \"x\" is unknown; there are sandwich, number, pair");
    CHECK(refused([](std::string_view t) { return runner::parse_needle_fit(t); }, "x")
          == "fit: \"x\" is unknown; there are exact, buffer");
    CHECK_THROWS_AS(static_cast<void>(runner::even_depths(0)), std::exception);
}

TEST_CASE("needle: with the public buffer, book and needle make the length less the buffer")
{
    auto const words               = byte_vocabulary();
    runner::needle_options options = asked({1000});
    options.fit                    = runner::needle_fit::buffer;
    for (runner::sample const& s : runner::make_needle_samples(words, prose(100), options))
    {
        CHECK(std::ssize(s.context) - std::ssize(story_before) == 800);
        CHECK(s.about["fit"] == "buffer");
        CHECK(s.about["buffer"] == 200);
        CHECK(s.about["tokens"] == tokens_of(words, s));
        CHECK(s.about["haystack_tokens"] == 800 - std::ssize(sandwich));
    }
    options.buffer = 0;
    CHECK(std::ssize(runner::make_needle_samples(words, prose(100), options)[0].context) - std::ssize(story_before)
          == 1000);
}

TEST_CASE("needle: the whole prompt has exactly the length, also where tokens meet and make others")
{
    // With this pre-tokeniser a full stop and the needle's line break make one token when the prompt is read, and
    // several pairs of letters make one wherever the book was cut between them.
    int moved = 0; // books that no amount of the haystack from its beginning fits
    for (bool const bos : {false, true})
    {
        auto const words =
            byte_vocabulary({". \u010A", "e n", "S en", "v e", "r y", "ve ry", "\u0120 very"}, bos, "llama-bpe");
        std::string const hay          = prose(60);
        runner::needle_options options = asked(runner::parse_needle_lengths("400:700:13"));
        options.depths                 = runner::even_depths(7);
        for (auto const form : {runner::needle_form::headkv, runner::needle_form::original})
        {
            options.form = form;
            for (runner::sample const& s : runner::make_needle_samples(words, hay, options))
            {
                CAPTURE(s.id);
                CHECK(tokens_of(words, s) == s.about["length"].get<std::int64_t>());
                CHECK(s.about["tokens"] == s.about["length"]);
                moved += s.about["haystack_from"] == 0 ? 0 : 1;
                CHECK(s.context.substr(s.about["needle_byte"], sandwich.size()) == sandwich);
            }
        }
    }
    CHECK(moved > 0);
}

TEST_CASE("needle: what no amount of haystack makes stays below its length, and says so")
{
    // Every character of this haystack is four tokens, and none is cut.
    auto const words               = byte_vocabulary();
    runner::needle_options options = asked({300, 301, 302, 303});
    options.depths                 = {0};
    runner::sample const four      = runner::make_needle_samples(words, "\U0001F600", options)[0];
    for (runner::sample const& s : runner::make_needle_samples(words, "\U0001F600", options))
    {
        auto const missing = s.about["length"].get<std::int64_t>() - s.about["tokens"].get<std::int64_t>();
        CHECK(s.about["tokens"] == tokens_of(words, s));
        CHECK(missing >= 0);
        CHECK(missing < 4);
        CHECK((s.about["tokens"].get<std::int64_t>() - tokens_of(words, four)) % 4 == 0);
    }
}

TEST_CASE("needle: the tokens of the chat form count")
{
    auto const words               = byte_vocabulary({}, false, "smollm", {"<bos>", "<|im_start|>", "<|im_end|>"});
    runner::needle_options options = asked({600});
    options.form                   = runner::needle_form::original;
    options.depths                 = {50};
    auto const in_form             = runner::make_needle_samples(words, prose(50), options)[0];
    ids const whole                = runner::encode_chat(words, std::nullopt, in_form.context + in_form.question);
    CHECK(whole.size() == 600);
    CHECK(runner::tokens_around(words, true) == 600 - std::ssize(words.encode(in_form.context + in_form.question)));
    CHECK(runner::tokens_around(words, false) == 0);
}

TEST_CASE("needle: a book is never cut within a character")
{
    auto const words = byte_vocabulary();
    std::string hay;
    for (int i = 0; i < 100; ++i) { hay += "\u4E2D\u00E9\U0001F600. "; }
    runner::needle_options options = asked(runner::parse_needle_lengths("500:520:1"));
    options.depths                 = {0, 50, 100};
    for (auto const fit : {runner::needle_fit::exact, runner::needle_fit::buffer})
    {
        options.fit = fit;
        for (runner::sample const& s : runner::make_needle_samples(words, hay, options))
        {
            CAPTURE(s.id);
            CHECK(runner::valid_utf8_prefix(s.context) == s.context.size());
            CHECK(s.about["tokens"] == tokens_of(words, s));
            if (fit == runner::needle_fit::exact) { CHECK(s.about["tokens"] == s.about["length"]); }
        }
    }
}

TEST_CASE("needle: a short haystack is repeated")
{
    auto const words = byte_vocabulary({"a a", "aa aa"});
    for (std::int64_t const least : {1, 5, 100, 1000})
    {
        ids const tokens       = runner::haystack_tokens(words, "a", least); // 1 token, then 1 for 4 copies
        std::string const text = words.decode(tokens);
        CHECK(std::ssize(tokens) >= least);
        CHECK(text == std::string(text.size(), 'a'));
    }
    ids const twice = runner::haystack_tokens(words, "One. ", 7);
    CHECK(words.decode(twice) == "One. One. ");
    CHECK(runner::haystack_tokens(words, "One. ", 5).size() == 5);
    auto const few = byte_vocabulary({}, false, "smollm", {}, 128); // no token from 128 on
    CHECK(message_of([&] { static_cast<void>(runner::haystack_tokens(few, "\u00E9", 5)); })
          == "needle: the haystack's 2 bytes are no token of this model's vocabulary");
}

TEST_CASE("needle: haystacks are read from files and folders, in the order of names")
{
    scratch_folder const folder;
    std::string const two = folder.write("b.txt", "Two. ");
    std::string const one = folder.write("a.txt", "One. ");
    folder.write("c.md", "No. ");
    CHECK(runner::read_haystack({folder.path()}) == "One. Two. ");
    CHECK(runner::read_haystack({two, one}) == "Two. One. ");
    CHECK(runner::read_haystack({two, folder.path()}) == "Two. One. Two. ");

    auto const refusal = [](std::vector<std::string> const& paths) {
        return message_of([&] { static_cast<void>(runner::read_haystack(paths)); });
    };
    CHECK(refusal({}) == "needle: no haystack is given; name a text file, or a folder of *.txt files");
    CHECK(refusal({folder.path() + "/none"})
          == folder.path() + "/none: does not exist; the haystack is a text file, or a folder of *.txt files");
    scratch_folder const empty;
    CHECK(refusal({empty.path()}) == empty.path() + ": holds no *.txt file; the haystack is made of these");
    std::string const nothing = empty.write("nothing.txt", "");
    CHECK(refusal({nothing}) == nothing + ": holds no text to hide a needle in");
    std::string const latin = empty.write("latin.txt", "caf\xE9 au lait");
    CHECK(refusal({latin}) == latin + ": is not UTF-8; convert it at byte 3");
}

TEST_CASE("needle: what cannot be made is refused")
{
    auto const words      = byte_vocabulary();
    std::string const hay = prose(50);
    auto const refusal    = [&](runner::needle_options const& options) {
        return message_of([&] { static_cast<void>(runner::make_needle_samples(words, hay, options)); });
    };
    std::int64_t const beside = std::ssize(story_before) + std::ssize(sandwich) + std::ssize(story_after);
    CHECK(refusal(asked({beside}))
          == "needle: length " + std::to_string(beside) + " leaves nothing of the haystack beside the "
                 + std::to_string(beside) + " tokens of prompt and needle; take a longer one");
    CHECK(refusal(asked({beside + 1})) == "(nothing was thrown)");
    CHECK(refusal(asked({})) == "needle: no lengths are given");
    CHECK(refusal(asked({0})) == "needle: length is 0, not within 1 and 16777216");
    CHECK(refusal(asked({500, 500})) == "needle: length 500 at depth 0 is asked for twice");
    runner::needle_options options = asked({500});
    options.depths                 = {};
    CHECK(refusal(options) == "needle: no depths are given");
    options.depths = {101};
    CHECK(refusal(options) == "needle: depth is 101, not within 0 and 100");
    options.depths = {50};
    options.fit    = runner::needle_fit::buffer;
    options.buffer = 450;
    CHECK(refusal(options)
          == "needle: length 500 less the buffer of 450 leaves nothing of the haystack beside the needle's 97 tokens; "
             "take a longer prompt, a smaller buffer, or the exact fit");
    options.buffer = -1;
    CHECK(refusal(options) == "needle: buffer is -1, not at least 0");
    ids const short_hay = words.encode("One.");
    CHECK(message_of([&] { static_cast<void>(runner::make_needle_sample(words, short_hay, options, 500, 50)); })
          == "needle: length is 500, but the haystack has only 4 tokens");
}

TEST_CASE("needle: on the reference model's vocabulary every prompt has exactly its length")
{
    if (skipped_without_reference_model("needle: exact lengths")) { return; }
    runner::tokenizer const words(runner::gguf_file::open(reference_model_path()));
    std::string const hay          = prose(300) + "\u201CQuoted,\u201D she said. na\u00EFve...\n\n" + prose(50);
    runner::needle_options options = asked({128, 512, 777, 1024, 2048});
    for (auto const form : {runner::needle_form::headkv, runner::needle_form::original})
    {
        for (auto const kind : {runner::needle_kind::sandwich, runner::needle_kind::number})
        {
            options.form = form;
            options.kind = kind;
            for (runner::sample const& s : runner::make_needle_samples(words, hay, options))
            {
                CAPTURE(s.id);
                CHECK(tokens_of(words, s) == s.about["length"].get<std::int64_t>());
                // Behind a full stop, at the beginning, or at the end of the book.
                std::size_t const at       = s.about["needle_byte"];
                bool const at_end          = s.context.size() == at + s.about["needle"].get<std::string>().size();
                std::string_view const top = runner::frame_of(form).before_book;
                bool const placed = at_end ? s.about["depth"] == 100 : at == top.size() || s.context[at - 1] == '.';
                CHECK(placed);
            }
        }
    }
}
