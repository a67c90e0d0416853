#include "evaluation/metrics.hpp"

#include "evaluation/lossy_utf8.hpp"
#include "evaluation/porter_stemmer.hpp"
#include "evaluation/python_text.hpp"
#include "evaluation/rouge.hpp"
#include "evaluation/similarity.hpp"

#include <doctest/doctest.h>
#include <rapidcheck.h>

#include <mdkv/core/error.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <fstream>
#include <functional>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "runner/utf8.hpp"
#include "support/metric_case.hpp"

namespace
{

using texts = std::vector<std::string>;

/// What the public packages made of answers and references (tests/tools/record_metrics.py).
nlohmann::json recorded()
{
    std::string const path = std::string(MDKV_TEST_DATA_DIR) + "/metrics.json";
    std::ifstream in(path);
    if (!in) { throw std::runtime_error(path + ": cannot be opened"); }
    return nlohmann::json::parse(in);
}

std::string error_of(std::function<double()> const& call)
{
    try
    {
        return "no error but " + std::to_string(call());
    }
    catch (mdkv::invalid_argument const& error)
    {
        return error.what();
    }
}

} // namespace

TEST_CASE("the stemmer makes of recorded words what NLTK makes of them")
{
    nlohmann::json const file = recorded();
    CHECK(file.at("stems").size() >= 300);
    for (auto const& [word, stem] : file.at("stems").items())
    {
        CAPTURE(word);
        CHECK(runner::porter_stem(word) == stem.get<std::string>());
    }
}

TEST_CASE("every metric gives on recorded answers the value of the public packages, to the last bit")
{
    std::map<std::string, int> compared;
    nlohmann::json const file = recorded();
    for (nlohmann::json const& one : file.at("cases"))
    {
        CAPTURE(one.dump());
        CHECK(support::metric_value(one) == one.at("value"));
        ++compared[one.at("metric").get<std::string>()];
    }
    for (char const* const metric :
        {"first_line", "rouge_1", "rouge_l", "word_recall", "string_match_all", "string_match_part", "token_f1",
            "classification", "retrieval", "count", "code_difflib", "code_levenshtein"})
    {
        CAPTURE(metric);
        CHECK(compared[metric] >= 15);
    }
}

TEST_CASE("word recall is over the 11 distinct words of the needle's short answer")
{
    std::string_view const expected = "eat a sandwich and sit in Dolores Park on a sunny day.";
    CHECK(runner::word_recall("Eat a sandwich.", expected) == 2.0 / 11); // "sandwich." is another word
    CHECK(runner::word_recall("day. sunny a on park dolores in sit and sandwich eat", expected) == 1.0);
}

TEST_CASE("the class after one that is taken out is not looked at, as in the original")
{
    texts const classes{"Other", "location", "Other location", "City"};
    // "Other" goes, "location" is skipped and stays beside the right one.
    CHECK(runner::classification_score("Other location", "Other location", classes) == 0.5);
    CHECK(runner::classification_score("Other location, City", "Other location", classes) == 1.0 / 3);
    CHECK(runner::classification_score("City", "Other location", classes) == 0.0);
}

TEST_CASE("several references count by the best of them, and none of them is worth 0")
{
    texts const references{"a dog", "the cat sat", "cat"};
    auto const f1 = [](std::string const& reference) { return runner::token_f1("The cat!", reference); };
    CHECK(runner::best_of(references, f1) == 1.0);
    CHECK(runner::best_of(std::span<std::string const>{}, f1) == 0.0);
}

TEST_CASE("lines are compared as fuzzywuzzy does with difflib or with python-Levenshtein, whichever is asked for")
{
    using runner::line_matcher;
    CHECK(runner::code_similarity("tide", "diet") == 0.25);
    CHECK(runner::code_similarity("diet", "tide") == 0.5);
    CHECK(runner::code_similarity("tide", "diet", line_matcher::levenshtein) == 0.5);
    CHECK(runner::code_similarity("diet", "tide", line_matcher::levenshtein) == 0.5);
    // 199 characters may all be equal; of 200 a character that is there more than 3 times begins no match in difflib.
    CHECK(runner::fuzz_ratio("-" + std::string(198, 'x'), std::string(199, 'x'), line_matcher::difflib) == 99);
    CHECK(runner::fuzz_ratio("-" + std::string(199, 'x'), std::string(200, 'x'), line_matcher::difflib) == 0);
    CHECK(runner::fuzz_ratio("-" + std::string(199, 'x'), std::string(200, 'x'), line_matcher::levenshtein) == 100);
}

