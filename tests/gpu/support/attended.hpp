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
#include <cmath>
#include <concepts>

#include <doctest/doctest.h>

namespace support
{

template <class U>
struct attended
{
    tensor<U, 2> output;
    tensor<float, 1> lse;
};

template <class T, class U>
attended<U> on_gpu(mdkv::cpu::cache<T> const& cache, tensor<U, 2> const& queries, mdkv::attend_options options = {})
{
    device_cache<T> const stored{cache.view()};
    device_tensor<U, 2> const q{queries};
    device_tensor<U, 2> output{{queries.extent(0), cache.layout().dims.values}, {.slack = 2}};
    device_tensor<float, 1> lse{{queries.extent(0)}};
    run_on_device(
        [&](mdkv::gpu::backend const& on) { attend(on, q.in(), stored.view(), options, output.out(), lse.out()); });
    return {output.host(), lse.host()};
}

template <class T, class U>
attended<U> on_cpu(mdkv::cpu::cache<T> const& cache, tensor<U, 2> const& queries, mdkv::attend_options options = {})
{
    attended<U> got{
        tensor<U, 2>{{queries.extent(0), cache.layout().dims.values}}, tensor<float, 1>{{queries.extent(0)}}};
    run([&](mdkv::cpu::backend const& on) {
        attend(on, queries.in(), cache.view(), options, got.output.out(), got.lse.out());
    });
    return got;
}

/// Queries [rows, n, D] of the last n tokens; the result's rows are [rows * n].
template <class T, class U>
attended<U> on_gpu(mdkv::cpu::cache<T> const& cache, tensor<U, 3> const& queries)
{
    device_cache<T> const stored{cache.view()};
    device_tensor<U, 3> const q{queries};
    device_tensor<U, 3> output{{queries.extent(0), queries.extent(1), cache.layout().dims.values}, {.slack = 2}};
    device_tensor<float, 2> lse{{queries.extent(0), queries.extent(1)}};
    run_on_device(
        [&](mdkv::gpu::backend const& on) { attend(on, q.in(), stored.view(), {}, output.out(), lse.out()); });
    attended<U> got{tensor<U, 2>{{queries.extent(0) * queries.extent(1), cache.layout().dims.values}},
        tensor<float, 1>{{queries.extent(0) * queries.extent(1)}}};
    got.output.assign(output.host().elements());
    got.lse.assign(lse.host().elements());
    return got;
}

template <class T, class U>
attended<U> on_cpu(mdkv::cpu::cache<T> const& cache, tensor<U, 3> const& queries)
{
    tensor<U, 3> output{{queries.extent(0), queries.extent(1), cache.layout().dims.values}};
    tensor<float, 2> lse{{queries.extent(0), queries.extent(1)}};
    run([&](mdkv::cpu::backend const& on) { attend(on, queries.in(), cache.view(), {}, output.out(), lse.out()); });
    attended<U> got{tensor<U, 2>{{queries.extent(0) * queries.extent(1), cache.layout().dims.values}},
        tensor<float, 1>{{queries.extent(0) * queries.extent(1)}}};
    got.output.assign(output.elements());
    got.lse.assign(lse.elements());
    return got;
}

/// Sums run in float over some hundred tokens and dimensions on both sides, in different orders; the output is rounded to U
/// on top.
template <class T, class U, class Queries, class... Options>
void expects_same(mdkv::cpu::cache<T> const& cache, Queries const& queries, Options... options)
{
    attended<U> const got  = on_gpu(cache, queries, options...);
    attended<U> const want = on_cpu(cache, queries, options...);
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
