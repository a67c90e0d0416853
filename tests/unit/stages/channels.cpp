// What fit_channels writes is compared with the oracle's, and what it is for is checked on keys whose channels differ: the error
// of q.k after pack, beside that of scales of one.
#include <mdkv/stages/channels.hpp>

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/stages/pack.hpp>

#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/oracle.hpp"
#include "support/packed.hpp"
#include "support/random.hpp"

#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <limits>

namespace
{

using namespace mdkv;
using support::source;
using support::tensor;

/// Rows [H, N, D] whose channel d is `offset(d)` and noise of `spread(d)`.
template <class T, class Offset, class Spread>
tensor<T, 3> rows(
    source& random, index_t heads, index_t tokens, index_t dim, Offset const& offset, Spread const& spread)
{
    tensor<T, 3> made{{heads, tokens, dim}};
    for (index_t h = 0; h < heads; ++h)
    {
        for (index_t t = 0; t < tokens; ++t)
        {
            for (index_t d = 0; d < dim; ++d)
            {
                made.set(narrow<T>(static_cast<float>(offset(d) + spread(d) * random.normal())), h, t, d);
            }
        }
    }
    return made;
}

template <class T, class U>
tensor<float, 3> fitted(tensor<U, 3> const& queries, tensor<T, 3> const& keys)
{
    tensor<float, 3> channels{{keys.extent(0), 3, keys.extent(2)}};
    support::run([&](cpu::backend const& on) { fit_channels(on, queries.in(), keys.in(), channels.out()); });
    return channels;
}

template <class T>
support::oracle::matrix matrix_of(tensor<T, 3> const& x, index_t first, index_t heads)
{
    support::oracle::matrix made{heads * x.extent(1), x.extent(2)};
    for (index_t i = 0; i < made.rows; ++i)
    {
        for (index_t d = 0; d < made.cols; ++d)
        {
            made(i, d) = static_cast<support::real>(widen(x.get(first + i / x.extent(1), i % x.extent(1), d)));
        }
    }
    return made;
}

} // namespace

TEST_CASE_TEMPLATE(
    "channels are those of the oracle for any number of keys, queries and coordinates", T, float, half, bfloat16)
{
    source random{"channels oracle"};
    for (auto const& [tokens, count, dim] : {std::array<index_t, 3>{1, 1, 1}, {7, 3, 33}, {128, 64, 64}, {129, 43, 80},
             {500, 100, 128}, {5, 0, 64}, {0, 4, 16}, {300, 1, 7}})
    {
        CAPTURE(tokens);
        CAPTURE(count);
        CAPTURE(dim);
        auto const wave = [](index_t d) { return d % 5 == 0 ? 40.0 : 0.1; };
        auto const keys =
            rows<T>(random, 2, tokens, dim, wave, [](index_t d) { return 0.5 + static_cast<double>(d % 3); });
        auto const queries = rows<float>(
            random, 6, count, dim, [](index_t) { return 0.0; }, wave);
        auto const got = fitted(queries, keys);
        for (index_t h = 0; h < 2; ++h)
        {
            auto const want = support::oracle::channels_of(matrix_of(queries, 3 * h, 3), matrix_of(keys, h, 1));
            for (index_t d = 0; d < dim; ++d)
            {
                auto const c = static_cast<std::size_t>(d);
                CHECK(got.get(h, 0, d) == doctest::Approx(static_cast<double>(want.mean[c])).epsilon(1e-5).scale(1));
                CHECK(got.get(h, 1, d) == doctest::Approx(static_cast<double>(want.scale[c])).epsilon(1e-4));
                CHECK(got.get(h, 2, d) == doctest::Approx(static_cast<double>(want.query[c])).epsilon(1e-5));
            }
        }
    }
}

TEST_CASE(
    "no period of a text hides a channel, or makes it look larger: keys, queries and values, however many there are")
{
    source random{"channels periods"};
    for (index_t const tokens : {300, 700, 5000, 20000})
    {
        for (index_t const period : {2, 5, 16, 64})
        {
            for (index_t const phase : {index_t{0}, index_t{1}, period - 1})
            {
                CAPTURE(tokens);
                CAPTURE(period);
                CAPTURE(phase);
                auto keys = rows<float>(
                    random, 1, tokens, 3, [](index_t) { return 0.0; }, [](index_t) { return 1.0; });
                auto queries = rows<float>(
                    random, 1, tokens, 3, [](index_t) { return 0.0; }, [](index_t) { return 0.1; });
                double of_kind = 0;
                for (index_t t = phase; t < tokens; t += period, ++of_kind)
                {
                    keys.set(of_kind / 2 == std::floor(of_kind / 2) ? 20.0F : -20.0F, 0, t, 1);
                    queries.set(20.0F, 0, t, 2);
                }
                auto const got     = fitted(queries, keys);
                double const share = of_kind / static_cast<double>(tokens);
                double const key   = std::sqrt(1 - share + 400 * share);
                double const query = std::sqrt(0.01 * (1 - share) + 400 * share);
                double const error = tokens > 512 ? 0.6 : 0.1; // a sample, or all rows
                CHECK(got.get(0, 2, 2) == doctest::Approx(query).epsilon(error));
                CHECK(got.get(0, 1, 1) == doctest::Approx(std::sqrt(key / 0.1)).epsilon(error));
                CHECK(got.get(0, 1, 2) == doctest::Approx(std::sqrt(1 / query)).epsilon(error));
            }
        }
    }
}

