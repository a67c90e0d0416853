/// \file refit.hpp: jobs of refit behind its rows: weights of stored tokens, and the changes of values by least squares that mend the rows' outputs.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/columns.hpp>
#include <mdkv/detail/quantiser.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>

namespace MDKV_NAMESPACE::detail
{

/// Makes weights in the rows' softmaxes of logits of the tokens that are refitted. An item is a row of a head.
template <backend B>
struct weigh_stored
{
    static constexpr char const* name = "refit_weights";
    static constexpr int threads      = 128;

    out_view<float, 3, B> logits;  // [H, R, n]
    in_view<float, 2, B> lse;      // [H, R]
    in_view<index_t, 1, B> fitted; // [H]
    index_t from;                  // number of the first token

    [[nodiscard]] index_t items() const noexcept { return logits.extent(0) * logits.extent(1); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        constexpr int lanes = Team::lanes;
        index_t const h     = item / logits.extent(1);
        index_t const r     = item % logits.extent(1);
        index_t const n     = fitted(h) - from < logits.extent(2) ? fitted(h) - from : logits.extent(2);
        float* const x      = logits.row(h, r);
        for (index_t i = t.rank() * lanes; i < n; i += t.size() * lanes)
        {
            float power[std::size_t{lanes}];
            for (int l = 0; l < lanes; ++l) { power[l] = i + l < n ? x[i + l] - lse(h, r) : -1000.0F; }
            powers_of_two(t, power, x + i); // logits have room for weights of 0
        }
    }
};

/// Solves (A A' + mu I) Z = E by elimination, in double. An item is a head.
template <backend B>
struct solve_weights
{
    static constexpr char const* name = "refit_solve";

    in_view<index_t, 1, B> fitted; // [H]
    float ridge;                   // mu over the mean diagonal of A'A
    in_view<float, 3, B> missing;  // [H, R, Dv]  E, and rows behind it
    out_view<double, 3, B> gram;   // [H, R, R]  A A', of which the upper triangle is read; overwritten
    out_view<double, 3, B> solved; // [H, R, Dv]  scratch
    out_view<float, 3, B> columns; // [H, Dv, R]  Z'

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        index_t const n   = gram.extent(1);
        index_t const out = solved.extent(2);
        auto const share  = share_rows(t, out);
        double trace      = 0;
        for (index_t r = 0; r < n; ++r) { trace += gram(h, r, r); }
        double const mu = fitted(h) == 0 ? 0.0 : double{ridge} * trace / static_cast<double>(fitted(h));
        t.sync();
        for (index_t r = t.rank(); r < n; r += t.size()) { gram(h, r, r) += mu; }
        for (index_t r = share.row; r < n; r += share.rows)
        {
            for (index_t d = share.column; d < out; d += t.size()) { solved(h, r, d) = double{missing(h, r, d)}; }
        }
        t.sync();
        for (index_t k = 0; k < n; ++k) // row k becomes that of L' times its pivot's root
        {
            double const* const top = gram.row(h, k);
            double const unit       = inverse(top[k], mu);
            auto const part         = share_rows(t, n - k);
            for (index_t i = k + 1 + part.row; i < n; i += part.rows)
            {
                double* const row = gram.row(h, i);
                double const by   = top[i] * unit;
                for (index_t j = i + part.column; j < n; j += t.size()) { row[j] -= by * top[j]; }
            }
            for (index_t i = k + 1 + share.row; i < n; i += share.rows)
            {
                double const by = top[i] * unit;
                for (index_t d = share.column; d < out; d += t.size()) { solved(h, i, d) -= by * solved(h, k, d); }
            }
            t.sync();
        }
        for (index_t k = n; k-- > 0;)
        {
            double const unit = inverse(gram(h, k, k), mu);
            for (index_t d = t.rank(); d < out; d += t.size())
            {
                double const z   = solved(h, k, d) * unit;
                solved(h, k, d)  = z;
                columns(h, d, k) = static_cast<float>(z);
            }
            t.sync();
            for (index_t i = share.row; i < k; i += share.rows)
            {
                double const by = gram(h, i, k);
                for (index_t d = share.column; d < out; d += t.size()) { solved(h, i, d) -= by * solved(h, k, d); }
            }
            t.sync();
        }
    }

private:
    [[nodiscard]] MDKV_HD static double inverse(double pivot, double mu)
    {
        double const used = pivot > mu ? pivot : mu;
        return used > 0 ? 1 / used : 0.0;
    }
};

/// Shortens the changes that are longer than `most` times the root mean square of the head's stored values. An item is a head.
template <backend B, element T>
struct bound_changes
{
    static constexpr char const* name = "refit_bound";

    in_view<T, 3, B> values;       // [H, S, Dv]  of stored tokens
    in_view<index_t, 1, B> fitted; // [H]
    float most;
    out_view<float, 3, B> changes; // [H, Dv, S]

    struct scratch
    {
        carver& cut;
        index_t dim;
        double* squares = cut.take<double>(dim); // [Dv]  sums over the tokens
    };

    [[nodiscard]] index_t scratch_bytes() const noexcept { return bytes_of<scratch>(values.extent(2)); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        index_t const n   = fitted(h);
        index_t const dim = values.extent(2);
        carver cut        = t.scratch();
        scratch const mine{cut, dim};
        for (index_t d = t.rank(); d < dim; d += t.size())
        {
            double sum = 0;
            for (index_t j = 0; j < n; ++j)
            {
                double const v = double{widen(load_at<T>(values.row(h, j) + d))};
                sum += v * v;
            }
            mine.squares[d] = sum;
        }
        t.sync();
        double limit = 0; // the largest square of a change
        for (index_t d = 0; d < dim; ++d) { limit += mine.squares[d]; }
        limit *= n > 0 ? double{most} * double{most} / static_cast<double>(n) : 0.0;
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
