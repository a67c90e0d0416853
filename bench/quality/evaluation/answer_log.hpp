/// \file answer_log.hpp: the file of all answers of an evaluation, a line each: what is finished survives a killed run
#pragma once

#include <nlohmann/json.hpp>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "json_lines.hpp"
#include "sample.hpp"

namespace runner
{

/// Where the question is when the cache is compressed.
enum class question_place
{
    window, // before it: the policy sees the question
    after   // behind it: the policy sees the context alone, and the question is read through what it kept
};

[[nodiscard]] inline std::string text_of(question_place place)
{
    return place == question_place::window ? "window" : "after";
}

/// What answers are made by, besides the policy: those of different ones are never mixed.
struct answer_origin
{
    std::string model; // file name
    std::string element;
    std::int64_t window = 0;

    auto operator<=>(answer_origin const&) const = default;
};

/// What makes two answers answers to the same.
struct answer_key
{
    std::string task, id;
    std::string prompt;       // sample_mark()
    std::string policy;       // its label
    std::int64_t kv_size = 0; // tokens per KV head; 0 for the whole cache
    std::string question;     // text_of(question_place)
    answer_origin origin{};

    auto operator<=>(answer_key const&) const = default;
};

struct answer
{
    answer_key key;
    std::string text;
    std::map<std::string, double> scores; // 0 to 100
    std::int64_t resident_bytes = 0, full_bytes = 0;
    nlohmann::json about = nlohmann::json::object(); // the sample's
    double seconds       = 0; // this cache's compressing and attending; prefill and the layers' products are shared
};

/// Hexadecimal digits that change with everything about a sample that an answer and its score depend on.
[[nodiscard]] inline std::string sample_mark(sample const& one)
{
    std::uint64_t hash = 0xCBF29CE484222325U; // FNV-1a
    auto const add     = [&](std::string_view text) {
        for (char const c : text) { hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3U; }
        hash = (hash ^ text.size()) * 0x100000001B3U; // so that text moved from one piece to the next is another sample
    };
    for (std::string const* text : {&one.context, &one.question, &one.answer_prefix}) { add(*text); }
    for (std::string const& text : one.answers) { add(text); }
    add(std::to_string(one.answers.size()));
    add("0"); // older logs have here how many classes the sample named
    add(std::to_string(one.max_new_tokens) + (one.stop_at_newline ? "n" : "") + (one.chat ? "c" : "")
        + (one.min_new_tokens > 0 ? "m" + std::to_string(one.min_new_tokens) : ""));
    if (!one.next_question.empty())
    {
        add(one.next_question);
        for (std::string const& text : one.next_answers) { add(text); }
    }
    std::string digits;
    for (int shift = 60; shift >= 0; shift -= 4) { digits += "0123456789abcdef"[(hash >> shift) & 15U]; }
    return digits;
}

namespace detail
{

inline constexpr json_line_kind answer_line{R"({"task":")", "answer of an evaluation"};

/// Calls visit(key, value) for everything that an answer's line has, in its order.
template <class Answer, class Visit>
void visit_fields(Answer& one, Visit const& visit)
{
    visit("task", one.key.task);
    visit("id", one.key.id);
    visit("policy", one.key.policy);
    visit("kv_size", one.key.kv_size);
    visit("question", one.key.question);
    visit("element", one.key.origin.element);
    visit("window", one.key.origin.window);
    visit("answer", one.text);
    visit("scores", one.scores);
    visit("resident_bytes", one.resident_bytes);
    visit("full_bytes", one.full_bytes);
    visit("about", one.about);
    visit("seconds", one.seconds);
    visit("model", one.key.origin.model);
    visit("prompt", one.key.prompt);
}

[[nodiscard]] inline std::string line_of(answer const& one)
{
    nlohmann::ordered_json line;
    visit_fields(one, [&](char const* key, auto const& value) { line[key] = value; });
    // A model may stop inside a character; what is no UTF-8 is written as the replacement character.
    return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

/// \throws nlohmann::json::exception   a key is absent or of another type
[[nodiscard]] inline answer answer_of(nlohmann::json const& line)
{
    answer one;
    visit_fields(one, [&](char const* key, auto& value) { line.at(key).get_to(value); });
    return one;
}

} // namespace detail

/// The file, open for as long as this lives; one run at a time may have it. A line that was being written when a run was
/// killed is cut off.
class answer_log
{
public:
    /// \throws mdkv::error   the file cannot be used, another run has it, or a line in it is no answer; it is then as it was
    explicit answer_log(std::string path)
        : lines_{std::move(path), detail::answer_line, [this](json_line const& line) {
                     if (!nlohmann::json::accept(line.text)) { line.refuse("is no JSON"); }
                     answer one = detail::answer_of(nlohmann::json::parse(line.text));
                     answers_.emplace(one.key, std::move(one));
                 }}
    {}

    [[nodiscard]] std::string const& path() const noexcept { return lines_.path(); }
    [[nodiscard]] bool has(answer_key const& key) const { return answers_.contains(key); }
    [[nodiscard]] std::map<answer_key, answer> const& answers() const noexcept { return answers_; }

    /// Bytes of an unfinished line that were cut off when the file was opened.
    [[nodiscard]] std::size_t cut() const noexcept { return lines_.cut(); }

    /// When it returns, the operating system has the lines, whatever becomes of this process.
    /// \throws mdkv::error   they cannot be written
    void add(std::span<answer const> more)
    {
        std::string lines;
        for (answer const& one : more) { lines += detail::line_of(one); }
        lines_.append(lines);
        for (answer const& one : more) { answers_.emplace(one.key, one); }
    }

private:
    std::map<answer_key, answer> answers_;
    json_lines lines_; // last: reading it fills the others
};

} // namespace runner
