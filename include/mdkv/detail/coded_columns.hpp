/// \file coded_columns.hpp: groups of neighbouring tokens before they become codes, as columns: rotated, and their quantisers.
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/detail/hadamard.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/quantiser.hpp>

// x[j * step + i] is coordinate j of token i, and a function takes `Lanes` neighbouring tokens from x on.

namespace mdkv::inline MDKV_MACHINE::detail
{

/// Rotates a group of n coordinates; with a mean and a factor of each channel, as keys have them, (x - mean) * factor.
template <int Lanes>
MDKV_HD void rotate_columns(
    float* x, index_t n, index_t step, float const* mean = nullptr, float const* factor = nullptr)
{
    for (index_t j = 0; mean != nullptr && j < n; ++j)
    {
        lane_floats<Lanes> const centred = load_lanes<lane_floats<Lanes>>(x + j * step) - mean[j];
        store_lanes(x + j * step, centred * factor[j]);
    }
    hadamard<Lanes>(x, n, step);
}

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
        floats spoilt = least * 0.0F; // comparisons may miss a NaN
        for (index_t j = 1; j < n; ++j)
        {
            floats const value = load_lanes<floats>(x + j * step);
            least              = smaller(value, least);
            most               = larger(value, most);
            spoilt += value * 0.0F;
        }
        least += spoilt;
        most += spoilt;
    }

    [[nodiscard]] MDKV_HD quantiser<Lanes> fitted(storage kind) const noexcept { return {least, most, kind}; }
};

} // namespace mdkv::inline MDKV_MACHINE::detail
