/// \file sentence_pieces.cpp: neighbours merge by the score of what they make
#include "runner/sentence_pieces.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>
#include <rapidcheck.h>

namespace
{

using list = std::vector<std::string>;

struct scored
{
    std::string text;
    float score;
};

/// The rule as it is written down: look through all neighbours for the highest score, merge there, begin again.
list split_slowly(std::vector<scored> const& pieces, std::string const& text)
{
    list parts;
    for (char const c : text) { parts.emplace_back(1, c); }
    while (true)
    {
        std::size_t best = parts.size();
        float most       = -std::numeric_limits<float>::infinity();
        for (std::size_t i = 0; i + 1 < parts.size(); ++i)
        {
            auto const found = std::ranges::find(pieces, parts[i] + parts[i + 1], &scored::text);
            if (found != pieces.end() && found->score > most)
            {
                most = found->score;
                best = i;
            }
        }
        if (best == parts.size()) { return parts; }
        parts[best] += parts[best + 1];
        parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    }
}

} // namespace

TEST_CASE("sentence pieces: the neighbours that make the piece of highest score merge first, the leftmost of several")
{
    runner::sentence_pieces pieces;
    float score = 0;
    for (std::string const piece : {"bc", "ab", "aa", "abbc", "aaaa"}) { pieces.add(piece, score -= 1, 7); }
    pieces.add("xy", -9, 8);
    pieces.add("yx", -9, 9);
    auto const split = [&](std::string_view text) {
        list out;
        pieces.split(text, [&](std::string_view part, std::int32_t) { out.emplace_back(part); });
        return out;
    };
    CHECK(split("abc") == list{"a", "bc"}); // bc before ab, though it stands further right
    CHECK(split("abbc") == list{"abbc"});
    CHECK(split("aaa") == list{"aa", "a"});
    CHECK(split("aaaaa") == list{"aaaa", "a"});
    CHECK(split("xyx") == list{"xy", "x"}); // equal scores
    CHECK(split("yxy") == list{"yx", "y"});
    CHECK(split("") == list{});
    CHECK(split("\u4E2D\xFF\xE4") == list{"\u4E2D", "\xFF", "\xE4"});
}

TEST_CASE("sentence pieces: merging by a queue gives what merging by searching gives")
{
    CHECK(rc::check([] {
        std::vector<scored> known;
        runner::sentence_pieces pieces;
        int const count    = *rc::gen::inRange(0, 30);
        auto const letters = rc::gen::container<std::string>(rc::gen::inRange('a', 'd'));
        for (int i = 0; i < count; ++i)
        {
            std::string const text = *rc::gen::resize(5, letters);
            auto const same        = [&](scored const& one) { return one.text == text; };
            if (text.size() < 2 || std::ranges::any_of(known, same)) { continue; }
            known.push_back({text, static_cast<float>(*rc::gen::inRange(0, 6))}); // many of one score
            pieces.add(text, known.back().score, i);
        }
        std::string const text = *letters;
        list parts;
        pieces.split(text, [&](std::string_view part, std::int32_t) { parts.emplace_back(part); });
        RC_ASSERT(parts == split_slowly(known, text));
    }));
}