TEST_CASE("a scale is within its limits where a channel has no spread, no query, a NaN, or an infinity")
{
    source random{"channels limits"};
    auto const one = [](index_t) { return 1.0; };
    auto keys      = rows<float>(random, 1, 50, 8, one, one);
    auto queries   = rows<float>(random, 2, 9, 8, one, one);
    for (index_t t = 0; t < 50; ++t)
    {
        keys.set(3.0F, 0, t, 0);                               // all alike
        keys.set(1e-30F * static_cast<float>(t % 2), 0, t, 1); // next to nothing
        keys.set(t % 2 == 0 ? 3e38F : -3e38F, 0, t, 2);        // squares leave float's range
    }
    keys.set(std::numeric_limits<float>::quiet_NaN(), 0, 20, 4);
    keys.set(std::numeric_limits<float>::infinity(), 0, 21, 5);
    for (index_t q = 0; q < 9; ++q)
    {
        queries.set(0.0F, 0, q, 3);
        queries.set(0.0F, 1, q, 3);
    }
    auto const got = fitted(queries, keys);
    CHECK(got.get(0, 0, 0) == 3.0F);
    CHECK(got.get(0, 1, 0) == 1.0F);
    CHECK(got.get(0, 1, 1) >= 1.0F / 1024);
    CHECK(got.get(0, 1, 2) == 1.0F);
    CHECK(got.get(0, 1, 3) == 1024.0F);
    for (index_t i = 0; i < 3; ++i)
    {
        for (index_t d = 0; d < 8; ++d) { CHECK(std::isfinite(got.get(0, i, d))); }
    }
    CHECK(got.get(0, 0, 4) == doctest::Approx(1.0).epsilon(0.5));
}

TEST_CASE_TEMPLATE(
    "codes of keys with channels unlike each other err by as little as those of keys that are alike", T, float, half)
{
    source random{"channels codes"};
    for (rung const stored : {full_int4, full_int8})
    {
        for (index_t const dim : {64, 48, 128})
        {
            auto const error_of = [&](auto const& offset, auto const& spread, auto const& asked, bool with_queries) {
                auto const zero    = [](index_t) { return 0.0; };
                auto const queries = rows<T>(random, 2, 40, dim, zero, asked);
                support::packed_layer<T> layer{
                    {.heads = 1, .tokens = 160, .window = 0, .dims = {dim, 64}, .rungs = {stored}}};
                layer.keys          = rows<T>(random, 1, 160, dim, offset, spread);
                auto const channels = fitted(queries, layer.keys);
                cpu::cache<T> cache{layer.layout, layer.bytes()};
                support::run([&](cpu::backend const& on) {
                    pack(on, layer.keys.in(), layer.values.in(), layer.window_keys.in(), layer.window_values.in(),
                        layer.key_basis.in(), layer.value_basis.in(), layer.rung.in(), cache.view(),
                        with_queries ? channels.in() : in_view<float, 3, cpu::backend>{});
                });
                auto const tokens = support::stored_tokens(cache.view(), 0);
                double error = 0, all = 0;
                for (index_t t = 0; t < 160; ++t)
                {
                    for (index_t g = 0; g < 2; ++g)
                    {
                        for (index_t q = 0; q < 40; ++q)
                        {
                            double off = 0, size = 0;
                            for (index_t d = 0; d < dim; ++d)
                            {
                                auto const x   = static_cast<double>(widen(queries.get(g, q, d)));
                                auto const key = static_cast<double>(widen(layer.keys.get(0, t, d)));
                                off += x
                                       * (tokens[static_cast<std::size_t>(t)].key_numbers[static_cast<std::size_t>(d)]
                                           - key);
                                size += x * (key - offset(d));
                            }
                            error += off * off;
                            all += size * size;
                        }
                    }
                }
                return std::sqrt(error / all);
            };
            auto const even   = [](index_t) { return 1.0; };
            auto const none   = [](index_t) { return 0.0; };
            auto const tall   = [](index_t d) { return d % 16 == 3 ? 30.0 : 1.0; };
            auto const shy    = [](index_t d) { return d % 16 == 3 ? 1.0 / 30 : 1.0; };
            auto const offset = [](index_t d) { return d % 16 == 3 ? 200.0 : 0.0; };
            double const best = error_of(none, even, even, true);
            CAPTURE(dim);
            CHECK(error_of(offset, even, even, true) < 1.15 * best); // what keys have in common
            CHECK(error_of(none, tall, shy, true) < 1.15 * best);    // what queries make up for
            CHECK(error_of(none, tall, even, true) < 1.15 * best);   // all that matters is in few channels
            CHECK(error_of(none, tall, even, false) < 1.6 * best);
        }
    }
}
