#include "evaluation/metrics.hpp"

#include "evaluation/lossy_utf8.hpp"
#include "evaluation/python_text.hpp"

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

namespace
{

using texts = std::vector<std::string>;

/// What the public benchmarks made of answers and references; the file says which of their versions.
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

TEST_CASE("every metric gives on recorded answers the value of the public programs, to the last bit")
{
    std::map<std::string, int> compared;
    nlohmann::json const file = recorded();
    for (nlohmann::json const& one : file.at("cases"))
    {
        auto const metric     = one.at("metric").get<std::string>();
        auto const answer     = one.at("answer").get<std::string>();
        auto const references = one.value("references", texts{});
        double value          = 0;
        if (metric == "word_recall") { value = runner::word_recall(answer, references.at(0)); }
        else if (metric == "string_match_all") { value = runner::string_match_all(answer, references); }
        else if (metric == "string_match_part") { value = runner::string_match_part(answer, references); }
        else if (metric == "token_f1")
        {
            for (std::string const& one_of : references) { value = std::max(value, runner::token_f1(answer, one_of)); }
        }
        else { continue; } // those of bench/quality/score_answers.py, see tests/tools/crosscheck_scores.py
        CAPTURE(one.dump());
        CHECK(value == one.at("value"));
        ++compared[metric];
    }
    for (char const* const metric : {"word_recall", "string_match_all", "string_match_part", "token_f1"})
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

TEST_CASE("references that the public metrics fail on are refused, saying which and why")
{
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
        std::vector<double> const values{runner::token_f1(answer, reference),
            runner::string_match_all(answer, references), runner::string_match_part(answer, references),
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
        RC_ASSERT(runner::token_f1(answer, answer) == 1.0);
        RC_ASSERT(runner::word_recall(answer, answer) == 1.0);
        RC_ASSERT(runner::token_f1(answer, reference) == runner::token_f1(reference, answer));
    }));
}
