/// \file allocate.cuh: allocate on the GPU (arXiv 2603.20616, sections 4.3, 4.4).
#pragma once

#include <mdkv/allocate.hpp>
#include <mdkv/detail/allocate/solve.hpp>
#include <mdkv/gpu/backend.cuh>

#include <concepts>

namespace mdkv::gpu
{

/// A negative limit cannot be thrown for, as it is read on the device: its status is over_limit.
template <std::same_as<backend> B> // a template, so that only its callers compile the passes
void allocate_impl(B const& on, in_view<float, 3, backend> loss, rung_costs const& costs,
    in_view<index_t, 1, backend> limits, allocate_options options, out_view<std::uint8_t, 2, backend> rung,
    out_view<allocation, 1, backend> report)
{
    mdkv::detail::staged(on, "allocate",
        [&](B const& with) { mdkv::detail::dual::allocate_stage(with, loss, costs, limits, options, rung, report); });
}

} // namespace mdkv::gpu
