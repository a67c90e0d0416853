/// \file reflections.hpp: Householder reflections that make a symmetric matrix tridiagonal, and their product, by one team in place.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>

namespace MDKV_NAMESPACE::detail
{

/// Columns that a member works on at a time: a row that a thread reads is padded to whole blocks of them. (32 and not
/// `lanes`: g++ 12 unrolls loops of 16 before it looks for vectors, and finds none.)
template <class Team>
inline constexpr int block_columns = Team::lanes == 1 ? 1 : 2 * Team::lanes;

/// Rows of floats, `stride` apart, which a thread may read and write up to the next whole block.
struct square_matrix
{
    float* data;
    index_t stride;
    index_t size;

    /// A multiple of any team's blocks.
    [[nodiscard]] MDKV_HD static constexpr index_t padded(index_t n) { return (n + 31) / 32 * 32; }
    [[nodiscard]] MDKV_HD float* row(index_t i) const { return data + i * stride; }
};

/// EISPACK's tred2, reading rows. All sums have an order of their own, so every team gives the same bits if its
/// compiler contracts the same products.
class reflections
{
public:
    /// \param size  D, the rows of the matrix
    MDKV_HD reflections(carver& cut, index_t size)
        : padded_{square_matrix::padded(size)}
        , partial_{cut.take<double>(sums)}
        , u_{cut.take<float>(4 * padded_)}
        , q_{u_ + 2 * padded_}
    {}

    /// Makes the matrix tridiagonal by reflections from the last row up, each of which leaves of a row only the entry beside
    /// the diagonal, and is kept in that row. Writes the diagonal [D] and the entries beside it [D], entry i between rows i
    /// and i + 1.
    template <team Team>
    MDKV_OUTLINE MDKV_HD void tridiagonalise(
        Team const& t, square_matrix const& a, double* diagonal, double* beside) const
    {
        clear(t, u_, 0, 4 * padded_); // clears q_, too
        t.sync();
        for (index_t i = a.size - 1; i > 0; --i)
        {
            // The last reflection is yet to be applied to rows 0 to i.
            float* const u      = of(u_, i);
            float* const q      = of(q_, i);
            float const* u_last = of(u_, i + 1);
            float const* q_last = of(q_, i + 1);
            float* const row    = a.row(i);
            float const u_i     = u_last[i];
            float const q_i     = q_last[i];
            float const corner  = row[i] - (u_i * q_i + q_i * u_i);
            double const pivot  = static_cast<double>(row[i - 1] - (u_i * q_last[i - 1] + q_i * u_last[i - 1]));
            assign(t, u, i - 1, [&](index_t k) { return row[k] - (u_i * q_last[k] + q_i * u_last[k]); });
            clear(t, u, i - 1, padded_);
            double const rest  = dot(t, u, u, i - 1);
            double const size  = sqrt(rest + pivot * pivot);
            bool const reflect = rest > 0;
            // u'u = 2. The sign is the one that does not cancel.
            double const by = reflect ? 1 / sqrt(size * (size + fabs(pivot))) : 0;
            assign(t, u, i - 1, [&](index_t k) { return static_cast<float>(static_cast<double>(u[k]) * by); });
            assign(t, row, i - 1, [&](index_t k) { return u[k]; });
            if (t.rank() == 0)
            {
                double const signed_size = pivot < 0 ? -size : size;
                diagonal[i]              = static_cast<double>(corner);
                beside[i - 1]            = reflect ? -signed_size : pivot;
                u[i - 1] = row[i - 1] = static_cast<float>((pivot + signed_size) * by);
            }
            t.sync();
            reflect_and_multiply<true>(t, a, i, u_last, q_last, u, q);
            float const half = static_cast<float>(0.5 * dot(t, u, q, i));
            assign(t, q, i, [&](index_t k) { return q[k] - half * u[k]; });
            clear(t, q, i, padded_);
            t.sync();
        }
        if (t.rank() == 0) { diagonal[0] = static_cast<double>(*a.data); }
    }

