/// \file fill.cuh: device memory filled with one value.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/device.cuh>

namespace mdkv::gpu::kernels
{

/// Writes the same value everywhere.
template <class V>
struct fill
{
    static constexpr char const* name = "fill";
    static constexpr int threads      = 256;

    out_view<V, 2, backend> to; // [rows, columns]
    V value;

    [[nodiscard]] static index_t blocks(index_t count) { return (count + threads - 1) / threads; }

    __device__ void operator()() const
    {
        index_t const i = device::block() * threads + device::thread();
        if (i < to.extent(0) * to.extent(1)) { to(i / to.extent(1), i % to.extent(1)) = value; }
    }
};

} // namespace mdkv::gpu::kernels
