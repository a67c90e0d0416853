#include <mdkv/detail/hadamard.hpp>

#include <mdkv/cpu/detail/hadamard_row.hpp>
#include <mdkv/cpu/team.hpp>

#include "support/compare.hpp"
#include "support/random.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

namespace
{

using namespace mdkv;
using support::index_t;

/// Entry of Sylvester's Hadamard matrix: H(2n) is H(n) three times and -H(n) once.
int hadamard(index_t n, index_t i, index_t j)
{
    if (n == 1) { return 1; }
    index_t const half = n / 2;
    return (i >= half && j >= half ? -1 : 1) * hadamard(half, i % half, j % half);
}

std::vector<float> random_row(support::source& random, index_t n)
{
    std::vector<float> x(static_cast<std::size_t>(n));
    for (float& one : x) { one = static_cast<float>(random.normal() * std::exp2(random.uniform(-8.0, 8.0))); }
    return x;
}

void rotate(float* x, index_t n)
{
    detail::hadamard<1>(cpu::team{nullptr}, x, static_cast<int>(n));
}

double norm(std::vector<float> const& x)
{
    double sum = 0;
    for (float const one : x) { sum += double{one} * double{one}; }
    return std::sqrt(sum);
}

} // namespace

TEST_CASE("the rotation is the product with Hadamard's matrix over the root of its order, and its own inverse")
{
    support::source random{"turn"};
    for (index_t n = 1; n <= 64; n *= 2)
    {
        CAPTURE(n);
        CHECK(detail::hadamard_block(n) == n);
        CHECK(detail::hadamard_factor(n) == static_cast<float>(1 / std::sqrt(static_cast<double>(n))));
        support::worst_error product;
        support::worst_error back;
        for (int i = 0; i < 50; ++i)
        {
            std::vector<float> const x = random_row(random, n);
            std::vector<float> y       = x;
            rotate(y.data(), n);
            for (index_t row = 0; row < n; ++row)
            {
                double want = 0;
                for (index_t c = 0; c < n; ++c)
                {
                    want += hadamard(n, row, c) * double{x[static_cast<std::size_t>(c)]};
                }
                want /= std::sqrt(static_cast<double>(n));
                product.add(double{y[static_cast<std::size_t>(row)]}, want, norm(x), row);
            }
            rotate(y.data(), n);
            for (std::size_t c = 0; c < x.size(); ++c) { back.add(y[c], x[c], norm(x), static_cast<index_t>(c)); }
        }
        INFO(product);
        CHECK(product.within(5e-7));
        INFO(back);
        CHECK(back.within(5e-7));
    }
}

TEST_CASE("a group of any size is rotated in blocks of falling powers of two, each to the bit as it is alone")
{
    support::source random{"blocks"};
    for (index_t n = 0; n <= 64; ++n)
    {
        CAPTURE(n);
        std::vector<float> const x = random_row(random, n);
        std::vector<float> want    = x;
        index_t first              = 0;
        for (index_t block = 64; block > 0; block /= 2) // the binary digits of n
        {
            if ((n & block) == 0) { continue; }
            CHECK(detail::hadamard_block(n - first) == block);
            rotate(want.data() + first, block);
            first += block;
        }
        std::vector<float> y = x;
        rotate(y.data(), n);
        CHECK(support::same_bits(y, want));
        rotate(y.data(), n);
        for (std::size_t c = 0; c < x.size(); ++c) { CHECK(std::fabs(y[c] - x[c]) <= 1e-6 * norm(x)); }
    }
    std::vector<float> y = {1, 2, 3};
    rotate(y.data(), -4);
    CHECK(y == std::vector<float>{1, 2, 3});
}

TEST_CASE("vectors and tiles of them are rotated group by group, to the bit as each group alone")
{
    support::source random{"rotated rows"};
    for (index_t const n : {1, 2, 5, 16, 20, 31, 32, 33, 40, 48, 56, 63, 64, 65, 80, 96, 128})
    {
        CAPTURE(n);
        float columns[128][16];
        std::vector<std::vector<float>> want;
        std::vector<std::vector<float>> rows;
        for (std::size_t t = 0; t < 16; ++t)
        {
            std::vector<float> x = random_row(random, n);
            if (t == 3) { x.back() = std::numeric_limits<float>::infinity(); }
            for (std::size_t c = 0; c < x.size(); ++c) { columns[c][t] = x[c]; }
            rows.push_back(x);
            for (index_t first = 0; first < n; first += 64)
            {
                rotate(x.data() + first, std::min<index_t>(64, n - first));
            }
            want.push_back(x);
        }
        for (index_t first = 0; first < n; first += 64)
        {
            detail::hadamard<16>(
                cpu::team{nullptr}, &columns[first][0], static_cast<int>(std::min<index_t>(64, n - first)));
        }
        for (std::size_t t = 0; t < 16; ++t)
        {
            cpu::detail::hadamard_row(rows[t].data(), n);
            CHECK(support::same_bits(rows[t], want[t]));
            std::vector<float> column;
            for (std::size_t c = 0; c < want[t].size(); ++c) { column.push_back(columns[c][t]); }
            CHECK(support::same_bits(column, want[t]));
        }
    }
}
