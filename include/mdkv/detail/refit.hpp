/// \file refit.hpp: jobs of refit behind its rows: the tokens that are fitted, and bounds, judgement and use of the changes of their values.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/quantiser.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>

namespace MDKV_NAMESPACE::detail
{

/// Shortens the changes that are longer than `most` times the root mean square of the head's stored values. An item is a head.
template <backend B, element T>
struct bound_changes
{
    static constexpr char const* name = "refit_bound";

    in_view<T, 3, B> values;       // [H, S, Dv]  of stored tokens
    in_view<index_t, 1, B> fitted; // [H]
    float most;
    out_view<float, 3, B> changes; // [H, Dv, S]

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        index_t const n   = fitted(h);
        index_t const dim = values.extent(2);
        double sum        = 0;
        for (index_t d = t.rank(); d < dim; d += t.size())
        {
            for (index_t j = 0; j < n; ++j)
            {
                double const v = double{widen(load_at<T>(values.row(h, j) + d))};
                sum += v * v;
            }
        }
        double const squares = t.sum(sum);
        double const limit =
            n > 0 ? double{most} * double{most} / static_cast<double>(n) * squares : 0.0; // for a square
        for (index_t j = t.rank(); j < n; j += t.size())
        {
            double square = 0;
            for (index_t d = 0; d < dim; ++d) { square += double{changes(h, d, j)} * double{changes(h, d, j)}; }
            if (!(square > limit)) { continue; }
            auto const part = static_cast<float>(std::sqrt(limit / square));
            for (index_t d = 0; d < dim; ++d) { changes(h, d, j) *= part; }
        }
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

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
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
    in_view<T, 3, B> values;               // [H, N, Dv]
    out_view<T, 3, B> changed;             // [H, N, Dv]

    [[nodiscard]] index_t items() const noexcept { return changes.extent(0) * changes.extent(2); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const h = item / changes.extent(2);
        index_t const j = item % changes.extent(2);
        if (j >= fitted(h) || !(factors(h) > 0)) { return; } // `changed` has the values
        index_t const token = positions(h, first(h, kept) + j);
        for (index_t d = t.rank(); d < changes.extent(1); d += t.size())
        {
            float const v        = widen(load_at<T>(values.row(h, token) + d)) + factors(h) * changes(h, d, j);
            changed(h, token, d) = narrow<T>(std::same_as<T, half> ? within_half(v) : v);
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

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        if (t.rank() != 0) { return; }
        index_t const rungs = first.extent(1) - 1;
        bool const whole    = full < rungs && first(h, full + 1) - first(h, full) == first(h, rungs);
        fitted(h)           = whole ? 0 : first(h, rungs) - first(h, kept);
    }
};

} // namespace MDKV_NAMESPACE::detail
