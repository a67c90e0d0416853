/// \file summary.hpp: means of an evaluation's answers, in tables laid out like the paper's: systems down, tasks across
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "runner/terminal.hpp"
#include "answer_log.hpp"
#include "sample.hpp"

namespace runner
{

/// Which answers are summed up, and how the tables are cut.
struct summary_request
{
    std::span<sample const> samples;
    answer_origin origin{};
    std::string metric; // of the answers' scores
    std::function<std::string(sample const&)> column = [](sample const& one) { return one.task; };
    std::function<std::string(sample const&)> group  = [](sample const&) { return std::string{}; }; // a table each
    std::vector<std::string> policies{}; // labels in the order of the rows; others that were answered follow
    double least_full = 25;              // a column on which the full cache scores less is left out of averages
};

/// Adds up to a mean and its standard error.
class running_mean
{
public:
    void add(double value)
    {
        ++count_;
        double const change = value - mean_; // Welford
        mean_ += change / static_cast<double>(count_);
        squares_ += change * (value - mean_);
    }
    [[nodiscard]] std::int64_t count() const noexcept { return count_; }
    [[nodiscard]] double mean() const noexcept { return mean_; }
    /// Nothing is known of it from one value.
    [[nodiscard]] std::optional<double> standard_error() const noexcept
    {
        if (count_ < 2) { return std::nullopt; }
        auto const n = static_cast<double>(count_);
        return std::sqrt(squares_ / (n - 1) / n);
    }

private:
    std::int64_t count_ = 0;
    double mean_ = 0, squares_ = 0;
};

struct summary_row
{
    std::string policy;
    std::int64_t kv_size = 0;        // 0 for the whole cache
    std::vector<running_mean> cells; // [columns]
    running_mean resident_percent;   // of the full cache's bytes
    std::optional<double> average;   // over the columns that count; none where an answer is missing
};

struct summary_table
{
    std::string group;
    std::string question; // text_of(question_place)
    std::string metric;
    std::vector<std::string> columns;
    std::vector<std::int64_t> samples; // [columns]
    std::vector<bool> left_out{};      // [columns]: the full cache fails
    bool full_known = false;           // otherwise nothing is left out
    std::vector<summary_row> rows{};
};

namespace detail
{

[[nodiscard]] inline std::size_t place_of(std::vector<std::string>& names, std::string const& name)
{
    auto const at = static_cast<std::size_t>(std::find(names.begin(), names.end(), name) - names.begin());
    if (at == names.size()) { names.push_back(name); }
    return at;
}

/// The columns of every group, in the order in which samples come.
class summary_layout
{
public:
    struct place
    {
        std::size_t group, column;
    };

    explicit summary_layout(summary_request const& request)
    {
        for (sample const& one : request.samples)
        {
            std::size_t const group = place_of(groups, request.group(one));
            columns.resize(groups.size());
            samples.resize(groups.size());
            std::size_t const column = place_of(columns[group], request.column(one));
            samples[group].resize(columns[group].size());
            if (places_.emplace(std::tuple{one.task, one.id, sample_mark(one)}, place{group, column}).second)
            {
                ++samples[group][column];
            }
        }
    }

    [[nodiscard]] place const* find(answer_key const& key) const
    {
        auto const found = places_.find({key.task, key.id, key.prompt});
        return found == places_.end() ? nullptr : &found->second;
    }

