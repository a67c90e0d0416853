/// \file score_values.hpp: from a block's values and sums of probabilities to losses, on the CPU (arXiv 2603.20616, section 4.2).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/block.hpp>
#include <mdkv/cpu/detail/read_again.hpp>
#include <mdkv/cpu/detail/score_block.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/tile.hpp>
#include <mdkv/cpu/width.hpp>
#include <mdkv/detail/score_plan.hpp>

#include <cmath>

namespace mdkv::cpu::inline MDKV_CPU_WIDTH::detail
{

/// |v - v'|^2, v' being v's leading coordinates in the basis, whose squares add up to `kept`.
[[nodiscard]] MDKV_OUTLINE inline float squared_rest(float const* value, float squared, float kept,
    float const* coordinates, in_view<float, 3, backend> const& basis, index_t head, index_t count) noexcept
{
    float const missing = squared - kept;
    if (!mdkv::detail::cancels(missing, squared)) [[likely]] { return missing; }
    index_t const dim = basis.extent(2);
    float total       = 0;
    index_t d         = 0;
    for (; d + simd::lanes <= dim; d += simd::lanes)
    {
        simd::floats rest = simd::load(value + d);
        for (index_t c = 0; c < count; ++c)
        {
            rest -= simd::broadcast(coordinates[c]) * simd::load(basis.data_handle() + basis.offset(head, c, d));
        }
        total += simd::sum(rest * rest);
    }
    for (; d < dim; ++d)
    {
        float rest = value[d];
        for (index_t c = 0; c < count; ++c) { rest -= coordinates[c] * basis(head, c, d); }
        total += rest * rest;
    }
    return total;
}

/// |x - y|^2
[[nodiscard]] inline float squared_distance(float const* x, float const* y, index_t n) noexcept
{
    simd::floats wide = simd::broadcast(0.0F);
    float rest        = 0;
    index_t i         = 0;
    for (; i + simd::lanes <= n; i += simd::lanes)
    {
        simd::floats const d = simd::load(x + i) - simd::load(y + i);
        wide += d * d;
    }
    for (; i < n; ++i) { rest += (x[i] - y[i]) * (x[i] - y[i]); }
    return simd::sum(wide) + rest;
}

/// Coordinates in the basis of the values in slot.rows, and the squared length of the change that quantising makes; a
/// rotation keeps lengths.
MDKV_OUTLINE inline void prepare_values(
    score_slot const& slot, index_t count, score_plan const& plan, score_head const& h) noexcept
{
    index_t const columns = plan.value_columns();
    if (columns > 0) { multiply_block(slot.rows, plan.value_dim, h.value_basis, columns, slot.latents); }
    if (plan.rotated > 0) { hadamard_rows(slot.rows, count, plan.value_dim, slot.rotated); }
    for (int j = plan.plain; j < plan.count; ++j)
    {
        score_rung const& u     = plan.rungs[j];
        float const* const from = u.rotated() ? slot.rotated : slot.latents;
        index_t const step      = u.rotated() ? plan.value_dim : columns;
        read_again(from, count, step, u.values, u.kind, slot.again);
        for (index_t i = 0; i < count; ++i)
        {
            slot.roundings[(j - plan.plain) * score_slot::block + i] =
                squared_distance(from + i * step, slot.again + i * u.values, u.values);
        }
    }
}

/// Writes the losses of the block's tokens at every rung; `first` is the place of its first one.
MDKV_OUTLINE inline void write_losses(score_slot const& slot, index_t first, index_t count,
    in_view<float, 3, backend> const& basis, index_t head, score_plan const& plan,
    out_view<float, 3, backend> const& loss) noexcept
{
    for (index_t i = 0; i < count; ++i)
    {
        auto const total               = [&](int softmax) { return simd::sum(simd::load(slot.sum(softmax, i))); };
        auto const loss_at             = [&](int r) -> float& { return loss(head, r, first + i); };
        float const* const value       = slot.rows + i * plan.value_dim;
        float const* const coordinates = slot.latents + i * plan.value_columns();
        float const mass               = total(0);
        float const squared            = tile::sum_of_squares(value, plan.value_dim);
        float const norm               = std::sqrt(squared);
        if (plan.dropped >= 0) { loss_at(plan.dropped) = mdkv::detail::dropped_loss(mass, norm); }
        if (plan.full >= 0) { loss_at(plan.full) = 0.0F; }
        float kept = 0; // of the squared length, by the coordinates of the rung before
        for (index_t j = 0; j < plan.count; ++j)
        {
            score_rung const& u = plan.rungs[j];
            float missing       = u.quantised() ? slot.roundings[(j - plan.plain) * score_slot::block + i] : 0.0F;
            if (u.leaves_out)
            {
                kept = (u.kept_from == 0 ? 0.0F : kept)
                       + tile::sum_of_squares(coordinates + u.kept_from, u.values - u.kept_from);
                missing += squared_rest(value, squared, kept, coordinates, basis, head, u.values);
            }
            float const moved = u.softmax > 0 ? total(u.softmax) : 0.0F;
            loss_at(u.index)  = mdkv::detail::stored_loss(moved, mass, norm, std::sqrt(missing));
        }
    }
}

} // namespace mdkv::cpu::inline MDKV_CPU_WIDTH::detail
