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

/// Adds the products of group k's last bytes, fewer than four, to the logits of a vector of tokens, which group 0 begins.
template <int Bits>
MDKV_OUTLINE void lone_logits(query_rows const& q, int heads, int k, byte_range range, std::byte const* at,
    std::byte const* scales, sum_rows const& logits) noexcept
{
    for (int g = 0; g < heads; ++g)
    {
        rounded_query const& query = q.rounded[g * q.groups + k];
        float* const to            = logits.x + g * logits.step;
        simd::floats sum           = simd::broadcast(0.0F);
        for (index_t c = range.begin; c < range.end; ++c)
        {
            simd::ints const code = simd::load_bytes(at + (c - range.begin) * tile_tokens);
            simd::ints product    = (Bits == 8 ? code : code & 15) * query.template number<Bits>(c);
            if (Bits == 4) { product += (code >> 4) * query.template number<Bits>(range.end + c); }
            sum += simd::to_floats(product) * simd::broadcast(query.unit[c / rounded_query::part<Bits>]);
        }
        simd::store(to, (k == 0 ? simd::broadcast(0.0F) : simd::load(to)) + load_halves(scales) * sum);
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
    constexpr index_t fours  = 4 * tile_tokens; // bytes
    constexpr index_t halves = tile_tokens * index_t{sizeof(half)};
    index_t const tile_bytes = tile_tokens * keys.token_bytes;
    read_ahead next          = ahead;
    index_t done             = 0; // vectors
    for (; tiles * of_tile - done >= Vectors; done += Vectors)
    {
        auto const offset = [&](int v, index_t unit) { // of a vector's units in its row of the tiles
            return (done + v) / of_tile * tile_bytes + (done + v) % of_tile * lanes * unit;
        };
        std::byte const* at = tile;
        for (int k = 0; k < keys.groups(); ++k)
        {
            std::byte const* const scales = at;
            index_t const coordinates     = std::min(quantised_group, keys.coordinates - k * quantised_group);
            index_t const bytes           = Bits == 8 ? coordinates : (coordinates + 1) / 2;
            index_t const whole           = bytes / 4 * 4;
            rounded_query const* query[G]; // one register each
            simd::floats acc[G][Vectors]{};
            MDKV_UNROLL
            for (int g = 0; g < G; ++g) { query[g] = q.rounded + g * q.groups + k; }
            next.fetch(4 * Vectors * lanes);
            at += 2 * halves;
            auto const add_fours = [&](auto& sums, index_t c, index_t end) __attribute__((always_inline))
            {
                for (; c < end; c += 4, at += fours)
                {
                    next.fetch(4 * Vectors * lanes);
                    simd::ints code[2][Vectors];
                    MDKV_UNROLL
                    for (int i = 0; i < 2 * Vectors; ++i)
                    {
                        code[i / Vectors][i % Vectors] = unpack<Bits>(at + offset(i % Vectors, 4), i / Vectors);
                    }
                    MDKV_UNROLL
                    for (int i = 0; i < 2 * G; ++i)
                    {
                        int const g    = i / 2;
                        int const half = i % 2;
                        simd::ints const number =
                            simd::words(query[g]->numbers + c * size + half * (Bits == 8 ? 4 : bytes));
                        MDKV_UNROLL
                        for (int v = 0; v < Vectors; ++v) { multiply<Bits>(sums[g][v], code[half][v], number); }
                    }
                }
            };
            // The sums of one unit, of 4-bit codes before they may pass the numbers of 16 bits.
            constexpr index_t part = rounded_query::part<Bits>;
            for (index_t c = 0; c < whole; c += part)
            {
                std::conditional_t<Bits == 8, simd::ints, simd::byte_sums> sums[G][Vectors]{};
                add_fours(sums, c, std::min(c + part, whole));
                MDKV_UNROLL
                for (int g = 0; g < G; ++g)
                {
                    MDKV_UNROLL
                    for (int v = 0; v < Vectors; ++v)
                    {
                        simd::ints sum;
                        if constexpr (Bits == 8) { sum = sums[g][v]; }
                        else { sum = simd::widened(sums[g][v]); }
                        acc[g][v] += simd::to_floats(sum) * simd::broadcast(query[g]->unit[c / part]);
                    }
                }
            }
            bool const first = k == 0 && whole == bytes;
            for (int v = 0; v < Vectors && whole < bytes; ++v)
            {
                lone_logits<Bits>(q, G, k, {whole, bytes}, at + offset(v, 1), scales + offset(v, sizeof(half)),
                    {logits.x + (done + v) * lanes, logits.step});
            }
            at += (bytes - whole) * tile_tokens;
            MDKV_UNROLL
            for (int v = 0; v < Vectors; ++v)
            {
                simd::floats const scale   = load_halves(scales + offset(v, sizeof(half)));
                simd::floats const minimum = load_halves(scales + halves + offset(v, sizeof(half)));
                MDKV_UNROLL
                for (int g = 0; g < G; ++g)
                {
                    float* const to           = logits.x + g * logits.step + (done + v) * lanes;
                    simd::floats const sum    = acc[g][v] + simd::broadcast(query[g]->offset);
                    simd::floats const before = first ? simd::broadcast(0.0F) : simd::load(to);
                    simd::store(to, before + scale * sum + minimum * simd::broadcast(query[g]->sum));
                }
            }
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
