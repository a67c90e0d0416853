/// \file storing.hpp: one call of write, and one of read: the checks of a stored cache, and its bytes, counted, summed and passed on.
#pragma once

#include <mdkv/engine/stored.hpp>

#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/crc32c.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/stored_format.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace MDKV_NAMESPACE
{

namespace detail
{

/// Passes a file's bytes on to a sink, counted and summed.
template <class Sink>
struct file_output
{
    Sink& sink;
    index_t at        = 0;
    std::uint32_t crc = 0;

    void add(void const* data, index_t size)
    {
        if (size == 0) { return; }
        std::span const bytes{static_cast<std::byte const*>(data), static_cast<std::size_t>(size)};
        crc = crc32c(crc, bytes.data(), bytes.size());
        sink(bytes);
        at += size;
    }
    /// Adds zeros before byte `to`.
    void pad(index_t to)
    {
        static constexpr std::byte zeros[stored_alignment]{};
        add(zeros, to - at);
    }
};

/// One call of write or stored_bytes, behind its checks.
template <element T>
struct stored_writer
{
    cache_place const& place;
    std::span<layer_to_write<T> const> layers;
    file_header header;

    stored_writer(cache_identity const& identity, cache_place const& place_, std::span<layer_to_write<T> const> layers_)
        : place{place_}
        , layers{layers_}
        , header{magic, element_code<T>, stored_version, 0, 0, identity, std::ssize(layers), place.model_layers,
              place.first_layer, layers.empty() ? 0 : layers[0].cache.layout.heads, place.model_heads, place.first_head,
              place.tokens, std::ssize(place.attachment)}
    {
        expects_place("write: place from layer ", header);
        index_t at = end_of_attachment(header);
        for (index_t i = 0; i < header.layers; ++i)
        {
            layer_to_write<T> const& layer = layers[static_cast<std::size_t>(i)];
            auto const& [cache, positions] = layer;
            char const* const call         = "write: layer ";
            expects(
                cache.layout.rungs > 0, call, i, " has no layout: nothing was packed into it, or it was moved from");
            expects(cache.layout.heads == header.heads, call, i, " has ", cache.layout.heads, " heads, layer 0 ",
                header.heads);
            expects((header.heads == 0 || (cache.heads != nullptr && cache.appended != nullptr))
                        && (cache.arena_bytes == 0 || cache.arena != nullptr),
                call, i, " has no directory, or no arena");
            layer_record const record = record_of(layer, at);
            at                        = layer_parts{record, layout_of(call, i, record, header.heads), sizeof(T)}.end;
            expects_layer<T>(call, i, cache, positions, place.tokens);
        }
        header.bytes = aligned(checked_add(at, checksum_bytes));
    }

    template <class Sink>
    void write(Sink& sink) const
    {
        file_output<Sink> out{sink};
        out.add(&header, sizeof header);
        index_t at = end_of_attachment(header);
        for (auto const& layer : layers)
        {
            layer_record const record = record_of(layer, at);
            out.add(&record, sizeof record);
            at = layer_parts{record, layer.cache.layout, sizeof(T)}.end;
        }
        out.add(place.attachment.data(), header.attachment);
        for (auto const& [cache, positions] : layers)
        {
            out.pad(aligned(out.at));
            out.add(cache.heads, header.heads * index_t{sizeof(head_entry)});
            for (index_t h = 0; h < positions.extent(0); ++h)
            {
                out.add(positions.row(h), positions.extent(1) * index_t{sizeof(std::int32_t)});
            }
            out.pad(aligned(out.at));
            out.add(cache.arena, cache.arena_bytes);
            out.pad(aligned(out.at));
            for (index_t h = 0; h < header.heads; ++h)
            {
                add_tail(out, run_of_head(without_const(cache), h, cache.layout.rungs + 1));
            }
        }
        out.pad(header.bytes - checksum_bytes);
        std::uint32_t const crc = out.crc;
        out.add(&crc, sizeof crc);
    }

private:
    /// The record of a layer that begins at the next multiple of 64.
    [[nodiscard]] static layer_record record_of(layer_to_write<T> const& layer, index_t at)
    {
        auto const& [cache, positions] = layer;
        cache_layout const layout      = cache.layout.heads == 0 ? cache_layout{} : cache.layout;
        layer_record to{aligned(at), positions.empty() ? 0 : positions.extent(1), cache.arena_bytes,
            appended_tokens(cache), layout.window, layout.dims.keys, layout.dims.values,
            static_cast<std::uint32_t>(layout.rungs), static_cast<std::uint32_t>(layout.stand_in_run),
            bits_of_float(layout.scale), 0, {}, {}, {}, {}};
        for (std::size_t r = 0; r < layout.rungs; ++r)
        {
            to.keys[r]     = static_cast<std::int32_t>(layout.key_coordinates[r]);
            to.values[r]   = static_cast<std::int32_t>(layout.value_coordinates[r]);
            to.kinds[r]    = static_cast<std::uint8_t>(layout.kinds[r]);
            to.in_basis[r] = static_cast<std::uint8_t>(layout.in_basis[r]);
        }
        return to;
    }

    /// Adds the appended tokens of a head as a tail that has room for no more: the last tile of keys is narrower there.
    template <class Out>
    static void add_tail(Out& out, stored_run const& tail)
    {
        index_t const full_tokens = run_rows::tile_begin(tail.tokens);
        out.add(tail.keys.begin, full_tokens * tail.keys.token_bytes);
        for (int c = 0; c < tail.keys.coordinates && full_tokens < tail.tokens; ++c)
        {
            out.add(
                tail.keys.begin + tail.keys.coordinate(full_tokens, c), (tail.tokens - full_tokens) * tail.keys.unit);
        }
        out.add(tail.values.begin, tail.tokens * tail.values.token_bytes);
    }
};

} // namespace detail

template <element T>
stored_caches<T>::stored_caches(std::span<std::byte const> bytes, cache_identity const& identity, verify how)
    : header_{reinterpret_cast<detail::file_header const*>(bytes.data())}
{
    using namespace detail;
    index_t const size = std::ssize(bytes);
    index_t const end  = size - checksum_bytes;
    expects(reinterpret_cast<std::uintptr_t>(bytes.data()) % stored_alignment == 0,
        "read: the bytes are not aligned to ", stored_alignment, "; map the file, or read it into such memory");
    expects(end >= index_t{sizeof(file_header)}, "read: the file has ", size, " bytes, fewer than a header");
    file_header const& file = *header_;
    expects(file.magic == magic, "read: byte 0: this is no file of compressed caches");
    expects(file.version == stored_version, "read: byte 12: the file is of version ", file.version,
        "; this library reads version ", stored_version);
    expects(file.bytes == size, "read: the file has ", file.bytes, " bytes, of which there are ", size);
    auto const digits = [](cache_identity const& of) { // the first ones, in hexadecimal
        array<char, 17> text{};
        for (std::size_t i = 0; i < 16; ++i) { text[i] = "0123456789abcdef"[of[i / 2] >> (4 - i % 2 * 4) & 15]; }
        return text;
    };
    expects<mismatch>(file.identity == identity, "read: byte 24: the file is of the identity ",
        digits(file.identity).data(), "..., not ", digits(identity).data(), "...");
    expects<mismatch>(file.element == element_code<T>, "read: byte 8: the file has elements of type ", file.element,
        "; ", element_code<T>, " (", element_name<T>(), ") is needed");
    expects(
        how == verify::bounds
            || load_bytes<std::uint32_t>(bytes.data() + end) == crc32c(0, bytes.data(), static_cast<std::size_t>(end)),
        "read: the file is damaged: its checksum differs");
    expects_place("read: place from layer ", file);
    index_t at = end_of_attachment(file);
    expects(at <= end, "read: the records of ", layers(), " layers and an attachment of ", file.attachment,
        " bytes do not end before byte ", end);
    for (index_t i = 0; i < layers(); ++i)
    {
        char const* const call     = "read: layer ";
        layer_record const& record = records()[i];
        index_t const begin        = aligned(at);
        at                         = layer_parts{record, layout_of(call, i, record, heads()), sizeof(T)}.end;
        expects(record.begin == begin && at <= end, call, i, " lies at bytes [", record.begin, ", ", at,
            "); it must begin at ", begin, " and end before ", end);
        auto const [cache, positions] = found(i);
        expects_layer<T>(call, i, cache, positions, file.tokens);
    }
    expects(aligned(at + checksum_bytes) == size, "read: the file has ", size, " bytes; its layers end at byte ", at);
}

} // namespace MDKV_NAMESPACE
