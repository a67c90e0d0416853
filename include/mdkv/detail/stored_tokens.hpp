/// \file stored_tokens.hpp: jobs of recompress on stored bytes: projections read, tokens copied unchanged.
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/channels.hpp>
#include <mdkv/detail/element.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/stored_slots.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/detail/tile_loops.hpp>

#include <cstddef>
#include <cstdint>

namespace mdkv::inline MDKV_MACHINE::detail
{

/// A head's stored projections as rows of bases, 0 beyond the stored columns; one item a head. They are orthonormal but for
/// the rounding to T.
template <element T, space S>
struct read_projections
{
    static constexpr char const* name = "recompress_read_projections";

    cache_view<T, S> cache;
    view<float, 3, S> key_basis;   // [H, D, D]
    view<float, 3, S> value_basis; // [H, Dv, Dv]

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        head_entry const& entry     = cache.heads[h];
        auto const [dim, value_dim] = cache.layout.dims;
        for (index_t i = t.rank(); i < dim * dim; i += t.size())
        {
            index_t const c  = i / dim;
            index_t const at = i % dim * entry.key_columns + c; // [D, key_columns]
            key_basis(h, c, i % dim) =
                c < entry.key_columns ? matrix_at<T>(cache.arena, entry.key_projection, at) : 0.0F;
        }
        for (index_t i = t.rank(); i < value_dim * value_dim; i += t.size())
        {
            index_t const c = i / value_dim;
            value_basis(h, c, i % value_dim) =
                c < entry.value_columns ? matrix_at<T>(cache.arena, entry.value_projection, i) : 0.0F;
        }
    }
};

/// The channels of a head's keys: the stored means and scales or, if the head has no rotated tokens yet, ones fitted to its
/// tokens. The queries' root mean squares are always the present ones. An item is a head.
template <element T, element U, backend B>
struct stored_channels
{
    static constexpr char const* name = "recompress_channels";
    static constexpr int threads      = 128;

    stored_slots<T, B::memory_space> slots;
    fit_key_channels<T, U, B> fitted;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        bool const stored = has_channels(slots.cache.layout, slots.cache, h);
        fitted.fit(t, h, stored ? 0 : slots.tokens(h), [](index_t i) { return i; });
        if (!stored) { return; }
        t.sync();
        index_t const dim = slots.layout.dims.keys;
        for (index_t i = t.rank(); i < 2 * dim; i += t.size())
        {
            fitted.channels(h, i / dim, i % dim) =
                matrix_at<T>(slots.cache.arena, slots.cache.heads[h].key_channels, i);
        }
    }
};

/// Goes over the slots of the new cache, one item each: lists where their tokens were, and copies the bytes that need no
/// change, as settle_rungs has marked them. Then copies the stand-ins.
template <element T, space S>
struct carry_over
{
    static constexpr char const* name = "recompress_carry_over";
    static constexpr int threads      = 64;

    stored_slots<T, S> slots;
    cache_view<T, S> to;                      ///< new cache, packed
    view<std::int32_t const, 2, S> positions; // [H, M]    from list_slots
    view<index_t const, 2, S> first;          // [H, R+1]
    view<std::uint8_t const, 2, S> carried;   // [H, M]    by old slot
    view<std::int32_t, 2, S> sources;         // [H, S]    the old slot of every new slot, or -1; or empty

    [[nodiscard]] MDKV_HD index_t each() const
    {
        index_t const most = slots.most + slots.layout.window + 1; // one item without any slot: there may be stand-ins
        return sources.extent(1) > most ? sources.extent(1) : most;
    }
    [[nodiscard]] index_t items() const { return slots.layout.heads * each(); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const h    = item / each();
        index_t const slot = item % each();
        for (index_t i = slot; i < to.heads[h].stand_ins; i += each()) { copy_stand_in(t, h, i); }
        cache_layout const& layout = slots.layout;
        stored_token const target  = token_at(to, h, slot);
        std::size_t const r        = target.rung < layout.rungs ? target.rung : layout.full_rung;
        index_t source             = -1;
        if (target.rung <= layout.rungs) // in the exact run the window comes last
        {
            auto const i        = static_cast<index_t>(r);
            index_t const count = r < layout.rungs ? first(h, i + 1) - first(h, i) : 0;
            source              = target.place < count ? positions(h, first(h, i) + target.place)
                                                       : slots.tokens(h) + target.place - count;
        }
        if (t.rank() == 0 && slot < sources.extent(1)) { sources(h, slot) = static_cast<std::int32_t>(source); }
        if (target.rung >= layout.rungs || carried(h, source) == 0) { return; }
        stored_token const token = token_at(slots.cache, h, source);
        copy_token<T>(t, token.run.keys, token.place, target.run.keys, target.place);
        copy_token<T>(t, token.run.values, token.place, target.run.values, target.place);
    }

private:
    template <team Team>
    MDKV_HD void copy_stand_in(Team const& t, index_t h, index_t i) const
    {
        stored_run const from = run_of_head(slots.cache, h, slots.cache.layout.rungs);
        stored_run const run  = run_of_head(to, h, slots.layout.rungs);
        index_t const count   = to.heads[h].stand_ins;
        copy_token<T>(t, from.keys, from.tokens - count + i, run.keys, run.tokens - count + i);
        copy_token<T>(t, from.values, from.tokens - count + i, run.values, run.tokens - count + i);
    }
};

} // namespace mdkv::inline MDKV_MACHINE::detail
