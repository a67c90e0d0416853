/// \file leverage.hpp: add_leverage: how far each token's key stands out among its head's (arXiv 2507.08143).
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/panel.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>

namespace MDKV_NAMESPACE
{

/// A token's leverages, each from 0 to 1, summed over heads of any layers on any ranks, in units of 2^-36; 0: no leverage yet.
/// See add_leverage.
using leverage_sum = std::int64_t;

/// The number of units of a leverage of 1.
inline constexpr double leverage_units = 0x1p36;

/// A sum with a leverage that is NaN or infinite. Larger and negative sums mean the same, because sums of ranks may pass it. Finite
/// leverages of fewer than 2^16 heads stay below it.
inline constexpr leverage_sum non_finite_leverage = leverage_sum{1} << 52;

/// A leverage as a sum of one head, rounded to a unit.
[[nodiscard]] MDKV_HD constexpr leverage_sum leverage_sum_of(double leverage) noexcept
{
    return leverage >= 0 && leverage < 0x1p15 ? static_cast<leverage_sum>(leverage * leverage_units + 0.5)
                                              : non_finite_leverage;
}

/// The sum as a number; NaN if a leverage was not finite.
[[nodiscard]] MDKV_HD constexpr float leverage_of(leverage_sum sum) noexcept
{
    return sum >= 0 && sum < non_finite_leverage ? static_cast<float>(static_cast<double>(sum) / leverage_units)
                                                 : __builtin_nanf("");
}

namespace detail
{

/// Gaussian elimination of (G | I) from the first row down, in place: the upper triangle becomes G's, the rest that of I, whose
/// diagonal stays 1. No pivot is below `least`.
template <team Team, space S>
MDKV_HD void eliminate(Team const& t, view<double, 3, S> const& gram, index_t h, double least)
{
    index_t const n  = gram.extent(2);
    auto const share = share_rows(t, n);
    for (index_t k = 0; k < n; ++k)
    {
        double const* const top = gram.row(h, k);
        double const pivot      = top[k] < least ? least : top[k]; // a NaN stays
        for (index_t i = k + 1 + share.row; i < n; i += share.rows)
        {
            double* const row     = gram.row(h, i);
            double const multiple = pivot == 0 ? 0.0 : top[i] / pivot;
            auto const subtract   = [&](index_t from, index_t to) {
                for (index_t j = from + share.column; j < to; j += t.size()) { row[j] -= multiple * top[j]; }
            };
            subtract(0, k); // belongs to the inverse already
            subtract(i, n);
            if (share.column == 0) { row[k] = -multiple; }
        }
        t.sync();
    }
}

/// Makes of each head's Gram matrix G = X'X a triangular W with W'W = (G + lambda I)^-1, of which leverages |W x|^2 and least
/// squares are products. An item is a head.
template <backend B>
struct whiten
{
    static constexpr char const* name = "whiten";

    out_view<double, 3, B> gram;     // [H, D, D]  upper triangles are read; overwritten
    out_view<float, 3, B> whitener;  // [H, D, D]  the rows of W, zeros beyond the diagonal
    double ridge = 1e-3;             // lambda, in units of the trace over a head's count
    in_view<index_t, 1, B> counts{}; // [H]  or empty: D
    double* mass = nullptr;          // [H]  or null: sums of the leverages of all rows of X

    MDKV_HD void operator()(team auto const& t, index_t h) const
    {
        index_t const dim = gram.extent(2);
        double energy     = 0;
        for (index_t i = 0; i < dim; ++i) { energy += gram(h, i, i); }
        index_t const count = counts.empty() ? dim : counts(h);
        double const lambda = count == 0 ? 0.0 : ridge * energy / static_cast<double>(count);
        auto const share    = share_rows(t, dim);
        t.sync();
        for (index_t i = t.rank(); i < dim; i += t.size()) { gram(h, i, i) += lambda; }
        t.sync();
        // No pivot of a matrix that is G + lambda I without rounding is below lambda.
        eliminate(t, gram, h, lambda);
        double squares = 0;
        for (index_t i = share.row; i < dim; i += share.rows)
        {
            // The unit is 0 if all keys are 0, and NaN if an energy is non-finite.
            double const pivot = gram(h, i, i) < lambda ? lambda : gram(h, i, i);
            double const unit  = pivot == 0 ? 0.0 : 1 / sqrt(pivot) + 0 * lambda;
            for (index_t j = share.column; j < dim; j += t.size())
            {
                float const w     = j > i ? 0.0F : static_cast<float>(j == i ? unit : unit * gram(h, i, j));
                whitener(h, i, j) = w;
                squares += double{w} * double{w};
            }
        }
        if (mass == nullptr) { return; }
        squares = t.sum(squares); // the trace of G (G + lambda I)^-1 is D - lambda |W|^2
        if (t.rank() == 0) { mass[h] = lambda == 0 ? 0.0 : static_cast<double>(dim) - lambda * squares; }
    }
};

/// Adds up |W x|^2, each rounded to a unit, over the heads; a sum that is not finite stays. An item is a stretch of tokens.
template <backend B>
struct add_squares
{
    static constexpr char const* name = "add_leverage";
    static constexpr int threads      = 128;
    static constexpr index_t stretch  = 64;

