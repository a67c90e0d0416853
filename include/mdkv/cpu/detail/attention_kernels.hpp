/// \file attention_kernels.hpp: the three inner loops of attention over a block of packed tokens: logits, softmax, weighted values (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/detail/repeat.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/detail/softmax.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace mdkv::cpu::detail
{

/// Query heads that one pass over the keys serves: as many accumulators as the machine's registers hold.
inline constexpr int most_group = simd::lanes == 16 ? 8 : simd::lanes == 8 ? 4 : 2;

/// Calls body(constant, first) for chunks of at most most_group query heads that cover [0, group).
template <class Body>
inline void for_group(index_t group, Body const& body)
{
    index_t first = 0;
    for (; group - first >= most_group; first += most_group) { body(std::integral_constant<int, most_group>{}, first); }
    repeat<most_group - 1>([&](auto i) {
        constexpr int rest = decltype(i)::value + 1;
        if (group - first == rest) { body(std::integral_constant<int, rest>{}, first); }
    });
}

/// An address read a little later, asked for into the second-level cache: the hardware does not look beyond a page, and
/// a block is several. Asking for memory beyond a buffer is harmless, so it is a number, not a pointer.
class read_ahead
{
public:
    explicit read_ahead(void const* at) noexcept
        : at_{reinterpret_cast<std::uintptr_t>(at)}
    {}

    /// Asks for the next `bytes` bytes.
    void fetch(index_t bytes) noexcept
    {
        for (index_t b = 0; b < bytes; b += 64)
        {
            __builtin_prefetch(reinterpret_cast<void const*>(at_ + static_cast<std::uintptr_t>(b)), 0, 2);
        }
        at_ += static_cast<std::uintptr_t>(bytes);
    }

    [[nodiscard]] read_ahead beyond(index_t bytes) const noexcept
    {
        read_ahead other = *this;
        other.at_ += static_cast<std::uintptr_t>(bytes);
        return other;
    }

private:
    std::uintptr_t at_;
};

/// Logits of `Tiles` neighbouring tiles for G queries: logits[g][t] += sum over c of q[g][c] * keys[t / 16][c][t % 16].
/// Sixteen logits grow side by side, so nothing is ever summed across lanes.
template <element T, int G, int Tiles>
inline void tile_logits(float const* q, index_t q_step, T const* keys, index_t row_step, index_t tile_step,
    index_t coordinates, float* logits, index_t logit_step, read_ahead ahead) noexcept
{
    constexpr int vectors = Tiles * int{tile_tokens} / simd::lanes;
    simd::floats acc[G][vectors];
    repeat<G>([&](auto g) {
        repeat<vectors>([&](auto v) { acc[g][v] = simd::load(logits + g * logit_step + v * simd::lanes); });
    });
    for (index_t c = 0; c < coordinates; ++c)
    {
        ahead.fetch(Tiles * tile_tokens * index_t{sizeof(T)});
        simd::floats key[vectors];
        repeat<vectors>([&](auto v) {
            constexpr int at = decltype(v)::value * simd::lanes;
            key[v]           = simd::load(keys + (at / tile_tokens) * tile_step + at % tile_tokens);
        });
        repeat<G>([&](auto g) {
            simd::floats const factor = simd::broadcast(q[g * q_step + c]);
            repeat<vectors>([&](auto v) { acc[g][v] += factor * key[v]; });
        });
        keys += row_step;
    }
    repeat<G>([&](auto g) {
        repeat<vectors>([&](auto v) { simd::store(logits + g * logit_step + v * simd::lanes, acc[g][v]); });
    });
}

/// The same for a tile of fewer than 16 tokens. Lanes beyond its width compute with whatever follows inside the tile;
/// the last rows, where that would leave the tile, are read from a padded copy.
template <element T, int G>
inline void narrow_tile_logits(float const* q, index_t q_step, T const* keys, index_t width, index_t coordinates,
    float* logits, index_t logit_step) noexcept
{
    index_t const elements = width * coordinates;
    index_t const safe     = elements < tile_tokens ? 0 : (elements - tile_tokens) / width + 1;
    tile_logits<T, G, 1>(q, q_step, keys, width, 0, safe, logits, logit_step, read_ahead{keys});
    T rest[3 * tile_tokens]{};
    std::memcpy(
        static_cast<void*>(rest), keys + safe * width, static_cast<std::size_t>(elements - safe * width) * sizeof(T));
    tile_logits<T, G, 1>(q + safe, q_step, rest, width, 0, coordinates - safe, logits, logit_step,
        read_ahead{static_cast<T const*>(rest)});
}

/// out[g][c] += sum over t < n of weight[g][t] * rows[t][c], for Columns vectors of N columns. Few accumulators would
/// leave the multiply-add units waiting for one another; then even and odd rows have their own.
template <element T, int G, int N, int Columns>
inline void weighted_columns(float const* weights, index_t weight_step, T const* rows, index_t row_step, index_t n,
    float* out, index_t out_step, read_ahead ahead) noexcept
{
    constexpr int parts = G * Columns < 8 ? 2 : 1;
    simd::floats_of<N> acc[parts][G][Columns];
    repeat<G>([&](auto g) {
        repeat<Columns>([&](auto c) {
            acc[0][g][c] = simd::load<N>(out + g * out_step + c * N);
            if constexpr (parts == 2) { acc[1][g][c] = simd::broadcast<N>(0.0F); }
        });
    });
    auto const add_row = [&](auto part, index_t t) {
        ahead.fetch(Columns * N * index_t{sizeof(T)});
        simd::floats_of<N> value[Columns];
        repeat<Columns>([&](auto c) { value[c] = simd::load<N>(rows + t * row_step + c * N); });
        repeat<G>([&](auto g) {
            simd::floats_of<N> const factor = simd::broadcast<N>(weights[g * weight_step + t]);
            repeat<Columns>([&](auto c) { acc[part][g][c] += factor * value[c]; });
        });
    };
    index_t t = 0;
    for (; t + parts <= n; t += parts)
    {
        repeat<parts>([&](auto part) { add_row(part, t + part); });
    }
    if (t < n) { add_row(std::integral_constant<int, 0>{}, t); }
    repeat<G>([&](auto g) {
        repeat<Columns>([&](auto c) {
            if constexpr (parts == 2) { acc[0][g][c] += acc[1][g][c]; }
            simd::store_floats<N>(out + g * out_step + c * N, acc[0][g][c]);
        });
    });
}

/// out[g][c] += sum over t < n of weight[g][t] * rows[t][c] for any number of columns.
template <element T, int G>
inline void weighted_rows(float const* weights, index_t weight_step, T const* rows, index_t row_step, index_t n,
    index_t columns, float* out, index_t out_step, read_ahead ahead) noexcept
{
    constexpr int lanes = simd::lanes;
    constexpr int wide  = G > 4 || lanes == 4 ? 2 : 4; // G * wide accumulators, wide vectors and a weight in registers
    index_t c           = 0;
    auto const advance  = [&](auto width, auto vectors) {
        constexpr int w = decltype(width)::value;
        constexpr int v = decltype(vectors)::value;
        weighted_columns<T, G, w, v>(weights, weight_step, rows + c, row_step, n, out + c, out_step, ahead);
        ahead = ahead.beyond(n * w * v * index_t{sizeof(T)});
        c += w * v;
    };
    while (columns - c >= wide * lanes) { advance(constant<lanes>, constant<wide>); }
    while (columns - c >= 2 * lanes) { advance(constant<lanes>, constant<2>); }
    if (columns - c >= lanes) { advance(constant<lanes>, constant<1>); }
    if constexpr (lanes > 8)
    {
        if (columns - c >= 8) { advance(constant<8>, constant<1>); }
    }
    if constexpr (lanes > 4)
    {
        if (columns - c >= 4) { advance(constant<4>, constant<1>); }
    }
    for (; c < columns; ++c)
    {
        float acc[G]{};
        for (index_t t = 0; t < n; ++t)
        {
            T value; // from any address
            std::memcpy(&value, rows + t * row_step + c, sizeof value);
            for (int g = 0; g < G; ++g) { acc[g] += weights[g * weight_step + t] * widen(value); }
        }
        for (int g = 0; g < G; ++g) { out[g * out_step + c] += acc[g]; }
    }
}

/// Logits of n tokens of a run, beginning with tile `first` of a run laid out for `stored` tokens; those of a last,
/// incomplete sixteen are followed by -infinity.
template <element T>
inline void run_logits(float const* q, index_t q_step, index_t group, T const* keys, index_t coordinates,
    index_t stored, index_t first, index_t n, float* logits, index_t logit_step, read_ahead ahead) noexcept
{
    index_t const whole     = std::min(n / tile_tokens + (n % tile_tokens != 0), stored / tile_tokens - first);
    index_t const tile_step = tile_tokens * coordinates;
    T const* const at       = keys + first * tile_step;
    index_t const padded    = (n + tile_tokens - 1) / tile_tokens * tile_tokens;
    for (index_t g = 0; g < group; ++g) { std::fill_n(logits + g * logit_step, padded, 0.0F); }
    for_group(group, [&](auto chunk, index_t g) {
        constexpr int tiles        = chunk.value * 4 <= most_group                        ? 4
                                     : chunk.value * 2 <= most_group || simd::lanes == 16 ? 2
                                                                                          : 1;
        float const* const queries = q + g * q_step;
        float* const to            = logits + g * logit_step;
        index_t i                  = 0;
        auto const step            = [&](auto count) {
            tile_logits<T, chunk.value, count.value>(queries, q_step, at + i * tile_step, tile_tokens, tile_step,
                coordinates, to + i * tile_tokens, logit_step, ahead.beyond(i * tile_step * index_t{sizeof(T)}));
            i += count.value;
        };
        while (whole - i >= tiles) { step(constant<tiles>); }
        while (i < whole) { step(constant<1>); }
        if (whole * tile_tokens < n)
        {
            narrow_tile_logits<T, chunk.value>(queries, q_step, at + whole * tile_step, stored % tile_tokens,
                coordinates, to + whole * tile_tokens, logit_step);
        }
    });
    for (index_t g = 0; g < group; ++g)
    {
        std::fill(
            logits + g * logit_step + n, logits + g * logit_step + padded, -std::numeric_limits<float>::infinity());
    }
}

/// Turns one query's logits [padded, a multiple of 16] into weights relative to the largest logit so far and adds them to
/// the state. Returns the factor that sums weighted with the old ones need. A NaN, which comparisons would hide, stays one.
[[nodiscard]] inline float soften(float* logits, index_t padded, mdkv::detail::softmax_state& state) noexcept
{
    simd::floats top = simd::load(logits);
    for (index_t t = simd::lanes; t < padded; t += simd::lanes) { top = simd::max(top, simd::load(logits + t)); }
    float const largest      = std::max(state.largest, simd::max_lane(top));
    simd::floats const shift = simd::broadcast(largest);
    simd::floats sum         = simd::broadcast(0.0F);
    for (index_t t = 0; t < padded; t += simd::lanes)
    {
        simd::floats const weight = simd::exp2<true>(simd::load(logits + t) - shift);
        simd::store(logits + t, weight);
        sum += weight;
    }
    float const factor = largest > state.largest ? std::exp2(state.largest - largest) : 1.0F;
    state              = {largest, state.sum * factor + simd::sum(sum)};
    return factor;
}

} // namespace mdkv::cpu::detail
