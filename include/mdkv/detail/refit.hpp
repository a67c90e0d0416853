/// \file refit.hpp: jobs of refit: the outputs of its rows over the whole and the packed cache, and the changes of values.
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/detail/columns.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/panel.hpp>
#include <mdkv/detail/quantiser.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>
#include <concepts>

namespace MDKV_NAMESPACE::detail
{

/// Softmaxes of rows over the keys that they saw so far: outputs are to be divided by the sums.
template <backend B>
struct row_states
{
    out_view<float, 3, B> outputs; // [H, R, Dv]
    out_view<float, 2, B> largest; // [H, R]  logit in base 2
    out_view<float, 2, B> sums;    // [H, R]  of 2^(logit - largest)
    out_view<float, 2, B> factors; // [H, R]  of the outputs before the last keys

    [[nodiscard]] row_states rows(index_t first, index_t count) const
    {
        return {slice<1>(outputs, first, count), slice<1>(largest, first, count), slice<1>(sums, first, count),
            slice<1>(factors, first, count)};
    }
};

/// Makes weights of rows' logits for more keys, and takes them into the rows' states. An item is a row of a head.
template <backend B>
struct soften_rows
{
    static constexpr char const* name = "refit_soften";
    static constexpr int threads      = 64;

    out_view<float, 3, B> logits; // [H, R, n]
    row_states<B> states;
    in_view<index_t, 1, B> counts; // [H]  keys of each head; or empty: all
    index_t from;                  // number of the first key
    index_t each = 1;              // row r of a block sees keys up to its own, (r % each) * step
    index_t step = 0;              // 0: all

    [[nodiscard]] index_t items() const noexcept { return logits.extent(0) * logits.extent(1); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        constexpr int lanes = Team::lanes;
        index_t const h     = item / logits.extent(1);
        index_t const r     = item % logits.extent(1);
        float* const x      = logits.row(h, r);
        auto const keys     = static_cast<int>(logits.extent(2));
        index_t const last  = step > 0 ? r % each * step + 1 : counts.empty() ? from + keys : counts(h);
        auto const seen     = static_cast<int>(last - from < keys ? last - from : keys);
        float const before  = states.largest(h, r);
        float part[std::size_t{lanes}];
        for (int l = 0; l < lanes; ++l) { part[l] = before; }
        for (int i = member(t) * lanes; i < seen; i += members(t) * lanes)
        {
            MDKV_FOR_LANES(l, lanes) { part[l] = i + l < seen ? larger(part[l], x[i + l]) : part[l]; }
        }
        for (float const most : part) { part[0] = larger(part[0], most); }
        float const top = t.largest(part[0]);
        float sum[std::size_t{lanes}]{};
        for (int i = member(t) * lanes; i < keys; i += members(t) * lanes) // logits have room for weights of 0
        {
            float power[std::size_t{lanes}];
            MDKV_FOR_LANES(l, lanes) { power[l] = i + l < seen ? x[i + l] - top : -1000.0F; }
            powers_of_two(t, power, x + i);
            MDKV_FOR_LANES(l, lanes) { sum[l] += x[i + l]; }
        }
        float own = 0;
        for (float const part_of_all : sum) { own += part_of_all; }
        float const total = t.sum(own);
        if (t.rank() != 0) { return; }
        float const by       = exp2f(before - top);
        states.factors(h, r) = by;
        states.sums(h, r)    = states.sums(h, r) * by + total;
        states.largest(h, r) = top;
    }
};

/// Finds what rows' outputs over the packed cache lack to those over the whole one. The packed cache's weights become the rows'
/// attention, and its largest logits log-sum-exps, so that soften_rows makes attention from then on. An item is a row of a head.
template <backend B>
struct miss_rows
{
    static constexpr char const* name = "refit_miss";
    static constexpr int threads      = 64;

    row_states<B> whole, packed;
    out_view<float, 3, B> missing; // [H, R, Dv]
    out_view<float, 3, B> weights; // [H, R, n]  those at hand

    [[nodiscard]] index_t items() const noexcept { return missing.extent(0) * missing.extent(1); }

