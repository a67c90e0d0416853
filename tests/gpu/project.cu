// Tolerances: a coordinate is a float sum over D products, judged against the vector's length: 2e-6 |x| for D <= 256 on either
// side; then one rounding to the output's element type, at most 2^-11 (half) or 2^-8 (bfloat16) of the coordinate. Where the
// two sums lie on either side of a tie they round to neighbours, which are twice that apart.
#include <mdkv/gpu/project.cuh>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/project.hpp>

#include "gpu/support/device.hpp"
#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/layer.hpp"

#include <array>
#include <cmath>
#include <cstddef>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using support::device_tensor;
using support::layer;
using support::placement;
using support::tensor;
using support::worst_error;
using host = cpu::backend;

template <class U, class T>
tensor<U, 3> projected(tensor<T, 3> const& x, tensor<float, 3> const& basis, index_t r, placement how = {})
{
    device_tensor<T, 3> const from{x};
    device_tensor<float, 3> const rows{basis};
    device_tensor<U, 3> to{{x.extent(0), x.extent(1), r}, how};
    support::run_on_device([&](gpu::backend const& on) { project(on, from.in(), rows.in(), to.out()); });
    return to.host();
}

template <class T, class U>
tensor<T, 3> reconstructed(tensor<U, 3> const& c, tensor<float, 3> const& basis, placement how = {})
{
    device_tensor<U, 3> const from{c};
    device_tensor<float, 3> const rows{basis};
    device_tensor<T, 3> to{{c.extent(0), c.extent(1), basis.extent(2)}, how};
    support::run_on_device([&](gpu::backend const& on) { reconstruct(on, from.in(), rows.in(), to.out()); });
    return to.host();
}

template <class U, class T>
tensor<U, 3> projected_on_cpu(tensor<T, 3> const& x, tensor<float, 3> const& basis, index_t r)
{
    tensor<U, 3> c{{x.extent(0), x.extent(1), r}};
    support::run([&](host const& on) { project(on, x.in(), basis.in(), c.out()); });
    return c;
}

template <class T, class U>
tensor<T, 3> reconstructed_on_cpu(tensor<U, 3> const& c, tensor<float, 3> const& basis)
{
    tensor<T, 3> x{{c.extent(0), c.extent(1), basis.extent(2)}};
    support::run([&](host const& on) { reconstruct(on, c.in(), basis.in(), x.out()); });
    return x;
}

/// Errors of every element in units of what it may be off; row n of `inputs` is what row n was made of.
template <class T, class U>
worst_error against(tensor<T, 3> const& got, tensor<T, 3> const& want, tensor<U, 3> const& inputs)
{
    constexpr double rounding = std::is_same_v<T, float> ? 0x1p-24 : std::is_same_v<T, half> ? 0x1p-11 : 0x1p-8;
    worst_error error;
    for (index_t h = 0; h < got.extent(0); ++h)
    {
        for (index_t n = 0; n < got.extent(1); ++n)
        {
            double square = 0;
            for (index_t d = 0; d < inputs.extent(2); ++d)
            {
                square += std::pow(static_cast<double>(widen(inputs.get(h, n, d))), 2.0);
            }
            for (index_t d = 0; d < got.extent(2); ++d)
            {
                auto const w = static_cast<double>(widen(want.get(h, n, d)));
                // A half's subnormals are 2^-24 apart.
                double const allowed = 4e-6 * std::sqrt(square) + 2 * rounding * std::fabs(w) + 0x1p-24;
                error.add(static_cast<long double>(widen(got.get(h, n, d))), w, allowed, n * 1000 + d);
            }
        }
    }
    return error;
}

} // namespace

TEST_CASE_TEMPLATE(
    "project and reconstruct on the GPU are those of the CPU, at every head dimension", T, float, half, bfloat16)
{
    for (index_t const dim : {1, 7, 40, 64, 128})
    {
        for (index_t const r : {index_t{1}, dim / 8, dim / 2 + 1, dim})
        {
            if (r == 0) { continue; }
            CAPTURE(dim);
            CAPTURE(r);
            layer<T> const x{{.tokens = 67, .dim = dim, .value_dim = 8}};
            auto const same           = projected_on_cpu<T>(x.keys, x.key_basis, r);
            auto const plain          = projected_on_cpu<float>(x.keys, x.key_basis, r);
            worst_error const rounded = against(projected<T>(x.keys, x.key_basis, r), same, x.keys);
            CHECK_MESSAGE(rounded.within(1), rounded);
            worst_error const exact = against(projected<float>(x.keys, x.key_basis, r), plain, x.keys);
            CHECK_MESSAGE(exact.within(1), exact);
            worst_error const back =
                against(reconstructed<T>(plain, x.key_basis), reconstructed_on_cpu<T>(plain, x.key_basis), plain);
            CHECK_MESSAGE(back.within(1), back);
            worst_error const widened =
                against(reconstructed<float>(same, x.key_basis), reconstructed_on_cpu<float>(same, x.key_basis), same);
            CHECK_MESSAGE(widened.within(1), widened);
        }
    }
}

