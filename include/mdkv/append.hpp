/// \file append.hpp: append: one new token into the cache's tail, uncompressed (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/element.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/team.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>

namespace mdkv
{

namespace detail
{

/// One item for all heads: the count is raised when every member has copied its part.
template <backend B, element T, element U>
struct append_token
{
    static constexpr char const* name = "append";
    static constexpr int threads      = 512;

    in_view<U, 2, B> key;   // [H, D]
    in_view<U, 2, B> value; // [H, Dv]
    cache_view<T, B::memory_space> cache;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t) const
    {
        index_t const at = *cache.appended;
        if (at < cache.tail_capacity)
        {
            copy(t, key, at, false);
            copy(t, value, at, true);
        }
        t.sync();
        if (t.rank() == 0) { *cache.appended = at + 1; }
    }

private:
    template <team Team>
    MDKV_HD void copy(Team const& t, in_view<U, 2, B> const& rows, index_t at, bool of_values) const
    {
        auto const mine = share_rows(t, rows.extent(1));
        for (index_t h = mine.row; h < cache.layout.heads; h += mine.rows)
        {
            run_rows const tail = run_of_head(cache, h, cache.layout.rungs + 1).rows(of_values);
            std::byte* const to = tail.begin + tail.coordinate(at, 0);
            index_t const step  = tail.step(at);
            for (index_t d = mine.column; d < rows.extent(1); d += t.size())
            {
                U const given = load_at<U>(rows.row(h) + d);
                if constexpr (std::same_as<T, U>) { store_at(to + d * step, given); }
                else { store_at(to + d * step, narrow<T>(widen(given))); }
            }
        }
    }
};

} // namespace detail

/// Adds one token to every head's tail, in place.
///
/// Only the host can refuse a full tail: in device memory the token is counted, so that `*cache.appended` is beyond
/// `cache.tail_capacity` from then on, and attend reads no further than the capacity. An engine knows how many tokens it
/// has appended: `reserve_tail` makes room in time.
///
/// \param on         backend
/// \param[in] key    [H, D]   after position encoding (positions go on from the prompt's true length), any element type
/// \param[in] value  [H, Dv]
/// \param     cache  the tail must have room
/// \cost   writes one token; no scratch, no allocation
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  deterministic
/// \throws invalid_argument        a shape disagrees; gpu: the tail is not aligned to elements
/// \throws insufficient_workspace  the tail is full (naming its capacity); grow it with `reserve_tail` of its owner.
///                                 Nothing was changed in either case. gpu: the token is not written, and counted
///                                 beyond the capacity
/// \see    tests/append.cpp
template <backend B, element T, element U>
void append(B const& on, in_view<U, 2, B> key, in_view<U, 2, B> value, cache_view<T, B::memory_space> const& cache)
{
    detail::check arguments{on, "append"};
    bool const dry = detail::dry_run(on);
    expects(dry || cache.appended != nullptr, "append: cache has no directory");
    arguments.rows("key", key, {cache.layout.heads, cache.layout.dims.keys}, "H,D")
        .rows("value", value, {cache.layout.heads, cache.layout.dims.values}, "H,Dv")
        .bytes("cache.tail", cache.tail, cache.layout.heads * cache.tail_head_bytes(), true)
        .bytes("cache.appended", cache.appended, sizeof(index_t), true);
    if constexpr (B::memory_space == space::host)
    {
        expects<insufficient_workspace>(dry || *cache.appended < cache.tail_capacity,
            "append: the tail is full: it holds ", dry ? 0 : *cache.appended, " tokens and has room for ",
            cache.tail_capacity);
    }
    else
    {
        expects(reinterpret_cast<std::uintptr_t>(cache.tail) % alignof(T) == 0, "append: cache.tail is not aligned to ",
            index_t{alignof(T)}, " bytes");
    }
    run(on, detail::append_token<B, T, U>{key, value, cache}, 1);
}

} // namespace mdkv
