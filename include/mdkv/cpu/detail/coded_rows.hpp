/// \file coded_rows.hpp: groups of a vector's coordinates before they become codes, as rows: rotated in registers, to the bit as detail/hadamard.hpp has it, their bounds, and the error of codes.
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/detail/hadamard.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/quantiser.hpp>

#include <algorithm>
#include <array>
#include <cstddef>

namespace MDKV_NAMESPACE::cpu::detail
{

/// The steps inside a vector from `Half` on: lanes i and i + Half become their sum and their difference.
template <int Half = 1>
[[nodiscard]] inline simd::floats hadamard_lanes(simd::floats x) noexcept
{
    static constexpr auto signs = [] {
        std::array<float, simd::lanes> all{};
        for (std::size_t i = 0; i < all.size(); ++i) { all[i] = (i & Half) != 0 ? -1.0F : 1.0F; }
        return all;
    }();
    x = simd::swap_lanes<Half>(x) + x * simd::load(signs.data());
    if constexpr (2 * Half < simd::lanes) { return hadamard_lanes<2 * Half>(x); }
    else { return x; }
}

/// Rotates one group of 64 neighbours in registers.
inline void hadamard_group(float* x) noexcept
{
    constexpr int lanes   = simd::lanes;
    constexpr int vectors = int{quantised_group} / lanes;
    static_assert(vectors >= 2 && lanes >= 4);
    simd::floats v[vectors];
    MDKV_UNROLL for (int i = 0; i < vectors; ++i)
    {
        v[i] = hadamard_lanes(simd::load(x + i * lanes));
    }
    // nvcc takes no vectors of a CPU in hadamard_registers, which is device code, too.
    MDKV_UNROLL for (int half = 1; half < vectors; half *= 2)
    {
        MDKV_UNROLL for (int i = 0; i < vectors; ++i)
        {
            if ((i & half) != 0) { continue; }
            simd::floats const a = v[i];
            simd::floats const b = v[i + half];
            v[i]                 = a + b;
            v[i + half]          = a - b;
        }
    }
    simd::floats const factor = simd::broadcast(mdkv::detail::hadamard_factor(quantised_group));
    MDKV_UNROLL for (int i = 0; i < vectors; ++i)
    {
        simd::store(x + i * lanes, v[i] * factor);
    }
}

/// Rotates a vector of n coordinates, group by group.
MDKV_OUTLINE inline void hadamard_row(float* x, index_t n) noexcept
{
    for (index_t first = 0; first < n; first += quantised_group)
    {
        index_t const group = (std::min)(quantised_group, n - first);
        if (group == quantised_group) { hadamard_group(x + first); }
        else { mdkv::detail::hadamard(x + first, group); }
    }
}

struct bounds
{
    float low;
    float high;
};

/// The least and the largest of n > 0 numbers.
[[nodiscard]] inline bounds bounds_of(float const* x, index_t n) noexcept
{
    float low = x[0], high = x[0];
    index_t i = 0;
    if (n >= simd::lanes)
    {
        simd::floats lows  = simd::load(x);
        simd::floats highs = lows;
        for (i = simd::lanes; i + simd::lanes <= n; i += simd::lanes)
        {
            simd::floats const v = simd::load(x + i);
            lows                 = simd::smaller(lows, v);
            highs                = simd::larger(highs, v);
        }
        low  = -simd::max_lane(-lows);
        high = simd::max_lane(highs);
    }
    for (; i < n; ++i)
    {
        low  = (std::min)(low, x[i]);
        high = (std::max)(high, x[i]);
    }
    return {low, high};
}

/// to[i] = |x - x'|^2 for row i of `count`, `step` apart: x has the row's leading n coordinates, x' is x quantised and
/// dequantised. A vector's lanes are quantisers of different rows: rounding to half takes as long for one row as for all.
MDKV_OUTLINE inline void find_roundings(
    float const* from, index_t count, index_t step, index_t n, storage kind, float* to) noexcept
{
#if !defined(__CUDA_ARCH__) // nvcc knows no vectors where it reads this for the device
    constexpr int lanes = simd::lanes;
    auto const most     = static_cast<float>(mdkv::detail::most_code(kind));
    for (index_t row = 0; row < count; row += lanes)
    {
        auto const rows = static_cast<int>(std::min<index_t>(lanes, count - row));
        simd::floats sums[lanes]{};
        float rests[lanes]{}; // squared errors of the last coordinates, which fill no vector
        for (index_t c = 0; c < n; c += quantised_group)
        {
            index_t const size = (std::min)(n - c, quantised_group);
            float low[lanes]{};
            float high[lanes]{};
            for (int i = 0; i < rows; ++i)
            {
                auto const [least, largest] = bounds_of(from + (row + i) * step + c, size);
                low[i]                      = least;
                high[i]                     = largest;
            }
            mdkv::detail::quantiser<lanes> const all{simd::load(low), simd::load(high), kind};
            for (int i = 0; i < rows; ++i)
            {
                float const* const x = from + (row + i) * step + c;
                mdkv::detail::quantiser<lanes> q;
                q.minimum = simd::broadcast(all.minimum[i]);
                q.scale   = simd::broadcast(all.scale[i]);
                q.inverse = simd::broadcast(all.inverse[i]);
                index_t d = 0;
                for (; d + lanes <= size; d += lanes)
                {
                    simd::floats const one   = simd::load(x + d);
                    simd::floats const error = one - q.values(q.codes(one, most));
                    sums[i] += error * error;
                }
                mdkv::detail::quantiser<> single;
                single.minimum = all.minimum[i];
                single.scale   = all.scale[i];
                single.inverse = all.inverse[i];
                for (; d < size; ++d)
                {
                    float const error = x[d] - single.values(single.codes(x[d], most));
                    rests[i] += error * error;
                }
            }
        }
        for (int i = 0; i < rows; ++i) { to[row + i] = simd::sum(sums[i]) + rests[i]; }
    }
#endif
}

} // namespace MDKV_NAMESPACE::cpu::detail
