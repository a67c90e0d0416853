/// \file compress.cuh: compress on the GPU: the stages one after another on one stream, into a cache the caller has made room for (arXiv 2603.20616, sections 4, 5).
#pragma once

#include <mdkv/compress.hpp>

#include <mdkv/allocate.hpp>
#include <mdkv/basis.hpp>
#include <mdkv/cache.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/gpu/allocate.cuh>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/basis.cuh>
#include <mdkv/gpu/detail/fill.cuh>
#include <mdkv/gpu/device.cuh>
#include <mdkv/gpu/launch.cuh>
#include <mdkv/gpu/pack.cuh>
#include <mdkv/gpu/pool.cuh>
#include <mdkv/gpu/score.cuh>

#include <cstddef>
#include <cstdint>

namespace mdkv::gpu
{

/// Where compress puts a layer, all of it device memory that the caller has made: nothing is allocated, so that the whole
/// call can be recorded into a graph and replayed for the next prompt of the same shape.
template <element T>
struct compressed_layer
{
    cache_view<T, space::device> cache; ///< layout of the ratio set, arena of at least the budget's bytes
    allocation* report = nullptr; ///< [1], or [H] with quotas: what was chosen, and what could not be; may be null
    /// Another stream than the backend's: the basis of the values is fitted there while that of the keys is. Null: after it.
    cudaStream_t side = nullptr;
};

namespace kernels
{

/// Copies rungs to where the caller wants them.
struct hand_over
{
    static constexpr char const* name = "hand_over";
    static constexpr int threads      = 256;

    in_view<std::uint8_t, 2, backend> from; // [H, N]
    out_view<std::uint8_t, 2, backend> to;  // [H, N]

    __device__ void operator()() const
    {
        index_t const i = device::block() * threads + device::thread();
        if (i < to.extent(0) * to.extent(1))
        {
            to(i / to.extent(1), i % to.extent(1)) = from(i / to.extent(1), i % to.extent(1));
        }
    }
};

/// The reports of a layer that is stored as it is, one a limit.
struct report_whole
{
    static constexpr char const* name = "report_whole";
    static constexpr int threads      = 32;

    out_view<allocation, 1, backend> report; // [limits]
    allocation value;                        ///< but for its limit
    in_view<index_t, 1, backend> limit;      // [limits]

    __device__ void operator()() const
    {
        index_t const i = device::block() * threads + device::thread();
        if (i >= report.extent(0)) { return; }
        report(i)       = value;
        report(i).limit = limit(i);
    }
};

} // namespace kernels

/// Differs from the CPU's in what only the device knows when the call returns: report.resident_bytes is -1 and
/// report.chosen empty; `destination.report` and the directory have them on the stream. A loss that is not finite, a limit
/// below the cheapest rungs or the projections are told there (allocation_status), not thrown, and quotas beyond the budget
/// are the caller's to avoid: where packed tokens would not fit the arena, pack stores none. Looking for NaNs would have to
/// wait for the device: ask `expects_finite` before, then pass non_finite::unchecked.
///
/// \sync    asynchronous on `on.stream`, which waits for the side stream where there is one; fit for graph capture
/// \throws invalid_argument   besides what the contract names: non_finite is not unchecked, on_tight_budget is error, the
///                            destination's layout or arena does not fit, the layer fits the budget whole and the ratio
///                            set has no rung 1
template <element T, std::size_t R>
compress_report compress_impl(backend const& on, layer_view<backend, T> const& layer, ratio_set<R> const& ratios,
    compress_options<backend> const& options, layer_shape const& shape, compressed_layer<T> const& destination)
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
    report.shape            = shape;
    report.full_bytes       = shape.full_bytes();
    report.window_bytes     = shape.window_bytes();
    report.budget_bytes     = options.limit.in_bytes(shape);
    report.resident_bytes   = -1;
    bool const whole        = N == 0 || report.budget_bytes >= report.full_bytes;
    index_t const spendable = report.budget_bytes - report.window_bytes;
    expects(spendable >= 0, "compress: a budget of ", report.budget_bytes, " bytes cannot hold the window of ",
        shape.window, " tokens; at least ", report.window_bytes, " bytes are needed");
    expects(options.on_non_finite == non_finite::unchecked,
        "compress: on the GPU options.on_non_finite must be unchecked; "
        "ask expects_finite first, which waits for the device");
    expects(options.on_tight_budget == tight_budget::unprojected,
        "compress: on the GPU options.on_tight_budget must be "
        "unprojected; the report on the device says whether projections could be paid");
    expects(destination.cache.layout == cache_layout(ratios, H, shape.window, shape.dims),
        "compress: destination.cache.layout is not that of the ratio set, heads, window and dimensions");
    index_t const room = whole ? report.full_bytes : report.budget_bytes;
    expects(destination.cache.arena_bytes >= room, "compress: destination.cache.arena_bytes is ",
        destination.cache.arena_bytes, "; the budget may take ", room);
    expects(!whole || ratios.full_rung() < ratios.size(),
        "compress: the budget holds the whole layer, and the ratio set has no rung 1 to store it at");

