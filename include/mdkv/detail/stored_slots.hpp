/// \file stored_slots.hpp: the tokens of a packed cache by their slots, as its directory lists them: how many, at which rung; jobs of recompress that choose their new rungs.
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/team.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace mdkv::inline MDKV_MACHINE::detail
{

/// A copy of a cache's directory in host memory.
template <element T>
struct host_directory
{
    std::vector<head_entry> heads; // [H]
    index_t appended = 0;
    cache_view<T, space::host> view; ///< only the directory is the host's: arena and tail must not be read

    /// Waits on a GPU, in a dry run too: all sizes depend on the directory.
    template <backend B>
    host_directory(B const& on, cache_view<T, B::memory_space> const& cache)
        : heads(cache.heads == nullptr ? 0 : static_cast<std::size_t>(cache.layout.heads))
        , view{cache.layout, cache.arena, cache.arena_bytes, heads.data(), cache.tail, cache.tail_capacity, &appended}
    {
        if (heads.empty()) { return; }
        workspace none{std::span<std::byte>{}}; // a workspace that does not count
        B reading       = on;
        reading.scratch = &none;
        fetch(reading, cache.heads, heads.data(), cache.layout.heads);
        fetch(reading, cache.appended, &appended, 1);
    }
    host_directory(host_directory const&)            = delete;
    host_directory& operator=(host_directory const&) = delete;
};

/// Tokens of a head that have slots, window and tail included; only the directory is read.
template <element T, space S>
[[nodiscard]] MDKV_HD constexpr index_t tokens_of_head(cache_view<T, S> const& cache, index_t h) noexcept
{
    index_t tokens = 0;
    for (std::size_t i = 0; i < most_runs(cache.layout); ++i) { tokens += slots_of_head(cache, h, i).tokens; }
    return tokens;
}

/// Bytes of all heads' stand-ins; only the directory is read.
template <element T>
[[nodiscard]] constexpr index_t stand_in_bytes(cache_view<T, space::host> const& cache) noexcept
{
    index_t tokens = 0;
    for (index_t h = 0; h < cache.layout.heads; ++h) { tokens += cache.heads[h].stand_ins; }
    return tokens * (cache.layout.dims.keys + cache.layout.dims.values) * index_t{sizeof(T)};
}

/// For every rung of one cache the rung of another that is stored alike; the other's number of rungs if there is none.
[[nodiscard]] inline array<std::size_t, max_rungs> same_rungs(cache_layout const& from, cache_layout const& to) noexcept
{
    array<std::size_t, max_rungs> same{};
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

/// Slots count a head's tokens over its runs without stand-ins (run_of_head.hpp); all but the last W are to be stored anew.
template <element T, space S>
struct stored_slots
{
    cache_view<T, S> cache;                 ///< present cache
    cache_layout layout;                    ///< layout of the new cache
    index_t most                       = 0; // M: tokens of the longest head before its new window
    array<std::size_t, max_rungs> same = same_rungs(cache.layout, layout); ///< rung of the new cache, by present rung

    /// Tokens of head h before its new window.
    [[nodiscard]] MDKV_HD constexpr index_t tokens(index_t h) const noexcept
    {
        return tokens_of_head(cache, h) - layout.window;
    }

    /// Whether head h stores all that is needed to read rung r.
    [[nodiscard]] MDKV_HD constexpr bool open(index_t h, std::size_t r) const noexcept
    {
        return !layout.projected(r)
               || (layout.key_coordinates[r] <= cache.heads[h].key_columns
                   && layout.value_coordinates[r] <= cache.heads[h].value_columns);
    }

    /// The rung of exact tokens: the full rung, or the costliest open one if the set has no full rung.
    [[nodiscard]] MDKV_HD constexpr std::size_t exact_rung(index_t h) const noexcept
    {
        if (layout.full_rung < layout.rungs) { return layout.full_rung; }
        std::size_t r = layout.rungs - 1;
        while (r > 0 && !open(h, r)) { --r; }
        return r;
    }

    /// One slot of [H, M].
    struct place
    {
        bool token      = false; ///< false for a slot that pads a shorter head
        bool exact      = false;
        std::size_t run = 0; ///< run in the present cache
        std::size_t own = 0; ///< the token's present rung, by its number in the new cache
    };
    [[nodiscard]] MDKV_HD constexpr place at(index_t h, index_t slot) const noexcept
    {
        if (slot >= tokens(h)) { return {}; }
        std::size_t const run = token_at(cache, h, slot).rung;
        bool const exact      = run >= cache.layout.rungs;
        return {true, exact, run, exact ? exact_rung(h) : same[run]};
    }

    /// Whether a token of head h may be at rung r: no higher than now, and through projections that its head stores.
    [[nodiscard]] MDKV_HD constexpr bool reaches(index_t h, place const& p, std::size_t r) const noexcept
    {
        return p.token && r <= p.own && open(h, r);
    }

    /// Whether a token keeps its values at rung r, bit for bit.
    [[nodiscard]] MDKV_HD constexpr bool stays(place const& p, std::size_t r) const noexcept
    {
        return p.token && r == p.own && (!p.exact || r == layout.full_rung);
    }

    /// Whether a token's bytes at rung r are bytes that it is stored in now: the rung is its own, or keeps the first of
    /// its plain coordinates in the basis. Exact tokens are read and written instead.
    [[nodiscard]] MDKV_HD constexpr bool carries(place const& p, std::size_t r) const noexcept
    {
        if (!p.token || p.exact) { return false; }
        bool const cut = cache.layout.projected(p.run) && layout.projected(r)
                         && cache.layout.kinds[p.run] == storage::plain && layout.kinds[r] == storage::plain;
        return cut || p.own == r;
    }
};

/// Sets the loss to 0 at rungs that keep a token's values, and at every rung of padding. A rung above a token's own, or one
/// that its head stores no projection for, loses as much as dropping, so that no bytes are spent on it. An item is a head.
template <element T, space S>
struct mask_losses
{
    static constexpr char const* name = "recompress_mask_losses";

    stored_slots<T, S> slots;
    view<float, 3, S> loss; // [H, R, M]

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        for (index_t slot = t.rank(); slot < slots.most; slot += t.size())
        {
            auto const p        = slots.at(h, slot);
            float const dropped = p.token ? loss(h, 0, slot) : 0.0F;
            for (std::size_t r = 0; r < slots.layout.rungs; ++r)
            {
                auto const i     = static_cast<index_t>(r);
                bool const zero  = !p.token || slots.stays(p, r);
                loss(h, i, slot) = zero ? 0.0F : slots.reaches(h, p, r) ? loss(h, i, slot) : dropped;
            }
        }
    }
};

/// Sets the rungs at which tokens are stored anew: their present ones, or allocate's choice. A token whose rung is out of
/// reach is dropped, as its loss assumes; padding is dropped. Counts the tokens that stay bit for bit, and marks the tokens
/// whose bytes are copied. An item is a head.
template <element T, space S>
struct settle_rungs
{
    static constexpr char const* name = "recompress_settle_rungs";

    stored_slots<T, S> slots;
    view<std::uint8_t, 2, S> rung;    // [H, M]
    view<std::uint8_t, 2, S> carried; // [H, M]
    bool as_stored;
    index_t* kept; // [1]  the caller sets it to 0

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        index_t stay = 0;
        for (index_t slot = t.rank(); slot < slots.most; slot += t.size())
        {
            auto const p             = slots.at(h, slot);
            std::size_t const wanted = as_stored ? p.own : std::size_t{rung(h, slot)};
            std::size_t const r      = slots.reaches(h, p, wanted) ? wanted : 0;
            rung(h, slot)            = static_cast<std::uint8_t>(r);
            carried(h, slot)         = slots.carries(p, r) ? 1 : 0;
            stay += slots.stays(p, r) ? 1 : 0;
        }
        stay = t.sum(stay);
        if (t.rank() == 0) { t.add_across(kept, stay); }
    }
};

} // namespace mdkv::inline MDKV_MACHINE::detail
