/// \file slots.cuh: list_slots on the GPU: a stable counting sort of every head's positions by rung.
#pragma once

#include <mdkv/slots.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/rung_lists.cuh>

#include <cstdint>

namespace mdkv::gpu
{

/// A rung that is R or more cannot be refused here, where nobody has seen it yet: such a token is in no list, `first[h, R]`
/// is the number of those that are, and what lies behind them in `positions[h]` is left as it was.
inline void list_slots_impl(backend const& on, in_view<std::uint8_t, 2, backend> rung,
    out_view<std::int32_t, 2, backend> positions, out_view<index_t, 2, backend> first)
{
    index_t const rungs = first.extent(1) - 1;
    expects(rungs <= kernels::rung_lists::most_rungs, "list_slots: first [H, R+1] has R = ", rungs,
        "; a rung is a byte, so R is at most 256");
    index_t const chunks = kernels::rung_lists::chunks_of(rung.extent(1));
    workspace::frame frame{*on.scratch, "list_slots"};
    auto* const places = frame.take<std::int32_t>(checked_multiply(checked_multiply(rung.extent(0), chunks), rungs));
    if (!frame.ready()) { return; }
    detail::list_rungs(on, {rung, positions, first, places});
}

} // namespace mdkv::gpu
