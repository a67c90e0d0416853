/// \file threshold.hpp: the multiplier at which a token gives up a step to a costlier rung, in closed form (arXiv 2603.20616, section 4.3)
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

#include <cuda/std/array>

// At the multiplier m a token takes the rung r of least L_r + m * cost_r, the cheapest of several. It takes rung j or a
// costlier one exactly while m is below
//
//     theta_j = max over c >= j of  min over a < j of  (L_a - L_c) / (cost_c - cost_a)
//
// (some c >= j beats every a < j). Nothing is asked of the losses: they need not fall, nor be convex. Every quotient is
// computed once and enters all theta_j, so theta_1 >= theta_2 >= ... holds in floating point as well, and the number of
// theta_j above m is the rung.
//
// Quotients are in units of loss per *widest step* (costliest minus cheapest rung), not per byte: with two rungs
// theta_1 is then L_0 - L_1 itself, so that ordering tokens by it is ordering them by loss, to the last bit; and no
// quotient is smaller than its difference of losses, so none underflows to zero.

namespace mdkv::detail
{

/// The rungs that the tokens of a head may take, cheapest first, and what comparing them needs.
struct rung_table
{
    std::size_t count = 0;
    index_t unit      = 0;                               ///< bytes that multipliers are counted in
    ::cuda::std::array<std::uint8_t, max_rungs> index{}; ///< in the caller's ratio set
    ::cuda::std::array<index_t, max_rungs> cost{};       ///< bytes per token
    ::cuda::std::array<::cuda::std::array<float, max_rungs>, max_rungs> inverse{}; ///< [a][c]: unit / (cost_c - cost_a)

    rung_table() = default;

    /// \param widest   the widest step of all rungs there are, allowed or not, so that tables share their unit
    MDKV_HD constexpr explicit rung_table(index_t widest) noexcept
        : unit{widest}
    {}

    /// Rungs are added in the order of their costs.
    MDKV_HD constexpr void add(std::size_t rung, index_t bytes) noexcept
    {
        index[count] = static_cast<std::uint8_t>(rung);
        cost[count]  = bytes;
        for (std::size_t a = 0; a < count; ++a)
        {
            inverse[a][count] = static_cast<float>(static_cast<double>(unit) / static_cast<double>(bytes - cost[a]));
        }
        ++count;
    }

    [[nodiscard]] MDKV_HD constexpr index_t step(std::size_t j) const noexcept { return cost[j] - cost[j - 1]; }
    [[nodiscard]] MDKV_HD constexpr index_t narrowest_step() const noexcept
    {
        index_t least = unit;
        for (std::size_t j = 1; j < count; ++j) { least = step(j) < least ? step(j) : least; }
        return least;
    }
};

/// One float at a time; vectors bring operations of their own.
struct scalar_operations
{
    using floats = float;
    [[nodiscard]] MDKV_HD static constexpr float broadcast(float x) noexcept { return x; }
    [[nodiscard]] MDKV_HD static constexpr float max(float a, float b) noexcept { return a > b ? a : b; }
    [[nodiscard]] MDKV_HD static constexpr float min(float a, float b) noexcept { return a < b ? a : b; }
};

/// What moving from rung a up to rung c saves, per unit of bytes.
template <class Floats>
[[nodiscard]] MDKV_HD constexpr Floats saved_per_unit(
    rung_table const& rungs, Floats const* loss, std::size_t a, std::size_t c) noexcept
{
    return (loss[a] - loss[c]) * rungs.inverse[a][c];
}

/// The least threshold that may equal the multiplier `cap`: an upgrade's saving differs from the threshold it makes by
/// rounding, so one looks a little further; where a threshold has few bits, anything may equal it.
[[nodiscard]] MDKV_HD constexpr float plateau_begin(float cap) noexcept
{
    return cap < 0x1p-100F ? 0.0F : cap > 0x1.fffffep127F ? cap : cap - cap * 0x1p-20F;
}

/// The multiplier to try between two, at the lower of which the tokens take `over` bytes too many and at the higher leave
/// `under`: bytes interpolated over the logarithm of the multiplier, in 32nds of the way. By square roots and products,
/// which every machine rounds alike, as `pow` is not.
[[nodiscard]] MDKV_HD inline double multiplier_between(double low, double high, double over, double under) noexcept
{
    if (!(low > 0)) { return high / 1024; }
    double const both = over + under;
    double const way  = both > 0 ? 32 * (over / both) : 0;
    int const steps   = way < 2 ? 2 : way < 30 ? static_cast<int>(way) : 30;
    double root       = high / low;
    double next       = low;
    for (int share = 16; share > 0; share /= 2)
    {
        root = std::sqrt(root);
        if ((steps & share) != 0) { next *= root; }
    }
    return next;
}

/// The thresholds of one token (or of a vector of tokens) in two parts, because most tokens need only the first: with
/// theta_1 at or below the multiplier they have the cheapest rung. Count is the number of rungs, or run_time.
/// Losses must be finite. A negative threshold counts as 0, since no multiplier is negative; one is infinite where a
/// difference of losses leaves the range of float.
template <class Operations, std::size_t Count = run_time>
class token_thresholds
{
public:
    using floats                          = typename Operations::floats;
    static constexpr std::size_t capacity = Count == run_time ? max_rungs : Count;

