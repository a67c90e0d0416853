/// \file score_prepare.cuh: what score prepares once a head: scaled queries, bases, queries in the key basis (arXiv 2603.20616, section 4.2).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/score_plan.cuh>
#include <mdkv/gpu/device.cuh>

#include <cstring>

#include <vector_types.h>

namespace mdkv::gpu::kernels
{

/// Queries to columns, scaled; and as they are, in the order in which tensor cores take them (see multiply_exact).
template <element T>
struct score_queries
{
    static constexpr char const* name = "score_queries";
    static constexpr int threads      = 256;

    in_view<T, 3, backend> queries;
    detail::score_plan plan;
    detail::score_operands operands;
    index_t blocks_per_head;

    [[nodiscard]] __device__ T at(index_t head, int row, int d) const
    {
        if (row >= plan.query_rows) { return narrow<T>(0.0F); }
        return queries(head * (plan.query_rows / plan.per_head) + row / plan.per_head, row % plan.per_head, d);
    }

    __device__ void operator()() const
    {
        index_t const head         = device::block() / blocks_per_head;
        index_t const item         = device::block() % blocks_per_head * threads + device::thread();
        detail::score_head const h = operands.of(head);
        if (item >= index_t{plan.rows} * plan.dim) { return; }
        h.queries[item] =
            widen(at(head, static_cast<int>(item % plan.rows), static_cast<int>(item / plan.rows))) * plan.to_log2;
        if constexpr (sizeof(T) == 2)
        {
            if (!plan.tensor || item >= index_t{plan.rows} * plan.dim / 8) { return; }
            int const lane   = static_cast<int>(item % device::warp_size);
            int const depths = plan.dim / detail::score_depth;
            int const depth  = static_cast<int>(item / device::warp_size % depths);
            int const panel  = static_cast<int>(item / device::warp_size / depths);
            T pairs[2][2][2]; // [product][coordinates from 0 or 8][two]
            for (int i = 0; i < 8; ++i)
            {
                int const row                  = panel * detail::score_panel + lane / 8 * 4 + i / 4 * 2 + lane / 4 % 2;
                int const d                    = depth * detail::score_depth + lane % 4 * 2 + i / 2 % 2 * 8 + i % 2;
                pairs[i / 4][i / 2 % 2][i % 2] = at(head, row, d);
            }
            std::memcpy(h.fragments + item, pairs, sizeof pairs);
        }
    }
};

/// Leading directions of a basis, as rows or as columns, zero-padded.
struct score_basis_copy
{
    in_view<float, 3, backend> from;
    index_t to; ///< in a head's operands
    int count;  ///< directions
    int width;  ///< of a row of the copy
    bool columns;
};

/// One block a head and basis.
struct score_bases
{
    static constexpr char const* name = "score_bases";
    static constexpr int threads      = 256;
    static constexpr int copies       = 3;

    score_basis_copy copy[copies];
    detail::score_operands operands;

    __device__ void operator()() const
    {
        index_t const head       = device::block() / copies;
        score_basis_copy const c = copy[device::block() % copies];
        float* const to          = operands.memory + head * operands.per_head + c.to;
        if (c.count == 0) { return; } // the basis may be none at all
        index_t const dim  = c.from.extent(2);
        index_t const size = (c.columns ? dim : c.count) * index_t{c.width};
        for (index_t item = device::thread(); item < size; item += threads)
        {
            index_t const major     = item / c.width;
            index_t const minor     = item % c.width;
            index_t const direction = c.columns ? minor : major;
            index_t const d         = c.columns ? major : minor;
            to[item]                = direction < c.count && d < dim ? c.from(head, direction, d) : 0.0F;
        }
    }
};

/// Queries in the key basis: one thread a query and direction.
struct score_query_latents
{
    static constexpr char const* name = "score_query_latents";
    static constexpr int threads      = 256;

    in_view<float, 3, backend> basis; // [H, D, D]  of_queries
    detail::score_plan plan;
    detail::score_operands operands;
    index_t blocks_per_head;

    __device__ void operator()() const
    {
        index_t const head         = device::block() / blocks_per_head;
        index_t const item         = device::block() % blocks_per_head * threads + device::thread();
        detail::score_head const h = operands.of(head);
        if (item >= index_t{plan.rows} * plan.latent) { return; }
        float const* query           = h.queries + item % plan.rows;
        float const* const direction = &basis(head, item / plan.rows, 0);
        float sum                    = 0;
        for (int d = 0; d < plan.dim; ++d, query += plan.rows) { sum += direction[d] * *query; }
        h.latents[item] = sum;
    }
};

} // namespace mdkv::gpu::kernels
