/// \file refit.hpp: jobs of refit behind its rows: weights of stored tokens, and the changes of values by least squares that mend the rows' outputs.
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/columns.hpp>
#include <mdkv/detail/quantiser.hpp>
#include <mdkv/detail/refit_rows.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>

namespace MDKV_NAMESPACE::detail
{

/// Weights of n stored tokens, or of a strip of them, in the softmaxes of R fitting rows: X, whose rows are the tokens if n is at
/// most R, otherwise the fitting rows; and beside it X' in tiles of sixteen columns.
template <space S>
struct weight_matrix
{
    static constexpr index_t strip = 2048; ///< tokens at a time, and the most that can be X's rows

    view<float, 2, S> rows;     // [H, ...]  X, its rows padded to a multiple of sixteen
    view<float, 2, S> columns;  // [H, ...]  [X's rows / 16, length, 16]
    view<index_t, 1, S> fitted; // [H]  n
    index_t all;                // R
    index_t from = 0;           // first token of the strip

    [[nodiscard]] static constexpr index_t padded(index_t n) noexcept
    {
        return (n + tile_tokens - 1) / tile_tokens * tile_tokens;
    }
    [[nodiscard]] MDKV_HD index_t tokens(index_t h) const
    {
        index_t const left = fitted(h) - from;
        return left < 0 ? 0 : left < strip ? left : strip;
    }
    [[nodiscard]] MDKV_HD bool by_token(index_t h) const { return fitted(h) <= all && fitted(h) <= strip; }
    [[nodiscard]] MDKV_HD index_t size(index_t h) const { return by_token(h) ? fitted(h) : all; }
    [[nodiscard]] MDKV_HD index_t length(index_t h) const { return by_token(h) ? all : tokens(h); }
    [[nodiscard]] MDKV_HD index_t stride(index_t h) const
    {
        return (length(h) + tile_tokens - 1) / tile_tokens * tile_tokens;
    }
    [[nodiscard]] MDKV_HD float* row(index_t h, index_t i) const { return rows.row(h) + i * stride(h); }
    /// Element [i, j]; those of rows i + 1, i + 2, ... of its tile follow.
    [[nodiscard]] MDKV_HD float* column(index_t h, index_t i, index_t j) const
    {
        return columns.row(h) + (i / tile_tokens * stride(h) + j) * tile_tokens + i % tile_tokens;
    }
};

/// Finds the weights of a strip's tokens. An item is a tile of tokens of a head.
template <backend B, element T>
struct weigh_stored
{
    static constexpr char const* name = "refit_weights";
    static constexpr int threads      = 128;
    static constexpr int tile         = tile_tokens;
    static constexpr int sums         = 8;

    in_view<T, 3, B> keys;        // [H, S, D]  of stored tokens
    in_view<float, 3, B> queries; // [H, R, D]
    in_view<float, 2, B> lse;     // [H, R]
    weight_matrix<B::memory_space> weights;

    struct scratch
    {
        carver& cut;
        index_t dim;
        float* columns = cut.take<float>(dim * tile); // [D, 16]
    };

