/// \file logit_kernels.hpp: the logits of a block of packed tokens, read as they are stored, and their softmax (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/detail/attention_kernels.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/tile.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/softmax.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

namespace MDKV_NAMESPACE::cpu::detail
{

/// Writes the logits of neighbouring whole tiles of elements for G queries, `Tiles` at a time. Returns the number of tiles
/// done, the largest multiple of `Tiles` up to `tiles`. Sixteen logits of a tile grow side by side, so nothing is ever
/// summed across lanes.
template <element T, int G, int Tiles>
[[gnu::noinline]] index_t tile_logits(query_rows const& q, run_rows const& keys, std::byte const* tile, index_t tiles,
    sum_rows const& logits, read_ahead& ahead) noexcept
{
    constexpr int lanes   = simd::lanes;
    constexpr int vectors = Tiles * int{tile_tokens} / lanes;
    constexpr int accumulators =
        G * vectors >= 8 ? 1 : 2; // separate sums for neighbouring coordinates (see column_sums)
    constexpr index_t row    = tile_tokens * index_t{sizeof(T)};
    index_t const tile_bytes = tile_tokens * keys.token_bytes;
    read_ahead next          = ahead;
    index_t done             = 0;
    for (; tiles - done >= Tiles; done += Tiles)
    {
        std::byte const* at = tile + done * tile_bytes;
        float const* query[std::size_t{G}]; // one register each
        simd::floats acc[std::size_t{accumulators}][std::size_t{G}][std::size_t{vectors}]{};
        MDKV_UNROLL
        for (int g = 0; g < G; ++g) { query[g] = q.x + g * q.step; }
        auto const add_coordinate = [&](int accumulator, index_t c) __attribute__((always_inline))
        {
            next.fetch(Tiles * row);
            simd::floats key[std::size_t{vectors}];
            MDKV_UNROLL
            for (int v = 0; v < vectors; ++v)
            {
                index_t const token = v * lanes;
                key[v] =
                    simd::load(reinterpret_cast<T const*>(at + token / tile_tokens * tile_bytes) + token % tile_tokens);
            }
            at += row;
            MDKV_UNROLL
            for (int g = 0; g < G; ++g)
            {
                simd::floats const factor = simd::broadcast(query[g][c]);
                MDKV_UNROLL
                for (int v = 0; v < vectors; ++v) { acc[accumulator][g][v] += factor * key[v]; }
            }
        };
        index_t c = 0;
        MDKV_ROLLED
        for (; c + accumulators <= keys.coordinates; c += accumulators)
        {
            MDKV_UNROLL
            for (int accumulator = 0; accumulator < accumulators; ++accumulator)
            {
                add_coordinate(accumulator, c + accumulator);
            }
        }
        if (c < keys.coordinates) { add_coordinate(0, c); }
        MDKV_UNROLL
        for (int g = 0; g < G; ++g)
        {
            MDKV_UNROLL
            for (int v = 0; v < vectors; ++v)
            {
                simd::floats const sum = accumulators == 2 ? acc[0][g][v] + acc[accumulators - 1][g][v] : acc[0][g][v];
                simd::store(logits.x + g * logits.step + done * tile_tokens + v * lanes, sum);
            }
        }
    }
    ahead = next;
    return done;
}

/// The kernel of a pass, with the most tiles at a time that registers allow.
template <element T, int Pass>
[[nodiscard]] constexpr logit_pass logits_of() noexcept
{
    constexpr int G     = (std::min)(heads_of_pass[Pass], most_group);
    constexpr int tiles = G * 4 <= most_group ? 4 : G * 2 <= most_group || simd::lanes == 16 ? 2 : 1;
    return {&tile_logits<T, G, tiles>, tiles};
}
template <element T>
inline constexpr logit_kernels logits_as{
    most_group, {logits_of<T, 0>(), logits_of<T, 1>(), logits_of<T, 2>(), logits_of<T, 3>(), logits_of<T, 4>()}};

/// Writes logits [head_rows, n] of n tokens of a run from token t on, a multiple of 16, and -infinity after them up to a
/// multiple of 16. Rows of `logits` hold a multiple of `most_logit_tiles` tiles; `copy` holds the keys of
/// `most_logit_tiles` tiles.
[[gnu::noinline]] inline void block_logits(logit_kernels const& as, query_rows const& q, index_t head_rows,
    run_rows const& keys, index_t t, index_t n, sum_rows const& logits, read_ahead ahead, std::byte* copy) noexcept
{
    index_t const tile_bytes  = tile_tokens * keys.token_bytes;
    index_t const padded      = tile::round_up(n, tile_tokens);
    bool const narrow         = keys.width(t + n - 1) < tile_tokens;
    index_t const whole       = padded / tile_tokens - (narrow ? 1 : 0);
    std::byte const* const at = keys.begin + keys.tile(t);
    for (index_t g = 0; g < head_rows;)
    {
        int const pass       = pass_of(head_rows - g, as.most_heads);
        logit_pass const& by = as.pass[pass];
        read_ahead next      = ahead;
        index_t const done   = by.kernel(q.from(g), keys, at, whole, {logits.x + g * logits.step, logits.step}, next);
        index_t const left   = padded / tile_tokens - done;
        if (left > 0) // fewer tiles than the kernel takes at a time
        {
            index_t const bytes = (whole - done) * tile_bytes;
            std::memcpy(copy, at + done * tile_bytes, static_cast<std::size_t>(bytes));
            if (narrow) { widen_tile(keys, t + n - 1, copy + bytes); }
            std::memset(copy + left * tile_bytes, 0, static_cast<std::size_t>((by.tiles - left) * tile_bytes));
            float* const to = logits.x + g * logits.step + done * tile_tokens;
            by.kernel(q.from(g), keys, copy, by.tiles, {to, logits.step}, next);
        }
        g += heads_of_pass[pass];
    }
    for (index_t g = 0; g < head_rows; ++g)
    {
        std::fill_n(logits.x + g * logits.step + n, padded - n, mdkv::detail::empty_lse);
    }
}

/// Turns one query's logits [padded, a multiple of 16] into weights relative to the largest logit so far and adds them to
/// the state. Returns the factor by which earlier weighted sums must be multiplied. A NaN logit, which comparisons would
/// hide, gives a NaN weight.
[[nodiscard]] [[gnu::noinline]] inline float soften(
    float* logits, index_t padded, mdkv::detail::softmax_state& state, read_ahead& ahead) noexcept
{
    read_ahead next  = ahead;
    simd::floats top = simd::load(logits);
    for (index_t t = simd::lanes; t < padded; t += simd::lanes) { top = simd::larger(top, simd::load(logits + t)); }
    float const largest      = (std::max)(state.largest, simd::max_lane(top));
    simd::floats const shift = simd::broadcast(largest);
    simd::floats sum         = simd::broadcast(0.0F);
    for (index_t t = 0; t < padded; t += simd::lanes)
    {
        next.fetch(8 * simd::lanes);
        simd::floats const weight = simd::exp2(simd::load(logits + t) - shift);
        simd::store(logits + t, weight);
        sum += weight;
    }
    float const factor = largest > state.largest ? std::exp2(state.largest - largest) : 1.0F;
    ahead              = next;
    state              = {largest, state.sum * factor + simd::sum(sum)};
    return factor;
}

} // namespace MDKV_NAMESPACE::cpu::detail
