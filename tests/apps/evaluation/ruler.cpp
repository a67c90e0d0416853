#include "evaluation/ruler.hpp"

#include <mdkv/core/error.hpp>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "evaluation/json_place.hpp"
#include "evaluation/python_text.hpp"
#include "evaluation/random.hpp"
#include "evaluation/ruler_tasks.hpp"
#include "evaluation/ruler_text.hpp"
#include "evaluation/ruler_words.hpp"
#include "evaluation/sample.hpp"
#include "runner/file_error.hpp"
#include "support/message.hpp"
#include "support/scratch_folder.hpp"

namespace
{

using support::message_of;

/// Words that no other list has: the stem and three letters that count.
std::string word_list(std::string_view stem, int count)
{
    std::string text;
    for (int i = 0; i < count; ++i)
    {
        text += stem;
        for (int const digit : {i / 676, i / 26 % 26, i % 26}) { text += static_cast<char>('a' + digit); }
        text += '\n';
    }
    return text;
}

std::string prose(int sentences)
{
    std::string text;
    for (int i = 0; i < sentences; ++i)
    {
        text += runner::joined(
            "Sentence ", std::to_string(i), " of this essay, by Dr. Smith,\n  goes on (e.g. like this) for a while. ");
    }
    return text;
}

struct files
{
    explicit files(int words = 700, int sentences = 300)
    {
        folder.write("adjectivelist.txt", word_list("q", words));
        folder.write("nounlist.txt", word_list("n", words));
        folder.write("verblist.txt", word_list("v", words));
        folder.write("essay.txt", prose(sentences));
        options.samples      = 4;
        options.max_length   = 1024;
        options.words_folder = folder.file("");
        options.essay_path   = folder.file("essay.txt");
    }

    scratch_folder folder;
    runner::ruler_options options;
};

/// A token for every four letters of a word and for every other sign; parts apart count as the whole.
std::int64_t count_tokens(std::string_view text)
{
    std::int64_t tokens = 0;
    std::int64_t run    = 0;
    for (char const c : text)
    {
        if (std::isalnum(static_cast<unsigned char>(c)) != 0)
        {
            if (run % 4 == 0) { ++tokens; }
            ++run;
            continue;
        }
        run = 0;
        if (c != ' ') { ++tokens; }
    }
    return tokens;
}

std::int64_t occurrences(std::string_view text, std::string_view part)
{
    std::int64_t found = 0;
    for (std::size_t at = text.find(part); at != std::string_view::npos; at = text.find(part, at + 1)) { ++found; }
    return found;
}

std::vector<std::string> split(std::string const& text)
{
    std::istringstream in{text};
    std::vector<std::string> words;
    for (std::string word; in >> word;) { words.push_back(word); }
    return words;
}

std::vector<std::string> lines(std::string const& text)
{
    std::istringstream in{text};
    std::vector<std::string> out;
    for (std::string line; std::getline(in, line);) { out.push_back(line); }
    return out;
}

bool contains(std::string_view text, std::string_view part)
{
    return text.find(part) != std::string_view::npos;
}

/// SQuAD's layout: `articles` of three paragraphs, each with a question that has an answer and one that has none.
std::string squad(int articles)
{
    nlohmann::json data = nlohmann::json::array();
    for (int a = 0; a < articles; ++a)
    {
        nlohmann::json paragraphs = nlohmann::json::array();
        for (int p = 0; p < 3; ++p)
        {
            std::string const name = std::to_string(a) + "x" + std::to_string(p);
            paragraphs.push_back({{"context", "The paragraph " + name + " says that its answer is gold" + name + "."},
                {"qas", {{{"question", "What is the answer of {context} " + name + "?"}, {"is_impossible", false},
                             {"answers", {{{"text", "gold" + name}, {"answer_start", 1}},
                                             {{"text", "gold" + name}, {"answer_start", 1}}}}},
                            {{"question", "Nobody knows?"}, {"is_impossible", true},
                                {"answers", nlohmann::json::array()}}}}});
        }
        data.push_back({{"title", "t"}, {"paragraphs", paragraphs}});
    }
    return nlohmann::json{{"version", "v2.0"}, {"data", data}}.dump();
}

/// HotpotQA's layout: every question has ten documents of its own.
std::string hotpot(int questions)
{
    nlohmann::json rows = nlohmann::json::array();
    for (int q = 0; q < questions; ++q)
    {
        nlohmann::json context = nlohmann::json::array();
        for (int d = 0; d < 10; ++d)
        {
            std::string const name = std::to_string(q) + "x" + std::to_string(d);
            context.push_back({"Title " + name, {"First of " + name + ".", " Second: fact" + name + "."}});
        }
        rows.push_back({{"question", "Which fact " + std::to_string(q) + "?"},
            {"answer", "fact" + std::to_string(q) + "x4"}, {"context", context}});
    }
    return rows.dump();
}

} // namespace

