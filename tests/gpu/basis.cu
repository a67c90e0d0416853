// Tolerances: sums of products in float over 512 samples at most, 3e-6 of what such a sum can be. The eigenvectors are the same
// code on both sides. Where one compiler makes both and fuses no product with a sum, the bits are the CPU's. nvcc fuses
// others than the host's compiler does: directions are then orthonormal and diagonalise to a few units of float's rounding
// times the dimension's root.
#include <mdkv/stages/basis.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/gpu/backend.cuh>

#include "gpu/support/device.hpp"
#include "support/compare.hpp"
#include "support/hard_matrices.hpp"
#include "support/host.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using mdkv::half; // CUDA has a type of that name in the global namespace
using support::device_tensor;
using support::placement;
using support::tensor;
using support::worst_error;
using host = cpu::backend;

/// Samples [H, S, D] of decaying spectrum.
template <class T>
tensor<T, 3> samples_of(index_t heads, index_t count, index_t dim, placement how = {}, double decay = 0.9)
{
    tensor<T, 3> x{{heads, count, dim}, how};
    support::source random{"gpu/basis samples", dim * 7919 + count};
    for (index_t h = 0; h < heads; ++h)
    {
        support::spectrum const shape{random, dim, decay, dim};
        for (index_t i = 0; i < count; ++i)
        {
            std::vector<double> const v = shape.draw(random);
            for (index_t d = 0; d < dim; ++d)
            {
                x.set(narrow<T>(static_cast<float>(v[static_cast<std::size_t>(d)])), h, i, d);
            }
        }
    }
    return x;
}

/// Adds the samples to a Gram matrix on the GPU, starting from `before`.
template <class T>
tensor<double, 3> gram_on_gpu(tensor<T, 3> const& x, tensor<double, 3> const& before)
{
    device_tensor<T, 3> const samples{x};
    device_tensor<double, 3> gram{before};
    support::run_on_device([&](gpu::backend const& on) { mdkv::detail::accumulate_gram(on, samples.in(), gram.out()); });
    return gram.host();
}

tensor<double, 3> zeros(index_t heads, index_t dim, placement how = {})
{
    tensor<double, 3> gram{{heads, dim, dim}, how};
    gram.assign(std::vector<double>(static_cast<std::size_t>(gram.count()), 0.0));
    return gram;
}

template <class T>
tensor<double, 3> gram_on_cpu(tensor<T, 3> const& x)
{
    tensor<double, 3> gram = zeros(x.extent(0), x.extent(2));
    support::run([&](host const& on) { mdkv::detail::accumulate_gram(on, x.in(), gram.out()); });
    return gram;
}

struct fitted
{
    tensor<float, 3> basis;
    tensor<float, 2> energy;
};

fitted eigen_on_gpu(tensor<double, 3> const& gram, placement how = {})
{
    index_t const dim = gram.extent(1);
    device_tensor<double, 3> from{gram};
    device_tensor<float, 3> basis{{gram.extent(0), dim, dim}, how};
    device_tensor<float, 2> energy{{gram.extent(0), dim}, {.slack = how.slack}};
    support::run_on_device(
        [&](gpu::backend const& on) { mdkv::detail::eigenbasis(on, from.out(), basis.out(), energy.out()); });
    return {basis.host(), energy.host()};
}

template <class T>
fitted fit_on_gpu(tensor<T, 3> const& x)
{
    index_t const dim = x.extent(2);
    device_tensor<T, 3> const from{x};
    device_tensor<float, 3> basis{{x.extent(0), dim, dim}};
    device_tensor<float, 2> energy{{x.extent(0), dim}};
    support::run_on_device([&](gpu::backend const& on) { fit_basis(on, from.in(), basis.out(), energy.out()); });
    return {basis.host(), energy.host()};
}

fitted eigen_on_cpu(tensor<double, 3> const& of)
{
    tensor<double, 3> gram = of.relaid({});
    index_t const dim      = gram.extent(1);
    fitted f{tensor<float, 3>{{gram.extent(0), dim, dim}}, tensor<float, 2>{{gram.extent(0), dim}}};
    support::run([&](host const& on) { mdkv::detail::eigenbasis(on, gram.out(), f.basis.out(), f.energy.out()); });
    return f;
}

double largest_of(tensor<double, 3> const& gram, index_t head)
{
    double most = 0;
    for (index_t i = 0; i < gram.extent(1); ++i) { most = std::max(most, std::fabs(gram.get(head, i, i))); }
    return most;
}

