#include <mdkv/core/score_options.hpp>

#include <mdkv/core/ratios.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/stages/score.hpp>

#include "support/host.hpp"
#include "support/layer.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <vector>

namespace
{

using namespace mdkv;
using host = cpu::backend;

constexpr index_t group = 2, queries = 8, tokens = 40;

std::vector<float> losses(row_norm norm)
{
    support::layer<float> const x{
        {.heads = 1, .group = group, .queries = queries, .tokens = tokens, .window = 0, .dim = 16, .value_dim = 16}};
    support::tensor<float, 3> loss{{1, 2, tokens}};
    support::run([&](host const& on) {
        score(on, x.queries.in(), x.keys.in(), x.values.in(), x.window_keys.in(), x.key_basis.in(), x.value_basis.in(),
            evict_ratios, {.norm = norm}, loss.out());
    });
    return loss.elements();
}

} // namespace

TEST_CASE("the paper's norm, the default, is the largest, and the largest row's magnitude the smallest")
{
    CHECK(score_options<host>{}.norm == row_norm::sum);
    auto const sum       = losses(row_norm::sum);
    auto const euclidean = losses(row_norm::euclidean);
    auto const maximum   = losses(row_norm::maximum);
    float const rows     = group * queries;
    for (std::size_t t = 0; t < tokens; ++t)
    {
        CHECK(sum[t] >= euclidean[t]);
        CHECK(euclidean[t] >= maximum[t]);
        CHECK(maximum[t] * std::sqrt(rows) >= euclidean[t] * 0.999F);
        CHECK(euclidean[t] * std::sqrt(rows) >= sum[t] * 0.999F);
    }
}
