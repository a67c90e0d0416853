// Tolerances: the eigenvectors are found in float, so directions are orthonormal to a few units of float's rounding times
// the dimension's root, and what is left off the diagonal of U X'X U' is judged against the largest energy.
#include <mdkv/stages/basis.hpp>

#include <mdkv/cpu/backend.hpp>

#include "support/compare.hpp"
#include "support/hard_matrices.hpp"
#include "support/host.hpp"
#include "support/layer.hpp"
#include "support/oracle.hpp"
#include "support/random.hpp"
#include "support/real.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

namespace
{

using namespace mdkv;
using support::error_text;
using support::placement;
using support::tensor;
using support::worst_error;
using host       = cpu::backend;
namespace oracle = support::oracle;

/// Samples [H, S, D] of decaying spectrum.
template <class T>
tensor<T, 3> samples_of(index_t heads, index_t count, index_t dim, placement how = {}, double decay = 0.9)
{
    tensor<T, 3> x{{heads, count, dim}, how};
    support::source random{"basis samples", dim * 7919 + count};
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

struct fitted
{
    tensor<float, 3> basis;
    tensor<float, 2> energy;
};

template <class T>
fitted fit(tensor<T, 3> const& x, cpu::executor_ref threads = {})
{
    fitted f{tensor<float, 3>{{x.extent(0), x.extent(2), x.extent(2)}}, tensor<float, 2>{{x.extent(0), x.extent(2)}}};
    support::run([&](host const& on) { fit_basis(on, x.in(), f.basis.out(), f.energy.out()); }, threads);
    return f;
}

template <class T>
tensor<double, 3> gram_of(tensor<T, 3> const& x, cpu::executor_ref threads = {})
{
    tensor<double, 3> gram{{x.extent(0), x.extent(2), x.extent(2)}};
    gram.assign(std::vector<double>(static_cast<std::size_t>(gram.count()), 0.0));
    support::run([&](host const& on) { detail::accumulate_gram(on, x.in(), gram.out()); }, threads);
    return gram;
}

fitted eigen(tensor<double, 3> const& of)
{
    tensor<double, 3> gram = of.relaid({});
    index_t const dim      = gram.extent(1);
    fitted f{tensor<float, 3>{{gram.extent(0), dim, dim}}, tensor<float, 2>{{gram.extent(0), dim}}};
    support::run([&](host const& on) { detail::eigenbasis(on, gram.out(), f.basis.out(), f.energy.out()); });
    return f;
}

/// How far the rows of a head's basis are from orthonormal.
worst_error skewness(tensor<float, 3> const& basis, index_t head)
{
    oracle::matrix const u = support::rows_of(basis, head);
    worst_error error;
    for (index_t i = 0; i < u.rows; ++i)
    {
        for (index_t j = 0; j <= i; ++j) { error.add(oracle::dot(u, i, u, j), i == j ? 1 : 0, 1, i * 1000 + j); }
    }
    return error;
}

/// |X u|^2 of every direction against its energy, and the mixed terms against 0, relative to the largest.
template <class T>
worst_error off_diagonal(tensor<T, 3> const& x, fitted const& f, index_t head)
{
    oracle::matrix const samples = support::rows_of(x, head);
    oracle::matrix const u       = support::rows_of(f.basis, head);
    oracle::matrix projected{samples.rows, u.rows};
    for (index_t i = 0; i < samples.rows; ++i)
    {
        for (index_t c = 0; c < u.rows; ++c) { projected(i, c) = oracle::dot(samples, i, u, c); }
    }
    oracle::matrix const g      = oracle::gram(projected);
    support::real const largest = std::max(g(0, 0), std::numeric_limits<support::real>::min());
    worst_error error;
    for (index_t i = 0; i < g.rows; ++i)
    {
        for (index_t j = 0; j < g.cols; ++j)
        {
            error.add(g(i, j), i == j ? static_cast<support::real>(f.energy.get(head, i)) : 0, largest, i * 1000 + j);
        }
    }
    return error;
}

int rises(tensor<float, 2> const& energy)
{
    int count = 0;
    for (index_t h = 0; h < energy.extent(0); ++h)
    {
        for (index_t i = 0; i < energy.extent(1); ++i)
        {
            bool const falls = i == 0 || energy.get(h, i) <= energy.get(h, i - 1);
            count += falls && energy.get(h, i) >= 0.0F ? 0 : 1;
        }
    }
    return count;
}

} // namespace

TEST_CASE_TEMPLATE("the Gram matrix is the sum of the samples' outer products, for every element type and dimension", T,
    float, half, bfloat16)
{
    for (index_t const dim : {1, 7, 32, 40, 56, 64, 80, 96, 128, 192, 256})
    {
        CAPTURE(dim);
        tensor<T, 3> const x        = samples_of<T>(2, 50, dim);
        tensor<double, 3> const got = gram_of(x);
        worst_error error;
        int asymmetric = 0;
        for (index_t h = 0; h < 2; ++h)
        {
            oracle::matrix const want = oracle::gram(support::rows_of(x, h));
            for (index_t i = 0; i < dim; ++i)
            {
                for (index_t j = 0; j < dim; ++j)
                {
                    error.add(static_cast<support::real>(got.get(h, i, j)), want(i, j),
                        std::sqrt(want(i, i) * want(j, j)), i * 1000 + j);
                    asymmetric += got.get(h, i, j) == got.get(h, j, i) ? 0 : 1;
                }
            }
        }
        CAPTURE(error);
        CHECK(error.within(3e-6));
        CHECK(asymmetric == 0);
    }
}

TEST_CASE("the Gram matrices of chunks add up to that of the whole, also for long prompts")
{
    for (index_t const count : {1, 255, 256, 257, 1000, 5000})
    {
        CAPTURE(count);
        tensor<float, 3> const x      = samples_of<float>(2, count, 24);
        tensor<double, 3> const whole = gram_of(x);
        tensor<double, 3> parts{{2, 24, 24}};
        parts.assign(std::vector<double>(2 * 24 * 24, 0.0));
        for (index_t first = 0; first < count; first += 300)
        {
            auto const chunk = slice<1>(x.in(), first, std::min<index_t>(300, count - first));
            support::run([&](host const& on) { detail::accumulate_gram(on, chunk, parts.out()); });
        }
        worst_error error;
        for (index_t h = 0; h < 2; ++h)
        {
            oracle::matrix const want = oracle::gram(support::rows_of(x, h));
            for (index_t i = 0; i < 24; ++i)
            {
                for (index_t j = 0; j < 24; ++j)
                {
                    support::real const size = std::sqrt(want(i, i) * want(j, j));
                    error.add(static_cast<support::real>(whole.get(h, i, j)), want(i, j), size);
                    error.add(static_cast<support::real>(parts.get(h, i, j)), want(i, j), size);
                }
            }
        }
        CAPTURE(error);
        CHECK(error.within(3e-6));
    }
}

TEST_CASE("no samples add nothing to a Gram matrix")
{
    tensor<float, 3> const none{{2, 0, 5}};
    tensor<double, 3> gram{{2, 5, 5}};
    gram.assign(std::vector<double>(50, 3.5));
    support::run([&](host const& on) { detail::accumulate_gram(on, none.in(), gram.out()); });
    CHECK(gram.elements() == std::vector<double>(50, 3.5));
}

TEST_CASE("directions and energies are those of Jacobi's method, strongest first")
{
    for (index_t const dim : {1, 7, 32, 40, 64})
    {
        CAPTURE(dim);
        tensor<float, 3> const x = samples_of<float>(2, 300, dim, {}, 0.8);
        fitted const f           = fit(x);
        CHECK(rises(f.energy) == 0);
        for (index_t h = 0; h < 2; ++h)
        {
            auto const want = oracle::eigenvectors(oracle::gram(support::rows_of(x, h)));
            worst_error energies;
            worst_error directions;
            for (index_t i = 0; i < dim; ++i)
            {
                energies.add(static_cast<support::real>(f.energy.get(h, i)), want.values[static_cast<std::size_t>(i)],
                    want.values[0], i);
                // The eight strongest are far apart, so their directions are determined up to the sign.
                if (i >= 8) { continue; }
                support::real along = 0;
                for (index_t d = 0; d < dim; ++d)
                {
                    along += static_cast<support::real>(f.basis.get(h, i, d)) * want.vectors(i, d);
                }
                directions.add(std::fabs(along), 1, 1, i);
            }
            CAPTURE(energies);
            CHECK(energies.within(1e-5));
            CAPTURE(directions);
            CHECK(directions.within(1e-5));
        }
    }
}

TEST_CASE("the basis is orthonormal and diagonalises the Gram matrix at every head dimension")
{
    for (index_t const dim : {1, 7, 32, 40, 56, 64, 80, 96, 128, 192, 256, 576})
    {
        CAPTURE(dim);
        tensor<half, 3> const x = samples_of<half>(1, 100, dim, {}, 0.95);
        fitted const f          = fit(x);
        worst_error const skew  = skewness(f.basis, 0);
        CAPTURE(skew);
        CHECK(skew.within(2e-5));
        worst_error const off = off_diagonal(x, f, 0);
        CAPTURE(off);
        CHECK(off.within(1e-5));
        CHECK(rises(f.energy) == 0);
    }
}

TEST_CASE("fewer samples than dimensions are completed to a whole basis, none included")
{
    for (index_t const count : {0, 1, 2, 10, 39})
    {
        CAPTURE(count);
        tensor<float, 3> const x = samples_of<float>(2, count, 40);
        fitted const f           = fit(x);
        for (index_t h = 0; h < 2; ++h)
        {
            CHECK(skewness(f.basis, h).within(2e-5));
            if (count > 0) { CHECK(off_diagonal(x, f, h).within(1e-5)); }
            for (index_t i = count; i < 40; ++i)
            {
                CHECK(f.energy.get(h, i) <= 1e-5F * std::max(f.energy.get(h, 0), 1e-30F));
            }
        }
    }
}

TEST_CASE("zero samples and equal samples have a whole basis too")
{
    tensor<float, 3> x{{2, 30, 16}};
    for (index_t i = 0; i < 30; ++i)
    {
        for (index_t d = 0; d < 16; ++d)
        {
            x.set(0.0F, 0, i, d);
            x.set(static_cast<float>(d) - 3.0F, 1, i, d);
        }
    }
    fitted const f = fit(x);
    CHECK(skewness(f.basis, 0).within(2e-5));
    CHECK(skewness(f.basis, 1).within(2e-5));
    CHECK(f.energy.get(0, 0) == 0.0F);
    // The one direction there is holds everything: 30 * sum (d - 3)^2.
    CHECK(static_cast<double>(f.energy.get(1, 0)) == doctest::Approx(30.0 * 664.0).epsilon(1e-5));
    CHECK(static_cast<double>(f.energy.get(1, 1)) <= 30.0 * 664.0 * 1e-5);
}

TEST_CASE("the energies add up to the samples' sum of squares")
{
    tensor<bfloat16, 3> const x = samples_of<bfloat16>(3, 200, 80);
    fitted const f              = fit(x);
    for (index_t h = 0; h < 3; ++h)
    {
        double squares = 0;
        double sum     = 0;
        for (index_t i = 0; i < 200; ++i)
        {
            for (index_t d = 0; d < 80; ++d)
            {
                auto const v = static_cast<double>(widen(x.get(h, i, d)));
                squares += v * v;
            }
        }
        for (index_t i = 0; i < 80; ++i) { sum += static_cast<double>(f.energy.get(h, i)); }
        CHECK(sum == doctest::Approx(squares).epsilon(1e-5));
    }
}

TEST_CASE("scaling the samples by a power of two changes no direction and scales the energies, over float's range")
{
    tensor<float, 3> const x = samples_of<float>(1, 60, 32);
    fitted const f           = fit(x);
    for (int const power : {-50, -30, 30, 55})
    {
        CAPTURE(power);
        tensor<float, 3> y{{1, 60, 32}};
        for (index_t i = 0; i < 60; ++i)
        {
            for (index_t d = 0; d < 32; ++d) { y.set(std::ldexp(x.get(0, i, d), power), 0, i, d); }
        }
        fitted const g = fit(y);
        CHECK(skewness(g.basis, 0).within(2e-5));
        worst_error error;
        for (index_t i = 0; i < 32; ++i)
        {
            error.add(static_cast<support::real>(g.energy.get(0, i)),
                std::ldexp(static_cast<support::real>(f.energy.get(0, i)), 2 * power),
                std::ldexp(static_cast<support::real>(f.energy.get(0, 0)), 2 * power), i);
        }
        CAPTURE(error);
        CHECK(error.within(1e-5));
    }
}

TEST_CASE_TEMPLATE(
    "strides, slack, odd addresses and forbidden neighbours change no bit of a basis", T, float, half, bfloat16)
{
    for (index_t const dim : {7, 40, 64})
    {
        tensor<T, 3> const x           = samples_of<T>(3, 45, dim);
        std::vector<float> const plain = fit(x).basis.elements();
        for (placement const how : {placement{.swapped = true}, placement{.slack = 3}, placement{.misalign = 1},
                 placement{.swapped = true, .slack = 5, .misalign = 3}, placement{.fence = support::guard::after},
                 placement{.fence = support::guard::before}})
        {
            CHECK(support::same_bits(fit(x.relaid(how)).basis.elements(), plain));
        }
    }
}

TEST_CASE("equal, zero, huge, tiny and far eigenvalues have a whole basis that diagonalises")
{
    for (index_t const dim : {1, 2, 7, 16, 40})
    {
        CAPTURE(dim);
        tensor<double, 3> const gram = support::hard_matrices(dim);
        index_t const heads          = gram.extent(0);
        fitted const f               = eigen(gram);
        CHECK(rises(f.energy) == 0);
        for (index_t h = 0; h < heads; ++h)
        {
            CAPTURE(h);
            CHECK(skewness(f.basis, h).within(2e-6));
            auto const largest = std::max(static_cast<support::real>(f.energy.get(h, 0)), support::real{1e-300});
            worst_error rest;
            for (index_t i = 0; i < dim; ++i)
            {
                for (index_t a = 0; a < dim; ++a)
                {
                    support::real sum = 0;
                    for (index_t b = 0; b < dim; ++b)
                    {
                        sum += static_cast<support::real>(gram.get(h, a, b))
                               * static_cast<support::real>(f.basis.get(h, i, b));
                    }
                    auto const energy = static_cast<support::real>(f.energy.get(h, i));
                    rest.add(sum, energy * static_cast<support::real>(f.basis.get(h, i, a)), largest, i * 1000 + a);
                }
            }
            CAPTURE(rest);
            CHECK(rest.within(2e-6));
        }
        CHECK(f.energy.get(0, dim - 1) == 2.0F);
        CHECK(static_cast<double>(f.energy.get(2, 0)) == doctest::Approx(1.0 + static_cast<double>(dim)).epsilon(1e-6));
    }
}

TEST_CASE("samples that are not finite, or whose squares are not, are refused, naming the head, and nothing is written")
{
    for (float const bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 1e30F})
    {
        tensor<float, 3> x = samples_of<float>(2, 20, 8);
        x.set(bad, 1, 3, 2);
        fitted f{tensor<float, 3>{{2, 8, 8}}, tensor<float, 2>{{2, 8}}};
        std::vector<std::byte> const before = f.basis.memory();
        std::string const text              = error_text<invalid_argument>(
            [&] { support::run([&](host const& on) { fit_basis(on, x.in(), f.basis.out(), f.energy.out()); }); });
        CHECK(text == "fit_basis: samples of head 1 are not finite, or their squares are not");
        CHECK(f.basis.memory() == before);
    }
}

TEST_CASE("the scratch of fit_basis does not grow with the number of samples")
{
    auto const bytes = [](index_t count) {
        tensor<half, 3> samples{{2, count, 64}};
        samples.assign(std::vector<half>(static_cast<std::size_t>(samples.count()), narrow<half>(1.0F)));
        tensor<float, 3> basis{{2, 64, 64}};
        tensor<float, 2> energy{{2, 64}};
        return support::run([&](host const& on) { fit_basis(on, samples.in(), basis.out(), energy.out()); });
    };
    CHECK(bytes(3000) == bytes(30000));
}