    MDKV_HD void operator()(team auto const& t, index_t item) const
    {
        index_t const h    = item / missing.extent(1);
        index_t const r    = item % missing.extent(1);
        float const of_all = 1 / whole.sums(h, r);
        float const kept   = 1 / packed.sums(h, r);
        for (index_t d = t.rank(); d < missing.extent(2); d += t.size())
        {
            missing(h, r, d) = whole.outputs(h, r, d) * of_all - packed.outputs(h, r, d) * kept;
        }
        float* const weight = weights.row(h, r);
        for (index_t i = t.rank(); i < weights.extent(2); i += t.size()) { weight[i] *= kept; }
        if (t.rank() == 0) { packed.largest(h, r) += log2f(packed.sums(h, r)); }
    }
};

/// The factor, from 0 to 1, with which a head's changes suit the judging rows best. An item is a head.
template <backend B>
struct judge_changes
{
    static constexpr char const* name = "refit_judge";

    in_view<float, 3, B> missing;  // [H, rows, Dv]
    in_view<float, 3, B> mended;   // [H, rows, Dv]  outputs over the changes alone
    out_view<float, 1, B> factors; // [H]

    MDKV_HD void operator()(team auto const& t, index_t h) const
    {
        if (t.rank() != 0) { return; }
        double product = 0;
        double square  = 0;
        for (index_t r = 0; r < mended.extent(1); ++r)
        {
            for (index_t d = 0; d < mended.extent(2); ++d)
            {
                double const x{mended(h, r, d)};
                product += x * double{missing(h, r, d)};
                square += x * x;
            }
        }
        double const best = square > 0 ? product / square : 0.0; // NaN if a sum is not finite: nothing is changed then
        factors(h)        = static_cast<float>(best > 1 ? 1.0 : best > 0 ? best : 0.0);
    }
};

/// Changes the values of kept tokens. An item is a stored token of a head.
template <backend B, element T>
struct change_values
{
    static constexpr char const* name = "refit_values";
    static constexpr int threads      = 64;

    in_view<float, 3, B> changes;          // [H, Dv, S]
    in_view<float, 1, B> factors;          // [H]
    in_view<index_t, 1, B> fitted;         // [H]
    in_view<std::int32_t, 2, B> positions; // [H, N]  by rung
    in_view<index_t, 2, B> first;          // [H, rungs + 1]
    index_t kept;                          // the first rung that keeps tokens
    float most;                            // longest change, in units of its value's length
    out_view<T, 3, B> values;              // [H, N, Dv]

    [[nodiscard]] index_t items() const noexcept { return changes.extent(0) * changes.extent(2); }

    MDKV_HD void operator()(team auto const& t, index_t item) const
    {
        index_t const h = item / changes.extent(2);
        index_t const j = item % changes.extent(2);
        if (j >= fitted(h) || !(factors(h) > 0)) { return; }
        index_t const token = positions(h, first(h, kept) + j);
        double change = 0, value = 0; // squares
        for (index_t d = t.rank(); d < changes.extent(1); d += t.size())
        {
            double const v{widen(load_at<T>(values.row(h, token) + d))};
            change += double{changes(h, d, j)} * double{changes(h, d, j)};
            value += v * v;
        }
        double const longest = double{most} * std::sqrt(t.sum(value) / t.sum(change)); // not finite if the change is 0
        float const by       = longest < double{factors(h)} ? static_cast<float>(longest) : factors(h);
        for (index_t d = t.rank(); d < changes.extent(1); d += t.size())
        {
            float const v       = widen(load_at<T>(values.row(h, token) + d)) + by * changes(h, d, j);
            values(h, token, d) = narrow<T>(std::same_as<T, half> ? within_half(v) : v);
        }
    }
};

/// Number of tokens of each head whose values are refitted: none if nothing of the head was dropped or coded. An item is a head.
template <backend B>
struct count_fitted
{
    static constexpr char const* name = "refit_count";

    in_view<index_t, 2, B> first; // [H, rungs + 1]
    index_t kept;                 // the first rung that keeps tokens
    index_t full;                 // the full rung
    out_view<index_t, 1, B> fitted;

    MDKV_HD void operator()(team auto const& t, index_t h) const
    {
        if (t.rank() != 0) { return; }
        index_t const rungs = first.extent(1) - 1;
        bool const whole    = full < rungs && first(h, full + 1) - first(h, full) == first(h, rungs);
        fitted(h)           = whole ? 0 : first(h, rungs) - first(h, kept);
    }
};

} // namespace MDKV_NAMESPACE::detail
