/// \file stored_format.hpp: the bytes of a stored cache, and the checks of a layer before it is written and after it was found in a file.
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/detail/check.hpp>

#include <algorithm>
#include <bit>
#include <span>
#include <type_traits>

namespace MDKV_NAMESPACE::detail
{

// The parts of a file: docs/stored-caches.md. Its numbers are little-endian, as the structs below lie in memory.

static_assert(std::endian::native == std::endian::little,
    "mdkv: stored caches are little-endian; on this machine keep caches in memory");

inline constexpr index_t stored_alignment     = 64;
inline constexpr index_t checksum_bytes       = sizeof(std::uint32_t);
inline constexpr index_t most_extent          = index_t{1} << 16; ///< heads, or numbers of a key or a value
inline constexpr std::uint16_t stored_version = 3;
inline constexpr array<char, 8> magic{{'m', 'd', 'k', 'v', '\r', '\n', '\x1a', '\n'}};

struct file_header
{
    array<char, 8> magic;
    std::uint32_t element; ///< 1: float, 2: half, 3: bfloat16
    std::uint16_t version; ///< at byte 12 of every version
    std::uint16_t zero;
    index_t bytes; ///< size of the file
    array<std::uint8_t, 32> identity;
    index_t layers, model_layers, first_layer;
    index_t heads, model_heads, first_head;
    index_t tokens;
    index_t attachment; ///< bytes
};

struct layer_record
{
    index_t begin;      ///< where the layer's part of the file begins
    index_t slot_count; ///< S of its positions, or 0
    index_t arena_bytes;
    index_t appended; ///< tokens of the tail
    index_t window, key_dim, value_dim;
    std::uint32_t rungs, stand_in_run;
    std::uint32_t scale; ///< bits of a float
    std::uint32_t zero;
    array<std::int32_t, max_rungs> keys, values; ///< coordinates of each rung
    array<std::uint8_t, max_rungs> kinds, in_basis;
};

// The directory is stored as attention reads it, because a file is read where it lies.
static_assert(sizeof(head_entry) == 456
              && std::is_trivially_copyable_v<head_entry> && std::has_unique_object_representations_v<head_entry>);
static_assert(sizeof(file_header) == 120 && std::has_unique_object_representations_v<file_header>);
static_assert(sizeof(layer_record) == 232 && std::has_unique_object_representations_v<layer_record>);

/// Table k continues a checksum over a byte and k bytes of zeros.
inline constexpr auto crc32c_tables = [] {
    array<array<std::uint32_t, 256>, 8> all{};
    for (std::uint32_t i = 0, x = 0; i < 256 * all.size(); ++i)
    {
        x = i < 256 ? i : all[i / 256 - 1][i % 256];
        for (int bit = 0; bit < 8; ++bit) { x = x >> 1U ^ (x % 2 != 0 ? 0x82f63b78U : 0U); }
        all[i / 256][i % 256] = x;
    }
    return all;
}();

/// The CRC-32C (RFC 3720) of all bytes so far, from the checksum `before` of the bytes before these; 0 of no bytes.
[[nodiscard]] inline std::uint32_t crc32c(std::uint32_t before, std::byte const* bytes, std::size_t size) noexcept
{
    auto const& table  = crc32c_tables;
    std::uint64_t x    = ~before;
    std::size_t number = 0;
    for (; number + 8 <= size; number += 8)
    {
        auto const eight = load_bytes<std::uint64_t>(bytes + number);
#if defined(__SSE4_2__) && defined(__x86_64__)
        x = __builtin_ia32_crc32di(x, eight);
#else
        std::uint64_t const y = x ^ eight;
        x                     = 0;
        for (unsigned k = 0; k < 8; ++k) { x ^= table[7 - k][y >> 8U * k & 0xffU]; }
#endif
    }
    auto last = static_cast<std::uint32_t>(x);
    for (; number < size; ++number)
    {
        last = last >> 8U ^ table[0][(last ^ static_cast<std::uint32_t>(bytes[number])) & 0xffU];
    }
    return ~last;
}

/// The next multiple of the alignment.
[[nodiscard]] constexpr index_t aligned(index_t x)
{
    return checked_add(x, stored_alignment - 1) / stored_alignment * stored_alignment;
}

/// Tokens in a cache's tail.
template <class T>
[[nodiscard]] index_t appended_tokens(cache_view<T, space::host> const& cache) noexcept
{
    return cache.layout.heads == 0 ? 0 : std::min(*cache.appended, cache.tail_capacity);
}

/// Where the attachment ends, for checked counts.
[[nodiscard]] constexpr index_t end_of_attachment(file_header const& file)
{
    return checked_add(index_t{sizeof file} + file.layers * index_t{sizeof(layer_record)}, file.attachment);
}

/// Where the parts of a layer begin, from numbers that layout_of has checked.
struct layer_parts
{
    index_t positions, arena, tail, end;

