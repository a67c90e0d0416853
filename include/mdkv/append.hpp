/// \file append.hpp: append puts new tokens into the cache's tail, uncompressed, and truncate_tail takes them out again (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/team.hpp>

#include <concepts>

namespace MDKV_NAMESPACE
{

namespace detail
{

/// One item per head and tail tile. If the tokens are few, one item copies all of them and raises the count.
template <backend B, element T, element U>
struct append_token
{
    static constexpr char const* name = "append";
    static constexpr int threads      = 256;
    static constexpr index_t few      = 16384; ///< elements that one block copies as fast as several

    in_view<U, 3, B> keys;   // [H, n, D]
    in_view<U, 3, B> values; // [H, n, Dv]
    cache_view<T, B::memory_space> cache;

    /// Tiles that hold n tokens, wherever in a tile the first one is.
    [[nodiscard]] MDKV_HD index_t tiles() const noexcept
    {
        return (keys.extent(1) + tile_tokens - 2) / tile_tokens + 1;
    }
    [[nodiscard]] MDKV_HD bool at_once() const noexcept
    {
        return cache.layout.heads * keys.extent(1) * (keys.extent(2) + values.extent(2)) <= few;
    }
    [[nodiscard]] index_t items() const noexcept { return at_once() ? 1 : cache.layout.heads * tiles(); }

    MDKV_HD void operator()(team auto const& t, index_t item) const
    {
        bool const one         = at_once();
        index_t const appended = *cache.appended;
        index_t const room     = cache.tail_capacity - appended;
        index_t const all      = keys.extent(1) < room ? keys.extent(1) : room;
        index_t const first    = one ? 0 : item / tiles();
        index_t const last     = one ? cache.layout.heads - 1 : first;
        index_t const tile  = item % tiles() * tile_tokens - appended % tile_tokens; // in tokens from the first one on
        index_t const begin = one || tile < 0 ? 0 : tile;
        index_t const end   = one || tile + tile_tokens >= all ? all : tile + tile_tokens;
        copy(t, keys, first, last, appended, begin, end, false);
        copy(t, values, first, last, appended, begin, end, true);
        if (!one) { return; }
        t.sync();
        if (t.rank() == 0) { *cache.appended = appended + keys.extent(1); }
    }

private:
    /// Copies tokens begin ... end - 1 of heads first ... last; token 0 becomes token `appended` of the tail. Thread
    /// order follows memory order: for keys the next member takes the next token, for values the next coordinates.
    template <team Team>
    MDKV_HD void copy(Team const& t, in_view<U, 3, B> const& rows, index_t first, index_t last, index_t appended,
        index_t begin, index_t end, bool of_values) const
    {
        constexpr int most = Team::lanes > 1 ? Team::lanes : 16 / static_cast<int>(sizeof(T));
        auto const dim     = static_cast<int>(rows.extent(2));
        int const vectors  = (dim + most - 1) / most;
        auto const tokens  = static_cast<int>(begin < end ? end - begin : 0);
        auto const share   = share_rows(t, index_t{tokens} * vectors);
        for (index_t h = first + share.row; h <= last; h += share.rows)
        {
            run_rows const tail = run_of_head(cache, h, cache.layout.rungs + 1).rows(of_values);
            for (auto i = static_cast<int>(share.column); i < tokens * vectors; i += members(t))
            {
                index_t const token = begin + (of_values ? i / vectors : i % tokens);
                int const d         = (of_values ? i % vectors : i / tokens) * most;
                U const* const from = rows.row(h, token) + d;
                std::byte* const to = tail.begin + tail.coordinate(appended + token, d);
                index_t const step  = tail.step(appended + token);
                copy_vector<most>(from, dim - d < most ? dim - d : most, to, step);
            }
        }
    }

    /// Copies n of `Most` neighbouring coordinates, all at once where possible.
    template <int Most>
    MDKV_HD static void copy_vector(U const* from, int n, std::byte* to, index_t step)
    {
        T stored[std::size_t{Most}];
        if (n == Most)
        {
            U given[std::size_t{Most}];
            load_all(from, given);
            MDKV_FOR_LANES(l, Most) { stored[l] = as_stored(given[l]); } // by vectors on a CPU
            if (step == index_t{sizeof(T)}) { return store_all(to, stored); }
        }
        else
        {
            for (int l = 0; l < n; ++l) { stored[l] = as_stored(load_at<U>(from + l)); }
        }
        for (int l = 0; l < n; ++l) { store_at(reinterpret_cast<T*>(to + l * step), stored[l]); }
    }

