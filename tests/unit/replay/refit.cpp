// Tolerance: weights and outputs are floats, whose errors the solution divides by the ridge; then values are rounded to T.
#include <mdkv/replay/refit.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/executor.hpp>

#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/packed.hpp"
#include "support/refits.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <type_traits>
#include <vector>

namespace
{

using namespace mdkv;
using support::error_text;
using support::refit_case;
using support::tensor;
using host = cpu::backend;

template <class T>
tensor<T, 3> refitted(refit_case<T> const& given, cpu::cache<T>& cache, cpu::executor_ref threads = {})
{
    auto const& s = given.layer.sizes;
    tensor<T, 3> changed{{s.heads, s.tokens, s.dims.values}};
    support::run(
        [&](host const& on) {
            refit(on, given.queries.in(), given.keys.in(), given.values.in(), given.layer.rung.in(), cache.view(),
                given.options, changed.out());
        },
        threads);
    return changed;
}

template <class T>
support::worst_error error_of(refit_case<T> const& given, tensor<T, 3> const& got, tensor<double, 3> const& want)
{
    support::worst_error worst;
    for (index_t h = 0; h < got.extent(0); ++h)
    {
        for (index_t i = 0; i < got.extent(1); ++i)
        {
            for (index_t d = 0; d < got.extent(2) && given.layer.rung.get(h, i) != 0; ++d)
            {
                double const x = want.get(h, i, d);
                worst.add(double{widen(got.get(h, i, d))}, x, 1 + std::fabs(x), i);
            }
        }
    }
    return worst;
}

support::packed_sizes sizes_of(index_t tokens, head_dims dims, index_t stand_ins = 0)
{
    return {.heads = 2,
        .tokens    = tokens,
        .window    = 7,
        .dims      = dims,
        .rungs     = {drop, full_int4, full_int8, full},
        .stand_ins = stand_ins};
}

} // namespace

TEST_CASE_TEMPLATE("values are those of the least squares", T, float, half, bfloat16)
{
    double some       = 0; // a factor that is neither 0 nor 1
    index_t shortened = 0;
    for (auto const& [tokens, dim, value_dim, group, blocks, apart, span, rows, stand_ins] :
        std::vector<std::array<index_t, 9>>{{150, 16, 16, 1, 1, 70, 8, 8, 0}, {150, 24, 40, 3, 2, 40, 13, 15, 4},
            {90, 64, 64, 2, 3, 22, 20, 64, 5}, {40, 8, 8, 1, 11, 3, 3, 3, 9}, {8300, 4, 4, 1, 2, 900, 64, 5, 0}})
    {
        refit_case<T> given{sizes_of(tokens, {dim, value_dim}, stand_ins), group,
            {.blocks = blocks, .apart = apart, .span = span, .rows = rows, .ridge = 0.3F, .most = 0.1F}, 2};
        auto cache      = given.layer.packed();
        auto const got  = refitted(given, cache);
        auto const want = given.expected(cache.view());
        CAPTURE(tokens);
        CAPTURE(dim);
        auto const error = error_of(given, got, want);
        CHECK_MESSAGE(error.within(std::is_same_v<T, float> ? 1e-5 : std::is_same_v<T, half> ? 0x1p-9 : 0x1p-6), error);
        for (double const x : given.factors) { some = x > 0 && x < 1 ? x : some; }
        CHECK(given.shortened < 2 * tokens); // some are not
        shortened += given.shortened;
    }
    CHECK(some > 0);
    CHECK(shortened > 0);
}

TEST_CASE("blocks of refit meet what a text repeats at different phases")
{
    refit_part const part;
    for (index_t period = 2; period <= part.span; period *= 2)
    {
        std::set<index_t> phases;
        for (index_t b = 0; b < part.blocks; ++b) { phases.insert(part.first(b) % period); }
        INFO("period ", period);
        CHECK(static_cast<index_t>(phases.size()) == std::min(period, part.blocks));
    }
}

TEST_CASE("the change of a token that no row attends to is bounded")
{
    refit_case<float> given{sizes_of(300, {32, 32}), 2, {.blocks = 4, .apart = 50, .span = 32, .rows = 64}};
    for (index_t i = 0; i < 300; ++i) { given.layer.rung.set(i == 150 ? 3 : 0, 0, i); } // the only one of its head
    for (index_t d = 0; d < 32; ++d)
    {
        float const k = given.layer.keys.get(0, 150, d);
        for (tensor<float, 3>* const keys : {&given.keys, &given.layer.keys}) { keys->set(0.01F * k, 0, 150, d); }
    }
    auto cache     = given.layer.packed();
    auto const got = refitted(given, cache);
    double change = 0, value = 0;
    for (index_t d = 0; d < 32; ++d)
    {
        double const v{given.values.get(0, 150, d)};
        change += std::pow(double{got.get(0, 150, d)} - v, 2);
        value += v * v;
    }
    CHECK(change > 0);
    CHECK(change <= 1.0001 * value);
}