TEST_CASE("a sample of every task fits its length and holds its answers, and a seed fixes every byte")
{
    files f;
    f.options.squad_path                                = f.folder.write("squad.json", squad(120));
    f.options.hotpot_path                               = f.folder.write("hotpot.json", hotpot(40));
    std::map<std::string, std::int64_t> const generated = {
        {"vt", 30}, {"cwe", 120}, {"fwe", 50}, {"qa_1", 32}, {"qa_2", 32}};
    for (std::int64_t const length : {1024, 5000})
    {
        f.options.max_length = length;
        for (std::string const& task : runner::ruler_task_names())
        {
            CAPTURE(task);
            CAPTURE(length);
            auto const samples = runner::make_ruler_samples(f.options, task, count_tokens);
            REQUIRE(samples.size() == 4);
            std::set<std::string> ids;
            std::set<std::string> contexts;
            for (auto const& one : samples)
            {
                ids.insert(one.id);
                contexts.insert(one.context);
                CHECK(one.task == task);
                CHECK(one.max_new_tokens == (generated.contains(task) ? generated.at(task) : 128));
                CHECK(!one.chat);
                REQUIRE(!one.answers.empty());
                for (std::string const& answer : one.answers) { CHECK(contains(one.context, answer)); }
                std::int64_t const tokens = count_tokens(one.context + one.question + one.answer_prefix);
                CHECK(one.about.at("length") == tokens + one.max_new_tokens);
                CHECK(one.about.at("max_length") == length);
                CHECK(tokens + one.max_new_tokens <= length);
                CHECK(tokens + one.max_new_tokens > length / 2); // an increment of prose is 500 words
                CHECK(one.context.find("{") == (task == "qa_1" ? one.context.find("{context}") : std::string::npos));
            }
            CHECK(ids.size() == 4);
            CHECK(contexts.size() == 4);

            auto const again = runner::make_ruler_samples(f.options, task, count_tokens);
            auto fewer       = f.options;
            fewer.samples    = 2;
            auto const first = runner::make_ruler_samples(fewer, task, count_tokens);
            REQUIRE(first.size() == 2);
            for (std::size_t i = 0; i < 4; ++i)
            {
                CHECK(samples[i].context == again[i].context);
                CHECK(samples[i].question == again[i].question);
                CHECK(samples[i].answers == again[i].answers);
                if (i < 2) { CHECK(samples[i].context == first[i].context); }
            }
            auto other = f.options;
            other.seed = 43;
            CHECK(runner::make_ruler_samples(other, task, count_tokens)[0].context != samples[0].context);
        }
    }
}

TEST_CASE("the first random numbers of a seed are the same everywhere")
{
    runner::portable_random random{42};
    CHECK(random.bits() == 13930160852258120406U); // the standard's mt19937_64, seeded with 42
    CHECK(random.bits() == 11788048577503494824U);
    std::vector<std::int64_t> drawn;
    for (int i = 0; i < 2000; ++i) { drawn.push_back(random.between(-3, 3)); }
    for (std::int64_t value = -3; value <= 3; ++value)
    {
        auto const times = std::count(drawn.begin(), drawn.end(), value);
        CHECK(times > 200); // 286 expected, standard deviation 16; the seed is fixed
        CHECK(times < 370);
    }
    CHECK(random.between(7, 7) == 7);
    std::vector<int> shuffled = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    random.shuffle(shuffled);
    CHECK(!std::is_sorted(shuffled.begin(), shuffled.end()));
    CHECK(std::set<int>(shuffled.begin(), shuffled.end()).size() == 10);
    auto const sampled = random.sample(100, 100);
    CHECK(std::set<std::int64_t>(sampled.begin(), sampled.end()).size() == 100);
    CHECK(*std::max_element(sampled.begin(), sampled.end()) == 99);
    CHECK_THROWS_AS((void)random.between(2, 1), mdkv::invalid_argument);
    CHECK_THROWS_AS((void)random.sample(3, 4), mdkv::invalid_argument);
}

