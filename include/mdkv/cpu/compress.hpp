/// \file compress.hpp: compress on the CPU: the stages one after another in the caller's scratch, then one new cache.
#pragma once

#include <mdkv/compress.hpp>

#include <mdkv/basis.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/allocate.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/basis.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/finite.hpp>
#include <mdkv/cpu/pack.hpp>
#include <mdkv/cpu/pool.hpp>
#include <mdkv/cpu/score.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace mdkv::cpu
{

namespace detail
{

/// The sum of what was done for each limit.
[[nodiscard]] inline allocation sum_of(allocation const* reports, index_t count) noexcept
{
    allocation total = count > 0 ? reports[0] : allocation{};
    for (index_t i = 1; i < count; ++i)
    {
        total.status     = std::max(total.status, reports[i].status);
        total.multiplier = std::max(total.multiplier, reports[i].multiplier);
        total.loss += reports[i].loss;
        total.dual += reports[i].dual;
        total.limit += reports[i].limit;
        total.token_bytes += reports[i].token_bytes;
        total.charged_bytes += reports[i].charged_bytes;
        for (std::size_t r = 0; r < max_rungs; ++r) { total.tokens[r] += reports[i].tokens[r]; }
    }
    return total;
}

/// Copies rows [H, N, D] and zeroes those that hold a NaN or an infinity; marks their tokens.
template <element T>
void copy_finite(backend const& on, in_view<T, 3, backend> from, T* to, std::uint8_t* marked)
{
    index_t const tokens = from.extent(1);
    index_t const dim    = from.extent(2);
    on.for_each(from.extent(0) * tokens, [&](index_t i, index_t) {
        T const* const row = from.data_handle() + from.mapping()(i / tokens, i % tokens, index_t{0});
        auto const bytes   = static_cast<std::size_t>(dim) * sizeof(T);
        if (all_finite(row, dim)) { std::memcpy(static_cast<void*>(to + i * dim), row, bytes); }
        else
        {
            std::memset(static_cast<void*>(to + i * dim), 0, bytes);
            marked[i] = 1;
        }
    });
}

/// Makes every rung but the full one unbearable to the marked tokens, and the full one free.
inline void pin(std::uint8_t const* marked, index_t full, out_view<float, 3, backend> const& loss) noexcept
{
    constexpr float unbearable = 1e30F;
    for (index_t h = 0; h < loss.extent(0); ++h)
    {
        for (index_t r = 0; r < loss.extent(1); ++r)
        {
            for (index_t n = 0; n < loss.extent(2); ++n)
            {
                if (marked[h * loss.extent(2) + n] != 0) { loss(h, r, n) = r == full ? 0.0F : unbearable; }
            }
        }
    }
}

/// Packs the layer by its rungs into a cache of exactly the size it needs, and only then replaces the destination.
template <element T, std::size_t R>
[[nodiscard]] index_t pack_into(backend const& on, layer_view<backend, T> const& layer, ratio_set<R> const& ratios,
    layer_shape const& shape, key_bases<backend> const& key_basis, in_view<float, 3, backend> value_basis,
    in_view<std::uint8_t, 2, backend> rung, cache<T>& destination)
{
    cache_layout const layout{ratios, shape.heads, shape.window, shape.dims};
    cache<T> made{layout, packed_bytes<T>(on, rung, layout), 0, destination.resource()};
    pack(on, layer.keys, layer.values, layer.window_keys, layer.window_values, key_basis, value_basis, rung,
        made.view());
    index_t const bytes = made.arena_bytes();
    destination         = std::move(made);
    return bytes;
}

} // namespace detail

template <element T, std::size_t R>
compress_report compress_impl(backend const& on, layer_view<backend, T> const& layer, ratio_set<R> const& ratios,
    compress_options<backend> const& options, layer_shape const& shape, cache<T>& destination)
{
    index_t const H      = shape.heads;
    index_t const N      = shape.tokens;
    index_t const D      = shape.dims.keys;
    index_t const Dv     = shape.dims.values;
    auto const R_count   = static_cast<index_t>(ratios.size());
    bool const projected = ratios.widest_projection(D) > 0;
    bool const aware     = projected && options.key_basis == key_basis_kind::query_aware;
    bool const pooled    = !options.pooling.copies();
    index_t const limits = options.quotas ? H : 1;

    compress_report report;
    report.shape        = shape;
    report.full_bytes   = shape.full_bytes();
    report.window_bytes = shape.window_bytes();
    report.budget_bytes = options.limit.in_bytes(shape);
    bool const whole    = N == 0 || report.budget_bytes >= report.full_bytes;
    expects(report.budget_bytes >= report.window_bytes, "compress: a budget of ", report.budget_bytes,
        " bytes cannot hold the window of ", shape.window, " tokens; at least ", report.window_bytes,
        " bytes are needed");

    if (!on.scratch->counting()) // so that a workspace too small for the last stage is refused before the first
    {
        workspace all;
        static_cast<void>(compress_impl(backend{&all, on.executor}, layer, ratios, options, shape, destination));
        expects<insufficient_workspace>(all.bytes() <= on.scratch->free_memory().size(),
            "compress: the workspace holds ", on.scratch->free_memory().size(), " bytes, ", all.bytes(), " are needed");
    }
    workspace::frame frame{*on.scratch, "compress"};
    auto const rung         = out(on, frame.take<std::uint8_t>(H * N), H, N);
    auto const key_basis    = out(on, frame.take<float>(projected ? H * D * D : 0), projected ? H : 0, D, D);
    auto const query_basis  = out(on, frame.take<float>(aware ? H * D * D : 0), aware ? H : 0, D, D);
    auto const value_basis  = out(on, frame.take<float>(projected ? H * Dv * Dv : 0), projected ? H : 0, Dv, Dv);
    auto const key_energy   = out(on, frame.take<float>(H * D), H, D);
    auto const value_energy = out(on, frame.take<float>(H * Dv), H, Dv);
    auto const loss         = out(on, frame.take<float>(H * R_count * N), H, R_count, N);
    auto const smooth       = out(on, frame.take<float>(pooled ? H * R_count * N : 0), pooled ? H : 0, R_count, N);
    auto const byte_limits  = out(on, frame.take<index_t>(limits), limits);
    auto const reports      = out(on, frame.take<allocation>(limits), limits);
    bool const keeping      = options.on_non_finite == non_finite::keep_full;
    auto* const marked      = frame.take<std::uint8_t>(keeping ? H * N : 0); // tokens to pin
    auto* const keys        = frame.take<T>(keeping ? H * N * D : 0);
    auto* const values      = frame.take<T>(keeping ? H * N * Dv : 0);
    bool const real         = frame.ready();
    auto const step      = [&](char const* stage, index_t done) { return !real || options.progress(stage, done, 6); };
    auto const cancelled = [&] {
        report.status = compress_status::cancelled;
        return report;
    };

    auto const hand_over = [&] {
        for (index_t h = 0; options.rungs && h < H; ++h)
        {
            for (index_t n = 0; n < N; ++n) { (*options.rungs)(h, n) = rung(h, n); }
        }
    };

    if (!step("check", 0)) { return cancelled(); }
    if (options.on_non_finite != non_finite::unchecked)
    {
        expects_finite(on, "queries", layer.queries, options.layer);
        expects_finite(on, "window_keys", layer.window_keys, options.layer);
        expects_finite(on, "window_values", layer.window_values, options.layer);
    }
    if (options.on_non_finite == non_finite::error)
    {
        expects_finite(on, "keys", layer.keys, options.layer);
        expects_finite(on, "values", layer.values, options.layer);
    }
    layer_view<backend, T> known = layer; // what bases and scores are made from
    if (keeping)
    {
        expects(ratios.full_rung() < ratios.size(), "compress: keep_full needs a ratio set with the rung 1");
        known.keys   = in(on, keys, H, N, D);
        known.values = in(on, values, H, N, Dv);
    }
    if (keeping && real)
    {
        std::fill_n(marked, H * N, std::uint8_t{0});
        detail::copy_finite(on, layer.keys, keys, marked);
        detail::copy_finite(on, layer.values, values, marked);
    }
    if (whole)
    {
        if (!step("pack", 5)) { return cancelled(); }
        report.status = compress_status::uncompressed;
        if (!real) { return report; }
        std::fill_n(rung.data_handle(), H * N, std::uint8_t{1});
        in_view<float, 3, backend> const none = in(on, static_cast<float const*>(nullptr), 0, 0, 0);
        report.resident_bytes =
            detail::pack_into(on, layer, evict_ratios, shape, none, none, as_input(rung), destination);
        report.chosen.status      = allocation_status::everything_kept;
        report.chosen.limit       = report.budget_bytes - report.window_bytes;
        report.chosen.token_bytes = report.full_bytes - report.window_bytes;
        std::fill_n(rung.data_handle(), H * N, static_cast<std::uint8_t>(ratios.full_rung()));
        hand_over();
        if (ratios.full_rung() < ratios.size()) { report.chosen.tokens[ratios.full_rung()] = H * N; }
        return report;
    }

    if (!step("basis", 1)) { return cancelled(); }
    if (projected)
    {
        if (aware) { fit_query_aware_basis(on, known.queries, known.keys, key_basis, query_basis, key_energy); }
        else { fit_basis(on, known.keys, key_basis, key_energy); }
        fit_basis(on, known.values, value_basis, value_energy);
    }
    key_bases<backend> const bases{as_input(key_basis), as_input(aware ? query_basis : key_basis)};
    if (!step("score", 2)) { return cancelled(); }
    score(on, known.queries, known.keys, known.values, known.window_keys, bases, as_input(value_basis), ratios,
        options.scoring, loss);
    if (!step("pool", 3)) { return cancelled(); }
    if (pooled) { pool(on, as_input(loss), options.pooling, smooth); }
    if (keeping && real) { detail::pin(marked, static_cast<index_t>(ratios.full_rung()), pooled ? smooth : loss); }
    if (!step("allocate", 4)) { return cancelled(); }
    if (real)
    {
        index_t const spendable = report.budget_bytes - report.window_bytes;
        byte_limits(0)          = spendable;
        index_t total           = 0;
        for (index_t h = 0; options.quotas && h < H; ++h)
        {
            byte_limits(h) = (*options.quotas)(h);
            total          = checked_add(total, byte_limits(h));
        }
        expects(total <= spendable, "compress: quotas add up to ", total, " bytes; the budget leaves ", spendable,
            " beside the window");
    }
    rung_costs const costs{ratios, shape.dims, shape.element_bytes};
    allocate(on, as_input(pooled ? smooth : loss), costs, as_input(byte_limits), options.allocation, rung, reports);
    if (!real) { return report; }
    report.chosen = detail::sum_of(reports.data_handle(), limits);

    expects<non_finite_input>(report.chosen.status != allocation_status::non_finite_loss,
        "compress: a loss is NaN or infinite; keys, values or queries are not finite, or too large to multiply");
    expects(report.chosen.status != allocation_status::over_limit, "compress: a budget of ", report.budget_bytes,
        " bytes cannot hold every token at its cheapest rung; at least ",
        report.window_bytes + checked_multiply(H * N, costs.bytes[0])
            + (costs.projected[0] ? H * costs.projection[0] : 0),
        " bytes are needed");
    expects(
        report.chosen.status != allocation_status::unprojected_only || options.on_tight_budget != tight_budget::error,
        "compress: a budget of ", report.budget_bytes, " bytes cannot hold the window and the projections; at least ",
        report.window_bytes
            + (options.allocation.charge == projection_charge::always ? H * costs.widest_projection()
                                                                      : costs.narrowest_projection()),
        " bytes are needed");
    for (index_t i = 0; keeping && i < H * N; ++i)
    {
        expects(marked[i] == 0 || rung(i / N, i % N) == ratios.full_rung(), "compress: a budget of ",
            report.budget_bytes, " bytes cannot hold the tokens that are not finite at the full rung; head ", i / N,
            ", token ", i % N);
    }
    if (!step("pack", 5)) { return cancelled(); }
    report.resident_bytes =
        detail::pack_into(on, layer, ratios, shape, bases, as_input(value_basis), as_input(rung), destination);
    hand_over();
    return report;
}

} // namespace mdkv::cpu
