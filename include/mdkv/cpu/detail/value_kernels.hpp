/// \file value_kernels.hpp: the weighted sums of a block of packed values, read as the elements that are stored (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/detail/attention_kernels.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/tile.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/run_of_head.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace MDKV_NAMESPACE::cpu::detail
{

/// sums[g][c] += sum over n tokens of weights[g][t] * rows[t][c] for the first columns, `Vectors` vectors of elements.
/// Returns the number of columns done, 0 if `columns` is smaller. If there are few accumulators, multiply-add units would
/// wait for one another: then neighbouring rows have separate accumulators.
template <element T, int G, int Vectors>
[[gnu::noinline]] index_t column_sums(query_rows const& weights, std::byte const* row, index_t row_bytes, index_t n,
    index_t columns, sum_rows const& sums, read_ahead& ahead) noexcept
{
    constexpr int lanes        = simd::lanes;
    constexpr int accumulators = G * Vectors >= 8 ? 1 : 2;
    read_ahead next            = ahead;
    if (columns < Vectors * lanes) { return 0; }
    simd::floats acc[std::size_t{accumulators}][std::size_t{G}][std::size_t{Vectors}]{};
    float const* weight[std::size_t{G}]; // one register each
    MDKV_UNROLL
    for (int g = 0; g < G; ++g)
    {
        weight[g] = weights.x + g * weights.step;
        MDKV_UNROLL
        for (int v = 0; v < Vectors; ++v) { acc[0][g][v] = simd::load(sums.x + g * sums.step + v * lanes); }
    }
    auto const add_row = [&](int accumulator, std::byte const* at, index_t t) __attribute__((always_inline))
    {
        simd::floats value[std::size_t{Vectors}];
        MDKV_UNROLL
        for (int v = 0; v < Vectors; ++v) { value[v] = simd::load(reinterpret_cast<T const*>(at) + v * lanes); }
        MDKV_UNROLL
        for (int g = 0; g < G; ++g)
        {
            simd::floats const factor = simd::broadcast(weight[g][t]);
            MDKV_UNROLL
            for (int v = 0; v < Vectors; ++v) { acc[accumulator][g][v] += factor * value[v]; }
        }
    };
    index_t t = 0;
    MDKV_ROLLED
    for (; t + accumulators <= n; t += accumulators)
    {
        next.fetch(accumulators * Vectors * lanes * index_t{sizeof(T)});
        MDKV_UNROLL
        for (int accumulator = 0; accumulator < accumulators; ++accumulator, row += row_bytes)
        {
            add_row(accumulator, row, t + accumulator);
        }
    }
    if (t < n) { add_row(0, row, t); }
    MDKV_UNROLL
    for (int g = 0; g < G; ++g)
    {
        MDKV_UNROLL
        for (int v = 0; v < Vectors; ++v)
        {
            simd::store(sums.x + g * sums.step + v * lanes,
                accumulators == 2 ? acc[0][g][v] + acc[accumulators - 1][g][v] : acc[0][g][v]);
        }
    }
    ahead = next;
    return Vectors * lanes;
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
    float (*number)(std::byte const*) noexcept;
};
template <element T>
[[nodiscard]] float number(std::byte const* at) noexcept
{
    return widen(mdkv::detail::load_at<T>(at));
}
template <element T>
inline constexpr value_kernels values_as{sizeof(T),
    {columns_of<T, 0>(), columns_of<T, 1>(), columns_of<T, 2>(), columns_of<T, 3>(), columns_of<T, 4>()}, &number<T>};

/// block_values for fewer columns than a vector has: fours of columns from copies of the rows that are a vector wide,
/// other columns one by one.
MDKV_OUTLINE inline void last_columns(value_kernels const& as, int pass, query_rows const& weights,
    std::byte const* rows, index_t row_bytes, index_t n, index_t columns, sum_rows const& sums) noexcept
{
    constexpr index_t lanes = simd::lanes;
    constexpr index_t most  = 256; // rows copied at a time
    index_t const bytes     = lanes * as.bytes;
    index_t const fours     = columns / 4 * 4;
    index_t const heads     = heads_of_pass[pass];
    for (index_t first = 0; first < n && fours > 0; first += most)
    {
        std::byte copy[most * lanes * sizeof(float)];
        float narrow[most_group * lanes]{};
        index_t const here = (std::min)(most, n - first);
        std::memset(copy, 0, static_cast<std::size_t>(here * bytes));
        for (index_t t = 0; t < here; ++t)
        {
            std::memcpy(copy + t * bytes, rows + (first + t) * row_bytes, static_cast<std::size_t>(fours * as.bytes));
        }
        for (index_t g = 0; g < heads; ++g) { std::copy_n(sums.x + g * sums.step, fours, narrow + g * lanes); }
        read_ahead none{copy};
        as.pass[pass].one({weights.x + first, weights.step}, copy, bytes, here, lanes, sum_rows{narrow, lanes}, none);
        for (index_t g = 0; g < heads; ++g) { std::copy_n(narrow + g * lanes, fours, sums.x + g * sums.step); }
    }
    for (index_t g = 0; g < heads; ++g)
    {
        for (index_t c = fours; c < columns; ++c)
        {
            float sum = 0;
            for (index_t t = 0; t < n; ++t)
            {
                sum += weights.x[g * weights.step + t] * as.number(rows + t * row_bytes + c * as.bytes);
            }
            sums.x[g * sums.step + c] += sum;
        }
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
