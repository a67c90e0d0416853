/// \file longbench_file.hpp: reading the public files of LongBench: one JSON object a line
#pragma once

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "runner/file_bytes.hpp"
#include "runner/file_error.hpp"
#include "longbench_tasks.hpp"

namespace runner
{

/// One line of a file.
struct longbench_item
{
    std::string id; // the key _id; where there is none, "line-N"
    std::string input;
    std::string context;
    std::vector<std::string> answers;
    std::vector<std::string> classes; // the key all_classes; empty where it is null
    std::int64_t length = -1;         // the key length, words in the public data; -1: not given
    std::string dataset;
    std::string language;
    std::int64_t line = 0;
};

namespace detail
{

/// Takes the keys of one line and says what is wrong with them.
class longbench_line
{
public:
    longbench_line(std::string const& path, std::int64_t number, std::string_view text)
        : path_(path)
        , number_(number)
    {
        try
        {
            object_ = nlohmann::json::parse(text.begin(), text.end());
        }
        catch (nlohmann::json::exception const&)
        {
            refuse("is not JSON; the file may be damaged or cut short: get it again, or delete this line");
        }
        if (!object_.is_object()) { refuse("is JSON, but no object; this is no file of LongBench"); }
    }

    [[noreturn]] void refuse(std::string_view problem) const
    {
        throw file_error(path_, joined("line ", std::to_string(number_), " ", problem));
    }

    [[noreturn]] void refuse_key(std::string_view key, std::string_view problem) const
    {
        throw file_error(path_, joined("line ", std::to_string(number_), ": key \"", key, "\" ", problem));
    }

    [[nodiscard]] bool has(std::string_view key) const
    {
        auto const at = object_.find(key);
        return at != object_.end() && !at->is_null();
    }

    [[nodiscard]] std::string text(std::string_view key) const
    {
        nlohmann::json const& value = required(key);
        if (!value.is_string()) { refuse_key(key, joined("is ", value.type_name(), ", not a string")); }
        return value.get<std::string>();
    }

    [[nodiscard]] std::vector<std::string> texts(std::string_view key) const
    {
        nlohmann::json const& value = required(key);
        if (!value.is_array()) { refuse_key(key, joined("is ", value.type_name(), ", not an array of strings")); }
        std::vector<std::string> out;
        for (nlohmann::json const& entry : value)
        {
            if (!entry.is_string())
            {
                refuse_key(key,
                    joined("holds ", entry.type_name(), " as entry ", std::to_string(out.size()), ", not a string"));
            }
            out.push_back(entry.get<std::string>());
        }
        if (out.empty()) { refuse_key(key, "is empty; at least one entry is needed to score an answer"); }
        return out;
    }

    [[nodiscard]] std::int64_t count(std::string_view key) const
    {
        nlohmann::json const& value = required(key);
        if (!value.is_number_integer() || value.get<std::int64_t>() < 0)
        {
            refuse_key(key, "is not a whole number of at least 0");
        }
        return value.get<std::int64_t>();
    }

private:
    [[nodiscard]] nlohmann::json const& required(std::string_view key) const
    {
        auto const at = object_.find(key);
        if (at == object_.end())
        {
            refuse_key(key, "is missing; each line needs input, context and answers, as the public files have them");
        }
        return *at;
    }

    std::string const& path_;
    std::int64_t number_;
    nlohmann::json object_;
};

[[nodiscard]] inline longbench_item read_longbench_line(
    longbench_line const& line, longbench_task const& task, std::int64_t number)
{
    longbench_item item;
    item.line    = number;
    item.id      = line.has("_id") ? line.text("_id") : "line-" + std::to_string(number);
    item.input   = line.text("input");
    item.context = line.text("context");
    item.answers = line.texts("answers");
    if (line.has("dataset")) { item.dataset = line.text("dataset"); }
    if (line.has("language")) { item.language = line.text("language"); }
    if (line.has("length")) { item.length = line.count("length"); }
    if (!item.dataset.empty() && item.dataset != task.name && item.dataset != std::string(task.name) + "_e")
    {
        line.refuse_key("dataset", joined("is ", runner::quoted(item.dataset), ", but the task is ", task.name,
                                       "; give this task's own file"));
    }
    bool const classifies = task.metric == longbench_metric::classification;
    if (classifies || line.has("all_classes")) { item.classes = line.texts("all_classes"); }
    return item;
}

} // namespace detail

/// The file of a task: `path` itself, or where it is a folder, NAME.jsonl in it.
[[nodiscard]] inline std::string longbench_path(std::string const& path, longbench_task const& task)
{
    std::error_code problem;
    if (!std::filesystem::is_directory(path, problem)) { return path; }
    return (std::filesystem::path(path) / (std::string(task.name) + ".jsonl")).string();
}

/// All lines of the file, in its order; empty ones are skipped.
///
/// \param path   a file, or the folder the tasks' files lie in
/// \throws file_error   there is no such file, it cannot be read, or a line of it cannot be used: the message names line
///                      and key
[[nodiscard]] inline std::vector<longbench_item> read_longbench(std::string const& path, longbench_task const& task)
{
    std::string const file = longbench_path(path, task);
    std::error_code problem;
    if (!std::filesystem::exists(file, problem))
    {
        throw file_error(file, joined("does not exist; unpack data.zip of the data set THUDM/LongBench, which holds ",
                                   task.name, ".jsonl, and give that file or its folder"));
    }
    std::string const text = read_text(file);
    std::vector<longbench_item> items;
    std::map<std::string, std::int64_t> line_of; // by id
    std::string_view rest = text;
    for (std::int64_t number = 1; !rest.empty(); ++number)
    {
        std::size_t const end       = rest.find('\n');
        std::string_view const line = rest.substr(0, end);
        rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
        if (line.find_first_not_of(" \t\r") == std::string_view::npos) { continue; }
        detail::longbench_line const parsed(file, number, line);
        items.push_back(detail::read_longbench_line(parsed, task, number));
        auto const [at, is_new] = line_of.emplace(items.back().id, number);
        if (!is_new)
        {
            parsed.refuse_key(
                "_id", joined("is ", runner::quoted(items.back().id), " as in line ", std::to_string(at->second),
                           "; answers are told apart by it: delete one of the lines"));
        }
    }
    if (items.empty()) { throw file_error(file, "holds no sample; the file may be damaged: get it again"); }
    return items;
}

} // namespace runner
