/// \file reflections.hpp: Householder reflections that make a symmetric matrix tridiagonal, and their product, by one team in place.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>
#include <type_traits>

namespace mdkv::detail
{

/// Calls body(first, number of columns) until columns 0 to n - 1 of a matrix of `all` columns are covered; it may touch
/// columns up to `all`. The number is a constant: a block's, or 1. (A block of 32 and not of `lanes`: g++ 12 unrolls loops of
/// 16 before it looks for vectors, and finds none.)
template <team Team, class Body>
MDKV_HD void for_columns(Team const& t, index_t n, index_t all, Body const& body)
{
    constexpr int block = Team::lanes == 1 ? 1 : 2 * Team::lanes;
    index_t k           = t.rank() * block;
    for (; k < n && k + block <= all; k += t.size() * block) { body(k, std::integral_constant<int, block>{}); }
    if constexpr (block > 1)
    {
        constexpr int few = 8; // what most dimensions are a multiple of
        for (; k < n && k + few <= all; k += few) { body(k, std::integral_constant<int, few>{}); }
        for (; k < n; ++k) { body(k, std::integral_constant<int, 1>{}); }
    }
}

/// Rows of floats, `stride` apart.
struct square_matrix
{
    float* data;
    index_t stride;
    index_t size;

    [[nodiscard]] MDKV_HD float* row(index_t i) const { return data + i * stride; }
};

/// EISPACK's tred2, reading rows. All sums have an order of their own, so every team gives the same bits as far as its
/// compiler contracts the same products.
class reflections
{
public:
    /// `size` is the matrix's, D.
    MDKV_HD reflections(carver& cut, index_t size)
        : partial_{cut.take<double>(sums)}
    {
        index_t const padded = (size + sums - 1) / sums * sums;
        for (auto& array : u_) { array = cut.take<float>(padded); }
        for (auto& array : q_) { array = cut.take<float>(padded); }
    }

    /// Makes the matrix tridiagonal by reflections from the last row up, each of which leaves of a row only what is beside the
    /// diagonal, and is kept in that row. Writes the diagonal [D] and what is beside it [D], entry i between rows i and i + 1.
    template <team Team>
    MDKV_OUTLINE MDKV_HD void tridiagonalise(
        Team const& t, square_matrix const& a, double* diagonal, double* beside) const
    {
        index_t const n      = a.size;
        index_t const padded = (n + sums - 1) / sums * sums;
        for (index_t k = t.rank(); k < padded; k += t.size()) { u_[0][k] = u_[1][k] = q_[0][k] = q_[1][k] = 0.0F; }
        t.sync();
        float* u_last = u_[0];
        float* q_last = q_[0];
        float* u      = u_[1];
        float* q      = q_[1];
        for (index_t i = n - 1; i > 0; --i)
        {
            // The last reflection is yet to be applied to rows 0 to i.
            float* const row = a.row(i);
            float const u_i  = u_last[i];
            float const q_i  = q_last[i];
            for (index_t k = t.rank(); k < i - 1; k += t.size())
            {
                u[k] = row[k] - (u_i * q_last[k] + q_i * u_last[k]);
            }
            for (index_t k = i - 1 + t.rank(); k < padded; k += t.size()) { u[k] = 0.0F; }
            double const pivot = static_cast<double>(row[i - 1] - (u_i * q_last[i - 1] + q_i * u_last[i - 1]));
            double const rest  = dot(t, u, u, i - 1);
            double const size  = sqrt(rest + pivot * pivot);
            bool const reflect = rest > 0;
            // u'u = 2. The sign is the one that does not cancel.
            double const by = reflect ? 1 / sqrt(size * (size + fabs(pivot))) : 0;
            if (t.rank() == 0)
            {
                double const far = pivot < 0 ? -size : size;
                diagonal[i]      = static_cast<double>(row[i] - (u_i * q_i + q_i * u_i));
                beside[i - 1]    = reflect ? -far : pivot;
                u[i - 1]         = static_cast<float>((pivot + far) * by);
            }
            for (index_t k = t.rank(); k < i - 1; k += t.size())
            {
                u[k] = static_cast<float>(static_cast<double>(u[k]) * by);
            }
            t.sync();
            for (index_t k = t.rank(); k < i; k += t.size()) { row[k] = u[k]; }
            reflect_and_multiply<true>(t, a, i, u_last, q_last, u, q);
            float const half = static_cast<float>(0.5 * dot(t, u, q, i));
            for (index_t k = t.rank(); k < i; k += t.size()) { q[k] -= half * u[k]; }
            for (index_t k = i + t.rank(); k < padded; k += t.size()) { q[k] = 0.0F; }
            t.sync();
            exchange(u, u_last);
            exchange(q, q_last);
        }
        if (t.rank() == 0) { diagonal[0] = static_cast<double>(*a.data); }
    }

