/// \file answer_log.hpp: the file of all answers of an evaluation, a line each: what is finished survives a killed run
#pragma once

#include <mdkv/core/error.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include "../runner/file_error.hpp"
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
    for (auto const* texts : {&one.answers, &one.classes})
    {
        for (std::string const& text : *texts) { add(text); }
        add(std::to_string(texts->size()));
    }
    add(std::to_string(one.max_new_tokens) + (one.stop_at_newline ? "n" : "") + (one.chat ? "c" : ""));
    std::string digits;
    for (int shift = 60; shift >= 0; shift -= 4) { digits += "0123456789abcdef"[(hash >> shift) & 15U]; }
    return digits;
}

namespace detail
{

inline constexpr std::string_view answer_begin = R"({"task":")"; // of every line

[[nodiscard]] inline std::string line_of(answer const& one)
{
    nlohmann::ordered_json line;
    line["task"]           = one.key.task;
    line["id"]             = one.key.id;
    line["policy"]         = one.key.policy;
    line["kv_size"]        = one.key.kv_size;
    line["question"]       = one.key.question;
    line["element"]        = one.key.origin.element;
    line["window"]         = one.key.origin.window;
    line["answer"]         = one.text;
    line["scores"]         = one.scores;
    line["resident_bytes"] = one.resident_bytes;
    line["full_bytes"]     = one.full_bytes;
    line["about"]          = one.about;
    line["seconds"]        = one.seconds;
    line["model"]          = one.key.origin.model;
    line["prompt"]         = one.key.prompt;
    // A model may stop inside a character; what is no UTF-8 is written as the replacement character.
    return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

/// \throws nlohmann::json::exception   a key is absent or of another type
[[nodiscard]] inline answer answer_of(nlohmann::json const& line)
{
    answer one;
    auto const read = [&](char const* key, auto& value) { line.at(key).get_to(value); };
    read("task", one.key.task);
    read("id", one.key.id);
    read("policy", one.key.policy);
    read("kv_size", one.key.kv_size);
    read("question", one.key.question);
    read("element", one.key.origin.element);
    read("window", one.key.origin.window);
    read("answer", one.text);
    read("scores", one.scores);
    read("resident_bytes", one.resident_bytes);
    read("full_bytes", one.full_bytes);
    read("seconds", one.seconds);
    read("model", one.key.origin.model);
    read("prompt", one.key.prompt);
    one.about = line.at("about");
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
        : path_{std::move(path)}
        , file_{::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644)}
    {
        if (file_ < 0) { fail("cannot be opened"); }
        try
        {
            if (::flock(file_, LOCK_EX | LOCK_NB) != 0)
            {
                throw mdkv::error{path_ + ": another run is writing it; wait for its end or give another --out"};
            }
            read_all();
        }
        catch (...)
        {
            ::close(file_);
            throw;
        }
    }
    ~answer_log() { ::close(file_); }
    answer_log(answer_log const&)            = delete;
    answer_log& operator=(answer_log const&) = delete;

    [[nodiscard]] std::string const& path() const noexcept { return path_; }
    [[nodiscard]] bool has(answer_key const& key) const { return answers_.contains(key); }
    [[nodiscard]] std::map<answer_key, answer> const& answers() const noexcept { return answers_; }

    /// Bytes of an unfinished line that were cut off when the file was opened.
    [[nodiscard]] std::size_t cut() const noexcept { return cut_; }

    /// When it returns, the operating system has the lines, whatever becomes of this process.
    /// \throws mdkv::error   they cannot be written
    void add(std::span<answer const> more)
    {
        std::string lines;
        for (answer const& one : more) { lines += detail::line_of(one); }
        write(lines);
        for (answer const& one : more) { answers_.emplace(one.key, one); }
    }

private:
    [[noreturn]] void fail(std::string const& what) const
    {
        throw mdkv::error{path_ + ": " + what + ": " + std::strerror(errno)};
    }

    void write(std::string_view text)
    {
        while (!text.empty())
        {
            ssize_t const written = ::write(file_, text.data(), text.size());
            if (written < 0 && errno == EINTR) { continue; }
            if (written < 0) { fail("cannot be written"); }
            text.remove_prefix(static_cast<std::size_t>(written));
        }
    }

    [[nodiscard]] std::string contents() const
    {
        std::string text;
        char piece[1 << 16];
        while (true)
        {
            ssize_t const got = ::read(file_, piece, sizeof piece);
            if (got < 0 && errno == EINTR) { continue; }
            if (got < 0) { fail("cannot be read"); }
            if (got == 0) { return text; }
            text.append(piece, static_cast<std::size_t>(got));
        }
    }

    void read_all()
    {
        std::string const text = contents();
        std::string_view rest  = text;
        for (std::size_t number = 1; !rest.empty(); ++number)
        {
            std::size_t const end       = rest.find('\n');
            std::string_view const line = rest.substr(0, end);
            if (end == std::string_view::npos && !nlohmann::json::accept(line)) { return cut_off(line, text, number); }
            read_line(line, number);
            if (end == std::string_view::npos) { return write("\n"); } // somebody's editor took the last line end
            rest.remove_prefix(end + 1);
        }
    }

    /// Only what can be the beginning of an answer: another file given by mistake stays as it is.
    void cut_off(std::string_view line, std::string_view text, std::size_t number)
    {
        std::size_t const common = std::min(line.size(), detail::answer_begin.size());
        if (line.substr(0, common) != detail::answer_begin.substr(0, common)) { read_line(line, number); }
        if (::ftruncate(file_, static_cast<off_t>(text.size() - line.size())) != 0) { fail("cannot be shortened"); }
        cut_ = line.size();
    }

    void read_line(std::string_view line, std::size_t number)
    {
        auto const refuse = [&](std::string const& why) {
            throw mdkv::error{path_ + ":" + std::to_string(number) + ": " + why + ": " + quoted(line)
                              + "; remove the line, or give another --out"};
        };
        if (!nlohmann::json::accept(line)) { refuse("is no JSON"); }
        try
        {
            answer one = detail::answer_of(nlohmann::json::parse(line));
            answers_.emplace(one.key, std::move(one));
        }
        catch (nlohmann::json::exception const& problem)
        {
            refuse("is no answer of an evaluation (" + printable(problem.what(), 200) + ")");
        }
    }

    std::string path_;
    int file_;
    std::map<answer_key, answer> answers_;
    std::size_t cut_ = 0;
};

} // namespace runner
