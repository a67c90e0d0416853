/// \file recompress_bases.cuh: a head's stored projections as rows of bases on the GPU: that of queries, and what brought keys to their coordinates.
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/gpu/detail/stored_run.cuh>
#include <mdkv/gpu/device.cuh>

#include <cmath>
#include <cstddef>

namespace mdkv::gpu::kernels
{

/// One block a head; rows beyond the stored columns are 0. What brings queries to coordinates is stored; what brought keys
/// there is taken to be the one of least squares, in double (cpu/detail/read_stored.hpp: the same sums).
template <element T>
struct stored_projections
{
    static constexpr char const* name = "stored_projections";
    static constexpr int threads      = 128;

    cache_view<T, space::device> cache;
    float* of_keys;    // [H, D, D]
    float* of_queries; // [H, D, D]
    float* of_values;  // [H, Dv, Dv]
    double* solving;   // [H, 2 * D * D]

    /// The least squares of one head.
    struct system
    {
        double* gram; // [n, n]    rows times rows, then its triangular factor
        double* rows; // [n, dim]  the queries' rows, then the keys'
        index_t n;
        index_t dim;
    };

    __device__ void operator()() const
    {
        index_t const h         = device::block();
        head_entry const& entry = cache.heads[h];
        index_t const dim       = cache.layout.dims.keys;
        index_t const value_dim = cache.layout.dims.values;
        double* const memory    = solving + h * 2 * dim * dim;
        system const all{memory, memory + dim * dim, entry.key_columns, dim};

        std::byte const* const values = cache.arena + entry.value_projection;
        for (index_t i = device::thread(); i < value_dim * value_dim; i += threads)
        {
            of_values[h * value_dim * value_dim + i] =
                i < entry.value_columns * value_dim ? widen(element_at<T>(values, i)) : 0.0F;
        }
        std::byte const* const keys = cache.arena + entry.key_projection; // [dim, n]
        for (index_t i = device::thread(); i < dim * dim; i += threads)
        {
            bool const stored             = i / dim < all.n;
            float const x                 = stored ? widen(element_at<T>(keys, i % dim * all.n + i / dim)) : 0.0F;
            of_queries[h * dim * dim + i] = x;
            if (stored) { all.rows[i] = double{x}; }
            else { of_keys[h * dim * dim + i] = 0.0F; }
        }
        for (index_t i = device::thread(); i < all.n * all.n; i += threads)
        {
            double sum = 0;
            for (index_t d = 0; d < dim; ++d)
            {
                sum = device::add_product(sum, double{widen(element_at<T>(keys, d * all.n + i / all.n))},
                    double{widen(element_at<T>(keys, d * all.n + i % all.n))});
            }
            all.gram[i] = sum;
        }
        device::sync();
        decompose(all);
        for (index_t d = device::thread(); d < dim; d += threads)
        {
            solve(all, d);
            for (index_t i = 0; i < all.n; ++i)
            {
                of_keys[(h * dim + i) * dim + d] = static_cast<float>(all.rows[i * dim + d]);
            }
        }
    }

private:
    /// Cholesky's factor in place of the matrix' lower half, column by column. A coordinate that depends on those before it
    /// has a pivot of 0.
    __device__ static void decompose(system const& x)
    {
        constexpr double negligible = 1e-10;
        for (index_t j = 0; j < x.n; ++j)
        {
            double const* const row = x.gram + j * x.n;
            double left             = row[j];
            for (index_t k = 0; k < j; ++k) { left = device::add_product(left, -row[k], row[k]); }
            double const pivot = left > negligible * row[j] ? sqrt(left) : 0.0;
            device::sync(); // all have read the diagonal
            if (device::thread() == 0) { x.gram[j * x.n + j] = pivot; }
            for (index_t i = j + 1 + device::thread(); i < x.n; i += threads)
            {
                double* const below = x.gram + i * x.n;
                double sum          = below[j];
                for (index_t k = 0; k < j; ++k) { sum = device::add_product(sum, -below[k], row[k]); }
                below[j] = pivot > 0 ? sum / pivot : 0.0;
            }
            device::sync();
        }
    }

    /// Column d of the rows, forwards and backwards: no thread needs another's.
    __device__ static void solve(system const& x, index_t d)
    {
        auto const factor = [&](index_t i) {
            double const pivot = x.gram[i * x.n + i];
            return pivot > 0 ? 1 / pivot : 0.0;
        };
        for (index_t i = 0; i < x.n; ++i)
        {
            double sum = x.rows[i * x.dim + d];
            for (index_t k = 0; k < i; ++k)
            {
                sum = device::add_product(sum, -x.gram[i * x.n + k], x.rows[k * x.dim + d]);
            }
            x.rows[i * x.dim + d] = sum * factor(i);
        }
        for (index_t i = x.n; i-- > 0;)
        {
            double sum = x.rows[i * x.dim + d];
            for (index_t k = i + 1; k < x.n; ++k)
            {
                sum = device::add_product(sum, -x.gram[k * x.n + i], x.rows[k * x.dim + d]);
            }
            x.rows[i * x.dim + d] = sum * factor(i);
        }
    }
};

} // namespace mdkv::gpu::kernels