TEST_CASE("one needle is asked for in the singular, word for word")
{
    files f;
    std::smatch found;
    for (std::string const task : {"niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2"})
    {
        CAPTURE(task);
        auto const one = runner::make_ruler_samples(f.options, task, count_tokens).front();
        CHECK(one.context.starts_with(
            "A special magic number is hidden within the following text. Make sure to memorize it. "
            "I will quiz you about the number afterwards.\n"));
        CHECK(one.context.ends_with("\n"));
        std::regex const question{
            "What is the special magic number for (q[a-z]{3}-n[a-z]{3}) mentioned in the provided text\\?"};
        REQUIRE(std::regex_match(one.question, found, question));
        std::string const key = found[1];
        CHECK(one.answer_prefix == " The special magic number for " + key + " mentioned in the provided text is");
        REQUIRE(one.answers.size() == 1);
        CHECK(std::regex_match(one.answers[0], std::regex{"[1-9][0-9]{6}"}));
        CHECK(occurrences(one.context, "One of the special magic numbers for " + key + " is: " + one.answers[0] + ".")
              == 1);
        CHECK(occurrences(one.context, key) == 1);
    }
}

TEST_CASE("several needles are asked for in the plural, word for word")
{
    files f;
    std::smatch found;
    auto const values = runner::make_ruler_samples(f.options, "niah_multivalue", count_tokens).front();
    CHECK(values.context.starts_with(
        "Some special magic numbers are hidden within the following text. Make sure to memorize "
        "it. I will quiz you about the numbers afterwards.\n"));
    REQUIRE(std::regex_match(values.question, found,
        std::regex{
            "What are all the special magic numbers for (q[a-z]{3}-n[a-z]{3}) mentioned in the provided text\\?"}));
    std::string const key = found[1];
    CHECK(values.answer_prefix == " The special magic numbers for " + key + " mentioned in the provided text are");
    CHECK(values.answers.size() == 4);
    CHECK(occurrences(values.context, "One of the special magic numbers for " + key + " is: ") == 4);

    auto const queries     = runner::make_ruler_samples(f.options, "niah_multiquery", count_tokens).front();
    std::string const word = "(q[a-z]{3}-n[a-z]{3})";
    REQUIRE(std::regex_match(queries.question, found,
        std::regex{"What are all the special magic numbers for " + word + ", " + word + ", " + word + ", and " + word
                   + " mentioned in the provided text\\?"}));
    REQUIRE(queries.answers.size() == 4);
    std::set<std::string> keys;
    for (std::size_t i = 0; i < 4; ++i)
    {
        keys.insert(found[i + 1]);
        CHECK(contains(queries.context,
            "One of the special magic numbers for " + found[i + 1].str() + " is: " + queries.answers[i] + "."));
    }
    CHECK(keys.size() == 4);
}

