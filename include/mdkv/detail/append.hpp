/// \file append.hpp: append, written once over run and team: one token into every head's tail (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/element.hpp>
#include <mdkv/detail/team.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>

namespace mdkv::detail
{

/// One item for all heads: the count is raised when every member has read it.
template <backend B, element T, element U>
struct append_token
{
    static constexpr char const* name = "append";
    static constexpr int threads      = 512;

    in_view<U, 2, B> key;   // [H, D]
    in_view<U, 2, B> value; // [H, Dv]
    cache_view<T, B::memory_space> cache;

    MDKV_HD static void copy(U const* from, std::byte* to) noexcept
    {
        U const given = read_element<B>(from);
        if constexpr (std::same_as<T, U>) { write_element<B>(given, to); }
        else { write_element<B>(narrow<T>(widen(given)), to); }
    }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t) const
    {
        index_t const at = *cache.appended;
        t.sync();
        if (t.rank() == 0) { *cache.appended = at + 1; }
        if (at >= cache.tail_capacity) { return; }
        constexpr index_t bytes = sizeof(T);
        head_dims const dims    = cache.layout.dims;
        index_t const tile      = at / tile_tokens * tile_tokens;
        index_t const left      = cache.tail_capacity - tile;
        index_t const width     = left < tile_tokens ? left : tile_tokens;
        auto const of_keys      = share_rows(t, dims.keys);
        for (index_t h = of_keys.row; h < cache.layout.heads; h += of_keys.rows)
        {
            U const* const from = key.data_handle() + h * key.stride(0);
            std::byte* const to = cache.tail + h * cache.tail_head_bytes() + (tile * dims.keys + at - tile) * bytes;
            for (index_t d = of_keys.column; d < dims.keys; d += t.size()) { copy(from + d, to + d * width * bytes); }
        }
        auto const of_values = share_rows(t, dims.values);
        for (index_t h = of_values.row; h < cache.layout.heads; h += of_values.rows)
        {
            U const* const from = value.data_handle() + h * value.stride(0);
            std::byte* const to =
                cache.tail + h * cache.tail_head_bytes() + (cache.tail_capacity * dims.keys + at * dims.values) * bytes;
            for (index_t d = of_values.column; d < dims.values; d += t.size()) { copy(from + d, to + d * bytes); }
        }
    }
};

/// Only the host can refuse a full tail: in device memory the token is counted, so that `*cache.appended` is beyond
/// `cache.tail_capacity` from then on, and attend reads no further than the capacity. An engine knows how many tokens it
/// has appended: `reserve_tail` makes room in time.
template <backend B, element T, element U>
void append_impl(B const& on, in_view<U, 2, B> key, in_view<U, 2, B> value, cache_view<T, B::memory_space> const& cache)
{
    if constexpr (B::memory_space == space::host)
    {
        expects<insufficient_workspace>(dry_run(on) || *cache.appended < cache.tail_capacity,
            "append: the tail is full: it holds ", dry_run(on) ? 0 : *cache.appended, " tokens and has room for ",
            cache.tail_capacity);
    }
    else
    {
        expects(reinterpret_cast<std::uintptr_t>(cache.tail) % alignof(T) == 0, "append: cache.tail is not aligned to ",
            index_t{alignof(T)}, " bytes");
    }
    run(on, append_token<B, T, U>{key, value, cache}, 1);
}

} // namespace mdkv::detail
