/// \file eigenvectors.hpp: eigenvectors of symmetric matrices, one team a matrix: Householder reflections and implicit QL (arXiv 2603.20616, section 4.1).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/reflections.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>
#include <cstdint>
#include <limits>

namespace MDKV_NAMESPACE::detail
{

/// Eigenvectors of every Gram matrix as rows of `basis`, strongest first, and their energies. The matrix is scaled to unit,
/// reduced to a tridiagonal one T by reflections, and T diagonalised by QL sweeps with
/// Wilkinson's shifts: one member computes a sweep's rotations in double, then all apply them to their columns of `basis`.
/// A matrix that is not finite, or did not converge, gets unit vectors and energies that are NaN.
template <space S>
struct eigenvectors
{
    static constexpr char const* name     = "eigenbasis";
    static constexpr index_t sweeps_a_row = 30; // two happen
    static constexpr double least_unit    = 1e-300;
    static constexpr double rounding      = 0x1p-48;  // a float's, squared: the most that is left beside the diagonal
    static constexpr double negligible    = 0x1p-100; // a length whose square is still far from double's least
    static constexpr float not_a_number   = std::numeric_limits<float>::quiet_NaN();
    static constexpr double infinite      = std::numeric_limits<double>::infinity();

    view<double const, 3, S> gram;
    view<float, 3, S> basis;
    view<float, 2, S> energy;

    struct sweep
    {
        index_t first; ///< rotations first to last - 1 are to be applied
        index_t last;
    };

    /// A team's scratch.
    struct work
    {
        carver& cut;
        index_t n; ///< D
        reflections steps{cut, n};
        double* diagonal    = cut.take<double>(n);       // [D]
        double* beside      = cut.take<double>(n);       // [D] entry i is between rows i and i + 1
        float* cosine       = cut.take<float>(n);        // [D]
        float* sine         = cut.take<float>(n);        // [D]
        std::int32_t* other = cut.take<std::int32_t>(n); // [D] the row that row i is exchanged with
        sweep* next         = cut.take<sweep>(1);
        /// [D, padded D] of a thread; a block works in the basis itself
        float* matrix = cut.take<float>(S == space::host ? n * square_matrix::padded(n) : 0);
    };

    [[nodiscard]] index_t scratch_bytes() const { return bytes_of<work>(gram.extent(2)); }

    /// Writes the matrix over the largest entry of its diagonal to `a`. Returns that entry, 0 for a matrix of zeros,
    /// infinity if an entry is non-finite.
    template <team Team>
    [[nodiscard]] MDKV_HD double scale(Team const& t, index_t head, square_matrix const& a) const
    {
        double most        = 0;
        index_t non_finite = 0;
        for (index_t i = 0; i < a.size; ++i)
        {
            double const* const row = gram.row(head, i);
            for (index_t k = t.rank(); k < a.size; k += t.size()) { non_finite += fabs(row[k]) < infinite ? 0 : 1; }
            most = row[i] > most ? row[i] : most;
        }
        bool const good = t.sum(non_finite) == 0;
        // Energies below are 0 in float, and the reciprocal must be finite.
        double const by = good && most >= least_unit ? 1 / most : 0;
        for (index_t i = 0; i < a.size; ++i)
        {
            double const* const row = gram.row(head, i);
            float* const to         = a.row(i);
            for (index_t k = t.rank(); k < a.size; k += t.size()) { to[k] = static_cast<float>(row[k] * by); }
            for (index_t k = a.size + t.rank(); k < a.stride && S == space::host; k += t.size()) { to[k] = 0.0F; }
        }
        return !good ? infinite : by > 0 ? most : 0;
    }

    /// Whether entry i beside the diagonal is as small as rounding: against 1, and against the diagonal next to it.
    [[nodiscard]] MDKV_HD static bool is_small(work const& w, index_t i)
    {
        double const x = w.beside[i];
        return fabs(x) <= negligible || x * x <= rounding * (fabs(w.diagonal[i]) + fabs(w.diagonal[i + 1]));
    }

