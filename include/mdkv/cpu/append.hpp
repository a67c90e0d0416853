/// \file append.hpp: append on the CPU: one token's key and value written into every head's tail (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/append.hpp>

#include <mdkv/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstring>

namespace mdkv::cpu
{

namespace detail
{

/// Copies an element between addresses of any alignment, converting it where the types differ.
template <element T, element U>
inline void copy_element(U const* from, std::byte* to) noexcept
{
    if constexpr (std::same_as<T, U>) { std::memcpy(to, from, sizeof(T)); }
    else
    {
        U value;
        std::memcpy(&value, from, sizeof value);
        T const converted = narrow<T>(widen(value));
        std::memcpy(to, &converted, sizeof converted);
    }
}

} // namespace detail

template <element T, element U>
void append_impl(backend const& on, in_view<U, 2, backend> key, in_view<U, 2, backend> value,
    cache_view<T, space::host> const& cache)
{
    if (on.scratch->counting()) { return; }
    index_t const at = *cache.appended;
    expects<insufficient_workspace>(at < cache.tail_capacity, "append: the tail is full: it holds ", at,
        " tokens and has room for ", cache.tail_capacity);
    constexpr index_t bytes = sizeof(T);
    head_dims const dims    = cache.layout.dims;
    index_t const tile      = at / tile_tokens * tile_tokens;
    index_t const width     = std::min(tile_tokens, cache.tail_capacity - tile);
    for (index_t h = 0; h < cache.layout.heads; ++h)
    {
        std::byte* const head   = cache.tail + h * cache.tail_head_bytes();
        U const* const k        = key.data_handle() + key.mapping()(h, 0);
        U const* const v        = value.data_handle() + value.mapping()(h, 0);
        std::byte* const keys   = head + (tile * dims.keys + at - tile) * bytes;
        std::byte* const values = head + (cache.tail_capacity * dims.keys + at * dims.values) * bytes;
        for (index_t d = 0; d < dims.keys; ++d) { detail::copy_element<T>(k + d, keys + d * width * bytes); }
        for (index_t d = 0; d < dims.values; ++d) { detail::copy_element<T>(v + d, values + d * bytes); }
    }
    *cache.appended = at + 1;
}

} // namespace mdkv::cpu
