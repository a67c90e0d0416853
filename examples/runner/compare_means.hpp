/// \file compare_means.hpp: what mdkv_run compare says of several texts together: means and spreads
#pragma once

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "terminal.hpp"

namespace runner
{

/// One figure on every text.
class figures
{
public:
    void add(double value) { values_.push_back(value); }

    [[nodiscard]] std::size_t size() const noexcept { return values_.size(); }

    [[nodiscard]] double mean() const noexcept
    {
        double sum = 0;
        for (double const value : values_) { sum += value; }
        return values_.empty() ? none : sum / static_cast<double>(size());
    }

    /// Of the texts as a sample of all texts; 0 for a single one.
    [[nodiscard]] double deviation() const noexcept
    {
        if (size() < 2) { return 0; }
        double const middle = mean();
        double sum          = 0;
        for (double const value : values_) { sum += (value - middle) * (value - middle); }
        return std::sqrt(sum / static_cast<double>(size() - 1));
    }

    [[nodiscard]] nlohmann::json json() const { return {{"mean", mean()}, {"deviation", deviation()}}; }

private:
    static constexpr double none = std::numeric_limits<double>::quiet_NaN(); // null in JSON

    std::vector<double> values_;
};

/// One policy at one budget, over the texts.
struct mean_cell
{
    std::string policy;
    std::string budget;            // "KV 128" or "5%"
    figures kl, top1, dnll, share; // share: resident bytes of the full cache's
};

/// Rows are policies, columns budgets.
/// \param cells     [policies, budgets]
/// \param show      the text of a cell
template <class Show>
[[nodiscard]] table table_of(
    std::string heading, std::span<mean_cell const> cells, std::size_t budgets, Show const& show)
{
    std::vector<std::string> headings{std::move(heading)};
    for (std::size_t b = 0; b < budgets; ++b) { headings.push_back(cells[b].budget); }
    table shown{headings};
    for (std::size_t first = 0; first < cells.size(); first += budgets)
    {
        std::vector<std::string> row{cells[first].policy};
        for (std::size_t b = 0; b < budgets; ++b) { row.push_back(show(cells[first + b])); }
        shown.add(row);
    }
    return shown;
}

[[nodiscard]] inline table table_of_means(std::span<mean_cell const> cells, std::size_t budgets)
{
    return table_of("KL nats, mean (standard deviation)", cells, budgets,
        [](mean_cell const& cell) { return fixed(cell.kl.mean(), 4) + " (" + fixed(cell.kl.deviation(), 4) + ")"; });
}

[[nodiscard]] inline table table_of_shares(std::span<mean_cell const> cells, std::size_t budgets)
{
    return table_of("resident, % of full, mean", cells, budgets,
        [](mean_cell const& cell) { return fixed(100 * cell.share.mean(), 2); });
}

/// The figures in words: the nearest policy at each budget, the others' distance, and at how many budgets each is nearest.
/// \param cells   [policies, budgets]
[[nodiscard]] inline std::string conclusion(std::span<mean_cell const> cells, std::size_t budgets)
{
    std::string text;
    std::vector<std::size_t> counts(cells.size() / budgets); // [policies] budgets at which it is nearest
    for (std::size_t b = 0; b < budgets && !cells.empty(); ++b)
    {
        auto const kl    = [&](std::size_t p) { return cells[p * budgets + b].kl.mean(); };
        std::size_t best = 0;
        for (std::size_t p = 1; p < counts.size(); ++p) { best = kl(p) < kl(best) ? p : best; }
        mean_cell const& nearest = cells[best * budgets + b];
        text += "At " + nearest.budget + " (" + fixed(100 * nearest.share.mean(), 1) + " % of the full cache's bytes) "
                + nearest.policy + " is nearest to the full cache: KL " + fixed(kl(best), 4)
                + ", the same likeliest token at " + fixed(100 * nearest.top1.mean(), 1) + " % of the tokens.\n";
        bool first = true;
        for (std::size_t p = 0; p < counts.size(); ++p)
        {
            counts[p] += kl(p) == kl(best) ? 1 : 0;
            if (p == best) { continue; }
            text += (first ? "  KL of " : ", of ") + cells[p * budgets].policy + (first ? " is " : " ");
            text += kl(best) > 0 ? fixed(kl(p) / kl(best), 1) + (first ? " times that" : "") : fixed(kl(p), 4);
            first = false;
        }
        text += first ? "" : ".\n";
    }
    if (counts.size() < 2) { return text; }
    std::size_t const texts = cells[0].kl.size();
    text += "Conclusion, " + (texts == 1 ? "on this one text" : "in the mean of " + std::to_string(texts) + " texts");
    bool first = true;
    for (std::size_t p = 0; p < counts.size(); ++p)
    {
        if (counts[p] == 0) { continue; }
        text += (first ? ": " : ", ") + cells[p * budgets].policy
                + (first ? " is nearest to the full cache at " : " at ") + std::to_string(counts[p]) + " of "
                + std::to_string(budgets) + (first ? " budgets" : "");
        first = false;
    }
    return text + ".\n";
}

[[nodiscard]] inline nlohmann::json json_of(mean_cell const& cell)
{
    return {{"policy", cell.policy}, {"budget", cell.budget}, {"kl", cell.kl.json()}, {"top1", cell.top1.json()},
        {"dnll", cell.dnll.json()}, {"share_of_full", cell.share.json()}};
}

} // namespace runner
