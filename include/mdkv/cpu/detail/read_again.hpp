/// \file read_again.hpp: coordinates as a quantised rung gives them back: written as codes and read again.
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/detail/turn.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/tile.hpp>
#include <mdkv/detail/quantiser.hpp>

#include <algorithm>
#include <cstring>
#include <limits>

namespace mdkv::cpu::detail
{

/// The largest lane, by halves of the vector.
template <int N>
[[nodiscard]] inline float largest_lane(simd::floats_of<N> v) noexcept
{
    float part[N];
    std::memcpy(part, &v, sizeof v);
    if constexpr (N == 4) { return std::max(std::max(part[0], part[1]), std::max(part[2], part[3])); }
    else
    {
        auto const a = simd::load<N / 2>(part);
        auto const b = simd::load<N / 2>(part + N / 2);
        return largest_lane<N / 2>(a > b ? a : b);
    }
}

/// As `mdkv::detail::quantiser` to the bit, but for several groups at once, whose halves are rounded together.
class quantisers
{
public:
    static constexpr index_t groups = simd::lanes;
    static constexpr index_t reach  = groups * quantised_group; ///< coordinates

    /// For n coordinates, at most `reach`.
    quantisers(float const* x, index_t n, storage kind) noexcept
    {
        float least[groups] = {};
        float most[groups]  = {};
        for (index_t g = 0; g * quantised_group < n; ++g)
        {
            index_t const first = g * quantised_group;
            find_bounds(x + first, std::min(n - first, quantised_group), least[g], most[g]);
        }
        simd::floats const zero  = simd::broadcast(0.0F);
        simd::floats const low   = simd::load(least);
        simd::floats const high  = simd::load(most);
        simd::floats const codes = simd::broadcast(static_cast<float>(mdkv::detail::most_code(kind)));
        simd::floats const nan   = simd::broadcast(std::numeric_limits<float>::quiet_NaN());
        simd::floats const start = rounded(low);
        simd::floats const span  = low * zero + high * zero; // NaN where a bound is not finite
        simd::floats const step  = span == zero ? simd::max(rounded((within(high) - start) / codes), zero) : nan;
        simd::store(minimum_, span == zero ? start : nan);
        simd::store(scale_, step);
        simd::store(inverse_, step > zero ? simd::broadcast(1.0F) / step : zero);
    }

    /// Group g as one quantiser.
    [[nodiscard]] mdkv::detail::quantiser operator[](index_t g) const noexcept
    {
        mdkv::detail::quantiser q;
        q.minimum = minimum_[g];
        q.scale   = scale_[g];
        q.inverse = inverse_[g];
        return q;
    }

private:
    static void find_bounds(float const* x, index_t n, float& least, float& most) noexcept
    {
        least     = x[0];
        most      = x[0];
        index_t i = 0;
        if (n >= simd::lanes)
        {
            simd::floats low  = simd::load(x);
            simd::floats high = low;
            for (i = simd::lanes; i + simd::lanes <= n; i += simd::lanes)
            {
                simd::floats const v = simd::load(x + i);
                low                  = simd::min(low, v);
                high                 = simd::max(high, v);
            }
            least = -largest_lane<simd::lanes>(-low);
            most  = largest_lane<simd::lanes>(high);
        }
        for (; i < n; ++i)
        {
            least = std::min(least, x[i]);
            most  = std::max(most, x[i]);
        }
    }

    /// Cut to half's range.
    [[nodiscard]] static simd::floats within(simd::floats x) noexcept
    {
        return simd::min(simd::max(x, simd::broadcast(-65504.0F)), simd::broadcast(65504.0F));
    }

    [[nodiscard]] static simd::floats rounded(simd::floats x) noexcept
    {
        half as_half[simd::lanes];
        simd::narrow_to(as_half, within(x));
        return simd::load(as_half);
    }

