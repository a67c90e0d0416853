/// \file ruler_file.hpp: reads the JSONL files that the public RULER generator writes
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "json_place.hpp"
#include "ruler_tasks.hpp"
#include "ruler_text.hpp"
#include "runner/file_error.hpp"
#include "sample.hpp"

namespace runner
{

namespace ruler
{

/// What the question at the end of a prompt may begin with, in the public templates.
[[nodiscard]] inline std::span<std::string_view const> question_beginnings(family kind)
{
    static constexpr std::array<std::string_view, 2> needles = {
        "What are all the special magic ", "What is the special magic "};
    static constexpr std::array<std::string_view, 1> tracking = {
        "Question: Find all variables that are assigned the value "};
    static constexpr std::array<std::string_view, 1> common = {
        "Question: What are the 10 most common words in the above list?"};
    static constexpr std::array<std::string_view, 1> frequent  = {"Question: Do not provide any explanation."};
    static constexpr std::array<std::string_view, 1> documents = {
        "Answer the question based on the given documents. Only give me the answer and do not output any other "
        "words.\n\nQuestion: "};
    switch (kind)
    {
        case family::needles:
            return needles;
        case family::tracking:
            return tracking;
        case family::common_words:
            return common;
        case family::frequent_words:
            return frequent;
        case family::documents:
            break;
    }
    return documents;
}

/// Where the last question of a prompt begins; npos where none of the task's does.
[[nodiscard]] inline std::size_t question_place(std::string_view input, family kind)
{
    std::size_t place = std::string_view::npos;
    for (std::string_view const beginning : question_beginnings(kind))
    {
        std::size_t const found = input.rfind(beginning);
        if (found != std::string_view::npos && (place == std::string_view::npos || found > place)) { place = found; }
    }
    return place;
}

/// Cuts the answer's beginning off an input that still ends with it, as the public scripts do: at the last place where
/// the first 10 characters of the template's prefix stand.
[[nodiscard]] inline std::string take_answer_prefix(std::string& input, family kind, json_source const& line)
{
    std::string_view const beginning = template_of(kind).answer_prefix.substr(0, 10);
    std::size_t const place          = input.rfind(beginning);
    if (place == std::string::npos)
    {
        line.fail(joined("input has no ", runner::quoted(beginning),
            ", which this task's answers begin with, and there is no answer_prefix"));
    }
    std::string prefix = input.substr(place);
    input.resize(place);
    return prefix;
}

/// The line's number and a hash of it (64 bits of FNV-1a), so that files of two lengths do not share their identifiers.
[[nodiscard]] inline std::string id_of_line(std::string_view text, std::size_t number)
{
    constexpr std::string_view digits = "0123456789abcdef";
    std::uint64_t hash                = 0xcbf2'9ce4'8422'2325U;
    for (char const c : text) { hash = (hash ^ static_cast<unsigned char>(c)) * 0x100'0000'01b3U; }
    std::string id = joined(std::to_string(number), "-");
    for (int shift = 60; shift >= 0; shift -= 4) { id += digits[hash >> shift & 15U]; }
    return id;
}

[[nodiscard]] inline sample sample_of_line(std::string_view text, task const& which, json_source const& line)
{
    nlohmann::json const parsed = line.parse(text);
    json_place const row{line, parsed};
    sample out;
    out.task                 = which.name;
    out.id                   = id_of_line(text, *line.line);
    out.max_new_tokens       = which.tokens_to_generate;
    std::string input        = row.at("input").text();
    json_place const outputs = row.at("outputs");
    for (std::size_t i = 0; i < outputs.size(); ++i) { out.answers.push_back(outputs.at(i).text()); }
    if (out.answers.empty()) { outputs.fail("is empty"); }
    if (row.has("answer_prefix")) { out.answer_prefix = row.at("answer_prefix").text(); }
    if (out.answer_prefix.empty()) { out.answer_prefix = take_answer_prefix(input, which.family, line); }
    std::size_t const place = question_place(input, which.family);
    if (place == std::string::npos)
    {
        line.fail(joined("input has no ", runner::quoted(question_beginnings(which.family).front()),
            ", which the question of ", which.name, " begins with"));
    }
    out.question = input.substr(place);
    input.resize(place);
    out.context = std::move(input);
    for (char const* const key : {"index", "length", "token_position_answer"})
    {
        if (!row.has(key)) { continue; }
        json_place const number = row.at(key);
        if (!number.value().is_number_integer()) { number.fail("is no whole number"); }
        out.about[key] = number.value();
    }
    return out;
}

} // namespace ruler

/// The samples of a file with one JSON object a line: input, outputs and, as far as they are there, answer_prefix,
/// index, length, token_position_answer. The file does not say which task it is of, so the caller does.
///
/// The context ends where the template's last question begins (for niah "What are all the special magic " or "What is
/// the special magic ", for vt, cwe and fwe "Question: ...", for qa the instruction's second copy). An input without
/// one is an error, because asking with an empty question would quietly be another protocol. A model's chat form that
/// was written into the inputs stays in them. A sample's id is made of its line, since 'index' of the public niah files
/// is no sample's number.
/// \throws mdkv::invalid_argument   no such task
/// \throws file_error               the file cannot be read or has no sample; a line is no JSON or no sample of this task
[[nodiscard]] inline std::vector<sample> read_ruler_file(std::string const& path, std::string_view task_name)
{
    ruler::task const& which = ruler::find_task(task_name);
    json_source line{path,
        joined("correct or remove that line, or name the task that the file was made for (read as ", which.name, ")"),
        {}};
    std::string const text = ruler::read_utf8(path, "name a file that the public RULER generator wrote");
    std::vector<sample> samples;
    std::size_t number = 0;
    for (std::size_t begin = 0; begin < text.size();)
    {
        std::size_t const end = std::min(text.find('\n', begin), text.size());
        std::string_view const row{text.data() + begin, end - begin};
        line.line = ++number;
        if (row.find_first_not_of(" \t\r") != std::string_view::npos)
        {
            samples.push_back(ruler::sample_of_line(row, which, line));
        }
        begin = end + 1;
    }
    if (samples.empty())
    {
        throw file_error(path, "holds no sample; name a file that the public RULER generator wrote");
    }
    return samples;
}

} // namespace runner
