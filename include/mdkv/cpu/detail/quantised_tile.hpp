/// \file quantised_tile.hpp: one tile of a quantised run: sixteen tokens' coordinates written as codes, one token's read back.
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/detail/transpose.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/detail/quantiser.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace mdkv::cpu::detail
{

/// How the codes of a group lie: those of keys coordinate by coordinate, those of values token by token.
enum class code_order : std::uint8_t
{
    by_coordinate,
    by_token
};

/// What a tile of a quantised run looks like.
struct coded_form
{
    storage kind;
    code_order order;
    index_t width; ///< tokens in the tile
};

/// Byte offsets of one group within its tile.
struct group_place
{
    index_t coordinates; ///< of the group
    index_t bytes;       ///< of one token's codes
    index_t scales;      // [width] half
    index_t minima;      // [width] half
    index_t codes;       // [bytes, width] or [width, bytes]

    /// The group that begins at coordinate `first` of vectors of r coordinates.
    group_place(coded_form const& form, index_t first, index_t r) noexcept
        : coordinates{std::min(quantised_group, r - first)}
        , bytes{form.kind == storage::int8 ? coordinates : (coordinates + 1) / 2}
        , scales{form.width * stored_bytes(form.kind, first, 0)}
        , minima{scales + form.width * index_t{sizeof(half)}}
        , codes{minima + form.width * index_t{sizeof(half)}}
    {}
};

/// One group of sixteen tokens, quantised.
class coded_group
{
public:
    half scales[tile_tokens];                         // [token]
    half minima[tile_tokens];                         // [token]
    std::uint8_t codes[quantised_group][tile_tokens]; // [byte of a token][token]

    /// columns[c][t] for c < coordinates <= quantised_group
    coded_group(float const (*columns)[tile_tokens], index_t coordinates, storage kind) noexcept
    {
        fit(columns, coordinates, kind);
        for (int at = 0; at < int{tile_tokens}; at += simd::lanes)
        {
            if (kind == storage::int8)
            {
                for (index_t c = 0; c < coordinates; ++c) { put(c, at, code(columns[c], at, kind)); }
                continue;
            }
            index_t const half_way = (coordinates + 1) / 2;
            for (index_t c = 0; c < half_way; ++c)
            {
                simd::ints byte = code(columns[c], at, kind);
                if (c + half_way < coordinates) { byte += code(columns[c + half_way], at, kind) << 4; }
                put(c, at, byte);
            }
        }
    }

private:
    using lane_bytes = std::uint8_t __attribute__((vector_size(simd::lanes)));

    float minimum_[tile_tokens];
    float inverse_[tile_tokens];

    /// The quantiser of every token, by the same operations as mdkv::detail::quantiser.
    void fit(float const (*columns)[tile_tokens], index_t coordinates, storage kind) noexcept
    {
        simd::floats const zero    = simd::broadcast(0.0F);
        simd::floats const largest = simd::broadcast(mdkv::detail::largest_half);
        simd::floats const most    = simd::broadcast(static_cast<float>(mdkv::detail::most_code(kind)));
        for (int at = 0; at < int{tile_tokens}; at += simd::lanes)
        {
            simd::floats low    = simd::load(columns[0] + at);
            simd::floats high   = low;
            simd::floats spoilt = low * zero; // NaN where a coordinate is NaN or infinite: the comparisons may miss it
            for (index_t c = 1; c < coordinates; ++c)
            {
                simd::floats const x = simd::load(columns[c] + at);
                low                  = simd::min(low, x);
                high                 = simd::max(high, x);
                spoilt += x * zero;
            }
            low                        = simd::max(simd::min(low, largest), -largest);
            high                       = simd::max(simd::min(high, largest), -largest);
            simd::floats const minimum = rounded(low + spoilt, minima + at);
            simd::floats const step    = rounded((high - minimum) / most, scales + at);
            simd::floats const scale   = rounded((step > zero ? step : zero) + spoilt, scales + at);
            simd::store(minimum_ + at, minimum);
            simd::store(inverse_ + at, scale > zero ? simd::broadcast(1.0F) / scale : zero);
        }
    }

    /// Writes x as halves, and says what they are.
    [[nodiscard]] static simd::floats rounded(simd::floats x, half* to) noexcept
    {
        simd::narrow_to(to, x);
        return simd::load(to);
    }

    /// The codes of the tokens from `at` on; 0 where the quantiser is NaN.
    [[nodiscard]] simd::ints code(float const* column, int at, storage kind) const noexcept
    {
        auto const most          = static_cast<float>(mdkv::detail::most_code(kind));
        simd::floats const x     = simd::load(column + at);
        simd::floats const exact = (x - simd::load(minimum_ + at)) * simd::load(inverse_ + at) + simd::broadcast(0.5F);
        return __builtin_convertvector(
            simd::min(simd::max(exact, simd::broadcast(0.0F)), simd::broadcast(most)), simd::ints);
    }

    void put(index_t byte, int at, simd::ints wide) noexcept
    {
        lane_bytes const narrowed = __builtin_convertvector(wide, lane_bytes);
        std::memcpy(codes[byte] + at, &narrowed, sizeof narrowed);
    }
};

/// Copies a group's codes token by token: to[t][b] = codes[b][t].
inline void write_by_token(coded_group const& group, index_t bytes, index_t width, std::byte* to) noexcept
{
    using line = square<1>::line;
    for (index_t b = 0; b < bytes; b += tile_tokens)
    {
        line x[tile_tokens];
        std::memcpy(x, group.codes[b], sizeof x);
        transpose(x);
        auto const n = static_cast<std::size_t>(std::min(tile_tokens, bytes - b));
        for (index_t t = 0; t < width; ++t) { std::memcpy(to + t * bytes + b, &x[t], n); }
    }
}

/// Writes coordinates [first, first + n) of a tile; first is a multiple of quantised_group, and so is n unless these are
/// the last. `columns` holds sixteen tokens side by side, also where the tile is narrower: columns[c][t] is coordinate
/// first + c. The tile may lie at any address.
inline void write_codes(
    float const (*columns)[tile_tokens], index_t first, index_t n, coded_form const& form, std::byte* tile) noexcept
{
    auto const halves = static_cast<std::size_t>(form.width) * sizeof(half);
    for (index_t c = 0; c < n; c += quantised_group)
    {
        group_place const place{form, first + c, first + n};
        coded_group const group{columns + c, place.coordinates, form.kind};
        std::memcpy(tile + place.scales, group.scales, halves);
        std::memcpy(tile + place.minima, group.minima, halves);
        if (form.order == code_order::by_token)
        {
            write_by_token(group, place.bytes, form.width, tile + place.codes);
            continue;
        }
        for (index_t b = 0; b < place.bytes; ++b)
        {
            std::memcpy(tile + place.codes + b * form.width, group.codes[b], static_cast<std::size_t>(form.width));
        }
    }
}

/// Reads token t of a tile of vectors of r coordinates, at any address: out[c] for c < r.
inline void read_codes(std::byte const* tile, coded_form const& form, index_t t, index_t r, float* out) noexcept
{
    auto const half_at = [&](index_t offset) {
        half value;
        std::memcpy(static_cast<void*>(&value), tile + offset + t * index_t{sizeof(half)}, sizeof value);
        return widen(value);
    };
    for (index_t first = 0; first < r; first += quantised_group)
    {
        group_place const place{form, first, r};
        mdkv::detail::quantiser group;
        group.scale   = half_at(place.scales);
        group.minimum = half_at(place.minima);
        for (index_t c = 0; c < place.coordinates; ++c)
        {
            bool const upper = c >= place.bytes; // int4: the high half of a byte
            index_t const b  = upper ? c - place.bytes : c;
            std::byte const byte =
                tile[place.codes + (form.order == code_order::by_token ? t * place.bytes + b : b * form.width + t)];
            auto const whole = std::to_integer<int>(byte);
            out[first + c]   = group.value(form.kind == storage::int8 ? whole : upper ? whole >> 4 : whole & 15);
        }
    }
}

} // namespace mdkv::cpu::detail
