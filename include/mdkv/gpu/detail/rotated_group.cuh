/// \file rotated_group.cuh: groups of one token's coordinates as pack rotates them, and the errors of their codes, by one thread.
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/detail/hadamard.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/quantiser.hpp>

namespace MDKV_NAMESPACE::gpu::detail
{

/// A whole group of coordinates, with the arithmetic of pack, to the bit. All loops are unrolled, because
/// only constant indices choose registers.
struct rotated_group
{
    static constexpr int size = static_cast<int>(quantised_group);

    float x[size];
    float least; ///< NaN if a coordinate is NaN or infinite, and so is `largest`
    float largest;

    /// Reads coordinates that are `step` apart. With a factor of each channel they become (x - mean) * factor, without one x -
    /// mean.
    __device__ __forceinline__ rotated_group(
        float const* from, int step, float const* mean, float const* factor = nullptr)
    {
        MDKV_UNROLL
        for (int i = 0; i < size; ++i)
        {
            x[i] = (from[i * step] - mean[i]) * (factor == nullptr ? 1.0F : factor[i]);
        }
        mdkv::detail::hadamard_registers(x);
        float poison = 0;
        MDKV_UNROLL
        for (int i = 0; i < size; ++i)
        {
            x[i] *= mdkv::detail::hadamard_factor(size);
            least   = i == 0 ? x[0] : mdkv::detail::smaller(x[i], least);
            largest = i == 0 ? x[0] : mdkv::detail::larger(x[i], largest);
            poison += x[i] * 0.0F;
        }
        least += poison;
        largest += poison;
    }

    [[nodiscard]] __device__ __forceinline__ float range() const { return largest - least; }

    /// Adds to `sum` the square of every coordinate's rounding error, if the group becomes codes.
    __device__ __forceinline__ void add_rounding(storage kind, float& sum) const
    {
        mdkv::detail::quantiser<1> const codes{least, largest, kind};
        auto const most = static_cast<float>(mdkv::detail::most_code(kind));
        float total     = sum;
        MDKV_UNROLL
        for (int i = 0; i < size; ++i)
        {
            float const error = x[i] - codes.values(codes.codes(x[i], most));
            total += error * error;
        }
        sum = total;
    }
};

/// The same for n coordinates in memory, `step` apart, which are not rotated here.
__device__ inline void add_rounding(float const* x, int n, int step, storage kind, float& sum)
{
    auto const most  = static_cast<float>(mdkv::detail::most_code(kind));
    auto const codes = mdkv::detail::column_bounds<1>{x, n, step}.fitted(kind);
    for (int i = 0; i < n; ++i)
    {
        float const error = x[i * step] - codes.values(codes.codes(x[i * step], most));
        sum += error * error;
    }
}

/// A last group of fewer coordinates, rotated in memory of its own, x, where they are `step` apart, too.
struct rotated_rest
{
    float* x;
    int n;
    int step;

    __device__ rotated_rest(
        float const* from, int n_, int step_, float* memory, float const* mean, float const* factor = nullptr)
        : x{memory}
        , n{n_}
        , step{step_}
    {
        for (int i = 0; i < n; ++i)
        {
            x[i * step] = (from[i * step] - mean[i]) * (factor == nullptr ? 1.0F : factor[i]);
        }
        mdkv::detail::hadamard(x, n, step);
    }

    [[nodiscard]] __device__ float range() const
    {
        mdkv::detail::column_bounds<1> const b{x, n, step};
        return b.most - b.least;
    }
    __device__ void add_rounding(storage kind, float& sum) const { detail::add_rounding(x, n, step, kind, sum); }
};

} // namespace MDKV_NAMESPACE::gpu::detail
