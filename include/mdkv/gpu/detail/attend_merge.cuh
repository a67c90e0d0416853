/// \file attend_merge.cuh: the kernel that merges what a query's slices have left, and brings projected sums back (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/attend_batch.cuh>
#include <mdkv/gpu/detail/attend_block.cuh>
#include <mdkv/gpu/detail/attend_rows.cuh>
#include <mdkv/gpu/detail/attend_sums.cuh>
#include <mdkv/gpu/device.cuh>

#include <cmath>

#include <vector_types.h>

namespace MDKV_NAMESPACE::gpu::kernels
{

/// One query, by a block: its slices are shared out over the warps, and the loads of many slices are under way together, so that
/// memory is waited for equally often whatever their number.
template <element T, element U, int Columns, int Most>
struct attend_merge
{
    static constexpr char const* name = "attend_merge";
    static constexpr int threads      = 256;
    static constexpr int warps        = threads / device::warp_size;
    static constexpr int each         = Columns / (2 * device::warp_size); // pairs of columns of a lane
    static constexpr int at_once      = 6; // slices of a warp whose loads are under way together

    attend_batch<Most> batch;
    attend_states states;
    out_view<U, 3, backend> output;
    out_view<float, 2, backend> lse;
    in_view<float, 2, backend> lse_elsewhere; ///< or null

    struct scratch
    {
        float2* factors; // [slices]: of sums in the original basis, and of projected ones; one of them is 0
        float* partial;  // [2, warps, Columns]: sums of a warp's slices in the original basis, and projected ones
        float* sums;     // [values], and behind them the projected ones
        float* tops;     // [warps]
        float* totals;   // [warps]
    };
    [[nodiscard]] MDKV_HD scratch carve(mdkv::detail::carver& memory) const
    {
        return {memory.take<float2>(batch.most_slices), memory.take<float>(2 * warps * Columns),
            memory.take<float>(states.sizes.values + states.sizes.value_latents), memory.take<float>(warps),
            memory.take<float>(warps)};
    }

