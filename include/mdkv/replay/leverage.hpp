/// \file leverage.hpp: add_leverage: how far each token's key stands out among its head's (arXiv 2507.08143).
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/leverage.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/panel.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/stages/basis.hpp>

#include <cmath>

namespace MDKV_NAMESPACE
{

namespace detail
{

/// Makes of each head's Gram matrix G = X'X a triangular W with W'W = (G + lambda I)^-1, so that a leverage is |W x|^2, and
/// least squares are solved by two products: Gaussian elimination of (G | I) from the first row down, in place, in double. An item
/// is a head.
template <backend B>
struct whiten
{
    static constexpr char const* name = "whiten";

    out_view<double, 3, B> gram;     // [H, D, D]  upper triangles are read; overwritten
    out_view<float, 3, B> whitener;  // [H, D, D]  the rows of W, zeros beyond the diagonal
    double ridge = 1e-3;             // lambda, in units of the trace over a head's count
    in_view<index_t, 1, B> counts{}; // [H]  or empty: D

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        index_t const dim = gram.extent(2);
        double energy     = 0;
        for (index_t i = 0; i < dim; ++i) { energy += gram(h, i, i); }
        index_t const count = counts.empty() ? dim : counts(h);
        double const lambda = count == 0 ? 0.0 : ridge * energy / static_cast<double>(count);
        auto const share    = share_rows(t, dim);
        // No pivot of a matrix that is G + lambda I without rounding is below lambda. (A NaN stays.)
        auto const pivot_of = [&](index_t k) { return gram(h, k, k) < lambda ? lambda : gram(h, k, k); };
        t.sync();
        for (index_t i = t.rank(); i < dim; i += t.size()) { gram(h, i, i) += lambda; }
        t.sync();
        for (index_t k = 0; k < dim; ++k)
        {
            double const pivot      = pivot_of(k);
            double const* const top = gram.row(h, k);
            for (index_t i = k + 1 + share.row; i < dim; i += share.rows)
            {
                double* const row     = gram.row(h, i);
                double const multiple = pivot == 0 ? 0.0 : top[i] / pivot;
                auto const subtract   = [&](index_t from, index_t to) {
                    for (index_t j = from + share.column; j < to; j += t.size()) { row[j] -= multiple * top[j]; }
                };
                subtract(0, k); // belongs to W already
                subtract(i, dim);
                if (share.column == 0) { row[k] = -multiple; }
            }
            t.sync();
        }
        for (index_t i = share.row; i < dim; i += share.rows)
        {
            // The unit is 0 if all keys are 0, and NaN if an energy is non-finite.
            double const pivot = pivot_of(i);
            double const unit  = pivot == 0 ? 0.0 : 1 / sqrt(pivot) + 0 * lambda;
            for (index_t j = share.column; j < dim; j += t.size())
            {
                whitener(h, i, j) = j > i ? 0.0F : static_cast<float>(j == i ? unit : unit * gram(h, i, j));
            }
        }
    }
};

/// Adds up |W x|^2, each rounded to a unit, over the heads. An item is a stretch of tokens.
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
        index_t const left  = sums.extent(0) - item * stretch;
        auto const end      = static_cast<int>(left < stretch ? left : stretch);
        for (int i = member(t) * lanes; i < end; i += members(t) * lanes)
        {
            index_t const first = item * stretch + i;
            int const count     = end - i < lanes ? end - i : lanes;
            for (index_t h = 0; h < products.extent(0); ++h)
            {
                double square[std::size_t{lanes}]{};
                for (index_t d = 0; d < products.extent(1); ++d)
                {
                    float const* const x = products.row(h, d) + first;
                    for (int l = 0; l < lanes; ++l) { square[l] += double{x[l] * x[l]}; }
                }
                for (int l = 0; l < count; ++l)
                {
                    sums(first + l) = sum_of_leverages(sums(first + l), leverage_sum_of(square[l]));
                }
            }
        }
    }
};

/// Adds the leverages |W x|^2 of keys [H, N, D].
template <backend B, element T>
void add_leverages(B const& on, in_view<T, 3, B> keys, in_view<float, 3, B> whitener, out_view<leverage_sum, 1, B> sums)
{
    workspace::frame frame{*on.scratch};
    auto const products = scratch_view<float>(on, frame, keys.extent(0), keys.extent(2), panel_depth);
    for_pieces(keys.extent(1), [&](index_t at, index_t count) {
        auto const part = slice<2>(products, 0, count);
        multiply<B, T, float>(on, {whitener}, {slice<1>(keys, at, count)}, {part});
        run(on, add_squares<B>{as_input(part), slice<0>(sums, at, count)});
    });
}

} // namespace detail

/// Adds to each token's sum the statistical leverage of its key among its head's, k'(K'K + lambda I)^-1 k, over the heads:
/// near 1 if a key has a direction for itself, small if it shares its directions with many. lambda is a thousandth
/// of the mean energy of a direction. Summed over all layers, it is large for tokens unlike the rest of a prompt:
/// `balance_options::leverages`. Each is rounded to a unit of `leverage_sum`, so that calls for the heads of all layers add up in
/// any order, on any ranks, to the same bits.
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
    workspace::frame frame{*on.scratch};
    auto const gram     = detail::scratch_view<double>(on, frame, heads, dim, dim);
    auto const whitener = detail::scratch_view<float>(on, frame, heads, dim, dim);
    run(on, detail::fill<double>{gram.data_handle(), 0, heads * dim * dim});
    accumulate_gram(on, keys, gram);
    run(on, detail::whiten<B>{gram, whitener}, heads);
    detail::add_leverages(on, keys, as_input(whitener), sums);
}

} // namespace MDKV_NAMESPACE
