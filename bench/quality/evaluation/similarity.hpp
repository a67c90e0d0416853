/// \file similarity.hpp: how alike two lines are: fuzzywuzzy's `fuzz.ratio`, in both forms it has
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lossy_utf8.hpp"
#include "python_text.hpp"

namespace runner
{

/// fuzzywuzzy 0.18 compares with what it finds installed, and the results differ. LongBench's requirements.txt asks for
/// fuzzywuzzy alone, so its figures come from difflib; KVCache-Factory's asks for python-Levenshtein too.
enum class line_matcher
{
    difflib,
    levenshtein
};

namespace matching
{

/// The stretches two texts have in common as Python's difflib.SequenceMatcher finds them: the longest one, then the
/// longest ones to its left and to its right, and so on.
class sequence_matcher
{
public:
    sequence_matcher(std::u32string_view a, std::u32string_view b)
        : a_{a}
        , b_{b}
    {
        for (std::size_t j = 0; j < b.size(); ++j) { places_[b[j]].push_back(j); }
        // Characters that make up more than 1 % of a long text begin no match ("autojunk").
        if (b.size() >= 200)
        {
            std::erase_if(places_, [limit = b.size() / 100 + 1](auto const& one) { return one.second.size() > limit; });
        }
    }

    /// How many characters of `a` are matched.
    [[nodiscard]] std::size_t matched() const
    {
        std::size_t characters = 0;
        std::vector<block> open{{0, a_.size(), 0, b_.size()}};
        while (!open.empty())
        {
            block const here = open.back();
            open.pop_back();
            block const match = longest(here);
            if (match.a_begin == match.a_end) { continue; }
            characters += match.a_end - match.a_begin;
            open.push_back({here.a_begin, match.a_begin, here.b_begin, match.b_begin});
            open.push_back({match.a_end, here.a_end, match.b_end, here.b_end});
        }
        return characters;
    }

private:
    struct block
    {
        std::size_t a_begin, a_end, b_begin, b_end;
    };

    [[nodiscard]] block longest(block const& in) const
    {
        block best{in.a_begin, in.a_begin, in.b_begin, in.b_begin};
        std::vector<std::size_t> before(b_.size() + 1); // [end in b]: how long a match ends here and at the last i
        std::vector<std::size_t> now(b_.size() + 1);
        for (std::size_t i = in.a_begin; i < in.a_end; ++i)
        {
            std::ranges::fill(now, 0U);
            if (auto const places = places_.find(a_[i]); places != places_.end())
            {
                for (std::size_t const j : places->second)
                {
                    if (j < in.b_begin || j >= in.b_end) { continue; }
                    std::size_t const size = now[j + 1] = before[j] + 1;
                    if (size > best.a_end - best.a_begin) { best = {i + 1 - size, i + 1, j + 1 - size, j + 1}; }
                }
            }
            std::swap(before, now);
        }
        return extended(best, in);
    }

    /// With the equal characters around it, which may be such as begin no match.
    [[nodiscard]] block extended(block match, block const& in) const
    {
        while (
            match.a_begin > in.a_begin && match.b_begin > in.b_begin && a_[match.a_begin - 1] == b_[match.b_begin - 1])
        {
            --match.a_begin;
            --match.b_begin;
        }
        while (match.a_end < in.a_end && match.b_end < in.b_end && a_[match.a_end] == b_[match.b_end])
        {
            ++match.a_end;
            ++match.b_end;
        }
        return match;
    }

    std::u32string_view a_;
    std::u32string_view b_;
    std::unordered_map<char32_t, std::vector<std::size_t>> places_; // character -> where it is in b
};

[[nodiscard]] inline double difflib_ratio(std::u32string_view a, std::u32string_view b)
{
    double const matched = static_cast<double>(sequence_matcher(a, b).matched());
    return 2.0 * matched / static_cast<double>(a.size() + b.size());
}

/// 1 - (insertions and deletions from one text to the other) / (characters of both).
[[nodiscard]] inline double levenshtein_ratio(std::u32string_view a, std::u32string_view b)
{
    std::vector<std::size_t> common(b.size() + 1); // length of the longest common subsequence, by the characters of b
    for (char32_t const character : a)
    {
        std::size_t diagonal = 0;
        for (std::size_t j = 0; j < b.size(); ++j)
        {
            std::size_t const above = common[j + 1];
            common[j + 1]           = character == b[j] ? diagonal + 1 : std::max(above, common[j]);
            diagonal                = above;
        }
    }
    std::size_t const both = a.size() + b.size();
    return 1.0 - static_cast<double>(both - 2 * common.back()) / static_cast<double>(both);
}

} // namespace matching

/// `fuzz.ratio(a, b)`: a whole number from 0 to 100.
[[nodiscard]] inline double fuzz_ratio(std::string_view a, std::string_view b, line_matcher matcher)
{
    std::u32string const first  = python_text::characters(lossy_utf8(a));
    std::u32string const second = python_text::characters(lossy_utf8(b));
    if (first == second) { return 100; }
    if (first.empty() || second.empty()) { return 0; }
    double const ratio = matcher == line_matcher::difflib ? matching::difflib_ratio(first, second)
                                                          : matching::levenshtein_ratio(first, second);
    return std::nearbyint(100 * ratio); // halves to even, as Python rounds
}

} // namespace runner
