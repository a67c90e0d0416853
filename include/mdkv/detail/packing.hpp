/// \file packing.hpp: jobs of pack: the directory laid out from the tokens at each rung, channels of keys, and their order (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/channels.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/pack_tile.hpp>
#include <mdkv/detail/panel.hpp>
#include <mdkv/detail/sort_slots.hpp>
#include <mdkv/detail/team.hpp>

#include <cstddef>
#include <cstdint>

namespace MDKV_NAMESPACE::detail
{

/// How many stand-ins each head has.
struct stand_in_counts
{
    index_t most             = 0;       ///< most of a head; it has no more than it drops tokens
    head_entry const* stored = nullptr; ///< [H]  directory of a cache whose stand-ins are copied afterwards; or null

    [[nodiscard]] MDKV_HD constexpr index_t of(cache_layout const& layout, index_t h, index_t cheapest) const noexcept
    {
        return stored != nullptr ? stored[h].stand_ins : layout.stand_ins(cheapest, most);
    }
};

/// Lays out every head's entry from its number of tokens at each rung, one head after another. One item.
template <element T, backend B>
struct lay_out_heads
{
    static constexpr char const* name = "pack_lay_out";

    cache_view<T, B::memory_space> cache;
    bool bases;                   ///< neither basis is missing
    in_view<index_t, 2, B> first; // [H, R+1] where each rung's tokens begin
    stand_in_counts stand_ins;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t) const
    {
        cache_layout const& layout = cache.layout;
        head_entry entry;
        index_t bytes   = 0;
        index_t unbased = 0; // heads with tokens at a projected rung whose basis is missing
        for (index_t h0 = 0; h0 < layout.heads; h0 += t.size())
        {
            index_t const h     = h0 + t.rank();
            bool const in_range = h < layout.heads;
            array<index_t, max_rungs> count{};
            for (std::size_t r = 0; in_range && r < layout.rungs; ++r)
            {
                auto const at = static_cast<index_t>(r);
                count[r]      = first(h, at + 1) - first(h, at);
            }
            index_t const more = in_range ? stand_ins.of(layout, h, count[0]) : 0;
            auto const sum     = t.prefix(in_range ? lay_out_head<T>(layout, count, 0, entry, more) : index_t{0});
            unbased += in_range && !bases && entry.key_columns > 0 ? 1 : 0;
            if (in_range)
            {
                static_cast<void>(lay_out_head<T>(layout, count, bytes + sum.before, cache.heads[h], more));
            }
            bytes += sum.total;
        }
        bool const stores = t.sum(unbased) == 0 && bytes <= cache.arena_bytes;
        for (index_t h = t.rank(); !stores && h < layout.heads; h += t.size()) { cache.heads[h] = {}; }
        if (t.rank() == 0 && cache.appended != nullptr) { *cache.appended = 0; }
    }
};

/// Writes means and scales of each head that has rotated tokens: the given ones, or ones fitted to its kept tokens alone, or to
/// all if only its stand-ins are in codes. An item is a head.
template <element T, backend B>
struct write_channels
{
    static constexpr char const* name = "pack_write_channels";
    static constexpr int threads      = 128;

    in_view<float, 3, B> given;       // [H, 3, D]  or empty
    in_view<float, 2, B> given_means; // [H, Dv]    of values, or empty
    fit_key_channels<T, T, B> fitted;
    fit_value_means<T, B> of_values;
    in_view<std::int32_t, 2, B> positions; // [H, N]    by rung, ascending
    in_view<index_t, 2, B> first;          // [H, R+1]  where each rung's positions begin
    cache_view<T, B::memory_space> cache;  // its directory is complete

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        if (!has_channels(cache.layout, cache, h)) { return; }
        index_t const all   = first(h, static_cast<index_t>(cache.layout.rungs));
        index_t const begin = cache.layout.key_coordinates[0] > 0 || first(h, 1) == all ? 0 : first(h, 1);
        auto const kept     = [&](index_t i) { return index_t{positions(h, begin + i)}; };
        if (given.empty()) { fitted.fit(t, h, all - begin, kept); }
        if (given_means.empty()) { of_values.fit(t, h, all - begin, kept); }
        t.sync();
        auto const channels         = given.empty() ? in_view<float, 3, B>{fitted.channels} : given;
        auto const means            = given_means.empty() ? in_view<float, 2, B>{of_values.means} : given_means;
        auto const [dim, value_dim] = cache.layout.dims;
        std::byte* const to         = cache.arena + cache.heads[h].channels;
        for (index_t i = t.rank(); i < 2 * dim + value_dim; i += t.size())
        {
            float const x = i < dim       ? channels(h, channel_means, i)
                            : i < 2 * dim ? channels(h, channel_scales, i - dim)
                                          : means(h, i - 2 * dim);
            store_at(to + i * index_t{sizeof(T)}, narrow<T>(x));
        }
    }
};

