/// \file logit_kernels.hpp: the logits of a block of packed tokens, read as they are stored, and their softmax (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/detail/attention_kernels.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/tile.hpp>
#include <mdkv/cpu/width.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/softmax.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace mdkv::cpu::inline MDKV_CPU_WIDTH::detail
{

/// Writes the logits of `tiles` neighbouring whole tiles (of codes adds to them, group by group) for G queries, `Tiles`
/// at a time and as far as that goes; returns the number of tiles done. Sixteen logits of a tile grow side by side, so
/// nothing is ever summed across lanes.
template <class Stored, int G, int Tiles>
[[gnu::noinline]] index_t tile_logits(query_rows const& q, run_rows const& keys, std::byte const* tile, index_t tiles,
    sum_rows const& logits, read_ahead& ahead) noexcept
{
    constexpr int lanes       = simd::lanes;
    constexpr int vectors     = Tiles * int{tile_tokens} / lanes;
    constexpr int units       = per_unit<Stored>;
    constexpr index_t few     = coded<Stored> ? 4 : 1; // rows asked for at a time: a line or two
    constexpr index_t row     = tile_tokens * index_t{sizeof(Stored)};
    constexpr index_t halves  = tile_tokens * index_t{sizeof(half)};
    index_t const tile_bytes  = tile_tokens * keys.token_bytes;
    index_t const coordinates = keys.coordinates;
    index_t const groups      = coded<Stored> ? keys.groups() : 1;
    index_t const group_bytes = tile_tokens * stored_bytes(keys.kind, quantised_group, 0);
    auto const offset         = [&](index_t vector, index_t unit) { // of a vector's units in its row of the tiles
        return vector * lanes / tile_tokens * tile_bytes + vector * lanes % tile_tokens * unit;
    };
    read_ahead next = ahead;
    index_t done    = 0;
    for (; tiles - done >= Tiles; done += Tiles)
    {
        for (index_t k = 0; k < groups; ++k)
        {
            std::byte const* const scales = tile + done * tile_bytes + k * group_bytes;
            std::byte const* at           = coded<Stored> ? scales + 2 * halves : scales;
            float* const to               = logits.x + done * tile_tokens;
            index_t const left            = coordinates - k * quantised_group;
            index_t const here            = coded<Stored> ? std::min(quantised_group, left) : left;
            index_t const rows            = (here + units - 1) / units;
            float const* query[G]; // one register each
            simd::floats acc[G][vectors]{};
            MDKV_UNROLL
            for (int g = 0; g < G; ++g) { query[g] = q.x + g * q.step + k * quantised_group; }
            if (coded<Stored>) { next.fetch(2 * halves * Tiles); }
            for (index_t c = 0; c < rows; ++c, at += row)
            {
                if (c % few == 0) { next.fetch(few * Tiles * row); }
                simd::floats key[vectors][units];
                MDKV_UNROLL
                for (int v = 0; v < vectors; ++v) { unpack<Stored>(at + offset(v, sizeof(Stored)), key[v]); }
                MDKV_UNROLL
                for (int u = 0; u < units; ++u)
                {
                    if (u * rows + c >= here) { break; } // of an odd number, the last byte has no high half
                    MDKV_UNROLL
                    for (int g = 0; g < G; ++g)
                    {
                        simd::floats const factor = simd::broadcast(query[g][u * rows + c]);
                        MDKV_UNROLL
                        for (int v = 0; v < vectors; ++v) { acc[g][v] += factor * key[v][u]; }
                    }
                }
            }
            simd::floats scale[vectors]{};
            simd::floats minimum[vectors]{};
            MDKV_UNROLL
            for (int v = 0; v < vectors && coded<Stored>; ++v)
            {
                scale[v]   = load_halves(scales + offset(v, sizeof(half)));
                minimum[v] = load_halves(scales + halves + offset(v, sizeof(half)));
            }
            MDKV_UNROLL
            for (int g = 0; g < G; ++g)
            {
                float* const out       = to + g * logits.step;
                simd::floats const sum = simd::broadcast(coded<Stored> ? q.sums[g * q.groups + k] : 0.0F);
                MDKV_UNROLL
                for (int v = 0; v < vectors; ++v)
                {
                    simd::floats const before = simd::load(out + v * lanes);
                    simd::store(
                        out + v * lanes, coded<Stored> ? before + scale[v] * acc[g][v] + minimum[v] * sum : acc[g][v]);
                }
            }
        }
    }
    ahead = next;
    return done;
}

using logit_kernel = index_t(
    query_rows const&, run_rows const&, std::byte const*, index_t, sum_rows const&, read_ahead&) noexcept;

/// The kernel of a pass, with as many tiles at a time as registers allow.
template <class Stored, int Pass, int G = std::min(heads_of_pass[Pass], most_group)>
inline constexpr logit_kernel* logits_of = &tile_logits<Stored, G,
    (G * 4 <= most_group                           ? 4
        : G * 2 <= most_group || simd::lanes == 16 ? 2
                                                   : 1)>;

/// Kernels for one way of storing: of one head and one tile at a time, then those of the passes.
template <class Stored>
inline constexpr logit_kernel* logits_as[]{&tile_logits<Stored, 1, 1>, logits_of<Stored, 0>, logits_of<Stored, 1>,
    logits_of<Stored, 2>, logits_of<Stored, 3>, logits_of<Stored, 4>};

/// Logits [group, n] of n tokens of a run from token t on, a multiple of 16; those of a last, incomplete sixteen are followed
/// by -infinity. Of codes, q.sums as `sum_groups` gives them. `copy` has room for the keys of a tile.
[[gnu::noinline]] inline void block_logits(logit_kernel* const* as, query_rows const& q, index_t group,
    run_rows const& keys, index_t t, index_t n, sum_rows const& logits, read_ahead ahead, std::byte* copy) noexcept
{
    index_t const padded = tile::round_up(n, tile_tokens);
    bool const narrow    = keys.width(t + n - 1) < tile_tokens;
    index_t const whole  = padded / tile_tokens - (narrow ? 1 : 0);
    if (narrow) { widen_tile(keys, t + n - 1, copy); }
    for (index_t g = 0; g < group; ++g) { std::fill_n(logits.x + g * logits.step, padded, 0.0F); }
    for (index_t g = 0; g < group;)
    {
        int const pass      = pass_of(group - g);
        read_ahead next     = ahead;
        index_t const begin = g;
        std::byte const* at = keys.begin + keys.tile(t);
        index_t const done  = as[1 + pass](q.from(g), keys, at, whole, {logits.x + g * logits.step, logits.step}, next);
        at += done * tile_tokens * keys.token_bytes;
        for (; g < begin + heads_of_pass[pass]; ++g) // the tiles that are left
        {
            float* const to = logits.x + g * logits.step;
            as[0](q.from(g), keys, at, whole - done, {to + done * tile_tokens, logits.step}, next);
            if (narrow) { as[0](q.from(g), keys, copy, 1, {to + whole * tile_tokens, logits.step}, next); }
        }
    }
    for (index_t g = 0; g < group; ++g)
    {
        std::fill_n(logits.x + g * logits.step + n, padded - n, mdkv::detail::empty_lse);
    }
}

/// Sums of every row's coordinates group by group: sums [rows, groups].
[[gnu::noinline]] inline void sum_groups(
    float const* x, index_t step, index_t rows, index_t coordinates, float* sums) noexcept
{
    index_t const groups = (coordinates + quantised_group - 1) / quantised_group;
    for (index_t i = 0; i < rows; ++i)
    {
        for (index_t k = 0; k < groups; ++k)
        {
            float const* const at = x + i * step + k * quantised_group;
            index_t const n       = std::min(quantised_group, coordinates - k * quantised_group);
            simd::floats wide     = simd::broadcast(0.0F);
            index_t c             = 0;
            for (; c + simd::lanes <= n; c += simd::lanes) { wide += simd::load(at + c); }
            float sum = simd::sum(wide);
            for (; c < n; ++c) { sum += at[c]; }
            sums[i * groups + k] = sum;
        }
    }
}

/// Turns one query's logits [padded, a multiple of 16] into weights relative to the largest logit so far and adds them to
/// the state. Returns the factor that sums weighted with the old ones need. A NaN, which comparisons would hide, stays one.
[[nodiscard]] [[gnu::noinline]] inline float soften(
    float* logits, index_t padded, mdkv::detail::softmax_state& state) noexcept
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

} // namespace mdkv::cpu::inline MDKV_CPU_WIDTH::detail
