/// \file rounding.hpp: the factors of codes in attention, queries and weights, rounded to whole numbers of 8 or 16 bits (docs/numerics.md).
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/cpu/detail/attention_kernels.hpp>
#include <mdkv/cpu/detail/products.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/detail/lanes.hpp>

#include <algorithm>

namespace MDKV_NAMESPACE::cpu::detail
{

/// The middle of the codes of 4 or 8 bits.
[[nodiscard]] constexpr float middle_code(int bits) noexcept
{
    return bits == 8 ? 127.5F : 7.5F;
}

/// Tokens whose weights share a unit. Sums over 256 tokens are below 2^31.
inline constexpr index_t rounded_tokens = 128;

/// Whether products with codes of `Bits` bits are summed in 16 bits. A sum has 32 products of a query, or 64 of weights:
/// the first two of every four, or the last two.
template <int Bits>
inline constexpr bool short_sums = Bits == 4 && simd::short_byte_sums;

/// Initial value of 16-bit sums of weights, which have no sign: the sums then use the whole range.
inline constexpr short least_short = -32768;

/// Least value that may be rounded to `most` without overflow of 16-bit sums, from the sums of magnitudes, lane by lane.
/// The numbers of a sum may come to 2,168 and half of 32 roundings (if not Signed, to 4,336 and half of 64): times 15 that
/// is below 2^15 (2^16).
template <bool Signed>
[[nodiscard]] inline simd::floats largest_of_short(simd::floats sums, float most) noexcept
{
    sums += simd::swap_lanes<1>(sums);
    if constexpr (simd::lanes == 8) { sums += simd::swap_lanes<4>(sums); }
    return sums * simd::broadcast(most / (Signed ? 2168.0F : 4336.0F));
}

/// Rounding of numbers up to `largest` to multiples of a unit, at most `most` units.
struct rounding
{
    float unit;
    float factor; ///< 1 / unit; 0 for numbers so small that they count as 0