TEST_CASE("each haystack is of its kind and holds so many needles")
{
    files f;
    std::map<std::string, std::int64_t> const needles = {{"niah_single_1", 1}, {"niah_single_2", 1},
        {"niah_single_3", 1}, {"niah_multikey_1", 4}, {"niah_multivalue", 4}, {"niah_multiquery", 4}};
    for (auto const& [task, count] : needles)
    {
        CAPTURE(task);
        for (auto const& one : runner::make_ruler_samples(f.options, task, count_tokens))
        {
            CHECK(occurrences(one.context, "One of the special magic ") == count);
            CHECK(one.about.at("depth") >= 0);
            CHECK(one.about.at("depth") <= 100);
            auto const before = one.context.substr(0, one.context.find(one.answers[0]));
            CHECK(one.about.at("token_position_answer") == count_tokens(before));
        }
    }
    auto const noise = runner::make_ruler_samples(f.options, "niah_single_1", count_tokens).front();
    CHECK(occurrences(noise.context,
              "\nThe grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n")
              + 1
          >= noise.about.at("haystack_size").get<std::int64_t>());
    for (std::string const task : {"niah_multikey_2", "niah_multikey_3"})
    {
        CAPTURE(task);
        auto const one  = runner::make_ruler_samples(f.options, task, count_tokens).front();
        auto const rows = lines(one.context);
        CHECK(std::ssize(rows)
              == one.about.at("haystack_size").get<std::int64_t>() + 2); // the introduction and the needle
        std::string const uuid = "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}";
        std::regex const line =
            task == "niah_multikey_2"
                ? std::regex{"One of the special magic numbers for (\\S+) is: [0-9]{7}\\."}
                : std::regex{"One of the special magic uuids for (" + uuid + ") is: " + uuid + "\\."};
        std::smatch found;
        std::set<std::string> keys;
        for (std::size_t i = 1; i < rows.size(); ++i)
        {
            REQUIRE(std::regex_match(rows[i], found, line));
            keys.insert(found[1]);
        }
        CHECK(std::count_if(keys.begin(), keys.end(), [&](std::string const& key) {
            return contains(one.question, key);
        }) == 1);
    }
}

TEST_CASE("prose keeps its words in order around the needles, over and over where it is too short")
{
    files f(700, 10);
    auto const one = runner::make_ruler_samples(f.options, "niah_single_2", count_tokens).front();
    std::regex const needle{" ?One of the special magic numbers for \\S+ is: [0-9]{7}\\."};
    std::string text = std::regex_replace(one.context.substr(one.context.find('\n') + 1), needle, "");
    auto const have  = split(text);
    auto const from  = split(prose(10));
    REQUIRE(std::ssize(have) == one.about.at("haystack_size").get<std::int64_t>());
    REQUIRE(have.size() > from.size());
    std::size_t same = 0;
    for (std::size_t i = 0; i < have.size(); ++i) { same += have[i] == from[i % from.size()] ? 1U : 0U; }
    CHECK(same == have.size());
}

TEST_CASE("sentences end where they should and together are the text")
{
    std::string const text =
        "Dr. Smith met J. Doe at 3.15 p.m. today. \"Really?\" he asked! He (i.e. Doe) said so.) Version 1.2 is "
        "out... or not? Yes";
    auto const sentences = runner::ruler::sentences_of(runner::python_text::split(text));
    CHECK(sentences
          == std::vector<std::string>{"Dr. Smith met J. Doe at 3.15 p.m. today.", "\"Really?\"", "he asked!",
              "He (i.e. Doe) said so.)", "Version 1.2 is out... or not?", "Yes"});
    CHECK(runner::ruler::joined_with(sentences, " ") == text);
    CHECK(runner::ruler::sentences_of({}).empty());
}

TEST_CASE("variables are assigned along one chain of five names, after an example of its own")
{
    files f;
    std::set<std::string> examples;
    for (auto const& one : runner::make_ruler_samples(f.options, "vt", count_tokens))
    {
        std::string const head =
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n";
        REQUIRE(occurrences(one.context, head) == 2);
        CHECK(one.context.starts_with(head));
        std::size_t const second  = one.context.rfind(head);
        std::string const example = one.context.substr(0, second);
        std::string const text    = one.context.substr(second);
        CHECK(count_tokens(example) <= 500 + 20); // its answer comes on top

        std::smatch found;
        REQUIRE(std::regex_match(one.question, found,
            std::regex{
                "Question: Find all variables that are assigned the value ([1-9][0-9]{4}) in the text above\\."}));
        std::string const value = found[1];
        CHECK(one.answer_prefix
              == " Answer: According to the chain(s) of variable assignment in the text above, 5 variables are "
                 "assigned the value "
                     + value + ", they are: ");
        REQUIRE(one.answers.size() == 5);
        CHECK(std::set<std::string>(one.answers.begin(), one.answers.end()).size() == 5);
        std::size_t place = text.find("VAR " + one.answers[0] + " = " + value + "\n");
        REQUIRE(place != std::string::npos);
        for (std::size_t i = 1; i < 5; ++i)
        {
            CHECK(one.answers[i].size() == 5);
            std::size_t const next = text.find("\nVAR " + one.answers[i] + " = VAR " + one.answers[i - 1] + " \n");
            REQUIRE(next != std::string::npos);
            CHECK(next > place);
            place = next;
        }
        CHECK(occurrences(text, "VAR ") == 9);
        CHECK(occurrences(text, "There and back again.") == one.about.at("haystack_size").get<std::int64_t>());

        std::regex const solved{
            "Find all variables that are assigned the value ([0-9]{5}) in the text above\\. Answer: According to "
            "the chain\\(s\\) of variable assignment in the text above, 5 variables are assigned the value "
            "([0-9]{5}), they are:  ([A-Z]{3}) ([A-Z]{3}) ([A-Z]{3}) ([A-Z]{3}) ([A-Z]{3})\n\n$"};
        REQUIRE(std::regex_search(example, found, solved));
        CHECK(found[1] == found[2]);
        CHECK(found[1] != value);
        CHECK(contains(example, "VAR " + found[3].str() + " = " + found[1].str() + "\n"));
        for (std::size_t i = 4; i < 8; ++i)
        {
            CHECK(contains(example, "VAR " + found[i].str() + " = VAR " + found[i - 1].str() + " \n"));
        }
        examples.insert(example);
    }
    CHECK(examples.size() == 4);
}

