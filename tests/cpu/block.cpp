#include <mdkv/cpu/block.hpp>

#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/layer.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <vector>

namespace
{

using namespace mdkv;
using support::layer;
using support::tensor;

} // namespace

TEST_CASE("read_block reads a part of one head as floats and fills the rest with zeros")
{
    layer<half> const x{{.tokens = 100, .dim = 40, .value_dim = 8}, {.swapped = true, .slack = 3, .misalign = 1}};
    for (index_t const count : {0, 1, 30, 64})
    {
        CAPTURE(count);
        tensor<float, 2> rows{{cpu::block_rows, 40}, {.fence = support::guard::after}};
        cpu::read_block(x.keys.in(), 1, 36, count, rows.data());
        int wrong = 0;
        for (index_t t = 0; t < cpu::block_rows; ++t)
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
    layer<float> const x{{.heads = 1, .tokens = cpu::block_rows, .dim = 7, .value_dim = 8}};
    index_t const width = 3 * cpu::simd::lanes;
    tensor<float, 2> matrix{{7, width}, {.fence = support::guard::after}};
    support::source random{"multiply_block"};
    for (index_t k = 0; k < 7; ++k)
    {
        for (index_t c = 0; c < width; ++c) { matrix.set(static_cast<float>(random.normal()), k, c); }
    }
    tensor<float, 2> product{{cpu::block_rows, width}, {.fence = support::guard::after}};
    tensor<float, 3> const rows = x.keys.relaid({.fence = support::guard::after});
    cpu::multiply_block(rows.data(), 7, matrix.data(), width, product.data());
    support::worst_error error;
    for (index_t t = 0; t < cpu::block_rows; ++t)
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
