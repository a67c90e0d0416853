/// \file basis.hpp: fit_basis: the PCA basis of each head, directions of most energy first, by Jacobi rotations (arXiv 2603.20616, section 4.1).
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/panel.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>
#include <limits>

namespace MDKV_NAMESPACE
{

namespace detail
{

/// Eigenvectors of every Gram matrix as rows of `basis`, strongest first, and their energies. Over its largest entry the matrix is
/// R'R; a rotation of two rows of R leaves that product, and rows that are all orthogonal to each other (one-sided Jacobi) are
/// eigenvectors as long as the root of their energy. Rotations of disjoint pairs are made side by side, each pair once in a sweep.
/// A matrix that is not finite gets unit vectors and energies that are NaN.
template <space S>
struct eigenvectors
{
    static constexpr char const* name = "eigenbasis";
    static constexpr index_t sums     = 16;  ///< sums of which a product of two rows is made
    static constexpr int most_sweeps  = 30;  ///< three to seven happen
    static constexpr double unit  = 1e-300;  ///< an entry whose reciprocal is finite; smaller energies are 0 in float
    static constexpr double least = 0x1p-48; ///< a row without as much energy becomes a unit vector with it
    static constexpr float orthogonal = 0x1p-42F; ///< square of the cosine of two rows that stay: rounding of a float
    static constexpr double infinite  = std::numeric_limits<double>::infinity();
    static constexpr double unknown   = std::numeric_limits<double>::quiet_NaN();

    view<double, 3, S> gram; // overwritten
    view<float, 3, S> rows;  // [H, D, padded D]  scratch
    view<float, 3, S> basis;
    view<float, 2, S> energy;

    struct scratch
    {
        carver& cut;
        index_t dim;
        double* square  = cut.take<double>(dim); // [D]  what is left of the diagonal, -1: nothing; energies
        float* products = cut.take<float>((dim + 1) / 2 * sums); // [pairs, 16]
        float* sine     = cut.take<float>((dim + 1) / 2);        // [pairs]  0: the rows stay
        float* tangent  = cut.take<float>((dim + 1) / 2);        // [pairs]  of half the angle
    };

    /// Floats of a row of scratch for n numbers.
    [[nodiscard]] static constexpr index_t padded(index_t n) noexcept { return (n + sums - 1) / sums * sums; }
    [[nodiscard]] index_t scratch_bytes() const { return bytes_of<scratch>(gram.extent(2)); }

    MDKV_HD void operator()(team auto const& t, index_t head) const
    {
        index_t const n = gram.extent(2);
        carver cut      = t.scratch();
        scratch const mine{cut, n};
        double const most = factorise(t, mine, head);
        for (int i = 0; i < most_sweeps && sweep(t, mine, head) > 0; ++i) {}
        for (index_t i = 0; i < n; ++i)
        {
            double const square = mine.square[i];
            index_t place       = 0; // the number of stronger rows
            for (index_t k = 0; k < n; ++k) { place += mine.square[k] > square || (mine.square[k] == square && k < i); }
            if (t.rank() == 0) { energy(head, place) = static_cast<float>(square * most); }
            double const by = 1 / sqrt(square);
            for (index_t k = t.rank(); k < n; k += t.size())
            {
                basis(head, place, k) = static_cast<float>(double{rows(head, i, k)} * by);
            }
        }
    }

private:
    /// Writes R, of the rows left the one with the largest entry of the diagonal first. Returns what the matrix was divided by,
    /// NaN if an entry is not finite.
    [[nodiscard]] MDKV_HD double factorise(team auto const& t, scratch const& mine, index_t head) const
    {
        index_t const n    = gram.extent(2);
        double most        = 0;
        index_t non_finite = 0;
        for (index_t i = 0; i < n; ++i)
        {
            double const* const row = gram.row(head, i);
            for (index_t k = t.rank(); k < n; k += t.size()) { non_finite += fabs(row[k]) < infinite ? 0 : 1; }
            most = row[i] > most ? row[i] : most;
        }
        bool const good = t.sum(non_finite) == 0;
        double const by = good && most >= unit ? 1 / most : 0;
        for (index_t i = 0; i < n; ++i)
        {
            for (index_t k = t.rank(); k < n; k += t.size())
            {
                double& x = gram(head, i, k);
                x         = by > 0 ? x * by : 0;
                if (k == i) { mine.square[i] = x; }
            }
        }
        t.sync();
        auto const share = share_rows(t, n);
        for (index_t k = 0; k < n; ++k)
        {
            index_t pivot = 0;
            for (index_t i = 1; i < n; ++i) { pivot = mine.square[i] > mine.square[pivot] ? i : pivot; }
            double const square     = mine.square[pivot];
            bool const whole        = square > least;
            double const root       = sqrt(whole ? square : least);
            double const* const top = gram.row(head, pivot);
            for (index_t j = t.rank(); j < rows.extent(2); j += t.size())
            {
                bool const left  = whole && j < n && mine.square[j] >= 0;
                rows(head, k, j) = static_cast<float>(j == pivot ? root : left ? top[j] / root : 0.0);
            }
            t.sync();
            for (index_t i = t.rank(); i < n; i += t.size())
            {
                double const rest = whole ? mine.square[i] - top[i] / square * top[i] : mine.square[i];
                mine.square[i]    = i == pivot || mine.square[i] < 0 ? -1 : rest > 0 ? rest : 0;
            }
            for (index_t i = share.row; whole && i < n; i += share.rows)
            {
                double* const row     = gram.row(head, i);
                double const multiple = top[i] / square;
                for (index_t j = share.column; i != pivot && j < n; j += t.size()) { row[j] -= multiple * top[j]; }
            }
            t.sync();
        }
        return good ? most : unknown;
    }