TEST_CASE("the ten common words stand as often as they should, the others less")
{
    files f;
    struct counts
    {
        std::int64_t length, common, other, example_words, example_common, example_other;
    };
    for (counts const& c : {counts{1024, 6, 1, 20, 3, 1}, counts{4096, 30, 3, 40, 10, 3}})
    {
        CAPTURE(c.length);
        f.options.max_length = c.length;
        for (auto const& one : runner::make_ruler_samples(f.options, "cwe", count_tokens))
        {
            std::string const head =
                "Below is a numbered list of words. In these words, some appear more often than others. "
                "Memorize the ones that appear most often.\n";
            std::string const asked  = "Question: What are the 10 most common words in the above list?";
            std::string const prefix = " Answer: The top 10 words that appear most often in the list are:";
            CHECK(one.question == asked);
            CHECK(one.answer_prefix == prefix);
            REQUIRE(occurrences(one.context, head) == 2);
            std::size_t const second = one.context.rfind(head);
            auto const check = [&](std::string const& list, std::vector<std::string> const& common, std::int64_t words,
                                   std::int64_t common_times, std::int64_t other_times) {
                auto const items = split(list);
                std::map<std::string, std::int64_t> times;
                std::int64_t wrong_numbers = 0;
                for (std::size_t i = 0; i < items.size(); i += 2)
                {
                    wrong_numbers += items[i] == std::to_string(i / 2 + 1) + "." ? 0 : 1;
                    ++times[items.at(i + 1)];
                }
                CHECK(wrong_numbers == 0);
                CHECK(std::ssize(times) == words);
                REQUIRE(common.size() == 10);
                for (std::string const& word : common) { CHECK(times[word] == common_times); }
                auto const others = std::count_if(
                    times.begin(), times.end(), [&](auto const& entry) { return entry.second == other_times; });
                CHECK(others == words - 10);
            };
            std::string const list = one.context.substr(second + head.size());
            CHECK(list.ends_with("\n"));
            check(list, one.answers, one.about.at("haystack_size"), c.common, c.other);

            std::string const example  = one.context.substr(head.size(), second - head.size());
            std::size_t const question = example.find(asked + prefix + " 1. ");
            REQUIRE(question != std::string::npos);
            auto const solution = split(example.substr(question + asked.size() + prefix.size()));
            REQUIRE(solution.size() == 20);
            std::vector<std::string> common;
            for (std::size_t i = 1; i < 20; i += 2) { common.push_back(solution[i]); }
            check(example.substr(0, question), common, c.example_words, c.example_common, c.example_other);
        }
    }
}

