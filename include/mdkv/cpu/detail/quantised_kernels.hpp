/// \file quantised_kernels.hpp: the loops of attention over tokens stored as int8 or int4 codes, read as they lie in the packed cache (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/detail/attention_kernels.hpp>
#include <mdkv/cpu/detail/repeat.hpp>
#include <mdkv/cpu/simd.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <type_traits>

namespace mdkv::cpu::detail
{

// A coordinate is minimum + scale * code, with one minimum and one scale for a token's group. Neither kernel forms it: a
// logit is scale * (sum of q * code) + minimum * (sum of q), and a sum of values is (weight * scale) * code summed, plus
// the sum of weight * minimum, the same for all columns of the group.

/// Keys or values of one quantised run, in the layout of cache.hpp.
template <storage Kind>
struct quantised_rows
{
    std::byte const* at;
    index_t coordinates;

    /// One group of coordinates in one tile, or in neighbouring tiles of 16.
    struct group
    {
        std::byte const* scales;
        std::byte const* minima;
        std::byte const* codes;
    };

    [[nodiscard]] index_t groups() const { return (coordinates + quantised_group - 1) / quantised_group; }
    [[nodiscard]] index_t in_group(index_t k) const
    {
        return std::min(quantised_group, coordinates - k * quantised_group);
    }
    /// Bytes of codes of one token in a group of n coordinates.
    [[nodiscard]] static constexpr index_t code_bytes(index_t n) { return Kind == storage::int8 ? n : (n + 1) / 2; }
    [[nodiscard]] index_t tile_bytes() const { return tile_tokens * stored_bytes(Kind, coordinates, 0); }

    /// Group k of a tile that is `width` tokens wide.
    [[nodiscard]] group group_of(index_t tile, index_t k, index_t width) const
    {
        std::byte const* const first = at + tile * tile_bytes() + width * k * stored_bytes(Kind, quantised_group, 0);
        return {first, first + 2 * width, first + 4 * width};
    }
};

/// Scales or minima of a tile, followed by zeros: lanes beyond a narrow tile must not bring a NaN into sums.
struct padded_halves
{
    half value[tile_tokens];

    padded_halves(std::byte const* from, index_t width) noexcept
    {
        std::memset(static_cast<void*>(value), 0, sizeof value);
        std::memcpy(static_cast<void*>(value), from, static_cast<std::size_t>(2 * width));
    }

