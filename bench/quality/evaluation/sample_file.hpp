/// \file sample_file.hpp: reads samples from files of one JSON object a line, and cuts the middle out of long prompts
#pragma once

#include <mdkv/core/error.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "json_place.hpp"
#include "lossy_utf8.hpp"
#include "ruler_text.hpp"
#include "runner/file_error.hpp"
#include "runner/tokenizer.hpp"
#include "sample.hpp"

namespace runner
{

namespace detail
{

/// The line's number and a hash of it (64 bits of FNV-1a), so that two files do not share their identifiers.
[[nodiscard]] inline std::string id_of_line(std::string_view text, std::size_t number)
{
    constexpr std::string_view digits = "0123456789abcdef";
    std::uint64_t hash                = 0xcbf2'9ce4'8422'2325U;
    for (char const c : text) { hash = (hash ^ static_cast<unsigned char>(c)) * 0x100'0000'01b3U; }
    std::string id = joined(std::to_string(number), "-");
    for (int shift = 60; shift >= 0; shift -= 4) { id += digits[hash >> shift & 15U]; }
    return id;
}

[[nodiscard]] inline bool has_value(json_place const& row, char const* key)
{
    return row.has(key) && !row.value()[key].is_null();
}

/// One string, or an array of them.
[[nodiscard]] inline std::vector<std::string> references_at(json_place const& place)
{
    if (place.value().is_string()) { return {place.text()}; }
    std::vector<std::string> texts;
    for (std::size_t i = 0; i < place.size(); ++i) { texts.push_back(place.at(i).text()); }
    if (texts.empty()) { place.fail("is empty"); }
    return texts;
}

[[nodiscard]] inline sample sample_of_line(std::string_view text, json_source const& line, bool chat)
{
    nlohmann::json const parsed = line.parse(text);
    json_place const row{line, parsed};
    auto const text_or = [&](char const* key, std::string const& otherwise) {
        return has_value(row, key) ? row.at(key).text() : otherwise;
    };
    sample out;
    out.task          = row.at("task").text();
    out.id            = text_or("id", id_of_line(text, *line.line));
    out.context       = row.at("context").text();
    out.question      = row.at("question").text();
    out.answer_prefix = text_or("answer_prefix", "");
    out.answers       = references_at(row.at(has_value(row, "answer") ? "answer" : "answers"));
    if (has_value(row, "max_new_tokens"))
    {
        json_place const most = row.at("max_new_tokens");
        if (!most.value().is_number_integer() || most.value() < 1 || most.value() > 1 << 24)
        {
            most.fail("is no whole number from 1 to 16777216");
        }
        out.max_new_tokens = most.value().get<std::int64_t>();
    }
    out.chat            = has_value(row, "chat") ? row.at("chat").boolean() : chat;
    out.stop_at_newline = has_value(row, "stop_at_newline") && row.at("stop_at_newline").boolean();
    out.min_new_tokens  = out.stop_at_newline ? 1 : 0;
    out.about           = parsed;
    for (char const* const key :
        {"task", "id", "context", "question", "answer_prefix", "answer", "max_new_tokens", "chat", "stop_at_newline"})
    {
        out.about.erase(key);
    }
    out.about["answers"] = out.answers;
    return out;
}

} // namespace detail

/// The samples of a file with one JSON object a line, in its order; empty lines are skipped.
///
/// Keys: task, context, question, and answers (references: a string or an array of them, also called answer, as in
/// kvpress's data sets); as far as they are there id, answer_prefix, max_new_tokens (32), chat (the prompt goes into the
/// model's chat form), stop_at_newline (the answer is one line of at least one token). All other keys, and the
/// references, are copied to `about` and so to the answer's line. A line without an id gets its number and a hash.
/// \param chat   for lines that do not say
/// \throws file_error   the file cannot be read or has no sample; a line is no JSON, or a key is absent or of another type
[[nodiscard]] inline std::vector<sample> read_sample_file(std::string const& path, bool chat)
{
    std::string const remedy = "bench/quality/make_samples.py writes such files";
    json_source line{path, "correct or remove that line; " + remedy, {}};
    std::string const text = ruler::read_utf8(path, remedy);
    std::vector<sample> samples;
    std::size_t number = 0;
    for (std::size_t begin = 0; begin < text.size();)
    {
        std::size_t const end = std::min(text.find('\n', begin), text.size());
        std::string_view const row{text.data() + begin, end - begin};
        line.line = ++number;
        if (row.find_first_not_of(" \t\r") != std::string_view::npos)
        {
            samples.push_back(detail::sample_of_line(row, line, chat));
        }
        begin = end + 1;
    }
    if (samples.empty()) { throw file_error(path, "holds no sample; " + remedy); }
    return samples;
}

/// LongBench's rule (LongBench/pred.py): a prompt of more than `max_length` tokens becomes the text of its first and its
/// last int(max_length / 2) tokens. Counted as there: context and question tokenised in one, and a beginning-of-sequence
/// token, where the model wants one, is the first token of the first half. A character cut through becomes U+FFFD.
/// The result is text, which can make a few tokens more or fewer when it is read; the chat form and `answer_prefix` come
/// on top.
///
/// The remaining bytes of the context are the context, those of the question the question, which is whole unless it
/// alone is longer than a half. `about` gets whole_tokens and cut.
/// \throws mdkv::invalid_argument   max_length is below 2
[[nodiscard]] inline sample cut_in_the_middle(tokenizer const& words, sample one, std::int64_t max_length)
{
    mdkv::expects(max_length >= 2, "max-length: ", max_length, " is not at least 2");
    std::vector<std::int32_t> const ids = words.encode(one.context + one.question);
    std::int64_t const first            = words.add_bos() ? 1 : 0;
    std::int64_t const whole            = std::ssize(ids) + first;
    one.about["whole_tokens"]           = whole;
    one.about["cut"]                    = whole > max_length;
    if (whole <= max_length) { return one; }

    auto const half        = static_cast<std::size_t>(max_length / 2);
    std::span const all    = ids;
    std::string const head = words.decode(all.first(half - static_cast<std::size_t>(first)));
    std::string const tail = words.decode(all.last(half));
    // Bytes without a token are not in these, so the parts' sizes are counted without them.
    std::size_t const context_bytes  = one.context.size() - words.bytes_without_token(one.context);
    std::size_t const question_bytes = one.question.size() - words.bytes_without_token(one.question);
    if (question_bytes <= tail.size())
    {
        std::size_t const context_end = tail.size() - question_bytes;
        one.context                   = lossy_utf8(head) + lossy_utf8(tail.substr(0, context_end));
        one.question                  = lossy_utf8(tail.substr(context_end));
        return one;
    }
    std::size_t const context_end = std::min(head.size(), context_bytes);
    one.context                   = lossy_utf8(head.substr(0, context_end));
    one.question                  = lossy_utf8(head.substr(context_end)) + lossy_utf8(tail);
    return one;
}

} // namespace runner
