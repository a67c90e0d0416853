/// \file threshold.hpp: the multiplier below which a token takes a costlier rung, in closed form (arXiv 2603.20616, section 4.3)
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/detail/lanes.hpp>

#include <cstddef>
#include <cstdint>

// At the multiplier m a token takes the rung r of least L_r + m * cost_r, the cheapest of several. It takes rung j or a
// costlier one exactly while m is below
//
//     theta_j = max over c >= j of  min over a < j of  (L_a - L_c) / (cost_c - cost_a)
//
// (some c >= j beats every a < j). The losses need not fall, nor be convex. Every quotient is computed once and enters all
// theta_j, so theta_1 >= theta_2 >= ... holds in floating point as well, and the number of theta_j above m is the rung.
//
// Quotients are in units of loss per *widest step* (costliest minus cheapest rung), not per byte: with two rungs
// theta_1 is then L_0 - L_1 itself, so that ordering tokens by it is ordering them by loss, to the last bit; and no
// quotient is smaller than its difference of losses, so none underflows to zero.

namespace mdkv::inline MDKV_MACHINE::detail
{

/// The rungs that the tokens of a head may take, cheapest first, and the factors that compare them.
struct rung_table
{
    std::size_t count = 0;
    mdkv::array<std::uint8_t, max_rungs> index{};                    ///< rung in the caller's ratio set
    mdkv::array<index_t, max_rungs> cost{};                          ///< bytes per token
    mdkv::array<mdkv::array<float, max_rungs>, max_rungs> inverse{}; ///< [a][c]: unit / (cost_c - cost_a)

    /// Rungs are added in the order of their costs; `compare` then sets the factors.
    MDKV_HD constexpr void add(std::size_t rung, index_t bytes) noexcept
    {
        index[count] = static_cast<std::uint8_t>(rung);
        cost[count]  = bytes;
        ++count;
    }

    /// Entry [a][c]. Tables whose tokens compete for the same bytes need the same unit.
    MDKV_HD constexpr void compare(std::size_t a, std::size_t c, index_t unit) noexcept
    {
        if (a < c && c < count)
        {
            inverse[a][c] = static_cast<float>(static_cast<double>(unit) / static_cast<double>(cost[c] - cost[a]));
        }
    }
};

/// Stands for a number of rungs that is known at run time only.
inline constexpr std::size_t run_time = 0;

/// Calls body(r) for first <= r < end; unrolled if the number of rungs is a constant, so that arrays become registers.
template <std::size_t Count, class Body>
[[gnu::always_inline]] MDKV_HD inline void for_rungs(std::size_t first, std::size_t end, Body const& body)
{
    if constexpr (Count == run_time)
    {
        MDKV_ROLLED
        for (std::size_t r = first; r < end; ++r) { body(r); }
    }
    else
    {
        MDKV_UNROLL
        for (std::size_t r = first; r < end; ++r) { body(r); }
    }
}

/// The thresholds of neighbouring tokens, one token a lane. Count is the number of rungs, or run_time. Losses must
/// be finite. A negative threshold counts as 0, since no multiplier is negative; a threshold is infinite if a difference
/// of losses leaves the range of float.
template <int Lanes, std::size_t Count = run_time>
struct token_thresholds
{
    using floats                          = lane_floats<Lanes>;
    static constexpr std::size_t capacity = Count == run_time ? max_rungs : Count;

    floats theta[capacity]; ///< theta[1] ... theta[count - 1]; the others are unused

    [[gnu::always_inline]] MDKV_HD void find(rung_table const& rungs, floats const (&loss)[capacity]) noexcept
    {
        std::size_t const count = Count == run_time ? rungs.count : Count;
        for_rungs<Count>(1, count, [&](std::size_t j) { theta[j] = floats{}; });
        for_rungs<Count>(1, count, [&](std::size_t c) {
            floats least = (loss[0] - loss[c]) * rungs.inverse[0][c];
            theta[1]     = larger(theta[1], least);
            for_rungs<Count>(1, c, [&](std::size_t a) {
                least        = smaller(least, (loss[a] - loss[c]) * rungs.inverse[a][c]);
                theta[a + 1] = larger(theta[a + 1], least);
            });
        });
    }
};

} // namespace mdkv::inline MDKV_MACHINE::detail