TEST_CASE("coded words follow Zipf's law, and the second to fourth rank are the answer")
{
    files f;
    f.options.max_length = 2048;
    for (auto const& one : runner::make_ruler_samples(f.options, "fwe", count_tokens))
    {
        std::string const head =
            "Read the following coded text and track the frequency of each coded word. Find the three most "
            "frequently appeared coded words. ";
        REQUIRE(one.context.starts_with(head));
        CHECK(one.question
              == "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
                 "frequently "
                 "appeared words in the above coded text?");
        CHECK(one.answer_prefix
              == " Answer: According to the coded text above, the three most frequently appeared words are:");
        std::map<std::string, std::int64_t> times;
        for (std::string const& word : split(one.context.substr(head.size()))) { ++times[word]; }
        auto const total         = one.about.at("haystack_size").get<double>();
        std::int64_t const words = (2048 - 50) / 50;
        auto const expected      = [&](int rank) {
            return static_cast<std::int64_t>(total / (rank * rank) / 1.6449340668482264);
        };
        CHECK(times["..."] == expected(1));
        REQUIRE(one.answers.size() == 3);
        for (int i = 0; i < 3; ++i)
        {
            CHECK(std::regex_match(one.answers[static_cast<std::size_t>(i)], std::regex{"[a-z]{6}"}));
            CHECK(times[one.answers[static_cast<std::size_t>(i)]] == expected(i + 2));
        }
        std::vector<std::int64_t> sorted;
        for (auto const& entry : times) { sorted.push_back(entry.second); }
        std::sort(sorted.rbegin(), sorted.rend());
        for (std::size_t i = 0; i < sorted.size(); ++i) { CHECK(sorted[i] == expected(static_cast<int>(i) + 1)); }
        CHECK(std::ssize(sorted) <= words);
    }
}

TEST_CASE("a SQuAD question stands under its own paragraph, the article's and others, numbered")
{
    files f;
    f.options.squad_path  = f.folder.write("squad.json", squad(60));
    auto const samples    = runner::make_ruler_samples(f.options, "qa_1", count_tokens);
    std::string const ask = "Answer the question based on the given documents. Only give me the answer and do not "
                            "output any other words.\n\n";
    for (std::size_t i = 0; i < samples.size(); ++i)
    {
        auto const& one        = samples[i];
        std::string const name = std::to_string(i / 3) + "x" + std::to_string(i % 3); // answerable ones, in file order
        CHECK(one.question == ask + "Question: What is the answer of {context} " + name + "?");
        CHECK(one.answer_prefix == " Answer:");
        CHECK(one.answers == std::vector<std::string>{"gold" + name, "gold" + name});
        CHECK(one.context.starts_with(ask + "The following are given documents.\n\nDocument 1:\nThe paragraph "));
        CHECK(one.context.ends_with(".\n\n"));
        std::int64_t const size = one.about.at("haystack_size");
        CHECK(occurrences(one.context, "Document ") == size);
        CHECK(contains(one.context, "\n\nDocument " + std::to_string(size) + ":\n"));
        for (int p = 0; p < 3; ++p)
        {
            CHECK(occurrences(one.context, "The paragraph " + std::to_string(i / 3) + "x" + std::to_string(p) + " says")
                  == 1);
        }
        std::set<std::string> different;
        for (std::string const& line : lines(one.context))
        {
            if (line.starts_with("The paragraph ")) { different.insert(line); }
        }
        CHECK(std::ssize(different) == size);
    }
    f.options.max_length = 20000; // more than all 180 paragraphs take: they repeat
    auto const all       = runner::make_ruler_samples(f.options, "qa_1", count_tokens).front();
    CHECK(all.about.at("haystack_size") > 180);
    CHECK(occurrences(all.context, "The paragraph 7x1 says") >= 2);
    f.options.max_length = 190; // fewer than the article's three
    for (auto const& one : runner::make_ruler_samples(f.options, "qa_1", count_tokens))
    {
        CHECK(one.about.at("haystack_size") <= 2);
        CHECK(contains(one.context, one.answers[0]));
    }
}

