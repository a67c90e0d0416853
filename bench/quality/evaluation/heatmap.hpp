/// \file heatmap.hpp: needle scores in the terminal: depths down, lengths across
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "answer_log.hpp"
#include "sample.hpp"
#include "summary.hpp"

namespace runner
{

/// One policy at one size.
struct heatmap
{
    std::string title;
    std::map<std::pair<double, std::int64_t>, running_mean> cells; // by depth and length
    running_mean all;
};

/// The samples' `about` must have "length" and "depth".
[[nodiscard]] inline std::vector<heatmap> heatmaps_of(answer_log const& log, summary_request const& request)
{
    detail::summary_layout const layout{request};
    std::map<std::tuple<bool, std::int64_t, std::ptrdiff_t, std::string>, heatmap> maps;
    for (auto const& [key, given] : log.answers())
    {
        auto const score = given.scores.find(request.metric);
        if (layout.find(key) == nullptr || key.origin != request.origin || score == given.scores.end()) { continue; }
        auto const rank =
            std::find(request.policies.begin(), request.policies.end(), key.policy) - request.policies.begin();
        bool const sees = key.question == text_of(question_place::window);
        heatmap& map    = maps[{!sees, key.kv_size, rank, key.policy}];
        map.title = key.policy + (key.kv_size == 0 ? "" : ", KV size " + std::to_string(key.kv_size)) + ", question "
                    + (sees ? "in the window" : "behind");
        map.cells[{given.about.value("depth", 0.0), given.about.value("length", std::int64_t{0})}].add(score->second);
        map.all.add(score->second);
    }
    std::vector<heatmap> out;
    for (auto& [key, map] : maps) { out.push_back(std::move(map)); }
    return out;
}

namespace detail
{

/// Two columns: a colour from red over yellow to green, or tens of points, "*" for all of them.
[[nodiscard]] inline std::string heat_cell(std::optional<double> score, bool colours)
{
    if (!score) { return " ."; }
    double const x = std::clamp(*score / 100, 0.0, 1.0);
    if (!colours) { return x == 1 ? " *" : " " + std::to_string(static_cast<int>(x * 10)); }
    auto const red   = static_cast<int>(std::lround(220 * std::min(1.0, 2 - 2 * x)));
    auto const green = static_cast<int>(std::lround(190 * std::min(1.0, 2 * x)));
    return "\033[48;2;" + std::to_string(red) + ";" + std::to_string(green) + ";60m  \033[0m";
}

} // namespace detail

[[nodiscard]] inline std::string heatmap_text(heatmap const& map, bool colours)
{
    std::set<double> depths;
    std::set<std::int64_t> lengths;
    for (auto const& [place, cell] : map.cells)
    {
        depths.insert(place.first);
        lengths.insert(place.second);
    }
    std::string text = map.title + ": " + fixed(map.all.mean(), 2) + "\n";
    for (double const depth : depths)
    {
        char label[32];
        std::snprintf(label, sizeof label, "%5.4g %% |", depth);
        text += label;
        for (std::int64_t const length : lengths)
        {
            auto const found = map.cells.find({depth, length});
            text += detail::heat_cell(
                found == map.cells.end() ? std::nullopt : std::optional{found->second.mean()}, colours);
        }
        text += "|\n";
    }
    return text + "         " + std::to_string(*lengths.begin()) + " to " + std::to_string(*lengths.rbegin())
           + " tokens\n";
}

} // namespace runner