    floats theta[capacity + 1]; ///< theta[1] ... theta[count - 1]; the others are unused

    [[gnu::always_inline]] MDKV_HD constexpr void first(rung_table const& rungs, floats const* loss) noexcept
    {
        theta[1] = Operations::broadcast(0.0F);
        if constexpr (Count == run_time)
        {
            for (std::size_t c = 1; c < rungs.count; ++c) { start(rungs, loss, c); }
        }
        else
        {
            [&]<std::size_t... I>(std::index_sequence<I...>) __attribute__((always_inline))
            {
                (start(rungs, loss, I + 1), ...);
            }
            (std::make_index_sequence<Count - 1>{});
        }
    }

    [[gnu::always_inline]] MDKV_HD constexpr void others(rung_table const& rungs, floats const* loss) noexcept
    {
        if constexpr (Count == run_time)
        {
            for (std::size_t j = 2; j < rungs.count; ++j) { theta[j] = Operations::broadcast(0.0F); }
            for (std::size_t c = 2; c < rungs.count; ++c)
            {
                for (std::size_t a = 1; a < c; ++a) { join(rungs, loss, a, c); }
            }
        }
        else if constexpr (Count > 2)
        {
            [&]<std::size_t... I>(std::index_sequence<I...>) __attribute__((always_inline))
            {
                ((theta[I + 2] = Operations::broadcast(0.0F)), ...);
                (column<I + 2>(rungs, loss, std::make_index_sequence<I + 1>{}), ...);
            }
            (std::make_index_sequence<Count - 2>{});
        }
    }

private:
    floats least_[capacity]{}; // of column c so far: the smallest quotient of all a < j

    [[gnu::always_inline]] MDKV_HD constexpr void start(
        rung_table const& rungs, floats const* loss, std::size_t c) noexcept
    {
        least_[c] = saved_per_unit(rungs, loss, 0, c);
        theta[1]  = Operations::max(theta[1], least_[c]);
    }

    [[gnu::always_inline]] MDKV_HD constexpr void join(
        rung_table const& rungs, floats const* loss, std::size_t a, std::size_t c) noexcept
    {
        least_[c]    = Operations::min(least_[c], saved_per_unit(rungs, loss, a, c));
        theta[a + 1] = Operations::max(theta[a + 1], least_[c]);
    }

    template <std::size_t C, std::size_t... A>
    [[gnu::always_inline]] MDKV_HD constexpr void column(
        rung_table const& rungs, floats const* loss, std::index_sequence<A...>) noexcept
    {
        (join(rungs, loss, A + 1, C), ...);
    }
};

/// An upgrade of one token: to which rung (of the table), and what it saves per unit of bytes.
struct upgrade_choice
{
    float key          = 0; ///< 0: there is none
    std::size_t target = 0;
};

/// The best upgrade from rung `from` that costs at most `leftover` and saves something; of equals the cheapest.
/// Keys above `cap`, the multiplier the rungs were chosen at, count as equal to it: they exceed it by rounding only.
[[nodiscard]] MDKV_HD constexpr upgrade_choice best_upgrade(
    rung_table const& rungs, float const* loss, std::size_t from, index_t leftover, float cap) noexcept
{
    upgrade_choice best;
    for (std::size_t c = from + 1; c < rungs.count && rungs.cost[c] - rungs.cost[from] <= leftover; ++c)
    {
        float const saved = scalar_operations::min(saved_per_unit(rungs, loss, from, c), cap);
        if (saved > best.key) { best = {saved, c}; }
    }
    return best;
}

} // namespace mdkv::detail