    [[nodiscard]] MDKV_HD static T as_stored(U given) noexcept
    {
        if constexpr (std::same_as<T, U>) { return given; } // narrow changes a NaN
        else { return narrow<T>(widen(given)); }
    }
};

/// One item: the count of appended tokens, raised by `more` and then limited to `most`.
struct count_tail
{
    static constexpr char const* name = "count_tail";

    index_t* appended;
    index_t more;
    index_t most;

    MDKV_HD void operator()(team auto const& t, index_t) const
    {
        if (t.rank() != 0) { return; }
        index_t const raised = *appended + more;
        *appended            = raised < most ? raised : most;
    }
};

} // namespace detail

/// Adds one token or n to every head's tail, in place. Engines count their appended tokens, and make room by `reserve_tail`.
///
/// \param on          backend
/// \param[in] keys    [H, D] or [H, n, D]    after position encoding, which goes on from the prompt's true length; any element type
/// \param[in] values  [H, Dv] or [H, n, Dv]
/// \param     to      the cache's view, or its owner
/// \cost   writes n tokens; no scratch, no allocation
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  deterministic
/// \throws invalid_argument        a shape disagrees; gpu: the tail is not aligned to elements. Nothing was changed
/// \throws insufficient_workspace  the tail has no room, naming its capacity; nothing was changed. (gpu: not seen: tokens without
///                                 room are not written, but counted in `*cache.appended`; attend reads the tail's capacity)
/// \see    tests/unit/append.cpp
template <backend B, element U, std::size_t Rank, writable_cache_on<B> Cache>
    requires(Rank == 2 || Rank == 3)
void append(
    B const& on, view<U const, Rank, B::memory_space> keys, view<U const, Rank, B::memory_space> values, Cache&& to)
{
    auto const cache = to.view();
    using T          = typename decltype(cache)::element_type;
    detail::append_token<B, T, U> const job{detail::with_tokens<3>(keys), detail::with_tokens<3>(values), cache};
    index_t const n = job.keys.extent(1);
    expects(cache.appended != nullptr, "append: cache has no directory");
    detail::checks{on, "append"}
        .rows("keys", job.keys, {cache.layout.heads, n, cache.layout.dims.keys}, "H,n,D")
        .rows("values", job.values, {cache.layout.heads, n, cache.layout.dims.values}, "H,n,Dv")
        .bytes("cache.tail", cache.tail, cache.layout.heads * cache.tail_head_bytes(), true)
        .bytes("cache.appended", cache.appended, sizeof(index_t), true);
    if constexpr (B::memory_space == space::host)
    {
        index_t const held = *cache.appended;
        expects<insufficient_workspace>(n <= cache.tail_capacity - held, "append: the tail holds ", held,
            " tokens and has room for ", cache.tail_capacity, "; ", n, " more do not fit");
    }
    else
    {
        expects(reinterpret_cast<std::uintptr_t>(cache.tail) % alignof(T) == 0, "append: cache.tail is not aligned to ",
            index_t{alignof(T)}, " bytes");
    }
    run(on, job);
    if (!job.at_once()) { run(on, detail::count_tail{cache.appended, n, INT64_MAX}, 1); }
}

/// Takes the last appended tokens back, so that at most `tokens` of them stay: rejected drafts, a regenerated answer. The
/// compressed part stays unchanged.
///
/// \param on      backend
/// \param tokens  tokens that may stay, counted from the first one appended since `compress`, `pack` or `recompress`
/// \param of      the cache's view, or its owner; loses its other appended tokens
/// \cost   constant; no scratch, no allocation
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  deterministic
/// \throws invalid_argument   tokens is negative, or the cache has no directory
/// \see    tests/unit/append.cpp
template <backend B, writable_cache_on<B> Cache>
void truncate_tail(B const& on, index_t tokens, Cache&& of)
{
    auto const cache = of.view();
    expects(tokens >= 0, "truncate_tail: tokens is ", tokens, "; it must not be negative");
    expects(cache.appended != nullptr, "truncate_tail: cache has no directory");
    run(on, detail::count_tail{cache.appended, 0, tokens}, 1);
}

} // namespace MDKV_NAMESPACE