TEST_CASE("percentages are rounded with halves to even")
{
    // 2 * 1 / 16 = 12.5 % and 2 * 3 / 16 = 37.5 %
    CHECK(runner::fuzz_ratio("a", "abcdefghijklmno", runner::line_matcher::difflib) == 12);
    CHECK(runner::fuzz_ratio("abc", "abcdefghijklm", runner::line_matcher::difflib) == 38);
}

TEST_CASE("references that the public metrics fail on are refused, saying which and why")
{
    CHECK(error_of([] { return runner::retrieval_score("3", "paragraph 3"); })
          == "retrieval_score: reference: no \"Paragraph N\" in \"paragraph 3\"");
    CHECK(error_of([] { return runner::string_match_all("x", texts{}); }) == "string match: references: none");
    CHECK(error_of([] { return runner::string_match_part("x", texts{}); }) == "string match: references: none");
    CHECK(error_of([] { return runner::word_recall("x", " \n"); }) == "word_recall: expected: no words");
}

TEST_CASE("upper case beyond ASCII becomes lower case, and what is documented as left stays")
{
    using runner::python_text::lower;
    CHECK(lower("\u00C9COLE \u041C\u041E\u0421\u041A\u0412\u0410 \u0178 \u212A \u1E9E \u023A")
          == "\u00E9cole \u043C\u043E\u0441\u043A\u0432\u0430 \u00FF k \u00DF \u2C65");
    CHECK(lower("\u0130 \u2160 \u24B6") == "\u0130 \u2160 \u24B6");
    CHECK(lower("\u039F\u03A3") == "\u03BF\u03C3");
}

TEST_CASE("whatever the bytes of answer and reference, every metric is from 0 to 1")
{
    // Few characters, so that texts have much in common, and bytes that are no UTF-8 among them.
    using namespace std::string_literals;
    auto const any_text =
        rc::gen::container<std::string>(rc::gen::elementOf("aaabe  ..\n\t`#/_7TY\xC3\xA9\xE2\x80\x94\xF0\x1F\0"s));
    CHECK(rc::check("every metric is from 0 to 1", [&] {
        std::string const answer    = *any_text;
        std::string const reference = *any_text;
        texts const references{reference, *any_text};
        using runner::line_matcher;
        std::vector<double> const values{runner::rouge_1(answer, reference), runner::rouge_l(answer, reference),
            runner::token_f1(answer, reference), runner::count_score(answer, reference),
            runner::retrieval_score(answer, "Paragraph 7"), runner::classification_score(answer, reference, references),
            runner::string_match_all(answer, references), runner::string_match_part(answer, references),
            runner::code_similarity(answer, reference, line_matcher::difflib),
            runner::code_similarity(answer, reference, line_matcher::levenshtein),
            runner::word_recall(answer, reference + " needle")};
        RC_ASSERT(std::ranges::all_of(values, [](double value) { return value >= 0 && value <= 1; }));
        std::string const decoded = runner::lossy_utf8(answer);
        RC_ASSERT(runner::valid_utf8_prefix(decoded) == decoded.size());
    }));
}

TEST_CASE("an answer equal to its reference is worth 1, and F measures do not change when the two are swapped")
{
    auto const words =
        rc::gen::container<texts>(rc::gen::element<std::string>("sandwich", "park", "days.", "Sunny", "7"));
    CHECK(rc::check("F measures are symmetric and 1 for equal texts", [&] {
        std::string answer    = "eat";
        std::string reference = "sit";
        for (std::string const& word : *words) { answer += " " + word; }
        for (std::string const& word : *words) { reference += " " + word; }
        RC_ASSERT(runner::rouge_1(answer, answer) == 1.0);
        RC_ASSERT(runner::token_f1(answer, answer) == 1.0);
        RC_ASSERT(runner::word_recall(answer, answer) == 1.0);
        RC_ASSERT(runner::code_similarity(answer, answer) == 1.0);
        RC_ASSERT(runner::rouge_1(answer, reference) == runner::rouge_1(reference, answer));
        RC_ASSERT(runner::token_f1(answer, reference) == runner::token_f1(reference, answer));
        auto const alike = [](std::string const& a, std::string const& b) {
            return runner::code_similarity(a, b, runner::line_matcher::levenshtein);
        };
        RC_ASSERT(alike(answer, reference) == alike(reference, answer));
    }));
}
