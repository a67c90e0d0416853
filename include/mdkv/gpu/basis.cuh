/// \file basis.cuh: Gram matrices and the bases made of them on the GPU (arXiv 2603.20616, section 4.1).
#pragma once

#include <mdkv/basis.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/contract.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/eigen.cuh>
#include <mdkv/gpu/detail/gram.cuh>
#include <mdkv/gpu/detail/query_metric.cuh>
#include <mdkv/gpu/detail/rows.cuh>
#include <mdkv/gpu/launch.cuh>

#include <cstdint>

// Nothing here looks at what the device holds, so a Gram matrix that is not finite is not refused: its head gets a basis of
// unit vectors and energies that are NaN. Nothing is allocated either; the linear algebra is our own.

namespace mdkv::gpu
{

namespace kernels
{

inline void clear(backend const& on, double* to, index_t count)
{
    launch(on, clear_doubles{to, count}, (count + clear_doubles::per_block - 1) / clear_doubles::per_block);
}

} // namespace kernels

template <element T>
void accumulate_gram_impl(backend const& on, in_view<T, 3, backend> samples, out_view<double, 3, backend> gram)
{
    index_t const heads = samples.extent(0);
    index_t const dim   = samples.extent(2);
    mdkv::detail::argument const x{"accumulate_gram", "samples", samples};
    x.aligned();
    kernels::gram_cut const cut{samples.extent(1), dim};
    index_t const blocks = checked_multiply(heads * cut.parts, cut.tiles);
    workspace::frame frame{*on.scratch, "accumulate_gram"};
    double* const sums = frame.take<double>(
        checked_multiply(blocks, kernels::gram_of_parts::tile_elements)); // [H * parts, tiles, 64, 64]
    if (!frame.ready() || x.empty()) { return; }
    launch(on, kernels::gram_products<T>{samples, sums, cut, kernels::rows_begin_at(samples, 16)}, blocks);
    launch(on, kernels::gram_of_parts{sums, gram, cut}, heads * cut.tiles * kernels::gram_of_parts::per_tile);
}

inline void eigenbasis_impl(backend const& on, in_view<double, 3, backend> gram, out_view<float, 3, backend> basis,
    out_view<float, 2, backend> energy)
{
    index_t const heads = gram.extent(0);
    kernels::eigen_room const room{gram.extent(2)};
    expects(room.side <= INT16_MAX, "eigenbasis: D is ", gram.extent(2), "; on the GPU it must be below 32767");
    workspace::frame frame{*on.scratch, "eigenbasis"};
    float* const memory = frame.take<float>(checked_multiply(heads, room.scratch()));
    if (!frame.ready() || room.side == 0) { return; }
    kernels::symmetric_eigen<2> const both{gram, basis, energy, memory, room};
    kernels::symmetric_eigen<1> const matrix{gram, basis, energy, memory, room};
    index_t const most = most_shared_memory();
    if (both.shared_bytes() <= most) { launch(on, both, heads); }
    else if (matrix.shared_bytes() <= most) { launch(on, matrix, heads); }
    else { launch(on, kernels::symmetric_eigen<0>{gram, basis, energy, memory, room}, heads); }
}

template <element T>
void fit_basis_impl(backend const& on, in_view<T, 3, backend> samples, out_view<float, 3, backend> basis,
    out_view<float, 2, backend> energy)
{
    index_t const heads = samples.extent(0);
    index_t const dim   = samples.extent(2);
    workspace::frame frame{*on.scratch, "fit_basis"};
    index_t const size   = checked_multiply(heads, dim * dim);
    double* const memory = frame.take<double>(size); // [H, D, D]
    auto const gram      = out(on, memory, heads, dim, dim);
    if (frame.ready()) { kernels::clear(on, memory, size); }
    accumulate_gram_impl(on, samples, gram);
    eigenbasis_impl(on, as_input(gram), basis, energy);
}

template <element T>
void fit_query_aware_basis_impl(backend const& on, in_view<T, 3, backend> queries, in_view<T, 3, backend> keys,
    out_view<float, 3, backend> of_keys, out_view<float, 3, backend> of_queries, out_view<float, 2, backend> energy)
{
    index_t const heads = keys.extent(0);
    index_t const dim   = keys.extent(2);
    index_t const group = heads > 0 && queries.extent(1) > 0 ? queries.extent(0) / heads : 0;
    index_t const size  = checked_multiply(heads, dim * dim);
    mdkv::detail::argument const q{"fit_query_aware_basis", "queries", queries};
    mdkv::detail::argument const k{"fit_query_aware_basis", "keys", keys};
    q.aligned();
    k.aligned();
    workspace::frame frame{*on.scratch, "fit_query_aware_basis"};
    double* const key_memory   = frame.take<double>(size);            // [H, D, D]
    double* const query_memory = frame.take<double>(size);            // [H, D, D]
    double* const root         = frame.take<double>(size);            // [H, D, D]  S
    double* const inverse_root = frame.take<double>(size);            // [H, D, D]
    float* const directions    = frame.take<float>(size);             // [H, D, D]
    float* const strengths     = frame.take<float>(heads * dim);      // [H, D]
    double* const stretch      = frame.take<double>(2 * heads * dim); // [2, H, D]
    double* const factor       = frame.take<double>(heads);           // [H]
    auto const key_gram        = out(on, key_memory, heads, dim, dim);
    auto const query_gram      = out(on, query_memory, heads, dim, dim);
    auto const rows            = out(on, directions, heads, dim, dim);
    auto const strength        = out(on, strengths, heads, dim);
    bool const ready           = frame.ready() && size > 0;
    if (ready)
    {
        kernels::clear(on, key_memory, size);
        kernels::clear(on, query_memory, size);
    }
    accumulate_gram_impl(on, keys, key_gram);
    for (index_t g = 0; g < group; ++g)
    {
        // Member g of every group: query heads g, G + g, 2 G + g, ...
        auto const& map    = queries.mapping();
        T const* const row = queries.data_handle() == nullptr ? nullptr : queries.data_handle() + g * map.stride(0);
        accumulate_gram_impl(on,
            in(on, row, {heads, queries.extent(1), dim}, {checked_multiply(group, map.stride(0)), map.stride(1), 1}),
            query_gram);
    }
    eigenbasis_impl(on, as_input(query_gram), rows, strength);
    if (!ready) { return; }
    index_t const count = checked_multiply(group, queries.extent(1));
    index_t const tiles = (dim + kernels::small_tile - 1) / kernels::small_tile;
    launch(on, kernels::query_scales{as_input(query_gram), as_input(strength), stretch, factor, count}, heads);
    using of_floats  = kernels::weighted_products<float, double>;
    using of_doubles = kernels::weighted_products<double, double>;
    using to_result  = kernels::weighted_products<float, float>;
    auto const start = [&](auto const& product) { launch(on, product, checked_multiply(heads, tiles * tiles)); };
    auto const as    = [&](double* to) { return out(on, to, heads, dim, dim); };
    start(of_floats{directions, false, stretch, directions, nullptr, 1.0, as(root)});
    start(of_floats{directions, false, stretch + heads * dim, directions, nullptr, 1.0, as(inverse_root)});
    start(of_doubles{key_memory, false, nullptr, nullptr, root, 1.0, as(query_memory)});
    double const tokens = static_cast<double>(keys.extent(1) > 0 ? keys.extent(1) : 1);
    start(of_doubles{root, false, nullptr, nullptr, query_memory, 1.0 / tokens, as(key_memory)});
    eigenbasis_impl(on, as_input(key_gram), rows, energy);
    start(to_result{directions, true, nullptr, nullptr, root, 1.0, of_keys});
    start(to_result{directions, true, nullptr, nullptr, inverse_root, 1.0, of_queries});
    launch(on, kernels::scale_energies{energy, factor}, heads);
}

} // namespace mdkv::gpu
