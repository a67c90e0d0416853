/// \file basis.hpp: Gram matrices and the bases made of them on the CPU (arXiv 2603.20616, section 4.1).
#pragma once

#include <mdkv/basis.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/tile.hpp>

#include <Eigen/Eigenvalues>

#include <algorithm>
#include <cmath>

namespace mdkv::cpu
{

namespace detail
{

/// How a head's samples are cut: few enough parts to afford one Gram matrix each, enough to keep threads busy. Fixed, so
/// that sums do not depend on the number of threads.
inline constexpr index_t gram_parts       = 4;
inline constexpr index_t gram_block       = 256; // samples summed in float before they are added in double
inline constexpr index_t gram_least_share = 512; // samples that make a part worth its own sum

/// Adds X'X of one block (upper triangle, by tiles) to sum [dim, step].
inline void add_block_gram(float const* block, index_t samples, index_t dim, index_t step, double* sum) noexcept
{
    for (index_t i = 0; i < dim; i += tile::rows)
    {
        index_t const first = i / tile::width * tile::width; // tiles left of the diagonal are mirrored later
        for (index_t j = first; j < dim; j += tile::width)
        {
            tile::accumulators<tile::vectors> acc;
            tile::clear(acc);
            tile::multiply_add(block + i, 1, step, block + j, step, samples, acc);
            float products[tile::rows][tile::width];
            tile::unroll<tile::rows>([&](auto a) {
                tile::unroll<tile::vectors>([&](auto v) { simd::store(&products[a][v * simd::lanes], acc[a][v]); });
            });
            index_t const columns = std::min<index_t>(tile::width, dim - j);
            for (index_t a = 0; a < std::min<index_t>(tile::rows, dim - i); ++a)
            {
                double* const row = sum + (i + a) * dim + j;
                for (index_t b = 0; b < columns; ++b) { row[b] += static_cast<double>(products[a][b]); }
            }
        }
    }
}

/// `what` names the stage and the matrix in the message.
inline void expects_finite_gram(in_view<double, 3, backend> gram, char const* what)
{
    for (index_t head = 0; head < gram.extent(0); ++head)
    {
        for (index_t i = 0; i < gram.extent(1); ++i)
        {
            for (index_t j = 0; j < gram.extent(2); ++j)
            {
                expects(
                    std::isfinite(gram(head, i, j)), what, " of head ", head, " is not finite at (", i, ", ", j, ")");
            }
        }
    }
}

using square_matrix    = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic>;
using symmetric_solver = Eigen::SelfAdjointEigenSolver<square_matrix>; // ascending; reads the lower triangle

/// Queries as fit_query_aware_basis weighs keys with: S, its inverse, and c.
struct query_metric
{
    square_matrix root;
    square_matrix inverse_root;
    double mean; ///< of the diagonal of C_q; 0 where no query says anything, and S is the identity
};

/// gram: Q'Q of one head, summed over `count` queries.
[[nodiscard]] inline query_metric metric_of(Eigen::Ref<square_matrix const> gram, index_t count, index_t head)
{
    constexpr double isotropic_part = 0.05;
    index_t const dim               = gram.rows();
    double const mean               = count > 0 ? gram.trace() / static_cast<double>(count * dim) : 0;
    if (!(mean > 0)) { return {square_matrix::Identity(dim, dim), square_matrix::Identity(dim, dim), 0}; }
    symmetric_solver const parts{gram / (mean * static_cast<double>(count))};
    expects(parts.info() == Eigen::Success,
        "fit_query_aware_basis: the eigenvectors of the queries' Gram matrix of head ", head, " did not converge");
    Eigen::ArrayXd const scales =
        ((parts.eigenvalues().array().max(0.0) + isotropic_part) / (1 + isotropic_part)).sqrt();
    square_matrix const& v = parts.eigenvectors();
    return {v * scales.matrix().asDiagonal() * v.transpose(),
        v * scales.inverse().matrix().asDiagonal() * v.transpose(), mean * (1 + isotropic_part)};
}

/// Of one head: row i of `of_keys` and `of_queries` belongs to eigenvalue i; the weakest first, as the solver has them.
struct query_aware_pair
{
    square_matrix of_keys;
    square_matrix of_queries;
    Eigen::VectorXd energy;
};

/// keys: K'K summed over `tokens`; queries: Q'Q summed over `count`.
[[nodiscard]] inline query_aware_pair query_aware_pair_of(Eigen::Ref<square_matrix const> keys, index_t tokens,
    Eigen::Ref<square_matrix const> queries, index_t count, index_t head)
{
    query_metric const metric = metric_of(queries, count, head);
    // Both factors to unit scale, so that no product leaves double's range.
    double const largest = keys.diagonal().maxCoeff();
    double const unit    = largest > 0 ? largest : 1;
    symmetric_solver const parts{metric.root * (keys / unit) * metric.root};
    expects(
        parts.info() == Eigen::Success, "fit_query_aware_basis: the eigenvectors of head ", head, " did not converge");
    double const scale = unit / static_cast<double>(std::max<index_t>(tokens, 1)) * metric.mean;
    return {parts.eigenvectors().transpose() * metric.root, parts.eigenvectors().transpose() * metric.inverse_root,
        parts.eigenvalues().cwiseMax(0.0) * scale};
}

} // namespace detail

template <element T>
void accumulate_gram_impl(backend const& on, in_view<T, 3, backend> samples, out_view<double, 3, backend> gram)
{
    index_t const heads = samples.extent(0);
    index_t const count = samples.extent(1);
    index_t const dim   = samples.extent(2);
    index_t const step  = tile::round_up(std::max<index_t>(dim, 1), tile::width);
    index_t const parts = std::clamp<index_t>(count / detail::gram_least_share, 1, detail::gram_parts);
    workspace::frame frame{*on.scratch, "accumulate_gram"};
    double* const sums  = frame.take<double>(checked_multiply(heads * parts, dim * dim)); // [H, parts, D, D]
    float* const blocks = frame.take<float>(on.slots(heads * parts) * (detail::gram_block * step + tile::width));
    if (!frame.ready()) { return; }

    on.for_each(heads * parts, [&](index_t item, index_t slot) {
        index_t const head = item / parts;
        index_t const part = item % parts;
        float* const block = blocks + slot * (detail::gram_block * step + tile::width); // [gram_block, step]
        double* const sum  = sums + item * dim * dim;
        std::fill_n(sum, dim * dim, 0.0);
        std::fill_n(block, detail::gram_block * step + tile::width, 0.0F);
        index_t const end = count * (part + 1) / parts;
        for (index_t t = count * part / parts; t < end; t += detail::gram_block)
        {
            index_t const rows = std::min(detail::gram_block, end - t);
            for (index_t i = 0; i < rows; ++i)
            {
                tile::widen_row(
                    samples.data_handle() + samples.mapping()(head, t + i, index_t{0}), block + i * step, dim);
            }
            detail::add_block_gram(block, rows, dim, step, sum);
        }
    });
    for (index_t head = 0; head < heads; ++head)
    {
        for (index_t i = 0; i < dim; ++i)
        {
            for (index_t j = i; j < dim; ++j)
            {
                double total = 0;
                for (index_t part = 0; part < parts; ++part)
                {
                    total += sums[((head * parts + part) * dim + i) * dim + j];
                }
                gram(head, i, j) += total;
                if (i != j) { gram(head, j, i) += total; }
            }
        }
    }
}

inline void eigenbasis_impl(backend const& on, in_view<double, 3, backend> gram, out_view<float, 3, backend> basis,
    out_view<float, 2, backend> energy)
{
    if (on.scratch->counting()) { return; }
    detail::expects_finite_gram(gram, "eigenbasis: gram");
    index_t const heads = gram.extent(0);
    index_t const dim   = gram.extent(2);
    if (dim == 0) { return; }
    on.for_each(heads, [&](index_t head, index_t) {
        using matrix   = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic>;
        double largest = 0;
        for (index_t i = 0; i < dim; ++i) { largest = std::max(largest, std::abs(gram(head, i, i))); }
        // To unit scale, so that neither huge nor tiny keys leave float's range.
        double const unit = largest > 0 ? 1 / largest : 1;
        matrix scaled(dim, dim);
        for (index_t i = 0; i < dim; ++i)
        {
            for (index_t j = 0; j < dim; ++j) { scaled(i, j) = static_cast<float>(gram(head, i, j) * unit); }
        }
        Eigen::SelfAdjointEigenSolver<matrix> const solver{scaled};
        expects(solver.info() == Eigen::Success, "eigenbasis: the eigenvectors of head ", head, " did not converge");
        for (index_t i = 0; i < dim; ++i)
        {
            index_t const from = dim - 1 - i; // the solver's order is ascending
            energy(head, i) = static_cast<float>(std::max(0.0, static_cast<double>(solver.eigenvalues()[from])) / unit);
            for (index_t j = 0; j < dim; ++j) { basis(head, i, j) = solver.eigenvectors()(j, from); }
        }
    });
}

template <element T>
void fit_basis_impl(backend const& on, in_view<T, 3, backend> samples, out_view<float, 3, backend> basis,
    out_view<float, 2, backend> energy)
{
    index_t const heads = samples.extent(0);
    index_t const dim   = samples.extent(2);
    workspace::frame frame{*on.scratch, "fit_basis"};
    double* const memory = frame.take<double>(checked_multiply(heads, dim * dim));
    auto const gram      = out(on, memory, heads, dim, dim);
    if (!frame.ready())
    {
        accumulate_gram_impl(on, samples, gram);
        return;
    }
    std::fill_n(memory, heads * dim * dim, 0.0);
    accumulate_gram_impl(on, samples, gram);
    eigenbasis_impl(on, in(on, memory, heads, dim, dim), basis, energy);
}

template <element T>
void fit_query_aware_basis_impl(backend const& on, in_view<T, 3, backend> queries, in_view<T, 3, backend> keys,
    out_view<float, 3, backend> of_keys, out_view<float, 3, backend> of_queries, out_view<float, 2, backend> energy)
{
    index_t const heads = keys.extent(0);
    index_t const dim   = keys.extent(2);
    index_t const group = heads > 0 && queries.extent(1) > 0 ? queries.extent(0) / heads : 0;
    workspace::frame frame{*on.scratch, "fit_query_aware_basis"};
    index_t const size    = checked_multiply(heads, dim * dim);
    double* const of_k    = frame.take<double>(size); // [H, D, D]
    double* const of_q    = frame.take<double>(size); // [H, D, D]
    auto const key_gram   = out(on, of_k, heads, dim, dim);
    auto const query_gram = out(on, of_q, heads, dim, dim);
    bool const ready      = frame.ready();
    if (ready)
    {
        std::fill_n(of_k, size, 0.0);
        std::fill_n(of_q, size, 0.0);
    }
    accumulate_gram_impl(on, keys, key_gram);
    for (index_t g = 0; g < group; ++g)
    {
        // Member g of every group: query heads g, G + g, 2 G + g, ...
        auto const& map    = queries.mapping();
        T const* const row = queries.data_handle() == nullptr ? nullptr : queries.data_handle() + g * map.stride(0);
        accumulate_gram_impl(on,
            in(on, row, {heads, queries.extent(1), dim}, {checked_multiply(group, map.stride(0)), map.stride(1), 1}),
            query_gram);
    }
    if (!ready || dim == 0) { return; }
    detail::expects_finite_gram(key_gram, "fit_query_aware_basis: the keys' Gram matrix");
    detail::expects_finite_gram(query_gram, "fit_query_aware_basis: the queries' Gram matrix");
    index_t const count = checked_multiply(group, queries.extent(1));
    on.for_each(heads, [&](index_t head, index_t) {
        using gram_of   = Eigen::Map<detail::square_matrix const>;
        auto const pair = detail::query_aware_pair_of(gram_of{of_k + head * dim * dim, dim, dim}, keys.extent(1),
            gram_of{of_q + head * dim * dim, dim, dim}, count, head);
        for (index_t i = 0; i < dim; ++i)
        {
            index_t const from = dim - 1 - i;
            energy(head, i)    = static_cast<float>(pair.energy[from]);
            for (index_t j = 0; j < dim; ++j)
            {
                of_keys(head, i, j)    = static_cast<float>(pair.of_keys(from, j));
                of_queries(head, i, j) = static_cast<float>(pair.of_queries(from, j));
            }
        }
    });
}

} // namespace mdkv::cpu
