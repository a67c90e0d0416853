// Tolerance: the library's logits and attention are floats, the oracle's wider (support/real.hpp); what follows is summed in double.
#include <mdkv/replay/stand_in.hpp>

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
#include "support/stand_ins.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace
{

using namespace mdkv;
using support::error_text;
using support::stand_in_case;
using support::tensor;
using host = cpu::backend;

struct found
{
    tensor<float, 3> keys, values; // [H, M, D]
};

template <class T>
found stand_ins(stand_in_case<T> const& given, index_t clusters, stand_in_options const& options = {},
    cpu::executor_ref threads = {})
{
    support::layer_sizes const& s = given.prompt.sizes;
    found made{tensor<float, 3>{{s.heads, clusters, s.dim}}, tensor<float, 3>{{s.heads, clusters, s.value_dim}}};
    support::run(
        [&](host const& on) {
            stand_in(on, given.prompt.queries.in(), given.prompt.keys.in(), given.prompt.values.in(), given.rungs.in(),
                given.lse.in(), s.tokens + s.window, options, made.keys.out(), made.values.out());
        },
        threads);
    return made;
}

support::worst_error error_of(std::vector<float> const& got, std::vector<double> const& want)
{
    double largest = 0;
    for (double const x : want) { largest = std::fmax(largest, std::fabs(x)); }
    support::worst_error worst;
    for (std::size_t i = 0; i < got.size(); ++i) { worst.add(got[i], want[i], largest, static_cast<std::int64_t>(i)); }
    return worst;
}

/// Attention of one row to a head's window, the tokens kept and the stand-ins.
template <class T>
std::vector<double> attended(stand_in_case<T> const& given, index_t row, found const& with)
{
    support::layer_sizes const& s = given.prompt.sizes;
    double sum                    = 0;
    std::vector<double> out(static_cast<std::size_t>(s.value_dim), 0.0);
    auto const add = [&](auto const& keys, auto const& values, index_t i) {
        double logit = 0;
        for (index_t d = 0; d < s.dim; ++d)
        {
            logit += given.prompt.scale() * double{widen(given.prompt.queries.get(0, row, d))}
                     * double{widen(keys.get(0, i, d))};
        }
        sum += std::exp(logit);
        for (index_t d = 0; d < s.value_dim; ++d)
        {
            out[static_cast<std::size_t>(d)] += std::exp(logit) * double{widen(values.get(0, i, d))};
        }
    };
    for (index_t i = 0; i < s.tokens; ++i)
    {
        if (given.rungs.get(0, i) != 0) { add(given.prompt.keys, given.prompt.values, i); }
    }
    for (index_t i = 0; i <= given.prompt.first_query() + row - s.tokens; ++i)
    {
        add(given.prompt.window_keys, given.prompt.window_values, i);
    }
    for (index_t i = 0; i < with.keys.extent(1); ++i) { add(with.keys, with.values, i); }
    for (double& x : out) { x /= sum; }
    return out;
}

} // namespace

TEST_CASE_TEMPLATE(
    "stand-ins are the clusters' weighted means, their keys moved along the queries", T, float, half, bfloat16)
{
    for (auto const& [heads, group, queries, tokens, dim, value_dim, clusters] :
        std::vector<std::array<index_t, 7>>{{1, 1, 1, 4, 1, 1, 1}, {2, 2, 5, 40, 7, 9, 3}, {1, 3, 64, 700, 64, 64, 4},
            {2, 1, 8, 300, 80, 40, 8}, {1, 2, 200, 20, 16, 16, 2}, {1, 1, 2, 70, 8, 8, 40}, {1, 1, 2, 300, 8, 8, 150}})
    {
        CAPTURE(tokens);
        CAPTURE(dim);
        stand_in_case<T> const given{{.heads = heads,
            .group                           = group,
            .queries                         = queries,
            .tokens                          = tokens,
            .window                          = queries,
            .dim                             = dim,
            .value_dim                       = value_dim}};
        auto const got  = stand_ins(given, clusters);
        auto const want = given.expected(clusters);
        auto const keys = error_of(got.keys.elements(), want.keys);
        auto const rest = error_of(got.values.elements(), want.values);
        CHECK_MESSAGE(keys.within(0x1p-13), keys);
        CHECK_MESSAGE(rest.within(0x1p-16), rest);
    }
}

