/// \file turn.hpp: whole vectors, and tiles of them, turned group by group on the CPU, as detail/rotation.hpp has it to the bit.
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/detail/repeat.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/detail/rotation.hpp>

#include <algorithm>
#include <array>
#include <cstddef>

namespace mdkv::cpu::detail
{

/// Lane i of the vector is lane i ^ Half of x. Spelled out, because nvcc expands no pack in the builtin.
template <int Half, class Floats>
[[nodiscard]] inline Floats swap_lanes(Floats x) noexcept
{
    constexpr int H = Half;
    if constexpr (sizeof(Floats) == 64)
    {
        return __builtin_shufflevector(x, x, 0 ^ H, 1 ^ H, 2 ^ H, 3 ^ H, 4 ^ H, 5 ^ H, 6 ^ H, 7 ^ H, 8 ^ H, 9 ^ H,
            10 ^ H, 11 ^ H, 12 ^ H, 13 ^ H, 14 ^ H, 15 ^ H);
    }
    else if constexpr (sizeof(Floats) == 32)
    {
        return __builtin_shufflevector(x, x, 0 ^ H, 1 ^ H, 2 ^ H, 3 ^ H, 4 ^ H, 5 ^ H, 6 ^ H, 7 ^ H);
    }
    else { return __builtin_shufflevector(x, x, 0 ^ H, 1 ^ H, 2 ^ H, 3 ^ H); }
}

/// One step inside a vector: lanes i and i + Half become their sum and their difference.
template <int Half>
[[nodiscard]] inline simd::floats turn_lanes(simd::floats x) noexcept
{
    static constexpr auto signs = [] {
        std::array<float, simd::lanes> all{};
        for (std::size_t i = 0; i < all.size(); ++i) { all[i] = (i & Half) != 0 ? -1.0F : 1.0F; }
        return all;
    }();
    return swap_lanes<Half>(x) + x * simd::load(signs.data());
}

/// One group of 64 neighbours, in registers.
inline void turn_group(float* x) noexcept
{
    constexpr int lanes   = simd::lanes;
    constexpr int vectors = int{quantised_group} / lanes;
    static_assert(vectors >= 2 && lanes >= 4);
    simd::floats v[vectors];
    repeat<vectors>([&](auto i) {
        simd::floats part = simd::load(x + i * lanes);
        part              = turn_lanes<2>(turn_lanes<1>(part));
        if constexpr (lanes >= 8) { part = turn_lanes<4>(part); }
        if constexpr (lanes >= 16) { part = turn_lanes<8>(part); }
        v[i] = part;
    });
    for (int half = 1; half < vectors; half *= 2)
    {
        repeat<vectors>([&](auto i) {
            if ((i & half) != 0) { return; }
            simd::floats const a = v[i];
            simd::floats const b = v[i + half];
            v[i]                 = a + b;
            v[i + half]          = a - b;
        });
    }
    simd::floats const factor = simd::broadcast(mdkv::detail::turn_factor(quantised_group));
    repeat<vectors>([&](auto i) { simd::store(x + i * lanes, v[i] * factor); });
}

/// A vector of n coordinates, group by group.
inline void turn_row(float* x, index_t n) noexcept
{
    for (index_t first = 0; first < n; first += quantised_group)
    {
        index_t const group = std::min(quantised_group, n - first);
        if (group == quantised_group) { turn_group(x + first); }
        else { mdkv::detail::turn(x + first, group); }
    }
}

/// The same for `Width` vectors side by side: columns[c][t] is coordinate c of vector t.
template <index_t Width>
inline void turn_columns(float (*columns)[Width], index_t n) noexcept
{
    static_assert(Width % simd::lanes == 0);
    for (index_t first = 0; first < n; first += quantised_group)
    {
        index_t const group = std::min(quantised_group, n - first);
        if (!mdkv::detail::turns(group)) { return; }
        auto const at = [&](index_t c, index_t t) { return columns[first + c] + t; };
        for (index_t half = 1; half < group; half *= 2)
        {
            for (index_t c = 0; c < group; ++c)
            {
                if ((c & half) != 0) { continue; }
                for (index_t t = 0; t < Width; t += simd::lanes)
                {
                    simd::floats const a = simd::load(at(c, t));
                    simd::floats const b = simd::load(at(c + half, t));
                    simd::store(at(c, t), a + b);
                    simd::store(at(c + half, t), a - b);
                }
            }
        }
        simd::floats const factor = simd::broadcast(mdkv::detail::turn_factor(group));
        for (index_t c = 0; c < group; ++c)
        {
            for (index_t t = 0; t < Width; t += simd::lanes) { simd::store(at(c, t), simd::load(at(c, t)) * factor); }
        }
    }
}

} // namespace mdkv::cpu::detail