TEST_CASE("a HotpotQA question keeps its ten documents")
{
    files f;
    f.options.hotpot_path = f.folder.write("hotpot.json", hotpot(40));
    auto const samples    = runner::make_ruler_samples(f.options, "qa_2", count_tokens);
    for (std::size_t i = 0; i < samples.size(); ++i)
    {
        CHECK(samples[i].answers == std::vector<std::string>{"fact" + std::to_string(i) + "x4"});
        CHECK(samples[i].about.at("haystack_size") > 10);
        for (int d = 0; d < 10; ++d)
        {
            std::string const name = std::to_string(i) + "x" + std::to_string(d);
            CHECK(occurrences(
                      samples[i].context, ":\nTitle " + name + "\nFirst of " + name + ". Second: fact" + name + ".\n")
                  == 1);
        }
    }
    f.options.max_length = 128;
    CHECK(contains(message_of([&] { (void)runner::make_ruler_samples(f.options, "qa_2", count_tokens); }),
        "max_length: 128 is too small for qa_2: its smallest prompt takes "));
}

TEST_CASE("options that cannot be met are refused with what would help")
{
    files f;
    auto const message = [&](std::string_view task, auto const& change) {
        auto options = f.options;
        change(options);
        return message_of([&] { (void)runner::make_ruler_samples(options, task, count_tokens); });
    };
    auto const as_is = [](runner::ruler_options&) {};
    CHECK(message("niah", as_is)
          == "task: \"niah\" is unknown; RULER has niah_single_1, niah_single_2, niah_single_3, niah_multikey_1, "
             "niah_multikey_2, "
             "niah_multikey_3, niah_multivalue, niah_multiquery, vt, cwe, fwe, qa_1, qa_2");
    CHECK(message("qa_1", as_is) == "squad_path: is empty; qa_1 needs SQuAD's dev-v2.0.json");
    CHECK(message("qa_2", as_is) == "hotpot_path: is empty; qa_2 needs HotpotQA's hotpot_dev_distractor_v1.json");
    CHECK(contains(message("niah_single_2", [](auto& o) { o.essay_path = ""; }), "essay_path: is empty"));
    CHECK(contains(
        message("cwe", [](auto& o) { o.words_folder = ""; }), "words_folder: is empty; cwe needs the word lists"));
    CHECK(contains(message("vt", [](auto& o) { o.samples = 0; }), "samples: 0"));
    CHECK(contains(message("vt", [](auto& o) { o.max_length = 0; }), "max_length: 0"));
    CHECK(contains(
        message("vt", [](auto& o) { o.template_tokens = 994; }), "template_tokens: 994 of a max_length of 1024"));
    CHECK(contains(message("fwe", [](auto& o) { o.max_length = 249; }), "max_length: 249 is too small for fwe"));
    for (std::string const task : {"niah_single_1", "niah_single_2", "vt", "cwe"})
    {
        CAPTURE(task);
        CHECK(contains(message(task, [](auto& o) { o.max_length = 170; }), "max_length: 170 is too small for "));
    }
    CHECK(contains(message("cwe", [](auto& o) { o.max_length = 65536; }),
        "has room for more than cwe can fill: there are only 2100 different words; name a longer list"));
    f.options.max_length      = 65536;
    f.options.samples         = 1;
    f.options.more_words_path = f.folder.write("more.txt", word_list("w", 9000));
    auto const more           = runner::make_ruler_samples(f.options, "cwe", count_tokens).front();
    CHECK(more.about.at("haystack_size") > 2100);
    CHECK(more.answers[0].starts_with("w"));
}

TEST_CASE("a haystack is as large as fits, whatever stands before it")
{
    files f;
    for (std::int64_t const length : {1024, 2048, 5000})
    {
        CAPTURE(length);
        f.options.max_length        = length;
        constexpr std::int64_t line = 30; // tokens of a line of noise; every vt sample of a size has as many
        for (auto const& one : runner::make_ruler_samples(f.options, "vt", count_tokens))
        {
            CHECK(one.about.at("length") > length - line);
        }
        f.options.close_fit = true;
        for (std::string const task : {"niah_single_1", "niah_single_2", "niah_multikey_3", "vt", "cwe"})
        {
            CAPTURE(task);
            for (auto const& one : runner::make_ruler_samples(f.options, task, count_tokens))
            {
                CHECK(one.about.at("length") > length - length / 12); // the search met other keys than the sample
                CHECK(one.about.at("length") <= length);
            }
        }
    }
}

