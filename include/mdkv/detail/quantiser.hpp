/// \file quantiser.hpp: the arithmetic of one quantised group: its rotation, a minimum and a scale in half, codes between them.
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/detail/lanes.hpp>

#include <limits>

namespace MDKV_NAMESPACE::detail
{

/// Largest finite half.
inline constexpr float largest_half = 65504.0F;

[[nodiscard]] MDKV_HD constexpr float within_half(float x) noexcept
{
    return x < -largest_half ? -largest_half : x > largest_half ? largest_half : x;
}

/// Numbers rounded to half, cut to its range.
template <class V>
[[nodiscard]] MDKV_HD V rounded_to_half(V const& x) noexcept
{
    constexpr int lanes = sizeof(V) / sizeof(float);
    float all[std::size_t{lanes}];
    store_lanes(all, x);
    MDKV_FOR_LANES(l, lanes) { all[l] = widen(narrow<half>(within_half(all[l]))); }
    return load_lanes<V>(all);
}

/// A constant: device code may not call numeric_limits.
inline constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

/// Largest code of a storage.
[[nodiscard]] MDKV_HD constexpr int most_code(storage kind) noexcept
{
    return kind == storage::int8 ? 255 : 15;
}

/// A coordinate x is stored as the code nearest to (x - minimum) / scale and read as minimum + scale * code. Minimum and
/// scale are halves, and codes are chosen for the rounded ones: a value read is at most half a step from the coordinate,
/// but for the rounding of the minimum, which cuts coordinates below it, and of a scale that is no normal half (below
/// 2^-14). Reading a group and writing it again gives the same group if the scale is a normal half and at least a thousandth
/// of the minimum; otherwise a group that differs by no more than these roundings. If the group is constant, the scale is 0
/// and every code is 0. `Lanes` neighbouring groups have their quantisers side by side.
template <int Lanes = 1>
struct quantiser
{
    using floats = lane_floats<Lanes>;

    floats minimum{};
    floats scale{};
    floats inverse{}; ///< 1 / scale, or 0

    quantiser() = default;

    /// For a group whose coordinates lie in [least, most]. Coordinates beyond half's range are cut to it. A group that holds
    /// a NaN or an infinity (pass either bound as such) has NaN for its minimum and its scale: it is read as NaN, never as numbers.
    MDKV_HD quantiser(floats const& least, floats const& most, storage kind) noexcept
    {
        floats const zero{};
        floats const nan    = zero + not_a_number;
        floats const poison = least * 0.0F + most * 0.0F;
        floats const limit  = zero + largest_half;
        minimum             = rounded_to_half(least);
        scale = rounded_to_half((smaller(larger(most, -limit), limit) - minimum) / static_cast<float>(most_code(kind)));
        scale = scale > 0.0F ? scale : zero; // the rounded minimum may lie above the largest coordinate
        minimum = poison == 0.0F ? minimum : nan;
        scale   = poison == 0.0F ? scale : nan;
        inverse = scale > 0.0F ? 1.0F / (scale > 0.0F ? scale : zero + 1.0F) : zero;
    }

    /// Nearest codes, of which `most` is the largest; halves go up.
    [[nodiscard]] MDKV_HD floats codes(floats const& x, float most) const noexcept
    {
        floats at = (x - minimum) * inverse + 0.5F;
        at        = at > 0.0F ? at : floats{}; // a NaN is 0
        return cut_off(at >= most ? floats{} + most : at);
    }
    [[nodiscard]] MDKV_HD floats values(floats const& codes) const noexcept { return minimum + scale * codes; }
};

// Groups of neighbouring tokens as columns: x[j * step + i] is coordinate j of token i, and a function takes `Lanes`
// neighbouring tokens from x on.

/// Least and largest of n > 0 coordinates; both are NaN if a coordinate is NaN or infinite.
template <int Lanes>
struct column_bounds
{
    using floats = lane_floats<Lanes>;
    floats least;
    floats most;

    MDKV_HD column_bounds(float const* x, index_t n, index_t step)
        : least{load_lanes<floats>(x)}
        , most{least}
    {
        floats poison = least * 0.0F; // comparisons may miss a NaN
        for (index_t j = 1; j < n; ++j)
        {
            floats const value = load_lanes<floats>(x + j * step);
            least              = smaller(value, least);
            most               = larger(value, most);
            poison += value * 0.0F;
        }
        least += poison;
        most += poison;
    }

    [[nodiscard]] MDKV_HD quantiser<Lanes> fitted(storage kind) const noexcept { return {least, most, kind}; }
};

} // namespace MDKV_NAMESPACE::detail
