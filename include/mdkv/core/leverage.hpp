/// \file leverage.hpp: sums of leverages in fixed point, whose order changes no bit.
#pragma once

#include <mdkv/core/types.hpp>

#include <cstdint>
#include <limits>

namespace MDKV_NAMESPACE
{

/// A token's leverages, each from 0 to 1, summed over heads of any layers on any ranks, in units of 2^-36; 0: no leverage yet.
/// See add_leverage.
using leverage_sum = std::int64_t;

/// The number of units of a leverage of 1.
inline constexpr double leverage_units = 0x1p36;

/// A sum with a leverage that is NaN or infinite. Larger and negative sums mean the same, because sums of ranks may pass it. Finite
/// leverages of fewer than 2^16 heads stay below it.
inline constexpr leverage_sum non_finite_leverage = leverage_sum{1} << 52;

namespace detail
{

inline constexpr float nan_leverage = std::numeric_limits<float>::quiet_NaN();

} // namespace detail

/// A leverage as a sum of one head, rounded to a unit.
[[nodiscard]] MDKV_HD constexpr leverage_sum leverage_sum_of(double leverage) noexcept
{
    return leverage >= 0 && leverage < 0x1p15 ? static_cast<leverage_sum>(leverage * leverage_units + 0.5)
                                              : non_finite_leverage;
}

/// The sum as a number; NaN if a leverage was not finite.
[[nodiscard]] MDKV_HD constexpr float leverage_of(leverage_sum sum) noexcept
{
    return sum >= 0 && sum < non_finite_leverage ? static_cast<float>(static_cast<double>(sum) / leverage_units)
                                                 : detail::nan_leverage;
}

/// The sum of both; with a leverage that is not finite it stays `non_finite_leverage`.
[[nodiscard]] MDKV_HD constexpr leverage_sum sum_of_leverages(leverage_sum a, leverage_sum b) noexcept
{
    bool const finite = a >= 0 && a < non_finite_leverage && b >= 0 && b < non_finite_leverage;
    return finite ? a + b : non_finite_leverage;
}

} // namespace MDKV_NAMESPACE
