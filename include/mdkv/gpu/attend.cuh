/// \file attend.cuh: attend on the GPU: slices of equal bytes in parallel, then a block for each query that merges them and projects back (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/attend.hpp>

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/attend.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/attend_batch.cuh>
#include <mdkv/gpu/detail/attend_merge.cuh>
#include <mdkv/gpu/detail/attend_slice.cuh>
#include <mdkv/gpu/detail/attend_sums.cuh>

#include <algorithm>
#include <span>

namespace MDKV_NAMESPACE::gpu
{

/// attend for values that take blocks of `Columns` columns.
template <element T, element U, int Columns, std::size_t N>
void attend_columns(backend const& on, in_view<U, 3, backend> queries,
    std::span<sequence_view<T, space::device> const, N> sequences, attend_options<backend> const& options,
    out_view<U, 3, backend> output, out_view<float, 2, backend> lse)
{
    constexpr int most = N == 1 ? 1 : kernels::attend_most_sequences;
    using slice_kernel = kernels::attend_slice<T, U, Columns, most>;
    using merge_kernel = kernels::attend_merge<T, U, Columns, most>;
    static_assert(sizeof(slice_kernel) <= 4096 && sizeof(merge_kernel) <= 4096, "parameters of a launch");
    if (queries.extent(0) == 0) { return; }
    index_t const most_shared = most_shared_memory(on);

    // Calls body(attend, merge) with the kernels of one launch after the other.
    auto const for_each_launch = [&](float* states, auto const& body) {
        std::size_t next = 0;
        index_t token    = 0;
        while (true)
        {
            while (next < sequences.size() && sequences[next].queries == 0) { ++next; }
            if (next == sequences.size()) { return; }
            cache_layout const& layout = sequences[next].cache.layout;
            auto const values          = static_cast<int>(layout.dims.values);
            kernels::attend_batch<most> const batch{
                sequences, next, token, queries.extent(0), (std::max)(1, (values + Columns - 1) / Columns)};
            kernels::attend_states const left{
                {layout, sizeof(T)}, Columns, batch.blocks, batch.heads * batch.count, states};
            body(slice_kernel{batch, queries, left, mdkv::detail::attend_scale(options.scale, layout),
                     slice_kernel::most_tile_bytes(left.sizes)},
                merge_kernel{batch, left, output, lse, options.lse_elsewhere.value_or(in_view<float, 2, backend>{})});
        }
    };
    index_t floats = 0;
    for_each_launch(nullptr, [&](slice_kernel const& kernel, auto const&) {
        floats = (std::max)(floats, kernel.states.floats());
        expects(shared_bytes(kernel) <= most_shared, "attend: head dimensions ", kernel.states.sizes.keys, " and ",
            kernel.states.sizes.values, " need ", shared_bytes(kernel),
            " bytes of shared memory; this GPU gives a block ", most_shared);
    });
    workspace::frame frame{on.scratch};
    float* const states = frame.take<float>(floats); // states of one launch: the next begins when they are merged
    for (std::size_t i = 0; i < sequences.size(); ++i)
    {
        auto const& cache = sequences[i].cache;
        expects(
            (reinterpret_cast<std::uintptr_t>(cache.arena) | reinterpret_cast<std::uintptr_t>(cache.tail)) % 16 == 0,
            mdkv::detail::attend_name(static_cast<index_t>(i), N != 1).text,
            ": the cache's arena and tail must be aligned to 16 bytes on the GPU");
    }
    for_each_launch(states, [&](slice_kernel const& attends, auto const& merges) {
        launch(on, attends, attends.batch.blocks);
        launch(on, merges, queries.extent(0) * merges.batch.tokens);
    });
}

/// \throws invalid_argument   a cache's arena or tail is not aligned to 16 bytes; head dimensions are too large for a block's
///                            shared memory; arena and tail have more than 32 GiB, or some GiB fewer with projected rungs;
///                            heads times rungs are beyond 4,000
template <element T, element U, std::size_t N>
void attend_impl(backend const& on, in_view<U, 3, backend> queries,
    std::span<sequence_view<T, space::device> const, N> sequences, attend_options<backend> const& options,
    out_view<U, 3, backend> output, out_view<float, 2, backend> lse)
{
    mdkv::detail::attend_sizes const sizes{sequences.empty() ? cache_layout{} : sequences[0].cache.layout, sizeof(T)};
    if (sizes.values <= 64) { attend_columns<T, U, 64>(on, queries, sequences, options, output, lse); }
    else if (sizes.values <= 128) { attend_columns<T, U, 128>(on, queries, sequences, options, output, lse); }
    else { attend_columns<T, U, 256>(on, queries, sequences, options, output, lse); }
}

} // namespace MDKV_NAMESPACE::gpu
