/// \file stored_slots.hpp: the tokens of a packed cache by their slots, as its directory lists them; jobs of recompress that settle their new rungs and copy tokens unchanged.
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/detail/tile_loops.hpp>

#include <vector>

namespace MDKV_NAMESPACE::detail
{

/// A copy of a cache's directory in host memory.
template <element T>
struct host_directory
{
    std::vector<head_entry> heads; // [H]
    index_t appended = 0;
    cache_view<T, space::host> view; ///< only the directory is the host's: arena and tail must not be read

    /// Waits on a GPU.
    template <backend B>
    host_directory(B const& on, cache_view<T, B::memory_space> const& cache)
        : heads(cache.heads == nullptr ? 0 : static_cast<std::size_t>(cache.layout.heads))
        , view{cache.layout, cache.arena, cache.arena_bytes, heads.data(), cache.tail, cache.tail_capacity, &appended}
    {
        if (heads.empty()) { return; }
        fetch(on, cache.heads, heads.data(), cache.layout.heads);
        fetch(on, cache.appended, &appended, 1);
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

/// Bytes of all heads' stand-ins; with `channels` also of those that coded ones need. Only the directory is read.
template <element T>
[[nodiscard]] constexpr index_t stand_in_bytes(cache_view<T, space::host> const& cache, bool channels = false) noexcept
{
    cache_layout const& layout = cache.layout;
    bool const coded           = layout.stand_in_run < layout.rungs;
    index_t const beside       = channels && coded ? channel_bytes(layout.dims, index_t{sizeof(T)}) : 0;
    index_t bytes              = 0;
    for (index_t h = 0; h < layout.heads; ++h)
    {
        index_t const count = cache.heads[h].stand_ins;
        bytes += count > 0 ? count * layout.stand_in_bytes(index_t{sizeof(T)}) + beside : 0;
    }
    return bytes;
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
    cache_view<T, S> cache; ///< present cache
    cache_layout layout;    ///< layout of the new cache
    index_t most = 0;       ///< M: tokens of the longest head before its new window
    view<index_t const, 1, S>
        first{}; ///< [H + 1]  where heads begin in a list of their tokens before new windows, and end
    array<std::size_t, max_rungs> same = same_rungs(cache.layout, layout); ///< rung of the new cache, by present rung

    /// Where head h begins in the list of these heads alone.
    [[nodiscard]] MDKV_HD constexpr index_t begin(index_t h) const noexcept { return first(h) - first(0); }
    /// Tokens of head h before its new window.
    [[nodiscard]] MDKV_HD constexpr index_t tokens(index_t h) const noexcept
    {
        return tokens_of_head(cache, h) - layout.window;
    }
    /// Tokens of run i of head h before its new window. Tokens that leave the present window count with the tail, because
    /// they are neighbours in the text. The new window may be longer than the present one, if the tail holds its tokens.
    [[nodiscard]] MDKV_HD constexpr index_t tokens(index_t h, std::size_t i) const noexcept
    {
        index_t const left = i == cache.layout.rungs       ? -cache.layout.window
                             : i == cache.layout.rungs + 1 ? cache.layout.window - layout.window
                                                           : 0;
        return slots_of_head(cache, h, i).tokens + left;
    }

    /// The rungs of the new cache that the tokens of one run can take; bit r stands for rung r.
    struct choice
    {
        std::size_t own         = 0;         ///< present rung
        std::size_t kept        = max_rungs; ///< rung that keeps values bit for bit: the present rung, or none
        std::uint32_t reachable = 0;         ///< rungs no higher than `own`, through projections that the head stores
        std::uint32_t copied    = 0;         ///< reachable rungs whose bytes are among the stored ones

        [[nodiscard]] MDKV_HD constexpr bool reaches(std::size_t r) const noexcept { return (reachable >> r & 1) != 0; }
        [[nodiscard]] MDKV_HD constexpr bool copies(std::size_t r) const noexcept { return (copied >> r & 1) != 0; }
    };

    /// The choice of the tokens of run i of head h, which has some. The present rung of exact tokens is the full rung, or the
    /// costliest reachable one if the set has no full rung. Exact tokens are read and written instead of copied; plain
    /// coordinates in the basis are copied to every rung that keeps the first of them.
    [[nodiscard]] MDKV_HD constexpr choice choice_of(index_t h, std::size_t i) const noexcept
    {
        cache_layout const& now = cache.layout;
        head_entry const& entry = cache.heads[h];
        bool const exact        = i >= now.rungs;
        bool const cut          = !exact && now.projected(i) && now.kinds[i] == storage::plain;
        std::size_t const full  = layout.full_rung < layout.rungs ? layout.full_rung : layout.rungs - 1;
        std::size_t const last  = exact ? full : same[i];
        choice c;
        for (std::size_t r = 0; r <= last; ++r)
        {
            bool const projected = layout.projected(r);
            bool const open =
                layout.key_coordinates[r] <= entry.key_columns && layout.value_coordinates[r] <= entry.value_columns;
            if (projected && !open) { continue; }
            bool const copied = !exact && (r == last || (cut && projected && layout.kinds[r] == storage::plain));
            c.own             = r;
            c.reachable |= 1U << r;
            c.copied |= (copied ? 1U : 0U) << r;
        }
        if (!exact || c.own == layout.full_rung) { c.kept = c.own; }
        return c;
    }

    /// Calls body(begin, end, choice) for the slots of each run of head h.
    MDKV_HD constexpr void for_runs(index_t h, auto const& body) const
    {
        index_t begin = 0;
        for (std::size_t i = 0; i < most_runs(cache.layout); ++i)
        {
            index_t const end = begin + tokens(h, i);
            if (begin < end) { body(begin, end, choice_of(h, i)); }
            begin = end;
        }
    }
};

/// Adds to `ends` where the heads of a layer end in a list of tokens before the new windows; its last number is where they begin.
/// \return the number of tokens of the longest head
template <element T>
index_t add_heads(stored_slots<T, space::host> const& by_slot, std::vector<index_t>& ends)
{
    index_t longest = 0;
    for (index_t h = 0; h < by_slot.layout.heads; ++h)
    {
        longest = longest < by_slot.tokens(h) ? by_slot.tokens(h) : longest;
        ends.push_back(ends.back() + by_slot.tokens(h));
    }
    return longest;
}

/// Sets the loss to 0 at rungs that keep a token's values. A rung above a token's own, or one that its head stores no
/// projection for, loses as much as dropping, so that no bytes are spent on it. An item is a head.
template <element T, space S>
struct mask_losses
{
    static constexpr char const* name = "recompress_mask_losses";

    stored_slots<T, S> by_slot;
    view<float, 2, S> loss; // [R, all tokens]

    MDKV_HD void operator()(team auto const& t, index_t h) const
    {
        by_slot.for_runs(h, [&](index_t from, index_t end, auto const& can) {
            index_t const begin = by_slot.begin(h);
            for (index_t i = begin + from + t.rank(); i < begin + end; i += t.size())
            {
                float const dropped = can.reaches(0) ? loss(0, i) : 0.0F;
                for (std::size_t r = 0; r < by_slot.layout.rungs; ++r)
                {
                    float& x = loss(static_cast<index_t>(r), i);
                    x        = r == can.kept ? 0.0F : can.reaches(r) ? x : dropped;
                }
            }
        });
    }
};

/// Sets the rungs at which tokens are stored anew: their present ones, or allocate's choice. A token whose rung is out of
/// reach is dropped, as its loss assumes. Counts the tokens that stay bit for bit, and marks the tokens whose bytes are
/// copied. An item is a head.
template <element T, space S>
struct settle_rungs
{
    static constexpr char const* name = "recompress_settle_rungs";

    stored_slots<T, S> by_slot;
    std::uint8_t* rung;               // list of all tokens
    view<std::uint8_t, 2, S> carried; // [H, M]
    bool as_stored;
    view<index_t, 2, S> counts; // [H, R+2]  the last column receives the number of tokens that stay

    MDKV_HD void operator()(team auto const& t, index_t h) const
    {
        index_t stay = 0;
        by_slot.for_runs(h, [&, this](index_t from, index_t end, auto const& can) {
            for (index_t slot = from + t.rank(); slot < end; slot += t.size())
            {
                std::uint8_t& own        = rung[by_slot.begin(h) + slot];
                std::size_t const wanted = as_stored ? can.own : std::size_t{own};
                std::size_t const r      = can.reaches(wanted) ? wanted : 0;
                own                      = static_cast<std::uint8_t>(r);
                carried(h, slot)         = can.copies(r) ? 1 : 0;
                stay += r == can.kept ? 1 : 0;
            }
        });
        stay = t.sum(stay);
        if (t.rank() == 0) { counts(h, counts.extent(1) - 1) = stay; }
    }
};

/// Goes over the slots of the new cache, one item each: lists where their tokens were, and copies the bytes that need no
/// change, as settle_rungs has marked them. Then copies the stand-ins.
template <element T, space S>
struct carry_over
{
    static constexpr char const* name = "recompress_carry_over";
    static constexpr int threads      = 64;

    stored_slots<T, S> by_slot;
    cache_view<T, S> to;                      ///< new cache, packed
    view<std::int32_t const, 2, S> positions; // [H, M]    from sort_slots
    view<index_t const, 2, S> first;          // [H, R+1]
    view<std::uint8_t const, 2, S> carried;   // [H, M]    by old slot
    view<std::int32_t, 2, S> sources;         // [H, S]    the old slot of every new slot, or -1; or empty
    index_t const* dropped = nullptr;         // [H]       tokens that went into new stand-ins; or null

    [[nodiscard]] MDKV_HD index_t each() const
    {
        index_t const most = by_slot.most + by_slot.layout.window + 1; // one item without slots, for stand-ins
        return sources.extent(1) > most ? sources.extent(1) : most;
    }
    [[nodiscard]] index_t items() const { return by_slot.layout.heads * each(); }

    MDKV_HD void operator()(team auto const& t, index_t item) const
    {
        index_t const h    = item / each();
        index_t const slot = item % each();
        bool const moved   = by_slot.layout.stand_in_run != by_slot.layout.rungs
                           && by_slot.cache.layout.stand_in_run == by_slot.cache.layout.rungs; // into codes
        bool const anew            = dropped != nullptr && (dropped[h] > 0 || moved);
        cache_layout const& layout = by_slot.layout;
        index_t const stand_ins    = to.heads[h].stand_ins;
        for (index_t i = slot; i < stand_ins && !anew; i += each())
        {
            stored_run const a = run_of_head(by_slot.cache, h, by_slot.cache.layout.stand_in_run);
            stored_run const b = run_of_head(to, h, layout.stand_in_run);
            copy_token<T>(t, a.keys, a.tokens - stand_ins + i, b.keys, b.tokens - stand_ins + i);
            copy_token<T>(t, a.values, a.tokens - stand_ins + i, b.values, b.tokens - stand_ins + i);
        }
        stored_token const target = token_at(to, h, slot);
        std::size_t const r       = target.rung < layout.rungs ? target.rung : layout.full_rung;
        index_t source            = -1;
        if (target.rung <= layout.rungs) // in the exact run the window comes last
        {
            auto const i        = static_cast<index_t>(r);
            index_t const count = r < layout.rungs ? first(h, i + 1) - first(h, i) : 0;
            source              = target.index < count ? positions(h, first(h, i) + target.index)
                                                       : by_slot.tokens(h) + target.index - count;
        }
        if (t.rank() == 0 && slot < sources.extent(1)) { sources(h, slot) = static_cast<std::int32_t>(source); }
        if (target.rung >= layout.rungs || carried(h, source) == 0) { return; }
        stored_token const token = token_at(by_slot.cache, h, source);
        copy_token<T>(t, token.run.keys, token.index, target.run.keys, target.index);
        copy_token<T>(t, token.run.values, token.index, target.run.values, target.index);
    }
};

} // namespace MDKV_NAMESPACE::detail