    [[nodiscard]] MDKV_HD index_t tiles() const noexcept
    {
        index_t const left = keys.extent(1) - weights.from;
        return ((left < weights.strip ? left : weights.strip) + tile - 1) / tile;
    }
    [[nodiscard]] index_t items() const noexcept { return keys.extent(0) * tiles(); }
    [[nodiscard]] index_t scratch_bytes() const noexcept { return bytes_of<scratch>(queries.extent(2)); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        constexpr int lanes = Team::lanes;
        constexpr int parts = tile / lanes;
        index_t const h     = item / tiles();
        index_t const first = item % tiles() * tile; // counted in the strip
        index_t const left  = weights.tokens(h) - first;
        if (left <= 0) { return; }
        auto const count    = static_cast<int>(left < tile ? left : tile);
        auto const dim      = static_cast<int>(queries.extent(2));
        auto const all      = static_cast<int>(weights.all);
        bool const by_token = weights.by_token(h);
        carver cut          = t.scratch();
        scratch const mine{cut, dim};
        t.sync();
        for (int i = member(t); i < dim * tile; i += members(t)) { mine.columns[i] = 0; }
        t.sync();
        widen_columns(
            t, count, dim, [&](int i) { return keys.row(h, weights.from + first + i); }, mine.columns);
        t.sync();
        for (int i = member(t); i < (all + sums - 1) / sums * parts; i += members(t))
        {
            int const r      = i / parts * sums;
            int const column = i % parts * lanes;
            float const* row[sums]{};
            for (int k = 0; k < sums; ++k) { row[k] = queries.row(h, r + k < all ? r + k : all - 1); }
            float product[sums][std::size_t{lanes}];
            column_products(t, row, mine.columns + column, dim, product);
            for (int k = 0; k < sums && r + k < all; ++k)
            {
                float power[std::size_t{lanes}];
                for (int l = 0; l < lanes; ++l)
                {
                    power[l] = column + l < count ? product[k][l] - lse(h, r + k) : -1000.0F;
                }
                float weight[std::size_t{lanes}];
                powers_of_two(t, power, weight);
                for (int l = 0; l < lanes; ++l)
                {
                    index_t const j          = first + column + l;
                    index_t const a          = by_token ? j : r + k;
                    index_t const b          = by_token ? r + k : j;
                    *weights.column(h, a, b) = weight[l];
                    if (column + l < count) { weights.row(h, a)[b] = weight[l]; }
                }
            }
        }
    }
};

/// X X' summed over the strips, and what it is to be solved for: X E if X's rows are tokens, otherwise E. An item is a panel of X's rows of a head.
template <backend B>
struct multiply_weights
{
    static constexpr char const* name = "refit_gram";
    static constexpr int threads      = 128;
    static constexpr int tile         = tile_tokens;
    static constexpr int sums         = 8;
    static constexpr int piece        = 512; ///< products that are summed in float

    weight_matrix<B::memory_space> weights;
    in_view<float, 4, B> missing;  // [H, Dv / 16, R, 16]
    out_view<double, 3, B> gram;   // [H, R, R]  its upper triangle, and below it to the end of a tile
    out_view<double, 3, B> solved; // [H, R, Dv]

    [[nodiscard]] MDKV_HD index_t panels() const noexcept { return (gram.extent(1) + sums - 1) / sums; }
    [[nodiscard]] index_t items() const noexcept { return gram.extent(0) * panels(); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const h  = item / panels();
        auto const first = static_cast<int>(item % panels() * sums);
        auto const size  = static_cast<int>(weights.size(h));
        if (first >= size || weights.length(h) == 0 || (weights.by_token(h) && weights.from > 0)) { return; }
        bool const more = weights.from > 0;
        int const last  = first + sums < size ? first + sums : size;
        multiply(
            t, h, first, last, [&](int column, int at) { return weights.column(h, column, at); },
            [&](int i, int column, double x) { gram(h, column, i) = more ? gram(h, column, i) + x : x; });
        if (weights.by_token(h))
        {
            multiply(
                t, h, first, static_cast<int>(solved.extent(2)),
                [&](int column, int at) { return missing.row(h, column / tile, at) + column % tile; },
                [&](int i, int column, double x) { solved(h, i, column) = x; });
            return;
        }
        for (int i = member(t); !more && i < sums * static_cast<int>(solved.extent(2)); i += members(t))
        {
            int const r = first + i % sums;
            int const d = i / sums;
            if (r < size) { solved(h, r, d) = double{missing(h, d / tile, r, d % tile)}; }
        }
    }

private:
    template <team Team, class Column, class Take>
    MDKV_HD void multiply(
        Team const& t, index_t h, int first, int columns, Column const& column_at, Take const& take) const
    {
        constexpr int lanes = Team::lanes;
        constexpr int parts = tile / lanes;
        auto const size     = static_cast<int>(weights.size(h));
        auto const length   = static_cast<int>(weights.length(h));
        for (int i = member(t); i < (columns + tile - 1) / tile * parts; i += members(t))
        {
            int const column = i * lanes;
            if (column >= columns) { continue; } // the tile's others were not written
            double total[sums][std::size_t{lanes}]{};
            for (int at = 0; at < length; at += piece)
            {
                float const* row[sums]{};
                for (int k = 0; k < sums; ++k) { row[k] = weights.row(h, first + k < size ? first + k : first) + at; }
                float product[sums][std::size_t{lanes}];
                column_products(t, row, column_at(column, at), length - at < piece ? length - at : piece, product);
                for (int k = 0; k < sums; ++k)
                {
                    for (int l = 0; l < lanes; ++l) { total[k][l] += double{product[k][l]}; }
                }
            }
            for (int k = 0; k < sums && first + k < size; ++k)
            {
                for (int l = 0; l < lanes && column + l < columns; ++l) { take(first + k, column + l, total[k][l]); }
            }
        }
    }
};

/// Solves (X X' + mu I) Z = B in place, by elimination. An item is a head.
template <backend B>
struct solve_weights
{
    static constexpr char const* name = "refit_solve";

