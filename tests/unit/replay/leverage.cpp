#include <mdkv/replay/leverage.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/executor.hpp>

#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/layer.hpp"
#include "support/random.hpp"
#include "support/real.hpp"

#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <vector>

namespace
{

using namespace mdkv;
using support::tensor;
using host = cpu::backend;

/// Sums that were zero before.
template <class T>
std::vector<float> leverages(tensor<T, 3> const& keys, cpu::executor_ref threads = {})
{
    tensor<leverage_sum, 1> sums{{keys.extent(1)}};
    sums.assign(std::vector<leverage_sum>(static_cast<std::size_t>(keys.extent(1))));
    support::run([&](host const& on) { add_leverage(on, keys.in(), sums.out()); }, threads);
    std::vector<float> numbers;
    for (leverage_sum const sum : sums.elements()) { numbers.push_back(leverage_of(sum)); }
    return numbers;
}

/// Keys of decaying spectrum, as a layer's are.
template <class T = float>
tensor<T, 3> layer_keys(index_t heads, index_t tokens, index_t dim, std::int64_t salt = 0)
{
    return support::layer<T>{{.heads        = heads,
                                 .group     = 1,
                                 .queries   = 1,
                                 .tokens    = tokens,
                                 .window    = 1,
                                 .dim       = dim,
                                 .value_dim = 1,
                                 .salt      = salt}}
        .keys;
}

/// k'(K'K + lambda I)^-1 k by Cholesky's decomposition.
template <class T>
std::vector<double> expected(tensor<T, 3> const& keys)
{
    using support::real;
    auto const dim = static_cast<std::size_t>(keys.extent(2));
    std::vector<double> sums(static_cast<std::size_t>(keys.extent(1)), 0.0);
    for (index_t h = 0; h < keys.extent(0); ++h)
    {
        auto const row = [&](index_t i) {
            std::vector<real> k;
            for (index_t d = 0; d < keys.extent(2); ++d) { k.push_back(real{widen(keys.get(h, i, d))}); }
            return k;
        };
        std::vector<std::vector<real>> a(dim, std::vector<real>(dim, 0));
        real energy = 0;
        for (index_t i = 0; i < keys.extent(1); ++i)
        {
            auto const k = row(i);
            for (std::size_t x = 0; x < dim; ++x)
            {
                energy += k[x] * k[x];
                for (std::size_t y = 0; y <= x; ++y) { a[x][y] += k[x] * k[y]; }
            }
        }
        if (energy == 0) { continue; }
        for (std::size_t x = 0; x < dim; ++x) { a[x][x] += static_cast<real>(1e-3L) * energy / static_cast<real>(dim); }
        for (std::size_t x = 0; x < dim; ++x)
        {
            for (std::size_t y = 0; y <= x; ++y)
            {
                for (std::size_t z = 0; z < y; ++z) { a[x][y] -= a[x][z] * a[y][z]; }
                a[x][y] = x == y ? std::sqrt(a[x][x]) : a[x][y] / a[y][y];
            }
        }
        for (index_t i = 0; i < keys.extent(1); ++i)
        {
            auto k = row(i);
            for (std::size_t x = 0; x < dim; ++x)
            {
                for (std::size_t y = 0; y < x; ++y) { k[x] -= a[x][y] * k[y]; }
                k[x] /= a[x][x];
                sums[static_cast<std::size_t>(i)] += static_cast<double>(k[x] * k[x]);
            }
        }
    }
    return sums;
}

support::worst_error error_of(std::vector<float> const& got, std::vector<double> const& want)
{
    support::worst_error worst;
    for (std::size_t i = 0; i < got.size(); ++i) { worst.add(got[i], want[i], want[i], static_cast<std::int64_t>(i)); }
    return worst;
}

} // namespace

TEST_CASE_TEMPLATE("leverages are those of the regularised Gram matrix, summed over heads", T, float, half, bfloat16)
{
    for (auto const& [heads, tokens, dim] : std::vector<std::array<index_t, 3>>{
             {1, 1, 1}, {2, 5, 7}, {1, 16, 64}, {3, 700, 64}, {2, 2500, 128}, {1, 333, 80}, {1, 40, 576}})
    {
        CAPTURE(heads);
        CAPTURE(tokens);
        CAPTURE(dim);
        auto const keys  = layer_keys<T>(heads, tokens, dim);
        auto const worst = error_of(leverages(keys), expected(keys));
        CHECK_MESSAGE(worst.within(0x1p-13), worst);
    }
}

TEST_CASE("the leverage of keys along axes is each one's share of its axis, added to what is there")
{
    // Token t of head h is `length` times axis a: many of all axes but the last, which one token has for itself.
    constexpr index_t dim = 8;
    tensor<float, 3> keys{{2, 600, dim}};
    keys.assign(std::vector<float>(2 * 600 * dim, 0.0F));
    std::vector<double> energies(2 * dim, 0.0);
    auto const axis   = [](index_t h, index_t t) { return t == 300 + h ? dim - 1 : (t + h) % (dim - 1); };
    auto const length = [](index_t h, index_t a) { return a == dim - 1 ? 2.0 : 1.0 + static_cast<double>(a + h); };
    for (index_t h = 0; h < 2; ++h)
    {
        for (index_t t = 0; t < 600; ++t)
        {
            auto const a = axis(h, t);
            keys.set(static_cast<float>(length(h, a)), h, t, a);
            energies[static_cast<std::size_t>(h * dim + a)] += length(h, a) * length(h, a);
        }
    }
    tensor<leverage_sum, 1> sums{{600}};
    sums.assign(std::vector<leverage_sum>(600, leverage_sum_of(5.0)));
    support::run([&](host const& on) { add_leverage(on, keys.in(), sums.out()); });
    for (index_t t = 0; t < 600; ++t)
    {
        double want = 5.0;
        for (index_t h = 0; h < 2; ++h)
        {
            auto const first    = energies.begin() + h * dim;
            double const lambda = 1e-3 * std::accumulate(first, first + dim, 0.0) / double{dim};
            double const square = length(h, axis(h, t)) * length(h, axis(h, t));
            want += square / (energies[static_cast<std::size_t>(h * dim + axis(h, t))] + lambda);
        }
        CAPTURE(t);
        CHECK(double{leverage_of(sums.get(t))} == doctest::Approx(want).epsilon(1e-6));
    }
    CHECK(sums.get(300) > leverage_sum_of(5.5)); // its own axis in one of the heads
    CHECK(sums.get(299) < leverage_sum_of(5.1));
}

