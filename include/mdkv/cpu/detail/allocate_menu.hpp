/// \file allocate_menu.hpp: what a head may choose from when it pays for the projections it uses, and what each choice costs it at a multiplier (arXiv 2603.20616, section 4.3)
#pragma once

#include <mdkv/allocate.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/detail/allocate_problem.hpp>
#include <mdkv/cpu/simd.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace mdkv::cpu::dual
{

/// The offers a head chooses from, each with all rungs of the one before it and wider projections.
struct menu
{
    std::array<offer, max_rungs> offers{};
    std::size_t count = 0;
    std::size_t rungs = 0;
    std::array<std::uint8_t, max_rungs> order{}; ///< rungs in the order in which the offers bring them
    std::array<bool, max_rungs> opens{};         ///< order[j] is the first that the next offer brings
    std::array<index_t, max_rungs> bytes{};      ///< of a token, in that order

    template <std::size_t R>
    explicit menu(rung_costs<R> const& costs)
        : rungs{costs.size()}
    {
        for (std::size_t r = 0; r < rungs; ++r) { order[r] = static_cast<std::uint8_t>(r); }
        // Insertion: there are few, and equals stay in the order of their bytes.
        for (std::size_t j = 1; j < rungs; ++j)
        {
            for (std::size_t k = j; k > 0 && costs.projection[order[k]] < costs.projection[order[k - 1]]; --k)
            {
                std::swap(order[k], order[k - 1]);
            }
        }
        for (std::size_t j = 0; j < rungs; ++j)
        {
            index_t const charge = costs.projection[order[j]];
            opens[j]             = j > 0 && charge != costs.projection[order[j - 1]];
            bytes[j]             = costs.bytes[order[j]];
            if (j > 0 && !opens[j]) { continue; }
            offer& next = offers[count++];
            next.rungs  = rung_table{costs.bytes[rungs - 1] - costs.bytes[0]};
            next.charge = charge;
            for (std::size_t r = 0; r < rungs; ++r)
            {
                if (costs.projection[r] <= charge) { next.allow(r, costs.bytes[r]); }
            }
        }
    }

    /// The least that a head with so many tokens takes under an offer.
    [[nodiscard]] index_t least_bytes(std::size_t k, index_t tokens) const noexcept
    {
        return offers[k].charge + tokens * offers[k].rungs.cost[0];
    }

    /// The offer of fewest bytes.
    [[nodiscard]] std::size_t cheapest(index_t tokens) const noexcept
    {
        std::size_t least = 0;
        for (std::size_t k = 1; k < count; ++k)
        {
            if (least_bytes(k, tokens) < least_bytes(least, tokens)) { least = k; }
        }
        return least;
    }
};

/// What some tokens lose and take under one offer when each has the rung of its least loss + multiplier * bytes.
struct outlay
{
    double loss  = 0;
    double bytes = 0;
};

/// Adds up a chunk's outlay under every offer, in one pass. Rungs are chosen in float, which may miss the least by its
/// rounding; the losses and bytes of those chosen are summed in double.
/// \param rows  losses in the order of the menu
/// \return how many tokens have a loss that is not finite, and counted as nothing
template <std::size_t Count>
std::int32_t price_tokens(menu const& offered, std::array<float const*, max_rungs> const& rows, index_t tokens,
    double multiplier, outlay* outlays)
{
    constexpr std::size_t capacity = Count == run_time ? max_rungs : Count;
    simd::floats price[capacity];
    simd::floats bytes[capacity];
    for (std::size_t j = 0; j < offered.rungs && j < capacity; ++j)
    {
        auto const b = static_cast<double>(offered.bytes[j]);
        price[j]     = simd::broadcast(static_cast<float>(multiplier * b));
        bytes[j]     = simd::broadcast(static_cast<float>(b));
    }
    double_sum losses_of[capacity];
    double_sum bytes_of[capacity];
    std::int32_t non_finite = 0;
    for (index_t at = 0; at < tokens; at += simd::lanes)
    {
        index_t const left = tokens - at;
        token_vector<Count> v;
        v.load(rows, offered.rungs, at, left);
        non_finite += v.silence_non_finite(offered.rungs);
        simd::floats chosen = v.loss[0];
        simd::floats taken  = bytes[0];
        simd::floats least  = chosen + price[0];
        std::size_t k       = 0;
        auto const close    = [&]() __attribute__((always_inline))
        {
            losses_of[k].add(chosen);
            if (left >= simd::lanes) [[likely]] { bytes_of[k].add(taken); }
            else
            {
                simd::floats some = taken;
                for (index_t i = left; i < simd::lanes; ++i) { some[i] = 0; }
                bytes_of[k].add(some);
            }
        };
        for_steps<Count>(
            offered.rungs, [&](auto j) __attribute__((always_inline)) {
                if (offered.opens[j])
                {
                    close();
                    ++k;
                }
                simd::floats const here  = v.loss[j] + price[j];
                simd::ints const cheaper = here < least;
                least                    = cheaper ? here : least;
                chosen                   = cheaper ? v.loss[j] : chosen;
                taken                    = cheaper ? bytes[j] : taken;
            });
        close();
    }
    for (std::size_t k = 0; k < offered.count && k < capacity; ++k)
    {
        outlays[k] = {losses_of[k].total(), bytes_of[k].total()};
    }
    return non_finite;
}

} // namespace mdkv::cpu::dual
