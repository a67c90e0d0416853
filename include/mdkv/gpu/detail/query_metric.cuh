/// \file query_metric.cuh: kernels of fit_query_aware_basis: what queries make of the keys' Gram matrix.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/collectives.cuh>
#include <mdkv/gpu/device.cuh>

#include <cmath>

namespace mdkv::gpu::kernels
{

/// Of every head, from the energies of its queries' Gram matrix: by how much S stretches each direction, and its inverse; and
/// what energies are multiplied with at the end: 0 where the queries say nothing (S is then the identity).
struct query_scales
{
    static constexpr char const* name      = "query_scales";
    static constexpr int threads           = 256;
    static constexpr double isotropic_part = 0.05;

    in_view<double, 3, backend> gram;  // [H, D, D]  Q'Q
    in_view<float, 2, backend> energy; // [H, D]
    double* stretch;                   // [2, H, D]
    double* factor;                    // [H]
    index_t count;                     // queries that were summed

    [[nodiscard]] index_t shared_bytes() const { return threads / device::warp_size * index_t{sizeof(double)}; }

    __device__ void operator()() const
    {
        index_t const head  = device::block();
        index_t const heads = gram.extent(0);
        index_t const dim   = gram.extent(1);
        auto* const part    = reinterpret_cast<double*>(device::shared_memory());
        double trace        = 0;
        for (index_t i = device::thread(); i < dim; i += threads) { trace += gram(head, i, i); }
        trace              = device::block_sum(trace, part);
        double const mean  = count > 0 ? trace / static_cast<double>(count * dim) : 0;
        bool const weighed = mean > 0 && mean - mean == 0;
        for (index_t i = device::thread(); i < dim; i += threads)
        {
            double const share =
                weighed ? static_cast<double>(energy(head, i)) / (mean * static_cast<double>(count)) : 1;
            double const kept                 = share > 0 ? share : 0;
            double const root                 = sqrt((kept + isotropic_part) / (1 + isotropic_part));
            stretch[head * dim + i]           = root;
            stretch[(heads + head) * dim + i] = 1 / root;
        }
        // An energy that is no number says that the matrix is not finite.
        double const spoilt = static_cast<double>(energy(head, 0)) - static_cast<double>(energy(head, 0));
        if (device::thread() == 0) { factor[head] = (mean > 0 ? mean * (1 + isotropic_part) : 0.0) + spoilt; }
    }
};

/// Energies times their head's factor.
struct scale_energies
{
    static constexpr char const* name = "scale_energies";
    static constexpr int threads      = 256;

    out_view<float, 2, backend> energy;
    double const* factor; // [H]

    __device__ void operator()() const
    {
        index_t const head = device::block();
        for (index_t i = device::thread(); i < energy.extent(1); i += threads)
        {
            energy(head, i) = static_cast<float>(static_cast<double>(energy(head, i)) * factor[head]);
        }
    }
};

/// Side of the results of a block of weighted_products, and how many factors are in shared memory at once.
inline constexpr int small_tile = 16;

/// Small products in double, one for each head: to(i, j) = scale * sum over k of a(k, i) w(k) b(k, j), all of D x D.
template <class Left, class Result>
struct weighted_products
{
    static constexpr char const* name = "weighted_products";
    static constexpr int side         = small_tile;
    static constexpr int threads      = side * side;
    static constexpr int pitch        = side + 1;

    Left const* a;         // [H, D, D]
    bool a_turned;         ///< read a(i, k) for a(k, i)
    double const* weights; // [H, D] or null: ones
    Left const* b_like_a;  // [H, D, D] or null: b is
    double const* b;       // [H, D, D]
    double scale;
    out_view<Result, 3, backend> to;

    [[nodiscard]] index_t shared_bytes() const { return 2 * side * pitch * index_t{sizeof(double)}; }

    __device__ void operator()() const
    {
        index_t const dim    = to.extent(1);
        index_t const across = (dim + side - 1) / side;
        index_t const head   = device::block() / (across * across);
        index_t const row    = device::block() / across % across * side;
        index_t const column = device::block() % across * side;
        int const y          = device::thread() / side;
        int const x          = device::thread() % side;
        auto* const left     = reinterpret_cast<double*>(device::shared_memory()); // [k, i]
        double* const right  = left + side * pitch;                                // [k, j]
        Left const* const as = a + head * dim * dim;
        double sum           = 0;
        for (index_t k = 0; k < dim; k += side)
        {
            // Neighbouring threads read neighbours, so a matrix that is read turned is turned on its way.
            index_t const ak = k + (a_turned ? x : y);
            index_t const ai = row + (a_turned ? y : x);
            double value     = 0;
            if (ak < dim && ai < dim)
            {
                value = static_cast<double>(as[a_turned ? ai * dim + ak : ak * dim + ai]);
                if (weights != nullptr) { value *= weights[head * dim + ak]; }
            }
            index_t const bk = k + y;
            index_t const bj = column + x;
            double other     = 0;
            if (bk < dim && bj < dim)
            {
                index_t const at = (head * dim + bk) * dim + bj;
                other            = b_like_a != nullptr ? static_cast<double>(b_like_a[at]) : b[at];
            }
            device::sync();
            left[a_turned ? x * pitch + y : y * pitch + x] = value;
            right[y * pitch + x]                           = other;
            device::sync();
            for (int d = 0; d < side; ++d) { sum += left[d * pitch + y] * right[d * pitch + x]; }
        }
        if (row + y < dim && column + x < dim) { to(head, row + y, column + x) = static_cast<Result>(sum * scale); }
    }
};

/// Zeros.
struct clear_doubles
{
    static constexpr char const* name  = "clear_doubles";
    static constexpr int threads       = 256;
    static constexpr index_t per_block = 4096;

    double* to;
    index_t count;

    __device__ void operator()() const
    {
        index_t const first = device::block() * per_block;
        for (index_t i = first + device::thread(); i < first + per_block && i < count; i += threads) { to[i] = 0; }
    }
};

} // namespace mdkv::gpu::kernels