TEST_CASE("rows see no token after their place, and another scale is another softmax")
{
    for (auto const& options : {stand_in_options{.first_query = 20}, stand_in_options{.scale = 0.05F}})
    {
        stand_in_case<float> const given{
            {.heads = 2, .group = 2, .queries = 24, .tokens = 200, .window = 6, .first_query = options.first_query},
            options};
        auto const got  = stand_ins(given, 3, options);
        auto const want = given.expected(3);
        auto const keys = error_of(got.keys.elements(), want.keys);
        CHECK_MESSAGE(keys.within(0x1p-13), keys);
        CHECK(error_of(got.values.elements(), want.values).within(0x1p-16));
    }
}

TEST_CASE("a row that does not see a cluster's tokens moves no key away from them")
{
    for (index_t const window : {1, 4, 15})
    {
        stand_in_case<float> given{{.heads = 2, .group = 3, .queries = 16, .tokens = 60, .window = window, .dim = 16}};
        given.rungs.assign(std::vector<std::uint8_t>(120, 0));
        auto const each = stand_ins(given, 60); // one token a cluster
        CHECK(error_of(each.keys.elements(), given.expected(60).keys).within(0x1p-13));
        for (index_t h = 0; h < 2; ++h)
        {
            for (index_t t = 0; t < 60; ++t)
            {
                for (index_t d = 0; d < 16; ++d)
                {
                    CHECK(std::fabs(each.keys.get(h, t, d) - given.prompt.keys.get(h, t, d)) < 1e-3F);
                }
            }
        }
        for (index_t const clusters : {3, 20})
        {
            auto const some = stand_ins(given, clusters);
            CHECK(error_of(some.keys.elements(), given.expected(clusters).keys).within(0x1p-13));
        }
    }
}

TEST_CASE("with stand-ins a row's attention is nearer to that over all tokens")
{
    stand_in_case<float> const given{
        {.heads = 1, .group = 1, .queries = 32, .tokens = 600, .window = 32, .dim = 32, .logits = 1.0}};
    found const none{tensor<float, 3>{{1, 0, 32}}, tensor<float, 3>{{1, 0, 32}}};
    stand_in_case<float> all{given.prompt.sizes};
    all.rungs.assign(std::vector<std::uint8_t>(600, 1));
    auto const made = stand_ins(given, 4);
    double without  = 0;
    double with     = 0;
    for (index_t row = 0; row < 32; ++row)
    {
        auto const whole = attended(all, row, none);
        auto const kept  = attended(given, row, none);
        auto const stood = attended(given, row, made);
        for (std::size_t d = 0; d < whole.size(); ++d)
        {
            without += (kept[d] - whole[d]) * (kept[d] - whole[d]);
            with += (stood[d] - whole[d]) * (stood[d] - whole[d]);
        }
    }
    CAPTURE(without);
    CAPTURE(with);
    CHECK(with < 0.4 * without);
}

TEST_CASE("a head has a stand-in for each token that it drops, M at most, and zeros beyond, whatever other heads drop")
{
    support::source random{"counts that differ"};
    for (int i = 0; i < 40; ++i)
    {
        stand_in_case<float> given{
            {.heads = 3, .group = 2, .queries = 8, .tokens = 60, .window = 8, .dim = 16, .value_dim = 16}};
        std::vector<std::uint8_t> rungs(180, 1);
        for (std::size_t h = 0; h < 3; ++h)
        {
            index_t const dropped = random.below(h == 0 ? 2 : 12);
            for (index_t t = 0; t < dropped; ++t) { rungs[h * 60 + static_cast<std::size_t>(3 * t)] = 0; }
        }
        given.rungs.assign(rungs);
        auto const got  = stand_ins(given, 6);
        auto const want = given.expected(6);
        CHECK(error_of(got.keys.elements(), want.keys).within(0x1p-13));
        CHECK(error_of(got.values.elements(), want.values).within(0x1p-16));
        for (index_t h = 0; h < 3; ++h)
        {
            index_t const dropped = given.dropped(h);
            for (index_t j = 0; j < 6; ++j)
            {
                for (index_t d = 0; d < 16; ++d)
                {
                    if (j >= dropped) { CHECK(got.keys.get(h, j, d) == 0.0F); }
                    if (j >= dropped) { CHECK(got.values.get(h, j, d) == 0.0F); }
                    else if (dropped <= 6) // a cluster of one token is this token
                    {
                        CHECK(got.values.get(h, j, d) == doctest::Approx(given.prompt.values.get(h, 3 * j, d)));
                    }
                }
            }
        }
    }
}

