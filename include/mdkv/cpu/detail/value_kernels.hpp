/// \file value_kernels.hpp: the weighted sums of a block of packed values, read as they are stored (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/detail/attention_kernels.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/tile.hpp>
#include <mdkv/cpu/width.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/run_of_head.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstring>

namespace mdkv::cpu::inline MDKV_CPU_WIDTH::detail
{

/// Rows of stored units, one a token: sixteen of a tile lie together, tiles `tile_bytes` apart.
struct token_rows
{
    std::byte const* begin;
    index_t row_bytes;
    index_t tile_bytes;
    index_t tokens;
};

/// sums[g][c] += sum over tokens of weights[g][t] * rows[t][c] for the first columns, `Vectors` vectors of units; returns
/// the number of units, 0 where rows have only `units`, which are fewer. Columns in the high halves of int4 units are `apart`
/// further on; they are not taken out of their bytes: the sums of whole bytes less those of low halves are 16 times theirs.
/// Few accumulators would leave the multiply-add units waiting for one another; then neighbouring rows have their own.
template <class Stored, int G, int Vectors>
[[gnu::noinline]] index_t column_sums(query_rows const& weights, token_rows const& rows, index_t units,
    sum_rows const& sums, index_t apart, read_ahead& ahead) noexcept
{
    constexpr int lanes   = simd::lanes;
    constexpr int columns = Vectors * per_unit<Stored>;
    constexpr int chains  = G * columns; // multiply-adds that do not wait for one another
    constexpr int parts   = chains >= 8 ? 1 : chains >= 4 || !coded<Stored> ? 2 : 4;
    constexpr int few     = coded<Stored> ? 4 : parts; // rows asked for at a time
    constexpr int size    = sizeof(Stored);
    read_ahead next       = ahead;
    if (units < Vectors * lanes) { return 0; }
    simd::floats acc[parts][G][columns]{};
    float const* weight[G]; // one register each
    MDKV_UNROLL
    for (int g = 0; g < G; ++g)
    {
        weight[g] = weights.x + g * weights.step;
        MDKV_UNROLL
        for (int c = 0; c < columns && !coded<Stored>; ++c)
        {
            acc[0][g][c] = simd::load(sums.x + g * sums.step + c * lanes);
        }
    }
    auto const add_row = [&](int part, std::byte const* row, index_t t) __attribute__((always_inline))
    {
        simd::floats value[columns];
        MDKV_UNROLL
        for (int v = 0; v < Vectors; ++v)
        {
            unpack<Stored, true>(row + v * lanes * size, value + v * per_unit<Stored>);
        }
        MDKV_UNROLL
        for (int g = 0; g < G; ++g)
        {
            simd::floats const factor = simd::broadcast(weight[g][t]);
            MDKV_UNROLL
            for (int c = 0; c < columns; ++c) { acc[part][g][c] += factor * value[c]; }
        }
    };
    std::byte const* tile = rows.begin;
    for (index_t first = 0, n = 0; first < rows.tokens; first += n, tile += rows.tile_bytes)
    {
        n                    = coded<Stored> ? std::min(tile_tokens, rows.tokens - first) : rows.tokens; // neighbours
        std::byte const* row = tile;
        index_t t            = 0;
        MDKV_ROLLED
        for (; t + parts <= n; t += parts)
        {
            if (t % few == 0) { next.fetch(few * Vectors * lanes * size); }
            MDKV_UNROLL
            for (int part = 0; part < parts; ++part, row += rows.row_bytes) { add_row(part, row, first + t + part); }
        }
        MDKV_ROLLED
        for (; parts > 1 && t < n; ++t, row += rows.row_bytes) { add_row(0, row, first + t); }
    }
    MDKV_UNROLL
    for (int g = 0; g < G; ++g)
    {
        MDKV_UNROLL
        for (int c = 0; c < columns; ++c)
        {
            MDKV_UNROLL
            for (int part = 1; part < parts; ++part) { acc[0][g][c] += acc[part][g][c]; }
        }
        if constexpr (std::same_as<Stored, int4_codes>)
        {
            acc[0][g][1] = (acc[0][g][1] - acc[0][g][0]) * simd::broadcast(0.0625F);
        }
        MDKV_UNROLL
        for (int c = 0; c < columns; ++c)
        {
            float* const to = sums.x + g * sums.step + c * (per_unit<Stored> == 2 ? apart : index_t{lanes});
            simd::store(to, coded<Stored> ? simd::load(to) + acc[0][g][c] : acc[0][g][c]);
        }
    }
    ahead = next;
    return Vectors * lanes;
}

using column_kernel = index_t(
    query_rows const&, token_rows const&, index_t, sum_rows const&, index_t, read_ahead&) noexcept;

/// Kernels of one pass: of as many vectors as registers allow, of two, and of one.
struct column_pass
{
    column_kernel* wide;
    column_kernel* two;
    column_kernel* one;
};
template <class Stored, int Pass>
[[nodiscard]] constexpr column_pass columns_of() noexcept
{
    constexpr int G    = std::min(heads_of_pass[Pass], most_group);
    constexpr int wide = per_unit<Stored> == 2 ? 1 : coded<Stored> || G * simd::lanes >= 64 || simd::lanes == 4 ? 2 : 4;
    return {&column_sums<Stored, G, wide>, &column_sums<Stored, G, std::min(wide, 2)>, &column_sums<Stored, G, 1>};
}

/// Kernels for one way of storing.
struct value_kernels
{
    bool coded;
    index_t unit_bytes;
    index_t halves; ///< coordinates of a unit
    column_pass pass[passes];
    float (*number)(std::byte const* unit, index_t high) noexcept;
};
template <class Stored>
inline constexpr value_kernels values_as{coded<Stored>, sizeof(Stored), per_unit<Stored>,
    {columns_of<Stored, 0>(), columns_of<Stored, 1>(), columns_of<Stored, 2>(), columns_of<Stored, 3>(),
        columns_of<Stored, 4>()},
    &number<Stored>};

/// The columns of fewer units than a vector has, `high` of them with a high half: by fours from copies of the rows that
/// are a vector wide, the rest one by one.
MDKV_OUTLINE inline void last_columns(value_kernels const& as, int pass, query_rows const& weights,
    token_rows const& rows, index_t units, index_t high, sum_rows const& sums, index_t apart) noexcept
{
    constexpr index_t lanes = simd::lanes;
    constexpr index_t most  = 256; // rows copied at a time
    index_t const bytes     = lanes * as.unit_bytes;
    index_t const fours     = high / 4 * 4;
    index_t const sides     = heads_of_pass[pass] * as.halves;
    auto const row          = [&](index_t t) {
        return rows.begin + t / tile_tokens * rows.tile_bytes + t % tile_tokens * rows.row_bytes;
    };
    for (index_t first = 0; first < rows.tokens && fours > 0; first += most)
    {
        std::byte copy[most * lanes * sizeof(float)];
        float narrow[most_group * 2 * lanes]{};
        index_t const n = std::min(most, rows.tokens - first);
        std::memset(copy, 0, static_cast<std::size_t>(n * bytes));
        for (index_t t = 0; t < n; ++t)
        {
            std::memcpy(copy + t * bytes, row(first + t), static_cast<std::size_t>(fours * as.unit_bytes));
        }
        auto const from = [&](index_t i) { return sums.x + i / as.halves * sums.step + i % as.halves * apart; };
        for (index_t i = 0; i < sides; ++i) { std::copy_n(from(i), fours, narrow + i * lanes); }
        read_ahead none{copy};
        as.pass[pass].one({weights.x + first, weights.step}, {copy, bytes, tile_tokens * bytes, n}, lanes,
            {narrow, as.halves * lanes}, lanes, none);
        for (index_t i = 0; i < sides; ++i) { std::copy_n(narrow + i * lanes, fours, from(i)); }
    }
    for (index_t i = 0; i < sides; ++i)
    {
        index_t const g = i / as.halves;
        index_t const h = i % as.halves;
        for (index_t c = fours; c < (h == 0 ? units : high); ++c)
        {
            float sum = 0;
            for (index_t t = 0; t < rows.tokens; ++t)
            {
                sum += weights.x[g * weights.step + t] * as.number(row(t) + c * as.unit_bytes, h);
            }
            sums.x[g * sums.step + h * apart + c] += sum;
        }
    }
}

/// sums[g][c] += sum over tokens of weights[g][t] * rows[t][c] for all columns of the rows, `coordinates` of them. The
/// last of an odd number of int4 coordinates has a unit without a high half, which no kernel may add to the sums.
MDKV_OUTLINE inline void weighted_rows(value_kernels const& as, int pass, query_rows const& weights, token_rows rows,
    index_t coordinates, sum_rows sums, read_ahead& ahead) noexcept
{
    index_t units     = (coordinates + as.halves - 1) / as.halves;
    index_t const low = units;
    index_t const odd = units * as.halves - coordinates;
    for (column_kernel* const kernel : {as.pass[pass].wide, as.pass[pass].two, as.pass[pass].one})
    {
        while (index_t const done = kernel(weights, rows, units - odd, sums, low, ahead))
        {
            units -= done;
            rows.begin += done * as.unit_bytes;
            sums.x += done;
        }
    }
    if (units > 0) { last_columns(as, pass, weights, rows, units, units - odd, sums, low); }
}

/// Of n tokens in whole tiles from `scales` on: scaled[i][t] = weights[i][t] * scale[t], and bias[i] grows by the sum
/// of weights[i][t] * minimum[t].
[[gnu::noinline]] inline void scale_weights(query_rows const& weights, index_t heads, std::byte const* scales,
    index_t tile_bytes, index_t n, float* scaled, float* bias) noexcept
{
    simd::floats sum[most_group]{};
    for (index_t t = 0; t < n; t += simd::lanes)
    {
        std::byte const* const at  = scales + t / tile_tokens * tile_bytes + t % tile_tokens * index_t{sizeof(half)};
        simd::floats const scale   = load_halves(at);
        simd::floats const minimum = load_halves(at + tile_tokens * index_t{sizeof(half)});
        for (index_t i = 0; i < heads; ++i)
        {
            simd::floats const weight = simd::load(weights.x + i * weights.step + t);
            simd::store(scaled + i * quantised_block_tokens + t, weight * scale);
            sum[i] += weight * minimum;
        }
    }
    for (index_t i = 0; i < heads; ++i) { bias[i] += simd::sum(sum[i]); }
}

/// sums[g][c] += sum over n tokens from token t on, a multiple of 16, of weights[g][t] * values[t][c]. Weights are
/// followed by zeros up to a multiple of 16 tokens. Of codes, n <= quantised_block_tokens, and `copy` has room for the
/// values of a tile.
MDKV_OUTLINE inline void block_values(value_kernels const& as, query_rows const& weights, index_t group,
    run_rows const& values, index_t t, index_t n, sum_rows const& sums, read_ahead ahead, std::byte* copy) noexcept
{
    index_t const tile_bytes = tile_tokens * values.token_bytes;
    index_t const whole      = n / tile_tokens * tile_tokens;
    if (as.coded && whole < n) { widen_tile(values, t + whole, copy); }
    for (index_t g = 0; g < group;)
    {
        int const pass      = pass_of(group - g);
        index_t const heads = heads_of_pass[pass];
        read_ahead next     = ahead;
        auto const from     = weights.from(g);
        sum_rows to{sums.x + g * sums.step, sums.step};
        if (!as.coded)
        {
            token_rows const rows{values.begin + values.tile(t), values.token_bytes, tile_bytes, n};
            weighted_rows(as, pass, from, rows, values.coordinates, to, next);
        }
        for (int k = 0; k < values.groups() && as.coded; ++k, to.x += quantised_group)
        {
            float scaled[most_group * quantised_block_tokens];
            float bias[most_group]{};
            mdkv::detail::coded_group const codes{values.coordinates, k, tile_tokens, true, values.kind};
            auto const add_tiles = [&](std::byte const* tiles, index_t begin, index_t end) {
                if (begin == end) { return; }
                index_t const padded = tile::round_up(end - begin, tile_tokens);
                scale_weights(
                    {from.x + begin, from.step}, heads, tiles + codes.scales, tile_bytes, padded, scaled, bias);
                weighted_rows(as, pass, {scaled, quantised_block_tokens},
                    {tiles + codes.codes, codes.bytes, tile_bytes, end - begin}, codes.coordinates, to, next);
            };
            add_tiles(values.begin + values.tile(t), 0, whole);
            add_tiles(copy, whole, n);
            for (index_t i = 0; i < heads; ++i)
            {
                for (index_t c = 0; c < codes.coordinates; ++c) { to.x[i * to.step + c] += bias[i]; }
            }
        }
        g += heads;
    }
}

} // namespace mdkv::cpu::inline MDKV_CPU_WIDTH::detail