    [[nodiscard]] std::byte const* bytes() const noexcept { return reinterpret_cast<std::byte const*>(value); }
};

template <int N = simd::lanes>
[[nodiscard]] inline simd::floats_of<N> load_halves(std::byte const* p) noexcept
{
    return simd::load<N>(reinterpret_cast<half const*>(p));
}

/// Adds one group's share to the logits of `Tiles` neighbouring tiles of 16 for G queries. q_sums[g] is the sum of the
/// queries' coordinates in the group.
template <storage Kind, int G, int Tiles>
inline void group_logits(float const* q, index_t q_step, float const* q_sums, index_t sum_step,
    typename quantised_rows<Kind>::group const& keys, index_t tile_bytes, index_t coordinates, float* logits,
    index_t logit_step, read_ahead ahead) noexcept
{
    constexpr int lanes   = simd::lanes;
    constexpr int vectors = Tiles * int{tile_tokens} / lanes;
    simd::floats acc[G][vectors];
    repeat<G>([&](auto g) { repeat<vectors>([&](auto v) { acc[g][v] = simd::broadcast(0.0F); }); });
    auto const load_row = [&](std::byte const* row, simd::ints(&codes)[vectors]) {
        repeat<vectors>([&](auto v) {
            constexpr int at = decltype(v)::value * lanes;
            codes[v]         = simd::load_bytes(row + (at / tile_tokens) * tile_bytes + at % tile_tokens);
        });
    };
    auto const add = [&](index_t c, simd::floats const(&code)[vectors]) {
        repeat<G>([&](auto g) {
            simd::floats const factor = simd::broadcast(q[g * q_step + c]);
            repeat<vectors>([&](auto v) { acc[g][v] += factor * code[v]; });
        });
    };
    simd::ints bytes[vectors];
    simd::floats code[vectors];
    constexpr index_t few = 4; // rows asked for at a time: a line or two
    index_t const rows    = quantised_rows<Kind>::code_bytes(coordinates);
    ahead.fetch(4 * Tiles * tile_tokens);
    for (index_t c = 0; c < rows; ++c)
    {
        if (c % few == 0) { ahead.fetch(few * Tiles * tile_tokens); }
        load_row(keys.codes + c * tile_tokens, bytes);
        if constexpr (Kind == storage::int8)
        {
            repeat<vectors>([&](auto v) { code[v] = simd::to_floats(bytes[v]); });
            add(c, code);
        }
        else
        {
            repeat<vectors>([&](auto v) { code[v] = simd::low_nibbles(bytes[v]); });
            add(c, code);
            if (rows + c == coordinates) { break; }
            repeat<vectors>([&](auto v) { code[v] = simd::to_floats(bytes[v] >> 4); });
            add(rows + c, code);
        }
    }
    repeat<vectors>([&](auto v) {
        constexpr int at           = decltype(v)::value * lanes;
        index_t const from         = (at / tile_tokens) * tile_bytes + 2 * (at % tile_tokens);
        simd::floats const scale   = load_halves(keys.scales + from);
        simd::floats const minimum = load_halves(keys.minima + from);
        repeat<G>([&](auto g) {
            float* const to = logits + g * logit_step + at;
            simd::store(to, simd::load(to) + scale * acc[g][v] + minimum * simd::broadcast(q_sums[g * sum_step]));
        });
    });
}

/// The same for a tile of fewer than 16 tokens, from a padded copy of the group.
template <storage Kind, int G>
inline void narrow_group_logits(float const* q, index_t q_step, float const* q_sums, index_t sum_step,
    typename quantised_rows<Kind>::group const& keys, index_t width, index_t coordinates, float* logits,
    index_t logit_step) noexcept
{
    padded_halves const scales{keys.scales, width};
    padded_halves const minima{keys.minima, width};
    std::byte codes[quantised_group * tile_tokens]{};
    for (index_t c = 0; c < quantised_rows<Kind>::code_bytes(coordinates); ++c)
    {
        std::memcpy(codes + c * tile_tokens, keys.codes + c * width, static_cast<std::size_t>(width));
    }
    group_logits<Kind, G, 1>(q, q_step, q_sums, sum_step, {scales.bytes(), minima.bytes(), codes}, 0, coordinates,
        logits, logit_step, read_ahead{codes});
}

/// Logits of n tokens, beginning with tile `first`; those of a last, incomplete sixteen are followed by -infinity.
/// q_sums [group, keys.groups()] as `sum_groups` gives them.
template <storage Kind>
inline void quantised_logits(float const* q, index_t q_step, float const* q_sums, index_t group,
    quantised_rows<Kind> const& keys, index_t first, index_t n, float* logits, index_t logit_step,
    read_ahead ahead) noexcept
{
    index_t const whole      = n / tile_tokens;
    index_t const tile_bytes = keys.tile_bytes();
    index_t const groups     = keys.groups();
    index_t const padded     = (n + tile_tokens - 1) / tile_tokens * tile_tokens;
    for (index_t g = 0; g < group; ++g) { std::fill_n(logits + g * logit_step, padded, 0.0F); }
    for_group(group, [&](auto chunk, index_t g) {
        constexpr int tiles = chunk.value * 4 <= most_group                        ? 4
                              : chunk.value * 2 <= most_group || simd::lanes == 16 ? 2
                                                                                   : 1;
        index_t i           = 0;
        auto const step     = [&](auto count) {
            for (index_t k = 0; k < groups; ++k)
            {
                index_t const coordinates = keys.in_group(k);
                group_logits<Kind, chunk.value, count.value>(q + g * q_step + k * quantised_group, q_step,
                    q_sums + g * groups + k, groups, keys.group_of(first + i, k, tile_tokens), tile_bytes, coordinates,
                    logits + g * logit_step + i * tile_tokens, logit_step, ahead);
                ahead = ahead.beyond(count.value * tile_tokens * stored_bytes(Kind, coordinates, 0));
            }
            i += count.value;
        };
        while (whole - i >= tiles) { step(constant<tiles>); }
        while (i < whole) { step(constant<1>); }
        index_t const width = n - whole * tile_tokens;
        for (index_t k = 0; width > 0 && k < groups; ++k)
        {
            narrow_group_logits<Kind, chunk.value>(q + g * q_step + k * quantised_group, q_step,
                q_sums + g * groups + k, groups, keys.group_of(first + whole, k, width), width, keys.in_group(k),
                logits + g * logit_step + whole * tile_tokens, logit_step);
        }
    });
    for (index_t g = 0; g < group; ++g)
    {
        std::fill(
            logits + g * logit_step + n, logits + g * logit_step + padded, -std::numeric_limits<float>::infinity());
    }
}

/// Sums of every row's coordinates group by group: sums [rows, groups].
inline void sum_groups(float const* x, index_t step, index_t rows, index_t coordinates, float* sums) noexcept
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

/// scaled[g][t] = weights[g][t] * scale[t] over the tokens of `tiles` neighbouring tiles (for one, the scales and minima
/// may be a padded copy), and bias[g] += the sum of weights[g][t] * minimum[t].
template <int G>
inline void scale_weights(float const* weights, index_t weight_step, std::byte const* scales, std::byte const* minima,
    index_t tile_bytes, index_t tiles, float* scaled, index_t scaled_step, float* bias) noexcept
{
    simd::floats sum[G];
    repeat<G>([&](auto g) { sum[g] = simd::broadcast(0.0F); });
    for (index_t i = 0; i < tiles; ++i)
    {
        repeat<int{tile_tokens} / simd::lanes>([&](auto v) {
            index_t const t            = i * tile_tokens + v * simd::lanes;
            simd::floats const scale   = load_halves(scales + i * tile_bytes + 2 * v * simd::lanes);
            simd::floats const minimum = load_halves(minima + i * tile_bytes + 2 * v * simd::lanes);
            repeat<G>([&](auto g) {
                simd::floats const weight = simd::load(weights + g * weight_step + t);
                simd::store(scaled + g * scaled_step + t, weight * scale);
                sum[g] += weight * minimum;
            });
        });
    }
    repeat<G>([&](auto g) { bias[g] += simd::sum(sum[g]); });
}

/// Codes of one group in neighbouring tiles, token by token.
struct code_rows
{
    std::byte const* at;
    index_t row_bytes;
    index_t tile_bytes;
    index_t tokens;
};

/// out[g][c] += sum over tokens of weights[g][t] * code[t][c], for one or two vectors of N columns: neighbours (int8), or
/// those in the low and the high halves of N bytes, whose columns are `apart` apart (int4). High halves are not taken
/// out of their bytes: the sums of whole bytes less those of low halves are 16 times theirs.
template <storage Kind, int G, int N, int Columns>
inline void code_columns(float const* weights, index_t weight_step, code_rows const& rows, float* out, index_t out_step,
    index_t apart, read_ahead ahead) noexcept
{
    constexpr int chains = G * Columns; // multiply-adds that do not wait for one another
    constexpr int parts  = chains >= 8 ? 1 : chains >= 4 ? 2 : 4;
    simd::floats_of<N> acc[parts][G][Columns];
    repeat<parts>([&](auto part) {
        repeat<G>([&](auto g) { repeat<Columns>([&](auto c) { acc[part][g][c] = simd::broadcast<N>(0.0F); }); });
    });
    auto const add_row = [&](auto part, std::byte const* row, index_t t) {
        simd::floats_of<N> code[Columns];
        if constexpr (Kind == storage::int8)
        {
            repeat<Columns>([&](auto c) { code[c] = simd::to_floats<N>(simd::load_bytes<N>(row + c * N)); });
        }
        else
        {
            simd::ints_of<N> const bytes = simd::load_bytes<N>(row);
            code[0]                      = simd::low_nibbles<N>(bytes);
            code[1]                      = simd::to_floats<N>(bytes);
        }
        repeat<G>([&](auto g) {
            simd::floats_of<N> const factor = simd::broadcast<N>(weights[g * weight_step + t]);
            repeat<Columns>([&](auto c) { acc[part][g][c] += factor * code[c]; });
        });
    };
    std::byte const* tile = rows.at;
    for (index_t first = 0; first < rows.tokens; first += tile_tokens)
    {
        index_t const n      = std::min(tile_tokens, rows.tokens - first);
        std::byte const* row = tile;
        index_t t            = 0;
        ahead.fetch(4 * tile_tokens);
        for (; t + parts <= n; t += parts)
        {
            if (t % 4 == 0) { ahead.fetch(4 * rows.row_bytes); }
            repeat<parts>([&](auto part) { add_row(part, row + part * rows.row_bytes, first + t + part); });
            row += parts * rows.row_bytes;
        }
        for (; t < n; ++t)
        {
            add_row(constant<0>, row, first + t);
            row += rows.row_bytes;
        }
        tile += rows.tile_bytes;
    }
    repeat<G>([&](auto g) {
        repeat<Columns>([&](auto c) { repeat<parts - 1>([&](auto part) { acc[0][g][c] += acc[part + 1][g][c]; }); });
        if constexpr (Kind == storage::int4)
        {
            acc[0][g][1] = (acc[0][g][1] - acc[0][g][0]) * simd::broadcast<N>(0.0625F);
        }
        repeat<Columns>([&](auto c) {
            float* const to = out + g * out_step + c * apart;
            simd::store_floats<N>(to, simd::load<N>(to) + acc[0][g][c]);
        });
    });
}

/// The same for all columns of a group of `columns` coordinates.
template <storage Kind, int G>
inline void code_group(float const* weights, index_t weight_step, code_rows const& rows, index_t columns, float* out,
    index_t out_step, read_ahead ahead) noexcept
{
    constexpr int lanes = simd::lanes;
    // int8: columns; int4: bytes, whose high halves are the columns from `low` on
    index_t const low   = Kind == storage::int8 ? columns : (columns + 1) / 2;
    index_t const whole = Kind == storage::int8 ? columns : columns / 2;
    index_t c           = 0;
    auto const advance  = [&](auto width, auto vectors) {
        constexpr int w = decltype(width)::value;
        constexpr int v = Kind == storage::int8 ? decltype(vectors)::value : 2;
        code_rows from  = rows;
        from.at += c;
        code_columns<Kind, G, w, v>(
            weights, weight_step, from, out + c, out_step, Kind == storage::int8 ? w : low, ahead);
        index_t const bytes = Kind == storage::int8 ? w * v : w;
        ahead               = ahead.beyond(rows.tokens * bytes);
        c += bytes;
    };
    if constexpr (Kind == storage::int8)
    {
        while (whole - c >= 2 * lanes) { advance(constant<lanes>, constant<2>); }
    }
    while (whole - c >= lanes) { advance(constant<lanes>, constant<1>); }
    if constexpr (lanes > 8)
    {
        if (whole - c >= 8) { advance(constant<8>, constant<1>); }
    }
    if constexpr (lanes > 4)
    {
        if (whole - c >= 4) { advance(constant<4>, constant<1>); }
    }
    for (; c < low; ++c)
    {
        float acc[G][2]{};
        for (index_t t = 0; t < rows.tokens; ++t)
        {
            auto const byte = static_cast<unsigned>(
                rows.at[t / tile_tokens * rows.tile_bytes + t % tile_tokens * rows.row_bytes + c]);
            for (int g = 0; g < G; ++g)
            {
                float const weight = weights[g * weight_step + t];
                acc[g][0] += weight * static_cast<float>(Kind == storage::int8 ? byte : byte & 15U);
                acc[g][1] += weight * static_cast<float>(byte >> 4U);
            }
        }
        for (int g = 0; g < G; ++g)
        {
            out[g * out_step + c] += acc[g][0];
            if (low + c < columns) { out[g * out_step + low + c] += acc[g][1]; }
        }
    }
}

/// out[g][c] += sum over n tokens, beginning with tile `first`, of weights[g][t] * values[t][c]. Weights are followed by
/// zeros up to a multiple of 16 tokens; n <= Most.
template <index_t Most, storage Kind>
inline void quantised_values(float const* weights, index_t weight_step, index_t group,
    quantised_rows<Kind> const& values, index_t first, index_t n, float* out, index_t out_step,
    read_ahead ahead) noexcept
{
    using rows               = quantised_rows<Kind>;
    index_t const tile_bytes = values.tile_bytes();
    index_t const whole      = n / tile_tokens;
    index_t const width      = n - whole * tile_tokens;
    index_t const after      = whole * tile_tokens; // tokens before the narrow tile
    for_group(group, [&](auto chunk, index_t g) {
        constexpr int G           = chunk.value;
        float const* const weight = weights + g * weight_step;
        float* const to           = out + g * out_step;
        for (index_t k = 0; k < values.groups(); ++k)
        {
            index_t const columns = values.in_group(k);
            index_t const bytes   = rows::code_bytes(columns);
            float* const sums     = to + k * quantised_group;
            float scaled[G * Most];
            float bias[G]{};
            if (whole > 0)
            {
                auto const from = values.group_of(first, k, tile_tokens);
                scale_weights<G>(weight, weight_step, from.scales, from.minima, tile_bytes, whole, scaled, Most, bias);
                code_group<Kind, G>(
                    scaled, Most, {from.codes, bytes, tile_bytes, after}, columns, sums, out_step, ahead);
                ahead = ahead.beyond(after * stored_bytes(Kind, columns, 0));
            }
            if (width > 0)
            {
                auto const from = values.group_of(first + whole, k, width);
                padded_halves const scales{from.scales, width};
                padded_halves const minima{from.minima, width};
                scale_weights<G>(weight + after, weight_step, scales.bytes(), minima.bytes(), 0, 1, scaled, Most, bias);
                code_group<Kind, G>(scaled, Most, {from.codes, bytes, 0, width}, columns, sums, out_step, ahead);
            }
            for (int i = 0; i < G; ++i)
            {
                for (index_t c = 0; c < columns; ++c) { sums[i * out_step + c] += bias[i]; }
            }
        }
    });
}

} // namespace mdkv::cpu::detail
