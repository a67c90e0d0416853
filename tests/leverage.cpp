#include <mdkv/leverage.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/basis.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/layer.hpp"
#include "support/random.hpp"

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
using support::tensor;
using host = cpu::backend;

/// Sums that were zero before.
template <class T>
std::vector<float> leverages(tensor<T, 3> const& keys, cpu::executor_ref threads = {})
{
    tensor<float, 1> sums{{keys.extent(1)}};
    sums.assign(std::vector<float>(static_cast<std::size_t>(keys.extent(1)), 0.0F));
    support::run([&](host const& on) { add_leverage(on, keys.in(), sums.out()); }, threads);
    return sums.elements();
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

/// k'(K'K + lambda I)^-1 k by Cholesky's decomposition, in long double.
template <class T>
std::vector<double> expected(tensor<T, 3> const& keys)
{
    using real     = long double;
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
        for (std::size_t x = 0; x < dim; ++x) { a[x][x] += 1e-3L * energy / static_cast<real>(dim); }
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
        CHECK_MESSAGE(worst.within(0x1p-10), worst);
    }
}