TEST_CASE("leverages are between 0 and 1, and of a head no more than its directions together")
{
    for (index_t const tokens : {1, 20, 300})
    {
        auto const found = leverages(layer_keys(1, tokens, 64));
        double total     = 0;
        for (float const x : found)
        {
            CHECK(x > 0.0F);
            CHECK(x < 1.0F);
            total += double{x};
        }
        CHECK(total < 64.0);
    }
}

TEST_CASE("keys that are all alike share one direction, and a power of two in all keys changes no bit")
{
    for (index_t const dim : {1, 64, 128})
    {
        CAPTURE(dim);
        auto const one = layer_keys(1, 1, dim).elements();
        tensor<float, 3> alike{{1, 1000, dim}};
        std::vector<float> all;
        for (int i = 0; i < 1000; ++i) { all.insert(all.end(), one.begin(), one.end()); }
        alike.assign(all);
        double const want = 1.0 / (1000.0 * (1.0 + 1e-3 / static_cast<double>(dim)));
        for (float const x : leverages(alike)) { CHECK(double{x} == doctest::Approx(want).epsilon(1e-3)); }
    }
    auto const keys = layer_keys(2, 300, 32);
    auto scaled     = keys.elements();
    for (float& x : scaled) { x *= 0x1p-13F; }
    tensor<float, 3> small{{2, 300, 32}};
    small.assign(scaled);
    CHECK(support::same_bits(leverages(small), leverages(keys)));
}

TEST_CASE("heads of zeros add nothing, beside others or alone")
{
    auto const keys = layer_keys(1, 50, 16);
    tensor<float, 3> with_zeros{{3, 50, 16}};
    std::vector<float> all(800, 0.0F);
    auto const between = keys.elements();
    all.insert(all.end(), between.begin(), between.end());
    all.resize(2400, 0.0F);
    with_zeros.assign(all);
    CHECK(support::same_bits(leverages(with_zeros), leverages(keys)));
    tensor<float, 3> zeros{{2, 50, 16}};
    zeros.assign(std::vector<float>(1600, 0.0F));
    CHECK(leverages(zeros) == std::vector<float>(50, 0.0F));
}

TEST_CASE("a key that is not finite, or whose square is beyond float, makes every sum NaN")
{
    for (float const bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 1e30F})
    {
        for (index_t const dim : {1, 24})
        {
            CAPTURE(bad);
            CAPTURE(dim);
            auto keys = layer_keys(2, 40, dim);
            keys.set(bad, 1, 7, dim / 2);
            for (float const x : leverages(keys)) { CHECK(std::isnan(x)); }
        }
    }
}

TEST_CASE("add_leverage has nothing to do without heads or tokens")
{
    CHECK(leverages(tensor<float, 3>{{2, 0, 8}}).empty());
    CHECK(leverages(tensor<float, 3>{{0, 3, 8}}) == std::vector<float>(3, 0.0F));
    CHECK(leverages(tensor<float, 3>{{0, 3, 0}}) == std::vector<float>(3, 0.0F));
}

TEST_CASE("a leverage is rounded to a unit, and comes back as a float")
{
    CHECK(leverage_sum_of(0) == 0);
    CHECK(leverage_sum_of(1) == leverage_sum{1} << 36);
    CHECK(leverage_sum_of(0.4 / leverage_units) == 0);
    CHECK(leverage_sum_of(1.5 / leverage_units) == 2);
    CHECK(leverage_of(leverage_sum_of(0.375)) == 0.375F);
    CHECK(leverage_of(leverage_sum_of(0.375) + leverage_sum_of(1)) == 1.375F);
}

TEST_CASE("a leverage that is not finite makes each sum NaN, after sums on 2,047 ranks, too")
{
    constexpr double infinity = std::numeric_limits<double>::infinity();
    for (double const bad : {infinity, -infinity, std::numeric_limits<double>::quiet_NaN(), -1.0, 0x1p15})
    {
        CHECK(leverage_sum_of(bad) == non_finite_leverage);
    }
    auto keys = layer_keys(3000, 2, 1);
    keys.set(std::numeric_limits<float>::quiet_NaN(), 0, 0, 0);
    keys.set(std::numeric_limits<float>::quiet_NaN(), 2999, 0, 0);
    for (float const x : leverages(keys)) { CHECK(std::isnan(x)); }
    CHECK(std::isnan(leverage_of(non_finite_leverage)));
    CHECK(std::isnan(leverage_of(2047 * non_finite_leverage)));
    CHECK(std::isnan(leverage_of(-1)));
    leverage_sum most = 0; // of heads in all
    for (int i = 0; i < 65535; ++i) { most += leverage_sum_of(1); }
    CHECK(leverage_of(most) == 65535.0F);
}