TEST_CASE("the chat form's tokens are kept free")
{
    files f;
    f.options.template_tokens = 100;
    for (std::string const task : {"niah_single_1", "vt", "cwe", "fwe"})
    {
        CAPTURE(task);
        for (auto const& one : runner::make_ruler_samples(f.options, task, count_tokens))
        {
            CHECK(one.about.at("length") <= 924);
        }
    }
}

TEST_CASE("word files are cleaned, and bad ones are refused by line")
{
    scratch_folder folder;
    CHECK(runner::ruler::load_words(folder.write("a", "nasty \r\nad hoc\n\nbig\nnasty\njalape\u00f1o"), "r")
          == std::vector<std::string>{"ad hoc", "big", "jalape\u00f1o", "nasty"});
    auto const message = [&](std::string_view text) {
        std::string const path = folder.write("b", text);
        return message_of([&] { (void)runner::ruler::load_words(path, "do this"); }).substr(path.size());
    };
    CHECK(message("") == ": is empty; do this");
    CHECK(message("\n \n") == ": holds no word; do this");
    CHECK(message("one\nt\two\n") == ": line 2 is no word: \"t\\x09wo\"; do this");
    CHECK(message("one\n\xff\n") == ": is not UTF-8 from byte 4 on; do this");
    CHECK(contains(message_of([&] { (void)runner::ruler::load_word_lists(folder.file("nowhere")); }),
        "nowhere/adjectivelist.txt: cannot be opened: No such file or directory; `bash examples/setup.sh words` "
        "fetches"));
}

TEST_CASE("files of questions that are missing, cut short or laid out otherwise are refused with the key")
{
    files f;
    auto const message = [&](std::string const& task, std::string_view text) {
        (task == "qa_1" ? f.options.squad_path : f.options.hotpot_path) = f.folder.write("q.json", text);
        std::string const error = message_of([&] { (void)runner::make_ruler_samples(f.options, task, count_tokens); });
        CHECK(contains(error, task == "qa_1" ? "; qa_1 needs SQuAD's dev-v2.0.json (" : "; qa_2 needs HotpotQA's "));
        CHECK(contains(error, "/q.json: "));
        return error;
    };
    f.options.squad_path = f.folder.file("none.json");
    CHECK(contains(message_of([&] { (void)runner::make_ruler_samples(f.options, "qa_1", count_tokens); }),
        "none.json: cannot be opened: No such file or directory; qa_1 needs"));
    std::string const whole = squad(2);
    CHECK(contains(message("qa_1", std::string_view(whole).substr(0, whole.size() - 5)),
        "is cut short: no JSON value ends at byte "));
    CHECK(contains(message("qa_1", "<html>"), "is no JSON at byte 0: \"<html>\""));
    CHECK(contains(message("qa_1", "[]"), "the whole value is array, it must be an object"));
    CHECK(contains(message("qa_1", "{}"), "the whole value has no key \"data\""));
    CHECK(contains(message("qa_1", R"({"data": [{"paragraphs": [{"context": 3}]}]})"),
        "data[0].paragraphs[0].context is number, it must be a string"));
    CHECK(contains(message("qa_1", R"({"data": [{"paragraphs": [{"context": "c", "qas": [{"question": "q"}]}]}]})"),
        "data[0].paragraphs[0].qas[0] has no key \"is_impossible\""));
    CHECK(contains(
        message("qa_1",
            R"({"data": [{"paragraphs": [{"context": "c", "qas": [{"question": "q", "is_impossible": false, "answers": []}]}]}]})"),
        "qas[0].answers is empty"));
    CHECK(contains(message("qa_1", R"({"data": []})"), "holds no question"));
    CHECK(contains(message("qa_2", R"([{"context": [["title"]]}])"), "[0].context[0] is not a pair"));
    CHECK(contains(message("qa_2", R"([{"context": [["title", ["s", null]]]}])"),
        "[0].context[0][1][1] is null, it must be a string"));
    CHECK(contains(
        message("qa_2", R"([{"context": [["title", ["s"]]], "question": "q"}])"), "[0] has no key \"answer\""));
    f.options.samples    = 7;
    f.options.squad_path = f.folder.write("squad.json", squad(2));
    CHECK(message_of([&] { (void)runner::make_ruler_samples(f.options, "qa_1", count_tokens); })
          == "samples: 7 are wanted, the file of questions has 6");
}
