/// \file score_prepare.cuh: operands of a head that score prepares on a GPU only: queries in the key basis and in the order of tensor cores (arXiv 2603.20616, section 4.2).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/score_tiling.cuh>
#include <mdkv/gpu/device.cuh>

#include <cstring>

#include <vector_types.h>

namespace mdkv::gpu::kernels
{

/// One block a head and panel of rows.
template <element T>
struct score_panels
{
    static constexpr char const* name = "score_panels";
    static constexpr int threads      = 256;
    static constexpr int panel        = detail::score_panel;

    in_view<T, 3, backend> queries;
    in_view<float, 3, backend> basis; // [H, D, D]  of keys
    detail::score_plan plan;
    detail::score_operands operands;
    bool tensor;

    __device__ void operator()() const
    {
        int const panels           = plan.rows / panel;
        index_t const head         = device::block() / panels;
        auto const at              = static_cast<int>(device::block() % panels);
        detail::score_head const h = operands.of(head);
        multiply(
            head, h.queries + index_t{at} * plan.dim * panel, h.latents + index_t{at} * plan.key_columns() * panel);
        if constexpr (sizeof(T) == 2)
        {
            int const fragments = plan.dim / detail::score_depth * device::warp_size; // of a panel
            uint4* const to     = detail::score_extra{h, plan}.fragments + index_t{at} * fragments;
            for (int i = device::thread(); tensor && i < fragments; i += threads)
            {
                write_fragment(head, at * panel, i, to + i);
            }
        }
    }

private:
    /// Queries in the key basis: one thread a query and direction.
    __device__ void multiply(index_t head, float const* rows, float* latents) const
    {
        for (int i = device::thread(); i < plan.latent * panel; i += threads)
        {
            float const* const direction = basis.row(head, i / panel);
            float sum                    = 0;
            for (int d = 0; d < plan.dim; ++d) { sum += direction[d] * rows[d * panel + i % panel]; }
            latents[i] = sum;
        }
    }

    /// Queries as they are, in the order in which tensor cores take them (see multiply_exact).
    __device__ void write_fragment(index_t head, int first_row, int i, uint4* to) const
    {
        int const lane = i % device::warp_size;
        T pairs[2][2][2]; // [product][coordinates from 0 or 8][two]
        for (int j = 0; j < 8; ++j)
        {
            int const row = first_row + lane / 8 * 4 + j / 4 * 2 + lane / 4 % 2;
            int const d   = i / device::warp_size * detail::score_depth + lane % 4 * 2 + j / 2 % 2 * 8 + j % 2;
            pairs[j / 4][j / 2 % 2][j % 2] =
                row >= plan.query_rows
                    ? narrow<T>(0.0F)
                    : queries(head * (plan.query_rows / plan.per_head) + row / plan.per_head, row % plan.per_head, d);
        }
        std::memcpy(to, pairs, sizeof pairs);
    }
};

} // namespace mdkv::gpu::kernels
