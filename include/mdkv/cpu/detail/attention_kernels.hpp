/// \file attention_kernels.hpp: the shared part of attention's inner loops over packed tokens: their operands, passes over query heads, the memory read next (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/detail/run_of_head.hpp>

#include <algorithm>
#include <cstring>

namespace MDKV_NAMESPACE::cpu::detail
{

// There is one kernel for each storage kind, number of query heads and number of vectors side by side. Kernels are never
// inlined: compile time is proportional to their number. Loops of constant length must be unrolled, so that arrays of
// vectors stay in registers; g++ unrolls such a loop if it is not the outermost of its function.

using mdkv::detail::run_rows;

/// Query heads that one pass over the tokens serves: more accumulators would not fit into the machine's registers.
inline constexpr int most_group = (std::min)(8, int{simd::registers} * simd::lanes / 32);

/// Query heads of each pass; pass_of returns the largest pass that serves at most `left` query heads, and at most `most`.
inline constexpr int passes = 5;
inline constexpr int heads_of_pass[passes]{1, 2, 3, 4, 8};
[[nodiscard]] inline int pass_of(index_t left, index_t most = most_group) noexcept
{
    int last = passes;
    while (heads_of_pass[--last] > (std::min)(left, most)) {}
    return last;
}

/// Locality for __builtin_prefetch: 3 is the first-level cache, right for processors with AVX-VNNI (Zen 5 read 1.2 times
/// as fast), 2 the second-level cache. On Zen 4, whose first-level cache waits for fewer reads at a time, 3 costs a third
/// of the speed, so code for unknown processors takes 2 (docs/lab/2026-11/performance.md).
#if defined(__AVXVNNI__)
inline constexpr int asked_into = 3;
#else
inline constexpr int asked_into = 2;
#endif

// g++ leaves out calls of functions that only prefetch, as if they had no effect: all such functions must be inlined.

/// A cursor over bytes that are prefetched now and read a little later: hardware prefetchers stop at the end of a page, and a block
/// spans several. The address is a number, not a pointer, because it may pass the end of a buffer, which is harmless.
class read_ahead
{
public:
    explicit read_ahead(void const* at) noexcept
        : at_{reinterpret_cast<std::uintptr_t>(at)}
    {}

    /// Prefetches the next `bytes` bytes.
    [[gnu::always_inline]] void fetch(index_t bytes) noexcept
    {
        for (index_t b = 0; b < bytes; b += 64)
        {
            __builtin_prefetch(reinterpret_cast<void const*>(at_ + static_cast<std::uintptr_t>(b)), 0, asked_into);
        }
        at_ += static_cast<std::uintptr_t>(bytes);
    }

private:
    std::uintptr_t at_;
};

/// Prefetches one line of each page. An address translation takes as long as a few reads, one after the other, and other
/// prefetches wait for it: pages are prefetched long before their other lines.
[[gnu::always_inline]] inline void look_up(std::byte const* begin, index_t bytes) noexcept
{
    constexpr index_t page = 4096; // smallest page size
    for (index_t b = 0; b < bytes; b += page) { __builtin_prefetch(begin + b, 0, asked_into); }
}

/// Bytes of a rounded number, a factor of codes of `Bits` bits.
template <int Bits>
inline constexpr int number_bytes = Bits / 4;

/// Bytes of the largest rounded number.
inline constexpr index_t most_number_bytes = 2;

/// One group of a query's coordinates as rounded numbers: with their unit, the sum of the coordinates, and the offset that
/// is added to a sum of products with codes to correct its rounding errors.
struct rounded_query
{
    std::byte numbers[quantised_group * most_number_bytes + 32];
    float unit;
    float sum;
    float offset;