TEST_CASE("with refitted values later rows' outputs are nearer to those over all tokens")
{
    refit_case<float> given{sizes_of(300, {32, 32}), 2, {.blocks = 4, .apart = 50, .span = 32, .rows = 64}};
    auto cache      = given.layer.packed();
    auto const want = given.expected(cache.view());
    CHECK(given.lacked_with < 0.9 * given.lacked_without);
    CHECK(error_of(given, refitted(given, cache), want).within(1e-4));
}

TEST_CASE("a head that keeps all tokens uncompressed stays as it is")
{
    refit_case<float> given{sizes_of(60, {16, 16}), 1, {.blocks = 1, .apart = 20, .span = 8, .rows = 8}};
    for (index_t i = 0; i < 60; ++i) { given.layer.rung.set(3, 1, i); }
    auto cache     = given.layer.packed();
    auto const got = refitted(given, cache);
    index_t moved  = 0;
    for (index_t i = 0; i < 60; ++i)
    {
        for (index_t d = 0; d < 16; ++d)
        {
            CHECK(got.get(1, i, d) == given.layer.values.get(1, i, d));
            moved += got.get(0, i, d) != given.layer.values.get(0, i, d) ? 1 : 0;
        }
    }
    CHECK(moved > 0);
}

TEST_CASE_TEMPLATE("finite values stay finite, however large they are", T, float, half)
{
    float const most = std::is_same_v<T, float> ? 3e38F : 65504.0F;
    refit_case<T> given{sizes_of(60, {16, 16}), 1, {.blocks = 1, .apart = 20, .span = 8, .rows = 8}};
    for (index_t i = 0; i < 60; ++i)
    {
        for (index_t d = 0; d < 16; ++d) { given.values.set(narrow<T>(i % 3 == 0 ? -most : most), 0, i, d); }
    }
    auto cache     = given.layer.packed();
    auto const got = refitted(given, cache);
    index_t moved  = 0;
    for (index_t i = 0; i < 60; ++i)
    {
        for (index_t d = 0; d < 16; ++d)
        {
            CHECK(std::isfinite(widen(got.get(0, i, d))));
            moved += widen(got.get(1, i, d)) != widen(given.values.get(1, i, d)) ? 1 : 0;
        }
    }
    CHECK(moved > 0); // the other head is refitted
}

TEST_CASE("bad arguments are refused by name before anything is changed")
{
    refit_case<float> const given{sizes_of(60, {16, 16}), 1, {.blocks = 1, .apart = 20, .span = 8, .rows = 8}};
    auto cache            = given.layer.packed();
    auto const error_with = [&](auto const& change) {
        refit_case<float> other{sizes_of(60, {16, 16}), 1, {.blocks = 1, .apart = 20, .span = 8, .rows = 8}};
        change(other);
        tensor<float, 3> changed{{2, 60, 16}};
        return error_text<invalid_argument>([&] {
            support::run([&](host const& on) {
                refit(on, other.queries.in(), other.keys.in(), other.values.in(), other.layer.rung.in(), cache.view(),
                    other.options, changed.out());
            });
        });
    };
    auto const error_of = [&](auto member, auto value) {
        return error_with([&](auto& x) { x.options.rows.*member = value; });
    };
    CHECK(error_of(&refit_part::blocks, 0) == "refit: rows.blocks is 0; it must be from 1 to 1000000");
    CHECK(error_of(&refit_part::rows, 0) == "refit: rows.rows is 0; it must be from 1 to 1000000");
    CHECK(error_of(&refit_part::span, 0) == "refit: rows.span is 0; it must be from 1 to 1000000");
    CHECK(error_of(&refit_part::apart, 7) == "refit: rows.apart is 7; it must be from 8 to 1000000");
    CHECK(error_of(&refit_part::ridge, -1.0F) == "refit: rows.ridge is -1; it must be from 0 to 1000000");
    CHECK(error_of(&refit_part::most, -1.0F) == "refit: rows.most is -1; it must be from 0 to 1000000");
    CHECK(error_with([](auto& x) { x.options.first = 52; })
          == "refit: first is 52; the 1 blocks from there on must end before the last 8 of 67 tokens");
    CHECK(error_with([](auto& x) { x.options.stand_ins = -1; }) == "refit: stand_ins is -1; it must not be negative");
    CHECK(error_with([](auto& x) { x.options.rows.rows = 7; })
          == "refit: queries [H*G, Q, D] has Q = 16; it must be a multiple of the 7 rows of a block, for two blocks or "
             "more");
}
