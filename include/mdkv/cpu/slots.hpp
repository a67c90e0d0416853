/// \file slots.hpp: list_slots on the CPU: a stable counting sort of every head's positions by rung.
#pragma once

#include <mdkv/slots.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/detail/rungs.hpp>

#include <array>
#include <cstddef>
#include <cstdint>

namespace mdkv::cpu
{

inline void list_slots_impl(backend const& on, in_view<std::uint8_t, 2, backend> rung,
    out_view<std::int32_t, 2, backend> positions, out_view<index_t, 2, backend> first)
{
    if (on.scratch->counting()) { return; }
    index_t const tokens = rung.extent(1);
    auto const rungs     = static_cast<std::size_t>(first.extent(1) - 1);
    expects(rungs <= 256, "list_slots: first [H, R+1] has R = ", rungs, "; a rung is a byte, so R is at most 256");
    for (index_t h = 0; h < rung.extent(0); ++h) { detail::expects_rungs("list_slots", rung, h, rungs); }
    on.for_each(rung.extent(0), [&](index_t h, index_t) {
        std::array<index_t, 257> next{}; // where the next position of each rung goes
        std::uint8_t const* const row = rung.data_handle() + rung.mapping()(h, 0);
        std::int32_t* const out       = positions.data_handle() + positions.mapping()(h, 0);
        for (index_t t = 0; t < tokens; ++t) { ++next[std::size_t{row[t]} + 1]; }
        for (std::size_t r = 0; r < rungs; ++r) { next[r + 1] += next[r]; }
        for (std::size_t r = 0; r <= rungs; ++r) { first(h, static_cast<index_t>(r)) = next[r]; }
        for (index_t t = 0; t < tokens; ++t) { out[next[row[t]]++] = static_cast<std::int32_t>(t); }
    });
}

} // namespace mdkv::cpu
