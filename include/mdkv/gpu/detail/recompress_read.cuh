/// \file recompress_read.cuh: stored tokens read back on the GPU as vectors of the original dimension.
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/narrow_within.hpp>
#include <mdkv/detail/rotation.hpp>
#include <mdkv/detail/stored_slots.hpp>
#include <mdkv/gpu/collectives.cuh>
#include <mdkv/gpu/detail/run_side.cuh>
#include <mdkv/gpu/detail/stored_run.cuh>
#include <mdkv/gpu/detail/warp_group.cuh>
#include <mdkv/gpu/device.cuh>

#include <cstddef>

namespace mdkv::gpu::kernels
{

/// Tokens [H, M] before the new window, zeros where a head has fewer, and the window. A warp takes four neighbours: what
/// a basis' row adds to each of them is added at once. Exact tokens come out bit for bit.
template <element T>
struct read_tokens
{
    static constexpr char const* name = "read_tokens";
    static constexpr int threads      = 128;
    static constexpr int each         = 4; ///< tokens of a warp
    static constexpr int strip        = threads / device::warp_size * each;

    mdkv::detail::stored_slots slots; ///< over the directory in device memory
    cache_view<T, space::device> cache;
    float const* query_basis; // [H, D, D]    null where no token is in a basis
    float const* value_basis; // [H, Dv, Dv]
    T* keys;                  // [H, M, D]
    T* values;                // [H, M, Dv]
    T* window_keys;           // [H, W, D]
    T* window_values;         // [H, W, Dv]

    [[nodiscard]] MDKV_HD index_t strips() const { return (slots.most + slots.layout.window + strip - 1) / strip; }
    [[nodiscard]] index_t blocks() const { return slots.layout.heads * strips(); }
    [[nodiscard]] MDKV_HD index_t pitch() const
    {
        head_dims const dims = slots.layout.dims;
        return dims.keys > dims.values ? dims.keys : dims.values;
    }
    [[nodiscard]] index_t shared_bytes() const
    {
        device::shared_carver size{nullptr};
        static_cast<void>(size.take<float>(strip * pitch()));
        return size.bytes();
    }

    __device__ void operator()() const
    {
        index_t const h     = device::block() / strips();
        index_t const first = device::block() % strips() * strip + index_t{device::warp()} * each;
        float* const room   = device::shared_carver{device::shared_memory()}.take<float>(strip * pitch())
                            + device::warp() * each * pitch();
        read(h, first, false, room);
        read(h, first, true, room);
    }

private:
    /// Keys, or values, of the warp's tokens: coordinates to `room` [each, pitch], then vectors.
    __device__ void read(index_t h, index_t first, bool of_values, float* room) const
    {
        index_t const before = slots.tokens(h);
        auto const dim       = static_cast<int>(of_values ? slots.layout.dims.values : slots.layout.dims.keys);
        T* row[each];      // null: written already, or no token
        int columns[each]; // of the basis; 0: the coordinates are the vector
        int most = 0;
        device::sync_warp(); // room may still be read
        for (int k = 0; k < each; ++k)
        {
            index_t const t = first + k;
            row[k]          = nullptr;
            columns[k]      = 0;
            if (t >= before && t < slots.most) { clear((of_values ? values : keys) + (h * slots.most + t) * dim, dim); }
            if (t >= before + slots.layout.window) { continue; }
            T* const whole =
                t < before ? (of_values ? values : keys) + (h * slots.most + t) * dim
                           : (of_values ? window_values : window_keys) + (h * slots.layout.window + t - before) * dim;
            stored_token const token = token_at(cache, h, t);
            run_side const from{token.run, of_values};
            if (token.rung >= cache.layout.rungs)
            {
                copy(from, token.place, dim, whole);
                continue;
            }
            row[k] = whole;
            read_coordinates(from, token, dim, room + k * pitch());
            if (cache.layout.projected(token.rung)) { columns[k] = from.coordinates; }
            most = columns[k] > most ? columns[k] : most;
        }
        device::sync_warp();
        write(room, row, columns, most, dim, basis_of(h, of_values));
    }

    [[nodiscard]] __device__ float const* basis_of(index_t h, bool of_values) const
    {
        index_t const dim        = of_values ? slots.layout.dims.values : slots.layout.dims.keys;
        float const* const basis = of_values ? value_basis : query_basis;
        return basis == nullptr ? nullptr : basis + h * dim * dim;
    }

    __device__ static void clear(T* to, int dim)
    {
        for (int d = device::lane(); d < dim; d += device::warp_size) { to[d] = narrow<T>(0.0F); }
    }

    __device__ static void copy(run_side const& from, index_t place, int dim, T* to)
    {
        for (int d = device::lane(); d < dim; d += device::warp_size)
        {
            to[d] = element_at<T>(from.begin, from.element(place, d));
        }
    }

    /// What is stored of a token, turned back where it was turned; 0 beyond it.
    __device__ void read_coordinates(run_side const& from, stored_token const& token, int dim, float* to) const
    {
        bool const turned = token.run.basis == run_basis::turned;
        for (int first = 0; first < dim; first += int{quantised_group})
        {
            int const left = from.coordinates - first;
            warp_group group{{0.0F, 0.0F}, left < 0 ? 0 : left < int{quantised_group} ? left : int{quantised_group}};
            for (int k = 0; k < warp_group::halves; ++k)
            {
                int const c = first + k * device::warp_size + device::lane();
                if (!group.has(k)) { continue; }
                group.x[k] = from.kind == storage::plain
                                 ? widen(element_at<T>(from.begin, from.element(token.place, c)))
                                 : from.coded_value(token.place, c);
            }
            if (turned && mdkv::detail::turns(group.n)) { group.turn(); }
            for (int k = 0; k < warp_group::halves; ++k)
            {
                int const c = first + k * device::warp_size + device::lane();
                if (c < dim) { to[c] = group.x[k]; }
            }
        }
    }

    /// Row by row of the basis, ascending.
    __device__ void write(float const* room, T* const (&row)[each], int const (&columns)[each], int most, int dim,
        float const* basis) const
    {
        index_t const step = pitch();
        for (int d = device::lane(); d < dim; d += device::warp_size)
        {
            float sum[each]{};
            for (int c = 0; c < most; ++c)
            {
                float const x = basis[index_t{c} * dim + d];
                for (int k = 0; k < each; ++k) { sum[k] += room[k * step + c] * x; }
            }
            for (int k = 0; k < each; ++k)
            {
                if (row[k] == nullptr) { continue; }
                row[k][d] = mdkv::detail::narrow_within<T>(columns[k] > 0 ? sum[k] : room[k * step + d]);
            }
        }
    }
};

} // namespace mdkv::gpu::kernels
