/// \file logit_kernels.hpp: the logits of a block of packed tokens, read as they are stored, and their softmax (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/detail/attention_kernels.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/width.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/softmax.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

namespace mdkv::cpu::inline MDKV_CPU_WIDTH::detail
{

/// Adds to the logits of `tiles` neighbouring whole tiles, `Tiles` at a time and as far as that goes, for G queries; returns
/// the number of tiles done. Sixteen logits of a tile grow side by side, so nothing is ever summed across lanes.
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
    index_t const groups      = coded<Stored> ? keys.groups() : 1;
    index_t const group_bytes = tile_tokens * stored_bytes(keys.kind, quantised_group, 0);
    read_ahead next           = ahead;
    index_t done              = 0;
    for (; tiles - done >= Tiles; done += Tiles)
    {
        for (index_t k = 0; k < groups; ++k)
        {
            std::byte const* const scales = tile + done * tile_bytes + k * group_bytes;
            std::byte const* at           = coded<Stored> ? scales + 2 * halves : scales;
            float* const to               = logits.x + done * tile_tokens;
            index_t const coordinates     = coded<Stored> ? in_group(keys, k) : keys.coordinates;
            index_t const rows            = (coordinates + units - 1) / units;
            float const* query[G]; // one register each
            simd::floats acc[G][vectors];
MDKV_UNROLL
            for (int g = 0; g < G; ++g)
            {
                query[g] = q.x + g * q.step + k * quantised_group;
MDKV_UNROLL
                for (int v = 0; v < vectors; ++v)
                {
                    acc[g][v] = coded<Stored> ? simd::broadcast(0.0F) : simd::load(to + g * logits.step + v * lanes);
                }
            }
            if (coded<Stored>) { next.fetch(2 * halves * Tiles); }
            for (index_t c = 0; c < rows; ++c, at += row)
            {
                if (c % few == 0) { next.fetch(few * Tiles * row); }
                simd::floats key[units][vectors];
MDKV_UNROLL
                for (int v = 0; v < vectors; ++v)
                {
                    std::byte const* const from =
                        at + v * lanes / tile_tokens * tile_bytes + v * lanes % tile_tokens * index_t{sizeof(Stored)};
                    if constexpr (!coded<Stored>) { key[0][v] = simd::load(reinterpret_cast<Stored const*>(from)); }
                    else
                    {
                        simd::ints const bytes = simd::load_bytes(from);
                        key[0][v]              = units == 2 ? simd::low_nibbles(bytes) : simd::to_floats(bytes);
                        if constexpr (units == 2) { key[1][v] = simd::to_floats(bytes >> 4); }
                    }
                }
MDKV_UNROLL
                for (int u = 0; u < units; ++u)
                {
                    if (u * rows + c >= coordinates) { break; } // of an odd number, the last byte has no high half
MDKV_UNROLL
                    for (int g = 0; g < G; ++g)
                    {
                        simd::floats const factor = simd::broadcast(query[g][u * rows + c]);
MDKV_UNROLL
                        for (int v = 0; v < vectors; ++v) { acc[g][v] += factor * key[u][v]; }
                    }
                }
            }
MDKV_UNROLL
            for (int v = 0; v < vectors; ++v)
            {
                index_t const from = v * lanes / tile_tokens * tile_bytes + v * lanes % tile_tokens * 2;
                simd::floats scale{}, minimum{};
                if constexpr (coded<Stored>)
                {
                    scale   = load_halves(scales + from);
                    minimum = load_halves(scales + halves + from);
                }
MDKV_UNROLL
                for (int g = 0; g < G; ++g)
                {
                    float* const out = to + g * logits.step + v * lanes;
                    if constexpr (!coded<Stored>) { simd::store(out, acc[g][v]); }
                    else
                    {
                        simd::floats const sum = simd::broadcast(q.sums[g * q.groups + k]);
                        simd::store(out, simd::load(out) + scale * acc[g][v] + minimum * sum);
                    }
                }
            }
        }
    }
    ahead = next;
    return done;
}

using logit_kernel = index_t(
    query_rows const&, run_rows const&, std::byte const*, index_t, sum_rows const&, read_ahead&) noexcept;

/// Logits [group, n] of n tokens of a run from token t on, a multiple of 16; those of a last, incomplete sixteen are followed
/// by -infinity. Of codes, q.sums as `sum_groups` gives them.
template <class Stored>
[[gnu::noinline]] void block_logits(query_rows const& q, index_t group, run_rows const& keys, index_t t, index_t n,
    sum_rows const& logits, read_ahead ahead) noexcept
{
    index_t const padded = (n + tile_tokens - 1) / tile_tokens * tile_tokens;
    index_t const whole  = std::min(padded, keys.stored / tile_tokens * tile_tokens - t) / tile_tokens;
    index_t const left   = t + whole * tile_tokens; // first token of the narrow tile
    index_t const groups = keys.groups();
    constexpr int units  = per_unit<Stored>;
    for (index_t g = 0; g < group; ++g) { std::fill_n(logits.x + g * logits.step, padded, 0.0F); }
    for (index_t g = 0; g < group;)
    {
        auto const pass = heads_of_pass(group - g, [](auto heads) {
            constexpr int G     = heads.value;
            constexpr int tiles = G * 4 <= most_group ? 4 : G * 2 <= most_group || simd::lanes == 16 ? 2 : 1;
            return pass_kernels<logit_kernel>{G, &tile_logits<Stored, G, tiles>, &tile_logits<Stored, G, 1>};
        });
        read_ahead next = ahead;
        sum_rows to{logits.x + g * logits.step, logits.step};
        index_t const done = pass.wide(q.from(g), keys, keys.begin + keys.tile(t), whole, to, next);
        to.x += done * tile_tokens;
        pass.one(q.from(g), keys, keys.begin + keys.tile(t + done * tile_tokens), whole - done, to, next);
        to.x += (whole - done) * tile_tokens;
        for (index_t k = 0; k < groups && t + n > left; ++k)
        {
            std::byte copy[(quantised_group * sizeof(Stored) + 2 * sizeof(half)) * tile_tokens];
            auto const from     = keys.group(left, static_cast<int>(k));
            std::byte const* at = keys.begin + keys.tile(left);
            std::byte* end      = copy;
            if (coded<Stored>)
            {
                end = widen_rows(at + from.scales, 2, from.width, sizeof(half), end);
                at += from.codes;
            }
            else { at += k * quantised_group * from.width * keys.unit; }
            widen_rows(at, (from.coordinates + units - 1) / units, from.width, sizeof(Stored), end);
            run_rows narrow    = keys;
            narrow.coordinates = from.coordinates;
            pass.one(q.from(g, k), narrow, copy, 1, to, next);
        }
        g += pass.heads;
    }
    for (index_t g = 0; g < group; ++g)
    {
        std::fill(logits.x + g * logits.step + n, logits.x + g * logits.step + padded,
            -std::numeric_limits<float>::infinity());
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