    /// The rows of pair p in a step of a tournament: one place stays, the others move around a circle.
    struct pair
    {
        index_t first, second;
    };
    [[nodiscard]] MDKV_HD static pair rows_of(index_t step, index_t p, index_t circle)
    {
        index_t const first  = step + p < circle ? step + p : step + p - circle;
        index_t const second = step < p ? step + circle - p : step - p;
        return {first, p == 0 ? circle : second};
    }

    /// Rotates every two rows that are not orthogonal, and finds all energies first; returns how many pairs these were.
    template <team Team>
    [[nodiscard]] MDKV_HD index_t sweep(Team const& t, scratch const& mine, index_t head) const
    {
        constexpr index_t lanes = Team::lanes;
        index_t const n         = gram.extent(2);
        index_t const skipped   = n % 2; // no row is in the place that stays if n is odd: its pair is skipped
        index_t const circle    = n - 1 + skipped;
        index_t const pairs     = (n + skipped) / 2;
        index_t const group     = lanes > 1 ? 16 : pairs; // a CPU's stay in its first cache
        auto const columns      = share_rows(t, rows.extent(2) / lanes);
        index_t turned          = 0;
        for (index_t i = t.rank(); i < n; i += t.size())
        {
            double square = 0;
            for (index_t k = 0; k < n; ++k) { square += double{rows(head, i, k)} * double{rows(head, i, k)}; }
            mine.square[i] = square;
        }
        t.sync();
        for (index_t step = 0; step < circle; ++step)
        {
            for (index_t from = skipped; from < pairs; from += group)
            {
                index_t const end = pairs - from < group ? pairs : from + group;
                multiply(t, mine, head, step, circle, from, end);
                t.sync();
                for (index_t p = from + t.rank(); p < end; p += t.size())
                {
                    auto const [i, j] = rows_of(step, p, circle);
                    turned += turn(mine, i, j, p) ? 1 : 0;
                }
                t.sync();
                for (index_t p = from + columns.row; p < end; p += columns.rows)
                {
                    auto const [i, j]   = rows_of(step, p, circle);
                    float const sine    = mine.sine[p];
                    float const tangent = mine.tangent[p];
                    float* const x      = rows.row(head, i);
                    float* const y      = rows.row(head, j);
                    for (index_t k = columns.column * lanes; sine != 0 && k < rows.extent(2); k += t.size() * lanes)
                    {
                        float a[std::size_t{lanes}];
                        float b[std::size_t{lanes}];
                        for (index_t l = 0; l < lanes; ++l) { a[l] = x[k + l]; }
                        for (index_t l = 0; l < lanes; ++l) { b[l] = y[k + l]; }
                        for (index_t l = 0; l < lanes; ++l) { x[k + l] = a[l] - sine * (b[l] + tangent * a[l]); }
                        for (index_t l = 0; l < lanes; ++l) { y[k + l] = b[l] + sine * (a[l] - tangent * b[l]); }
                    }
                }
            }
            t.sync();
        }
        return t.sum(turned);
    }