TEST_CASE("project and reconstruct on the GPU convert between half and bfloat16")
{
    layer<half> const x{{.tokens = 5, .dim = 48, .value_dim = 8}};
    auto const c            = projected_on_cpu<bfloat16>(x.keys, x.key_basis, 20);
    worst_error const there = against(projected<bfloat16>(x.keys, x.key_basis, 20), c, x.keys);
    CHECK_MESSAGE(there.within(1), there);
    worst_error const back =
        against(reconstructed<half>(c, x.key_basis), reconstructed_on_cpu<half>(c, x.key_basis), c);
    CHECK_MESSAGE(back.within(1), back);
}

TEST_CASE_TEMPLATE("strides and slack change no bit of a projection on the GPU", T, float, half, bfloat16)
{
    for (index_t const dim : {8, 40, 64})
    {
        layer<T> const x{{.heads = 3, .tokens = 70, .dim = dim, .value_dim = 8}};
        index_t const r = dim / 4;
        auto const c    = projected<float>(x.keys, x.key_basis, r);
        auto const v    = reconstructed<T>(c, x.key_basis);
        for (placement const how : {placement{.swapped = true}, placement{.slack = 3}, placement{.slack = 8},
                 placement{.swapped = true, .slack = 5, .misalign = 4}})
        {
            placement const to{.swapped = how.swapped, .slack = how.slack};
            CHECK(support::same_bits(
                projected<float>(x.keys.relaid(how), x.key_basis.relaid(to), r, to).elements(), c.elements()));
            CHECK(support::same_bits(
                reconstructed<T>(c.relaid(how), x.key_basis.relaid(to), to).elements(), v.elements()));
        }
    }
}

TEST_CASE("outputs of project on the GPU get their elements and nothing else")
{
    layer<half> const x{{.heads = 2, .tokens = 35, .dim = 40, .value_dim = 8}};
    device_tensor<half, 3> const from{x.keys};
    device_tensor<float, 3> const rows{x.key_basis};
    device_tensor<half, 3> around{tensor<half, 3>{{2, 35, 8}}};
    auto const all = around.out();
    support::run_on_device([&](gpu::backend const& on) {
        project(on, from.in(), rows.in(), out(on, all.data_handle(), {2, 35, 5}, {35 * 8, 8, 1}));
    });
    tensor<half, 3> const got = around.host();
    int touched               = 0;
    for (index_t h = 0; h < 2; ++h)
    {
        for (index_t n = 0; n < 35; ++n)
        {
            for (index_t d = 5; d < 8; ++d) { touched += std::isnan(widen(got.get(h, n, d))) ? 0 : 1; }
            for (index_t d = 0; d < 5; ++d) { touched += std::isnan(widen(got.get(h, n, d))) ? 1 : 0; }
        }
    }
    CHECK(touched == 0);
}

TEST_CASE("no heads and no tokens are projected to nothing on the GPU")
{
    layer<float> const none{{.heads = 0}};
    CHECK(projected<float>(none.keys, none.key_basis, 4).count() == 0);
    CHECK(reconstructed<float>(projected<float>(none.keys, none.key_basis, 4), none.key_basis).count() == 0);
    layer<float> const empty{{.tokens = 0}};
    CHECK(projected<float>(empty.keys, empty.key_basis, 4).count() == 0);
}

TEST_CASE("project and reconstruct on the GPU need no scratch and refuse misaligned elements")
{
    layer<half> const x{{.tokens = 4, .dim = 8, .value_dim = 8}};
    device_tensor<half, 3> const odd{x.keys.relaid({.misalign = 1})};
    device_tensor<float, 3> const rows{x.key_basis};
    device_tensor<half, 3> to{{2, 4, 8}};
    workspace count;
    gpu::backend const on{nullptr, &count};
    CHECK(support::error_text<invalid_argument>([&] { project(on, odd.in(), rows.in(), to.out()); })
          == "project: vectors is not aligned to 2 bytes");
    CHECK(support::error_text<invalid_argument>([&] { reconstruct(on, odd.in(), rows.in(), to.out()); })
          == "reconstruct: coordinates is not aligned to 2 bytes");
    CHECK(count.bytes() == 0);
}