    rounding(float largest, float most) noexcept
        : unit{largest / most}
        , factor{largest >= 0x1p-100F ? most / largest : 0.0F}
    {}
};

/// Rounds n numbers times `factor` for codes of `bits` bits and returns the vectors' sum; n is a multiple of 16.
template <bool Signed>
[[gnu::always_inline]] inline simd::ints round_numbers(
    int bits, float const* x, simd::floats factor, index_t n, std::byte* to) noexcept
{
    constexpr int vectors = int{tile_tokens} / simd::lanes;
    simd::ints sum{};
    for (index_t i = 0; i < n; i += tile_tokens)
    {
        simd::ints number[vectors];
        MDKV_UNROLL
        for (int v = 0; v < vectors; ++v)
        {
            number[v] = simd::to_nearest(simd::load(x + i + v * simd::lanes) * factor);
            sum += number[v];
            if (bits == 8) // the middle two of every four are swapped
            {
                number[v] = simd::shuffled(number[v], number[v], [](int l) { return l % 4 % 3 == 0 ? l : l ^ 3; });
            }
        }
        if (bits == 8) { simd::store_shorts(to + i * number_bytes<8>, number); }
        else { simd::store_bytes<Signed>(to + i, number); }
    }
    return sum;
}

/// Rounds the coordinates of `rows` rows, `step` apart, group by group: to `all` [groups, rows].
MDKV_OUTLINE inline void round_queries(
    int bits, float const* x, index_t step, index_t rows, index_t coordinates, rounded_query* all) noexcept
{
    constexpr index_t half = quantised_group / 2;
    for (index_t i = 0; i < rows; ++i, x += step)
    {
        for (index_t c = 0; c < coordinates; c += quantised_group)
        {
            rounded_query* const to = all + c / quantised_group * rows + i;
            // For 4 bits: numbers for the low halves of bytes, and for the high halves. For 8 bits: the first `half`
            // numbers, and the others.
            float padded[2][half];
            float const* number[2]{x + c, x + c + half};
            index_t const n     = (std::min)(quantised_group, coordinates - c);
            index_t const first = bits == 8 ? (std::min)(n, half) : (n + 1) / 2;
            if (n < quantised_group)
            {
                std::fill_n(std::copy_n(x + c, first, padded[0]), half - first, 0.0F);
                std::fill_n(std::copy_n(x + c + first, n - first, padded[1]), half - (n - first), 0.0F);
                number[0] = padded[0];
                number[1] = padded[1];
            }
            simd::floats sum{};
            simd::floats total{};
            simd::floats largest{};
            for (index_t l = 0; l < half; l += simd::lanes)
            {
                simd::floats const low  = simd::load(number[0] + l);
                simd::floats const high = simd::load(number[1] + l);
                largest = simd::larger(largest, simd::larger(simd::magnitude(low), simd::magnitude(high)));
                total += simd::magnitude(low) + simd::magnitude(high);
                sum += low + high;
            }
            float const most = bits == 8 ? 32767.0F : 127.0F;
            if (short_sums<4> && bits == 4) { largest = simd::larger(largest_of_short<true>(total, most), largest); }
            rounding const by{simd::max_lane(largest), most};
            simd::floats const factor = simd::broadcast(by.factor);
            std::byte* const second   = to->numbers + half * (bits / 4);
            simd::ints const rounded  = round_numbers<true>(bits, number[0], factor, half, to->numbers)
                                       + round_numbers<true>(bits, number[1], factor, half, second);
            to->unit   = by.unit;
            to->sum    = simd::sum(sum);
            to->offset = middle_code(bits) * (to->sum - simd::sum(simd::to_floats(rounded) * simd::broadcast(by.unit)));
        }
    }
}

/// Weights of a block times scales, by head.
struct rounded_weights
{
    alignas(64) std::byte numbers[most_coded_heads][rounded_tokens * most_number_bytes];
    float unit[most_coded_heads];
    float bias[most_coded_heads]; ///< bias of all columns
};

/// Rounds the weights of n tokens in whole tiles for G heads, times the tokens' scales, which are in the tiles from
/// `scales` on. The unit follows from the largest product or, if many are alike, from their sum, so that they can be added
/// up in 16 bits. A head's sums wait for one another, so each step is done for all heads.
template <int Bits, int G>
MDKV_OUTLINE void round_weights(query_rows const& weights, std::byte const* scales, index_t tile_bytes, index_t n,
    index_t bytes, rounded_weights& to, read_ahead& ahead) noexcept
{
    constexpr float most = Bits == 8 ? 32767.0F : 255.0F;
    auto const middle    = simd::broadcast(middle_code(Bits));
    read_ahead next      = ahead;
    alignas(64) float scaled[std::size_t{G}][std::size_t{rounded_tokens}];
    simd::floats largest[std::size_t{G}]{};
    simd::floats total[std::size_t{G}]{};
    simd::floats bias[std::size_t{G}]{};
    float const* row[std::size_t{G}];
    MDKV_UNROLL
    for (int g = 0; g < G; ++g) { row[g] = weights.x + g * weights.step; }
    for (index_t t = 0; t < n; scales += tile_bytes)
    {
        next.fetch(4 * bytes + 2 * tile_tokens * index_t{sizeof(half)}); // a quarter of the codes; scales and minima
        MDKV_UNROLL
        for (int v = 0; v < tile_tokens; v += simd::lanes, t += simd::lanes)
        {
            std::byte const* const at = scales + v * index_t{sizeof(half)};
            simd::floats const scale  = load_halves(at);
            simd::floats const centre = load_halves(at + tile_tokens * index_t{sizeof(half)}) + scale * middle;
            MDKV_UNROLL
            for (int g = 0; g < G; ++g)
            {
                simd::floats const weight = simd::load(row[g] + t);
                simd::floats const number = weight * scale;
                simd::store(scaled[g] + t, number);
                largest[g] = simd::larger(number, largest[g]);
                if constexpr (short_sums<Bits>) { total[g] += number; }
                bias[g] += weight * centre;
            }
        }
    }
    ahead = next;
    simd::floats factor[std::size_t{G}];
    MDKV_UNROLL
    for (int g = 0; g < G; ++g)
    {
        if constexpr (short_sums<Bits>)
        {
            largest[g] = simd::larger(largest_of_short<false>(total[g], most), largest[g]);
        }
        rounding const by{simd::max_lane(largest[g]), most};
        to.unit[g] = by.unit;
        factor[g]  = simd::broadcast(by.factor);
    }
    MDKV_UNROLL
    for (int g = 0; g < G; ++g)
    {
        simd::ints const all = round_numbers<false>(Bits, scaled[g], factor[g], n, to.numbers[g]);
        to.bias[g] = simd::sum(bias[g] - simd::to_floats(all) * simd::broadcast(to.unit[g] * middle_code(Bits)));
    }
}

} // namespace MDKV_NAMESPACE::cpu::detail
