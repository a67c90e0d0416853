/// \file attend_sizes.cuh: how much of a query attend holds: its coordinates in every basis, and the state that slices leave and the merge reads (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/gpu/detail/stored_run.cuh>

namespace mdkv::gpu::kernels
{

/// What one slice leaves, in floats: per query the softmax state (largest, sum), the sums of values in the original basis,
/// of projected ones, of turned ones.
struct attend_sizes
{
    int keys          = 0; ///< D
    int values        = 0; ///< Dv
    int key_latents   = 0; ///< widest projected rung of the layout
    int value_latents = 0;
    bool turned       = false;
    int key_bytes   = 0; ///< of the longest stored key: one of few coordinates may take more as codes than as elements
    int value_bytes = 0;

    /// Of one query.
    [[nodiscard]] MDKV_HD int sums() const { return values + value_latents + (turned ? values : 0); }
    [[nodiscard]] MDKV_HD int state() const { return 2 + sums(); }
    /// Where a basis's sums begin.
    [[nodiscard]] MDKV_HD int sums_of(run_basis basis) const
    {
        return basis == run_basis::original ? 0 : basis == run_basis::projected ? values : values + value_latents;
    }
    /// Queries in every basis.
    [[nodiscard]] MDKV_HD int queries() const { return keys + key_latents + (turned ? keys : 0); }
    [[nodiscard]] MDKV_HD int queries_of(run_basis basis) const
    {
        return basis == run_basis::original ? 0 : basis == run_basis::projected ? keys : keys + key_latents;
    }
};

} // namespace mdkv::gpu::kernels
