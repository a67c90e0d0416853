/// \file pack.hpp: pack, written once over run and team: tokens listed by rung, the directory laid out, then every run written tile by tile (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/pack_tile.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/slots.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/pack.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mdkv::detail
{

/// What laying out finds.
struct packed_totals
{
    index_t bytes;    ///< of the arena
    index_t unlisted; ///< tokens whose rung is outside the layout
    index_t unbased;  ///< tokens at a projected rung where a basis is missing
};

/// One item: every head's entry from the number of its tokens at each rung, the heads one after another.
template <element T, backend B>
struct lay_out_heads
{
    static constexpr char const* name = "pack_lay_out";

    cache_layout layout;
    index_t tokens;               // N
    index_t room;                 ///< bytes of the arena
    bool bases;                   ///< neither is missing
    in_view<index_t, 2, B> first; // [H, R+1] where each rung's tokens begin
    packed_totals* totals;        // [1]
    head_entry* heads;            // [H]  null where only the totals are asked for
    index_t* appended;            // [1]  set to 0; may be null
    index_t* needed;              // [1]  may be null

    /// Lays out head h from byte `offset` on and returns the first free byte.
    MDKV_OUTLINE MDKV_HD index_t lay_out(index_t h, index_t offset, head_entry& entry, packed_totals& found) const
    {
        mdkv::array<index_t, max_rungs> count{};
        for (std::size_t r = 0; r < layout.rungs; ++r)
        {
            auto const at = static_cast<index_t>(r);
            count[r]      = first(h, at + 1) - first(h, at);
            if (!bases && layout.projected(r)) { found.unbased += count[r]; }
        }
        found.unlisted += tokens - first(h, static_cast<index_t>(layout.rungs));
        return lay_out_head<T>(layout, count, offset, entry);
    }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t) const
    {
        head_entry entry;
        packed_totals found{};
        for (index_t h = t.rank(); h < layout.heads; h += t.size()) { found.bytes += lay_out(h, 0, entry, found); }
        found           = {t.sum(found.bytes), t.sum(found.unlisted), t.sum(found.unbased)};
        bool const fits = found.bytes <= room && found.unbased == 0;
        if (t.rank() == 0)
        {
            *totals = found;
            if (needed != nullptr) { *needed = found.unbased > 0 ? INT64_MAX : found.bytes; }
        }
        // The host refuses what does not fit, and then nothing has been changed.
        if (heads == nullptr || (B::memory_space == space::host && (!fits || found.unlisted > 0))) { return; }
        if (t.rank() == 0 && appended != nullptr) { *appended = 0; }
        index_t before = 0;
        for (index_t h0 = 0; h0 < layout.heads; h0 += t.size())
        {
            index_t const h  = h0 + t.rank();
            bool const there = h < layout.heads;
            auto const bytes = t.prefix(there ? lay_out(h, 0, entry, found) : index_t{0});
            if (there) { static_cast<void>(lay_out(h, before + bytes.before, entry, found)); }
            if (there) { heads[h] = fits ? entry : head_entry{}; }
            before += bytes.total;
        }
    }
};

/// Scratch of packed_bytes and pack: every head's positions by rung.
template <backend B>
struct rung_lists
{
    out_view<std::int32_t, 2, B> positions; // [H, N]
    out_view<index_t, 2, B> first;          // [H, R+1]
    packed_totals* totals;                  // [1]

    rung_lists(B const& on, workspace::frame& frame, index_t heads, index_t tokens, index_t rungs)
        : positions{out(on, frame.take<std::int32_t>(checked_multiply(heads, tokens)), heads, tokens)}
        , first{out(on, frame.take<index_t>(checked_multiply(heads, rungs + 1)), heads, rungs + 1)}
        , totals{frame.take<packed_totals>(1)}
    {}
};

