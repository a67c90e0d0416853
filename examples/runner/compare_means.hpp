/// \file compare_means.hpp: what mdkv_run compare says of several texts together: means, spreads, ratios to one policy
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
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
    [[nodiscard]] double operator[](std::size_t text) const noexcept { return values_[text]; }

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

    [[nodiscard]] double median() const
    {
        if (values_.empty()) { return none; }
        auto sorted = values_;
        std::sort(sorted.begin(), sorted.end());
        std::size_t const half = size() / 2;
        return size() % 2 == 1 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
    }

    [[nodiscard]] double least() const { return values_.empty() ? none : *std::ranges::min_element(values_); }
    [[nodiscard]] double most() const { return values_.empty() ? none : *std::ranges::max_element(values_); }

    [[nodiscard]] nlohmann::json json() const
    {
        return {
            {"mean", mean()}, {"deviation", deviation()}, {"median", median()}, {"least", least()}, {"most", most()}};
    }

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

/// KL relative to another policy's at the same budget.
struct relative_kl
{
    figures by_text; // without the texts on which the other's KL is 0
    double of_means = std::numeric_limits<double>::quiet_NaN();
};

[[nodiscard]] inline relative_kl relative_to(mean_cell const& reference, mean_cell const& cell)
{
    relative_kl result;
    for (std::size_t text = 0; text < cell.kl.size(); ++text)
    {
        if (reference.kl[text] > 0) { result.by_text.add(cell.kl[text] / reference.kl[text]); }
    }
    if (reference.kl.mean() > 0) { result.of_means = cell.kl.mean() / reference.kl.mean(); }
    return result;
}

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

/// \param reference   a policy among the cells
[[nodiscard]] inline table table_of_ratios(
    std::span<mean_cell const> cells, std::size_t budgets, std::string const& reference)
{
    std::size_t first = 0;
    while (cells[first].policy != reference) { first += budgets; }
    return table_of("KL relative to " + reference + ", median (least to most; of means)", cells, budgets,
        [&](mean_cell const& cell) -> std::string {
            auto const column = static_cast<std::size_t>(&cell - cells.data()) % budgets;
            auto const found  = relative_to(cells[first + column], cell);
            if (found.by_text.size() == 0) { return "-"; }
            return fixed(found.by_text.median(), 2) + " (" + fixed(found.by_text.least(), 2) + " to "
                   + fixed(found.by_text.most(), 2) + "; " + fixed(found.of_means, 2) + ")";
        });
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
                + (first ? " is nearest to the full cache at " : " at ") + std::to_string(counts[p]) + " of " + std::to_string(budgets) + (first ? " budgets" : "");
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