    /// Finds the 16 sums of which the product of each pair's rows is made.
    template <team Team>
    MDKV_HD void multiply(
        Team const& t, scratch const& mine, index_t head, index_t step, index_t circle, index_t from, index_t end) const
    {
        constexpr index_t lanes = Team::lanes;
        auto const share        = share_rows(t, sums / lanes);
        for (index_t p = from + share.row; p < end; p += share.rows)
        {
            auto const [i, j]    = rows_of(step, p, circle);
            float const* const x = rows.row(head, i);
            float const* const y = rows.row(head, j);
            for (index_t first = share.column * lanes; first < sums; first += t.size() * lanes)
            {
                float sum[std::size_t{lanes}]{};
                for (index_t k = first; k < rows.extent(2); k += sums)
                {
                    for (index_t l = 0; l < lanes; ++l) { sum[l] += x[k + l] * y[k + l]; }
                }
                for (index_t l = 0; l < lanes; ++l) { mine.products[p * sums + first + l] = sum[l]; }
            }
        }
    }

    /// Finds the rotation of rows i and j, pair p, and their energies behind it. False if they stay.
    [[nodiscard]] MDKV_HD static bool turn(scratch const& mine, index_t i, index_t j, index_t p)
    {
        float* const sum = mine.products + p * sums;
        for (index_t n = sums / 2; n > 0; n /= 2)
        {
            for (index_t l = 0; l < n; ++l) { sum[l] += sum[l + n]; }
        }
        auto const first  = static_cast<float>(mine.square[i]);
        auto const second = static_cast<float>(mine.square[j]);
        bool const turns  = sum[0] * sum[0] > orthogonal * first * second;
        mine.sine[p]      = 0;
        if (!turns) { return false; }
        float const slope   = (second - first) / (2 * sum[0]);
        float const tangent = (slope < 0 ? -1.0F : 1.0F) / (fabsf(slope) + sqrtf(slope * slope + 1));
        float const cosine  = 1 / sqrtf(tangent * tangent + 1);
        float const moved   = tangent * sum[0];
        mine.sine[p]        = tangent * cosine;
        mine.tangent[p]     = tangent * cosine / (1 + cosine);
        mine.square[i] -= double{moved};
        mine.square[j] += double{moved};
        return true;
    }
};

/// Eigenvectors and energies of every head's Gram matrix, which is overwritten.
template <backend B>
void eigenbasis(B const& on, out_view<double, 3, B> gram, out_view<float, 3, B> basis, out_view<float, 2, B> energy)
{
    using job = eigenvectors<B::memory_space>;
    workspace::frame frame{on.scratch};
    auto const rows = scratch_view<float>(on, frame, gram.extent(0), gram.extent(2), job::padded(gram.extent(2)));
    run(on, job{gram, rows, basis, energy}, gram.extent(0));
}

} // namespace detail

/// The PCA basis of every head: the eigenvectors of its uncentred second moment X'X, strongest first.
///
/// \param on            backend: threads, scratch
/// \param[in]  samples  [H, S, D]  keys (after position encoding) or values; S < D is completed to a whole basis
/// \param[out] basis    [H, D, D]  orthonormal rows: row i is the direction of the i-th largest energy
/// \param[out] energy   [H, D]     non-increasing sums of squares along the rows, >= 0
/// \pre    D >= 1; samples are finite (see `expects_finite`)
/// \cost   O(H*S*D*D + H*D^3), samples read once; scratch O(H*D*D)
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads; signs of directions are arbitrary
/// \throws invalid_argument   a shape disagrees, an output overlaps, or a square is not finite (before anything is changed),
///                            naming the head. The gpu does not refuse the last: it gives that head unit vectors and energies
///                            that are NaN.
/// \see    tests/unit/stages/basis.cpp, docs/numerics.md
template <backend B, element T>
void fit_basis(B const& on, in_view<T, 3, B> samples, out_view<float, 3, B> basis, out_view<float, 2, B> energy)
{
    index_t const heads = samples.extent(0);
    index_t const dim   = samples.extent(2);
    expects(heads == 0 || dim >= 1, "fit_basis: samples [H, S, D] has D = 0");
    detail::checks{on, "fit_basis"}
        .rows("samples", samples, {heads, samples.extent(1), dim}, "H,S,D")
        .out("basis", basis, {heads, dim, dim}, "H,D,D")
        .out("energy", energy, {heads, dim}, "H,D");
    workspace::frame frame{on.scratch};
    auto const gram = detail::scratch_view<double>(on, frame, heads, dim, dim);
    run(on, detail::fill<double>{gram.data_handle(), 0, heads * dim * dim});
    detail::accumulate_gram(on, samples, gram);
    for (index_t i = 0; B::memory_space == space::host && i < heads * dim; ++i)
    {
        expects(std::isfinite(gram(i / dim, i % dim, i % dim)), "fit_basis: samples of head ", i / dim,
            " are not finite, or their squares are not");
    }
    detail::eigenbasis(on, gram, basis, energy);
}

} // namespace MDKV_NAMESPACE
