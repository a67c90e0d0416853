/// \file score_values.hpp: what becomes of a value at a rung, and how a loss is made of its parts (arXiv 2603.20616, section 4.2).
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/block.hpp>
#include <mdkv/cpu/detail/read_again.hpp>
#include <mdkv/cpu/detail/score_memory.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/tile.hpp>

#include <cmath>
#include <cstddef>

namespace mdkv::cpu
{

namespace detail
{

/// What the loss of a token at a rung is made of; sums are over the queries, each times its weight.
struct loss_terms
{
    float moved   = 0; ///< sum |P' - P|; 0 where the rule has no need of it
    float mass    = 0; ///< sum P
    float norm    = 0; ///< |v|
    float missing = 0; ///< |v - v'|
};

[[nodiscard]] inline float combine(loss_terms const& t) noexcept
{
    return t.moved * t.norm + t.mass * t.missing;
}

/// |v - v'|^2, v' being v's leading coordinates in the basis. |v|^2 - |v'|^2, because the basis is orthonormal; but where
/// the two nearly cancel (a thousandth leaves four digits of float's seven) from the difference itself.
[[nodiscard]] inline float squared_rest(float const* value, float squared, float kept, float const* coordinates,
    in_view<float, 3, backend> const& basis, index_t head, index_t count) noexcept
{
    float const missing = squared - kept;
    if (missing > 1e-3F * squared) [[likely]] { return missing; }
    index_t const dim = basis.extent(2);
    float total       = 0;
    index_t d         = 0;
    for (; d + simd::lanes <= dim; d += simd::lanes)
    {
        simd::floats rest = simd::load(value + d);
        for (index_t c = 0; c < count; ++c)
        {
            rest -= simd::broadcast(coordinates[c]) * simd::load(basis.data_handle() + basis.mapping()(head, c, d));
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

/// Of the values in slot.rows, what their losses need besides: coordinates in the basis, and what quantising changes,
/// which is as long turned as it is turned back.
inline void prepare_block_values(
    score_slot const& slot, index_t count, score_rungs const& rungs, score_sizes const& s, score_head const& h) noexcept
{
    if (s.value_latent > 0) { multiply_block(slot.rows, s.value_dim, h.value_basis, s.value_latent, slot.latents); }
    if (s.turned) { turn_rows(slot.rows, count, s.value_dim, s.value_dim, slot.turned); }
    for (index_t j = rungs.plain; j < rungs.count; ++j)
    {
        score_rung const& u = rungs[j];
        squared_roundings(u.turned() ? slot.turned : slot.latents, count, u.turned() ? s.value_dim : s.value_latent,
            u.values, u.kind, slot.roundings + (j - rungs.plain) * score_sizes::block);
    }
}

/// Writes the losses of token i of the block at every rung; loss_at(r) is where that of rung r of the set goes.
template <std::size_t R, class Loss>
void write_losses(score_slot const& slot, index_t i, in_view<float, 3, backend> const& basis, index_t head,
    ratio_set<R> const& ratios, score_rungs const& rungs, score_sizes const& s, Loss const& loss_at) noexcept
{
    auto const total = [&](index_t softmax) {
        return simd::sum(simd::load(slot.sums + (softmax * score_sizes::block + i) * simd::lanes));
    };
    float const* const value       = slot.rows + i * s.value_dim;
    float const* const coordinates = slot.latents + i * s.value_latent;
    float const mass               = total(0);
    float const squared            = tile::sum_of_squares(value, s.value_dim);
    float const norm               = std::sqrt(squared);
    for (std::size_t r = 0; r < ratios.size(); ++r)
    {
        if (ratios[r].dropped()) { loss_at(r) = 2 * mass * norm; }
        if (ratios[r].full()) { loss_at(r) = 0.0F; }
    }
    float kept   = 0; // of the squared length, by the first `done` coordinates
    index_t done = 0;
    for (index_t j = 0; j < rungs.count; ++j)
    {
        score_rung const& u  = rungs[j];
        bool const quantised = j >= rungs.plain;
        float missing        = quantised ? slot.roundings[(j - rungs.plain) * score_sizes::block + i] : 0.0F; // squared
        if (!quantised || u.values < s.value_dim) // a quantised rung with all coordinates leaves out none
        {
            if (u.values < done)
            {
                kept = 0;
                done = 0;
            }
            kept += tile::sum_of_squares(coordinates + done, u.values - done);
            done = u.values;
            missing += squared_rest(value, squared, kept, coordinates, basis, head, done);
        }
        loss_at(u.index) = combine({.moved = u.softmax > 0 ? total(u.softmax) : 0.0F,
            .mass                          = mass,
            .norm                          = norm,
            .missing                       = std::sqrt(missing)});
    }
}

} // namespace detail

} // namespace mdkv::cpu