    __device__ void operator()() const
    {
        mdkv::detail::carver memory{device::shared_memory()};
        scratch const smem              = carve(memory);
        auto const block                = static_cast<int>(device::block());
        int const row                   = batch.tokens == 1 ? block : block / batch.tokens;
        index_t const token             = batch.sequences[0].first_token + (block - row * batch.tokens);
        attend_sequence const& sequence = batch.template at<&attend_sequence::first_token>(token);
        // The row's number among those of the sequence, of its head, and of its block.
        int const in_sequence = row * sequence.tokens + static_cast<int>(token - sequence.first_token);
        int const head        = in_sequence / sequence.head_rows;
        int const in_head     = in_sequence - head * sequence.head_rows;
        int const g           = in_head % attend_queries;
        int const replica     = in_head / attend_queries * states.column_blocks();
        int const lane        = device::lane();
        int const warp        = device::warp();
        auto const* const range =
            states.slices(static_cast<int>(&sequence - batch.sequences.data()) * batch.heads + head);
        int const slices                        = range[1] - range[0];
        int const first                         = sequence.first_block + replica * sequence.blocks + range[0];
        int const values                        = states.sizes.values;
        bool const latent                       = states.sizes.value_latents > 0;
        mdkv::detail::softmax_state const other = mdkv::detail::softmax_of(
            lse_elsewhere.empty() ? mdkv::detail::empty_lse : mdkv::detail::of_query(lse_elsewhere, row, token));
        mdkv::detail::softmax_state const softmax = merge_softmaxes(smem, first, slices, g, other);
        // All blocks of columns have seen the same logits.
        MDKV_ROLLED
        for (int column_block = 0; column_block < states.column_blocks(); ++column_block)
        {
            int const from = first + column_block * sequence.blocks;
            float2 sum[2][each]{};
            MDKV_ROLLED
            for (int s = warp; s < slices; s += at_once * warps)
            {
                float2 x[at_once][each];
                MDKV_UNROLL
                for (int i = 0; i < at_once * each; ++i)
                {
                    int const slice = s + i / each * warps;
                    float const* const here =
                        states.sums(from + slice, g) + 2 * lane + i % each * 2 * device::warp_size;
                    x[i / each][i % each] = slice < slices ? device::load<float2>(here) : float2{};
                }
                MDKV_UNROLL
                for (int i = 0; i < at_once * each; ++i)
                {
                    int const slice  = s + i / each * warps;
                    float2 const by  = slice < slices ? smem.factors[slice] : float2{};
                    float2 const v   = x[i / each][i % each];
                    sum[0][i % each] = {fmaf(v.x, by.x, sum[0][i % each].x), fmaf(v.y, by.x, sum[0][i % each].y)};
                    if (latent)
                    {
                        sum[1][i % each] = {fmaf(v.x, by.y, sum[1][i % each].x), fmaf(v.y, by.y, sum[1][i % each].y)};
                    }
                }
            }
            MDKV_UNROLL
            for (int i = 0; i < 2 * each; ++i)
            {
                int const at = ((i / each * warps + warp) * Columns) + 2 * lane + i % each * 2 * device::warp_size;
                device::store(smem.partial + at, sum[i / each][i % each]);
            }
            device::sync();
            MDKV_ROLLED
            for (int i = device::thread(); i < (latent ? 2 : 1) * Columns; i += threads)
            {
                int const basis = i / Columns;
                int const c     = column_block * Columns + i % Columns;
                float all       = 0.0F;
                MDKV_UNROLL
                for (int w = 0; w < warps; ++w) { all += smem.partial[(basis * warps + w) * Columns + i % Columns]; }
                if (c < (basis == 0 ? values : states.sizes.value_latents)) { smem.sums[basis * values + c] = all; }
            }
            device::sync();
        }
        head_entry const& entry = sequence.heads[head];
        auto const rows         = static_cast<int>(entry.value_columns);
        float const weight      = softmax.empty() ? 0.0F : 1.0F / softmax.sum;
        with_matrix<T>(sequence.arena + entry.value_projection, [&](auto const& element) {
            MDKV_ROLLED
            for (int c = device::thread(); c < values; c += threads)
            {
                constexpr int loads = 16; // under way together
                float sum           = smem.sums[c];
                MDKV_ROLLED
                for (int i = 0; i < rows; i += loads)
                {
                    float m[loads];
                    MDKV_UNROLL
                    for (int k = 0; k < loads; ++k) { m[k] = i + k < rows ? element((i + k) * values + c) : 0.0F; }
                    MDKV_UNROLL
                    for (int k = 0; k < loads; ++k)
                    {
                        if (i + k < rows) { sum += smem.sums[values + i + k] * m[k]; }
                    }
                }
                output(row, token, c) = narrow<U>(sum * weight);
            }
        });
        if (device::thread() == 0) { lse(row, token) = softmax.lse(); }
    }

private:
    /// Merges the slices' softmaxes, and one of keys elsewhere, and writes the factors of the slices' sums.
    __device__ mdkv::detail::softmax_state merge_softmaxes(
        scratch const& smem, int first, int slices, int g, mdkv::detail::softmax_state const& other) const
    {
        int const lane = device::lane();
        int const warp = device::warp();
        float top      = other.largest;
        for (int s = device::thread(); s < slices; s += threads) { top = fmaxf(top, states.softmax(first + s, g)[0]); }
        top = device::largest_of_lanes(top);
        if (lane == 0) { smem.tops[warp] = top; }
        device::sync();
        MDKV_UNROLL
        for (int w = 0; w < warps; ++w) { top = fmaxf(top, smem.tops[w]); }
        float total = 0.0F;
        for (int s = device::thread(); s < slices; s += threads)
        {
            auto const own      = device::load<float4>(states.softmax(first + s, g));
            float const factor  = own.y == 0.0F ? 0.0F : exp2f(own.x - top);
            bool const original = own.z == 0.0F;
            smem.factors[s]     = {original ? factor : 0.0F, original ? 0.0F : factor};
            total += own.y == 0.0F ? 0.0F : own.y * factor;
        }
        total = device::sum_of_lanes(total);
        if (lane == 0) { smem.totals[warp] = total; }
        device::sync();
        mdkv::detail::softmax_state all{top, other.empty() ? 0.0F : exp2f(other.largest - top)};
        MDKV_UNROLL
        for (int w = 0; w < warps; ++w) { all.sum += smem.totals[w]; }
        return all;
    }
};

} // namespace MDKV_NAMESPACE::gpu::kernels
