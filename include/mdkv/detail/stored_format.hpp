/// \file stored_format.hpp: the bytes of a stored cache: header, identity, place, layouts, and the checks that come before any use of them.
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/detail/digest.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <type_traits>

namespace MDKV_NAMESPACE::detail
{

// A file is a header and six sections. Numbers are little-endian, as the structs below lie in memory. Sections begin at
// multiples of 4,096 bytes, arenas and tails at multiples of 64; gaps are zeros. Offsets count from the file's first byte.
//
//   identity    5 lengths, then the texts; the header has their SHA-256
//   place       place_record; for each 256 tokens, and for the rest, 32 bytes of a hash chain; the attachment
//   layouts     a layer_record for each layer
//   directory   for each layer its head_entry structs [H], then the number of appended tokens
//   positions   for each layer [H, S] int32: the text position of every slot, or -1; S may be 0
//   arenas      for each layer the arena, then a tail with room for exactly the appended tokens

inline constexpr index_t page_bytes          = 4096; ///< sections begin at multiples of it
inline constexpr index_t arena_alignment     = 64;
inline constexpr index_t link_tokens         = 256; ///< tokens of a link of the hash chain
inline constexpr index_t most_text           = index_t{1} << 16;
inline constexpr index_t most_heads          = index_t{1} << 16;
inline constexpr index_t most_dimension      = index_t{1} << 16;
inline constexpr std::uint32_t endian_mark   = 0x01020304;
inline constexpr std::uint16_t major_version = 2;
inline constexpr std::uint16_t minor_version = 1; ///< 1: stand-ins may be in a rung's run
inline constexpr array<char, 8> magic{{'m', 'd', 'k', 'v', '\r', '\n', '\x1a', '\n'}};

enum section : std::size_t
{
    identity_section,
    place_section,
    layout_section,
    directory_section,
    position_section,
    arena_section,
    section_count
};

struct section_record
{
    index_t offset;
    index_t bytes;
    std::uint32_t crc; ///< CRC-32C
    std::uint32_t zero;
};

struct file_header
{
    array<char, 8> magic;
    std::uint32_t mark; ///< endian_mark
    std::uint16_t major;
    std::uint16_t minor;
    index_t bytes;         ///< size of the file
    std::uint32_t element; ///< 1: float, 2: half, 3: bfloat16
    std::uint32_t sections;
    sha256::digest identity;
    array<section_record, section_count> table;
    std::uint32_t zero;
    std::uint32_t crc; ///< CRC-32C of all before it
};

struct place_record
{
    index_t first_layer, layers, model_layers;
    index_t first_head, heads, model_heads;
    index_t tokens;
    index_t attachment; ///< bytes
};

struct rung_record
{
    std::int32_t keys;   ///< coordinates
    std::int32_t values; ///< coordinates
    std::uint8_t kind;
    std::uint8_t in_basis;
    std::uint16_t zero;
};

struct layer_record
{
    index_t arena, arena_bytes;
    index_t directory;
    index_t tail, tail_tokens;
    index_t positions, slot_count;
    index_t heads, window, key_dim, value_dim;
    std::uint32_t rungs, full_rung;
    std::uint32_t scale;     ///< bits of a float
    std::uint32_t stand_ins; ///< 1 + the rung whose run ends with the stand-ins; 0: the exact run has them
    array<rung_record, max_rungs> rung;
};

// The directory is stored as attention reads it, because a file is read where it lies.
static_assert(sizeof(head_entry) == 456
              && std::is_trivially_copyable_v<head_entry> && std::has_unique_object_representations_v<head_entry>);
static_assert(sizeof(file_header) == 216 && std::has_unique_object_representations_v<file_header>);
static_assert(sizeof(place_record) == 64 && std::has_unique_object_representations_v<place_record>);
static_assert(sizeof(layer_record) == 296 && std::has_unique_object_representations_v<layer_record>);

template <class Record>
[[nodiscard]] Record record_at(std::byte const* bytes) noexcept
{
    return load_at<Record>(static_cast<void const*>(bytes));
}

inline constexpr char const* text_names[]{"model", "revision", "tokenizer", "rope", "salt"};

/// The digest of an identity's texts.
[[nodiscard]] inline sha256::digest digest_of(array<std::string_view, 5> const& texts) noexcept
{
    sha256 all;
    for (std::string_view const text : texts)
    {
        auto const size = static_cast<std::uint64_t>(text.size());
        all.add(&size, sizeof size);
        all.add(text.data(), text.size());
    }
    return all.finish();
}

/// The link of a hash chain behind `before`.
[[nodiscard]] inline sha256::digest link_of(sha256::digest const& before, std::span<std::int32_t const> tokens) noexcept
{
    sha256 all;
    all.add(before.data(), before.size());
    all.add(tokens.data(), tokens.size_bytes());
    return all.finish();
}

[[nodiscard]] constexpr index_t links_of(index_t tokens) noexcept
{
    return (tokens + link_tokens - 1) / link_tokens;
}

[[nodiscard]] constexpr index_t up_to(index_t alignment, index_t x)
{
    return checked_add(x, alignment - 1) / alignment * alignment;
}

/// Bytes of a layer's directory.
[[nodiscard]] constexpr index_t directory_bytes(index_t heads) noexcept
{
    return heads * index_t{sizeof(head_entry)} + index_t{sizeof(index_t)};
}

/// Bytes of a tail with room for `tokens` tokens.
[[nodiscard]] constexpr index_t tail_bytes(cache_layout const& layout, index_t tokens, index_t element_bytes)
{
    return checked_multiply(layout.heads * (layout.dims.keys + layout.dims.values) * element_bytes, tokens);
}

/// Whether n positions are those of a text's tokens, or -1.
[[nodiscard]] inline bool positions_within(std::int32_t const* positions, index_t n, index_t tokens) noexcept
{
    bool good = true;
    for (index_t i = 0; i < n; ++i)
    {
        good = good & (positions[i] >= -1) & (positions[i] < tokens); // no branch: compared by vectors
    }
    return good;
}

/// The layout of a record. Messages begin with `call` and `where`, e.g. "read: byte " and the record's offset.
/// \throws invalid_argument   no ratio set makes such a layout
[[nodiscard]] inline cache_layout layout_of(layer_record const& from, char const* call, index_t where)
{
    auto const expects_in = [&](char const* name, index_t x, index_t least, index_t most) {
        expects(
            x >= least && x <= most, call, where, ": ", name, " is ", x, "; it must lie in [", least, ", ", most, "]");
    };
    expects_in("the number of heads", from.heads, 0, most_heads);
    expects_in("the window", from.window, 0, INT32_MAX);
    expects_in("the dimension of keys", from.key_dim, from.heads > 0 ? 1 : 0, most_dimension);
    expects_in("the dimension of values", from.value_dim, from.heads > 0 ? 1 : 0, most_dimension);
    expects_in("the number of rungs", from.rungs, 0, max_rungs);
    expects_in("the full rung", from.full_rung, 0, from.rungs);
    expects_in("the run of stand-ins", from.stand_ins, 0, from.rungs);
    cache_layout to;
    to.heads     = from.heads;
    to.window    = from.window;
    to.dims      = {from.key_dim, from.value_dim};
    to.rungs     = from.rungs;
    to.full_rung = from.full_rung;
    to.stand_in_run = from.stand_ins > 0 ? from.stand_ins - 1 : to.rungs;
    to.scale     = float_of_bits(from.scale);
    expects(to.scale >= 0.0F && to.scale <= (std::numeric_limits<float>::max)(), call, where, ": the scale is ",
        to.scale, "; it must be finite and not negative");
    for (std::size_t r = 0; r < to.rungs; ++r)
    {
        rung_record const& rung = from.rung[r];
        bool const dropped      = r == 0 && rung.keys == 0 && rung.values == 0 && rung.kind == 0 && rung.in_basis == 0;
        bool const all_coordinates = rung.keys == from.key_dim && rung.values == from.value_dim;
        bool const some =
            rung.keys >= 1 && rung.keys <= from.key_dim && rung.values >= 1 && rung.values <= from.value_dim;
        bool const full = all_coordinates && rung.kind == 0 && rung.in_basis == 0;
        expects(rung.kind <= 2 && rung.in_basis <= 1 && full == (r == to.full_rung)
                    && (dropped || (rung.in_basis == 1 ? some : all_coordinates)),
            call, where, ": rung ", r, " keeps ", rung.keys, " and ", rung.values, " of ", from.key_dim, " and ",
            from.value_dim, " coordinates as kind ", int{rung.kind}, ", ", int{rung.in_basis},
            " in the basis; there is no such rung");
        to.key_coordinates[r]   = rung.keys;
        to.value_coordinates[r] = rung.values;
        to.kinds[r]             = static_cast<storage>(rung.kind);
        to.in_basis[r]          = rung.in_basis == 1;
    }
    expects(to.stand_ins_fit(), call, where, ": stand-ins are at rung ", to.stand_in_run,
        ", which stores no whole vectors in a run of "
        "its own");
    return to;
}

/// Checks that a directory is the one that the layout and its numbers of tokens give, and lies inside of the arena.
/// \return the most slots of a head
/// \throws invalid_argument   naming the head
template <element T>
index_t expects_directory(cache_layout const& layout, head_entry const* heads, index_t arena_bytes, index_t appended,
    char const* call, index_t where)
{
    index_t offset = 0;
    index_t most   = 0;
    for (index_t h = 0; h < layout.heads; ++h)
    {
        head_entry const given = heads[h];
        auto const counted     = [](index_t n) { return n >= 0 && n <= INT32_MAX; };
        bool good              = counted(given.exact.tokens) && counted(given.stand_ins);
        // tokens of a run that have slots
        auto const slots_of = [&](std::size_t run, index_t n) {
            return good && run == layout.stand_in_run ? n - given.stand_ins : n;
        };
        index_t const exact = good ? slots_of(layout.rungs, given.exact.tokens) : 0;
        index_t slot_count  = exact + appended;
        array<index_t, max_rungs> tokens{};
        for (std::size_t r = 0; r < layout.rungs; ++r)
        {
            if (r == layout.full_rung) { tokens[r] = exact - layout.window; }
            else if (layout.own_run(r) && counted(given.runs[r].tokens))
            {
                slot_count += tokens[r] = slots_of(r, given.runs[r].tokens);
                good                    = good && tokens[r] >= 0;
            }
        }
        good = good && exact >= layout.window && (layout.full_rung < layout.rungs || exact == layout.window);
        head_entry right;
        if (good) { offset = lay_out_head<T>(layout, tokens, offset, right, given.stand_ins); }
        expects(good && right == given && offset <= arena_bytes, call, where, ": the directory's entry of head ", h,
            " is none that the layout gives inside of an arena of ", arena_bytes, " bytes");
        most = slot_count > most ? slot_count : most;
    }
    expects<size_overflow>(
        most <= INT32_MAX, call, where, ": a head has ", most, " tokens; at most ", INT32_MAX, " can be stored");
    return most;
}

} // namespace MDKV_NAMESPACE::detail
