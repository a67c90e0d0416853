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

namespace MDKV_NAMESPACE::detail
{

/// The rungs that tokens may take, cheapest first, and the factors that compare them.
struct rung_table
{
    std::size_t count = 0;
    mdkv::array<std::uint8_t, max_rungs> index{}; ///< rung in the caller's ratio set; then other rungs
    mdkv::array<index_t, max_rungs> cost{};       ///< bytes per token
    mdkv::array<mdkv::array<float, max_rungs>, max_rungs> inverse{}; ///< [a][c]: unit / (cost_c - cost_a)

    /// Adds a rung that costs more than those before it. Tables whose tokens compete for the same bytes need the same unit.
    constexpr void add(std::size_t rung, index_t bytes, index_t unit) noexcept
    {
        for (std::size_t a = 0; a < count; ++a)
        {
            inverse[a][count] = static_cast<float>(static_cast<double>(unit) / static_cast<double>(bytes - cost[a]));
        }
        index[count]  = static_cast<std::uint8_t>(rung);
        cost[count++] = bytes;
    }
};

/// Finds the thresholds of neighbouring tokens, one token a lane. Losses must be finite. A negative threshold counts as 0,
/// since no multiplier is negative; a threshold is infinite if a difference of losses leaves the range of float.
/// \param loss   losses at the rungs of the table, cheapest first
/// \param theta  thresholds 1, ..., rungs.count - 1; the others stay unset
template <class Floats>
[[gnu::always_inline]] MDKV_HD inline void find_thresholds(
    rung_table const& rungs, Floats const (&loss)[max_rungs], Floats (&theta)[max_rungs]) noexcept
{
    for (std::size_t c = 1; c < rungs.count; ++c)
    {
        Floats least = Floats{} + __builtin_huge_valf();
        theta[c]     = Floats{};
        for (std::size_t a = 0; a < c; ++a)
        {
            least        = smaller((loss[a] - loss[c]) * rungs.inverse[a][c], least);
            theta[a + 1] = larger(least, theta[a + 1]);
        }
    }
}

} // namespace MDKV_NAMESPACE::detail
