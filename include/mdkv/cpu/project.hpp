/// \file project.hpp: project and reconstruct on the CPU: one blocked matrix product, in either direction.
#pragma once

#include <mdkv/project.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/block.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/tile.hpp>

#include <algorithm>
#include <string_view>

namespace mdkv::cpu
{

namespace detail
{

/// to[h, n, :] = from[h, n, :] * M_h, where entry(h, k, c) gives M_h [depth, width].
template <element From, element To, class Entry>
void multiply_rows(backend const& on, std::string_view stage, in_view<From, 3, backend> const& from,
    out_view<To, 3, backend> const& to, Entry const& entry)
{
    index_t const heads  = from.extent(0);
    index_t const rows   = from.extent(1);
    index_t const depth  = from.extent(2);
    index_t const width  = to.extent(2);
    index_t const step   = tile::round_up(width, simd::lanes);
    index_t const blocks = (rows + block_rows - 1) / block_rows;
    workspace::frame frame{*on.scratch, stage};
    float* const matrices = frame.take<float>(checked_multiply(heads, checked_multiply(depth, step)));
    float* const inputs   = frame.take<float>(on.slots(heads * blocks) * block_rows * depth);
    float* const outputs  = frame.take<float>(on.slots(heads * blocks) * block_rows * step);
    if (!frame.ready()) { return; }

    on.for_each(heads, [&](index_t head, index_t) {
        float* const matrix = matrices + head * depth * step;
        std::fill_n(matrix, depth * step, 0.0F);
        for (index_t k = 0; k < depth; ++k)
        {
            for (index_t c = 0; c < width; ++c) { matrix[k * step + c] = entry(head, k, c); }
        }
    });
    on.for_each(heads * blocks, [&](index_t item, index_t slot) {
        index_t const head  = item / blocks;
        index_t const first = item % blocks * block_rows;
        index_t const count = std::min(block_rows, rows - first);
        float* const input  = inputs + slot * block_rows * depth;
        float* const output = outputs + slot * block_rows * step;
        read_block(from, head, first, count, input);
        multiply_block(input, depth, matrices + head * depth * step, step, output);
        for (index_t t = 0; t < count; ++t)
        {
            for (index_t c = 0; c < width; ++c) { to(head, first + t, c) = narrow<To>(output[t * step + c]); }
        }
    });
}

} // namespace detail

template <element T, element U>
void project_impl(backend const& on, in_view<T, 3, backend> vectors, in_view<float, 3, backend> basis,
    out_view<U, 3, backend> coordinates)
{
    detail::multiply_rows(
        on, "project", vectors, coordinates, [&](index_t head, index_t k, index_t c) { return basis(head, c, k); });
}

template <element T, element U>
void reconstruct_impl(backend const& on, in_view<U, 3, backend> coordinates, in_view<float, 3, backend> basis,
    out_view<T, 3, backend> vectors)
{
    detail::multiply_rows(
        on, "reconstruct", coordinates, vectors, [&](index_t head, index_t k, index_t c) { return basis(head, k, c); });
}

} // namespace mdkv::cpu
