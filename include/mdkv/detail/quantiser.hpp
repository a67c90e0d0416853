/// \file quantiser.hpp: the arithmetic of one quantised group: a minimum and a scale in half, codes between them.
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/detail/lanes.hpp>

#include <limits>

namespace mdkv::inline MDKV_MACHINE::detail
{

/// Largest finite half.
inline constexpr float largest_half = 65504.0F;

[[nodiscard]] MDKV_HD constexpr float within_half(float x) noexcept
{
    return x < -largest_half ? -largest_half : x > largest_half ? largest_half : x;
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
/// and every code is 0.
struct quantiser
{
    float minimum = 0;
    float scale   = 0;
    float inverse = 0; ///< 1 / scale, or 0

    quantiser() = default;

    /// For a group whose coordinates lie in [least, most]. Coordinates beyond half's range are cut to it. A group that holds
    /// a NaN or an infinity (pass either bound as such) has NaN for its minimum and its scale: it is read as NaN, never as
    /// numbers.
    MDKV_HD quantiser(float least, float most, storage kind) noexcept
    {
        if (!(least * 0.0F == 0.0F && most * 0.0F == 0.0F))
        {
            minimum = scale = not_a_number;
            return;
        }
        minimum = widen(narrow<half>(within_half(least)));
        scale   = (within_half(most) - minimum) / static_cast<float>(most_code(kind));
        scale   = widen(narrow<half>(within_half(scale)));
        scale   = scale > 0.0F ? scale : 0.0F; // the rounded minimum may lie above the largest coordinate
        inverse = scale > 0.0F ? 1.0F / scale : 0.0F;
    }

    /// Nearest codes of neighbouring groups; halves go up.
    template <class Floats>
    [[nodiscard]] MDKV_HD static Floats codes(
        Floats const& x, Floats const& minimum, Floats const& inverse, float most) noexcept
    {
        Floats at = (x - minimum) * inverse + 0.5F;
        at        = at > 0.0F ? at : Floats{}; // a NaN is 0
        return cut_off(at >= most ? Floats{} + most : at);
    }
    [[nodiscard]] MDKV_HD int code(float x, int most) const noexcept
    {
        return static_cast<int>(codes(x, minimum, inverse, static_cast<float>(most)));
    }

    [[nodiscard]] MDKV_HD float value(int c) const noexcept { return minimum + scale * static_cast<float>(c); }
};

} // namespace mdkv::inline MDKV_MACHINE::detail
