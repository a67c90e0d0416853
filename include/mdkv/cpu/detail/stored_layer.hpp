/// \file stored_layer.hpp: a packed cache seen as a layer that is to be compressed again: its tokens listed by their slots and read back.
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/detail/read_stored.hpp>
#include <mdkv/cpu/detail/stored_tokens.hpp>
#include <mdkv/detail/stored_slots.hpp>

#include <algorithm>

namespace mdkv::cpu::detail
{

/// The old cache seen as what is to be compressed: of every head the tokens before its new window, listed by their slots.
template <element T>
struct stored_layer : mdkv::detail::stored_slots
{
    cache_view<T, space::host> cache;
    bool bases = false; // the new cache may have projections

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

    stored_layer(cache_view<T, space::host> const& cache_, cache_layout const& next, index_t most_, bool bases_)
        : stored_slots{cache_, next, most_}
        , cache{cache_}
        , bases{bases_}
    {}

    void take(workspace::frame& frame, backend const& on)
    {
        auto const [dim, value_dim] = layout.dims;
        index_t const H             = layout.heads;
        index_t const base_heads    = bases ? H : 0;
        index_t const slots         = on.slots(pieces());
        keys                        = frame.take<T>(H * most * dim);
        values                      = frame.take<T>(H * most * value_dim);
        window_keys                 = frame.take<T>(H * layout.window * dim);
        window_values               = frame.take<T>(H * layout.window * value_dim);
        of_keys                     = frame.take<float>(base_heads * dim * dim);
        of_queries                  = frame.take<float>(base_heads * dim * dim);
        of_values                   = frame.take<float>(base_heads * value_dim * value_dim);
        room                        = frame.take<float>(slots * 2 * std::max(dim, value_dim));
        solving                     = frame.take<double>(bases ? slots * 2 * dim * dim : 0);
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
            index_t const window = tokens(h); // its first slot
            index_t const end    = std::min(first + piece_tokens, window + layout.window);
            float* const own     = room + slot * 2 * std::max(dim, value_dim);
            for (index_t t = first; t < end; ++t)
            {
                bool const kept = t >= window; // in the window
                index_t const i = kept ? h * layout.window + t - window : h * most + t;
                read_token(cache, h, t, bases_of(h), own, (kept ? window_keys : keys) + i * dim,
                    (kept ? window_values : values) + i * value_dim);
            }
            for (index_t t = std::max(first, window); t < std::min(first + piece_tokens, most); ++t)
            {
                std::fill_n(keys + (h * most + t) * dim, dim, narrow<T>(0.0F));
                std::fill_n(values + (h * most + t) * value_dim, value_dim, narrow<T>(0.0F));
            }
        });
    }

private:
    static constexpr index_t piece_tokens = 64;
    [[nodiscard]] index_t pieces() const noexcept { return (most + layout.window + piece_tokens - 1) / piece_tokens; }
};

} // namespace mdkv::cpu::detail
