/// \file ruler_text.hpp: texts that RULER's samples are made of: read from files, cut into words and sentences, filled in
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "python_text.hpp"
#include "runner/file_bytes.hpp"
#include "runner/file_error.hpp"
#include "runner/utf8.hpp"

namespace runner::ruler
{

/// The text of a file.
/// \param remedy   what to do where it cannot be used; ends the message
/// \throws file_error   it cannot be read, is empty, is not UTF-8
[[nodiscard]] inline std::string read_utf8(std::string const& path, std::string_view remedy)
{
    std::string text;
    try
    {
        auto const file = load_file(path, "", std::numeric_limits<std::int64_t>::max(), file_access::read);
        text.assign(reinterpret_cast<char const*>(file.bytes.data()), file.bytes.size());
    }
    catch (file_error const& error)
    {
        throw file_error(path, joined(std::string_view(error.what()).substr(path.size() + 2), "; ", remedy));
    }
    if (text.empty()) { throw file_error(path, joined("is empty; ", remedy)); }
    if (auto const valid = valid_utf8_prefix(text); valid != text.size())
    {
        throw file_error(path, joined("is not UTF-8 from byte ", std::to_string(valid), " on; ", remedy));
    }
    return text;
}

/// The template's text with each placeholder replaced. Values are copied as they are: a placeholder in one stays.
[[nodiscard]] inline std::string filled(
    std::string_view text, std::initializer_list<std::pair<std::string_view, std::string_view>> values)
{
    std::string out;
    while (!text.empty())
    {
        bool found = false;
        for (auto const& [name, value] : values)
        {
            if (!text.starts_with(name)) { continue; }
            out.append(value);
            text.remove_prefix(name.size());
            found = true;
            break;
        }
        if (found) { continue; }
        out += text.front();
        text.remove_prefix(1);
    }
    return out;
}

[[nodiscard]] inline std::string replaced(std::string_view text, std::string_view from, std::string_view to)
{
    return filled(text, {{from, to}});
}

[[nodiscard]] inline std::string joined_with(std::vector<std::string> const& parts, std::string_view separator)
{
    std::string out;
    for (std::size_t i = 0; i < parts.size(); ++i)
    {
        if (i > 0) { out.append(separator); }
        out.append(parts[i]);
    }
    return out;
}

/// Whether a word with a full stop at its end is cut short rather than the end of a sentence.
[[nodiscard]] inline bool is_abbreviation(std::string_view word)
{
    static constexpr std::array known = {"Mr", "Mrs", "Ms", "Dr", "Prof", "St", "Jr", "Sr", "vs", "etc", "e.g", "i.e",
        "cf", "Inc", "Ltd", "Co", "Corp", "Fig", "No", "al", "approx", "U.S", "Jan", "Feb", "Aug", "Sept", "Oct", "Nov",
        "Dec"};
    while (!word.empty() && (word.front() == '(' || word.front() == '"' || word.front() == '\''))
    {
        word.remove_prefix(1);
    }
    if (word.size() == 1 && word.front() >= 'A' && word.front() <= 'Z') { return word != "I"; } // somebody's initial
    for (std::string_view const one : known)
    {
        if (word == one) { return true; }
    }
    return false;
}

/// Whether a sentence ends with this word; `next` is the word after it.
[[nodiscard]] inline bool ends_sentence(std::string_view word, std::string_view next)
{
    static constexpr std::array<std::string_view, 7> closing = {"\"", "'", ")", "]", "}", "\u201d", "\u2019"};
    for (bool again = true; again;)
    {
        again = false;
        for (std::string_view const mark : closing)
        {
            if (!word.ends_with(mark)) { continue; }
            word.remove_suffix(mark.size());
            again = true;
        }
    }
    if (word.empty()) { return false; }
    char const last = word.back();
    if (last == '!' || last == '?') { return true; }
    if (last != '.' || (!next.empty() && next.front() >= 'a' && next.front() <= 'z')) { return false; }
    return !is_abbreviation(word.substr(0, word.size() - 1));
}

/// The sentences of a row of words, each with single spaces between its words. A plain rule stands where the public
/// generator has nltk's trained splitter: a sentence ends at '!', '?' or '.', closing quotation marks and brackets
/// after it included, but not at the '.' of an abbreviation or before a word in lower case.
[[nodiscard]] inline std::vector<std::string> sentences_of(std::vector<std::string_view> const& words)
{
    std::vector<std::string> sentences;
    std::string sentence;
    for (std::size_t i = 0; i < words.size(); ++i)
    {
        if (!sentence.empty()) { sentence += ' '; }
        sentence += words[i];
        bool const last = i + 1 == words.size();
        if (last || ends_sentence(words[i], words[i + 1])) { sentences.push_back(std::exchange(sentence, {})); }
    }
    return sentences;
}

} // namespace runner::ruler
