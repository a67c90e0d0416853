/// \file attend_merge.cuh: the merge of what a query's slices have left, by one warp, and how the last block of a launch is told (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/attend_batch.cuh>
#include <mdkv/gpu/detail/attend_block.cuh>
#include <mdkv/gpu/detail/attend_rows.cuh>
#include <mdkv/gpu/detail/attend_sums.cuh>
#include <mdkv/gpu/device.cuh>

#include <cmath>
#include <cstdint>

namespace MDKV_NAMESPACE::gpu::kernels
{

/// Where attention is written.
template <element U>
struct attend_outputs
{
    out_view<U, 3, backend> output;
    out_view<float, 2, backend> lse;
};

/// Bytes of shared memory in which a warp merges.
[[nodiscard]] inline index_t merge_bytes(attend_sizes const& sizes)
{
    return index_t{sizes.sums()} * index_t{sizeof(float)};
}

/// Whether a block is the last of `blocks` that arrive at a counter, which is 0 before the first and after the last of them.
/// One thread asks, between two barriers of its block: the first shows it the block's writes, the second shows the block
/// the writes of the blocks that arrived before.
[[nodiscard]] __device__ inline bool last_to_arrive(std::uint32_t* counter, int blocks)
{
    auto const last = static_cast<std::uint32_t>(blocks - 1);
    device::fence();
    bool const mine = device::atomic_next(counter, last) == last;
    device::fence();
    return mine;
}

/// Row `number` of a head of a sequence: joins the states of its slices in their order, brings the sums of every basis back
/// to the original one, writes the query's output. A warp's shared memory is where its ring is in attend_slice. The function
/// is not inlined: a kernel that calls it keeps its registers, and whichever kernel does gets the same bits.
template <element T, element U>
[[gnu::noinline]] __device__ void merge_slices(attend_states const states, attend_outputs<U> const& outputs,
    attend_sequence const& sequence, index_t head, int number, int slices)
{
    constexpr int size            = device::warp_size;
    constexpr int each            = 4; // columns that a lane takes at once
    constexpr int at_once         = 4; // slices: their loads are under way together
    int const values              = states.sizes.values;
    int const latents             = states.sizes.value_latents;
    int const lane                = device::lane();
    int const bases               = states.bases();
    int const column_blocks       = states.column_blocks();
    int const entries             = slices * bases;
    index_t const of_slice        = states.block_floats();
    index_t const of_column_block = of_slice * sequence.slices;
    index_t const item            = head * sequence.query_blocks() + number / attend_queries;
    float* const first =
        states.state(sequence.first_block + item * column_blocks * sequence.slices, 0, number % attend_queries);
    index_t const of_basis = states.state(0, 1, 0) - states.begin;
    float* const sums      = reinterpret_cast<float*>(device::shared_memory() + device::warp() * attend_ring);
    device::sync_warp(); // the sums of the query before have been read

    // All blocks of columns have seen the same logits. Entry e is basis e % bases of slice e / bases.
    float largest = mdkv::detail::empty_lse;
    for (int e = lane; e < entries; e += size)
    {
        largest = fmaxf(largest, first[e / bases * of_slice + e % bases * of_basis]);
    }
    for (int step = size / 2; step > 0; step /= 2) { largest = fmaxf(largest, device::shuffle_xor(largest, step)); }
    // A state's factor takes the place of its logit. Weights are added in the order of a block of four warps.
    float total     = 0.0F;
    int const lanes = entries < attend_threads ? entries : attend_threads;
    MDKV_ROLLED
    for (int column_block = 0; column_block < column_blocks; ++column_block)
    {
        MDKV_ROLLED
        for (int begin = 0; begin < lanes; begin += size)
        {
            float sum = 0.0F;
            MDKV_ROLLED
            for (int e = begin + lane; e < entries; e += attend_threads)
            {
                float* const state =
                    first + column_block * of_column_block + e / bases * of_slice + e % bases * of_basis;
                float const weight = state[1];
                float const factor = weight == 0.0F ? 0.0F : exp2f(state[0] - largest);
                state[0]           = factor;
                sum += weight == 0.0F ? 0.0F : weight * factor;
            }
            sum = sum_of_lanes(sum);
            total += column_block == 0 ? sum : 0.0F;
        }
    }
    device::sync_warp();

    int offset      = 0;                                                           // where a basis begins in `sums`
    int const chunk = states.columns < each * size ? states.columns : each * size; // 64 or 128
    MDKV_ROLLED
    for (int b = 0; b < bases; ++b)
    {
        int const width = b == 1 && latents > 0 ? latents : values;
        MDKV_ROLLED
        for (int c = 0; c < width; c += chunk)
        {
            float const* state = first + c / states.columns * of_column_block + b * of_basis;
            int const column   = 2 + c % states.columns + lane;
            float sum[each]{};
            MDKV_ROLLED
            for (int s = 0; s < slices; s += at_once)
            {
                float factor[at_once];
                float x[at_once][each];
                MDKV_UNROLL
                for (int i = 0; i < at_once; ++i) { factor[i] = s + i < slices ? state[i * of_slice] : 0.0F; }
                MDKV_UNROLL
                for (int i = 0; i < at_once * each; ++i)
                {
                    bool const in_range   = factor[i / each] != 0.0F && i % each * size < chunk;
                    x[i / each][i % each] = in_range ? state[i / each * of_slice + column + i % each * size] : 0.0F;
                }
                MDKV_UNROLL
                for (int i = 0; i < at_once * each; ++i) { sum[i % each] += x[i / each][i % each] * factor[i / each]; }
                state += at_once * of_slice;
            }
            MDKV_UNROLL
            for (int j = 0; j < each; ++j)
            {
                int const to = c + lane + j * size;
                if (j * size < chunk && to < width) { sums[offset + to] = sum[j]; }
            }
        }
        offset += width;
    }
    device::sync_warp();

    float const* const projected = sums + values;
    float* const rotated         = sums + values + latents;
    int const turned             = states.sizes.rotated ? values : 0;
    MDKV_ROLLED
    for (int c = 0; c < turned; c += int{quantised_group})
    {
        int const left = values - c;
        rotate_by_warp(rotated + c, left < int{quantised_group} ? left : int{quantised_group});
    }
    mdkv::detail::softmax_state const softmax{largest, total};
    float const weight = softmax.empty() ? 0.0F : 1.0F / softmax.sum;
    float coded        = 0.0F; // weights of rotated tokens, whose values are centred
    for (int s = lane; turned > 0 && s < slices; s += size)
    {
        float const* const state = first + s * of_slice + (bases - 1) * of_basis;
        coded += state[1] * state[0];
    }
    coded                  = sum_of_lanes(coded);
    head_entry const entry = sequence.heads[head];
    index_t const row      = head * (sequence.head_rows / sequence.tokens) + number / sequence.tokens;
    index_t const token    = sequence.first_token + number % sequence.tokens;
    MDKV_ROLLED
    for (int c = lane; c < values; c += each * size)
    {
        int columns[each];
        float sum[each];
        MDKV_UNROLL
        for (int j = 0; j < each; ++j)
        {
            columns[j] = c + j * size < values ? c + j * size : c;
            sum[j]     = sums[columns[j]];
        }
        auto const rows = static_cast<int>(entry.value_columns);
        with_matrix<T>(sequence.arena + entry.value_projection, [&](auto const& element) {
            MDKV_ROLLED
            for (int i = 0; i < rows; i += at_once)
            {
                float m[at_once][each];
                MDKV_UNROLL
                for (int k = 0; k < at_once * each; ++k)
                {
                    bool const in_range   = i + k / each < rows;
                    m[k / each][k % each] = in_range ? element((i + k / each) * values + columns[k % each]) : 0.0F;
                }
                MDKV_UNROLL
                for (int k = 0; k < at_once * each; ++k)
                {
                    if (i + k / each < rows) { sum[k % each] += projected[i + k / each] * m[k / each][k % each]; }
                }
            }
        });
        MDKV_UNROLL
        for (int j = 0; j < each; ++j)
        {
            if (turned > 0) { sum[j] += rotated[columns[j]]; }
            if (coded != 0.0F)
            {
                index_t const mean = index_t{2} * states.sizes.keys + columns[j];
                sum[j] += coded * mdkv::detail::matrix_at<T>(sequence.arena, entry.channels, mean);
            }
            if (c + j * size < values) { outputs.output(row, token, columns[j]) = narrow<U>(sum[j] * weight); }
        }
    }
    if (lane == 0) { outputs.lse(row, token) = softmax.lse(); }
}

} // namespace MDKV_NAMESPACE::gpu::kernels
