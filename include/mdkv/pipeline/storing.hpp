/// \file storing.hpp: one call of write: a stored cache's sections, counted, summed and passed on.
#pragma once

#include <mdkv/engine/stored.hpp>

#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/digest.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/stored_format.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace MDKV_NAMESPACE::detail
{

/// Passes bytes on to a sink and counts them.
template <class Sink>
struct placed_bytes
{
    Sink& sink;
    index_t at = 0;

    void add(void const* bytes, index_t size)
    {
        if (size > 0) { sink(std::span{static_cast<std::byte const*>(bytes), static_cast<std::size_t>(size)}); }
        at += size;
    }
    void pad(index_t alignment)
    {
        static constexpr std::byte zeros[page_bytes]{};
        add(zeros, up_to(alignment, at) - at);
    }
};

/// One call of write or stored_bytes, behind its checks.
template <element T>
struct stored_writer
{
    static_assert(std::endian::native == std::endian::little,
        "mdkv: stored caches are little-endian; on this machine keep caches in memory");

    cache_identity const& identity;
    cache_place const& place;
    std::span<layer_to_write<T> const> layers;
    file_header header{};

    /// Fills the header: all sizes, then the checksums if `checksums`.
    stored_writer(cache_identity const& identity_, cache_place const& place_,
        std::span<layer_to_write<T> const> layers_, bool checksums)
        : identity{identity_}
        , place{place_}
        , layers{layers_}
    {
        expects_valid();
        std::uint16_t minor = 0; // the least that says everything, so that older libraries read what they can
        for (auto const& one : layers)
        {
            cache_layout const& layout = one.cache.layout;
            if (layout.heads > 0 && layout.stand_in_run < layout.rungs) { minor = minor_version; }
        }
        header       = {magic, endian_mark, major_version, minor, 0, element_code<T>, section_count,
                  digest_of(identity.texts()), {}, 0, 0};
        header.bytes = index_t{sizeof(file_header)};
        for (std::size_t s = 0; s < section_count; ++s)
        {
            auto const ignore = [](std::span<std::byte const>) {};
            placed_bytes<decltype(ignore) const> counted{ignore, up_to(page_bytes, header.bytes)};
            header.table[s].offset = counted.at;
            write_section(s, counted);
            header.bytes          = counted.at;
            header.table[s].bytes = counted.at - header.table[s].offset;
        }
        for (std::size_t s = 0; checksums && s < section_count; ++s)
        {
            auto const sum = [&](std::span<std::byte const> bytes) {
                header.table[s].crc = crc32c(header.table[s].crc, bytes.data(), bytes.size());
            };
            placed_bytes<decltype(sum) const> summed{sum, header.table[s].offset};
            write_section(s, summed);
        }
        header.crc = crc32c(0, reinterpret_cast<std::byte const*>(&header), sizeof header - sizeof header.crc);
    }

    template <class Sink>
    void write(Sink& sink) const
    {
        placed_bytes<Sink> out{sink};
        out.add(&header, sizeof header);
        for (std::size_t s = 0; s < section_count; ++s)
        {
            out.pad(page_bytes);
            write_section(s, out);
        }
    }

private:
    void expects_valid() const
    {
        auto const count = static_cast<index_t>(layers.size());
        auto const heads = layers.empty() ? 0 : layers[0].cache.layout.heads;
        auto const range = [](char const* name, index_t first, index_t n, index_t all) {
            expects(first >= 0 && all >= 0 && n <= all && first <= all - n, "write: place: ", n, " ", name, " from ",
                first, " on are not among the model's ", all);
        };
        range("layers", place.first_layer, count, place.model_layers);
        range("heads", place.first_head, heads, place.model_heads);
        expects<size_overflow>(place.tokens.size() <= INT32_MAX, "write: place.tokens are ", place.tokens.size(),
            "; at most ", INT32_MAX, " can be stored");
        for (std::size_t i = 0; i < identity.texts().size(); ++i)
        {
            expects(identity.texts()[i].size() <= most_text, "write: identity.", text_names[i], " has ",
                identity.texts()[i].size(), " bytes; at most ", most_text, " can be stored");
        }
        for (std::size_t i = 0; i < layers.size(); ++i)
        {
            auto const& [cache, positions] = layers[i];
            auto const number              = static_cast<index_t>(i);
            expects(cache.layout.rungs > 0, "write: layer ", i,
                " has no layout: nothing was packed into it, or it was moved from");
            expects(cache.layout.heads == heads, "write: layer ", i, " has ", cache.layout.heads, " heads, layer 0 ",
                heads);
            expects(heads == 0 || (cache.heads != nullptr && cache.appended != nullptr), "write: layer ", i,
                " has no directory");
            expects(cache.arena_bytes == 0 || cache.arena != nullptr, "write: layer ", i, " has no arena");
            index_t const most = expects_directory<T>(layout_of(record_of(i, {}), "write: layer ", number), cache.heads,
                cache.arena_bytes, appended(cache), "write: layer ", number);
            expects(place.tokens.empty() || static_cast<index_t>(place.tokens.size()) >= most,
                "write: place.tokens are ", place.tokens.size(), "; a head of layer ", i, " holds ", most, " tokens");
            expects(positions.empty() || (positions.extent(0) == heads && positions.extent(1) >= most), "write: layer ",
                i, ": positions [H, S] are [", positions.extent(0), ", ", positions.extent(1), "]; the cache has ",
                heads, " heads of at most ", most, " slots");
            for (index_t h = 0; !positions.empty() && h < heads; ++h)
            {
                expects(positions_within(positions.row(h), positions.extent(1), std::ssize(place.tokens)),
                    "write: layer ", i, ": a position of head ", h, " lies outside of [-1, ", place.tokens.size(),
                    "), the text's tokens");
            }
        }
    }

    [[nodiscard]] static index_t appended(cache_view<T const, space::host> const& cache) noexcept
    {
        return cache.layout.heads == 0                 ? 0
               : *cache.appended < cache.tail_capacity ? *cache.appended
                                                       : cache.tail_capacity;
    }
    [[nodiscard]] static index_t slot_count(layer_to_write<T> const& layer) noexcept
    {
        return layer.positions.empty() ? 0 : layer.positions.extent(1);
    }

    /// Where a layer's parts begin.
    struct cursor
    {
        index_t directory = 0;
        index_t positions = 0;
        index_t arena     = 0;
    };

    /// The record of layer i, whose parts begin at `at`.
    [[nodiscard]] layer_record record_of(std::size_t i, cursor const& at) const
    {
        cache_view<T const, space::host> const& cache = layers[i].cache;
        cache_layout const layout                     = cache.layout.heads == 0 ? cache_layout{} : cache.layout;
        layer_record to{at.arena, cache.arena_bytes, at.directory, up_to(arena_alignment, at.arena + cache.arena_bytes),
            appended(cache), at.positions, slot_count(layers[i]), layout.heads, layout.window, layout.dims.keys,
            layout.dims.values, static_cast<std::uint32_t>(layout.rungs), static_cast<std::uint32_t>(layout.full_rung),
            bits_of_float(layout.scale),
            layout.stand_in_run < layout.rungs ? static_cast<std::uint32_t>(layout.stand_in_run + 1) : 0, {}};
        for (std::size_t r = 0; r < layout.rungs; ++r)
        {
            to.rung[r] = {static_cast<std::int32_t>(layout.key_coordinates[r]),
                static_cast<std::int32_t>(layout.value_coordinates[r]), static_cast<std::uint8_t>(layout.kinds[r]),
                static_cast<std::uint8_t>(layout.in_basis[r]), 0};
        }
        return to;
    }

    template <class Out>
    void write_section(std::size_t s, Out& out) const
    {
        if (s == identity_section) { return emit_identity(out); }
        if (s == place_section) { return emit_place(out); }
        if (s == layout_section) { return emit_layouts(out); }
        for (auto const& [cache, positions] : layers)
        {
            if (s == directory_section)
            {
                index_t const count = appended(cache);
                out.add(cache.heads, cache.layout.heads * index_t{sizeof(head_entry)});
                out.add(&count, sizeof count);
            }
            for (index_t h = 0; s == position_section && !positions.empty() && h < positions.extent(0); ++h)
            {
                out.add(positions.row(h), positions.extent(1) * index_t{sizeof(std::int32_t)});
            }
            if (s == arena_section)
            {
                out.add(cache.arena, cache.arena_bytes);
                out.pad(arena_alignment);
                for (index_t h = 0; h < cache.layout.heads; ++h) { emit_tail(out, cache, h); }
                out.pad(arena_alignment);
            }
        }
    }

    template <class Out>
    void emit_identity(Out& out) const
    {
        for (std::string_view const text : identity.texts())
        {
            auto const size = static_cast<index_t>(text.size());
            out.add(&size, sizeof size);
        }
        for (std::string_view const text : identity.texts())
        {
            out.add(text.data(), static_cast<index_t>(text.size()));
        }
    }

    template <class Out>
    void emit_place(Out& out) const
    {
        auto const tokens = static_cast<index_t>(place.tokens.size());
        place_record const record{place.first_layer, static_cast<index_t>(layers.size()), place.model_layers,
            place.first_head, layers.empty() ? 0 : layers[0].cache.layout.heads, place.model_heads, tokens,
            static_cast<index_t>(place.attachment.size())};
        out.add(&record, sizeof record);
        sha256::digest link = header.identity;
        for (auto left = place.tokens; !left.empty();)
        {
            auto const count = left.size() < link_tokens ? left.size() : std::size_t{link_tokens};
            link             = link_of(link, left.first(count));
            left             = left.subspan(count);
            out.add(&link, sizeof link);
        }
        out.add(place.attachment.data(), record.attachment);
    }

    template <class Out>
    void emit_layouts(Out& out) const
    {
        cursor at{header.table[directory_section].offset, header.table[position_section].offset,
            header.table[arena_section].offset};
        for (std::size_t i = 0; i < layers.size(); ++i)
        {
            layer_record const record = record_of(i, at);
            out.add(&record, sizeof record);
            at.directory += directory_bytes(record.heads);
            at.positions += record.heads * record.slot_count * index_t{sizeof(std::int32_t)};
            at.arena =
                up_to(arena_alignment, record.tail + tail_bytes(layers[i].cache.layout, record.tail_tokens, sizeof(T)));
        }
    }

    /// Writes the appended tokens of a head as a tail that has room for no more: the last tile of keys is narrower there.
    template <class Out>
    static void emit_tail(Out& out, cache_view<T const, space::host> const& cache, index_t h)
    {
        stored_run const tail     = run_of_head(without_const(cache), h, cache.layout.rungs + 1);
        index_t const full_tokens = tail.tokens / tile_tokens * tile_tokens;
        out.add(tail.keys.begin, full_tokens * tail.keys.token_bytes);
        for (int c = 0; c < tail.keys.coordinates && full_tokens < tail.tokens; ++c)
        {
            out.add(
                tail.keys.begin + tail.keys.coordinate(full_tokens, c), (tail.tokens - full_tokens) * tail.keys.unit);
        }
        out.add(tail.values.begin, tail.tokens * tail.values.token_bytes);
    }
};

} // namespace MDKV_NAMESPACE::detail
