/// \file attended.hpp: attention over a packed cache on the device, and its comparison with that of the CPU
#pragma once

#include <mdkv/attend.hpp>

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/gpu/attend.cuh>

#include "gpu/support/device.hpp"
#include "gpu/support/device_cache.hpp"
#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/packed.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

namespace support
{

template <class U>
struct attended
{
    tensor<U, 2> output;
    tensor<float, 1> lse;
};

/// Options of both backends.
struct attend_choice
{
    float scale = 0;
    std::vector<float> sinks{}; ///< [rows]  sink logits; none: no option

    /// Attends; the logits lie at `memory`.
    void attend(
        auto const& on, auto const& queries, auto const& cache, float const* memory, auto& output, auto& lse) const
    {
        mdkv::attend_options<std::remove_cvref_t<decltype(on)>> all{.scale = scale};
        if (!sinks.empty()) { all.lse_elsewhere = mdkv::in(on, memory, std::ssize(sinks), 1); }
        mdkv::attend(on, queries.in(), cache.view(), all, output.out(), lse.out());
    }
};

/// Shapes of output and log-sum-exps of queries [rows, D], or [rows, n, D] of the last n tokens.
template <class U, std::size_t Rank>
[[nodiscard]] auto shapes_of(tensor<U, Rank> const& queries, index_t values)
{
    std::pair<std::array<index_t, Rank>, std::array<index_t, Rank - 1>> shapes;
    for (std::size_t i = 0; i + 1 < Rank; ++i) { shapes.first[i] = shapes.second[i] = queries.extent(i); }
    shapes.first[Rank - 1] = values;
    return shapes;
}

/// The result's rows are all rows of the output.
template <class Output, class Lse>
[[nodiscard]] auto rows_of(Output const& output, Lse const& lse)
{
    auto const values  = output.elements();
    index_t const rows = lse.count();
    using U            = typename decltype(values)::value_type;
    attended<U> got{tensor<U, 2>{{rows, output.count() / std::max<index_t>(rows, 1)}}, tensor<float, 1>{{rows}}};
    got.output.assign(values);
    got.lse.assign(lse.elements());
    return got;
}

template <class T, class U, std::size_t Rank>
attended<U> on_gpu(mdkv::cpu::cache<T> const& cache, tensor<U, Rank> const& queries, attend_choice const& choice = {})
{
    tensor<float, 1> logits{{std::ssize(choice.sinks)}};
    logits.assign(choice.sinks);
    auto const [rows, sums] = shapes_of(queries, cache.layout().dims.values);
    device_tensor<float, 1> const sinks{logits};
    device_cache<T> const stored{cache.view()};
    device_tensor<U, Rank> const q{queries};
    device_tensor<U, Rank> output{rows, {.slack = 2}};
    device_tensor<float, Rank - 1> lse{sums};
    run_on_device(
        [&](mdkv::gpu::backend const& on) { choice.attend(on, q, stored, sinks.in().data_handle(), output, lse); });
    return rows_of(output.host(), lse.host());
}

template <class T, class U, std::size_t Rank>
attended<U> on_cpu(mdkv::cpu::cache<T> const& cache, tensor<U, Rank> const& queries, attend_choice const& choice = {})
{
    auto const [rows, sums] = shapes_of(queries, cache.layout().dims.values);
    tensor<U, Rank> output{rows};
    tensor<float, Rank - 1> lse{sums};
    run([&](mdkv::cpu::backend const& on) { choice.attend(on, queries, cache, choice.sinks.data(), output, lse); });
    return rows_of(output, lse);
}

/// Sums run in float over some hundred tokens and dimensions on both sides, in different orders; the output is rounded to U
/// on top.
template <class T, class U, class Queries>
void expects_same(mdkv::cpu::cache<T> const& cache, Queries const& queries, attend_choice const& choice = {})
{
    attended<U> const got  = on_gpu(cache, queries, choice);
    attended<U> const want = on_cpu(cache, queries, choice);
    double const rounding  = std::same_as<U, float> ? 0x1p-24 : std::same_as<U, mdkv::half> ? 0x1p-11 : 0x1p-8;
    worst_error output;
    worst_error lse;
    for (index_t i = 0; i < want.lse.extent(0); ++i)
    {
        double size = 1e-3;
        for (index_t c = 0; c < cache.layout().dims.values; ++c)
        {
            size = std::max(size, std::fabs(static_cast<double>(mdkv::widen(want.output.get(i, c)))));
        }
        for (index_t c = 0; c < cache.layout().dims.values; ++c)
        {
            output.add(static_cast<double>(mdkv::widen(got.output.get(i, c))),
                static_cast<double>(mdkv::widen(want.output.get(i, c))), size, i);
        }
        float const expected = want.lse.get(i);
        if (std::isinf(expected)) { CHECK(got.lse.get(i) == expected); }
        else { lse.add(got.lse.get(i), expected, std::max(1.0F, std::fabs(expected)), i); }
    }
    CAPTURE(cache.layout().dims.keys);
    CAPTURE(cache.layout().dims.values);
    CAPTURE(want.lse.extent(0));
    double const integers = integer_rounding(cache.layout());
    if (output.compared() > 0) { CHECK_MESSAGE(output.within(2e-5 + 2 * rounding + integers), output); }
    if (lse.compared() > 0) { CHECK_MESSAGE(lse.within(4e-6 + integers), lse); }
}

} // namespace support
