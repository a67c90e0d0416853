/// \file slot_losses.hpp: the losses that stay beside stored tokens while a prompt is read, lists of them, and the reader's jobs (beyond arXiv 2603.20616).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/detail/cache_owner.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/stored_slots.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/replay/balance.hpp>

#include <type_traits>

namespace MDKV_NAMESPACE::detail
{

/// The number of losses that a stored token keeps: one a rung, but none at the full rung, which loses nothing.
[[nodiscard]] MDKV_HD constexpr index_t kept_losses(cache_layout const& layout) noexcept
{
    return static_cast<index_t>(layout.rungs) - (layout.full_rung + 1 == layout.rungs ? 1 : 0);
}

/// The losses of a layer's stored tokens in 16 bits: head by head [kept_losses, slots], slots as in `cache` without its tail.
template <element T, space S>
struct slot_losses
{
    cache_view<T, S> cache;
    bfloat16* losses;

    /// Stored tokens of head h.
    [[nodiscard]] MDKV_HD index_t stored(index_t h) const noexcept
    {
        return tokens_of_head(cache, h) - run_of_head(cache, h, most_runs(cache.layout) - 1).tokens;
    }
    /// [stored(h)]  losses of head h at a rung.
    [[nodiscard]] MDKV_HD bfloat16* row(index_t h, index_t r) const noexcept
    {
        index_t before = 0;
        for (index_t i = 0; i < h; ++i) { before += stored(i); }
        return losses + before * kept_losses(cache.layout) + r * stored(h);
    }
};

/// Tokens of a layer in the list of all layers'.
template <backend B>
struct token_list
{
    in_view<index_t, 1, B> first; ///< [H + 1]
    index_t begin, end;
    index_t longest; ///< tokens of the longest head

    [[nodiscard]] auto of(auto const& all) const // lists of tokens, in the last dimension
    {
        return slice<std::remove_cvref_t<decltype(all)>::rank() - 1>(all, begin, end - begin);
    }
};

/// The losses of a chunk's tokens in a layer, before they are stored.
template <backend B>
struct chunk_losses
{
    in_view<float, 3, B> losses; // [H, R, n]
    double const* factors;       // [n]  of each token, in all layers; or null

    [[nodiscard]] MDKV_HD float at(index_t h, index_t r, index_t i) const
    {
        return static_cast<float>(double{losses(h, r, i)} * (factors == nullptr ? 1.0 : factors[i]));
    }
};

/// Writes the losses of a layer's tokens before its new window to their list. A rung above a token's own saves nothing. Tokens of a
/// window that is stored in codes lose too much below these to be lowered further. An item is a head.
template <element T, backend B>
struct spread_losses
{
    static constexpr char const* name = "reader_spread_losses";
    static constexpr space S          = B::memory_space;

    stored_slots<T, S> by_slot;
    slot_losses<T, S> kept;
    chunk_losses<B> chunk;
    layer_units unit;
    out_view<float, 2, B> loss; // [R, tokens]
    index_t coded, code;        // the last tokens, a window in codes: their number, and the rung of these codes

    MDKV_HD void operator()(team auto const& t, index_t h) const
    {
        double const factor  = unit.of(0);
        index_t const stored = kept.stored(h);
        index_t const rungs  = loss.extent(0);
        by_slot.for_runs(h, [&, this](index_t begin, index_t end, auto const& can) {
            for (index_t r = 0; r < rungs; ++r)
            {
                auto const highest        = static_cast<index_t>(can.own);
                index_t const own         = r < highest ? r : highest;
                bool const free           = own >= kept_losses(by_slot.layout);
                index_t const stays       = r < code && code <= highest ? by_slot.tokens(h) - coded : end;
                bfloat16 const* const old = free ? nullptr : kept.row(h, own);
                float* const to           = loss.row(r) + by_slot.begin(h);
                for (index_t i = begin + t.rank(); i < end; i += t.size())
                {
                    float const x = free ? 0.0F : i < stored ? widen(old[i]) : chunk.at(h, own, i - stored);
                    to[i]         = i >= stays ? 0x1p100F : static_cast<float>(double{x} * factor);
                }
            }
        });
    }
};

/// Moves losses to their tokens' slots in a new cache. An item is a head.
template <element T, backend B>
struct keep_losses
{
    static constexpr char const* name = "reader_keep_losses";
    static constexpr space S          = B::memory_space;

    slot_losses<T, S> from;
    chunk_losses<B> chunk;
    in_view<std::int32_t, 2, B> sources; // [H, S]  the old slot of each new one
    slot_losses<T, S> to;

    MDKV_HD void operator()(team auto const& t, index_t h) const
    {
        index_t const stored = from.stored(h);
        index_t const n      = to.stored(h);
        for (index_t r = 0; r < kept_losses(to.cache.layout); ++r)
        {
            bfloat16 const* const old = from.row(h, r);
            bfloat16* const row       = to.row(h, r);
            for (index_t i = t.rank(); i < n; i += t.size())
            {
                index_t const slot = sources(h, i);
                row[i]             = slot < stored ? old[slot] : narrow<bfloat16>(chunk.at(h, r, slot - stored));
            }
        }
    }
};

/// Moves losses to memory of a new cache.
/// \param sources  [H, S]  the old slot of each new one
template <backend B, element T, class Cache>
[[nodiscard]] auto move_losses(B const& on, slot_losses<T, B::memory_space> const& from, chunk_losses<B> const& chunk,
    in_view<std::int32_t, 2, B> sources, Cache& to)
{
    host_directory<T> const made{on, to.view()};
    index_t slots = 0;
    for (index_t h = 0; h < made.view.layout.heads; ++h) { slots += tokens_of_head(made.view, h); }
    owned_bytes moved{slots * kept_losses(to.layout()) * index_t{sizeof(bfloat16)}, to.memory()};
    to.wait();
    slot_losses<T, B::memory_space> const next{to.view(), reinterpret_cast<bfloat16*>(moved.data())};
    run(on, keep_losses<T, B>{from, chunk, sources, next}, made.view.layout.heads);
    return moved;
}

} // namespace MDKV_NAMESPACE::detail
