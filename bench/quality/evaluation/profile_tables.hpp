/// \file profile_tables.hpp: measurements as tables in the paper's layouts: latency, memory, duality gap, allocation (arXiv 2603.20616, section 5 and appendix)
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "runner/terminal.hpp"
#include "profile_record.hpp"

namespace runner
{

namespace detail
{

/// Bytes as mebibytes.
[[nodiscard]] inline std::string mebibytes(std::int64_t bytes, int digits)
{
    return fixed(static_cast<double>(bytes) / (1024 * 1024), digits);
}

/// Short for numbers of any size.
[[nodiscard]] inline std::string scientific(double value)
{
    char text[32];
    std::snprintf(text, sizeof text, "%.2e", value);
    return text;
}

/// Values in the order in which they first occur.
template <class Get>
[[nodiscard]] auto distinct(std::vector<profile_record> const& records, Get const& get)
{
    std::vector<decltype(get(records.front()))> values;
    for (profile_record const& one : records)
    {
        if (std::find(values.begin(), values.end(), get(one)) == values.end()) { values.push_back(get(one)); }
    }
    return values;
}

[[nodiscard]] inline std::string system_of(profile_record const& one)
{
    return one.key.size == "whole" ? one.key.policy : one.key.policy + " at " + one.key.size;
}

[[nodiscard]] inline std::vector<std::int64_t> contexts_of(std::vector<profile_record> const& records)
{
    return distinct(records, [](profile_record const& one) { return one.key.context; });
}

/// Rows are systems, columns contexts, cells `cell(record)`.
template <class Cell>
[[nodiscard]] table by_context(std::vector<profile_record> const& records, std::string const& unit, Cell const& cell)
{
    auto const contexts = contexts_of(records);
    std::vector<std::string> headings{"system, " + unit};
    for (std::int64_t const context : contexts) { headings.push_back(std::to_string(context)); }
    table made{headings};
    for (std::string const& system : distinct(records, system_of))
    {
        std::vector<std::string> row{system};
        for (std::int64_t const context : contexts)
        {
            auto const found = std::find_if(records.begin(), records.end(),
                [&](profile_record const& one) { return one.key.context == context && system_of(one) == system; });
            row.push_back(found == records.end() ? "-" : cell(*found));
        }
        made.add(row);
    }
    return made;
}

/// What the layers add up to.
struct allocation_sums
{
    double loss = 0, gap = 0;
    std::vector<std::int64_t> tokens; // by rung
};

[[nodiscard]] inline allocation_sums sums_of(profile_record const& one)
{
    allocation_sums all;
    all.tokens.resize(one.rungs.size());
    for (layer_allocation const& layer : one.layers)
    {
        all.loss += layer.loss;
        all.gap += layer.gap;
        for (std::size_t r = 0; r < std::min(all.tokens.size(), layer.tokens.size()); ++r)
        {
            all.tokens[r] += layer.tokens[r];
        }
    }
    return all;
}

/// The value that a share of the sorted ones lies below, between two of them in proportion.
[[nodiscard]] inline double quantile(std::vector<double> values, double share)
{
    std::sort(values.begin(), values.end());
    double const place = share * static_cast<double>(values.size() - 1);
    auto const below   = static_cast<std::size_t>(place);
    auto const above   = std::min(below + 1, values.size() - 1);
    return std::lerp(values[below], values[above], place - static_cast<double>(below));
}

/// Adds a further measurement of the same to a sum of `count` of them, as a running mean.
inline void add_to_mean(profile_record const& more, double count, profile_record& mean)
{
    auto const add = [&](double value, double& to) { to += (value - to) / (count + 1); };
    add(more.prefill_s, mean.prefill_s);
    add(more.compress_s, mean.compress_s);
    add(more.attend_s, mean.attend_s);
    for (std::size_t i = 0; i < mean.step_s.size(); ++i) { add(more.step_s[i], mean.step_s[i]); }
    for (std::size_t l = 0; l < mean.layers.size(); ++l)
    {
        layer_allocation const& from = more.layers[l];
        layer_allocation& to         = mean.layers[l];
        add(from.multiplier, to.multiplier);
        add(from.loss, to.loss);
        add(from.gap, to.gap);
        for (std::size_t r = 0; r < to.tokens.size(); ++r) { to.tokens[r] += from.tokens[r]; }
        if (to.status == "optimal") { to.status = from.status; } // what is out of the ordinary is shown
    }
    if (more.working_bytes() > mean.working_bytes())
    {
        mean.peak_bytes  = more.peak_bytes;
        mean.model_bytes = more.model_bytes;
    }
    mean.resident_bytes = std::max(mean.resident_bytes, more.resident_bytes);
}

} // namespace detail

/// Measurements of the same on several stretches of text as one, in the order in which they first occur: means of times,
/// multipliers, losses and gaps; tokens added up; the highest peak and the largest cache.
[[nodiscard]] inline std::vector<profile_record> merged(std::vector<profile_record> const& records)
{
    std::vector<profile_record> all;
    std::vector<double> counts;
    for (profile_record const& one : records)
    {
        profile_key key = one.key;
        key.text.clear();
        key.sample       = 0;
        auto const found = std::find_if(all.begin(), all.end(), [&](auto const& other) { return other.key == key; });
        auto const place = static_cast<std::size_t>(found - all.begin());
        bool const alike = found != all.end() && found->step_s.size() == one.step_s.size()
                           && found->layers.size() == one.layers.size() && found->rungs == one.rungs;
        if (alike) { detail::add_to_mean(one, counts[place]++, all[place]); }
        else
        {
            all.push_back(one);
            all.back().key = key;
            counts.push_back(1);
        }
    }
    return all;
}

/// Everything about time and memory, one section a context.
[[nodiscard]] inline table efficiency_table(std::vector<profile_record> const& records)
{
    table made{{"policy", "size", "prefill s", "compress s", "decode ms/token", "attend ms/token", "peak MiB",
        "of it model MiB", "beside it MiB", "cache MiB", "of full %"}};
    for (std::int64_t const context : detail::contexts_of(records))
    {
        made.section(std::to_string(context) + " tokens");
        for (profile_record const& one : records)
        {
            if (one.key.context != context) { continue; }
            bool const fed     = !one.step_s.empty();
            double const steps = static_cast<double>(one.step_s.size());
            made.add({one.key.policy, one.key.size, fixed(one.prefill_s, 2), fixed(one.compress_s, 2),
                fed ? fixed(1000 * one.step(), 2) : "-", fed ? fixed(1000 * one.attend_s / steps, 2) : "-",
                detail::mebibytes(one.peak_bytes, 1), detail::mebibytes(one.model_bytes, 1),
                detail::mebibytes(one.working_bytes(), 1), detail::mebibytes(one.resident_bytes, 2),
                fixed(100.0 * static_cast<double>(one.resident_bytes) / static_cast<double>(one.full_bytes), 2)});
        }
    }
    return made;
}

/// Seconds until so many tokens are made; the paper's left figure of efficiency, one section a context.
[[nodiscard]] inline table latency_table(
    std::vector<profile_record> const& records, std::vector<std::int64_t> const& generated)
{
    std::vector<std::string> headings{"system, seconds until so many tokens"};
    for (std::int64_t const count : generated) { headings.push_back(std::to_string(count)); }
    table made{headings};
    for (std::int64_t const context : detail::contexts_of(records))
    {
        made.section(std::to_string(context) + " tokens");
        for (profile_record const& one : records)
        {
            if (one.key.context != context) { continue; }
            std::vector<std::string> row{detail::system_of(one)};
            for (std::int64_t const count : generated)
            {
                double const seconds = one.latency(count);
                row.push_back(seconds < 0 ? "-" : fixed(seconds, 2));
            }
            made.add(row);
        }
    }
    return made;
}

/// Peak memory against context length; the paper's right figure of efficiency.
[[nodiscard]] inline table peak_table(std::vector<profile_record> const& records)
{
    return detail::by_context(records, "peak MiB beside the model",
        [](profile_record const& one) { return detail::mebibytes(one.working_bytes(), 1); });
}

/// Bytes of the cache against context length.
[[nodiscard]] inline table cache_table(std::vector<profile_record> const& records)
{
    return detail::by_context(records, "MiB of the cache",
        [](profile_record const& one) { return detail::mebibytes(one.resident_bytes, 2); });
}

/// Duality gap against context length, summed over the layers; only caches that an allocation made.
[[nodiscard]] inline table gap_table(std::vector<profile_record> const& records)
{
    table made{{"system", "context", "primal loss", "gap upper bound", "relative gap %"}};
    for (profile_record const& one : records)
    {
        if (!one.mixed) { continue; }
        auto const sums = detail::sums_of(one);
        made.add({detail::system_of(one), std::to_string(one.key.context), detail::scientific(sums.loss),
            detail::scientific(sums.gap), fixed(sums.loss > 0 ? 100 * sums.gap / sums.loss : 0, 4)});
    }
    return made;
}

/// The same layer by layer: how multiplier and relative gap spread.
[[nodiscard]] inline table gap_layers_table(std::vector<profile_record> const& records)
{
    table made{{"metric", "min", "25th percentile", "median", "75th percentile", "max"}};
    for (profile_record const& one : records)
    {
        if (!one.mixed || one.layers.empty()) { continue; }
        made.section(detail::system_of(one) + ", " + std::to_string(one.key.context) + " tokens");
        std::vector<double> multipliers, gaps;
        for (layer_allocation const& layer : one.layers)
        {
            multipliers.push_back(layer.multiplier);
            gaps.push_back(100 * layer.relative_gap());
        }
        std::vector<std::string> first{"lambda, loss per byte"}, second{"relative gap %"};
        for (double const share : {0.0, 0.25, 0.5, 0.75, 1.0})
        {
            first.push_back(detail::scientific(detail::quantile(multipliers, share)));
            second.push_back(fixed(detail::quantile(gaps, share), 4));
        }
        made.add(first);
        made.add(second);
    }
    return made;
}

/// Share of the tokens at each rung, over all layers.
[[nodiscard]] inline table allocation_table(std::vector<profile_record> const& records)
{
    table made{{"system", "context", "% of the tokens at each rung", "layers without projections"}};
    for (profile_record const& one : records)
    {
        auto const sums    = detail::sums_of(one);
        std::int64_t total = 0;
        for (std::int64_t const count : sums.tokens) { total += count; }
        if (total == 0) { continue; }
        std::string shares;
        for (std::size_t r = 0; r < sums.tokens.size(); ++r)
        {
            double const share = 100.0 * static_cast<double>(sums.tokens[r]) / static_cast<double>(total);
            shares += (r == 0 ? "" : ", ") + one.rungs[r] + ": " + fixed(share, 2);
        }
        auto const bare = std::count_if(one.layers.begin(), one.layers.end(),
            [](layer_allocation const& layer) { return layer.status == "unprojected_only"; });
        made.add({detail::system_of(one), std::to_string(one.key.context), shares, std::to_string(bare)});
    }
    return made;
}

/// One line for every layer and rung.
[[nodiscard]] inline table allocation_layers_table(std::vector<profile_record> const& records)
{
    table made{{"policy", "size", "context", "layer", "rung", "tokens", "lambda", "loss", "gap", "status"}};
    for (profile_record const& one : records)
    {
        for (std::size_t l = 0; l < one.layers.size(); ++l)
        {
            layer_allocation const& layer = one.layers[l];
            for (std::size_t r = 0; r < std::min(layer.tokens.size(), one.rungs.size()); ++r)
            {
                made.add(
                    {one.key.policy, one.key.size, std::to_string(one.key.context), std::to_string(l), one.rungs[r],
                        std::to_string(layer.tokens[r]), one.mixed ? detail::scientific(layer.multiplier) : "",
                        one.mixed ? detail::scientific(layer.loss) : "", one.mixed ? detail::scientific(layer.gap) : "",
                        layer.status});
            }
        }
    }
    return made;
}

} // namespace runner
