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
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/attend_batch.cuh>
#include <mdkv/gpu/detail/attend_slice.cuh>
#include <mdkv/gpu/detail/attend_sums.cuh>
#include <mdkv/gpu/device.cuh>
#include <mdkv/gpu/launch.cuh>
#include <mdkv/gpu/team.cuh>

#include <algorithm>
#include <cmath>
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
    attend_states states;
    out_view<U, 3, backend> output;
    out_view<float, 2, backend> lse;
    int most_slices;

    /// A block's shared memory.
    struct scratch
    {
        float* factors; // [parts, slices, bases]
        float* sums;    // [sizes.sums()]
    };
    [[nodiscard]] MDKV_HD scratch carve(mdkv::detail::carver& memory) const
    {
        return {memory.take<float>(index_t{states.parts()} * most_slices * states.bases()),
            memory.take<float>(states.sizes.sums())};
    }
    [[nodiscard]] index_t shared_bytes() const
    {
        mdkv::detail::carver count;
        static_cast<void>(carve(count));
        return team<threads>::reserved_bytes + count.bytes();
    }

    __device__ void operator()() const
    {
        using block                = team<threads>;
        attend_sizes const& sizes  = states.sizes;
        index_t const row          = device::block() / batch.tokens;
        index_t const token        = batch.sequences[0].first_token + device::block() % batch.tokens;
        attend_sequence const& own = batch.at(token, [](attend_sequence const& s) { return s.first_token; });
        index_t const of_own       = row * own.tokens + (token - own.first_token); // row of the sequence
        index_t const head         = of_own / own.group;
        int const number           = static_cast<int>(of_own % own.group);
        int const query            = number % attend_queries;
        int const slices           = own.slices_of(mdkv::detail::bytes_of_head<T>(batch.layout, own, head));
        int const bases            = states.bases();
        int const entries          = slices * bases;
        index_t const first =
            own.first_block + (head * own.query_blocks() + number / attend_queries) * states.parts() * own.slices;
        // Slice e / bases, basis e % bases. All parts have seen the same logits.
        auto const state = [&](int part, int e) {
            return states.state(first + index_t{part} * own.slices + e / bases, e % bases, query);
        };
        mdkv::detail::carver memory = block::scratch();
        scratch const mine          = carve(memory);

        float largest = mdkv::detail::empty_lse;
        for (int e = device::thread(); e < entries; e += threads) { largest = fmaxf(largest, state(0, e)[0]); }
        largest     = block::largest(largest);
        float total = 0.0F;
        for (int i = device::thread(); i < states.parts() * entries; i += threads)
        {
            float const* const from = state(i / entries, i % entries);
            float const factor      = from[1] == 0.0F ? 0.0F : exp2f(from[0] - largest);
            mine.factors[i]         = factor;
            total += i < entries && from[1] != 0.0F ? from[1] * factor : 0.0F;
        }
        mdkv::detail::softmax_state const all{largest, block::sum(total)};
        for (int c = device::thread(); c < sizes.sums(); c += threads)
        {
            auto const basis = c >= sizes.sums_of(run_basis::rotated)     ? run_basis::rotated
                               : c >= sizes.sums_of(run_basis::projected) ? run_basis::projected
                                                                          : run_basis::original;
            int const column = c - sizes.sums_of(basis);
            int const part   = column / states.columns;
            int const place  = states.basis(basis);
            float sum        = 0.0F;
            for (int e = place; e < entries; e += bases)
            {
                float const factor = mine.factors[part * entries + e];
                if (factor != 0.0F) { sum += state(part, e)[2 + column % states.columns] * factor; }
            }
            mine.sums[c] = sum;
        }
        device::sync();
        if (sizes.rotated)
        {
            constexpr int size = int{quantised_group};
            for (int c = device::warp() * size; c < sizes.values; c += threads / device::warp_size * size)
            {
                int const left = sizes.values - c;
                rotate_by_warp(mine.sums + sizes.sums_of(run_basis::rotated) + c, left < size ? left : size);
            }
            device::sync();
        }
        head_entry const& entry = own.heads[head];
        float const weight      = all.empty() ? 0.0F : 1.0F / all.sum;
        for (int c = device::thread(); c < sizes.values; c += threads)
        {
            float sum = mine.sums[c];
            for (int i = 0; i < entry.value_columns; ++i)
            {
                sum += mine.sums[sizes.sums_of(run_basis::projected) + i]
                       * mdkv::detail::matrix_at<T>(own.arena, entry.value_projection, i * sizes.values + c);
            }
            if (sizes.rotated) { sum += mine.sums[sizes.sums_of(run_basis::rotated) + c]; }
            output(row, token, c) = narrow<U>(sum * weight);
        }
        if (device::thread() == 0) { lse(row, token) = all.lse(); }
    }
};

} // namespace kernels

/// attend for values that take blocks of `Columns` columns.
template <element T, element U, int Columns, std::size_t N>
void attend_columns(backend const& on, in_view<U, 3, backend> queries,
    std::span<sequence_view<T, space::device> const, N> sequences, attend_options options,
    out_view<U, 3, backend> output, out_view<float, 2, backend> lse)
{
    constexpr int most = N == 1 ? 1 : kernels::attend_most_sequences;
    using slice_kernel = kernels::attend_slice<T, U, Columns, most>;
    if (queries.extent(0) == 0) { return; }
    bool const real           = !on.scratch->counting();
    index_t const most_shared = real ? most_shared_memory(on) : 0;

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
            body(slice_kernel{{batch, queries, {{batch.layout, sizeof(T)}, Columns, states},
                mdkv::detail::attend_scale(options.scale, batch.layout)}});
        }
    };
    index_t floats = 0;
    for_each_launch(nullptr, [&](slice_kernel const& kernel) {
        floats = (std::max)(floats, checked_multiply(index_t{kernel.batch.blocks}, kernel.states.block_floats()));
        expects(!real || kernel.shared_bytes() <= most_shared, "attend: head dimensions ", kernel.states.sizes.keys,
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
        int most_slices = 1;
        for (int i = 0; i < kernel.batch.count; ++i)
        {
            most_slices = (std::max)(most_slices, kernel.batch.sequences[static_cast<std::size_t>(i)].slices);
        }
        launch(on, kernels::attend_merge<T, U, most>{kernel.batch, kernel.states, output, lse, most_slices},
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

} // namespace mdkv::inline MDKV_MACHINE::gpu
