/// \file tile_codec.hpp: codes of a tile: sixteen tokens by up to 64 coordinates, as columns x[coordinate][token], rotated, rounded, and back; the bytes of codes.
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/detail/columns.hpp>
#include <mdkv/detail/hadamard.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/quantiser.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/team.hpp>

#include <type_traits>

namespace MDKV_NAMESPACE::detail
{

/// x := H (x - mean) * factor, what codes of whole vectors store. All members have seen x, and all see the result.
/// \param factor  of each coordinate; null: 1
template <team Team>
MDKV_OUTLINE MDKV_HD void rotate(Team const& t, float* x, int n, float const* mean, float const* factor)
{
    using floats = lane_floats<Team::register_lanes>;
    for_coordinates(t, n, [&](int j, int i) {
        floats const centred = load_lanes<floats>(x + j * tile_tokens + i) - mean[j];
        store_lanes(x + j * tile_tokens + i, factor == nullptr ? centred : centred * factor[j]);
    });
    t.sync();
    hadamard<tile_tokens>(t, x, n);
}
/// x := H x * factor + mean, the inverse for an inverse factor. Members see the coordinates that for_coordinates gives them.
template <team Team>
MDKV_OUTLINE MDKV_HD void rotate_back(Team const& t, float* x, int n, float const* mean, float const* factor)
{
    using floats = lane_floats<Team::register_lanes>;
    t.sync();
    hadamard<tile_tokens>(t, x, n);
    for_coordinates(t, n, [&](int j, int i) {
        store_lanes(x + j * tile_tokens + i, load_lanes<floats>(x + j * tile_tokens + i) * factor[j] + mean[j]);
    });
}

/// Bytes of codes as a number, 4 or 1.
template <int Bytes>
using code_word = std::conditional_t<Bytes == 4, std::uint32_t, std::uint8_t>;

/// Goes over a group's codes in one tile, four neighbours at a time if they lie together: body(byte, first, step, count)
/// for `count` bytes, an integral constant, that begin `byte` behind the first code. The bytes are numbers first, first +
/// step, ... in [bytes, tile_tokens].
MDKV_HD void for_codes(team auto const& t, coded_group const& group, auto const& body)
{
    constexpr int tile   = tile_tokens;
    int const neighbours = group.by_token ? group.width : group.bytes;
    int const others     = group.by_token ? group.bytes : group.width;
    int const step       = group.by_token ? 1 : tile;
    int const other_step = group.by_token ? tile : 1;
    auto const go_over   = [&](int i, auto count) {
        for (int o = member(t); o < others; o += members(t))
        {
            body(i * others + decltype(count)::value * o, i * step + o * other_step, step, count);
        }
    };
    int i = 0;
    for (; i + 4 <= neighbours; i += 4) { go_over(i, std::integral_constant<int, 4>{}); }
    for (; i < neighbours; ++i) { go_over(i, std::integral_constant<int, 1>{}); }
}

/// Writes the codes of a group's coordinates of a tile's first `count` tokens. x is used up.
/// \param minimum, scale  [16]  scratch of the team
template <team Team>
MDKV_OUTLINE MDKV_HD void write_codes(
    Team const& t, float* x, coded_group const& group, int count, float* minimum, float* scale, std::byte* to)
{
    constexpr int tile  = tile_tokens;
    constexpr int lanes = Team::register_lanes;
    using floats        = lane_floats<lanes>;
    auto const most     = static_cast<float>(most_code(group.kind));
    for (int i = member(t) * lanes; i < tile; i += members(t) * lanes)
    {
        quantiser<lanes> const q = column_bounds<lanes>{x + i, group.coordinates, tile}.fitted(group.kind);
        store_lanes(minimum + i, q.minimum);
        store_lanes(scale + i, q.inverse);
        float steps[std::size_t{lanes}];
        store_lanes(steps, q.scale);
        for (int l = 0; l < lanes && i + l < count; ++l)
        {
            store_at(to + group.scale(i + l), narrow<half>(steps[l]));
            store_at(to + group.minimum(i + l), narrow<half>(minimum[i + l]));
        }
    }
    t.sync();
    for (int i = member(t) * lanes; i < group.bytes * tile; i += members(t) * lanes)
    {
        quantiser<lanes> q;
        q.minimum       = load_lanes<floats>(minimum + i % tile);
        q.inverse       = load_lanes<floats>(scale + i % tile);
        floats code     = q.codes(load_lanes<floats>(x + i), most);
        int const other = i + group.bytes * tile; // for 4 bits, the code in the byte's upper half
        if (group.kind == storage::int4 && other < group.coordinates * tile)
        {
            code += 16.0F * q.codes(load_lanes<floats>(x + other), most);
        }
        store_lanes(x + i, code);
    }
    t.sync();
    for_codes(t, group, [&](int byte, int start, int step, auto number) {
        std::uint32_t word = 0;
        for (int k = 0; k < decltype(number)::value; ++k)
        {
            word |= static_cast<std::uint32_t>(static_cast<int>(x[start + k * step])) << 8 * k;
        }
        store_at(to + group.codes + byte, static_cast<code_word<decltype(number)::value>>(word));
    });
}

/// Reads the codes of a group's coordinates of a tile's tokens as numbers; those of missing tokens are 0.
/// \param minimum, scale  [16]  scratch of the team
template <team Team>
MDKV_OUTLINE MDKV_HD void read_codes(
    Team const& t, std::byte const* from, coded_group const& group, float* minimum, float* scale, float* x)
{
    constexpr int tile  = tile_tokens;
    constexpr int lanes = Team::register_lanes;
    using floats        = lane_floats<lanes>;
    for (int i = member(t); i < tile; i += members(t))
    {
        bool const in_range = i < group.width;
        minimum[i]          = in_range ? widen(load_at<half>(from + group.minimum(i))) : 0.0F;
        scale[i]            = in_range ? widen(load_at<half>(from + group.scale(i))) : 0.0F;
    }
    if (group.width < tile) // a short tile has codes of 16 tokens, too
    {
        for (int i = member(t); i < group.bytes * tile; i += members(t)) { x[i] = 0.0F; }
        t.sync();
    }
    for_codes(t, group, [&](int byte, int first, int step, auto number) {
        auto const word = load_at<code_word<decltype(number)::value>>(from + group.codes + byte);
        std::uint8_t codes[sizeof word];
        __builtin_memcpy(codes, &word, sizeof word);
        for (int k = 0; k < decltype(number)::value; ++k) { x[first + k * step] = static_cast<float>(codes[k]); }
    });
    t.sync();
    for (int i = member(t) * lanes; i < group.bytes * tile; i += members(t) * lanes)
    {
        quantiser<lanes> q;
        q.minimum   = load_lanes<floats>(minimum + i % tile);
        q.scale     = load_lanes<floats>(scale + i % tile);
        floats code = load_lanes<floats>(x + i);
        if (group.kind == storage::int4)
        {
            floats const upper = cut_off(code * 0.0625F);
            int const other    = i + group.bytes * tile;
            if (other < group.coordinates * tile) { store_lanes(x + other, q.values(upper)); }
            code -= 16.0F * upper;
        }
        store_lanes(x + i, q.values(code));
    }
}

} // namespace MDKV_NAMESPACE::detail
