/// \file pack.cuh: pack on the GPU: counts and lists, lays out, then gathers every run, all on the device (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/pack.hpp>

#include <mdkv/basis.hpp>
#include <mdkv/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/contract.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/pack_coordinates.cuh>
#include <mdkv/gpu/detail/pack_exact.cuh>
#include <mdkv/gpu/detail/pack_lay_out.cuh>
#include <mdkv/gpu/detail/pack_rows.cuh>
#include <mdkv/gpu/detail/rung_lists.cuh>
#include <mdkv/gpu/launch.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mdkv::gpu
{

namespace detail
{

/// Scratch of both functions, and the job that counts and lists.
struct pack_lists
{
    std::int32_t* places;         // [H, chunks, R]
    std::int32_t* positions;      // [H, N]
    index_t* first;               // [H, R+1]
    kernels::rung_tokens* counts; // [H]

    pack_lists(workspace::frame& frame, in_view<std::uint8_t, 2, backend> rung, cache_layout const& layout, bool list)
        : places{frame.take<std::int32_t>(checked_multiply(layout.heads,
            checked_multiply(kernels::rung_lists::chunks_of(rung.extent(1)), static_cast<index_t>(layout.rungs))))}
        , positions{frame.take<std::int32_t>(list ? checked_multiply(layout.heads, rung.extent(1)) : 0)}
        , first{frame.take<index_t>(checked_multiply(layout.heads, static_cast<index_t>(layout.rungs) + 1))}
        , counts{frame.take<kernels::rung_tokens>(layout.heads)}
    {}

    [[nodiscard]] kernels::rung_lists job(in_view<std::uint8_t, 2, backend> rung, std::size_t rungs) const
    {
        return {rung, out(backend{}, positions, rung.extent(0), rung.extent(1)),
            out(backend{}, first, rung.extent(0), static_cast<index_t>(rungs) + 1), places};
    }
};

/// Blocks of each head: one for every item, but of all heads no more than a device has use for.
[[nodiscard]] inline int blocks_per_head(index_t items, index_t heads, index_t most)
{
    index_t const share = most / std::max<index_t>(heads, 1);
    return static_cast<int>(std::clamp<index_t>(items, 1, std::max<index_t>(share, 1)));
}

/// Reads the rungs back to name the first that is none.
/// \throws invalid_argument   always
inline void refuse_rungs(backend const& on, in_view<std::uint8_t, 2, backend> rung, std::size_t rungs)
{
    std::vector<std::uint8_t> all(static_cast<std::size_t>(rung.mapping().required_span_size()));
    read_back(on, rung.data_handle(), all.data(), static_cast<index_t>(all.size()));
    for (index_t h = 0; h < rung.extent(0); ++h)
    {
        for (index_t t = 0; t < rung.extent(1); ++t)
        {
            int const at = all[static_cast<std::size_t>(rung.mapping()(h, t))];
            expects(at < static_cast<int>(rungs), "packed_bytes: rung of head ", h, ", token ", t, " is ", at,
                "; it must be below ", rungs);
        }
    }
    mdkv::detail::fail<invalid_argument>("packed_bytes: rung changed while it was read");
}

} // namespace detail

/// Waits for the stream: the size is known on the device only. Needs scratch; a dry run returns 0.
/// \throws invalid_argument, insufficient_workspace, cuda_error
template <element T>
[[nodiscard]] index_t packed_bytes_impl(
    backend const& on, in_view<std::uint8_t, 2, backend> rung, cache_layout const& layout, T)
{
    expects(on.scratch != nullptr, "packed_bytes: the backend has no workspace; on the GPU it needs one");
    expects<size_overflow>(
        rung.extent(1) <= INT32_MAX, "packed_bytes: N = ", rung.extent(1), " is beyond the limit of ", INT32_MAX);
    workspace::frame frame{*on.scratch, "packed_bytes"};
    detail::pack_lists const lists{frame, rung, layout, false};
    auto* const heads = frame.take<head_entry>(layout.heads);
    auto* const size  = frame.take<kernels::packed_size>(1);
    if (!frame.ready()) { return 0; }
    detail::count_rungs(on, lists.job(rung, layout.rungs));
    launch(on,
        kernels::lay_out_heads<T>{
            layout, INT64_MAX, rung.extent(1), true, lists.first, lists.counts, heads, nullptr, size},
        1);
    kernels::packed_size found{};
    read_back(on, size, &found, sizeof found);
    if (found.unlisted > 0) { detail::refuse_rungs(on, rung, layout.rungs); }
    return found.bytes;
}

/// What only the device knows cannot be refused here. Where the arena is too small, or a token is at a projected rung and
/// a basis is empty, nothing is written to the arena and every head's entry says that it holds no tokens, not even the
/// window's: attend then reads nothing (compress cannot get there, its budget is the arena's size). A token whose rung is
/// outside the layout is dropped.
/// \throws invalid_argument   besides what pack names: keys, values or the window are not aligned to their elements
template <element T>
void pack_impl(backend const& on, in_view<T, 3, backend> keys, in_view<T, 3, backend> values,
    in_view<T, 3, backend> window_keys, in_view<T, 3, backend> window_values, key_bases<backend> const& key_basis,
    in_view<float, 3, backend> value_basis, in_view<std::uint8_t, 2, backend> rung,
    cache_view<T, space::device> const& cache)
{
    mdkv::detail::argument const k{"pack", "keys", keys};
    mdkv::detail::argument const v{"pack", "values", values};
    mdkv::detail::argument const wk{"pack", "window_keys", window_keys};
    mdkv::detail::argument const wv{"pack", "window_values", window_values};
    k.aligned();
    v.aligned();
    wk.aligned();
    wv.aligned();
    cache_layout const& layout = cache.layout;
    index_t const tokens       = keys.extent(1);
    expects<size_overflow>(tokens <= INT32_MAX, "pack: N = ", tokens, " is beyond the limit of ", INT32_MAX);
    workspace::frame frame{*on.scratch, "pack"};
    detail::pack_lists const lists{frame, rung, layout, true};
    if (!frame.ready()) { return; }
    bool const bases =
        key_basis.of_keys.extent(0) > 0 && key_basis.of_queries.extent(0) > 0 && value_basis.extent(0) > 0;
    detail::list_rungs(on, lists.job(rung, layout.rungs));
    launch(on,
        kernels::lay_out_heads<T>{
            layout, cache.arena_bytes, tokens, bases, lists.first, lists.counts, cache.heads, cache.appended, nullptr},
        1);
    kernels::packing<T> const job{keys, values, window_keys, window_values, key_basis.of_keys, key_basis.of_queries,
        value_basis, lists.positions, lists.first,
        kernels::whole_pieces<T>(keys) && kernels::whole_pieces<T>(window_keys),
        kernels::whole_pieces<T>(values) && kernels::whole_pieces<T>(window_values), cache};
    index_t own_runs = 0;
    bool projections = false;
    for (std::size_t r = 0; r < layout.rungs; ++r)
    {
        own_runs += layout.own_run(r) ? 1 : 0;
        projections = projections || layout.projected(r);
    }
    if (bases && projections)
    {
        launch(on, kernels::pack_projections<T>{job}, layout.heads * kernels::pack_projections<T>::blocks_per_head);
    }
    if (own_runs > 0)
    {
        using kernel     = kernels::pack_coordinates<T>;
        int const blocks = detail::blocks_per_head(
            2 * ((tokens + kernel::strip - 1) / kernel::strip + own_runs - 1), layout.heads, kernel::most_blocks);
        launch(on, kernel{job, blocks}, layout.heads * blocks);
    }
    using kernel     = kernels::pack_exact<T>;
    int const blocks = detail::blocks_per_head(
        ((layout.full_rung < layout.rungs ? tokens : 0) + layout.window + tile_tokens - 1) / tile_tokens, layout.heads,
        kernel::most_blocks);
    launch(on, kernel{job, blocks}, layout.heads * blocks);
}

} // namespace mdkv::gpu