    /// Number i, without its unit.
    template <int Bits>
    [[nodiscard]] int number(index_t i) const noexcept
    {
        if constexpr (Bits == 4) { return mdkv::detail::load_at<std::int8_t>(numbers + i); }
        else
        {
            index_t const number = i % 4 == 1 ? i + 1 : i % 4 == 2 ? i - 1 : i;
            return mdkv::detail::load_at<std::int16_t>(numbers + number * number_bytes<Bits>);
        }
    }
};

/// Rows of queries, or of weights, `step` apart; one for each row of a head.
struct query_rows
{
    float const* x;
    index_t step;
    rounded_query const* rounded = nullptr; ///< [groups, rows], for coded keys
    index_t rows                 = 0;

    [[nodiscard]] query_rows from(index_t g) const noexcept
    {
        return {x + g * step, step, rounded == nullptr ? nullptr : rounded + g, rows};
    }
};

/// Rows of sums that products are added to, `step` apart; one for each row of a head.
struct sum_rows
{
    float* x;
    index_t step;
};

/// Writes logits of a run's whole tiles from a tile on and returns the number of tiles done, which may be fewer than given.
using logit_kernel = index_t(
    query_rows const&, run_rows const&, std::byte const*, index_t, sum_rows const&, read_ahead&) noexcept;

/// The kernel of a pass, and the tiles that it takes at a time.
struct logit_pass
{
    logit_kernel* kernel;
    index_t tiles;
};
inline constexpr index_t most_logit_tiles = 4;

/// The kernels of one storage kind by pass; none serves more than `most_heads` query heads.
struct logit_kernels
{
    index_t most_heads;
    logit_pass pass[passes];
};

[[nodiscard]] inline simd::floats load_halves(std::byte const* p) noexcept
{
    return simd::load(reinterpret_cast<half const*>(p));
}

/// Copies the tile of token t, which may have fewer than 16 tokens, as a tile of 16 with zeros for the missing tokens.
[[gnu::noinline]] inline void widen_tile(run_rows const& rows, index_t t, std::byte* to) noexcept
{
    std::byte const* from      = rows.begin + rows.tile(t);
    index_t const width        = rows.width(t);
    std::byte const* const end = from + width * rows.token_bytes;
    auto const widen_rows      = [&](index_t count, index_t bytes) {
        constexpr index_t longest = tile_tokens * index_t{sizeof(float)};
        for (index_t i = 0; i < count; ++i, from += width * bytes, to += tile_tokens * bytes)
        {
            // A copy of constant length may take too much; the next rows overwrite the excess.
            if (!rows.by_token && end - from >= longest) { std::memcpy(to, from, longest); }
            else { std::memcpy(to, from, static_cast<std::size_t>(width * bytes)); }
        }
    };
    std::memset(to, 0, static_cast<std::size_t>(tile_tokens * rows.token_bytes));
    if (rows.kind == storage::plain) { widen_rows(rows.coordinates, rows.unit); }
    for (int k = 0; k < rows.groups() && rows.kind != storage::plain; ++k)
    {
        index_t const bytes = rows.group(t, k).bytes;
        widen_rows(2, sizeof(half)); // scales, minima
        if (!rows.by_token)
        {
            widen_rows(bytes / 4, 4);
            widen_rows(bytes % 4, 1);
            continue;
        }
        index_t const fours = width / 4 * 4;
        std::memcpy(to, from, static_cast<std::size_t>(fours * bytes));
        static constexpr std::byte nothing[quantised_group]{};
        std::byte const* row[3]; // codes of the tokens after the last whole four
        for (index_t i = 0; i < 3; ++i) { row[i] = fours + i < width ? from + (fours + i) * bytes : nothing; }
        for (index_t b = 0; b < bytes && fours < width; ++b)
        {
            auto const of = [&](int i) { return static_cast<std::uint32_t>(row[i][b]); };
            mdkv::detail::store_at(to + fours * bytes + 4 * b, of(0) | of(1) << 8U | of(2) << 16U);
        }
        from += width * bytes;
        to += tile_tokens * bytes;
    }
}

} // namespace MDKV_NAMESPACE::cpu::detail