    weight_matrix<B::memory_space> weights;
    float ridge;                   // mu over the mean diagonal of A'A
    out_view<double, 3, B> gram;   // [H, R, R]  overwritten
    out_view<double, 3, B> solved; // [H, R, Dv]
    out_view<float, 3, B> columns; // [H, Dv, R]  Z'

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        index_t const n   = weights.size(h);
        index_t const out = solved.extent(2);
        double trace      = 0;
        for (index_t r = 0; r < n; ++r) { trace += gram(h, r, r); }
        double const mu = n == 0 ? 0.0 : double{ridge} * trace / static_cast<double>(weights.fitted(h));
        t.sync();
        for (index_t r = t.rank(); r < n; r += t.size()) { gram(h, r, r) += mu; }
        auto const share = share_rows(t, out);
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

/// The changes of the values of a strip's tokens, X'Z or Z, and zeros for other stored tokens. An item is a tile of tokens of a
/// head.
template <backend B>
struct find_changes
{
    static constexpr char const* name = "refit_changes";
    static constexpr int threads      = 128;
    static constexpr int tile         = tile_tokens;
    static constexpr int sums         = 8;

    weight_matrix<B::memory_space> weights;
    in_view<float, 3, B> solved;   // [H, Dv, R]
    out_view<float, 3, B> changes; // [H, S, Dv]

    struct scratch
    {
        carver& cut;
        index_t rows;
        float* columns = cut.take<float>(rows * tile); // [R, 16]
    };

