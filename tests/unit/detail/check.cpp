// Options and shapes that no stage can work with, for every stage in turn: each is refused by name, before anything is done.
#include <mdkv/detail/check.hpp>

#include <mdkv/mdkv.hpp>

#include "support/host.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace
{

using namespace mdkv;
using support::index_t;
using support::tensor;
using host = cpu::backend;

/// Views of whole and of empty tensors that the stages take, all of zeros.
struct sizes
{
    index_t heads = 2, group = 2, queries = 3, tokens = 20, window = 4, keys = 8, values = 8, rungs = 3, made = 2;
};

template <class T, std::size_t Rank>
tensor<T, Rank> zeros(std::array<index_t, Rank> const& extents)
{
    tensor<T, Rank> x{extents};
    x.assign(std::vector<T>(static_cast<std::size_t>(x.count())));
    return x;
}

struct operands
{
    sizes s;
    ratio_set ratios{drop, full_int4, full};
    tensor<float, 3> queries          = zeros<float, 3>({s.heads * s.group, s.queries, s.keys});
    tensor<float, 3> keys             = zeros<float, 3>({s.heads, s.tokens, s.keys});
    tensor<float, 3> values           = zeros<float, 3>({s.heads, s.tokens, s.values});
    tensor<float, 3> window_keys      = zeros<float, 3>({s.heads, s.window, s.keys});
    tensor<float, 3> window_values    = zeros<float, 3>({s.heads, s.window, s.values});
    tensor<float, 3> no_basis         = zeros<float, 3>({0, 0, 0});
    tensor<float, 3> loss             = zeros<float, 3>({s.heads, s.rungs, s.tokens});
    tensor<float, 3> other            = zeros<float, 3>({s.heads, s.rungs, s.tokens});
    tensor<float, 4> losses           = zeros<float, 4>({1, s.heads, s.rungs, s.tokens});
    tensor<leverage_sum, 1> leverages = zeros<leverage_sum, 1>({s.tokens});
    tensor<float, 2> lse              = zeros<float, 2>({s.heads * s.group, s.queries});
    tensor<std::uint8_t, 2> rung      = zeros<std::uint8_t, 2>({s.heads, s.tokens});
    tensor<float, 3> made_keys        = zeros<float, 3>({s.heads, s.made, s.keys});
    tensor<float, 3> made_values      = zeros<float, 3>({s.heads, s.made, s.values});
    cpu::cache<float> cache{};

    explicit operands(sizes const& given = {})
        : s{given}
    {}

    void compress(host const& on, float scale = 0, float even = 0)
    {
        preset const p{
            .name = "test", .ratios = ratios, .window = s.window, .queries = 4, .uniform = even, .scale = scale};
        mdkv::compress(
            on, prompt_rows<host, float>{queries.in(), keys.in(), values.in()}, p, budget::fraction(1, 2), cache);
    }
    void attend(host const& on, attend_options options = {})
    {
        tensor<float, 3> to{{s.heads * s.group, 1, s.values}};
        tensor<float, 2> sums{{s.heads * s.group, 1}};
        mdkv::attend(on, slice<1>(queries.in(), 0, s.queries > 0 ? 1 : 0), cache.view(), options, to.out(), sums.out());
    }
    void recompress(host const& on, recompress_options<host> const& options = {})
    {
        mdkv::recompress(on, queries.in(), ratios, options, cache);
    }
    void score(host const& on, score_options<host> const& options = {})
    {
        mdkv::score(on, queries.in(), keys.in(), values.in(), window_keys.in(), no_basis.in(), no_basis.in(), ratios,
            options, loss.out());
    }
    void replay(host const& on, replay_options<host> const& options = {})
    {
        auto const rows = slice<1>(queries.in(), 0, s.queries);
        mdkv::replay(on, rows, slice<1>(keys.in(), 0, std::min(s.queries, s.tokens)),
            slice<1>(values.in(), 0, std::min(s.queries, s.tokens)), window_keys.in(), ratios, options,
            slice<2>(loss.out(), 0, std::min(s.queries, s.tokens)));
    }
    void stand_in(host const& on, stand_in_options const& options = {})
    {
        mdkv::stand_in(on, queries.in(), keys.in(), values.in(), rung.in(), lse.in(), s.tokens + s.window, options,
            made_keys.out(), made_values.out());
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
        {"attend", "scale", [&](host const& on, float v) { x.attend(on, {.scale = v}); }, -1, 1 / std::sqrt(8.0F)},
        {"attend", "cache.layout.scale",
            [&](host const& on, float v) {
                auto view         = x.cache.view();
                view.layout.scale = v;
                tensor<float, 3> to{{4, 1, 8}};
                tensor<float, 2> sums{{4, 1}};
                mdkv::attend(on, slice<1>(x.queries.in(), 0, 1), view, {}, to.out(), sums.out());
            }},
        {"recompress", "scale", [&](host const& on, float v) { x.recompress(on, {.scale = v}); }, -1,
            1 / std::sqrt(8.0F)},
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

TEST_CASE("an extent of 0 is served or refused by name in every stage, whichever extent it is")
{
    struct stage
    {
        std::string name;
        std::function<void(operands&, host const&)> call;
    };
    std::vector<stage> const all{
        {"score", [](operands& x, host const& on) { x.score(on); }},
        {"replay", [](operands& x, host const& on) { x.replay(on); }},
        {"compress", [](operands& x, host const& on) { x.compress(on); }},
        {"stand_in", [](operands& x, host const& on) { x.stand_in(on); }},
        {"pool", [](operands& x, host const& on) { pool(on, x.loss.in(), {}, x.other.out()); }},
        {"pool",
            [](operands& x, host const& on) {
                pool(on, x.loss.in(), {7, pooling::adaptive}, x.other.out());
            }},
        {"join", [](operands& x, host const& on) { join(on, x.loss.in(), x.other.in(), 1, x.loss.out()); }},
        {"balance", [](operands& x, host const& on) { balance(on, x.losses.out()); }},
        {"balance",
            [](operands& x, host const& on) {
                balance(on, x.losses.out(), balance_options<host>{.leverage_power = 1, .leverages = x.leverages.in()});
            }},
        {"add_leverage", [](operands& x, host const& on) { add_leverage(on, x.keys.in(), x.leverages.out()); }},
        {"advance", [](operands& x,
                        host const& on) { advance(on, x.queries.in(), 3, rotary_encoding<host>{}, x.queries.out()); }},
        {"fit_basis",
            [](operands& x, host const& on) {
                tensor<float, 3> basis{{x.s.heads, x.s.keys, x.s.keys}};
                tensor<float, 2> energy{{x.s.heads, x.s.keys}};
                fit_basis(on, x.keys.in(), basis.out(), energy.out());
            }},
        {"eigenbasis",
            [](operands& x, host const& on) {
                auto const gram = zeros<double, 3>({x.s.heads, x.s.keys, x.s.keys});
                tensor<float, 3> basis{{x.s.heads, x.s.keys, x.s.keys}};
                tensor<float, 2> energy{{x.s.heads, x.s.keys}};
                eigenbasis(on, gram.in(), basis.out(), energy.out());
            }},
        {"expects_finite", [](operands& x, host const& on) { expects_finite(on, "keys", x.keys.in()); }},
        {"list_slots",
            [](operands& x, host const& on) {
                tensor<std::int32_t, 2> positions{{x.s.heads, x.s.tokens}};
                tensor<index_t, 2> first{{x.s.heads, x.s.rungs + 1}};
                list_slots(on, x.rung.in(), positions.out(), first.out());
            }},
        {"allocate",
            [](operands& x, host const& on) {
                index_t const limit = 1000;
                tensor<allocation, 1> report{{1}};
                allocate(on, x.loss.in(), rung_costs{x.ratios, {8, 8}, 4}, in(on, &limit, 1), {}, x.rung.out(),
                    report.out());
            }},
        {"gather_pages",
            [](operands& x, host const& on) {
                auto const pages = zeros<float, 4>({x.s.rungs, x.s.window, x.s.heads, x.s.keys});
                auto const table =
                    zeros<std::int32_t, 1>({x.s.window > 0 ? (x.s.tokens + x.s.window - 1) / x.s.window : 0});
                gather_pages(on, pages.in(), table.in(), x.keys.out());
            }},
        {"cache_layout",
            [](operands& x, host const& on) {
                cpu::cache<float> cache{{x.ratios, x.s.heads, x.s.window, {x.s.keys, x.s.values}}, 1000, 2};
                x.cache = std::move(cache);
                x.attend(on);
            }},
        {"merge_attention",
            [](operands& x, host const& on) {
                auto const a    = zeros<float, 2>({x.s.tokens, x.s.values});
                auto const sums = zeros<float, 1>({x.s.tokens});
                auto other_sums = zeros<float, 1>({x.s.tokens});
                auto const b    = zeros<float, 2>({x.s.tokens, x.s.values});
                tensor<float, 2> to{{x.s.tokens, x.s.values}};
                merge_attention(on, a.in(), sums.in(), b.in(), other_sums.in(), to.out(), other_sums.out());
            }},
    };
    index_t sizes::*const extents[]{&sizes::heads, &sizes::group, &sizes::queries, &sizes::tokens, &sizes::window,
        &sizes::keys, &sizes::values, &sizes::rungs, &sizes::made};
    int served = 0, refused = 0;
    for (stage const& one : all)
    {
        for (std::size_t i = 0; i < std::size(extents); ++i)
        {
            CAPTURE(one.name);
            CAPTURE(i);
            sizes s;
            s.*extents[i]          = 0;
            std::string const text = refusal([&] {
                operands x{s};
                with_scratch([&](host const& on) { one.call(x, on); });
            });
            CAPTURE(text);
            bool const done = text == "threw nothing";
            (done ? served : refused) += 1;
            std::string const by = one.name == "replay" ? "score: " : one.name == "compress" ? "prompt::" : one.name;
            CHECK((done || text.starts_with(one.name + ": ") || text.starts_with(by) || text.starts_with("attend: ")));
        }
    }
    CHECK(served > 60);
    CHECK(refused > 10);
}
