/// \file read_again.hpp: coordinates as a quantised rung gives them back: quantised and dequantised.
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/detail/quantiser.hpp>

#include <algorithm>
#include <limits>

namespace mdkv::inline MDKV_MACHINE::cpu::detail
{

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

/// One quantiser for each lane of a vector, made together: rounding to half takes as long for one as for all. Each equals
/// `mdkv::detail::quantiser` to the bit.
struct quantisers
{
    float least[simd::lanes]{}; ///< least coordinate of each group
    float most[simd::lanes]{};
    float minimum[simd::lanes];
    float scale[simd::lanes];
    float inverse[simd::lanes];

    void find_bounds(int group, float const* x, index_t n) noexcept
    {
        auto const [low, high] = bounds_of(x, n);
        least[group]           = low;
        most[group]            = high;
    }

    void fit(storage kind) noexcept
    {
        simd::floats const zero  = simd::broadcast(0.0F);
        simd::floats const low   = simd::load(least);
        simd::floats const high  = simd::load(most);
        simd::floats const codes = simd::broadcast(static_cast<float>(mdkv::detail::most_code(kind)));
        simd::floats const nan   = simd::broadcast(std::numeric_limits<float>::quiet_NaN());
        simd::floats const start = rounded(low);
        simd::floats const span  = low * zero + high * zero; // NaN if a bound is non-finite
        simd::floats const step  = span == zero ? simd::larger(rounded((within(high) - start) / codes), zero) : nan;
        simd::store(minimum, span == zero ? start : nan);
        simd::store(scale, step);
        simd::store(inverse, step > zero ? simd::broadcast(1.0F) / step : zero);
    }

    /// Writes the n coordinates of a group, quantised and dequantised.
    void read_again(int group, float const* x, index_t n, int most_code, float* to) const noexcept
    {
        simd::floats const start = simd::broadcast(minimum[group]);
        simd::floats const step  = simd::broadcast(scale[group]);
        simd::floats const per   = simd::broadcast(inverse[group]);
        simd::floats const last  = simd::broadcast(static_cast<float>(most_code));
        index_t i                = 0;
        for (; i + simd::lanes <= n; i += simd::lanes)
        {
            simd::floats const at = (simd::load(x + i) - start) * per + simd::broadcast(0.5F);
            auto const code =
                __builtin_convertvector(simd::smaller(simd::larger(at, simd::broadcast(0.0F)), last), simd::ints);
            simd::store(to + i, start + step * simd::to_floats(code));
        }
        mdkv::detail::quantiser one;
        one.minimum = minimum[group];
        one.scale   = scale[group];
        one.inverse = inverse[group];
        for (; i < n; ++i) { to[i] = one.value(one.code(x[i], most_code)); }
    }

private:
    /// Clamps x to half's range.
    [[nodiscard]] static simd::floats within(simd::floats x) noexcept
    {
        simd::floats const most = simd::broadcast(mdkv::detail::largest_half);
        return simd::smaller(simd::larger(x, -most), most);
    }
    [[nodiscard]] static simd::floats rounded(simd::floats x) noexcept
    {
        half as_half[simd::lanes];
        simd::narrow_to(as_half, within(x));
        return simd::load(as_half);
    }
};

/// Writes the leading n coordinates of `count` rows, `step` apart, quantised and dequantised, to [count, n].
MDKV_OUTLINE inline void read_again(
    float const* from, index_t count, index_t step, index_t n, storage kind, float* to) noexcept
{
    int const most = mdkv::detail::most_code(kind);
    for (index_t c = 0; c < n; c += quantised_group)
    {
        index_t const size = (std::min)(n - c, quantised_group);
        for (index_t row = 0; row < count; row += simd::lanes)
        {
            auto const rows = static_cast<int>(std::min<index_t>(simd::lanes, count - row));
            quantisers groups;
            for (int i = 0; i < rows; ++i) { groups.find_bounds(i, from + (row + i) * step + c, size); }
            groups.fit(kind);
            for (int i = 0; i < rows; ++i)
            {
                groups.read_again(i, from + (row + i) * step + c, size, most, to + (row + i) * n + c);
            }
        }
    }
}

} // namespace mdkv::inline MDKV_MACHINE::cpu::detail