    constexpr layer_parts(layer_record const& layer, cache_layout const& layout, index_t element_bytes)
        : positions{checked_add(layer.begin, layout.heads * index_t{sizeof(head_entry)})}
        , arena{aligned(checked_add(positions, layout.heads * layer.slot_count * index_t{sizeof(std::int32_t)}))}
        , tail{aligned(checked_add(arena, layer.arena_bytes))}
        , end{checked_add(tail, layout.tail_bytes(layer.appended, element_bytes))}
    {}
};

/// Messages of checks begin with `call` and the number of a layer.
inline void expects_in(char const* call, index_t layer, char const* name, index_t x, index_t least, index_t most)
{
    expects(x >= least && x <= most, call, layer, ": ", name, " is ", x, "; it must lie in [", least, ", ", most, "]");
}

/// Checks a header's layers, heads, tokens and attachment.
inline void expects_place(char const* call, file_header const& file)
{
    expects_in(call, file.first_layer, "the number of layers", file.layers, 0, INT32_MAX);
    expects_in(call, file.first_layer, "model_layers", file.model_layers, file.layers, INT64_MAX);
    expects_in(call, file.first_layer, "first_layer", file.first_layer, 0, file.model_layers - file.layers);
    expects_in(call, file.first_layer, "the number of heads", file.heads, 0, most_extent);
    expects_in(call, file.first_layer, "model_heads", file.model_heads, file.heads, INT64_MAX);
    expects_in(call, file.first_layer, "first_head", file.first_head, 0, file.model_heads - file.heads);
    expects_in(call, file.first_layer, "tokens", file.tokens, 0, INT32_MAX);
    expects_in(call, file.first_layer, "the attachment's size", file.attachment, 0, INT64_MAX);
}

/// The layout of a layer's record, all of whose numbers are checked but `begin`.
/// \throws invalid_argument   no ratio set makes such a layout, or a number is out of its range
[[nodiscard]] inline cache_layout layout_of(char const* call, index_t layer, layer_record const& from, index_t heads)
{
    expects_in(call, layer, "the number of slots with a position", from.slot_count, 0, INT32_MAX);
    expects_in(call, layer, "the size of the arena", from.arena_bytes, 0, INT64_MAX);
    expects_in(call, layer, "the number of appended tokens", from.appended, 0, INT32_MAX);
    expects_in(call, layer, "the window", from.window, 0, INT32_MAX);
    expects_in(call, layer, "the dimension of keys", from.key_dim, heads > 0 ? 1 : 0, most_extent);
    expects_in(call, layer, "the dimension of values", from.value_dim, heads > 0 ? 1 : 0, most_extent);
    expects_in(call, layer, "the number of rungs", from.rungs, 0, max_rungs);
    cache_layout to;
    to.heads        = heads;
    to.window       = from.window;
    to.dims         = {from.key_dim, from.value_dim};
    to.rungs        = from.rungs;
    to.full_rung    = from.rungs;
    to.stand_in_run = from.stand_in_run;
    to.scale        = float_of_bits(from.scale);
    expects_not_negative(call, "the layer's scale", to.scale);
    for (std::size_t r = 0; r < to.rungs; ++r)
    {
        auto const [keys, values] = head_dims{from.keys[r], from.values[r]};
        bool const all            = keys == from.key_dim && values == from.value_dim;
        bool const some           = keys >= 1 && keys <= from.key_dim && values >= 1 && values <= from.value_dim;
        bool const plain          = from.kinds[r] == 0 && from.in_basis[r] == 0;
        bool const dropped        = plain && r == 0 && keys == 0 && values == 0;
        expects(from.kinds[r] <= 2 && from.in_basis[r] <= 1 && (from.in_basis[r] == 1 ? some : all || dropped)
                    && !(plain && all && to.full_rung < r),
            call, layer, ": there is no rung that stores ", keys, " and ", values, " coordinates like number ", r);
        if (plain && all) { to.full_rung = r; }
        to.key_coordinates[r]   = keys;
        to.value_coordinates[r] = values;
        to.kinds[r]             = static_cast<storage>(from.kinds[r]);
        to.in_basis[r]          = from.in_basis[r] == 1;
    }
    expects(to.stand_ins_fit(), call, layer, ": stand-ins are at rung ", to.stand_in_run,
        ", which stores no whole vectors in a run of its own");
    return to;
}

/// The record of a layer that begins at the next multiple of 64.
template <class T>
[[nodiscard]] layer_record record_of(
    cache_view<T, space::host> const& cache, view<std::int32_t const, 2, space::host> const& positions, index_t at)
{
    cache_layout const layout = cache.layout.heads == 0 ? cache_layout{} : cache.layout;
    layer_record to{aligned(at), positions.empty() ? 0 : positions.extent(1), cache.arena_bytes, appended_tokens(cache),
        layout.window, layout.dims.keys, layout.dims.values, static_cast<std::uint32_t>(layout.rungs),
        static_cast<std::uint32_t>(layout.stand_in_run), bits_of_float(layout.scale), 0, {}, {}, {}, {}};
    for (std::size_t r = 0; r < layout.rungs; ++r)
    {
        to.keys[r]     = static_cast<std::int32_t>(layout.key_coordinates[r]);
        to.values[r]   = static_cast<std::int32_t>(layout.value_coordinates[r]);
        to.kinds[r]    = static_cast<std::uint8_t>(layout.kinds[r]);
        to.in_basis[r] = static_cast<std::uint8_t>(layout.in_basis[r]);
    }
    return to;
}

/// Checks that a layer's directory is the one that its layout and its numbers of tokens give, and lies inside of the arena; that
/// a text of `tokens` tokens, unless it is none, has all that a head holds; and that positions, if there are any, are those of
/// its tokens, or -1.
/// \throws invalid_argument   naming the head
template <element T>
void expects_layer(char const* call, index_t layer, cache_view<T const, space::host> const& cache,
    view<std::int32_t const, 2, space::host> const& positions, index_t tokens)
{
    cache_layout const& layout = cache.layout;
    index_t offset             = 0;
    index_t most               = 0; // slots of a head
    for (index_t h = 0; h < layout.heads; ++h)
    {
        // A number that is none of tokens is clamped, and the entry that is made from it is another one.
        auto const clamped      = [](index_t n) { return std::clamp(n, index_t{0}, index_t{INT32_MAX}); };
        head_entry const given  = cache.heads[h];
        index_t const stand_ins = clamped(given.stand_ins);
        auto const slots_of     = [&](run_entry const& run, std::size_t r) {
            return clamped(clamped(run.tokens) - (r == layout.stand_in_run ? stand_ins : 0));
        };
        index_t const exact = slots_of(given.exact, layout.rungs);
        index_t slots       = exact + appended_tokens(cache);
        array<index_t, max_rungs> at_rung{};
        for (std::size_t r = 0; r < layout.rungs; ++r)
        {
            if (layout.own_run(r)) { slots += at_rung[r] = slots_of(given.runs[r], r); }
            if (r == layout.full_rung) { at_rung[r] = clamped(exact - layout.window); }
        }
        head_entry right;
        offset = lay_out_head<T>(layout, at_rung, offset, right, stand_ins);
        expects(right == given && offset <= cache.arena_bytes, call, layer, ": the directory's entry of head ", h,
            " is none that the layout gives inside of an arena of ", cache.arena_bytes, " bytes");
        most = std::max(most, slots);
    }
    index_t const limit = tokens > 0 ? tokens : INT32_MAX;
    expects(most <= limit, call, layer, ": a head holds ", most, " tokens; place.tokens allows ", limit);
    expects(positions.empty() || (positions.extent(0) == layout.heads && positions.extent(1) >= most), call, layer,
        ": positions [H, S] are [", positions.extent(0), ", ", positions.extent(1), "]; the cache has ", layout.heads,
        " heads of at most ", most, " slots");
    for (index_t h = 0; h < positions.extent(0); ++h)
    {
        std::span const row{positions.row(h), static_cast<std::size_t>(positions.extent(1))};
        bool good = true;
        for (std::int32_t const x : row) { good = good & (x >= -1) & (x < tokens); } // no branch: compared by vectors
        expects(
            good, call, layer, ": a position of head ", h, " lies outside of [-1, ", tokens, "), the text's tokens");
    }
}

} // namespace MDKV_NAMESPACE::detail
