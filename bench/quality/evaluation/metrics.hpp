/// \file metrics.hpp: how answers are scored: needle word recall, RULER's string match, F1 of words; all in [0, 1]
///
/// Sources: the needle visualiser of KVCache-Factory (scripts/scripts_needle/visualize.py at c97f9d7), NVIDIA/RULER
/// (scripts/eval at c3f5e3b), THUDM/LongBench (LongBench/metrics.py at c5ea10b). What differs from them: see
/// `python_text::lower`, and references that they fail on are an error that says so. score_answers.py has metrics for
/// which Python packages exist.
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

#include "runner/pre_tokenizer.hpp"
#include "lossy_utf8.hpp"
#include "python_text.hpp"

namespace runner
{

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

// --- head scores -----------------------------------------------------------------------------------------------------

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

} // namespace runner