/// Throws the first rung that is outside the layout; waits for the device.
/// \throws invalid_argument   always
template <backend B>
void refuse_rungs(B const& on, char const* stage, in_view<std::uint8_t, 2, B> rung, std::size_t rungs)
{
    std::vector<std::uint8_t> all(static_cast<std::size_t>(rung.required_span_size()));
    fetch(on, rung.data_handle(), all.data(), static_cast<index_t>(all.size()));
    for (index_t h = 0; h < rung.extent(0); ++h)
    {
        for (index_t i = 0; i < rung.extent(1); ++i)
        {
            int const at = all[static_cast<std::size_t>(rung.offset(h, i))];
            expects(at < static_cast<int>(rungs), stage, ": rung of head ", h, ", token ", i, " is ", at,
                "; it must be below ", rungs);
        }
    }
    fail<invalid_argument>(stage, ": rung changed while it was read");
}

template <element T, backend B>
[[nodiscard]] index_t packed_bytes_impl(B const& on, in_view<std::uint8_t, 2, B> rung, cache_layout const& layout, T)
{
    expects<size_overflow>(
        rung.extent(1) <= INT32_MAX, "packed_bytes: N = ", rung.extent(1), " is beyond the limit of ", INT32_MAX);
    workspace::frame frame{*on.scratch, "packed_bytes"};
    rung_lists<B> const lists{on, frame, layout.heads, rung.extent(1), static_cast<index_t>(layout.rungs)};
    bool const real = frame.ready();
    run(on, sort_slots<B>{rung, lists.positions, lists.first}, layout.heads);
    run(on,
        lay_out_heads<T, B>{
            layout, rung.extent(1), INT64_MAX, true, as_input(lists.first), lists.totals, nullptr, nullptr, nullptr},
        1);
    packed_totals found{};
    if (real) { fetch(on, lists.totals, &found, 1); }
    if (found.unlisted > 0) { refuse_rungs(on, "packed_bytes", rung, layout.rungs); }
    return found.bytes;
}

/// On the host: throws what lay_out_heads found to be wrong.
template <element T, backend B>
void expects_packable(B const& on, pack_call<T, B> const& call, rung_lists<B> const& lists)
{
    cache_layout const& layout = call.cache.layout;
    packed_totals const& found = *lists.totals;
    if (found.unlisted > 0) { refuse_rungs(on, "pack", call.rung, layout.rungs); }
    for (index_t i = 0; found.unbased > 0 && i < layout.heads * static_cast<index_t>(layout.rungs); ++i)
    {
        index_t const h     = i / static_cast<index_t>(layout.rungs);
        index_t const r     = i % static_cast<index_t>(layout.rungs);
        index_t const count = lists.first(h, r + 1) - lists.first(h, r);
        expects(count == 0 || !layout.projected(static_cast<std::size_t>(r)), "pack: head ", h, " has ", count,
            " tokens at projected rung ", r, ", but key_basis or value_basis is empty");
    }
    expects<insufficient_workspace>(found.bytes <= call.cache.arena_bytes, "pack: the arena holds ",
        call.cache.arena_bytes, " bytes, ", found.bytes, " are needed");
}

template <element T, backend B>
void pack_impl(B const& on, pack_call<T, B> const& call)
{
    cache_layout const& layout = call.cache.layout;
    index_t const tokens       = call.keys.extent(1);
    workspace::frame frame{*on.scratch, "pack"};
    rung_lists<B> const lists{on, frame, layout.heads, tokens, static_cast<index_t>(layout.rungs)};
    bool const real = frame.ready();
    run(on, sort_slots<B>{call.rung, lists.positions, lists.first}, layout.heads);
    run(on,
        lay_out_heads<T, B>{layout, tokens, call.cache.arena_bytes,
            !call.key_basis.empty() && !call.value_basis.empty(), as_input(lists.first), lists.totals, call.cache.heads,
            call.cache.appended, call.needed},
        1);
    if constexpr (B::memory_space == space::host)
    {
        if (real) { expects_packable(on, call, lists); }
    }
    pack_tiles<T, B> const tiles{call, as_input(lists.positions), as_input(lists.first)};
    run(on, tiles, tiles.items());
}

} // namespace mdkv::detail
