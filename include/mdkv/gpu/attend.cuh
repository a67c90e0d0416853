/// \file attend.cuh: attend on the GPU: slices of equal bytes in parallel, then one block a query that merges them and projects back (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/attend.hpp>

#include <mdkv/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/attend.hpp>
#include <mdkv/detail/hadamard.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/attend_parts.cuh>
#include <mdkv/gpu/detail/attend_slice.cuh>
#include <mdkv/gpu/device.cuh>
#include <mdkv/gpu/launch.cuh>

#include <algorithm>
#include <cstdint>

namespace mdkv::gpu
{

namespace kernels
{

/// One query: joins the states of its slices in their order, brings the sums of every basis back to the original one, writes
/// its row.
template <element T, element U>
struct attend_merge
{
    static constexpr char const* name = "attend_merge";
    static constexpr int threads      = 128;

    cache_view<T, space::device> cache;
    float const* states; // [H, query blocks, slices, most_queries, sizes.state()]
    attend_sizes sizes;
    int group;
    int query_blocks;
    index_t slices;
    out_view<U, 3, backend> output;
    out_view<float, 2, backend> lse;

    [[nodiscard]] index_t shared_bytes() const { return (sizes.sums() + 1) * index_t{sizeof(float)}; }

    __device__ void operator()() const
    {
        index_t const head  = device::block() / group;
        int const number    = static_cast<int>(device::block() % group);
        index_t const row   = device::block() / output.extent(1);
        index_t const token = device::block() % output.extent(1);
        constexpr auto most = attend_slice<T, U>::most_queries;
        index_t const first = (head * query_blocks + number / most) * slices; // slice of the first state
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
        head_entry const& entry = cache.heads[head];
        float const weight      = all.empty() ? 0.0F : 1.0F / all.sum;
        for (int c = device::thread(); c < sizes.values; c += threads)
        {
            float sum = sums[c];
            for (int i = 0; i < entry.value_columns; ++i)
            {
                sum += sums[sizes.sums_of(run_basis::projected) + i]
                       * mdkv::detail::projection_at(cache, entry.value_projection, i * sizes.values + c);
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
template <element T, element U>
void attend_impl(backend const& on, in_view<U, 3, backend> queries, cache_view<T, space::device> const& cache,
    attend_options options, out_view<U, 3, backend> output, out_view<float, 2, backend> lse)
{
    using slice_kernel         = kernels::attend_slice<T, U>;
    cache_layout const& layout = cache.layout;
    index_t const heads        = layout.heads;
    if (heads == 0) { return; }
    kernels::attend_sizes const sizes{layout, sizeof(T)};
    // What the arena and the tail could hold, not what they do: the launch must not depend on what the device knows.
    constexpr index_t slice_bytes = 32 * 1024;
    constexpr index_t most_slices = 256;
    index_t const room            = cache.arena_bytes / heads + cache.tail_head_bytes();
    index_t const slices          = std::clamp<index_t>((room + slice_bytes - 1) / slice_bytes, 1, most_slices);
    int const group               = static_cast<int>(queries.extent(0) / heads * queries.extent(1));
    int const query_blocks        = (group + slice_kernel::most_queries - 1) / slice_kernel::most_queries;
    index_t const blocks          = checked_multiply(heads * query_blocks, slices);

    workspace::frame frame{*on.scratch, "attend"};
    float* const states = frame.take<float>(checked_multiply(blocks * slice_kernel::most_queries, sizes.state()));
    if (!frame.ready()) { return; }
    expects((reinterpret_cast<std::uintptr_t>(cache.arena) | reinterpret_cast<std::uintptr_t>(cache.tail)) % 16 == 0,
        "attend: the cache's arena and tail must be aligned to 16 bytes on the GPU");

    slice_kernel kernel{queries, cache, states, sizes, mdkv::detail::attend_scale(options, layout.dims.keys), group,
        query_blocks, slices, slice_kernel::most_tokens, 2};
    constexpr index_t comfortable = 100 * 1024; // two blocks and more on a multiprocessor
    index_t const most            = most_shared_memory();
    while (kernel.shared_bytes() > comfortable && kernel.block_tokens > int{tile_tokens}) { kernel.block_tokens /= 2; }
    if (kernel.shared_bytes() > most) { kernel.stages = 1; }
    expects(kernel.shared_bytes() <= most, "attend: head dimensions ", sizes.keys, " and ", sizes.values, " need ",
        kernel.shared_bytes(), " bytes of shared memory; this GPU gives a block ", most);
    launch(on, kernel, blocks);
    launch(
        on, kernels::attend_merge<T, U>{cache, states, sizes, group, query_blocks, slices, output, lse}, heads * group);
}

} // namespace mdkv::gpu
