/// \file attention_kernels.hpp: the shared part of attention's inner loops over packed tokens: their operands, passes over query heads, the memory read next (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/detail/element.hpp>
#include <mdkv/detail/run_of_head.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace mdkv::inline MDKV_MACHINE::cpu::detail
{

// Every kernel is one function for each way of storing, number of query heads and number of vectors side by side, and is
// never inlined: compile time is proportional to their number. Their loops of constant length must be unrolled, so that
// arrays of vectors stay in registers; g++ does that where such a loop is not the outermost of its function.

using mdkv::detail::run_rows;

/// Query heads that one pass over the tokens serves: as many accumulators as the machine's registers hold.
inline constexpr int most_group = (std::min)(8, int{simd::registers} * simd::lanes / 32);

/// The number of a pass that serves as many of the `left` query heads as possible, and of its query heads.
inline constexpr int passes = 5;
inline constexpr int heads_of_pass[passes]{1, 2, 3, 4, 8};
[[nodiscard]] inline int pass_of(index_t left, index_t most = most_group) noexcept
{
    int last = passes;
    while (heads_of_pass[--last] > (std::min)(left, most)) {}
    return last;
}

/// The cache that is prefetched into, as __builtin_prefetch counts: 3 is the nearest cache, right for processors with
/// AVX-VNNI (Zen 5 read 1.2 times as fast), 2 the second. On Zen 4, whose nearest cache waits for fewer reads at a time, 3
/// costs a third of the speed, so code for unknown processors takes 2 (docs/performance.md).
#if defined(__AVXVNNI__)
inline constexpr int asked_into = 3;
#else
inline constexpr int asked_into = 2;
#endif

// g++ leaves out calls of functions that only prefetch, as if they had no effect: all such functions must be inlined.

/// An address read a little later and prefetched now: the hardware does not look beyond a page, and a block is several. To
/// prefetch beyond a buffer is harmless, so it is a number, not a pointer.
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

/// Prefetches one line of each page. To find where a page lies takes as long as to read from it, several reads one after the
/// other, and other prefetches wait in that time: pages are looked up long before their lines are prefetched.
[[gnu::always_inline]] inline void look_up(std::byte const* begin, index_t bytes) noexcept
{
    constexpr index_t page = 4096; // the smallest
    for (index_t b = 0; b < bytes; b += page) { __builtin_prefetch(begin + b, 0, asked_into); }
}

/// Bytes of a rounded number.
template <int Bits>
inline constexpr int number_bytes = Bits / 4;

/// Rounded numbers of the largest kind.
inline constexpr index_t most_number_bytes = 2;

/// One query's group of coordinates: its numbers, their unit, the coordinates' sum, and the part that a sum of products lacks.
struct rounded_query
{
    std::byte numbers[quantised_group * most_number_bytes + 32];
    float unit;
    float sum;
    float offset;

    /// Number i.
    template <int Bits>
    [[nodiscard]] int number(index_t i) const noexcept
    {
        if constexpr (Bits == 8 && simd::byte_limbs)
        {
            std::byte const* const low = numbers + i / 4 * 8 + i % 4;
            return mdkv::detail::load_at<std::int8_t>(low + 4) * 256 + mdkv::detail::load_at<std::uint8_t>(low);
        }
        else if constexpr (Bits == 4) { return mdkv::detail::load_at<std::int8_t>(numbers + i); }
        else
        {
            index_t const place = i % 4 == 1 ? i + 1 : i % 4 == 2 ? i - 1 : i;
            return mdkv::detail::load_at<std::int16_t>(numbers + place * number_bytes<Bits>);
        }
    }
};

/// Queries of the heads of a group, or their weights: `step` apart.
struct query_rows
{
    float const* x;
    index_t step;
    rounded_query const* rounded = nullptr; ///< [groups, rows] for keys that are codes
    index_t rows                 = 0;

    [[nodiscard]] query_rows from(index_t g) const noexcept
    {
        return {x + g * step, step, rounded == nullptr ? nullptr : rounded + g, rows};
    }
};

/// The sums that products are added to, for each head of a group.
struct sum_rows
{
    float* x;
    index_t step;
};

/// Makes logits of a run's whole tiles from a tile on, as many as it can, and returns their number.
using logit_kernel = index_t(
    query_rows const&, run_rows const&, std::byte const*, index_t, sum_rows const&, read_ahead&) noexcept;

/// The kernel of a pass, and the tiles that it takes at a time.
struct logit_pass
{
    logit_kernel* kernel;
    index_t tiles;
};
inline constexpr index_t most_logit_tiles = 4;

/// The kernels of one way of storing, by pass, of which none serves more than `most_heads`.
struct logit_kernels
{
    index_t most_heads;
    logit_pass pass[passes];
};

[[nodiscard]] inline simd::floats load_halves(std::byte const* p) noexcept
{
    return simd::load(reinterpret_cast<half const*>(p));
}

/// The tile of token t, of fewer than 16 tokens, as one of 16 with zeros for the missing ones.
[[gnu::noinline]] inline void widen_tile(run_rows const& rows, index_t t, std::byte* to) noexcept
{
    std::byte const* from      = rows.begin + rows.tile(t);
    index_t const width        = rows.width(t);
    std::byte const* const end = from + width * rows.token_bytes;
    auto const widen_rows      = [&](index_t count, index_t bytes) {
        constexpr index_t longest = tile_tokens * index_t{sizeof(float)};
        for (index_t i = 0; i < count; ++i, from += width * bytes, to += tile_tokens * bytes)
        {
            // A copy of constant length may take too much; the next rows overwrite that.
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
        std::byte const* row[3]; // of the tokens behind the last four
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

} // namespace mdkv::inline MDKV_MACHINE::cpu::detail
