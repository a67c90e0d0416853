#include <mdkv/cpu/tile.hpp>

#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/layer.hpp"
#include "support/random.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <vector>

namespace
{

using namespace mdkv;
namespace tile = cpu::tile;
namespace simd = cpu::simd;
using support::layer;
using support::tensor;

std::vector<float> random_floats(support::source& random, index_t count)
{
    std::vector<float> v;
    for (index_t i = 0; i < count; ++i) { v.push_back(static_cast<float>(random.normal())); }
    return v;
}

} // namespace

TEST_CASE("round_up finds the smallest multiple that holds a number")
{
    static_assert(tile::round_up(0, 16) == 0 && tile::round_up(1, 16) == 16 && tile::round_up(16, 16) == 16);
    CHECK(tile::round_up(17, 8) == 24);
}

TEST_CASE("multiply_add adds a product to what is there, for rows read either way")
{
    support::source random{"tile"};
    for (index_t const depth : {0, 1, 5, 64})
    {
        CAPTURE(depth);
        std::vector<float> const a = random_floats(random, tile::rows * (depth + 3));
        std::vector<float> const b = random_floats(random, depth * tile::width + 1);
        for (bool const transposed : {false, true})
        {
            index_t const row_step = transposed ? 1 : depth + 3;
            index_t const k_step   = transposed ? tile::rows : 1;
            tile::accumulators<tile::vectors> acc{};
            acc[1][0] += simd::broadcast(2.0F);
            tile::multiply_add<tile::vectors>(a.data(), row_step, k_step, b.data(), tile::width, depth, acc);
            support::worst_error error;
            for (index_t i = 0; i < tile::rows; ++i)
            {
                for (index_t c = 0; c < tile::width; ++c)
                {
                    double want = i == 1 && c < simd::lanes ? 2.0 : 0.0;
                    for (index_t k = 0; k < depth; ++k)
                    {
                        want += static_cast<double>(a[static_cast<std::size_t>(i * row_step + k * k_step)])
                                * static_cast<double>(b[static_cast<std::size_t>(k * tile::width + c)]);
                    }
                    float lane[simd::lanes];
                    simd::store(lane, acc[i][c / simd::lanes]);
                    error.add(static_cast<long double>(lane[c % simd::lanes]), static_cast<long double>(want), 10);
                }
            }
            CAPTURE(error);
            CHECK(error.within(1e-6));
        }
    }
}

TEST_CASE_TEMPLATE(
    "widen_row serves every length from odd addresses and touches nothing beyond", T, float, half, bfloat16)
{
    support::source random{"widen_row"};
    for (index_t n = 0; n <= 70; ++n)
    {
        CAPTURE(n);
        for (support::placement const how :
            {support::placement{.misalign = 1}, support::placement{.fence = support::guard::after}})
        {
            tensor<T, 1> row{{n}, how};
            for (index_t i = 0; i < n; ++i) { row.set(narrow<T>(static_cast<float>(random.normal())), i); }
            tensor<float, 1> wide{{n}, {.fence = support::guard::after}};
            tile::widen_row(row.data(), wide.data(), n);
            int wrong = 0;
            for (index_t i = 0; i < n; ++i) { wrong += wide.get(i) == widen(row.get(i)) ? 0 : 1; }
            CHECK(wrong == 0);
        }
    }
}

TEST_CASE("dot serves every length and reads nothing beyond")
{
    support::source random{"dot"};
    for (index_t n = 0; n <= 70; ++n)
    {
        CAPTURE(n);
        tensor<float, 1> row{{n}, {.fence = support::guard::after}}, other{{n}, {.fence = support::guard::after}};
        double want = 0, size = 0;
        for (index_t i = 0; i < n; ++i)
        {
            row.set(static_cast<float>(random.normal()), i);
            other.set(static_cast<float>(random.normal()), i);
            double const term = static_cast<double>(row.get(i)) * static_cast<double>(other.get(i));
            want += term;
            size += std::fabs(term);
        }
        CHECK(std::fabs(static_cast<double>(tile::dot(row.data(), other.data(), n)) - want) <= 1e-6 * size);
    }
}

TEST_CASE("read_block reads a part of one head as floats and fills the rest with zeros")
{
    layer<half> const x{{.tokens = 100, .dim = 40, .value_dim = 8}, {.swapped = true, .slack = 3, .misalign = 1}};
    for (index_t const count : {0, 1, 30, 64})
    {
        CAPTURE(count);
        tensor<float, 2> rows{{tile::block, 40}, {.fence = support::guard::after}};
        tile::read_block(x.keys.in(), 1, 36, count, rows.data());
        int wrong = 0;
        for (index_t t = 0; t < tile::block; ++t)
        {
            for (index_t d = 0; d < 40; ++d)
            {
                float const want = t < count ? widen(x.keys.get(1, 36 + t, d)) : 0.0F;
                wrong += rows.get(t, d) == want ? 0 : 1;
            }
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("multiply_block multiplies every row of a block with a matrix")
{
    layer<float> const x{{.heads = 1, .tokens = tile::block, .dim = 7, .value_dim = 8}};
    index_t const width = 3 * simd::lanes;
    tensor<float, 2> matrix{{7, width}, {.fence = support::guard::after}};
    support::source random{"multiply_block"};
    for (index_t k = 0; k < 7; ++k)
    {
        for (index_t c = 0; c < width; ++c) { matrix.set(static_cast<float>(random.normal()), k, c); }
    }
    tensor<float, 2> product{{tile::block, width}, {.fence = support::guard::after}};
    tensor<float, 3> const rows = x.keys.relaid({.fence = support::guard::after});
    tile::multiply_block(rows.data(), 7, matrix.data(), width, product.data());
    support::worst_error error;
    for (index_t t = 0; t < tile::block; ++t)
    {
        for (index_t c = 0; c < width; ++c)
        {
            long double want = 0;
            for (index_t k = 0; k < 7; ++k)
            {
                want += static_cast<long double>(rows.get(0, t, k)) * static_cast<long double>(matrix.get(k, c));
            }
            error.add(static_cast<long double>(product.get(t, c)), want, 1);
        }
    }
    CAPTURE(error);
    CHECK(error.within(2e-5));
}
