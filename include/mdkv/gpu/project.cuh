/// \file project.cuh: project and reconstruct on the GPU: one blocked matrix product, in either direction.
#pragma once

#include <mdkv/project.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/contract.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/collectives.cuh>
#include <mdkv/gpu/detail/float_tile.cuh>
#include <mdkv/gpu/detail/rows.cuh>
#include <mdkv/gpu/device.cuh>
#include <mdkv/gpu/launch.cuh>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include <vector_types.h>

namespace mdkv::gpu
{

namespace kernels
{

/// to[h, n, :] = from[h, n, :] M_h, in float, where M_h is the transposed of basis's leading rows, or these rows themselves.
template <element From, element To>
struct multiply_rows
{
    static constexpr char const* name              = "multiply_rows";
    static constexpr int threads                   = float_tile::threads;
    static constexpr int blocks_per_multiprocessor = 6;
    static constexpr int side                      = float_tile::side;
    static constexpr int pitch                     = float_tile::pitch;
    static constexpr int depth                     = 32; // coordinates of both factors in shared memory at once

    in_view<From, 3, backend> from;
    in_view<float, 3, backend> basis;
    out_view<To, 3, backend> to;
    bool transposed; ///< M_h(k, c) = basis(h, c, k), else basis(h, k, c)
    bool wide_from;  ///< rows can be read in pieces of 16 bytes
    bool wide_basis;
    bool wide_to; ///< rows can be written four elements at a time
    index_t row_tiles;
    index_t column_tiles;

    [[nodiscard]] index_t shared_bytes() const { return 2 * depth * pitch * index_t{sizeof(float)}; }

    /// strip[d, i] = rows(head, first + i, k + d); zeros where there is none. Lanes take rows, which lie side by side there.
    template <element T>
    __device__ static void fill_turned(float* strip, in_view<T, 3, backend> const& rows, index_t head, index_t first,
        index_t end, index_t k, bool wide)
    {
        constexpr int piece = piece_of<T>;
        index_t const last  = rows.extent(2);
        for (int i = device::thread(); i < side * (depth / piece); i += threads)
        {
            int const row       = i % side;
            int const d         = i / side * piece;
            bool const there    = first + row < end;
            T const* const at   = rows.data_handle() + rows.mapping()(head, there ? first + row : index_t{0}, k + d);
            float values[piece] = {};
            if (there && wide && k + d + piece <= last) { widen_piece<T>(device::load16(at), values); }
            else if (there)
            {
                for (int e = 0; e < piece; ++e) { values[e] = k + d + e < last ? widen(at[e]) : 0.0F; }
            }
            for (int e = 0; e < piece; ++e) { strip[(d + e) * pitch + row] = values[e]; }
        }
    }

    /// strip[d, i] = basis(head, k + d, first + i); zeros where there is none.
    __device__ void fill(float* strip, index_t head, index_t first, index_t end, index_t k, index_t last) const
    {
        for (int i = device::thread(); i < depth * side; i += threads)
        {
            int const d            = i / side;
            int const row          = i % side;
            strip[d * pitch + row] = k + d < last && first + row < end ? basis(head, k + d, first + row) : 0.0F;
        }
    }

    __device__ void store(float const (&values)[4], To* at, index_t count) const
    {
        if (wide_to && count >= 4)
        {
            To rounded[4];
            for (int e = 0; e < 4; ++e) { rounded[e] = narrow<To>(values[e]); }
            using whole = std::conditional_t<sizeof(To) == 4, uint4, uint2>;
            whole bits;
            std::memcpy(&bits, rounded, sizeof bits);
            *reinterpret_cast<whole*>(at) = bits;
            return;
        }
        for (int e = 0; e < 4; ++e)
        {
            if (e < count) { at[e] = narrow<To>(values[e]); }
        }
    }

    __device__ void operator()() const
    {
        index_t const head   = device::block() / column_tiles / row_tiles;
        index_t const row    = device::block() / column_tiles % row_tiles * side;
        index_t const column = device::block() % column_tiles * side;
        index_t const rows   = to.extent(1);
        index_t const width  = to.extent(2);
        index_t const last   = from.extent(2);
        auto* const a        = reinterpret_cast<float*>(device::shared_memory()); // [depth, pitch]
        float* const b       = a + depth * pitch;                                 // [depth, pitch]
        float acc[8][4]      = {};
        for (index_t k = 0; k < last; k += depth)
        {
            device::sync();
            fill_turned<From>(a, from, head, row, rows, k, wide_from);
            if (transposed) { fill_turned<float>(b, basis, head, column, width, k, wide_basis); }
            else { fill(b, head, column, width, k, last); }
            device::sync();
            float_tile::multiply_add(a, b, static_cast<int>(last - k < depth ? last - k : depth), acc);
        }
        for (int i = 0; i < 8; ++i)
        {
            index_t const n = row + float_tile::row(i);
            index_t const c = column + float_tile::column(i, 0);
            if (n < rows && c < width) { store(acc[i], &to(head, n, c), width - c); }
        }
    }
};

template <element From, element To>
void multiply(backend const& on, in_view<From, 3, backend> const& from, in_view<float, 3, backend> const& basis,
    out_view<To, 3, backend> const& to, bool transposed)
{
    constexpr index_t side     = float_tile::side;
    index_t const row_tiles    = (to.extent(1) + side - 1) / side;
    index_t const column_tiles = (to.extent(2) + side - 1) / side;
    launch(on,
        multiply_rows<From, To>{from, basis, to, transposed, rows_begin_at(from, 16), rows_begin_at(basis, 16),
            rows_begin_at(to, 4 * index_t{sizeof(To)}), row_tiles, column_tiles},
        checked_multiply(to.extent(0), checked_multiply(row_tiles, column_tiles)));
}

} // namespace kernels

template <element T, element U>
void project_impl(backend const& on, in_view<T, 3, backend> vectors, in_view<float, 3, backend> basis,
    out_view<U, 3, backend> coordinates)
{
    mdkv::detail::argument const x{"project", "vectors", vectors};
    x.aligned();
    if (on.scratch->counting()) { return; }
    kernels::multiply(on, vectors, basis, coordinates, true);
}

template <element T, element U>
void reconstruct_impl(backend const& on, in_view<U, 3, backend> coordinates, in_view<float, 3, backend> basis,
    out_view<T, 3, backend> vectors)
{
    mdkv::detail::argument const c{"reconstruct", "coordinates", coordinates};
    c.aligned();
    if (on.scratch->counting()) { return; }
    kernels::multiply(on, coordinates, basis, vectors, false);
}

} // namespace mdkv::gpu
