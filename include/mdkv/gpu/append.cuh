/// \file append.cuh: append on the GPU: one token's key and value written into every head's tail (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/append.hpp>

#include <mdkv/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/contract.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/device.cuh>
#include <mdkv/gpu/launch.cuh>

#include <concepts>
#include <cstddef>
#include <cstdint>

namespace mdkv::gpu
{

namespace kernels
{

/// One block for all heads: the token count is raised when every thread has read it, without a second kernel.
template <element T, element U>
struct append_token
{
    static constexpr char const* name = "append_token";
    static constexpr int threads      = 512;

    in_view<U, 2, backend> key;   // [H, D]
    in_view<U, 2, backend> value; // [H, Dv]
    cache_view<T, space::device> cache;

    [[nodiscard]] __device__ static T converted(U x)
    {
        if constexpr (std::same_as<T, U>) { return x; }
        else { return narrow<T>(widen(x)); }
    }

    __device__ void operator()() const
    {
        index_t const at = *cache.appended;
        device::sync();
        if (device::thread() == 0) { *cache.appended = at + 1; }
        if (at >= cache.tail_capacity) { return; }
        head_dims const dims     = cache.layout.dims;
        index_t const tile       = at / tile_tokens * tile_tokens;
        index_t const left       = cache.tail_capacity - tile;
        index_t const width      = left < tile_tokens ? left : tile_tokens;
        index_t const head_bytes = cache.tail_head_bytes();
        for (index_t i = device::thread(); i < cache.layout.heads * dims.keys; i += threads)
        {
            index_t const h                              = i / dims.keys;
            index_t const d                              = i % dims.keys;
            auto* const to                               = reinterpret_cast<T*>(cache.tail + h * head_bytes);
            to[tile * dims.keys + at - tile + d * width] = converted(key(h, d));
        }
        for (index_t i = device::thread(); i < cache.layout.heads * dims.values; i += threads)
        {
            index_t const h = i / dims.values;
            index_t const d = i % dims.values;
            auto* const to  = reinterpret_cast<T*>(cache.tail + h * head_bytes);
            to[cache.tail_capacity * dims.keys + at * dims.values + d] = converted(value(h, d));
        }
    }
};

} // namespace kernels

/// A full tail cannot be refused here, where nobody has read the count yet: nothing is written, but the token is counted,
/// so that `*cache.appended` is beyond `cache.tail_capacity` from then on; attend reads no further than the capacity. An
/// engine knows how many tokens it has appended: `gpu::cache::reserve_tail` makes room in time.
/// \throws invalid_argument   besides what append names: key, value or the tail is not aligned to its elements
template <element T, element U>
void append_impl(backend const& on, in_view<U, 2, backend> key, in_view<U, 2, backend> value,
    cache_view<T, space::device> const& cache)
{
    mdkv::detail::argument const k{"append", "key", key};
    mdkv::detail::argument const v{"append", "value", value};
    k.aligned();
    v.aligned();
    expects(reinterpret_cast<std::uintptr_t>(cache.tail) % alignof(T) == 0, "append: cache.tail is not aligned to ",
        index_t{alignof(T)}, " bytes");
    if (on.scratch->counting()) { return; }
    launch(on, kernels::append_token<T, U>{key, value, cache}, 1);
}

} // namespace mdkv::gpu