    /// Replaces the reflections by their product Q in the order of rows n - 1 to 0, and that by its transpose.
    template <team Team>
    MDKV_HD void multiply(Team const& t, square_matrix const& a) const
    {
        index_t const n = a.size;
        clear(t, u_, 0, 4 * padded_); // clears q_, too
        t.sync();
        for (index_t i = 0; i < n; ++i)
        {
            float* const u_next = of(u_, i + 1);
            float* const g_next = of(q_, i + 1);
            // Rows and columns below i hold the product before the reflection that row i kept, which is now in u; g is
            // the product of u and them. One pass applies the reflection and finds the same for row i + 1.
            if (i + 1 < n)
            {
                for (index_t k = t.rank(); k <= i; k += t.size()) { u_next[k] = a.row(i + 1)[k]; }
            }
            t.sync();
            reflect_and_multiply<false>(t, a, i, of(u_, i), of(q_, i), u_next, g_next);
            t.sync();
            for (index_t k = t.rank(); k <= i; k += t.size())
            {
                a.row(k)[i] = 0.0F;
                a.row(i)[k] = k == i ? 1.0F : 0.0F;
            }
            if (t.rank() == 0) { g_next[i] = u_next[i]; }
        }
        t.sync();
        constexpr index_t side = 16; // tiles, for the sake of caches
        for (index_t i = 0; i < n; i += side)
        {
            for (index_t j = 0; j <= i; j += side)
            {
                for (index_t e = t.rank(); e < side * side; e += t.size())
                {
                    index_t const r = i + e / side;
                    index_t const c = j + e % side;
                    if (r >= n || c >= r) { continue; }
                    float const x = a.row(r)[c];
                    a.row(r)[c]   = a.row(c)[r];
                    a.row(c)[r]   = x;
                }
            }
        }
        t.sync();
    }

private:
    static constexpr index_t sums = 16; // running sums of one dot product

    /// The one of two arrays that belongs to row i; the rows before and after row i use the other.
    [[nodiscard]] MDKV_HD float* of(float* arrays, index_t i) const { return arrays + i % 2 * padded_; }

    template <team Team>
    MDKV_HD static void clear(Team const& t, float* x, index_t first, index_t last)
    {
        for (index_t k = first + t.rank(); k < last; k += t.size()) { x[k] = 0.0F; }
    }

    /// to[k] = value(k) for the blocks that hold columns 0 to n - 1. All values of a block come first: `to` may be read.
    template <team Team, class Value>
    MDKV_HD static void assign(Team const& t, float* to, index_t n, Value const& value)
    {
        constexpr int width = block_columns<Team>;
        for (index_t k = t.rank() * width; k < n; k += t.size() * width)
        {
            float x[std::size_t{width}];
            for (int l = 0; l < width; ++l) { x[l] = value(k + l); }
            for (int l = 0; l < width; ++l) { to[k + l] = x[l]; }
        }
    }

    /// The sum of a[k] b[k], k < n, in 16 running sums of double; a is 0 from n on. The same in every member.
    template <team Team>
    [[nodiscard]] MDKV_OUTLINE MDKV_HD double dot(Team const& t, float const* a, float const* b, index_t n) const
    {
        constexpr int lanes = Team::lanes;
        static_assert(sums % lanes == 0);
        t.sync();
        for (index_t p = t.rank() * lanes; p < sums; p += t.size() * lanes)
        {
            double sum[std::size_t{lanes}] = {};
            for (index_t k = p; k < n; k += sums)
            {
                MDKV_FOR_LANES(l, lanes) { sum[l] += static_cast<double>(a[k + l]) * static_cast<double>(b[k + l]); }
            }
            MDKV_FOR_LANES(l, lanes) { partial_[p + l] = sum[l]; }
        }
        t.sync();
        double all = 0;
        for (index_t p = 0; p < sums; ++p) { all += partial_[p]; }
        return all;
    }

    /// Applies a reflection to rows and columns 0 to n - 1 of A, from both sides or, with q = u'A, from the left, and
    /// multiplies them with another u, in one pass: product = u'A.
    template <bool BothSides, team Team>
    MDKV_HD static void reflect_and_multiply(Team const& t, square_matrix const& a, index_t n, float const* u_last,
        float const* q_last, float const* u, float* product)
    {
        constexpr int width = block_columns<Team>;
        for (index_t k = t.rank() * width; k < n; k += t.size() * width)
        {
            float u_k[std::size_t{width}];
            float q_k[std::size_t{width}];
            float sum[std::size_t{width}];
            for (int l = 0; l < width; ++l)
            {
                u_k[l] = u_last[k + l];
                q_k[l] = q_last[k + l];
                sum[l] = 0.0F;
            }
            for (index_t j = 0; j < n; ++j)
            {
                float* const row = a.row(j) + k;
                float const u_j  = u_last[j];
                float const q_j  = q_last[j];
                float const v_j  = u[j];
                for (int l = 0; l < width; ++l)
                {
                    float const x = row[l] - (BothSides ? u_j * q_k[l] + q_j * u_k[l] : u_j * q_k[l]);
                    row[l]        = x;
                    sum[l] += x * v_j;
                }
            }
            for (int l = 0; l < width; ++l) { product[k + l] = sum[l]; }
        }
    }

    index_t padded_;  ///< columns
    double* partial_; // [sums]
    float* u_;        // [2, padded]  this and the last reflection, I - u u'; 0 behind the rows that it touches
    float* q_;        // [2, padded]  A - u q' - q u' is the matrix reflected from both sides
};

} // namespace MDKV_NAMESPACE::detail