    std::vector<std::string> groups;
    std::vector<std::vector<std::string>> columns;  // [groups] of names
    std::vector<std::vector<std::int64_t>> samples; // [groups][columns]

private:
    std::map<std::tuple<std::string, std::string, std::string>, place> places_;
};

/// Which columns count and the rows' averages over them.
inline void average_rows(summary_table& shown, double least_full)
{
    shown.left_out.assign(shown.columns.size(), false);
    auto const full =
        std::find_if(shown.rows.begin(), shown.rows.end(), [](auto const& row) { return row.kv_size == 0; });
    shown.full_known = full != shown.rows.end();
    for (std::size_t c = 0; shown.full_known && c < shown.columns.size(); ++c)
    {
        shown.left_out[c] = full->cells[c].count() > 0 && full->cells[c].mean() < least_full;
    }
    for (summary_row& row : shown.rows)
    {
        running_mean mean;
        bool whole = true;
        for (std::size_t c = 0; c < shown.columns.size(); ++c)
        {
            if (shown.left_out[c]) { continue; }
            whole = whole && row.cells[c].count() == shown.samples[c];
            mean.add(row.cells[c].mean());
        }
        if (whole && mean.count() > 0) { row.average = mean.mean(); }
    }
}

} // namespace detail

/// A table for every group and question place that has answers; those of policies that an earlier run has answered
/// join it. Rows: the full cache, then by size, then in the order of the policies asked for.
[[nodiscard]] inline std::vector<summary_table> summarise(answer_log const& log, summary_request const& request)
{
    detail::summary_layout const layout{request};
    auto const rank = [&](std::string const& policy) {
        return std::find(request.policies.begin(), request.policies.end(), policy) - request.policies.begin();
    };
    using row_key = std::tuple<std::int64_t, std::ptrdiff_t, std::string>; // size, place among the policies, label
    std::map<std::tuple<std::size_t, int, row_key>, summary_row> rows;     // by group and question place
    for (auto const& [key, given] : log.answers())
    {
        auto const* const place = layout.find(key);
        auto const score        = given.scores.find(request.metric);
        if (place == nullptr || key.origin != request.origin || score == given.scores.end()) { continue; }
        int const behind = key.question == text_of(question_place::window) ? 0 : 1;
        summary_row& row = rows[{place->group, behind, row_key{key.kv_size, rank(key.policy), key.policy}}];
        row.policy       = key.policy;
        row.kv_size      = key.kv_size;
        row.cells.resize(layout.columns[place->group].size());
        row.cells[place->column].add(score->second);
        row.resident_percent.add(given.full_bytes > 0 ? 100 * static_cast<double>(given.resident_bytes)
                                                            / static_cast<double>(given.full_bytes)
                                                      : 100.0);
    }
    std::vector<summary_table> tables;
    std::optional<std::pair<std::size_t, int>> last;
    for (auto& [key, row] : rows)
    {
        auto const [group, behind, order] = key;
        if (last != std::pair{group, behind})
        {
            last = {group, behind};
            tables.push_back(
                {layout.groups[group], text_of(behind == 0 ? question_place::window : question_place::after),
                    request.metric, layout.columns[group], layout.samples[group]});
        }
        tables.back().rows.push_back(std::move(row));
    }
    for (summary_table& shown : tables) { detail::average_rows(shown, request.least_full); }
    return tables;
}

// --- what people and programs read ------------------------------------------------------------------------------------

namespace detail
{

/// "*" behind what not all samples were answered for.
[[nodiscard]] inline std::string cell_text(running_mean const& cell, std::int64_t samples)
{
    if (cell.count() == 0) { return "-"; }
    return fixed(cell.mean(), 2) + (cell.count() < samples ? "*" : "");
}

/// The cells behind a row's policy and size.
inline void add_cells(summary_table const& shown, summary_row const& row, std::vector<std::string>& cells)
{
    for (std::size_t c = 0; c < row.cells.size(); ++c) { cells.push_back(cell_text(row.cells[c], shown.samples[c])); }
    if (row.cells.size() > 1) { cells.push_back(row.average ? fixed(*row.average, 2) : "-"); }
    cells.push_back(fixed(row.resident_percent.mean(), 2));
}

} // namespace detail

/// The paper's layout: the full cache on top, then a block for every size.
[[nodiscard]] inline table table_of(summary_table const& shown)
{
    std::vector<std::string> headings{"policy"};
    for (std::size_t c = 0; c < shown.columns.size(); ++c)
    {
        headings.push_back(shown.left_out[c] ? "(" + shown.columns[c] + ")" : shown.columns[c]);
    }
    if (shown.columns.size() > 1) { headings.push_back("average"); }
    headings.push_back("bytes %");
    table out{std::move(headings)};
    std::int64_t block = 0;
    for (summary_row const& row : shown.rows)
    {
        if (row.kv_size != block) { out.section("KV size " + std::to_string(row.kv_size)); }
        block = row.kv_size;
        std::vector<std::string> cells{row.policy};
        detail::add_cells(shown, row, cells);
        out.add(std::move(cells));
    }
    return out;
}

[[nodiscard]] inline std::string title_of(summary_table const& shown, std::string const& command)
{
    return command + (shown.group.empty() ? "" : ", " + shown.group) + ": " + shown.metric + ", question "
           + (shown.question == text_of(question_place::window) ? "in the window" : "behind the compressed context");
}

/// What must be said below a table, a line each.
[[nodiscard]] inline std::vector<std::string> notes_of(summary_table const& shown, double least_full)
{
    std::vector<std::string> notes;
    std::string failed;
    bool some_left = false, incomplete = false;
    for (std::size_t c = 0; c < shown.columns.size(); ++c)
    {
        if (!shown.left_out[c]) { some_left = true; }
        else
        {
            failed += (failed.empty() ? "" : ", ") + shown.columns[c] + " " + fixed(shown.rows[0].cells[c].mean(), 2);
        }
        for (summary_row const& row : shown.rows) { incomplete |= row.cells[c].count() < shown.samples[c]; }
    }
    if (!failed.empty())
    {
        notes.push_back("In parentheses and left out of averages, since the full cache itself is below "
                        + fixed(least_full, 0) + ": " + failed + ".");
    }
    if (!some_left) { notes.push_back("The full cache fails on every column: this table ranks nothing."); }
    if (!shown.full_known) { notes.push_back("The full cache was not run: nothing is left out of averages."); }
    if (incomplete) { notes.push_back("*, -: some or all answers are missing; such rows have no average."); }
    return notes;
}

/// All tables below one another, the columns of any of them in one line of headings.
[[nodiscard]] inline std::string csv_of(std::vector<summary_table> const& tables)
{
    std::vector<std::string> columns;
    for (summary_table const& shown : tables)
    {
        for (std::string const& name : shown.columns) { static_cast<void>(detail::place_of(columns, name)); }
    }
    std::vector<std::string> headings{"group", "question", "metric", "policy", "kv_size"};
    headings.insert(headings.end(), columns.begin(), columns.end());
    headings.insert(headings.end(), {"average", "bytes_percent"});
    table out{headings};
    for (summary_table const& shown : tables)
    {
        for (summary_row const& row : shown.rows)
        {
            std::vector<std::string> cells{shown.group, shown.question, shown.metric, row.policy,
                row.kv_size == 0 ? "" : std::to_string(row.kv_size)};
            cells.resize(headings.size());
            for (std::size_t c = 0; c < shown.columns.size(); ++c)
            {
                if (row.cells[c].count() == 0) { continue; }
                cells[5 + detail::place_of(columns, shown.columns[c])] = fixed(row.cells[c].mean(), 4);
            }
            cells[headings.size() - 2] = row.average ? fixed(*row.average, 4) : "";
            cells[headings.size() - 1] = fixed(row.resident_percent.mean(), 4);
            out.add(std::move(cells));
        }
    }
    return out.csv();
}

[[nodiscard]] inline nlohmann::json summary_json(summary_table const& shown)
{
    auto const number   = [](std::optional<double> value) { return value ? nlohmann::json(*value) : nlohmann::json(); };
    nlohmann::json rows = nlohmann::json::array();
    for (summary_row const& row : shown.rows)
    {
        nlohmann::json cells = nlohmann::json::array();
        for (std::size_t c = 0; c < row.cells.size(); ++c)
        {
            running_mean const& cell = row.cells[c];
            cells.push_back({{"column", shown.columns[c]}, {"count", cell.count()},
                {"mean", number(cell.count() > 0 ? std::optional{cell.mean()} : std::nullopt)},
                {"standard_error", number(cell.standard_error())}});
        }
        rows.push_back({{"policy", row.policy}, {"kv_size", row.kv_size}, {"average", number(row.average)},
            {"resident_percent", row.resident_percent.mean()}, {"cells", std::move(cells)}});
    }
    nlohmann::json left_out = nlohmann::json::array();
    for (std::size_t c = 0; c < shown.columns.size(); ++c)
    {
        if (shown.left_out[c]) { left_out.push_back(shown.columns[c]); }
    }
    return {{"group", shown.group}, {"question", shown.question}, {"metric", shown.metric}, {"columns", shown.columns},
        {"samples", shown.samples}, {"left_out", std::move(left_out)}, {"rows", std::move(rows)}};
}

} // namespace runner
