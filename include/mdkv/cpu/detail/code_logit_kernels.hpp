/// \file code_logit_kernels.hpp: the logits of a block of keys stored as codes, in products of integers (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/detail/attention_kernels.hpp>
#include <mdkv/cpu/detail/code_kernels.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/run_of_head.hpp>

#include <algorithm>
#include <cstddef>

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
            simd::ints const code      = i < fours
                                             ? simd::read<simd::ints>(row + first * 4) >> static_cast<int>(i % 4 * 8) & 0xff
                                             : simd::load_bytes(row + (i - fours) * tile_tokens + first);
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

} // namespace MDKV_NAMESPACE::cpu::detail