    in_view<float, 3, B> products; // [H, D, n]  W x; a team's lanes may be read behind the last
    out_view<leverage_sum, 1, B> sums;

    [[nodiscard]] index_t items() const noexcept { return (sums.extent(0) + stretch - 1) / stretch; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        constexpr int lanes = Team::lanes;
        index_t const begin = item * stretch;
        index_t const end   = sums.extent(0) - begin < stretch ? sums.extent(0) : begin + stretch;
        for (index_t i = begin + t.rank() * lanes; i < end; i += t.size() * lanes)
        {
            for (index_t h = 0; h < products.extent(0); ++h)
            {
                double square[std::size_t{lanes}]{};
                for (index_t d = 0; d < products.extent(1); ++d)
                {
                    float const* const x = products.row(h, d) + i;
                    for (int l = 0; l < lanes; ++l) { square[l] += double{x[l] * x[l]}; }
                }
                for (int l = 0; l < lanes && i + l < end; ++l)
                {
                    leverage_sum const sum = sums(i + l) + leverage_sum_of(square[l]);
                    sums(i + l)            = sum < non_finite_leverage ? sum : non_finite_leverage;
                }
            }
        }
    }
};

/// Adds the leverages |W x|^2 of keys [H, N, D].
template <backend B, element T>
void add_leverages(B const& on, in_view<T, 3, B> keys, in_view<float, 3, B> whitener, out_view<leverage_sum, 1, B> sums)
{
    workspace::frame frame{on.scratch};
    auto const products = scratch_view<float>(on, frame, keys.extent(0), keys.extent(2), panel_depth);
    for_pieces(keys.extent(1), panel_depth, [&](index_t at, index_t count) {
        auto const part = slice<2>(products, 0, count);
        multiply<B, T, float>(on, {whitener}, {slice<1>(keys, at, count)}, {part});
        run(on, add_squares<B>{as_input(part), slice<0>(sums, at, count)});
    });
}

} // namespace detail

/// Adds to each token's sum the statistical leverage of its key among its head's (docs/method.md), over the heads: near 1 if a key
/// has a direction for itself, small if it shares its directions with many. Summed over all layers, it is large for tokens unlike
/// the rest of a prompt: `balance_options::leverages`. Each is rounded, so that calls add up in any order to the same bits.
///
/// \param on             backend: threads, scratch
/// \param[in]     keys   [H, N, D]  keys of one layer, as cached (after position encoding)
/// \param[in,out] sums   [N]        start from zeros; `leverage_of` makes numbers of them
/// \pre    keys are finite and their squares in float's range; other keys make all sums `non_finite_leverage`. Fewer than 2^16
///         heads in all
/// \cost   O(H*N*D*D + H*D^3), keys read twice; scratch O(H*D*D)
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads; products in float, a head's sums in double,
///         sums over heads in fixed point
/// \throws invalid_argument        a shape disagrees, an output overlaps
/// \see    tests/unit/replay/leverage.cpp, docs/numerics.md
template <backend B, element T>
void add_leverage(B const& on, in_view<T, 3, B> keys, out_view<leverage_sum, 1, B> sums)
{
    index_t const heads = keys.extent(0);
    index_t const dim   = keys.extent(2);
    expects(heads == 0 || dim >= 1, "add_leverage: keys [H, N, D] has D = 0");
    detail::checks{on, "add_leverage"}
        .rows("keys", keys, {heads, keys.extent(1), dim}, "H,N,D")
        .out("sums", sums, {keys.extent(1)}, "N");
    workspace::frame frame{on.scratch};
    auto const gram     = detail::scratch_view<double>(on, frame, heads, dim, dim);
    auto const whitener = detail::scratch_view<float>(on, frame, heads, dim, dim);
    run(on, detail::fill<double>{gram.data_handle(), 0, heads * dim * dim});
    detail::accumulate_gram(on, keys, gram);
    run(on, detail::whiten<B>{gram, whitener}, heads);
    detail::add_leverages(on, keys, as_input(whitener), sums);
}

} // namespace MDKV_NAMESPACE
