/// \file stored_layer.hpp: a packed cache seen as a layer that is to be compressed again: its tokens listed by their slots and read back.
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/detail/read_stored.hpp>
#include <mdkv/cpu/detail/stored_tokens.hpp>
#include <mdkv/recompress.hpp>

#include <algorithm>
#include <array>
#include <cstddef>

namespace mdkv::cpu::detail
{

/// The old cache seen as what is to be compressed: of every head the tokens before its new window, listed by their slots.
template <element T>
struct stored_layer
{
    cache_view<T, space::host> cache;
    cache_layout layout;                       // of the new cache
    std::array<std::size_t, max_rungs> same{}; // of each old rung the new one that is stored alike
    index_t most = 0;                          // M: tokens of the longest head before its window
    bool bases   = false;

    // scratch
    T* keys           = nullptr; // [H, M, D]
    T* values         = nullptr; // [H, M, Dv]
    T* window_keys    = nullptr; // [H, W, D]
    T* window_values  = nullptr; // [H, W, Dv]
    float* of_keys    = nullptr; // [H, D, D]
    float* of_queries = nullptr;
    float* of_values  = nullptr; // [H, Dv, Dv]
    float* room       = nullptr; // [slots, 2 * max(D, Dv)]
    double* solving   = nullptr; // [slots, 2 * D * D]

    void take(workspace::frame& frame, backend const& on)
    {
        auto const [dim, value_dim] = layout.dims;
        index_t const heads         = layout.heads;
        index_t const base_heads    = bases ? heads : 0;
        index_t const slots         = on.slots(pieces());
        keys                        = frame.take<T>(heads * most * dim);
        values                      = frame.take<T>(heads * most * value_dim);
        window_keys                 = frame.take<T>(heads * layout.window * dim);
        window_values               = frame.take<T>(heads * layout.window * value_dim);
        of_keys                     = frame.take<float>(base_heads * dim * dim);
        of_queries                  = frame.take<float>(base_heads * dim * dim);
        of_values                   = frame.take<float>(base_heads * value_dim * value_dim);
        room                        = frame.take<float>(slots * 2 * std::max(dim, value_dim));
        solving                     = frame.take<double>(bases ? slots * 2 * dim * dim : 0);
    }

    [[nodiscard]] index_t tokens(index_t h) const noexcept
    {
        return mdkv::detail::tokens_below_full(cache.layout, cache.heads[h]) + cache.heads[h].exact.tokens
               + *cache.appended - layout.window;
    }

    /// Slots of head h from `first` on are exact.
    [[nodiscard]] index_t first_exact(index_t h) const noexcept
    {
        return mdkv::detail::tokens_below_full(cache.layout, cache.heads[h]);
    }

    /// The rung of token `slot` as it is stored now, or the costliest there is for an exact one where the set has no 1.
    [[nodiscard]] std::size_t own_rung(index_t h, index_t slot) const noexcept
    {
        std::size_t const old = token_at(cache, h, slot).rung;
        if (old < cache.layout.rungs) { return same[old]; }
        if (layout.full_rung < layout.rungs) { return layout.full_rung; }
        std::size_t r = layout.rungs - 1;
        while (r > 0 && !open(h, r)) { --r; }
        return r;
    }

    /// Whether head h stores all that is needed to read rung r.
    [[nodiscard]] bool open(index_t h, std::size_t r) const noexcept
    {
        return !layout.projected(r)
               || (layout.key_coordinates[r] <= cache.heads[h].key_columns
                   && layout.value_coordinates[r] <= cache.heads[h].value_columns);
    }

    [[nodiscard]] stored_bases bases_of(index_t h) const noexcept
    {
        auto const [dim, value_dim] = layout.dims;
        if (!bases || of_keys == nullptr) { return {}; } // null in a dry run
        return {of_keys + h * dim * dim, of_queries + h * dim * dim, of_values + h * value_dim * value_dim};
    }

    /// Reads everything back.
    void read(backend const& on) const
    {
        auto const [dim, value_dim] = layout.dims;
        on.for_each(bases ? layout.heads : 0,
            [&](index_t h, index_t slot) { read_bases(cache, h, bases_of(h), solving + slot * 2 * dim * dim); });
        on.for_each(layout.heads * pieces(), [&](index_t piece, index_t slot) {
            index_t const h      = piece / pieces();
            index_t const first  = piece % pieces() * piece_tokens;
            index_t const before = tokens(h);
            index_t const end    = std::min(first + piece_tokens, before + layout.window);
            float* const own     = room + slot * 2 * std::max(dim, value_dim);
            for (index_t t = first; t < end; ++t)
            {
                bool const kept = t >= before; // in the window
                index_t const i = kept ? h * layout.window + t - before : h * most + t;
                read_token(cache, h, t, bases_of(h), own, (kept ? window_keys : keys) + i * dim,
                    (kept ? window_values : values) + i * value_dim);
            }
            for (index_t t = std::max(first, before); t < std::min(first + piece_tokens, most); ++t)
            {
                std::fill_n(keys + (h * most + t) * dim, dim, narrow<T>(0.0F));
                std::fill_n(values + (h * most + t) * value_dim, value_dim, narrow<T>(0.0F));
            }
        });
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
        for (std::size_t r = 0; r < cache.layout.rungs; ++r)
        {
            if (cache.layout.own_run(r)) { go(cache.heads[h].runs[r].tokens); }
        }
        go(cache.heads[h].exact.tokens - cache.layout.window);
        go(*cache.appended);
    }

private:
    static constexpr index_t piece_tokens = 64;
    [[nodiscard]] index_t pieces() const noexcept { return (most + layout.window + piece_tokens - 1) / piece_tokens; }
};

} // namespace mdkv::cpu::detail
