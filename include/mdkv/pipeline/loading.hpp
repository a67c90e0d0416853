/// \file loading.hpp: one call of read: the checks of a stored cache's bytes, none of which decides an access before.
#pragma once

#include <mdkv/engine/stored.hpp>

#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/detail/digest.hpp>
#include <mdkv/detail/stored_format.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace MDKV_NAMESPACE::detail
{

/// The header and the place of a file all of whose records were checked.
template <element T>
struct stored_reader
{
    static_assert(std::endian::native == std::endian::little,
        "mdkv: stored caches are little-endian; on this machine keep caches in memory");

    std::span<std::byte const> file;
    file_header header;
    place_record place{};

    stored_reader(std::span<std::byte const> bytes, cache_identity const& identity, verify how)
        : file{bytes}
        , header{header_of(bytes)}
    {
        index_t const size = std::ssize(file);
        bool const sums    = how == verify::everything;
        expects(!sums || header.crc == crc32c(0, file.data(), sizeof header - sizeof header.crc),
            "read: byte 0: the header is damaged: its checksum differs");
        expects(header.bytes == size, "read: the file has ", header.bytes, " bytes, of which there are ", size);
        expects(header.sections == section_count, "read: byte 28: the file has ", header.sections, " sections; ",
            index_t{section_count}, " are needed");
        for (std::size_t s = 0; s < section_count; ++s)
        {
            section_record const& one = header.table[s];
            expects_inside("a section", index_t{sizeof header}, one.offset, one.bytes, {0, size, 0, 0}, page_bytes);
            expects(!sums || one.crc == crc32c(0, file.data() + one.offset, static_cast<std::size_t>(one.bytes)),
                "read: byte ", one.offset, ": section ", s, " is damaged: its checksum differs");
        }
        expects_identity(identity);
        expects<mismatch>(header.element == element_code<T>, "read: byte 24: the file has elements of type ",
            header.element, "; ", element_code<T>, " (", element_name<T>(), ") is needed");
        read_place();
        expects(header.table[layout_section].bytes == place.layers * index_t{sizeof(layer_record)}, "read: byte ",
            header.table[layout_section].offset, ": the layouts of ", place.layers, " layers have ",
            header.table[layout_section].bytes, " bytes");
        for (index_t i = 0; i < place.layers; ++i) { read_layer(i); }
    }

private:
    [[nodiscard]] static file_header header_of(std::span<std::byte const> file)
    {
        expects(reinterpret_cast<std::uintptr_t>(file.data()) % arena_alignment == 0,
            "read: the bytes are not aligned to ", arena_alignment, "; map the file, or read it into such memory");
        expects(file.size() >= sizeof(file_header), "read: the file has ", file.size(),
            " bytes, fewer than a header's ", sizeof(file_header));
        auto const header = record_at<file_header>(file.data());
        expects(header.magic == magic, "read: byte 0: this is no file of compressed caches");
        expects(header.mark != __builtin_bswap32(endian_mark),
            "read: byte 8: the file was written by a big-endian machine; only little-endian files are read");
        expects(header.mark == endian_mark, "read: byte 8: the mark of endianness is damaged");
        expects(header.major == major_version && header.minor <= minor_version, "read: byte 12: the file's version is ",
            header.major, ".", header.minor, "; this library reads ", major_version, ".0 to ", major_version, ".",
            minor_version);
        return header;
    }

    /// \param where   position of the offset in the file, for the message
    static void expects_inside(char const* name, index_t where, index_t offset, index_t bytes,
        section_record const& section, index_t alignment)
    {
        expects(offset >= section.offset && bytes >= 0 && offset <= section.offset + section.bytes
                    && bytes <= section.offset + section.bytes - offset && offset % alignment == 0,
            "read: byte ", where, ": ", name, " of ", bytes, " bytes at byte ", offset, " does not lie in [",
            section.offset, ", ", section.offset + section.bytes, ") at a multiple of ", alignment);
    }

    /// Compares digests; if they differ, the texts tell the reason.
    void expects_identity(cache_identity const& identity) const
    {
        if (header.identity == digest_of(identity.texts())) { return; }
        section_record const& section = header.table[identity_section];
        auto const texts              = identity.texts();
        index_t offset                = section.offset + index_t{sizeof(index_t)} * std::ssize(texts.items);
        for (std::size_t i = 0; i < texts.size() && offset <= section.offset + section.bytes; ++i)
        {
            auto const size = record_at<index_t>(file.data() + section.offset + i * sizeof(index_t));
            expects_inside("a text", section.offset, offset, size, section, 1);
            std::string_view const text{
                reinterpret_cast<char const*>(file.data()) + offset, static_cast<std::size_t>(size)};
            message shown; // fit for a terminal
            for (char const c : text.substr(0, 80)) { shown.add(c >= ' ' && c <= '~' ? &c : "?", 1); }
            expects<mismatch>(text == texts[i], "read: byte ", offset, ": the file's ", text_names[i], " is \"",
                shown.text, "\", not \"", texts[i], "\"");
            offset += size;
        }
        expects<mismatch>(false, "read: byte 32: the file is of another identity");
    }

    void read_place()
    {
        section_record const& section = header.table[place_section];
        expects_inside("the place", section.offset, section.offset, sizeof place, section, 1);
        place             = record_at<place_record>(file.data() + section.offset);
        auto const within = [&](char const* name, index_t first, index_t count, index_t all) {
            expects(first >= 0 && count >= 0 && count <= all && first <= all - count, "read: byte ", section.offset,
                ": ", count, " ", name, " from ", first, " on are not among ", all);
        };
        within("layers", place.first_layer, place.layers, place.model_layers);
        within("heads", place.first_head, place.heads, place.model_heads);
        within("tokens", 0, place.tokens, INT32_MAX);
        within("layers", 0, place.layers, std::ssize(file) / index_t{sizeof(layer_record)});
        index_t const links = links_of(place.tokens) * index_t{sizeof(sha256::digest)};
        expects(place.attachment >= 0 && section.bytes - index_t{sizeof place} - links == place.attachment,
            "read: byte ", section.offset, ": the place has ", section.bytes, " bytes; the hashes take ", links,
            " and the attachment ", place.attachment);
    }

    void read_layer(index_t i) const
    {
        index_t const where = header.table[layout_section].offset + i * index_t{sizeof(layer_record)};
        auto const record   = record_at<layer_record>(file.data() + where);
        auto const layout   = layout_of(record, "read: byte ", where);
        expects(layout.heads == place.heads, "read: byte ", where, ": layer ", i, " has ", layout.heads,
            " heads, the file ", place.heads);
        expects(record.tail_tokens >= 0 && record.slot_count >= 0 && record.slot_count <= INT32_MAX, "read: byte ",
            where, ": layer ", i, " has ", record.tail_tokens, " tokens in its tail and ", record.slot_count, " slots");
        expects_inside(
            "an arena", where, record.arena, record.arena_bytes, header.table[arena_section], arena_alignment);
        expects_inside("a tail", where, record.tail, tail_bytes(layout, record.tail_tokens, sizeof(T)),
            header.table[arena_section], arena_alignment);
        expects_inside("a directory", where, record.directory, directory_bytes(layout.heads),
            header.table[directory_section], alignof(head_entry));
        expects_inside("the positions", where, record.positions,
            layout.heads * record.slot_count * index_t{sizeof(std::int32_t)}, header.table[position_section],
            sizeof(std::int32_t));
        auto const* const entries = reinterpret_cast<head_entry const*>(file.data() + record.directory);
        auto const appended       = record_at<index_t>(
            file.data() + record.directory + directory_bytes(layout.heads) - index_t{sizeof(index_t)});
        expects(appended >= 0 && appended <= record.tail_tokens && appended <= INT32_MAX, "read: byte ",
            record.directory, ": ", appended, " tokens were appended to a tail of ", record.tail_tokens);
        index_t const most =
            expects_directory<T>(layout, entries, record.arena_bytes, appended, "read: byte ", record.directory);
        expects(record.slot_count == 0 || record.slot_count >= most, "read: byte ", where, ": layer ", i,
            " has positions of ", record.slot_count, " slots; a head has ", most);
        auto const* const positions = reinterpret_cast<std::int32_t const*>(file.data() + record.positions);
        expects(positions_within(positions, layout.heads * record.slot_count, place.tokens), "read: byte ",
            record.positions, ": layer ", i, " has a position outside of [-1, ", place.tokens, ")");
    }
};

} // namespace MDKV_NAMESPACE::detail
