/// \file allocate_menu.hpp: what each offer costs a head at a multiplier, when it pays for the projections it uses (arXiv 2603.20616, section 4.3)
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/detail/allocate_problem.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/detail/allocate_offers.hpp>

#include <array>
#include <cstddef>
#include <cstdint>

namespace mdkv::cpu::dual
{

using mdkv::detail::menu;

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
                least                    = simd::select(cheaper, here, least);
                chosen                   = simd::select(cheaper, v.loss[j], chosen);
                taken                    = simd::select(cheaper, bytes[j], taken);
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