/// Bytes of an arena with these rungs, which the host can read.
/// \throws invalid_argument   naming the head, and the token whose rung is outside the layout or the projected rung that
///                            lacks a basis
template <element T, backend B>
[[nodiscard]] index_t bytes_of_rungs(B const&, char const* stage, in_view<std::uint8_t, 2, B> rung,
    std::uint8_t const* rungs, cache_layout const& layout, bool bases, stand_in_counts const& stand_ins)
{
    index_t bytes = 0;
    for (index_t h = 0; h < layout.heads; ++h)
    {
        array<index_t, max_rungs> tokens{};
        for (index_t i = 0; i < rung.extent(1); ++i)
        {
            std::size_t const r = rungs[rung.offset(h, i)];
            expects(r < layout.rungs, stage, ": rung of head ", h, ", token ", i, " is ", r, "; it must be below ",
                layout.rungs);
            ++tokens[r];
        }
        for (std::size_t r = 0; r < layout.rungs; ++r)
        {
            expects(tokens[r] == 0 || bases || !layout.projected(r), stage, ": head ", h, " has ", tokens[r],
                " tokens at projected rung ", r, ", but key_basis or value_basis is empty");
        }
        head_entry entry;
        bytes = lay_out_head<T>(layout, tokens, bytes, entry, stand_ins.of(layout, h, tokens[0]));
    }
    return bytes;
}

/// The parts of a layer that pack stores.
template <backend B, element T>
struct pack_operands
{
    in_view<T, 3, B> keys;   ///< [H, N, D]
    in_view<T, 3, B> values; ///< [H, N, Dv]
    in_view<T, 3, B> window_keys;
    in_view<T, 3, B> window_values;
    in_view<float, 3, B> key_basis;
    in_view<float, 3, B> value_basis;
    in_view<float, 3, B> channels;         ///< [H, 3, D]  from fit_channels; empty: fitted to the kept keys alone
    in_view<float, 2, B> value_means;      ///< [H, Dv]    empty: fitted to the kept values
    in_view<std::int32_t, 2, B> positions; ///< [H, N]     from sort_slots
    in_view<index_t, 2, B> first;          ///< [H, R+1]   from sort_slots
    in_view<float, 3, B> stand_in_keys;
    in_view<float, 3, B> stand_in_values;
    in_view<std::uint8_t, 2, B>
        carried{}; ///< [H, N]  1 for tokens copied afterwards: tiles of such tokens alone are not written
    head_entry const* stored =
        nullptr; ///< directory of a cache whose stand-ins are copied afterwards, without stand_in_keys
};

/// The body of pack, for checked operands.
template <backend B, element T>
void pack_tokens(B const& on, pack_operands<B, T> const& of, cache_view<T, B::memory_space> const& cache)
{
    cache_layout const& layout = cache.layout;
    index_t const heads        = layout.heads;
    index_t const coded        = layout.any_rotated() ? heads : 0;
    index_t const most         = of.stand_in_keys.extent(1); // stand-ins
    workspace::frame frame{*on.scratch};
    auto const fitted      = scratch_view<float>(on, frame, of.channels.empty() ? coded : 0, 3, layout.dims.keys);
    auto const means       = scratch_view<float>(on, frame, of.value_means.empty() ? coded : 0, layout.dims.values);
    auto const more_keys   = scratch_view<T>(on, frame, most > 0 ? heads : 0, most, layout.dims.keys);
    auto const more_values = scratch_view<T>(on, frame, most > 0 ? heads : 0, most, layout.dims.values);
    bool const bases       = !of.key_basis.empty() && !of.value_basis.empty();
    write_channels<T, B> const means_of_codes{
        of.channels, of.value_means, {{}, of.keys, fitted}, {of.values, means}, of.positions, of.first, cache};
    pack_tiles<T, B> const tiles{
        {cache, of.key_basis, of.value_basis, layout.rungs + 1, of.keys.extent(1) + layout.window + most, most > 0},
        of.keys, of.values, of.window_keys, of.window_values, as_input(more_keys), as_input(more_values), of.positions,
        of.first, of.carried};
    if constexpr (requires { reserve(on, tiles, tiles.items()); }) // nothing is written if memory is lacking
    {
        reserve(on, means_of_codes, coded);
        reserve(on, tiles, tiles.items());
    }
    run(on, lay_out_heads<T, B>{cache, bases, of.first, {most, of.stored}}, 1);
    run(on, means_of_codes, coded);
    run(on, convert_rows<B, float, T>{of.stand_in_keys, 1.0F, more_keys});
    run(on, convert_rows<B, float, T>{of.stand_in_values, 1.0F, more_values});
    run(on, tiles);
}

} // namespace MDKV_NAMESPACE::detail
