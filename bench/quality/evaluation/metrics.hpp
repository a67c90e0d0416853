/// \file metrics.hpp: how answers are scored: needle word recall, RULER's string match, LongBench's metrics; all in [0, 1]
///
/// Sources: the needle visualiser of KVCache-Factory (scripts/scripts_needle/visualize.py), NVIDIA/RULER
/// (scripts/eval), THUDM/LongBench (LongBench/metrics.py, eval.py). tests/tools/public_metrics.py names the commits.
/// What differs from them: see `python_text::lower`, and references that they fail on are an error that says so.
#pragma once

#include <mdkv/core/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runner/file_error.hpp"
#include "runner/pre_tokenizer.hpp"
#include "lossy_utf8.hpp"
#include "python_text.hpp"
#include "similarity.hpp"

namespace runner
{

/// The best of `score(reference)`, at least 0: LongBench's rule for several references.
template <class Score>
[[nodiscard]] double best_of(std::span<std::string const> references, Score const& score)
{
    double best = 0;
    for (std::string const& reference : references) { best = std::max(best, score(reference)); }
    return best;
}

/// The first line after empty ones: all that counts of an answer to trec, triviaqa, samsum and lsht.
[[nodiscard]] inline std::string_view first_line(std::string_view answer)
{
    answer.remove_prefix(std::min(answer.find_first_not_of('\n'), answer.size()));
    return answer.substr(0, answer.find('\n'));
}

// --- needle ----------------------------------------------------------------------------------------------------------

/// The share of the distinct words of `expected`, in lower case, that the answer has; a word is what lies between spaces.
[[nodiscard]] inline double word_recall(std::string_view answer, std::string_view expected)
{
    std::string const answer_text   = python_text::lower(lossy_utf8(answer));
    std::string const expected_text = python_text::lower(lossy_utf8(expected));
    auto const answered             = python_text::split(answer_text);
    auto const words                = python_text::split(expected_text);
    std::set<std::string_view> const wanted(words.begin(), words.end());
    std::set<std::string_view> const have(answered.begin(), answered.end());
    if (wanted.empty()) { throw mdkv::invalid_argument("word_recall: expected: no words"); }
    auto const found = std::ranges::count_if(wanted, [&have](std::string_view word) { return have.contains(word); });
    return static_cast<double>(found) / static_cast<double>(wanted.size());
}

// --- RULER -----------------------------------------------------------------------------------------------------------

namespace detail
{

/// Of each reference, whether the answer contains it, in lower case.
[[nodiscard]] inline std::vector<bool> contained(std::string_view answer, std::span<std::string const> references)
{
    if (references.empty()) { throw mdkv::invalid_argument("string match: references: none"); }
    std::string text = lossy_utf8(answer);
    std::ranges::replace_if(
        text, [](char c) { return static_cast<unsigned char>(c) < ' '; }, '\n');
    text = python_text::lower(python_text::stripped(text));
    std::vector<bool> out;
    for (std::string const& reference : references)
    {
        out.push_back(text.find(python_text::lower(lossy_utf8(reference))) != std::string::npos);
    }
    return out;
}

} // namespace detail

/// The share of the references that the answer contains: every task but qa.
[[nodiscard]] inline double string_match_all(std::string_view answer, std::span<std::string const> references)
{
    std::vector<bool> const found = detail::contained(answer, references);
    return static_cast<double>(std::ranges::count(found, true)) / static_cast<double>(found.size());
}

/// 1 if the answer contains any of the references: qa.
[[nodiscard]] inline double string_match_part(std::string_view answer, std::span<std::string const> references)
{
    return std::ranges::count(detail::contained(answer, references), true) > 0 ? 1 : 0;
}

// --- LongBench -------------------------------------------------------------------------------------------------------

namespace detail
{

/// Words in lower case without ASCII punctuation and articles, with how often each is there.
[[nodiscard]] inline std::map<std::string, std::int64_t> normalised_words(std::string_view text)
{
    static regular_expression const article(R"((?<![\p{L}\p{N}_])(?:an?|the)(?![\p{L}\p{N}_]))");
    std::string letters = python_text::lower(lossy_utf8(text));
    std::erase_if(letters, [](char c) {
        return (c >= '!' && c <= '/') || (c >= ':' && c <= '@') || (c >= '[' && c <= '`') || (c >= '{' && c <= '~');
    });
    std::string blanked = letters;
    article.each_match(letters, [&blanked](match_range at) {
        std::fill(blanked.begin() + static_cast<std::ptrdiff_t>(at.begin),
            blanked.begin() + static_cast<std::ptrdiff_t>(at.end), ' ');
    });
    std::map<std::string, std::int64_t> words;
    for (std::string_view const word : python_text::split(blanked)) { ++words[std::string(word)]; }
    return words;
}

[[nodiscard]] inline std::int64_t total(std::map<std::string, std::int64_t> const& words)
{
    std::int64_t sum = 0;
    for (auto const& [word, count] : words) { sum += count; }
    return sum;
}

/// Runs of decimal digits, Unicode's included.
[[nodiscard]] inline std::vector<std::string> numbers(std::string_view text)
{
    static regular_expression const digits(R"(\p{Nd}+)");
    std::vector<std::string> out;
    digits.each_match(text, [&](match_range at) { out.emplace_back(text.substr(at.begin, at.end - at.begin)); });
    return out;
}

/// The share of the numbers in the answer that are written like `expected`.
[[nodiscard]] inline double share_of_number(std::string_view answer, std::string_view expected)
{
    std::vector<std::string> const found = numbers(lossy_utf8(answer));
    if (found.empty()) { return 0; }
    return static_cast<double>(std::ranges::count(found, expected)) / static_cast<double>(found.size());
}

} // namespace detail

/// qa_f1_score: F1 of the words as multisets, without articles and punctuation.
[[nodiscard]] inline double token_f1(std::string_view answer, std::string_view reference)
{
    auto const answered = detail::normalised_words(answer);
    auto const expected = detail::normalised_words(reference);
    std::int64_t common = 0;
    for (auto const& [word, count] : answered)
    {
        auto const other = expected.find(word);
        common += other == expected.end() ? 0 : std::min(count, other->second);
    }
    if (common == 0) { return 0; }
    double const precision = static_cast<double>(common) / static_cast<double>(detail::total(answered));
    double const recall    = static_cast<double>(common) / static_cast<double>(detail::total(expected));
    return (2 * precision * recall) / (precision + recall);
}

/// classification_score: of the classes the answer contains, 1 / how many if the right one is among them, else 0. Those
/// that are a part of the right one do not count; the original skips the class after each one it takes out, and so do we.
[[nodiscard]] inline double classification_score(
    std::string_view answer, std::string_view reference, std::span<std::string const> classes)
{
    std::vector<std::string_view> named;
    for (std::string const& one : classes)
    {
        if (answer.find(one) != std::string_view::npos) { named.emplace_back(one); }
    }
    for (std::size_t i = 0; i < named.size(); ++i)
    {
        std::string_view const name = named[i];
        if (name != reference && reference.find(name) != std::string_view::npos)
        {
            named.erase(std::ranges::find(named, name));
        }
    }
    bool const right = std::ranges::find(named, reference) != named.end();
    return right ? 1.0 / static_cast<double>(named.size()) : 0;
}

/// retrieval_score: the share of the numbers in the answer that are N of the reference's "Paragraph N".
[[nodiscard]] inline double retrieval_score(std::string_view answer, std::string_view reference)
{
    static detail::regular_expression const paragraph(R"((?<=Paragraph )\p{Nd}+)");
    std::string const text = lossy_utf8(reference);
    std::vector<std::string> expected;
    paragraph.each_match(
        text, [&](detail::match_range at) { expected.push_back(text.substr(at.begin, at.end - at.begin)); });
    if (expected.empty())
    {
        throw mdkv::invalid_argument(joined("retrieval_score: reference: no \"Paragraph N\" in ", quoted(reference)));
    }
    return detail::share_of_number(answer, expected.front());
}

/// count_score: the share of the numbers in the answer that are the reference.
[[nodiscard]] inline double count_score(std::string_view answer, std::string_view reference)
{
    return detail::share_of_number(answer, reference);
}

/// code_sim_score: how alike the reference and the answer's first line are that has no '`', no '#' and no "//".
[[nodiscard]] inline double code_similarity(
    std::string_view answer, std::string_view reference, line_matcher matcher = line_matcher::difflib)
{
    answer.remove_prefix(std::min(answer.find_first_not_of('\n'), answer.size()));
    std::string_view line = answer.substr(0, answer.find('\n'));
    while (line.find_first_of("`#") != std::string_view::npos || line.find("//") != std::string_view::npos)
    {
        answer.remove_prefix(std::min(line.size() + 1, answer.size()));
        line = answer.substr(0, answer.find('\n'));
    }
    return fuzz_ratio(line, reference, matcher) / 100;
}

} // namespace runner
