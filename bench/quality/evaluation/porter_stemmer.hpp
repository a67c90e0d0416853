/// \file porter_stemmer.hpp: English words without their suffixes, as NLTK's PorterStemmer has them by default
///
/// M. F. Porter, "An algorithm for suffix stripping", Program 14.3 (1980), with the changes NLTK made to it
/// (NLTK_EXTENSIONS): a table of irregular words, and another treatment of -ies, -ied, -y, -alli, -fulli and -logi.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace runner
{

namespace porter
{

[[nodiscard]] constexpr bool is_vowel(char letter) noexcept
{
    return std::string_view("aeiou").find(letter) != std::string_view::npos;
}

/// Anything but a, e, i, o, u is a consonant, and y after a consonant is none either.
[[nodiscard]] inline bool is_consonant(std::string_view word, std::size_t at)
{
    std::size_t first = at;
    while (first > 0 && word[first] == 'y') { --first; }
    bool const consonant = !is_vowel(word[first]);
    return (at - first) % 2 == 0 ? consonant : !consonant; // in a run of y the kinds alternate
}

/// How often a vowel is followed by a consonant: Porter's m.
[[nodiscard]] inline int measure(std::string_view stem)
{
    int changes    = 0;
    bool consonant = false;
    for (std::size_t i = 0; i < stem.size(); ++i)
    {
        bool const before = consonant;
        consonant         = stem[i] == 'y' ? !before : !is_vowel(stem[i]);
        changes += i > 0 && consonant && !before ? 1 : 0;
    }
    return changes;
}

/// Of a y that is not the first letter, either it is a vowel or the letter before it.
[[nodiscard]] inline bool has_vowel(std::string_view stem)
{
    return std::ranges::any_of(stem, is_vowel) || stem.find('y', 1) != std::string_view::npos;
}

/// Porter's *o, and a word of a vowel and a consonant.
[[nodiscard]] inline bool ends_short(std::string_view word)
{
    std::size_t const n = word.size();
    if (n == 2) { return !is_consonant(word, 0) && is_consonant(word, 1); }
    return n >= 3 && is_consonant(word, n - 3) && !is_consonant(word, n - 2) && is_consonant(word, n - 1)
           && std::string_view("wxy").find(word[n - 1]) == std::string_view::npos;
}

struct rule
{
    std::string_view suffix;
    std::string_view replacement;
};

/// The first rule whose suffix `word` has decides, whether `allowed(stem)` or not; `allowed(suffix, stem)`.
template <class Allowed>
[[nodiscard]] std::string with_rules(std::string_view word, std::span<rule const> rules, Allowed const& allowed)
{
    for (rule const& one : rules)
    {
        if (!word.ends_with(one.suffix)) { continue; }
        std::string_view const stem = word.substr(0, word.size() - one.suffix.size());
        return allowed(one.suffix, stem) ? std::string(stem).append(one.replacement) : std::string(word);
    }
    return std::string(word);
}

[[nodiscard]] inline std::string_view irregular(std::string_view word)
{
    using entry                 = std::pair<std::string_view, std::string_view>;
    static constexpr auto table = std::to_array<entry>({{"sky", "sky"}, {"skies", "sky"}, {"dying", "die"},
        {"lying", "lie"}, {"tying", "tie"}, {"news", "news"}, {"innings", "inning"}, {"inning", "inning"},
        {"outings", "outing"}, {"outing", "outing"}, {"cannings", "canning"}, {"canning", "canning"}, {"howe", "howe"},
        {"proceed", "proceed"}, {"exceed", "exceed"}, {"succeed", "succeed"}});
    auto const* const found     = std::ranges::find(table, word, &entry::first);
    return found == table.end() ? std::string_view{} : found->second;
}

[[nodiscard]] inline std::string without_plural(std::string_view word)
{
    static constexpr auto rules = std::to_array<rule>({{"sses", "ss"}, {"ies", "i"}, {"ss", "ss"}, {"s", ""}});
    if (word.size() == 4 && word.ends_with("ies")) { return std::string(word.substr(0, 3)); }
    return with_rules(word, rules, [](auto, auto) { return true; });
}

/// What is left of a word without -ed or -ing, made a word again.
[[nodiscard]] inline std::string repaired(std::string_view stem)
{
    char const last = stem.back();
    if (stem.ends_with("at") || stem.ends_with("bl") || stem.ends_with("iz")) { return std::string(stem) + 'e'; }
    if (stem.size() >= 2 && last == stem[stem.size() - 2] && is_consonant(stem, stem.size() - 1))
    {
        bool const kept = last == 'l' || last == 's' || last == 'z';
        return std::string(kept ? stem : stem.substr(0, stem.size() - 1));
    }
    return measure(stem) == 1 && ends_short(stem) ? std::string(stem) + 'e' : std::string(stem);
}

[[nodiscard]] inline std::string without_past(std::string_view word)
{
    if (word.ends_with("ied")) { return std::string(word.substr(0, word.size() - (word.size() == 4 ? 1 : 2))); }
    if (word.ends_with("eed"))
    {
        bool const shorten = measure(word.substr(0, word.size() - 3)) > 0;
        return std::string(word.substr(0, word.size() - (shorten ? 1 : 0)));
    }
    for (std::string_view const suffix : {"ed", "ing"})
    {
        if (!word.ends_with(suffix)) { continue; }
        std::string_view const stem = word.substr(0, word.size() - suffix.size());
        if (has_vowel(stem)) { return repaired(stem); }
    }
    return std::string(word);
}

[[nodiscard]] inline std::string with_final_i(std::string_view word)
{
    static constexpr auto rules = std::to_array<rule>({{"y", "i"}});
    return with_rules(word, rules,
        [](auto, std::string_view stem) { return stem.size() > 1 && is_consonant(stem, stem.size() - 1); });
}

/// Step 2: double suffixes made single.
[[nodiscard]] inline std::string with_single_suffix(std::string word)
{
    static constexpr auto rules = std::to_array<rule>(
        {{"ational", "ate"}, {"tional", "tion"}, {"enci", "ence"}, {"anci", "ance"}, {"izer", "ize"}, {"bli", "ble"},
            {"alli", "al"}, {"entli", "ent"}, {"eli", "e"}, {"ousli", "ous"}, {"ization", "ize"}, {"ation", "ate"},
            {"ator", "ate"}, {"alism", "al"}, {"iveness", "ive"}, {"fulness", "ful"}, {"ousness", "ous"},
            {"aliti", "al"}, {"iviti", "ive"}, {"biliti", "ble"}, {"fulli", "ful"}, {"logi", "log"}});
    if (word.ends_with("alli") && measure(std::string_view(word).substr(0, word.size() - 4)) > 0)
    {
        word.resize(word.size() - 2);
    }
    return with_rules(word, rules, [&word](std::string_view suffix, std::string_view stem) {
        // The l of -logi counts with the stem, so that "geo" and "theo" are long enough.
        return measure(suffix == "logi" ? std::string_view(word).substr(0, word.size() - 3) : stem) > 0;
    });
}

/// Step 3.
[[nodiscard]] inline std::string without_middle_suffix(std::string_view word)
{
    static constexpr auto rules = std::to_array<rule>(
        {{"icate", "ic"}, {"ative", ""}, {"alize", "al"}, {"iciti", "ic"}, {"ical", "ic"}, {"ful", ""}, {"ness", ""}});
    return with_rules(word, rules, [](auto, std::string_view stem) { return measure(stem) > 0; });
}

/// Step 4.
[[nodiscard]] inline std::string without_last_suffix(std::string_view word)
{
    static constexpr auto rules = std::to_array<rule>({{"al", ""}, {"ance", ""}, {"ence", ""}, {"er", ""}, {"ic", ""},
        {"able", ""}, {"ible", ""}, {"ant", ""}, {"ement", ""}, {"ment", ""}, {"ent", ""}, {"ion", ""}, {"ou", ""},
        {"ism", ""}, {"ate", ""}, {"iti", ""}, {"ous", ""}, {"ive", ""}, {"ize", ""}});
    return with_rules(word, rules, [](std::string_view suffix, std::string_view stem) {
        return measure(stem) > 1 && (suffix != "ion" || stem.ends_with('s') || stem.ends_with('t'));
    });
}

/// Step 5: a final e, and one of two final l.
[[nodiscard]] inline std::string tidied(std::string word)
{
    if (word.ends_with('e'))
    {
        std::string_view const stem = std::string_view(word).substr(0, word.size() - 1);
        int const m                 = measure(stem);
        if (m > 1 || (m == 1 && !ends_short(stem))) { word.pop_back(); }
    }
    if (word.ends_with("ll") && measure(std::string_view(word).substr(0, word.size() - 1)) > 1) { word.pop_back(); }
    return word;
}

} // namespace porter

/// The stem of a word of lower-case ASCII letters and digits.
[[nodiscard]] inline std::string porter_stem(std::string_view word)
{
    if (std::string_view const known = porter::irregular(word); !known.empty()) { return std::string(known); }
    if (word.size() <= 2) { return std::string(word); }
    std::string stem = porter::with_final_i(porter::without_past(porter::without_plural(word)));
    stem             = porter::without_middle_suffix(porter::with_single_suffix(std::move(stem)));
    return porter::tidied(porter::without_last_suffix(stem));
}

} // namespace runner
