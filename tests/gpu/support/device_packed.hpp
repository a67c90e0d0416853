/// \file device_packed.hpp: caches in device memory of the tests' own, and a layer packed by the GPU
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/cache.cuh>
#include <mdkv/stages/pack.hpp>

#include <device_memory.hpp>

#include "gpu/support/device.hpp"
#include "support/host.hpp"
#include "support/packed.hpp"

#include <cstdint>

#include <driver_types.h>

namespace support
{

template <class T>
using owned_cache = mdkv::gpu::cache<T, device_resource>;

/// The layer's tensors on the device.
template <class T>
struct device_layer
{
    mdkv::cache_layout layout;
    device_tensor<T, 3> keys;
    device_tensor<T, 3> values;
    device_tensor<T, 3> window_keys;
    device_tensor<T, 3> window_values;
    device_tensor<float, 3> key_basis;
    device_tensor<float, 3> value_basis;
    device_tensor<std::uint8_t, 2> rung;
    device_tensor<float, 3> stand_in_keys;
    device_tensor<float, 3> stand_in_values;

    explicit device_layer(packed_layer<T> const& from)
        : layout{from.layout}
        , keys{from.keys}
        , values{from.values}
        , window_keys{from.window_keys}
        , window_values{from.window_values}
        , key_basis{from.key_basis}
        , value_basis{from.value_basis}
        , rung{from.rung}
        , stand_in_keys{from.stand_in_keys}
        , stand_in_values{from.stand_in_values}
    {}

    void pack(mdkv::gpu::backend const& on, mdkv::cache_view<T, mdkv::space::device> const& cache) const
    {
        mdkv::pack(on, keys.in(), values.in(), window_keys.in(), window_values.in(), key_basis.in(), value_basis.in(),
            rung.in(), cache, {}, stand_in_keys.in(), stand_in_values.in());
    }
};

/// Packed by the GPU into `spare` bytes more than needed (or fewer), as the host sees it.
template <class T>
[[nodiscard]] mdkv::cpu::cache<T> packed_on_device(packed_layer<T> const& layer, index_t tail = 0, index_t spare = 0)
{
    device_layer<T> const there{layer};
    device_resource memory;
    owned_cache<T> cache{layer.layout, layer.bytes() + spare, tail, nullptr, memory};
    run_on_device([&](mdkv::gpu::backend const& on) { there.pack(on, cache.view()); });
    return mdkv::gpu::to_host(cache, nullptr);
}

} // namespace support
