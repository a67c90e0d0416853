/// \file needle_haystack.hpp: the text a needle is hidden in: read from files, repeated till long enough, cut in tokens
#pragma once

#include <mdkv/core/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "runner/file_bytes.hpp"
#include "runner/file_error.hpp"
#include "runner/tokenizer.hpp"
#include "runner/utf8.hpp"

namespace runner
{

/// The files a path means: itself, or where it is a folder, the *.txt in it by name. (The original program takes them
/// in the order the file system has; KVCache-Factory sorts.)
/// \throws file_error   there is no such file, or no *.txt in the folder
[[nodiscard]] inline std::vector<std::string> haystack_files(std::string const& path)
{
    std::error_code problem;
    if (!std::filesystem::exists(path, problem))
    {
        throw file_error(path, "does not exist; the haystack is a text file, or a folder of *.txt files");
    }
    if (!std::filesystem::is_directory(path, problem)) { return {path}; }
    std::vector<std::string> files;
    std::filesystem::directory_iterator const entries(path, problem);
    if (problem) { throw file_error(path, joined("cannot be listed: ", problem.message())); }
    for (auto const& entry : entries)
    {
        if (entry.path().extension() == ".txt" && entry.is_regular_file(problem))
        {
            files.push_back(entry.path().string());
        }
    }
    if (files.empty()) { throw file_error(path, "holds no *.txt file; the haystack is made of these"); }
    std::sort(files.begin(), files.end());
    return files;
}

/// The texts of all files, one right behind the other.
/// \throws file_error   a path that means no file, a file that cannot be read or is not UTF-8, or no text at all
[[nodiscard]] inline std::string read_haystack(std::vector<std::string> const& paths)
{
    mdkv::expects(!paths.empty(), "needle: no haystack is given; name a text file, or a folder of *.txt files");
    std::string all;
    for (std::string const& path : paths)
    {
        for (std::string const& file : haystack_files(path))
        {
            std::string const text  = read_text(file);
            std::size_t const valid = valid_utf8_prefix(text);
            if (valid != text.size()) { throw file_error(file, "is not UTF-8; convert it", valid); }
            all += text;
        }
    }
    if (all.empty()) { throw file_error(paths.front(), "holds no text to hide a needle in"); }
    return all;
}

/// At least `least` tokens of the text, repeated as often as that takes.
/// \throws mdkv::invalid_argument   no token stands for any of the text
[[nodiscard]] inline std::vector<std::int32_t> haystack_tokens(
    tokenizer const& words, std::string const& text, std::int64_t least)
{
    std::vector<std::int32_t> tokens = words.encode(text);
    mdkv::expects(!tokens.empty(), "needle: the haystack's ", static_cast<std::int64_t>(text.size()),
        " bytes are no token of this model's vocabulary");
    std::string repeated = text;
    while (std::ssize(tokens) < least)
    { // not by multiplying the tokens: where two copies meet, they may make another one
        std::int64_t const more = least / std::ssize(tokens) + 1;
        std::string const block = repeated;
        for (std::int64_t i = 1; i < more; ++i) { repeated += block; }
        tokens = words.encode(repeated);
    }
    return tokens;
}

/// Whether this token is a full stop and nothing else. The public programs name ids (13 of Llama-3, 842 and 28723 of
/// Mistral); these are what such tokens read as in any vocabulary.
[[nodiscard]] inline bool is_full_stop(tokenizer const& words, std::int32_t id)
{
    std::string_view const text = words.decode_one(id);
    return text == "." || text == " .";
}

/// Before which token of the hay a needle of that depth stands: `depth` percent of the way, then back to right behind
/// the last full stop; the beginning where there is none, the end for 100.
[[nodiscard]] inline std::int64_t needle_position(
    tokenizer const& words, std::span<std::int32_t const> hay, double depth)
{
    if (depth >= 100) { return std::ssize(hay); }
    auto position = static_cast<std::int64_t>(static_cast<double>(hay.size()) * (depth / 100));
    while (position > 0 && !is_full_stop(words, hay[static_cast<std::size_t>(position - 1)])) { --position; }
    return position;
}

/// The first `count` tokens, less those that would end within a character.
[[nodiscard]] inline std::span<std::int32_t const> cut_between_characters(
    tokenizer const& words, std::span<std::int32_t const> hay, std::int64_t count)
{
    auto const inside = [&](std::int64_t at) {
        if (at >= std::ssize(hay)) { return false; }
        std::string_view const text = words.decode_one(hay[static_cast<std::size_t>(at)]);
        return !text.empty() && (static_cast<unsigned char>(text[0]) & 0xC0U) == 0x80U;
    };
    std::int64_t end = std::clamp<std::int64_t>(count, 0, std::ssize(hay));
    while (end > 0 && inside(end)) { --end; }
    return hay.first(static_cast<std::size_t>(end));
}

} // namespace runner
