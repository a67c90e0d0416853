/// \file rouge.hpp: ROUGE-1 and ROUGE-L as the two packages of PyPI compute them that public benchmarks use
///
/// `rouge_score` 0.1.2 (Google's) counts words of letters and digits, stemmed; the needle benchmarks use it. `rouge` 1.0.1
/// (pltrdy's) counts distinct words between spaces; LongBench uses it. They have little but the name in common.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "lossy_utf8.hpp"
#include "porter_stemmer.hpp"
#include "python_text.hpp"

namespace runner
{

namespace rouge
{

/// What lies between characters other than a-z and 0-9, once in lower case, stemmed where longer than three.
[[nodiscard]] inline std::vector<std::string> stemmed_words(std::string_view text)
{
    constexpr std::string_view word_characters = "abcdefghijklmnopqrstuvwxyz0123456789";
    std::string const lowered                  = python_text::lower(lossy_utf8(text));
    std::string_view rest                      = lowered;
    std::vector<std::string> words;
    while (true)
    {
        rest.remove_prefix(std::min(rest.find_first_of(word_characters), rest.size()));
        if (rest.empty()) { return words; }
        std::string_view const word = rest.substr(0, rest.find_first_not_of(word_characters));
        words.push_back(word.size() > 3 ? porter_stem(word) : std::string(word));
        rest.remove_prefix(word.size());
    }
}

using sentence = std::vector<int>; // numbers of words

/// Texts cut at every '.' into sentences, whose words, equal in all texts, get numbers.
class word_numbers
{
public:
    /// No sentence for "" and "..."; between two '.' white space alone is a sentence of one word, the empty one.
    [[nodiscard]] std::vector<sentence> sentences(std::string_view text)
    {
        std::string const all = lossy_utf8(text);
        std::string_view rest = all;
        std::vector<sentence> out;
        while (!rest.empty())
        {
            std::string_view const next = rest.substr(0, rest.find('.'));
            if (!next.empty()) { out.push_back(numbers(python_text::split(next))); }
            rest.remove_prefix(std::min(next.size() + 1, rest.size()));
        }
        return out;
    }

private:
    sentence numbers(std::vector<std::string_view> const& words)
    {
        sentence out;
        for (std::string_view const word : words) { out.push_back(number(word)); }
        if (out.empty()) { out.push_back(number({})); }
        return out;
    }

    int number(std::string_view word)
    {
        return known_.try_emplace(std::string(word), static_cast<int>(known_.size())).first->second;
    }

    std::unordered_map<std::string, int> known_;
};

/// The package walks back through its table by recursion, which Python ends at 1,000 calls, 9 of them made by LongBench's
/// eval.py and the package before. LongBench counts that, as any exception, as 0.
inline constexpr std::int64_t deepest_recursion = 991;

/// Adds the words of the longest common subsequence the package finds. False: its recursion would be too deep.
[[nodiscard]] inline bool add_common_subsequence(
    sentence const& reference, sentence const& answer, std::set<int>& words)
{
    std::size_t i             = reference.size();
    std::size_t j             = answer.size();
    std::size_t const columns = j + 1;
    if (static_cast<std::int64_t>(std::min(i, j)) >= deepest_recursion) { return false; }
    std::vector<std::int32_t> lengths((i + 1) * columns); // [reference words + 1, answer words + 1]
    for (std::size_t r = 1; r <= i; ++r)
    {
        for (std::size_t c = 1; c <= j; ++c)
        {
            std::size_t const at = r * columns + c;
            lengths[at]          = reference[r - 1] == answer[c - 1] ? lengths[at - columns - 1] + 1
                                                                     : std::max(lengths[at - columns], lengths[at - 1]);
        }
    }
    std::int64_t depth = 1;
    for (; i > 0 && j > 0; ++depth)
    {
        if (reference[i - 1] == answer[j - 1])
        {
            words.insert(reference[i - 1]);
            --i;
            --j;
        }
        else if (lengths[(i - 1) * columns + j] > lengths[i * columns + j - 1]) { --i; }
        else { --j; }
    }
    return depth <= deepest_recursion;
}

[[nodiscard]] inline std::size_t distinct_words(std::vector<sentence> const& text)
{
    std::set<int> words;
    for (sentence const& one : text) { words.insert(one.begin(), one.end()); }
    return words.size();
}

} // namespace rouge

/// ROUGE-1 F of `RougeScorer(["rouge1"], use_stemmer=True)`, in [0, 1].
[[nodiscard]] inline double rouge_1(std::string_view answer, std::string_view reference)
{
    std::vector<std::string> const answered = rouge::stemmed_words(answer);
    std::vector<std::string> const expected = rouge::stemmed_words(reference);
    std::map<std::string_view, std::int64_t> left;
    for (std::string const& word : expected) { ++left[word]; }
    std::int64_t common = 0;
    for (std::string const& word : answered) { common += left[word]-- > 0 ? 1 : 0; }
    if (common == 0) { return 0; }
    double const precision = static_cast<double>(common) / static_cast<double>(answered.size());
    double const recall    = static_cast<double>(common) / static_cast<double>(expected.size());
    return 2 * precision * recall / (precision + recall);
}

/// ROUGE-L F of `Rouge().get_scores(...)["rouge-l"]["f"]` as LongBench's eval.py gets it, in [0, 1): the distinct words of
/// the union of longest common subsequences of all pairs of sentences, against the distinct words of either text. 0 where
/// the package throws: a text without sentences, or sentences too long for it.
[[nodiscard]] inline double rouge_l(std::string_view answer, std::string_view reference)
{
    rouge::word_numbers numbers;
    std::vector<rouge::sentence> const answered = numbers.sentences(answer);
    std::vector<rouge::sentence> const expected = numbers.sentences(reference);
    if (answered.empty() || expected.empty()) { return 0; }
    std::set<int> common;
    for (rouge::sentence const& one : expected)
    {
        for (rouge::sentence const& other : answered)
        {
            if (!rouge::add_common_subsequence(one, other, common)) { return 0; }
        }
    }
    auto const shared      = static_cast<double>(common.size());
    double const recall    = shared / static_cast<double>(rouge::distinct_words(expected));
    double const precision = shared / static_cast<double>(rouge::distinct_words(answered));
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8));
}

} // namespace runner