/// How far a head's rows are from orthonormal.
worst_error skewness(tensor<float, 3> const& basis, index_t head)
{
    index_t const dim = basis.extent(2);
    worst_error error;
    for (index_t i = 0; i < dim; ++i)
    {
        for (index_t j = 0; j <= i; ++j)
        {
            double sum = 0;
            for (index_t d = 0; d < dim; ++d)
            {
                sum += static_cast<double>(basis.get(head, i, d)) * static_cast<double>(basis.get(head, j, d));
            }
            error.add(sum, i == j ? 1 : 0, 1, i * 1000 + j);
        }
    }
    return error;
}

/// gram * row against energy * row, relative to the largest entry of gram.
worst_error residual(tensor<double, 3> const& gram, fitted const& f, index_t head)
{
    index_t const dim = gram.extent(1);
    worst_error error;
    for (index_t i = 0; i < dim; ++i)
    {
        for (index_t a = 0; a < dim; ++a)
        {
            double sum = 0;
            for (index_t b = 0; b < dim; ++b)
            {
                sum += gram.get(head, a, b) * static_cast<double>(f.basis.get(head, i, b));
            }
            error.add(sum, static_cast<double>(f.energy.get(head, i)) * static_cast<double>(f.basis.get(head, i, a)),
                std::max(largest_of(gram, head), 1e-300), i * 1000 + a);
        }
    }
    return error;
}

void check_eigen(tensor<double, 3> const& gram, fitted const& f)
{
    fitted const want = eigen_on_cpu(gram);
    for (index_t h = 0; h < gram.extent(0); ++h)
    {
        worst_error const skew = skewness(f.basis, h);
        CHECK_MESSAGE(skew.within(5e-6), skew);
        worst_error const rest = residual(gram, f, h);
        CHECK_MESSAGE(rest.within(5e-6), rest);
        worst_error energies;
        for (index_t i = 0; i < gram.extent(1); ++i)
        {
            energies.add(f.energy.get(h, i), want.energy.get(h, i), std::max(largest_of(gram, h), 1e-300), i);
        }
        CHECK_MESSAGE(energies.within(5e-6), energies);
    }
}

TEST_CASE_TEMPLATE("the Gram matrix on the GPU is that of the CPU, for every element type and dimension", T, float,
    mdkv::half, bfloat16)
{
    for (auto const& [dim, count] : {std::array<index_t, 2>{1, 3}, {7, 65}, {40, 1}, {64, 130}, {72, 50}, {128, 70}})
    {
        CAPTURE(dim);
        tensor<T, 3> const x         = samples_of<T>(2, count, dim);
        tensor<double, 3> const got  = gram_on_gpu(x, zeros(2, dim));
        tensor<double, 3> const want = gram_on_cpu(x);
        worst_error error;
        int asymmetric = 0;
        for (index_t h = 0; h < 2; ++h)
        {
            for (index_t i = 0; i < dim; ++i)
            {
                for (index_t j = 0; j < dim; ++j)
                {
                    error.add(static_cast<long double>(got.get(h, i, j)), static_cast<long double>(want.get(h, i, j)),
                        std::sqrt(want.get(h, i, i) * want.get(h, j, j)), i * 1000 + j);
                    asymmetric += got.get(h, i, j) == got.get(h, j, i) ? 0 : 1;
                }
            }
        }
        CHECK_MESSAGE(error.within(3e-6), error);
        CHECK(asymmetric == 0);
    }
}

TEST_CASE("the Gram matrix on the GPU is summed in parts and over chunks to that of the whole")
{
    for (index_t const count : {2047, 2048, 4100})
    {
        tensor<mdkv::half, 3> const x = samples_of<mdkv::half>(1, count, 24);
        tensor<double, 3> const want  = gram_on_cpu(x);
        tensor<double, 3> const once  = gram_on_gpu(x, zeros(1, 24));
        device_tensor<mdkv::half, 3> const samples{x};
        device_tensor<double, 3> gram{zeros(1, 24)};
        for (index_t first = 0; first < count; first += 1500)
        {
            auto const chunk = slice<1>(samples.in(), first, std::min<index_t>(1500, count - first));
            support::run_on_device([&](gpu::backend const& on) { mdkv::detail::accumulate_gram(on, chunk, gram.out()); });
        }
        tensor<double, 3> const parts = gram.host();
        worst_error error;
        for (index_t i = 0; i < 24; ++i)
        {
            for (index_t j = 0; j < 24; ++j)
            {
                double const size = std::sqrt(want.get(0, i, i) * want.get(0, j, j));
                error.add(once.get(0, i, j), want.get(0, i, j), size, i * 100 + j);
                error.add(parts.get(0, i, j), want.get(0, i, j), size, i * 100 + j);
            }
        }
        CHECK_MESSAGE(error.within(3e-6), error);
    }
}

