/// \file stages.cuh: one layer of a benchmark, with room for all that is made of it, and the stages' calls
#pragma once

#include <mdkv/core/budget.hpp>
#include <mdkv/core/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/cache.cuh>
#include <mdkv/gpu/score.cuh>
#include <mdkv/presets.hpp>
#include <mdkv/stages/allocate.hpp>
#include <mdkv/stages/basis.hpp>
#include <mdkv/stages/channels.hpp>
#include <mdkv/stages/pack.hpp>
#include <mdkv/stages/pool.hpp>
#include <mdkv/stages/score.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "bench.cuh"
#include "layers.cuh"

namespace bench
{

constexpr auto const& paper  = mdkv::presets::paper;
constexpr auto const& best   = mdkv::presets::by_window;
constexpr auto rungs         = static_cast<index_t>(paper.ratios.size());
constexpr mdkv::budget tenth = mdkv::budget::fraction(1, 10);

using on_device = gpu::backend const&;

/// A layer, and room for all that is made of it.
struct layer
{
    source_layer from;
    index_t tokens    = from.tokens;
    index_t budget    = tenth.in_bytes(from.shape());
    index_t spendable = budget - from.shape().window_bytes();
    device_array<float> bases{2 * heads * dim * dim};        // [2, H, D, D] of keys, of values
    device_array<float> energies{2 * heads * dim};           // [2, H, D]
    device_array<float> loss{heads * rungs * tokens};        // [H, R, N]
    device_array<float> loss_by_lse{heads * rungs * tokens}; // [H, R, N]
    device_array<float> pooled{heads * rungs * tokens};      // [H, R, N]
    device_array<std::uint8_t> rung{heads * tokens};         // [H, N]
    device_array<mdkv::allocation> report{1};
    device_array<index_t> limit = to_device(std::vector<index_t>{spendable});
    // Log-sum-exps of about the right size, as a prefill would hand over; what they are does not change the time.
    device_array<float> lse = to_device(std::vector<float>(
        static_cast<std::size_t>(heads * group * window), std::log(static_cast<float>(tokens)) + 3.0F));
    gpu::cache<element> packed{mdkv::cache_layout{paper.ratios, heads, window, dims}, budget, 0, stream(), memory()};
    gpu::cache<element> coded{mdkv::cache_layout{best.ratios, heads, window, dims}, budget, 0, stream(), memory()};
    device_array<float> channels{heads * 3 * dim}; // [H, 3, D]

    layer(index_t n, std::uint64_t seed)
        : from{n, seed}
    {}

    [[nodiscard]] auto basis(index_t which) const
    {
        return mdkv::out(gpu::backend{}, bases.data() + which * heads * dim * dim, heads, dim, dim);
    }
    [[nodiscard]] auto energy(index_t which) const
    {
        return mdkv::out(gpu::backend{}, energies.data() + which * heads * dim, heads, dim);
    }
    [[nodiscard]] auto losses(device_array<float> const& of) const
    {
        return mdkv::out(gpu::backend{}, of.data(), heads, rungs, tokens);
    }
};

inline void fit_basis(on_device on, layer& x)
{
    mdkv::fit_basis(on, x.from.view().keys, x.basis(0), x.energy(0));
    mdkv::fit_basis(on, x.from.view().values, x.basis(1), x.energy(1));
}

inline void score(
    on_device on, layer& x, mdkv::score_options<gpu::backend> const& options, device_array<float> const& loss)
{
    auto const from = x.from.view();
    mdkv::score(on, from.queries, from.keys, from.values, from.window_keys, mdkv::as_input(x.basis(0)),
        mdkv::as_input(x.basis(1)), paper.ratios, options, x.losses(loss));
}

inline void score_by_lse(on_device on, layer& x)
{
    score(on, x, {.lse = mdkv::in(on, x.lse.data(), heads * group, window)}, x.loss_by_lse);
}

inline void pool(on_device on, layer& x)
{
    mdkv::pool(on, mdkv::as_input(x.losses(x.loss)), paper.pooling, x.losses(x.pooled));
}

inline void allocate(on_device on, layer& x)
{
    mdkv::allocate(on, {mdkv::as_input(x.losses(x.pooled)), mdkv::out(on, x.rung.data(), heads, x.tokens)},
        mdkv::rung_costs{paper.ratios, dims, index_t{sizeof(element)}}, mdkv::in(on, x.limit.data(), 1), {},
        mdkv::out(on, x.report.data(), 1));
}

inline void pack(on_device on, layer& x)
{
    auto const from = x.from.view();
    mdkv::pack(on, from.keys, from.values, from.window_keys, from.window_values, mdkv::as_input(x.basis(0)),
        mdkv::as_input(x.basis(1)), mdkv::in(on, x.rung.data(), heads, x.tokens), x.packed.view());
}

/// All stages of preset `paper`.
inline void compress(on_device on, layer& x)
{
    fit_basis(on, x);
    score(on, x, {}, x.loss);
    pool(on, x);
    allocate(on, x);
    pack(on, x);
}

/// All stages of preset `by_window`.
inline void compress_coded(on_device on, layer& x)
{
    static_assert(best.ratios.size() == paper.ratios.size() && !best.ratios.any_projected());
    auto const from     = x.from.view();
    auto const channels = mdkv::out(on, x.channels.data(), heads, 3, dim);
    auto const rung     = mdkv::out(on, x.rung.data(), heads, x.tokens);
    mdkv::in_view<float, 3, gpu::backend> const none{};
    mdkv::fit_channels(on, from.queries, from.keys, channels);
    mdkv::score_options<gpu::backend> options{};
    options.channels = mdkv::as_input(channels);
    mdkv::score(
        on, from.queries, from.keys, from.values, from.window_keys, none, none, best.ratios, options, x.losses(x.loss));
    mdkv::pool(on, mdkv::as_input(x.losses(x.loss)), best.pooling, x.losses(x.pooled));
    mdkv::allocate(on, {mdkv::as_input(x.losses(x.pooled)), rung},
        mdkv::rung_costs{best.ratios, dims, index_t{sizeof(element)}}, mdkv::in(on, x.limit.data(), 1), {},
        mdkv::out(on, x.report.data(), 1));
    mdkv::pack(on, from.keys, from.values, from.window_keys, from.window_values, none, none, mdkv::as_input(rung),
        x.coded.view(), mdkv::as_input(channels));
}

} // namespace bench
