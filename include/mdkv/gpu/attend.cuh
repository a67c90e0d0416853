/// \file attend.cuh: attend on the GPU: slices of equal bytes in parallel, then a warp for each query that merges them and projects back (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/attend.hpp>

#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/attend.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/attend_batch.cuh>
#include <mdkv/gpu/detail/attend_merge.cuh>
#include <mdkv/gpu/detail/attend_rows.cuh>
#include <mdkv/gpu/detail/attend_slice.cuh>
#include <mdkv/gpu/detail/attend_sums.cuh>
#include <mdkv/gpu/device.cuh>
#include <mdkv/gpu/launch.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace MDKV_NAMESPACE::gpu
{

namespace kernels
{

/// One query, by a warp of its own.
template <element T, element U, int Most>
struct attend_merge
{
    static constexpr char const* name = "attend_merge";
    static constexpr int threads      = device::warp_size;

    attend_batch<Most> batch;
    attend_states states;
    attend_outputs<U> outputs;

    [[nodiscard]] index_t shared_bytes() const { return merge_bytes(states.sizes); }

    __device__ void operator()() const
    {
        index_t const row               = device::block() / batch.tokens;
        index_t const token             = batch.sequences[0].first_token + device::block() % batch.tokens;
        attend_sequence const& sequence = batch.at(token, [](attend_sequence const& s) { return s.first_token; });
        index_t const row_of_sequence   = row * sequence.tokens + (token - sequence.first_token); // row of the sequence
        index_t const head              = row_of_sequence / sequence.head_rows;
        // The head's bytes: a lane for each run.
        index_t bytes = 0;
        if (auto const i = static_cast<std::size_t>(device::lane()); i < mdkv::detail::most_runs(batch.layout))
        {
            auto const run = mdkv::detail::run_of_head<T>(batch.layout, sequence, head, i);
            bytes          = run.tokens * run.token_bytes();
        }
        for (int step = 1; step < device::warp_size; step *= 2) { bytes += device::shuffle_xor(bytes, step); }
        merge_slices<T>(states, outputs, sequence, head, static_cast<int>(row_of_sequence % sequence.head_rows),
            sequence.slices_of(bytes));
    }
};

} // namespace kernels

/// Counters of `backend::arrivals` with which attend merges in the launch that attends; a batch needs the sum of its
/// sequences' counters, at most that of any 48 neighbours. Value dimensions above about 700 always take two launches.
///
/// \param kv_heads     H
/// \param query_heads  H*G
/// \param queries      n: tokens whose queries are attended at once
/// \throws invalid_argument   a number is negative, or KV heads do not divide the query heads
[[nodiscard]] inline std::size_t attend_arrivals(index_t kv_heads, index_t query_heads, index_t queries = 1)
{
    expects(kv_heads >= 0 && query_heads >= 0 && queries >= 0 && (kv_heads == 0 || query_heads % kv_heads == 0),
        "attend_arrivals: ", kv_heads, " KV heads, ", query_heads, " query heads, ", queries,
        " queries; none may be negative, and KV heads must divide query heads");
    index_t const rows = kv_heads == 0 ? 0 : checked_multiply(query_heads / kv_heads, queries); // each head has them
    return static_cast<std::size_t>(checked_multiply(kv_heads, kernels::query_blocks(rows)));
}

/// attend for values that take blocks of `Columns` columns.
template <element T, element U, int Columns, std::size_t N>
void attend_columns(backend const& on, in_view<U, 3, backend> queries,
    std::span<sequence_view<T, space::device> const, N> sequences, attend_options options,
    out_view<U, 3, backend> output, out_view<float, 2, backend> lse)
{
    constexpr int most = N == 1 ? 1 : kernels::attend_most_sequences;
    using slice_kernel = kernels::attend_slice<T, U, Columns, most>;
    if (queries.extent(0) == 0) { return; }
    bool const executes = !on.scratch->counting();
    expects(!executes || on.arrivals.empty() || on.arrivals.data() != nullptr, "attend: arrivals has ",
        on.arrivals.size(), " counters at no address; it must be empty or device memory");
    index_t const most_shared = executes ? most_shared_memory(on) : 0;

    // Calls body(kernel) for the slices of one launch after the other.
    auto const for_each_launch = [&](float* states, auto const& body) {
        std::size_t next = 0;
        index_t token    = 0;
        while (true)
        {
            int const values = next < sequences.size() ? static_cast<int>(sequences[next].cache.layout.dims.values) : 0;
            kernels::attend_batch<most> const batch{
                sequences, next, token, queries.extent(0), (std::max)(1, (values + Columns - 1) / Columns)};
            if (batch.count == 0) { return; }
            kernels::attend_states const left{{batch.layout, sizeof(T)}, Columns, states};
            bool const once = on.arrivals.size() >= static_cast<std::size_t>(batch.items)
                              && kernels::merge_bytes(left.sizes) <= kernels::attend_ring;
            body(slice_kernel{{batch, queries, left, mdkv::detail::attend_scale(options.scale, batch.layout)},
                {output, lse}, once ? on.arrivals.data() : nullptr});
        }
    };
    index_t floats = 0;
    for_each_launch(nullptr, [&](slice_kernel const& kernel) {
        floats = (std::max)(floats, checked_multiply(index_t{kernel.batch.blocks}, kernel.states.block_floats()));
        expects(!executes || kernel.shared_bytes() <= most_shared, "attend: head dimensions ", kernel.states.sizes.keys,
            " and ", kernel.states.sizes.values, " need ", kernel.shared_bytes(),
            " bytes of shared memory; this GPU gives a block ", most_shared);
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
        if (kernel.arrivals != nullptr) { return; }
        launch(on, kernels::attend_merge<T, U, most>{kernel.batch, kernel.states, kernel.outputs},
            queries.extent(0) * kernel.batch.tokens);
    });
}

/// \throws invalid_argument   a cache's arena or tail is not aligned to 16 bytes, or head dimensions are too large for a
///                            block's shared memory
template <element T, element U, std::size_t N>
void attend_impl(backend const& on, in_view<U, 3, backend> queries,
    std::span<sequence_view<T, space::device> const, N> sequences, attend_options options,
    out_view<U, 3, backend> output, out_view<float, 2, backend> lse)
{
    mdkv::detail::attend_sizes const sizes{sequences.empty() ? cache_layout{} : sequences[0].cache.layout, sizeof(T)};
    if (sizes.values <= 64) { attend_columns<T, U, 64>(on, queries, sequences, options, output, lse); }
    else if (sizes.values <= 128) { attend_columns<T, U, 128>(on, queries, sequences, options, output, lse); }
    else { attend_columns<T, U, 256>(on, queries, sequences, options, output, lse); }
}

} // namespace MDKV_NAMESPACE::gpu
