#include <mdkv/core/score_options.hpp>

#include <mdkv/core/ratios.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/stages/score.hpp>

#include "support/host.hpp"
#include "support/random.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <vector>

namespace
{

using namespace mdkv;
using host = cpu::backend;

constexpr index_t group = 2, queries = 8, tokens = 40, dim = 16;

std::vector<float> random_floats(char const* name, index_t count)
{
    support::source random{name};
    std::vector<float> x(static_cast<std::size_t>(count));
    for (float& value : x) { value = static_cast<float>(random.normal()); }
    return x;
}

std::vector<float> losses(row_norm norm)
{
    auto const q = random_floats("queries", group * queries * dim);
    auto const k = random_floats("keys", tokens * dim);
    auto const v = random_floats("values", tokens * dim);
    std::vector<float> loss(2 * tokens);
    support::run([&](host const& on) {
        score(on, in(on, q.data(), group, queries, dim), in(on, k.data(), 1, tokens, dim),
            in(on, v.data(), 1, tokens, dim), in(on, k.data(), 1, 0, dim), in_view<float, 3, host>{},
            in_view<float, 3, host>{}, evict_ratios, {.norm = norm}, out(on, loss.data(), 1, 2, tokens));
    });
    return loss;
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