    /// Finds the Givens rotations of the next sweep, for the first block that is not diagonal. Returns the first and last row
    /// that they span, which are equal if the whole matrix is diagonal.
    [[nodiscard]] MDKV_HD static sweep givens(work const& w, index_t n)
    {
        double* const d = w.diagonal;
        double* const e = w.beside;
        index_t first   = 0;
        for (; first < n - 1 && is_small(w, first); ++first) { e[first] = 0; }
        index_t last = first;
        while (last < n - 1 && !is_small(w, last)) { ++last; }
        if (first == last) { return {first, last}; }
        if (last < n - 1) { e[last] = 0; }
        double const slope = (d[first + 1] - d[first]) / (2 * e[first]);
        double const steep = sqrt(slope * slope + 1);
        double g           = d[last] - d[first] + e[first] / (slope < 0 ? slope - steep : slope + steep);
        double sine        = 1;
        double cosine      = 1;
        double shift       = 0;
        for (index_t i = last - 1; i >= first; --i)
        {
            double const f = sine * e[i];
            double const b = cosine * e[i];
            double const r = sqrt(f * f + g * g);
            if (i + 1 < last) { e[i + 1] = r; }
            if (r <= negligible)
            {
                d[i + 1] -= shift;
                return {i + 1, last};
            }
            double const by   = 1 / r;
            sine              = f * by;
            cosine            = g * by;
            double const from = d[i + 1] - shift;
            double const to   = (d[i] - from) * sine + 2 * cosine * b;
            shift             = sine * to;
            d[i + 1]          = from + shift;
            g                 = cosine * to - b;
            w.cosine[i]       = static_cast<float>(cosine);
            w.sine[i]         = static_cast<float>(sine);
        }
        d[first] -= shift;
        e[first] = g;
        return {first, last};
    }

    /// Makes the tridiagonal matrix diagonal and rotates the rows of `a` alike. False if it did not converge.
    template <team Team>
    [[nodiscard]] MDKV_OUTLINE MDKV_HD static bool diagonalise(Team const& t, square_matrix const& a, work const& w)
    {
        constexpr int width = block_columns<Team>;
        for (index_t sweeps = 0; sweeps <= sweeps_a_row * a.size; ++sweeps)
        {
            if (t.rank() == 0) { *w.next = givens(w, a.size); }
            t.sync();
            sweep const now = *w.next;
            if (now.first == now.last) { return true; }
            for (index_t k = t.rank() * width; k < a.size; k += t.size() * width)
            {
                float x[std::size_t{width}];
                float carried[std::size_t{width}];
                float* row = a.row(now.last) + k;
                for (int l = 0; l < width; ++l) { carried[l] = row[l]; }
                for (index_t i = now.last - 1; i >= now.first; --i, row -= a.stride)
                {
                    float const c = w.cosine[i];
                    float const s = w.sine[i];
                    for (int l = 0; l < width; ++l) { x[l] = (row - a.stride)[l]; }
                    for (int l = 0; l < width; ++l) { row[l] = s * x[l] + c * carried[l]; }
                    for (int l = 0; l < width; ++l) { carried[l] = c * x[l] - s * carried[l]; }
                }
                for (int l = 0; l < width; ++l) { row[l] = carried[l]; }
            }
            t.sync();
        }
        return false;
    }

    /// Writes the basis, directions of the largest energy first, and energies at the matrix's scale.
    template <team Team>
    MDKV_OUTLINE MDKV_HD void sort(
        Team const& t, index_t head, square_matrix const& a, work const& w, double unit) const
    {
        for (index_t i = 0; t.rank() == 0 && i < a.size; ++i)
        {
            index_t most = i;
            for (index_t j = i + 1; j < a.size; ++j) { most = w.diagonal[j] > w.diagonal[most] ? j : most; }
            double const value = w.diagonal[most];
            w.diagonal[most]   = w.diagonal[i];
            w.other[i]         = static_cast<std::int32_t>(most);
            energy(head, i)    = static_cast<float>(value > 0 ? value * unit : 0.0);
        }
        t.sync();
        for (index_t i = 0; i < a.size; ++i)
        {
            float* const to         = basis.row(head, i);
            float* const from       = a.row(w.other[i]);
            float const* const here = a.row(i);
            for (index_t k = t.rank(); k < a.size; k += t.size())
            {
                float const x = here[k];
                to[k]         = from[k];
                from[k]       = x;
            }
        }
    }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t head) const
    {
        index_t const n = gram.extent(2);
        carver cut      = t.scratch();
        work const w{cut, n};
        square_matrix const a = S == space::host ? square_matrix{w.matrix, square_matrix::padded(n), n}
                                                 : square_matrix{basis.row(head, 0), basis.stride(1), n};
        double const unit     = scale(t, head, a);
        bool good             = unit < infinite;
        if (good)
        {
            t.sync();
            w.steps.tridiagonalise(t, a, w.diagonal, w.beside);
            w.steps.multiply(t, a);
            good = diagonalise(t, a, w);
        }
        if (good) { return sort(t, head, a, w, unit); }
        for (index_t i = 0; i < n; ++i)
        {
            for (index_t k = t.rank(); k < n; k += t.size()) { basis(head, i, k) = 0.0F; }
            t.sync();
            if (t.rank() == 0) { basis(head, i, i) = 1.0F; }
            if (t.rank() == 0) { energy(head, i) = not_a_number; }
        }
    }
};

} // namespace MDKV_NAMESPACE::detail
