/// \file element_kernels.hpp: attention over a block of tokens stored as elements, read as they are: logits, softmax and weighted sums of values (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/cpu/detail/attention_kernels.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/tile.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/softmax.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace MDKV_NAMESPACE::cpu::detail
{

/// sums[g][v] = sum over n rows of factors[g][i] * vector v of row i, or `Add` that, for G heads and `Vectors` vectors of
/// elements, of which vector v begins place(v) bytes behind its row. If there are few sums, multiply-add units would wait
/// for one another: then neighbouring rows have sums of their own.
template <element T, int G, int Vectors, bool Add, class Place>
[[gnu::always_inline]] inline void weigh_rows(query_rows const& factors, std::byte const* row, index_t row_bytes,
    index_t n, Place const& place, sum_rows const& sums, read_ahead& next) noexcept
{
    constexpr int lanes = simd::lanes;
    constexpr int parts = G * Vectors >= 8 ? 1 : 2;
    simd::floats acc[std::size_t{parts}][std::size_t{G}][std::size_t{Vectors}]{};
    float const* factor[std::size_t{G}]; // one register each
    MDKV_UNROLL
    for (int g = 0; g < G; ++g)
    {
        factor[g] = factors.x + g * factors.step;
        MDKV_UNROLL
        for (int v = 0; Add && v < Vectors; ++v) { acc[0][g][v] = simd::load(sums.x + g * sums.step + v * lanes); }
    }
    auto const add_row = [&](int part, index_t i) __attribute__((always_inline))
    {
        simd::floats x[std::size_t{Vectors}];
        MDKV_UNROLL
        for (int v = 0; v < Vectors; ++v) { x[v] = simd::load(reinterpret_cast<T const*>(row + place(v))); }
        row += row_bytes;
        MDKV_UNROLL
        for (int g = 0; g < G; ++g)
        {
            simd::floats const by = simd::broadcast(factor[g][i]);
            MDKV_UNROLL
            for (int v = 0; v < Vectors; ++v) { acc[part][g][v] += by * x[v]; }
        }
    };
    index_t i = 0;
    MDKV_ROLLED
    for (; i + parts <= n; i += parts)
    {
        next.fetch(parts * Vectors * lanes * index_t{sizeof(T)});
        MDKV_UNROLL
        for (int part = 0; part < parts; ++part) { add_row(part, i + part); }
    }
    if (i < n) { add_row(0, i); }
    MDKV_UNROLL
    for (int g = 0; g < G; ++g)
    {
        MDKV_UNROLL
        for (int v = 0; v < Vectors; ++v)
        {
            simd::store(
                sums.x + g * sums.step + v * lanes, parts == 2 ? acc[0][g][v] + acc[parts - 1][g][v] : acc[0][g][v]);
        }
    }
}

/// Writes the logits of neighbouring whole tiles of elements for G queries, `Tiles` at a time. Returns the number of tiles
/// done, the largest multiple of `Tiles` up to `tiles`. Sixteen logits of a tile grow side by side, so nothing is ever
/// summed across lanes.
template <element T, int G, int Tiles>
[[gnu::noinline]] index_t tile_logits(query_rows const& q, run_rows const& keys, std::byte const* tile, index_t tiles,
    sum_rows const& logits, read_ahead& ahead) noexcept
{
    constexpr int vectors    = Tiles * int{tile_tokens} / simd::lanes;
    constexpr index_t row    = tile_tokens * index_t{sizeof(T)};
    index_t const tile_bytes = tile_tokens * keys.token_bytes;
    auto const place         = [&](int v) __attribute__((always_inline))
    {
        index_t const token = v * simd::lanes;
        return token / tile_tokens * tile_bytes + token % tile_tokens * index_t{sizeof(T)};
    };
    read_ahead next = ahead;
    index_t done    = 0;
    for (; tiles - done >= Tiles; done += Tiles)
    {
        sum_rows const to{logits.x + done * tile_tokens, logits.step};
        weigh_rows<T, G, vectors, false>(q, tile + done * tile_bytes, row, keys.coordinates, place, to, next);
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

/// Writes logits [head_rows, n] of n tokens of a run from token t on, a multiple of 16, and -infinity after them up to the next
/// one. Rows of `logits` hold a multiple of `most_logit_tiles` tiles; `copy` holds the keys of `most_logit_tiles` tiles.
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

/// sums[g][c] += sum over n tokens of weights[g][t] * rows[t][c] for the first columns, `Vectors` vectors of elements.
/// Returns the number of columns done, 0 if `columns` is smaller.
template <element T, int G, int Vectors>
[[gnu::noinline]] index_t column_sums(query_rows const& weights, std::byte const* row, index_t row_bytes, index_t n,
    index_t columns, sum_rows const& sums, read_ahead& ahead) noexcept
{
    constexpr int width = Vectors * simd::lanes;
    if (columns < width) { return 0; }
    auto const place = [](int v) __attribute__((always_inline))
    {
        return v * simd::lanes * index_t{sizeof(T)};
    };
    read_ahead next = ahead;
    weigh_rows<T, G, Vectors, true>(weights, row, row_bytes, n, place, sums, next);
    ahead = next;
    return width;
}

using column_kernel = index_t(
    query_rows const&, std::byte const*, index_t, index_t, index_t, sum_rows const&, read_ahead&) noexcept;

/// Kernels of one pass: for the most vectors that registers allow, for two vectors, and for one.
struct column_pass
{
    column_kernel* wide;
    column_kernel* two;
    column_kernel* one;
};
template <element T, int Pass>
[[nodiscard]] constexpr column_pass columns_of() noexcept
{
    constexpr int G    = (std::min)(heads_of_pass[Pass], most_group);
    constexpr int most = simd::lanes == 16 ? 12 : simd::registers == 32 ? 16 : simd::lanes; // sums in registers
    constexpr int wide = 4 * G <= most ? 4 : 2;
    return {&column_sums<T, G, wide>, &column_sums<T, G, 2>, &column_sums<T, G, 1>};
}

/// Kernels of one element type.
struct value_kernels
{
    index_t bytes; ///< bytes of an element
    column_pass pass[passes];
};
template <element T>
inline constexpr value_kernels values_as{
    sizeof(T), {columns_of<T, 0>(), columns_of<T, 1>(), columns_of<T, 2>(), columns_of<T, 3>(), columns_of<T, 4>()}};

/// block_values for fewer columns than a vector has, from copies of the rows that are a vector wide.
MDKV_OUTLINE inline void last_columns(value_kernels const& as, int pass, query_rows const& weights,
    std::byte const* rows, index_t row_bytes, index_t n, index_t columns, sum_rows const& sums) noexcept
{
    constexpr index_t lanes = simd::lanes;
    constexpr index_t most  = 256; // rows copied at a time
    index_t const bytes     = lanes * as.bytes;
    index_t const heads     = heads_of_pass[pass];
    for (index_t first = 0; first < n; first += most)
    {
        std::byte copy[most * lanes * sizeof(float)];
        float narrow[most_group * lanes]{};
        index_t const here = (std::min)(most, n - first);
        std::memset(copy, 0, static_cast<std::size_t>(here * bytes));
        for (index_t t = 0; t < here; ++t)
        {
            std::memcpy(copy + t * bytes, rows + (first + t) * row_bytes, static_cast<std::size_t>(columns * as.bytes));
        }
        for (index_t g = 0; g < heads; ++g) { std::copy_n(sums.x + g * sums.step, columns, narrow + g * lanes); }
        read_ahead none{copy};
        as.pass[pass].one({weights.x + first, weights.step}, copy, bytes, here, lanes, sum_rows{narrow, lanes}, none);
        for (index_t g = 0; g < heads; ++g) { std::copy_n(narrow + g * lanes, columns, sums.x + g * sums.step); }
    }
}

/// sums[g][c] += sum over i < n of weights[g][i] * values[t + i][c]; t is a multiple of 16.
MDKV_OUTLINE inline void block_values(value_kernels const& as, query_rows const& weights, index_t head_rows,
    run_rows const& values, index_t t, index_t n, sum_rows const& sums, read_ahead ahead) noexcept
{
    index_t const row_bytes = values.token_bytes;
    for (index_t g = 0; g < head_rows;)
    {
        int const pass       = pass_of(head_rows - g);
        read_ahead next      = ahead;
        auto const from      = weights.from(g);
        std::byte const* row = values.begin + values.tile(t);
        index_t columns      = values.coordinates;
        sum_rows to{sums.x + g * sums.step, sums.step};
        for (column_kernel* const kernel : {as.pass[pass].wide, as.pass[pass].two, as.pass[pass].one})
        {
            while (index_t const done = kernel(from, row, row_bytes, n, columns, to, next))
            {
                columns -= done;
                row += done * as.bytes;
                to.x += done;
            }
        }
        if (columns > 0) { last_columns(as, pass, from, row, row_bytes, n, columns, to); }
        g += heads_of_pass[pass];
    }
}

} // namespace MDKV_NAMESPACE::cpu::detail
