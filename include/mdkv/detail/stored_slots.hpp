/// \file stored_slots.hpp: the tokens of a packed cache by their slots, as its directory lists them: how many, at which rung, at which they may be next.
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>

#include <cstddef>

#include <cuda/std/array>

namespace mdkv::detail
{

/// For every rung of one cache the rung of another that is stored alike; the other's number of rungs where there is none.
[[nodiscard]] inline ::cuda::std::array<std::size_t, max_rungs> same_rungs(
    cache_layout const& from, cache_layout const& to) noexcept
{
    ::cuda::std::array<std::size_t, max_rungs> same{};
    for (std::size_t r = 0; r < from.rungs; ++r)
    {
        auto const alike = [&](std::size_t other) {
            return from.key_coordinates[r] == to.key_coordinates[other]
                   && from.value_coordinates[r] == to.value_coordinates[other] && from.kinds[r] == to.kinds[other]
                   && from.in_basis[r] == to.in_basis[other];
        };
        while (same[r] < to.rungs && !alike(same[r])) { ++same[r]; }
    }
    return same;
}

/// Tokens of a head in its own runs: those that are stored in fewer bytes than the exact ones.
[[nodiscard]] MDKV_HD constexpr index_t tokens_below_full(cache_layout const& layout, head_entry const& entry) noexcept
{
    index_t tokens = 0;
    for (std::size_t r = 0; r < layout.rungs; ++r) { tokens += layout.own_run(r) ? entry.runs[r].tokens : 0; }
    return tokens;
}

/// What recompress asks the directory of the cache that is there. Slots count a head's tokens over the runs by rung, the
/// exact run and the tail; all but the last W are to be stored anew.
struct stored_slots
{
    cache_layout before;                               ///< of the cache that is there
    cache_layout layout;                               ///< of the new one
    head_entry const* heads = nullptr;                 // [H]  in the memory of whoever asks
    index_t appended        = 0;                       ///< tokens in the tail
    index_t most            = 0;                       // M: tokens of the longest head before its new window
    ::cuda::std::array<std::size_t, max_rungs> same{}; ///< of each rung before the one that is stored alike

    template <element T>
    stored_slots(cache_view<T, space::host> const& directory, cache_layout const& next, index_t most_)
        : before{directory.layout}
        , layout{next}
        , heads{directory.heads}
        , appended{*directory.appended}
        , most{most_}
        , same{same_rungs(before, next)}
    {}

    /// Tokens of head h before its new window.
    [[nodiscard]] MDKV_HD constexpr index_t tokens(index_t h) const noexcept
    {
        return first_exact(h) + heads[h].exact.tokens + appended - layout.window;
    }

    /// Slots of head h from this one on are exact.
    [[nodiscard]] MDKV_HD constexpr index_t first_exact(index_t h) const noexcept
    {
        return tokens_below_full(before, heads[h]);
    }

    /// Whether head h stores all that is needed to read rung r.
    [[nodiscard]] MDKV_HD constexpr bool open(index_t h, std::size_t r) const noexcept
    {
        return !layout.projected(r)
               || (layout.key_coordinates[r] <= heads[h].key_columns
                   && layout.value_coordinates[r] <= heads[h].value_columns);
    }

    /// Of exact tokens: rung 1, or the costliest there is where the set has none.
    [[nodiscard]] MDKV_HD constexpr std::size_t exact_rung(index_t h) const noexcept
    {
        if (layout.full_rung < layout.rungs) { return layout.full_rung; }
        std::size_t r = layout.rungs - 1;
        while (r > 0 && !open(h, r)) { --r; }
        return r;
    }

    /// The rung of token `slot` as it is stored now.
    [[nodiscard]] MDKV_HD constexpr std::size_t own_rung(index_t h, index_t slot) const noexcept
    {
        for (std::size_t r = 0; r < before.rungs; ++r)
        {
            index_t const run = before.own_run(r) ? heads[h].runs[r].tokens : 0;
            if (slot < run) { return same[r]; }
            slot -= run;
        }
        return exact_rung(h);
    }

    /// Whether token `slot` at rung r is what it was, bit for bit.
    [[nodiscard]] MDKV_HD constexpr bool stays(index_t h, index_t slot, std::size_t r) const noexcept
    {
        return r == own_rung(h, slot) && (slot < first_exact(h) || r == layout.full_rung);
    }

    /// Calls body(first, count) for every stretch of head h's tokens that are neighbours: each run, the exact tokens, and
    /// those released.
    template <class Body>
    void for_stretches(index_t h, Body const& body) const
    {
        index_t first = 0;
        auto const go = [&](index_t count) {
            if (count > 0) { body(first, count); }
            first += count;
        };
        for (std::size_t r = 0; r < before.rungs; ++r)
        {
            if (before.own_run(r)) { go(heads[h].runs[r].tokens); }
        }
        go(heads[h].exact.tokens - layout.window);
        go(appended);
    }
};

} // namespace mdkv::detail
