/// \file ruler_words.hpp: English adjectives, nouns and verbs, read from plain text files
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "python_text.hpp"
#include "ruler_text.hpp"
#include "runner/file_error.hpp"

namespace runner::ruler
{

/// The public generator takes its words from the PyPI package wonderwords (MIT licence); `bash examples/setup.sh words`
/// fetches version 3.0.1 and puts its three lists into the cache.
struct word_lists
{
    std::vector<std::string> adjectives; // sorted, each once
    std::vector<std::string> nouns;
    std::vector<std::string> verbs;
};

/// The words of a file with one on each line, white space at its end removed, sorted, each once.
/// \throws file_error   it cannot be read, holds no word, a line holds a control character
[[nodiscard]] inline std::vector<std::string> load_words(std::string const& path, std::string_view remedy)
{
    std::string const text = read_utf8(path, remedy);
    std::vector<std::string> words;
    std::size_t line = 0;
    for (std::size_t begin = 0; begin < text.size();)
    {
        ++line;
        std::size_t const end = std::min(text.find('\n', begin), text.size());
        std::string_view word{text.data() + begin, end - begin};
        while (!word.empty() && python_text::is_space(static_cast<unsigned char>(word.back())))
        {
            word.remove_suffix(1);
        }
        for (char const c : word)
        {
            if (static_cast<unsigned char>(c) >= 0x20 && c != 0x7F) { continue; }
            throw file_error(
                path, joined("line ", std::to_string(line), " is no word: ", runner::quoted(word), "; ", remedy));
        }
        if (!word.empty()) { words.emplace_back(word); }
        begin = end + 1;
    }
    if (words.empty()) { throw file_error(path, joined("holds no word; ", remedy)); }
    std::sort(words.begin(), words.end());
    words.erase(std::unique(words.begin(), words.end()), words.end());
    return words;
}

/// The lists in `folder`: adjectivelist.txt, nounlist.txt and verblist.txt, one word a line.
/// \throws file_error   one of them cannot be used
[[nodiscard]] inline word_lists load_word_lists(std::string const& folder)
{
    constexpr std::string_view remedy = "`bash examples/setup.sh words` fetches the word lists";
    auto const load = [&](std::string_view name) { return load_words(joined(folder, "/", name), remedy); };
    return {load("adjectivelist.txt"), load("nounlist.txt"), load("verblist.txt")};
}

/// Every word of the three lists once, sorted.
[[nodiscard]] inline std::vector<std::string> all_words(word_lists const& lists)
{
    std::vector<std::string> words;
    for (auto const* list : {&lists.adjectives, &lists.nouns, &lists.verbs})
    {
        words.insert(words.end(), list->begin(), list->end());
    }
    std::sort(words.begin(), words.end());
    words.erase(std::unique(words.begin(), words.end()), words.end());
    return words;
}

} // namespace runner::ruler