    /// Replaces the reflections by their product Q in the order of rows n - 1 to 0, and that by its transpose.
    template <team Team>
    MDKV_HD void multiply(Team const& t, square_matrix const& a) const
    {
        index_t const n = a.size;
        float* u        = u_[0];
        float* g        = q_[0];
        float* u_next   = u_[1];
        float* g_next   = q_[1];
        for (index_t k = t.rank(); k < n; k += t.size()) { u[k] = g[k] = 0.0F; }
        for (index_t i = 0; i < n; ++i)
        {
            // Rows and columns below i hold the product before the reflection that row i kept, which is now in u; g is
            // the product of u and them. One pass applies the reflection and finds the same for row i + 1.
            if (i + 1 < n)
            {
                for (index_t k = t.rank(); k <= i; k += t.size()) { u_next[k] = a.row(i + 1)[k]; }
            }
            t.sync();
            reflect_and_multiply<false>(t, a, i, u, g, u_next, g_next);
            t.sync();
            for (index_t k = t.rank(); k <= i; k += t.size())
            {
                a.row(k)[i] = 0.0F;
                a.row(i)[k] = k == i ? 1.0F : 0.0F;
            }
            if (t.rank() == 0) { g_next[i] = u_next[i]; }
            exchange(u, u_next);
            exchange(g, g_next);
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

    MDKV_HD static void exchange(float*& a, float*& b)
    {
        float* const kept = a;
        a                 = b;
        b                 = kept;
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
            double sum[lanes] = {};
            for (index_t k = p; k < n; k += sums)
            {
                MDKV_FOR_LANES(l, lanes)
                {
                    sum[l] += static_cast<double>(a[k + l]) * static_cast<double>(b[k + l]);
                }
            }
            MDKV_FOR_LANES(l, lanes)
            {
                partial_[p + l] = sum[l];
            }
        }
        t.sync();
        double all = 0;
        for (index_t p = 0; p < sums; ++p) { all += partial_[p]; }
        return all;
    }

    /// Applies a reflection to rows and columns 0 to n - 1 of A, from both sides or from the left, where q is u'A, and
    /// multiplies them with another u, in one pass: product = u'A.
    template <bool BothSides, team Team>
    MDKV_HD static void reflect_and_multiply(Team const& t, square_matrix const& a, index_t n, float const* u_last,
        float const* q_last, float const* u, float* product)
    {
        for_columns(t, n, a.size, [&](index_t k, auto width) {
            constexpr int count = decltype(width)::value;
            float u_k[count];
            float q_k[count];
            float sum[count];
            MDKV_FOR_LANES(l, count)
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
                MDKV_FOR_LANES(l, count)
                {
                    float const x = row[l] - (BothSides ? u_j * q_k[l] + q_j * u_k[l] : u_j * q_k[l]);
                    row[l]        = x;
                    sum[l] += x * v_j;
                }
            }
            MDKV_FOR_LANES(l, count)
            {
                product[k + l] = sum[l];
            }
        });
    }

    double* partial_; // [sums]
    float* u_[2];     // [2, D] this and the last reflection, I - u u'; 0 behind the rows that it touches
    float* q_[2];     // [2, D] A - u q' - q u' is the matrix reflected from both sides
};

} // namespace mdkv::detail