TEST_CASE(
    "a cluster has its own seed even if all keys are alike, and its mean if no row looks at it: no stand-in is a zero")
{
    stand_in_case<float> given{{.heads = 1, .group = 1, .queries = 16, .tokens = 40, .window = 16, .dim = 8}};
    given.rungs.assign(std::vector<std::uint8_t>(40, 0));
    for (index_t i = 0; i < 40; ++i)
    {
        for (index_t d = 0; d < 8; ++d)
        {
            given.prompt.keys.set(d == 0 ? 30.0F : 0.25F, 0, i, d);
            given.prompt.values.set(static_cast<float>(i), 0, i, d);
        }
    }
    for (index_t row = 0; row < 16; ++row)
    {
        for (index_t d = 0; d < 8; ++d) { given.prompt.queries.set(d == 0 ? -100.0F : 0.0F, 0, row, d); }
        given.lse.set(0.0F, 0, row); // so that no token gets any attention
    }
    auto const made = stand_ins(given, 5);
    for (index_t j = 0; j < 5; ++j)
    {
        for (index_t d = 1; d < 8; ++d) { CHECK(made.keys.get(0, j, d) == 0.25F); }
        CHECK(made.keys.get(0, j, 0) > 0.1F);                                            // where rows do not look
        if (j > 0) { CHECK(made.values.get(0, j, 0) == static_cast<float>(8 * j + 4)); } // its seed's alone
    }
}

TEST_CASE("queries without a common direction pay stand-ins about the attention that they pay the dropped tokens")
{
    support::source random{"no common direction"};
    for (index_t const dropped : {0, 1, 2, 5, 40})
    {
        stand_in_case<float> given{
            {.heads = 1, .group = 1, .queries = 16, .tokens = 100, .window = 16, .dim = 64, .logits = 2.0}};
        for (index_t row = 0; row < 16; ++row)
        {
            for (index_t d = 0; d < 64; ++d)
            {
                given.prompt.queries.set(static_cast<float>(2 * random.normal()), 0, row, d);
            }
        }
        std::vector<std::uint8_t> rungs(100, 1);
        for (index_t t = 0; t < dropped; ++t) { rungs[static_cast<std::size_t>(2 * t)] = 0; }
        given.rungs.assign(rungs);
        for (index_t row = 0; row < 16; ++row)
        {
            double sum = 0;
            for (index_t i = 0; i <= given.prompt.first_query() + row; ++i)
            {
                double logit = 0;
                for (index_t d = 0; d < 64; ++d)
                {
                    double const k =
                        double{i < 100 ? given.prompt.keys.get(0, i, d) : given.prompt.window_keys.get(0, i - 100, d)};
                    logit += given.prompt.scale() * double{given.prompt.queries.get(0, row, d)} * k;
                }
                sum += std::exp(logit);
            }
            given.lse.set(static_cast<float>(std::log(sum)), 0, row);
        }
        auto const made = stand_ins(given, 8);
        double drawn = 0, paid = 0;
        for (index_t row = 0; row < 16; ++row)
        {
            auto const share = [&](auto const& keys, index_t i) {
                double logit = 0;
                for (index_t d = 0; d < 64; ++d)
                {
                    logit +=
                        given.prompt.scale() * double{given.prompt.queries.get(0, row, d)} * double{keys.get(0, i, d)};
                }
                return std::exp(logit - double{given.lse.get(0, row)});
            };
            for (index_t j = 0; j < std::min<index_t>(dropped, 8); ++j) { drawn += share(made.keys, j) / 16; }
            for (index_t t = 0; t < dropped; ++t) { paid += share(given.prompt.keys, 2 * t) / 16; }
        }
        CAPTURE(dropped);
        CAPTURE(drawn);
        CAPTURE(paid);
        CHECK(drawn < 3 * paid + 0.02);
    }
}

TEST_CASE("stand_in refuses fewer tokens than rows, and a first query before the first token")
{
    stand_in_case<float> const given{
        {.heads = 2, .group = 2, .queries = 4, .tokens = 50, .window = 4, .dim = 8, .value_dim = 8}};
    tensor<float, 3> keys{{2, 3, 8}}, values{{2, 3, 8}};
    auto const refusal = [&](stand_in_options const& options, index_t tokens) {
        return error_text<invalid_argument>([&] {
            support::run([&](host const& on) {
                stand_in(on, given.prompt.queries.in(), given.prompt.keys.in(), given.prompt.values.in(),
                    given.rungs.in(), given.lse.in(), tokens, options, keys.out(), values.out());
            });
        });
    };
    CHECK(refusal({}, 49) == "stand_in: tokens is 49, below N = 50");
    CHECK(refusal({.first_query = -1}, 54) == "stand_in: first_query is -1; it must not be negative");
}