    [[nodiscard]] MDKV_HD index_t tiles() const noexcept
    {
        index_t const left = changes.extent(1) - weights.from;
        return ((left < weights.strip ? left : weights.strip) + tile - 1) / tile;
    }
    [[nodiscard]] index_t items() const noexcept { return changes.extent(0) * tiles(); }
    [[nodiscard]] index_t scratch_bytes() const noexcept { return bytes_of<scratch>(solved.extent(2)); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        constexpr int lanes = Team::lanes;
        constexpr int parts = tile / lanes;
        index_t const h     = item / tiles();
        index_t const at    = item % tiles() * tile; // counted in the strip
        index_t const left  = weights.tokens(h) - at;
        auto const count    = static_cast<int>(left < 0 ? 0 : left < tile ? left : tile);
        auto const rows     = static_cast<int>(solved.extent(2));
        auto const out      = static_cast<int>(changes.extent(2));
        index_t const to    = weights.from + at;
        auto const here     = static_cast<int>(changes.extent(1) - to < tile ? changes.extent(1) - to : tile);
        bool const direct   = weights.by_token(h);
        for (int i = member(t); i < here * out; i += members(t))
        {
            bool const there                  = direct && i / out < count;
            changes(h, to + i / out, i % out) = there ? solved(h, i % out, to + i / out) : 0.0F;
        }
        if (direct || count == 0) { return; }
        carver cut = t.scratch();
        scratch const mine{cut, rows};
        t.sync();
        for (int i = member(t); i < rows * tile; i += members(t))
        {
            mine.columns[i] = i % tile < count ? weights.row(h, i / tile)[at + i % tile] : 0.0F;
        }
        t.sync();
        for (int i = member(t); i < (out + sums - 1) / sums * parts; i += members(t))
        {
            int const d      = i / parts * sums;
            int const column = i % parts * lanes;
            float const* row[sums]{};
            for (int k = 0; k < sums; ++k) { row[k] = solved.row(h, d + k < out ? d + k : d); }
            float product[sums][std::size_t{lanes}];
            column_products(t, row, mine.columns + column, rows, product);
            for (int k = 0; k < sums && d + k < out; ++k)
            {
                for (int l = 0; l < lanes && column + l < count; ++l)
                {
                    changes(h, to + column + l, d + k) = product[k][l];
                }
            }
        }
    }
};

/// Shortens the changes that are longer than `most` times the root mean square of the head's stored values. An item is a head.
template <backend B, element T>
struct bound_changes
{
    static constexpr char const* name = "refit_bound";
    static constexpr int threads      = 64;

    in_view<T, 3, B> values;       // [H, S, Dv]  of stored tokens
    in_view<index_t, 1, B> fitted; // [H]
    float most;
    out_view<float, 3, B> changes; // [H, S, Dv]

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
        t.sync();
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
            for (index_t d = 0; d < dim; ++d) { square += double{changes(h, j, d)} * double{changes(h, j, d)}; }
            if (!(square > limit)) { continue; }
            auto const part = static_cast<float>(std::sqrt(limit / square));
            for (index_t d = 0; d < dim; ++d) { changes(h, j, d) *= part; }
        }
    }
};

/// The factor, from 0 to 1, with which a head's changes suit the judging rows best. An item is a head.
template <backend B>
struct judge_changes
{
    static constexpr char const* name = "refit_judge";

    in_view<float, 4, B> missing;  // [H, Dv / 16, R, 16]
    in_view<float, 3, B> mended;   // [H, judging rows, Dv]  outputs over the changes alone
    in_view<float, 2, B> shares;   // [H, R]
    index_t fitting;               // rows before the judging ones
    out_view<float, 1, B> factors; // [H]

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        if (t.rank() != 0) { return; }
        double product = 0;
        double square  = 0;
        for (index_t i = 0; i < mended.extent(1); ++i)
        {
            index_t const r = fitting + i;
            for (index_t d = 0; d < mended.extent(2); ++d)
            {
                double const x = double{shares(h, r)} * double{mended(h, i, d)};
                product += x * double{missing(h, d / tile_tokens, r, d % tile_tokens)};
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

    in_view<float, 3, B> changes;          // [H, S, Dv]
    in_view<float, 1, B> factors;          // [H]
    in_view<index_t, 1, B> fitted;         // [H]
    in_view<std::int32_t, 2, B> positions; // [H, N]  by rung
    in_view<index_t, 2, B> first;          // [H, rungs + 1]
    index_t kept;                          // the first rung that keeps tokens
    in_view<T, 3, B> values;               // [H, N, Dv]
    out_view<T, 3, B> changed;             // [H, N, Dv]

    [[nodiscard]] index_t items() const noexcept { return changes.extent(0) * changes.extent(1); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const h = item / changes.extent(1);
        index_t const j = item % changes.extent(1);
        if (j >= fitted(h) || !(factors(h) > 0)) { return; } // `changed` has the values
        index_t const token = positions(h, first(h, kept) + j);
        for (index_t d = t.rank(); d < changes.extent(2); d += t.size())
        {
            float const v        = widen(load_at<T>(values.row(h, token) + d)) + factors(h) * changes(h, j, d);
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
