/// \file append.hpp: append puts new tokens into the cache's tail, uncompressed, and truncate_tail takes them out again (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/team.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>

namespace mdkv::inline MDKV_MACHINE
{

namespace detail
{

/// One item for all heads: the count is raised when every member has copied its part.
template <backend B, element T, element U>
struct append_token
{
    static constexpr char const* name = "append";
    static constexpr int threads      = 512;

    in_view<U, 3, B> keys;   // [H, n, D]
    in_view<U, 3, B> values; // [H, n, Dv]
    cache_view<T, B::memory_space> cache;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t) const
    {
        index_t const at = *cache.appended;
        for (index_t i = 0; i < keys.extent(1) && at + i < cache.tail_capacity; ++i)
        {
            copy(t, keys, i, at + i, false);
            copy(t, values, i, at + i, true);
        }
        t.sync();
        if (t.rank() == 0) { *cache.appended = at + keys.extent(1); }
    }

private:
    template <team Team>
    MDKV_HD void copy(Team const& t, in_view<U, 3, B> const& rows, index_t i, index_t at, bool of_values) const
    {
        auto const mine = share_rows(t, rows.extent(2));
        for (index_t h = mine.row; h < cache.layout.heads; h += mine.rows)
        {
            run_rows const tail = run_of_head(cache, h, cache.layout.rungs + 1).rows(of_values);
            std::byte* const to = tail.begin + tail.coordinate(at, 0);
            index_t const step  = tail.step(at);
            // Several at a time, so that compilers vectorise the narrowing of a thread.
            constexpr index_t most = Team::lanes;
            for (index_t d = mine.column * most; d < rows.extent(2); d += t.size() * most)
            {
                U const* const from = rows.row(h, i) + d;
                index_t const n     = rows.extent(2) - d < most ? rows.extent(2) - d : most;
                T stored[std::size_t{most}];
                if (n == most)
                {
                    MDKV_FOR_LANES(l, most) { stored[l] = as_stored(load_at<U>(from + l)); }
                }
                else
                {
                    for (index_t l = 0; l < n; ++l) { stored[l] = as_stored(load_at<U>(from + l)); }
                }
                for (index_t l = 0; l < n; ++l) { store_at(to + (d + l) * step, stored[l]); }
            }
        }
    }

    [[nodiscard]] MDKV_HD static T as_stored(U given) noexcept
    {
        if constexpr (std::same_as<T, U>) { return given; }
        else { return narrow<T>(widen(given)); }
    }
};

/// One item: the count of appended tokens.
template <space S>
struct truncate_count
{
    static constexpr char const* name = "truncate_tail";

    index_t* appended;
    index_t tokens;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t) const
    {
        if (t.rank() == 0 && *appended > tokens) { *appended = tokens; }
    }
};

} // namespace detail

/// Adds n tokens to every head's tail, in place.
///
/// Only the host can refuse a full tail: in device memory the tokens are counted, so that `*cache.appended` is beyond
/// `cache.tail_capacity` from then on, and attend reads no further than the capacity. Engines count their appended
/// tokens: `reserve_tail` makes room in time.
///
/// \param on          backend
/// \param[in] keys    [H, n, D]   after position encoding (positions go on from the prompt's true length), any element type
/// \param[in] values  [H, n, Dv]
/// \param     cache   the tail must have room
/// \cost   writes n tokens; no scratch, no allocation
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  deterministic
/// \throws invalid_argument        a shape disagrees; gpu: the tail is not aligned to elements
/// \throws insufficient_workspace  the tail has no room (naming its capacity); grow it with `reserve_tail` of its owner.
///                                 Nothing was changed in either case. gpu: tokens without room are not written, and counted
///                                 beyond the capacity
/// \see    tests/unit/append.cpp
template <backend B, element T, element U>
void append(B const& on, in_view<U, 3, B> keys, in_view<U, 3, B> values, cache_view<T, B::memory_space> const& cache)
{
    detail::check arguments{on, "append"};
    bool const dry  = detail::dry_run(on);
    index_t const n = keys.extent(1);
    expects(dry || cache.appended != nullptr, "append: cache has no directory");
    arguments.rows("keys", keys, {cache.layout.heads, n, cache.layout.dims.keys}, "H,n,D")
        .rows("values", values, {cache.layout.heads, n, cache.layout.dims.values}, "H,n,Dv")
        .bytes("cache.tail", cache.tail, cache.layout.heads * cache.tail_head_bytes(), true)
        .bytes("cache.appended", cache.appended, sizeof(index_t), true);
    if constexpr (B::memory_space == space::host)
    {
        index_t const held = dry ? 0 : *cache.appended;
        expects<insufficient_workspace>(dry || n <= cache.tail_capacity - held, "append: the tail holds ", held,
            " tokens and has room for ", cache.tail_capacity, "; ", n, " more do not fit");
    }
    else
    {
        expects(reinterpret_cast<std::uintptr_t>(cache.tail) % alignof(T) == 0, "append: cache.tail is not aligned to ",
            index_t{alignof(T)}, " bytes");
    }
    run(on, detail::append_token<B, T, U>{keys, values, cache}, 1);
}

/// Adds one token: append with n = 1.
///
/// \param on          backend
/// \param[in] keys    [H, D]
/// \param[in] values  [H, Dv]
/// \param     cache   the tail must have room
/// \cost   writes a token; no scratch, no allocation
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \throws invalid_argument        a shape disagrees
/// \throws insufficient_workspace  the tail has no room
template <backend B, element T, element U>
void append(B const& on, in_view<U, 2, B> keys, in_view<U, 2, B> values, cache_view<T, B::memory_space> const& cache)
{
    append(on, detail::of_one(keys), detail::of_one(values), cache);
}

/// Takes the last appended tokens back, so that at most `tokens` of them stay: rejected drafts, a regenerated answer. The
/// compressed part stays unchanged.
///
/// \param on      backend
/// \param tokens  tokens that may stay, counted from the first one appended since `compress`, `pack` or `recompress`
/// \param cache   loses its other appended tokens
/// \cost   constant; no scratch, no allocation
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  deterministic
/// \throws invalid_argument   tokens is negative, or the cache has no directory
/// \see    tests/unit/append.cpp
template <backend B, class T>
void truncate_tail(B const& on, index_t tokens, cache_view<T, B::memory_space> const& cache)
{
    expects(tokens >= 0, "truncate_tail: tokens is ", tokens, "; it must not be negative");
    expects(detail::dry_run(on) || cache.appended != nullptr, "truncate_tail: cache has no directory");
    run(on, detail::truncate_count<B::memory_space>{cache.appended, tokens}, 1);
}

} // namespace mdkv::inline MDKV_MACHINE
