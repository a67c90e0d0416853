/// \file merge.cuh: merge_attention on the GPU, a warp a row (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/merge.hpp>

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/device.cuh>
#include <mdkv/gpu/launch.cuh>

namespace mdkv::gpu
{

namespace kernels
{

template <element U>
struct merge_rows
{
    static constexpr char const* name  = "merge_rows";
    static constexpr int threads       = 128;
    static constexpr index_t rows_each = threads / device::warp_size; ///< of a block

    in_view<U, 2, backend> output_a;
    in_view<float, 1, backend> lse_a;
    in_view<U, 2, backend> output_b;
    in_view<float, 1, backend> lse_b;
    out_view<U, 2, backend> output;
    out_view<float, 1, backend> lse;

    __device__ void operator()() const
    {
        index_t const row = device::block() * rows_each + device::warp();
        if (row >= output.extent(0)) { return; }
        auto const by = mdkv::detail::merge_lse(lse_a(row), lse_b(row));
        device::sync_warp(); // lse may be lse_a itself
        // As on the CPU: an empty side is left out, and minus zero is what even a minus zero can be added to.
        float const nothing = by.first == 0.0F && by.second == 0.0F ? 0.0F : -0.0F;
        for (index_t c = device::lane(); c < output.extent(1); c += device::warp_size)
        {
            float sum = nothing;
            if (by.first != 0.0F) { sum += by.first * widen(output_a(row, c)); }
            if (by.second != 0.0F) { sum += by.second * widen(output_b(row, c)); }
            output(row, c) = narrow<U>(sum);
        }
        if (device::lane() == 0) { lse(row) = by.lse; }
    }
};

} // namespace kernels

template <element U>
void merge_attention_impl(backend const& on, in_view<U, 2, backend> output_a, in_view<float, 1, backend> lse_a,
    in_view<U, 2, backend> output_b, in_view<float, 1, backend> lse_b, out_view<U, 2, backend> output,
    out_view<float, 1, backend> lse)
{
    if (on.scratch->counting()) { return; }
    using kernel = kernels::merge_rows<U>;
    launch(on, kernel{output_a, lse_a, output_b, lse_b, output, lse},
        (output.extent(0) + kernel::rows_each - 1) / kernel::rows_each);
}

} // namespace mdkv::gpu