    float minimum_[groups];
    float scale_[groups];
    float inverse_[groups];
};

/// wide(i, x, x') and single(i, x, x') for the n coordinates of one token, `lanes` at a time and one by one: x' is x read
/// again from codes of this kind.
template <class Wide, class Single>
[[gnu::always_inline]] inline void for_each_read_again(
    float const* from, index_t n, storage kind, Wide const& wide, Single const& single) noexcept
{
    int const most          = mdkv::detail::most_code(kind);
    simd::floats const zero = simd::broadcast(0.0F);
    simd::floats const last = simd::broadcast(static_cast<float>(most));
    for (index_t first = 0; first < n; first += quantisers::reach)
    {
        index_t const end = std::min(n, first + quantisers::reach);
        quantisers const all{from + first, end - first, kind};
        for (index_t g = 0; first + g * quantised_group < end; ++g)
        {
            auto const q            = all[g];
            simd::floats const base = simd::broadcast(q.minimum);
            simd::floats const step = simd::broadcast(q.scale);
            simd::floats const per  = simd::broadcast(q.inverse);
            index_t i               = first + g * quantised_group;
            index_t const group_end = std::min(end, i + quantised_group);
            for (; i + simd::lanes <= group_end; i += simd::lanes)
            {
                simd::floats const x  = simd::load(from + i);
                simd::floats const at = (x - base) * per + simd::broadcast(0.5F);
                auto const code       = __builtin_convertvector(simd::min(simd::max(at, zero), last), simd::ints);
                wide(i, x, base + step * __builtin_convertvector(code, simd::floats));
            }
            for (; i < group_end; ++i) { single(i, from[i], q.value(q.code(from[i], most))); }
        }
    }
}

/// What is done with blocks of rows below: rows that are whole groups and follow one another are one long row, so that the
/// quantisers of several are made together.
[[nodiscard]] inline bool one_long_row(index_t n, index_t step) noexcept
{
    return n == step && n % quantised_group == 0;
}

/// Turns `count` rows of n coordinates, `step` apart.
inline void turn_rows(float const* from, index_t count, index_t step, index_t n, float* to) noexcept
{
    for (index_t row = 0; row < count; ++row)
    {
        if (to != from) { std::copy_n(from + row * step, n, to + row * step); }
        turn_row(to + row * step, n);
    }
}

/// Writes the leading n coordinates of `count` rows, `step` apart, as they would be read again.
inline void read_again(float const* from, index_t count, index_t step, index_t n, storage kind, float* to) noexcept
{
    bool const joined = one_long_row(n, step);
    for (index_t row = 0; row < (joined ? 1 : count); ++row)
    {
        float* const at = to + row * step;
        for_each_read_again(
            from + row * step, joined ? count * n : n, kind,
            [at](index_t i, simd::floats, simd::floats read) { simd::store(at + i, read); },
            [at](index_t i, float, float read) { at[i] = read; });
    }
}

/// |x - x'|^2 over the leading n coordinates x of each of `count` rows, `step` apart.
inline void squared_roundings(
    float const* from, index_t count, index_t step, index_t n, storage kind, float* squared) noexcept
{
    simd::floats wide = simd::broadcast(0.0F);
    if (one_long_row(n, step))
    {
        index_t row_end = n;
        for_each_read_again(
            from, count * n, kind,
            [&](index_t i, simd::floats x, simd::floats read) {
                wide += (x - read) * (x - read);
                if (i + simd::lanes < row_end) { return; }
                *squared++ = simd::sum(wide);
                wide       = simd::broadcast(0.0F);
                row_end += n;
            },
            [](index_t, float, float) {});
        return;
    }
    for (index_t row = 0; row < count; ++row)
    {
        float rest = 0;
        wide       = simd::broadcast(0.0F);
        for_each_read_again(
            from + row * step, n, kind,
            [&](index_t, simd::floats x, simd::floats read) { wide += (x - read) * (x - read); },
            [&](index_t, float x, float read) { rest += (x - read) * (x - read); });
        squared[row] = simd::sum(wide) + rest;
    }
}

} // namespace mdkv::cpu::detail
