/// \file code_kernels.hpp: attention over a block of tokens stored as codes, in products of integers: logits and weighted sums of values (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/cpu/detail/attention_kernels.hpp>
#include <mdkv/cpu/detail/products.hpp>
#include <mdkv/cpu/detail/rounding.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/run_of_head.hpp>

#include <algorithm>

namespace MDKV_NAMESPACE::cpu::detail
{

struct byte_range
{
    index_t begin;
    index_t end;
};

/// Adds the products with bytes `range` of group k, its last and fewer than 16, to the logits of a vector of tokens. `at`
/// is the address of these bytes in the vector's tile, and `first` the vector's first token in the tile.
template <int Bits>
MDKV_OUTLINE void last_logits(query_rows const& q, int heads, int k, byte_range range, std::byte const* at,
    index_t first, std::byte const* scales, sum_rows const& logits) noexcept
{
    index_t const fours = (range.end - range.begin) / 4 * 4; // bytes, by fours
    for (int g = 0; g < heads; ++g)
    {
        rounded_query const& query = q.rounded[k * q.rows + g];
        float* const to            = logits.x + g * logits.step;
        simd::ints sum{};
        for (index_t i = 0; i < range.end - range.begin; ++i)
        {
            std::byte const* const row = at + i / 4 * 4 * tile_tokens;
            std::byte const* const one = row + (i - fours) * tile_tokens + first; // a byte beyond the last whole four
            simd::ints const code      = i < fours
                                             ? simd::read<simd::ints>(row + first * 4) >> static_cast<int>(i % 4 * 8) & 0xff
                                             : __builtin_convertvector(simd::read<simd::bytes>(one), simd::ints);
            index_t const c            = range.begin + i;
            sum += (Bits == 8 ? code : code & 15) * query.template number<Bits>(c);
            if (Bits == 4) { sum += (code >> 4) * query.template number<Bits>(c + quantised_group / 2); }
        }
        simd::store(to, simd::load(to) + load_halves(scales) * (simd::to_floats(sum) * simd::broadcast(query.unit)));
    }
}

/// Writes the logits of neighbouring whole tiles, added group by group, for G queries, `Vectors` vectors of tokens at a
/// time. Returns the number of tiles done, at most `tiles`: fewer than `Vectors` vectors are left undone.
template <int Bits, int G, int Vectors>
[[gnu::noinline]] index_t coded_logits(query_rows const& q, run_rows const& keys, std::byte const* tile, index_t tiles,
    sum_rows const& logits, read_ahead& ahead) noexcept
{
    constexpr int lanes      = simd::lanes;
    constexpr int of_tile    = int{tile_tokens} / lanes; // vectors of a tile
    constexpr int at_once    = Vectors / of_tile;        // tiles at a time
    constexpr int size       = number_bytes<Bits>;
    constexpr index_t second = Bits == 8 ? 4 : quantised_group / 2; // bytes between the halves' numbers
    constexpr index_t fours  = 4 * tile_tokens;                     // bytes
    constexpr index_t halves = tile_tokens * index_t{sizeof(half)};
    static_assert(Vectors % of_tile == 0);
    index_t const tile_bytes = tile_tokens * keys.token_bytes;
    index_t const tokens     = tiles / at_once * at_once * tile_tokens; // tokens done here
    read_ahead next          = ahead;
    float* row[std::size_t{G}];
    MDKV_UNROLL
    for (int g = 0; g < G; ++g)
    {
        row[g] = logits.x + g * logits.step;
        std::fill_n(row[g], tokens, 0.0F);
    }
    for (int k = 0; k < keys.groups(); ++k)
    {
        mdkv::detail::coded_group const group{keys.coordinates, k, tile_tokens, false, keys.kind};
        rounded_query const* const query = q.rounded + k * q.rows; // query of the first head
        index_t const whole              = group.bytes & -16;
        std::byte const* scales          = tile + group.scales;
        for (index_t t = 0; t < tokens; t += Vectors * lanes, scales += at_once * tile_bytes)
        {
            auto const offset = [&](int v, index_t unit) { // vector v in its row of the tiles
                return v / of_tile * tile_bytes + v % of_tile * lanes * unit;
            };
            std::byte const* at = scales + 2 * halves;
            next.fetch(4 * Vectors * lanes); // scales and minima
            code_sums<Bits> sums[std::size_t{G}][std::size_t{Vectors}]{};
            for (index_t c = 0; c < whole; c += 16)
            {
                MDKV_UNROLL
                for (index_t i = c; i < c + 16; i += 4, at += fours)
                {
                    next.fetch(4 * Vectors * lanes);
                    simd::ints code[2][std::size_t{Vectors}];
                    MDKV_UNROLL
                    for (int j = 0; j < 2 * Vectors; ++j)
                    {
                        code[j / Vectors][j % Vectors] = unpack<Bits>(at + offset(j % Vectors, 4), j / Vectors);
                    }
                    MDKV_UNROLL
                    for (int j = 0; j < 2 * G; ++j)
                    {
                        simd::ints const number = simd::words(query[j / 2].numbers + i * size + j % 2 * second);
                        MDKV_UNROLL
                        for (int v = 0; v < Vectors; ++v)
                        {
                            multiply<Bits, true>(sums[j / 2][v], code[j % 2][v], number);
                        }
                    }
                }
            }
            simd::floats scale[std::size_t{Vectors}];
            simd::floats minimum[std::size_t{Vectors}];
            MDKV_UNROLL
            for (int v = 0; v < Vectors; ++v)
            {
                scale[v]   = load_halves(scales + offset(v, sizeof(half)));
                minimum[v] = load_halves(scales + halves + offset(v, sizeof(half)));
            }
            MDKV_UNROLL
            for (int g = 0; g < G; ++g)
            {
                simd::floats const unit = simd::broadcast(query[g].unit);
                simd::floats const all  = simd::broadcast(query[g].sum);
                MDKV_UNROLL
                for (int v = 0; v < Vectors; ++v)
                {
                    simd::floats const sum =
                        simd::to_floats(simd::widened(sums[g][v])) * unit + simd::broadcast(query[g].offset);
                    float* const to = row[g] + t + v * lanes;
                    simd::store(to, simd::load(to) + scale[v] * sum + minimum[v] * all);
                }
            }
            for (int v = 0; v < Vectors && whole < group.bytes; ++v)
            {
                last_logits<Bits>(q, G, k, {whole, group.bytes}, at + offset(v, 0), v % of_tile * lanes,
                    scales + offset(v, sizeof(half)), {row[0] + t + v * lanes, logits.step});
            }
        }
    }
    ahead = next;
    return tokens / tile_tokens;
}

template <int Bits>
inline constexpr int most_coded_logit_heads = most_coded_heads / sum_registers<Bits>;

template <int Bits, int Pass>
[[nodiscard]] constexpr logit_pass coded_logits_of() noexcept
{
    constexpr int G       = (std::min)(heads_of_pass[Pass], most_coded_logit_heads<Bits>);
    constexpr int vectors = (std::max)(int{tile_tokens} / simd::lanes, (std::min)(4, 8 / G));
    return {&coded_logits<Bits, G, vectors>, vectors * simd::lanes / tile_tokens};
}

/// Kernels for codes of `Bits` bits, like logits_as for elements.
template <int Bits>
inline constexpr logit_kernels coded_logits_as{most_coded_logit_heads<Bits>,
    {coded_logits_of<Bits, 0>(), coded_logits_of<Bits, 1>(), coded_logits_of<Bits, 2>(), coded_logits_of<Bits, 3>()}};

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
