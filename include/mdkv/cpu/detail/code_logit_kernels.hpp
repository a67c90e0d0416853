/// \file code_logit_kernels.hpp: the logits of a block of keys stored as codes, in products of integers (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/detail/attention_kernels.hpp>
#include <mdkv/cpu/detail/code_kernels.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/width.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/run_of_head.hpp>

#include <algorithm>
#include <cstddef>
#include <type_traits>

namespace mdkv::cpu::inline MDKV_CPU_WIDTH::detail
{

struct byte_range
{
    index_t begin;
    index_t end;
};

/// Adds the products of group k's bytes `range`, the last ones and fewer than 16, to the logits of a vector of tokens. `at` is
/// where these bytes of the vector's tile begin, and `first` the vector's first token in the tile.
template <int Bits>
MDKV_OUTLINE void last_logits(query_rows const& q, int heads, int k, byte_range range, std::byte const* at,
    index_t first, std::byte const* scales, sum_rows const& logits) noexcept
{
    index_t const fours = (range.end - range.begin) / 4 * 4; // bytes, by fours
    for (int g = 0; g < heads; ++g)
    {
        rounded_query const& query = q.rounded[k * q.rows + g];
        float* const to            = logits.x + g * logits.step;
        simd::floats sum           = simd::broadcast(0.0F);
        for (index_t i = 0; i < range.end - range.begin; ++i)
        {
            std::byte const* const row = at + i / 4 * 4 * tile_tokens;
            simd::ints const code =
                i < fours ? simd::read<simd::ints>(row + first * 4) >> static_cast<int>(i % 4 * 8) & 0xff
                          : simd::load_bytes(row + (i - fours) * tile_tokens + first);
            index_t const c    = range.begin + i;
            simd::ints product = (Bits == 8 ? code : code & 15) * query.template number<Bits>(c);
            if (Bits == 4) { product += (code >> 4) * query.template number<Bits>(c + quantised_group / 2); }
            sum += simd::to_floats(product) * simd::broadcast(query.unit[c / rounded_query::part<Bits>]);
        }
        simd::store(to, simd::load(to) + load_halves(scales) * sum);
    }
}

/// Writes the logits of `tiles` neighbouring whole tiles, added group by group, for G queries, `Vectors` vectors of tokens at
/// a time and as far as that goes; returns the number of tiles done.
template <int Bits, int G, int Vectors>
[[gnu::noinline]] index_t coded_logits(query_rows const& q, run_rows const& keys, std::byte const* tile, index_t tiles,
    sum_rows const& logits, read_ahead& ahead) noexcept
{
    constexpr int lanes      = simd::lanes;
    constexpr int of_tile    = int{tile_tokens} / lanes; // vectors
    constexpr int size       = number_bytes<Bits>;
    constexpr index_t second = Bits == 8 ? 4 : quantised_group / 2; // numbers of the other half lie that much behind
    constexpr index_t fours  = 4 * tile_tokens;                     // bytes
    constexpr index_t halves = tile_tokens * index_t{sizeof(half)};
    index_t const tile_bytes = tile_tokens * keys.token_bytes;
    float* const first       = logits.x;
    index_t const step       = logits.step;
    read_ahead next          = ahead;
    index_t done             = 0; // vectors
    for (; tiles * of_tile - done >= Vectors; done += Vectors)
    {
        auto const offset = [&](int v, index_t unit) { // of a vector's units in its row of the tiles
            return (done + v) / of_tile * tile_bytes + (done + v) % of_tile * lanes * unit;
        };
        float* logit[G];
        MDKV_UNROLL
        for (int i = 0; i < G * Vectors; ++i)
        {
            int const g = i / Vectors;
            logit[g]    = first + g * step + done * lanes;
            simd::store(logit[g] + i % Vectors * lanes, simd::floats{});
        }
        std::byte const* at = tile;
        for (int k = 0; k < keys.groups(); ++k)
        {
            std::byte const* const scales    = at;
            index_t const coordinates        = std::min(quantised_group, keys.coordinates - k * quantised_group);
            index_t const bytes              = Bits == 8 ? coordinates : (coordinates + 1) >> 1;
            index_t const whole              = bytes & -16;
            rounded_query const* const query = q.rounded + k * q.rows; // of the first head
            next.fetch(4 * Vectors * lanes);
            at += 2 * halves;
            // The sums of 4-bit codes are added up in memory, because all registers are in use.
            alignas(64) float room[G * Vectors * lanes];
            float* kept = room;
            if constexpr (Bits == 4)
            {
                MDKV_UNROLL
                for (int i = 0; i < G * Vectors; ++i) { simd::store(kept + i * lanes, simd::floats{}); }
                keep_in_memory(kept);
            }
            auto const add_four = [&](auto& sums, index_t c, std::byte const* four) __attribute__((always_inline))
            {
                next.fetch(4 * Vectors * lanes);
                simd::ints code[2][Vectors];
                MDKV_UNROLL
                for (int i = 0; i < 2 * Vectors; ++i)
                {
                    code[i / Vectors][i % Vectors] = unpack<Bits>(four + offset(i % Vectors, 4), i / Vectors);
                }
                MDKV_UNROLL
                for (int i = 0; i < 2 * G; ++i)
                {
                    int const g             = i / 2;
                    int const half          = i % 2;
                    simd::ints const number = simd::words(query[g].numbers + c * size + half * second);
                    MDKV_UNROLL
                    for (int v = 0; v < Vectors; ++v) { multiply<Bits>(sums[g][v], code[half][v], number); }
                }
            };
            std::conditional_t<Bits == 8, simd::ints, simd::byte_sums> sums[G][Vectors]{};
            for (index_t c = 0; c < whole; c += 16, at += 4 * fours)
            {
                MDKV_UNROLL
                for (int i = 0; i < 4; ++i) { add_four(sums, c + 4 * i, at + i * fours); }
                if constexpr (Bits == 4) // sums over more bytes may pass the numbers of 16 bits
                {
                    MDKV_UNROLL
                    for (int g = 0; g < G; ++g)
                    {
                        simd::floats const unit = simd::broadcast(query[g].unit[c / rounded_query::part<4>]);
                        MDKV_UNROLL
                        for (int v = 0; v < Vectors; ++v)
                        {
                            float* const to = kept + (g * Vectors + v) * lanes;
                            simd::store(to, simd::load(to) + simd::to_floats(simd::widened(sums[g][v])) * unit);
                            sums[g][v] = simd::byte_sums{};
                        }
                    }
                    keep_in_memory(kept);
                }
            }
            MDKV_UNROLL
            for (int v = 0; v < Vectors; ++v)
            {
                simd::floats const scale   = load_halves(scales + offset(v, sizeof(half)));
                simd::floats const minimum = load_halves(scales + halves + offset(v, sizeof(half)));
                MDKV_UNROLL
                for (int g = 0; g < G; ++g)
                {
                    simd::floats sum;
                    if constexpr (Bits == 4) { sum = simd::load(kept + (g * Vectors + v) * lanes); }
                    else { sum = simd::to_floats(sums[g][v]) * simd::broadcast(query[g].unit[0]); }
                    sum += simd::broadcast(query[g].offset);
                    float* const to = logit[g] + v * lanes;
                    simd::store(to, simd::load(to) + scale * sum + minimum * simd::broadcast(query[g].sum));
                }
            }
            for (int v = 0; v < Vectors && whole < bytes; ++v)
            {
                last_logits<Bits>(q, G, k, {whole, bytes}, at + offset(v, 0), (done + v) % of_tile * lanes,
                    scales + offset(v, sizeof(half)), {logits.x + (done + v) * lanes, logits.step});
            }
            at += (bytes - whole) * tile_tokens;
        }
    }
    ahead = next;
    return done / of_tile;
}

template <int Bits, int Pass>
[[nodiscard]] constexpr logit_pass coded_logits_of() noexcept
{
    constexpr int G       = std::min(heads_of_pass[Pass], most_coded_heads);
    constexpr int vectors = std::max(int{tile_tokens} / simd::lanes, std::min(4, 8 / G));
    return {&coded_logits<Bits, G, vectors>, vectors * simd::lanes / tile_tokens};
}

/// As logits_as, for codes of `Bits` bits.
template <int Bits>
inline constexpr logit_kernels coded_logits_as{most_coded_heads,
    {coded_logits_of<Bits, 0>(), coded_logits_of<Bits, 1>(), coded_logits_of<Bits, 2>(), coded_logits_of<Bits, 3>()}};

} // namespace mdkv::cpu::inline MDKV_CPU_WIDTH::detail