    workspace::frame frame{*on.scratch, "compress"};
    auto const rung         = out(on, frame.take<std::uint8_t>(H * N), H, N);
    auto const key_basis    = out(on, frame.take<float>(projected ? H * D * D : 0), projected ? H : 0, D, D);
    auto const query_basis  = out(on, frame.take<float>(aware ? H * D * D : 0), aware ? H : 0, D, D);
    auto const value_basis  = out(on, frame.take<float>(projected ? H * Dv * Dv : 0), projected ? H : 0, Dv, Dv);
    auto const key_energy   = out(on, frame.take<float>(H * D), H, D);
    auto const value_energy = out(on, frame.take<float>(H * Dv), H, Dv);
    auto const loss         = out(on, frame.take<float>(H * R_count * N), H, R_count, N);
    auto const smooth       = out(on, frame.take<float>(pooled ? H * R_count * N : 0), pooled ? H : 0, R_count, N);
    auto* const byte_limit  = frame.take<index_t>(1);
    auto* const own_reports = frame.take<allocation>(limits);
    bool const beside       = projected && destination.side != nullptr;
    workspace side_counting; // two streams at work must not share scratch
    if (beside) { fit_basis(backend{destination.side, &side_counting}, layer.values, value_basis, value_energy); }
    std::size_t const side_bytes = beside ? side_counting.bytes() : 0;
    auto* const side_memory      = frame.take<std::byte>(static_cast<index_t>(side_bytes));
    bool const real              = !on.scratch->counting();
    if (real) { static_cast<void>(frame.ready()); }
    auto const reports   = out(on, destination.report == nullptr || !real ? own_reports : destination.report, limits);
    auto const step      = [&](char const* stage, index_t done) { return !real || options.progress(stage, done, 6); };
    auto const cancelled = [&] {
        report.status = compress_status::cancelled;
        return report;
    };
    auto const write_pack = [&](key_bases<backend> const& bases) {
        pack(on, layer.keys, layer.values, layer.window_keys, layer.window_values, bases, as_input(value_basis),
            as_input(rung), destination.cache);
        if (real && options.rungs)
        {
            launch(on, kernels::hand_over{as_input(rung), *options.rungs}, kernels::fill<std::uint8_t>::blocks(H * N));
        }
    };

    if (real && !options.quotas) { launch(on, kernels::fill<index_t>{out(on, byte_limit, 1, 1), spendable}, 1); }
    in_view<index_t, 1, backend> const byte_limits = options.quotas ? *options.quotas : in(on, byte_limit, 1);

    if (whole)
    {
        if (!step("pack", 5)) { return cancelled(); }
        report.status = compress_status::uncompressed;
        if (real)
        {
            auto const full = static_cast<std::uint8_t>(ratios.full_rung());
            launch(on, kernels::fill<std::uint8_t>{rung, full}, kernels::fill<std::uint8_t>::blocks(H * N));
            allocation chosen;
            chosen.status                     = allocation_status::everything_kept;
            chosen.token_bytes                = (report.full_bytes - report.window_bytes) / limits;
            chosen.tokens[ratios.full_rung()] = H * N / limits;
            launch(on, kernels::report_whole{reports, chosen, byte_limits},
                (limits + kernels::report_whole::threads - 1) / kernels::report_whole::threads);
        }
        write_pack(key_bases<backend>{as_input(key_basis)});
        return report;
    }

    if (!step("basis", 1)) { return cancelled(); }
    if (projected)
    {
        if (beside && real)
        {
            workspace side_scratch{{side_memory, side_bytes}};
            order_streams(on.stream, destination.side);
            fit_basis(backend{destination.side, &side_scratch}, layer.values, value_basis, value_energy);
        }
        if (aware) { fit_query_aware_basis(on, layer.queries, layer.keys, key_basis, query_basis, key_energy); }
        else { fit_basis(on, layer.keys, key_basis, key_energy); }
        if (!beside) { fit_basis(on, layer.values, value_basis, value_energy); }
        else if (real) { order_streams(destination.side, on.stream); }
    }
    key_bases<backend> const bases{as_input(key_basis), as_input(aware ? query_basis : key_basis)};
    if (!step("score", 2)) { return cancelled(); }
    score(on, layer.queries, layer.keys, layer.values, layer.window_keys, bases, as_input(value_basis), ratios,
        options.scoring, loss);
    if (!step("pool", 3)) { return cancelled(); }
    if (pooled) { pool(on, as_input(loss), options.pooling, smooth); }
    if (!step("allocate", 4)) { return cancelled(); }
    allocate(on, as_input(pooled ? smooth : loss), rung_costs{ratios, shape.dims, shape.element_bytes}, byte_limits,
        options.allocation, rung, reports);
    if (!step("pack", 5)) { return cancelled(); }
    write_pack(bases);
    return report;
}

} // namespace mdkv::gpu