TEST_CASE("no samples add nothing to a Gram matrix on the GPU")
{
    tensor<double, 3> before{{2, 5, 5}};
    before.assign(std::vector<double>(50, 3.5));
    CHECK(gram_on_gpu(tensor<float, 3>{{2, 0, 5}}, before).elements() == std::vector<double>(50, 3.5));
}

TEST_CASE_TEMPLATE("strides and slack change no bit of a Gram matrix on the GPU", T, float, mdkv::half, bfloat16)
{
    for (index_t const dim : {7, 40, 64})
    {
        tensor<T, 3> const x            = samples_of<T>(3, 45, dim);
        std::vector<double> const plain = gram_on_gpu(x, zeros(3, dim)).elements();
        for (placement const how : {placement{.swapped = true}, placement{.slack = 3}, placement{.slack = 8},
                 placement{.swapped = true, .slack = 5, .misalign = sizeof(T)}})
        {
            CHECK(
                support::same_bits(gram_on_gpu(x.relaid(how), zeros(3, dim, {.slack = how.slack})).elements(), plain));
        }
    }
}

TEST_CASE("the eigenbasis on the GPU is the CPU's, at every head dimension")
{
    for (index_t const dim : {1, 2, 7, 40, 64, 80, 128, 200})
    {
        CAPTURE(dim);
        tensor<double, 3> const gram = gram_on_cpu(samples_of<float>(dim < 64 ? 2 : 1, 3 * dim, dim, {}, 0.95));
        check_eigen(gram, eigen_on_gpu(gram));
        check_eigen(gram, eigen_on_gpu(gram, {.swapped = true, .slack = 3}));
    }
}

TEST_CASE("fewer samples than dimensions, and none, are completed to the CPU's basis on the GPU")
{
    for (index_t const count : {0, 1, 10, 39})
    {
        CAPTURE(count);
        tensor<double, 3> const gram = gram_on_cpu(samples_of<float>(2, count, 40));
        check_eigen(gram, eigen_on_gpu(gram));
    }
}

TEST_CASE("equal energies, and matrices of any magnitude, have the CPU's basis on the GPU")
{
    tensor<double, 3> const gram = support::hard_matrices(16);
    fitted const f               = eigen_on_gpu(gram);
    check_eigen(gram, f);
}

TEST_CASE("a Gram matrix that is not finite spoils its own head's energies on the GPU and nothing else")
{
    for (double const bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()})
    {
        tensor<double, 3> gram = gram_on_cpu(samples_of<float>(3, 20, 8));
        fitted const good      = eigen_on_gpu(gram);
        gram.set(bad, 1, 2, 3);
        fitted const f = eigen_on_gpu(gram);
        for (index_t i = 0; i < 8; ++i)
        {
            CHECK(std::isnan(f.energy.get(1, i)));
            for (index_t d = 0; d < 8; ++d)
            {
                CHECK(f.basis.get(1, i, d) == (i == d ? 1.0F : 0.0F));
                CHECK(f.basis.get(2, i, d) == good.basis.get(2, i, d));
            }
            CHECK(f.energy.get(0, i) == good.energy.get(0, i));
        }
    }
}

TEST_CASE("fit_basis on the GPU has the eigenvectors of the Gram matrix, bit for bit")
{
    tensor<bfloat16, 3> const x  = samples_of<bfloat16>(2, 70, 40);
    fitted const whole           = fit_on_gpu(x);
    tensor<double, 3> const gram = gram_on_gpu(x, zeros(2, 40));
    fitted const parts           = eigen_on_gpu(gram, {.swapped = true, .slack = 3});
    CHECK(support::same_bits(whole.basis.elements(), parts.basis.elements()));
    CHECK(support::same_bits(whole.energy.elements(), parts.energy.elements()));
    check_eigen(gram, whole);
}

TEST_CASE("a model without heads has no basis on the GPU and no complaints")
{
    CHECK(fit_on_gpu(tensor<float, 3>{{0, 10, 16}}).basis.count() == 0);
    CHECK(fit_on_gpu(tensor<mdkv::half, 3>{{0, 0, 0}}).basis.count() == 0);
}

TEST_CASE("the scratch of fit_basis on the GPU does not grow with the number of samples")
{
    auto const bytes = [](index_t samples) {
        auto const place = [](std::uintptr_t i) { return reinterpret_cast<float*>(i << 40U); };
        return support::scratch_of_recording([&](gpu::backend const& on) {
            fit_basis(on, in(on, reinterpret_cast<mdkv::half*>(place(1)), 2, samples, 64), out(on, place(2), 2, 64, 64),
                out(on, place(3), 2, 64));
        });
    };
    CHECK(bytes(100000) == bytes(10000000));
}

} // namespace
