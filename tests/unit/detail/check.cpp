// Options and shapes that no stage can work with, for every stage in turn: each is refused by name, before anything is done.
#include <mdkv/detail/check.hpp>

#include <mdkv/mdkv.hpp>

#include "support/host.hpp"

#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

namespace
{

using namespace mdkv;
using support::index_t;
using support::tensor;
using host = cpu::backend;

template <class T, std::size_t Rank>
tensor<T, Rank> zeros(std::array<index_t, Rank> const& extents)
{
    tensor<T, Rank> x{extents};
    x.assign(std::vector<T>(static_cast<std::size_t>(x.count())));
    return x;
}

/// What the stages take: 2 heads of 2 query heads each, 20 tokens, head dimensions of 8, all of zeros.
struct operands
{
    ratio_set ratios{drop, full_int4, full};
    tensor<float, 3> queries          = zeros<float, 3>({4, 3, 8});
    tensor<float, 3> keys             = zeros<float, 3>({2, 20, 8});
    tensor<float, 3> values           = zeros<float, 3>({2, 20, 8});
    tensor<float, 3> window_keys      = zeros<float, 3>({2, 4, 8});
    tensor<float, 3> loss             = zeros<float, 3>({2, 3, 20});
    tensor<float, 3> other            = zeros<float, 3>({2, 3, 20});
    tensor<float, 4> losses           = zeros<float, 4>({1, 2, 3, 20});
    tensor<leverage_sum, 1> leverages = zeros<leverage_sum, 1>({20});
    tensor<float, 2> lse              = zeros<float, 2>({4, 3});
    tensor<std::uint8_t, 2> rung      = zeros<std::uint8_t, 2>({2, 20});
    tensor<float, 3> made_keys        = zeros<float, 3>({2, 2, 8});
    tensor<float, 3> made_values      = zeros<float, 3>({2, 2, 8});
    cpu::cache<float> cache{};

    void compress(host const& on, float scale = 0, float even = 0)
    {
        preset const p{.name = "test", .ratios = ratios, .window = 4, .queries = 4, .uniform = even, .scale = scale};
        mdkv::compress(
            on, prompt_rows<host, float>{queries.in(), keys.in(), values.in()}, p, budget::fraction(1, 2), cache);
    }
    void attend(host const& on, cache_view<float, space::host> const& view, attend_options<host> options = {})
    {
        tensor<float, 3> to{{4, 1, 8}};
        tensor<float, 2> sums{{4, 1}};
        mdkv::attend(on, slice<1>(queries.in(), 0, 1), view, options, to.out(), sums.out());
    }
    void recompress(host const& on, recompress_options<host> const& options)
    {
        mdkv::recompress(on, queries.in(), ratios, options, cache);
    }
    void score(host const& on, score_options<host> const& options)
    {
        in_view<float, 3, host> const none{};
        mdkv::score(
            on, queries.in(), keys.in(), values.in(), window_keys.in(), none, none, ratios, options, loss.out());
    }
    void replay(host const& on, replay_options<host> const& options)
    {
        mdkv::replay(on, queries.in(), slice<1>(keys.in(), 0, 3), slice<1>(values.in(), 0, 3), window_keys.in(), ratios,
            options, slice<2>(loss.out(), 0, 3));
    }
    void stand_in(host const& on, stand_in_options const& options)
    {
        mdkv::stand_in(on, queries.in(), keys.in(), values.in(), rung.in(), lse.in(), 24, options, made_keys.out(),
            made_values.out());
    }
};

template <class Call>
void with_scratch(Call const& call)
{
    support::run([&](host const& on) { call(on); });
}

/// What the call throws, if that is an invalid_argument.
std::string refusal(std::function<void()> const& call)
{
    return support::error_text<invalid_argument>(call);
}

} // namespace

TEST_CASE("every option that is a real number is finite and in its range, or refused naming stage, option and value")
{
    float const infinity = std::numeric_limits<float>::infinity();
    float const nan      = std::numeric_limits<float>::quiet_NaN();
    operands x;
    with_scratch([&](host const& on) { x.compress(on); });
    struct option
    {
        std::string stage, name;
        std::function<void(host const&, float)> call;
        float bad  = -1; // beside what is not finite
        float good = 0.5F;
    };
    std::vector<option> const all{
        {"score", "scale", [&](host const& on, float v) { x.score(on, {.scale = v}); }},
        {"score", "uniform_queries", [&](host const& on, float v) { x.score(on, {.uniform_queries = v}); }},
        {"score", "scale", [&](host const& on, float v) { x.replay(on, {.scale = v}); }},
        {"prompt", "preset.scale", [&](host const& on, float v) { operands{}.compress(on, v); }},
        {"prompt", "preset.uniform", [&](host const& on, float v) { operands{}.compress(on, 0, v); }},
        {"cache_layout", "scale",
            [&](host const&, float v) {
                static_cast<void>(cache_layout{x.ratios, 1, 0, {8, 8}, v});
            }},
        {"attend", "scale", [&](host const& on, float v) { x.attend(on, x.cache.view(), {.scale = v}); }, -1,
            1 / std::sqrt(8.0F)},
        {"attend", "cache.layout.scale",
            [&](host const& on, float v) {
                auto view         = x.cache.view();
                view.layout.scale = v;
                x.attend(on, view);
            }},
        {"recompress", "early_weight", [&](host const& on, float v) { x.recompress(on, {.early_weight = v}); }},
        {"recompress", "uniform_queries", [&](host const& on, float v) { x.recompress(on, {.uniform_queries = v}); }},
        {"stand_in", "scale", [&](host const& on, float v) { x.stand_in(on, {.scale = v}); }},
        {"join", "weight", [&](host const& on, float v) { join(on, x.loss.in(), x.other.in(), v, x.loss.out()); }},
        {"balance", "leverage_power",
            [&](host const& on, float v) {
                balance(on, x.losses.out(), balance_options<host>{.leverage_power = v, .leverages = x.leverages.in()});
            }},
        {"balance", "depth",
            [&](host const& on, float v) { balance(on, x.losses.out(), balance_options<host>{.depth = v}); }, -41},
        {"advance", "encoding.base",
            [&](host const& on, float v) {
                advance(on, x.queries.in(), 3, rotary_encoding<host>{.base = double{v}}, x.queries.out());
            }},
    };
    for (option const& one : all)
    {
        CAPTURE(one.stage);
        CAPTURE(one.name);
        auto const call = [&](float v) {
            return refusal([&] { with_scratch([&](host const& on) { one.call(on, v); }); });
        };
        for (float const v : {nan, infinity, -infinity, one.bad})
        {
            CAPTURE(v);
            std::string const text = call(v);
            CAPTURE(text);
            CHECK(text.starts_with(one.stage + ": " + one.name + " is "));
            CHECK(text.find(std::isnan(v)   ? "nan"
                            : std::isinf(v) ? "inf"
                            : v == -41      ? "-41"
                                            : "-1")
                  != std::string::npos);
            CHECK(text.find("must be") != std::string::npos);
        }
        CHECK(call(one.good) == "threw nothing");
    }
}
