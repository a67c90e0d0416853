/// \file allocate.hpp: allocate on the CPU (arXiv 2603.20616, sections 4.3, 4.4).
#pragma once

#include <mdkv/allocate.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/width.hpp>
#include <mdkv/detail/allocate/solve.hpp>

#include <concepts>

namespace mdkv::cpu::inline MDKV_CPU_WIDTH
{

template <std::same_as<backend> B> // a template, so that only its callers compile the passes
void allocate_impl(B const& on, in_view<float, 3, backend> loss, rung_costs const& costs,
    in_view<index_t, 1, backend> limits, allocate_options options, out_view<std::uint8_t, 2, backend> rung,
    out_view<allocation, 1, backend> report)
{
    for (index_t i = 0; i < limits.extent(0) && !mdkv::detail::dry_run(on); ++i)
    {
        expects(limits(i) >= 0, "allocate: limits[", i, "] is ", limits(i), "; it must not be negative");
    }
    mdkv::detail::staged(on, "allocate",
        [&](B const& with) { mdkv::detail::dual::allocate_stage(with, loss, costs, limits, options, rung, report); });
}

} // namespace mdkv::cpu::inline MDKV_CPU_WIDTH
