/// \file code_value_kernels.hpp: the weighted sums of a block of values stored as codes, in products of integers (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/detail/attention_kernels.hpp>
#include <mdkv/cpu/detail/code_kernels.hpp>
#include <mdkv/cpu/detail/rounding.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/run_of_head.hpp>

#include <algorithm>
#include <cstddef>

namespace MDKV_NAMESPACE::cpu::detail
{

/// A group's codes in neighbouring tiles of values.
struct coded_columns
{
    std::byte const* begin; ///< codes of the first tile
    index_t tile_bytes;
    index_t tiles;
    index_t coordinates; ///< coordinates of the group
    index_t bytes;       ///< bytes of one token's codes
};

/// For each head and each half of the codes: adds `vectors` vectors of columns from byte b on, but none past the half's end.
MDKV_OUTLINE inline void add_ragged(simd::floats const* more, int heads, int halves, int vectors, index_t b,
    coded_columns const& from, sum_rows const& sums) noexcept
{
    for (index_t i = 0; i < heads * halves; ++i, more += vectors)
    {
        index_t const first = i % halves * from.bytes;
        index_t const n     = (std::min)(from.bytes, from.coordinates - first) - b;
        float* const to     = sums.x + i / halves * sums.step + first + b;
        for (index_t c = 0; c < (std::min<index_t>)(n, vectors * simd::lanes); ++c)
        {
            to[c] += more[c / simd::lanes][c % simd::lanes];
        }
    }
}

/// sums[g][c] += unit[g] * (sum over tokens of number[g][t] * code[t][c]) + bias[g] for all columns, `Vectors` vectors at
/// a time; a lane of 32 bits holds the codes of four tokens in one column.
template <int Bits, int G, int Vectors>
[[gnu::noinline]] void coded_sums(
    rounded_weights const& weights, coded_columns const& from, sum_rows const& sums, read_ahead& ahead) noexcept
{
    using products          = code_sums<Bits>;
    constexpr int lanes     = simd::lanes;
    constexpr int halves    = 8 / Bits;
    constexpr int size      = number_bytes<Bits>;
    constexpr int count     = G * halves * Vectors;
    constexpr short least   = short_sums<Bits> ? least_short : 0;
    constexpr index_t asked = 4 * Vectors * lanes; // bytes prefetched for each four tokens but the first
    // Both halves of 4-bit codes have the same numbers. Halves of 8-bit codes have their own: one at a time needs fewer registers.
    constexpr int steps          = Bits == 8 ? 2 : 1;
    constexpr index_t head_bytes = sizeof weights.numbers[0];
    index_t const row_bytes      = 4 * from.bytes;
    index_t const ends           = from.coordinates - (halves - 1) * from.bytes; // columns of the half that ends first
    read_ahead next              = ahead;
    for (index_t b = 0; b < from.bytes; b += Vectors * lanes)
    {
        products acc[std::size_t{G}][std::size_t{halves}][std::size_t{Vectors}];
        MDKV_UNROLL
        for (int i = 0; i < count; ++i)
        {
            products& sum = acc[i / Vectors / halves][i / Vectors % halves][i % Vectors];
            if constexpr (short_sums<Bits>) { sum = products{} + least; }
            else { sum = products{}; }
        }
        std::byte const* tile   = from.begin + 4 * b;
        std::byte const* number = weights.numbers[0];
        for (index_t done = 0; done < from.tiles; ++done, tile += from.tile_bytes)
        {
            std::byte const* at = tile;
            MDKV_UNROLL
            for (int four = 0; four < tile_tokens; four += 4, at += row_bytes, number += 4 * size)
            {
                if (asked >= 64 ? four > 0 : four % 8 == 4) { next.fetch(asked >= 64 ? asked : asked * 3 / 2); }
                MDKV_UNROLL
                for (int step = 0; step < steps; ++step)
                {
                    simd::ints code[std::size_t{halves}][std::size_t{Vectors}];
                    MDKV_UNROLL
                    for (int i = 0; i < halves * Vectors; ++i)
                    {
                        code[i / Vectors][i % Vectors] =
                            unpack<Bits>(at + 4 * (i % Vectors) * lanes, step + i / Vectors);
                    }
                    MDKV_UNROLL
                    for (int g = 0; g < G; ++g)
                    {
                        simd::ints const by = simd::words(number + g * head_bytes + 4 * step);
                        MDKV_UNROLL
                        for (int i = 0; i < halves * Vectors; ++i)
                        {
                            int const h = i / Vectors;
                            int const v = i % Vectors;
                            if constexpr (Bits == 8) { multiply<Bits, false>(acc[g][h][v], code[h][v], by); }
                            else { multiply<Bits, false>(acc[g][h][v], by, code[h][v]); }
                        }
                    }
                }
            }
        }
        auto const sum_of = [&](int i) __attribute__((always_inline))
        {
            int const g = i / Vectors / halves;
            return simd::to_floats(simd::widened(acc[g][i / Vectors % halves][i % Vectors]) - 2 * least)
                       * simd::broadcast(weights.unit[g])
                   + simd::broadcast(weights.bias[g]);
        };
        if (b + Vectors * lanes <= ends)
        {
            MDKV_UNROLL
            for (int i = 0; i < count; ++i)
            {
                float* const to = sums.x + i / Vectors / halves * sums.step + i / Vectors % halves * from.bytes + b
                                  + i % Vectors * lanes;
                simd::store(to, simd::load(to) + sum_of(i));
            }
            continue;
        }
        simd::floats more[std::size_t{count}];
        MDKV_UNROLL
        for (int i = 0; i < count; ++i) { more[i] = sum_of(i); }
        add_ragged(more, G, halves, Vectors, b, from, sums);
    }
    ahead = next;
}

using coded_kernel = void(rounded_weights const&, coded_columns const&, sum_rows const&, read_ahead&) noexcept;

using rounding_kernel = void(
    query_rows const&, std::byte const*, index_t, index_t, index_t, rounded_weights&, read_ahead&) noexcept;

/// The kernels of a pass, for the most vectors that registers allow.
struct coded_pass
{
    index_t columns; ///< bytes of a token's codes done at a time
    coded_kernel* kernel;
    rounding_kernel* rounding;
};
inline constexpr int most_coded_vectors = 4;
template <int Bits, int Pass>
[[nodiscard]] constexpr coded_pass coded_sums_of() noexcept
{
    constexpr int G    = (std::min)(heads_of_pass[Pass], most_coded_heads);
    constexpr int most = simd::registers / 2 * Bits / 8 / G / sum_registers<Bits>;
    constexpr int vectors =
        std::clamp(most, 1, Bits == 4 && simd::registers < 8 * simd::lanes ? 2 : most_coded_vectors);
    return {vectors * simd::lanes, &coded_sums<Bits, G, vectors>, &round_weights<Bits, G>};
}
template <int Bits>
inline constexpr coded_pass coded_sums_as[coded_passes]{
    coded_sums_of<Bits, 0>(), coded_sums_of<Bits, 1>(), coded_sums_of<Bits, 2>(), coded_sums_of<Bits, 3>()};

/// Bytes that a kernel may read beyond a group's codes.
inline constexpr index_t most_read_beyond = most_coded_vectors * index_t{sizeof(simd::ints)};

/// Bytes that coded_block_values needs for copies of tiles: the last tile, and tiles so close to a run's end that a kernel
/// might read beyond it.
[[nodiscard]] constexpr index_t copy_bytes(index_t token_bytes) noexcept
{
    return 2 * tile_tokens * token_bytes + 2 * most_read_beyond;
}

/// block_values for codes; `copy` holds copy_bytes of the token's bytes.
MDKV_OUTLINE inline void coded_block_values(coded_pass const* as, query_rows const& weights, index_t head_rows,
    run_rows const& values, index_t t, index_t n, sum_rows const& sums, read_ahead ahead, std::byte* copy) noexcept
{
    index_t const tile_bytes = tile_tokens * values.token_bytes;
    index_t const tiles      = (n + tile_tokens - 1) / tile_tokens;
    // A narrow last tile is copied, and so are tiles before it from which a kernel might read beyond the run.
    bool const ragged =
        values.group(t, values.groups() - 1).bytes % as[0].columns != 0; // otherwise no kernel reads beyond a group
    index_t whole     = n / tile_tokens;
    auto const behind = [&] { return (values.stored - t - whole * tile_tokens) * values.token_bytes; };
    while (ragged && whole > 0 && behind() < 4 * as[0].columns) { --whole; }
    for (index_t i = whole; i < tiles; ++i)
    {
        widen_tile(values, t + i * tile_tokens, copy + (i - whole) * tile_bytes);
    }
    for (index_t g = 0; g < head_rows;)
    {
        int const pass      = pass_of(head_rows - g, most_coded_heads);
        index_t const heads = heads_of_pass[pass];
        read_ahead next     = ahead;
        auto const from     = weights.from(g);
        sum_rows to{sums.x + g * sums.step, sums.step};
        for (int k = 0; k < values.groups(); ++k, to.x += quantised_group)
        {
            mdkv::detail::coded_group const codes{values.coordinates, k, tile_tokens, true, values.kind};
            auto const add_tiles = [&](std::byte const* begin, index_t first, index_t count) {
                rounded_weights rounded;
                as[pass].rounding({from.x + first * tile_tokens, from.step}, begin + codes.scales, tile_bytes,
                    count * tile_tokens, codes.bytes, rounded, next);
                coded_columns const columns{begin + codes.codes, tile_bytes, count, codes.coordinates, codes.bytes};
                as[pass].kernel(rounded, columns, to, next);
            };
            constexpr index_t at_once = rounded_tokens / tile_tokens;
            for (index_t i = 0; i < whole; i += at_once)
            {
                add_tiles(values.begin + values.tile(t) + i * tile_bytes, i, (std::min)(at_once, whole - i));
            }
            if (whole < tiles) { add_tiles(copy, whole, tiles - whole); }
        }
        g += heads;
    }
}

} // namespace MDKV_NAMESPACE::cpu::detail
