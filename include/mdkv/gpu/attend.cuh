/// \file attend.cuh: attend on the GPU: slices of equal bytes in parallel, then one block a query that merges them and projects back (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/attend.hpp>

#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/attend.hpp>
#include <mdkv/detail/hadamard.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/attend_batch.cuh>
#include <mdkv/gpu/detail/attend_slice.cuh>
#include <mdkv/gpu/device.cuh>
#include <mdkv/gpu/launch.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace mdkv::inline MDKV_MACHINE::gpu
{

namespace kernels
{

/// One query: joins the states of its slices in their order, brings the sums of every basis back to the original one, writes
/// its row.
template <element T, element U, int Most>
struct attend_merge
{
    static constexpr char const* name = "attend_merge";
    static constexpr int threads      = 128;

    attend_batch<Most> batch;
    attend_sizes sizes;
    float const* states; // [batch.blocks, most_queries, sizes.state()]
    out_view<U, 3, backend> output;
    out_view<float, 2, backend> lse;

    [[nodiscard]] index_t shared_bytes() const { return (sizes.sums() + 1) * index_t{sizeof(float)}; }

    __device__ void operator()() const
    {
        index_t const row          = device::block() / batch.tokens;
        index_t const token        = batch.sequences[0].first_token + device::block() % batch.tokens;
        attend_sequence const& own = batch.at(token, [](attend_sequence const& s) { return s.first_token; });
        index_t const of_own       = row * own.tokens + (token - own.first_token); // row of the sequence
        index_t const head         = of_own / own.group;
        int const number           = static_cast<int>(of_own % own.group);
        constexpr int most         = attend_queries;
        index_t const slices       = own.slices;
        index_t const first = own.first_block + (head * own.query_blocks() + number / most) * slices; // first state
        auto const state    = [&](index_t slice) {
            return states + ((first + slice) * most + number % most) * sizes.state();
        };
        auto* const sums = reinterpret_cast<float*>(device::shared_memory());

        mdkv::detail::softmax_state all;
        for (index_t s = 0; s < slices; ++s) { static_cast<void>(all.merge({state(s)[0], state(s)[1]})); }
        for (int c = device::thread(); c < sizes.sums(); c += threads)
        {
            float sum = 0.0F;
            for (index_t s = 0; s < slices; ++s)
            {
                float const share = state(s)[1] == 0.0F ? 0.0F : exp2f(state(s)[0] - all.largest);
                sum += state(s)[2 + c] * share;
            }
            sums[c] = sum;
        }
        device::sync();
        if (sizes.rotated)
        {
            constexpr int size = quantised_group;
            for (int c = device::thread() * size; c < sizes.values; c += threads * size)
            {
                int const left = sizes.values - c;
                mdkv::detail::hadamard(sums + sizes.sums_of(run_basis::rotated) + c, left < size ? left : size);
            }
            device::sync();
        }
        head_entry const& entry = own.heads[head];
        float const weight      = all.empty() ? 0.0F : 1.0F / all.sum;
        for (int c = device::thread(); c < sizes.values; c += threads)
        {
            float sum = sums[c];
            for (int i = 0; i < entry.value_columns; ++i)
            {
                sum += sums[sizes.sums_of(run_basis::projected) + i]
                       * mdkv::detail::matrix_at<T>(own.arena, entry.value_projection, i * sizes.values + c);
            }
            if (sizes.rotated) { sum += sums[sizes.sums_of(run_basis::rotated) + c]; }
            output(row, token, c) = narrow<U>(sum * weight);
        }
        if (device::thread() == 0) { lse(row, token) = all.lse(); }
    }
};

} // namespace kernels

/// \throws invalid_argument   a cache's arena or tail is not aligned to 16 bytes, or head dimensions are too large for a
///                            block's shared memory
template <element T, element U, std::size_t N>
void attend_impl(backend const& on, in_view<U, 3, backend> queries,
    std::span<sequence_view<T, space::device> const, N> sequences, attend_options options,
    out_view<U, 3, backend> output, out_view<float, 2, backend> lse)
{
    constexpr int most = N == 1 ? 1 : kernels::attend_most_sequences;
    using slice_kernel = kernels::attend_slice<T, U, most>;
    if (queries.extent(0) == 0) { return; }
    bool const real           = !on.scratch->counting();
    index_t const most_shared = real ? most_shared_memory() : 0;

    // Calls body(kernel) for the slices of one launch after the other.
    auto const for_each_launch = [&](float* states, auto const& body) {
        std::size_t next = 0;
        index_t token    = 0;
        while (true)
        {
            kernels::attend_batch<most> const batch{sequences, next, token, queries.extent(0)};
            if (batch.count == 0) { return; }
            slice_kernel kernel{batch, queries, {batch.layout, sizeof(T)}, states,
                mdkv::detail::attend_scale(options.scale, batch.layout), slice_kernel::most_tokens, 2};
            constexpr index_t comfortable = 100 * 1024; // an H100 (228 KB) holds two such blocks, an A100 (164 KB) one
            while (kernel.shared_bytes() > comfortable && kernel.block_tokens > int{tile_tokens})
            {
                kernel.block_tokens /= 2;
            }
            if (kernel.shared_bytes() > most_shared) { kernel.stages = 1; }
            body(kernel);
        }
    };
    index_t floats = 0;
    for_each_launch(nullptr, [&](slice_kernel const& kernel) {
        floats = (std::max)(
            floats, checked_multiply(index_t{kernel.batch.blocks} * slice_kernel::most_queries, kernel.sizes.state()));
        expects(!real || kernel.shared_bytes() <= most_shared, "attend: head dimensions ", kernel.sizes.keys, " and ",
            kernel.sizes.values, " need ", kernel.shared_bytes(), " bytes of shared memory; this GPU gives a block ",
            most_shared);
    });
    workspace::frame frame{*on.scratch, "attend"};
    float* const states = frame.take<float>(floats); // states of one launch: the next begins when they are merged
    if (!frame.ready()) { return; }
    for (std::size_t i = 0; i < sequences.size(); ++i)
    {
        auto const& cache = sequences[i].cache;
        expects(
            (reinterpret_cast<std::uintptr_t>(cache.arena) | reinterpret_cast<std::uintptr_t>(cache.tail)) % 16 == 0,
            mdkv::detail::attend_name(static_cast<index_t>(i), N != 1).text,
            ": the cache's arena and tail must be aligned to 16 bytes on the GPU");
    }
    for_each_launch(states, [&](slice_kernel const& kernel) {
        launch(on, kernel, kernel.batch.blocks);
        launch(on, kernels::attend_merge<T, U, most>{kernel.batch, kernel.sizes, states, output, lse},
            queries.extent(0) * kernel.batch.tokens);
    });
}

} // namespace mdkv::inline MDKV_MACHINE::gpu
