/// \file attention_kernels.hpp: what the inner loops of attention over packed tokens share: the types of what is stored, passes over query heads, the memory read next (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/width.hpp>
#include <mdkv/detail/element.hpp>
#include <mdkv/detail/run_of_head.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace mdkv::cpu::inline MDKV_CPU_WIDTH::detail
{

// Of codes, a coordinate is minimum + scale * code, with one minimum and one scale for a token's group. No kernel forms it:
// a logit is scale * (sum of q * code) + minimum * (sum of q), and a sum of values is (weight * scale) * code summed, plus
// the sum of weight * minimum, the same for all columns of the group.
//
// Every kernel is one function for each way of storing, number of query heads and number of vectors side by side, and is
// never inlined: compile time is proportional to their number. Their loops of constant length must be unrolled, so that
// arrays of vectors stay in registers; g++ does that where such a loop is not the outermost of its function.

using mdkv::detail::run_rows;

/// What one byte of codes is to the kernels, beside the element types.
enum class int8_code : std::uint8_t
{
};
enum class int4_codes : std::uint8_t ///< low half: coordinate c of the group; high half: c + half of them, rounded up
{
};

template <class Stored>
inline constexpr bool coded = !element<Stored>;
template <class Stored>
inline constexpr int per_unit = std::same_as<Stored, int4_codes> ? 2 : 1; ///< coordinates

/// A vector of stored units as numbers: to[0] elements, codes or low halves, to[1] high halves. High halves of `Whole`
/// units are not taken out of their bytes, which are 16 times the high half plus the low one.
template <class Stored, bool Whole = false>
[[gnu::always_inline]] inline void unpack(std::byte const* from, simd::floats* to) noexcept
{
    if constexpr (!coded<Stored>) { to[0] = simd::load(reinterpret_cast<Stored const*>(from)); }
    else
    {
        simd::ints const bytes = simd::load_bytes(from);
        to[0]                  = per_unit<Stored> == 2 ? simd::low_nibbles(bytes) : simd::to_floats(bytes);
        if constexpr (per_unit<Stored> == 2) { to[1] = simd::to_floats(Whole ? bytes : bytes >> 4); }
    }
}

/// Coordinate `high` of one unit, at any address.
template <class Stored>
[[nodiscard]] float number(std::byte const* unit, index_t high) noexcept
{
    auto const stored = mdkv::detail::load_at<Stored>(unit);
    if constexpr (!coded<Stored>) { return widen(stored); }
    else
    {
        auto const byte = static_cast<unsigned>(stored);
        return static_cast<float>(per_unit<Stored> == 1 ? byte : high > 0 ? byte >> 4U : byte & 15U);
    }
}

/// Tokens in a block of codes, whose sums have more to finish at its end; their bytes come from the second-level cache.
inline constexpr index_t quantised_block_tokens = 128;

/// Query heads that one pass over the tokens serves: as many accumulators as the machine's registers hold.
inline constexpr int most_group = simd::lanes == 16 ? 8 : simd::lanes == 8 ? 4 : 2;

/// The number of a pass that serves as many of the `left` query heads as possible, and of its query heads.
inline constexpr int passes = 5;
inline constexpr int heads_of_pass[passes]{1, 2, 3, 4, 8};
[[nodiscard]] inline int pass_of(index_t left) noexcept
{
    int last = passes;
    while (heads_of_pass[--last] > std::min<index_t>(left, most_group)) {}
    return last;
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

private:
    std::uintptr_t at_;
};

/// Queries of the heads of a group, or their weights: `step` apart.
struct query_rows
{
    float const* x;
    index_t step;
    float const* sums = nullptr; ///< [G, groups] of coordinates, for keys that are codes
    index_t groups    = 0;

    [[nodiscard]] query_rows from(index_t g) const noexcept { return {x + g * step, step, sums + g * groups, groups}; }
};

/// What grows by the product, for each head of a group.
struct sum_rows
{
    float* x;
    index_t step;
};

[[nodiscard]] inline simd::floats load_halves(std::byte const* p) noexcept
{
    return simd::load(reinterpret_cast<half const*>(p));
}

/// The tile of token t, of fewer than 16 tokens, as one of 16 with zeros for the missing ones.
[[gnu::noinline]] inline void widen_tile(run_rows const& rows, index_t t, std::byte* to) noexcept
{
    std::byte const* from = rows.begin + rows.tile(t);
    index_t const width   = rows.width(t);
    auto const widen_rows = [&](index_t count, index_t bytes) {
        for (index_t i = 0; i < count; ++i, from += width * bytes, to += tile_tokens * bytes)
        {
            std::memset(to, 0, static_cast<std::size_t>(tile_tokens * bytes));
            std::memcpy(to, from, static_cast<std::size_t>(width * bytes));
        }
    };
    if (rows.kind == storage::plain) { widen_rows(rows.coordinates, rows.unit); }
    for (int k = 0; k < rows.groups() && rows.kind != storage::plain; ++k)
    {
        index_t const bytes = rows.group(t, k).bytes;
        widen_rows(2, sizeof(half)); // scales, minima
        widen_rows(rows.by_token ? 1 : bytes, rows.by_token ? bytes : 1);
    }
}

} // namespace mdkv::cpu::inline MDKV_CPU_WIDTH::detail
