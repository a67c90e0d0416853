#include <mdkv/presets.hpp>

#include <mdkv/attend.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/prompt.hpp>
#include <mdkv/recompress.hpp>
#include <mdkv/replay/leverage.hpp>
#include <mdkv/replay/replay.hpp>
#include <mdkv/stages/score.hpp>

#include "support/host.hpp"
#include "support/random.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

using namespace mdkv;

namespace
{

using host = cpu::backend;
using support::source;
using support::tensor;

constexpr index_t H = 2, G = 2, N = 512, D = 64, last = 64, later = 8; // `later` queries follow the prompt

/// Numbers of one layer: keys in passages of eight tokens, queries that have much in common.
struct layer_numbers
{
    std::vector<double> queries; // [H*G, N + later, D]
    std::vector<double> keys;    // [H, N, D]
    std::vector<double> values;  // [H, N, D]

    explicit layer_numbers(source& random)
        : queries(static_cast<std::size_t>(H * G * (N + later) * D))
        , keys(static_cast<std::size_t>(H * N * D))
        , values(keys.size())
    {
        std::vector<double> common(static_cast<std::size_t>(H * G * D));
        for (double& x : common) { x = random.normal(); }
        for (std::size_t i = 0; i < queries.size(); ++i)
        {
            queries[i] = 2.1 * (common[i / ((N + later) * D) * D + i % D] + random.normal());
        }
        for (std::size_t i = 0; i < keys.size(); ++i)
        {
            std::size_t const before = i / D % 8 * D; // numbers back to the passage's first token
            keys[i]                  = before == 0 ? random.normal() : 0.7 * (keys[i - before] + random.normal());
            values[i]                = random.normal();
        }
    }

    /// Adds to every channel of a head a number of that size, its sign by chance.
    static void add_offsets(source& random, std::vector<double>& rows, double size)
    {
        for (std::size_t i = 0; i < rows.size() / N; ++i)
        {
            double const x = random.uniform() < 0.5 ? size : -size;
            for (std::size_t t = 0; t < N; ++t) { rows[(i / D * N + t) * D + i % D] += x; }
        }
    }

    /// Tokens i of a head become its tokens of(i).
    void repeat(std::function<std::size_t(std::size_t)> const& of)
    {
        for (std::vector<double>* const rows : {&keys, &values})
        {
            for (std::size_t i = 0; i < rows->size(); ++i)
            {
                (*rows)[i] = (*rows)[(i / (N * D) * N + of(i / D % N)) * D + i % D];
            }
        }
    }

    /// The first token of each head gets a mean logit, and a thousandth of its value.
    void make_sink(double logit)
    {
        for (std::size_t h = 0; h < H; ++h)
        {
            std::vector<double> mean(D);
            constexpr std::size_t rows = G * (N + later);
            for (std::size_t i = 0; i < rows * D; ++i) { mean[i % D] += queries[h * rows * D + i] / double{rows}; }
            double squares = 0;
            for (double const x : mean) { squares += x * x; }
            for (std::size_t d = 0; d < D; ++d)
            {
                keys[h * N * D + d] = mean[d] / squares * logit * std::sqrt(double{D});
                values[h * N * D + d] *= 1e-3;
            }
        }
    }
};

/// A layer in element type T, and the error of later queries' attention over its caches.
template <class T>
struct whole_layer
{
    tensor<T, 3> queries{{H * G, N + later, D}};
    tensor<T, 3> keys{{H, N, D}};
    tensor<T, 3> values{{H, N, D}};
    tensor<float, 2> lse{{H * G, last}};
    std::vector<double> exact; // [later, H*G, D]

    explicit whole_layer(layer_numbers const& x)
    {
        auto const put = [](tensor<T, 3>& to, std::vector<double> const& from) {
            for (index_t i = 0; auto const number : from)
            {
                auto const rows = to.extent(1);
                to.set(narrow<T>(static_cast<float>(number)), i / (rows * D), i / D % rows, i % D);
                ++i;
            }
        };
        put(queries, x.queries);
        put(keys, x.keys);
        put(values, x.values);
        for (index_t h = 0; h < H * G; ++h)
        {
            for (index_t i = 0; i < last; ++i)
            {
                lse.set(static_cast<float>(attend_fully(h, N - last + i, N - last + i + 1, nullptr)), h, i);
            }
        }
        exact.resize(static_cast<std::size_t>(later * H * G * D));
        for (index_t i = 0; i < later * H * G; ++i)
        {
            attend_fully(i % (H * G), N + i / (H * G), N, exact.data() + i * D);
        }
    }

    /// Error of outputs over their size, with the cache that a preset makes within tenths of a percent of the bytes.
    [[nodiscard]] double error(preset const& how, int percent) const
    {
        cpu::cache<T> cache;
        std::vector<double> const none(D / 2); // no position encoding
        support::run([&](host const& on) {
            prompt_shape<host> shape{.layers = 1, .heads = H, .group = G, .dims = {D, D}, .tokens = N};
            shape.encoding.frequencies = in(on, none.data(), D / 2);
            prompt<host, T> p{on, how, shape};
            auto const rows = [&](index_t first, index_t count) {
                return prompt_rows<host, T>{slice<1>(queries.in(), first, count), slice<1>(keys.in(), first, count),
                    slice<1>(values.in(), first, count)};
            };
            for (index_t first = 0; first < N; first += 256) { p.read_chunk(on, 0, first, rows(first, 256)); }
            prompt_rows<host, T> all = rows(0, N);
            all.queries              = slice<1>(queries.in(), N - last, last);
            all.lse                  = lse.in();
            p.finish_layer(on, 0, all);
            p.allocate(on, budget::fraction(percent, 1000));
            p.pack(on, 0, all, cache);
        });
        double off = 0, size = 0;
        for (index_t i = 0; i < later; ++i)
        {
            tensor<T, 2> query{{H * G, D}}, output{{H * G, D}};
            tensor<float, 1> sum{{H * G}};
            for (index_t j = 0; j < H * G * D; ++j) { query.set(queries.get(j / D, N + i, j % D), j / D, j % D); }
            support::run([&](host const& on) {
                attend(on, query.in(), std::as_const(cache).view(), {}, output.out(), sum.out());
            });
            for (index_t j = 0; j < H * G * D; ++j)
            {
                double const want = exact[static_cast<std::size_t>(i * H * G * D + j)];
                off += std::pow(static_cast<double>(widen(output.get(j / D, j % D))) - want, 2);
                size += want * want;
            }
        }
        return std::sqrt(off / size);
    }

private:
    /// Output of a query over the first n tokens, if asked for; returns the log-sum-exp.
    double attend_fully(index_t h, index_t row, index_t n, double* output) const
    {
        std::vector<double> logits;
        for (index_t i = 0; i < n; ++i)
        {
            double sum = 0;
            for (index_t d = 0; d < D; ++d)
            {
                sum += static_cast<double>(widen(queries.get(h, row, d)) * widen(keys.get(h / G, i, d)));
            }
            logits.push_back(sum / std::sqrt(double{D}));
        }
        double const most = *std::max_element(logits.begin(), logits.end());
        double total      = 0;
        for (double& x : logits) { total += x = std::exp(x - most); }
        for (index_t i = 0; output != nullptr && i < n; ++i)
        {
            for (index_t d = 0; d < D; ++d)
            {
                output[d] +=
                    logits[static_cast<std::size_t>(i)] / total * static_cast<double>(widen(values.get(h / G, i, d)));
            }
        }
        return most + std::log(total);
    }
};

} // namespace

TEST_CASE("presets differ from the paper's in what their names say")
{
    static_assert(presets::paper.ratios.size() == 4);
    CHECK(std::string{presets::paper.name} == "paper");
    CHECK(presets::paper.pooling.width == 7);
    CHECK(presets::paper_literal.pooling.width == 1);
    CHECK(presets::paper_literal.charge == projection_charge::always);
    CHECK(presets::evict.ratios[1] == full);
    for (std::size_t r = 0; r < presets::by_window.ratios.size(); ++r)
    {
        CHECK(!presets::by_window.ratios[r].projected());
    }
    CHECK(!presets::by_window.replayed);
    CHECK(presets::best.replayed);
    CHECK(presets::best.replayed->join > 0);
    CHECK(presets::best.ratios.size() == presets::by_window.ratios.size());
    CHECK(presets::any_question.replayed);
    CHECK(presets::any_question.replayed->join == 0);
    CHECK(presets::any_question.leverage_power() > 0);
    CHECK(presets::best.leverage_power() == 0);
}

TEST_CASE("a preset's options reach folds")
{
    auto const options = fold_options<cpu::backend>(presets::by_window, budget::kv_size(64), 64);
    CHECK(options.pooling.kind == presets::by_window.pooling.kind);
    CHECK(options.pooling.width == presets::by_window.pooling.width);
    CHECK(options.early_weight == presets::by_window.early_weight);
    CHECK(options.question == presets::by_window.question);
    CHECK(options.uniform_queries == presets::by_window.uniform_queries(64));
    CHECK(fold_options<cpu::backend>(presets::paper_literal, budget::bytes(1), 4).allocation.charge
          == projection_charge::always);
}

TEST_CASE("a preset's scale reaches every call that is not given a cache, and is 1/sqrt(D) unless it is set")
{
    preset own = presets::best;
    own.scale  = 0.3F;
    CHECK(own.replay(rotary_encoding<cpu::backend>{}).scale == 0.3F);
    CHECK(own.stand_in().scale == 0.3F);
    CHECK(presets::best.replay(rotary_encoding<cpu::backend>{}).scale == 0.0F);
    CHECK(presets::best.stand_in().scale == 0.0F);
}

TEST_CASE("a preset's weights reach balance: those of unusual tokens less where tokens are few")
{
    std::vector<leverage_sum> const leverages(4096);
    auto const options = [&](preset const& p, index_t tokens) {
        return p.balance<cpu::backend>(in(cpu::backend{}, leverages.data(), tokens));
    };
    auto const& any = presets::any_question;
    CHECK(options(any, 4096).leverage_power == any.leverage_power());
    CHECK(options(any, 2048).leverage_power == any.leverage_power());
    CHECK(options(any, 512).leverage_power == any.leverage_power() / 4);
    CHECK(options(any, 0).leverage_power == 0);
    CHECK(options(any, 512).leverages->extent(0) == 512);
    CHECK(options(any, 512).depth == any.shared->depth);
    CHECK(options(presets::best, 512).leverage_power == 0);
    CHECK(!options(presets::best, 512).leverages);
}

TEST_CASE("stand-ins take a part of a layer's limit at most")
{
    index_t const bytes = (64 + 32) * 2;
    auto const within   = [&](index_t most, index_t tokens, index_t part, index_t more) {
        return stand_ins_within(most, tokens * 3 * bytes + more, part, 3, bytes);
    };
    CHECK(within(8, 64, 16, 0) == 4);
    CHECK(within(8, 64, 16, -1) == 3);
    CHECK(within(8, 1000, 16, 0) == 8);
    CHECK(within(8, 64, 8, 0) == 8);
    CHECK(within(8, 64, 8, -1) == 7);
    CHECK(within(0, 1000, 16, 0) == 0);
    CHECK(within(8, 0, 16, 0) == 0);
    CHECK(within(8, 0, 16, -1) == 0);
    CHECK(stand_ins_within(8, 1000, 16, 0, 0) == 0);
    for (preset const& p : {presets::best, presets::any_question}) // a quarter as many, in half the part
    {
        CHECK(p.most_stand_ins(true, 1000000, 3, bytes) == 32);
        CHECK(p.most_stand_ins(false, 1000000, 3, bytes) == 8);
        CHECK(p.most_stand_ins(true, 64 * 3 * bytes, 3, bytes) == 8);
        CHECK(p.most_stand_ins(false, 64 * 3 * bytes, 3, bytes) == 4);
    }
}

TEST_CASE("queries whose attention is uniform count as a part of the others")
{
    CHECK(presets::by_window.uniform_queries(64) == doctest::Approx(0.1 * (32 + 32 * 0.2)));
    CHECK(presets::by_window.uniform_queries(20) == doctest::Approx(0.1 * 20));
    CHECK(presets::by_window.uniform_queries(0) == 0);
    CHECK(presets::paper.uniform_queries(32) == 0);
    CHECK(presets::best.uniform_queries(64) == 0);
}

TEST_CASE("on no kind of data does a preset lose much more than eviction in the same bytes")
{
    struct kind
    {
        std::string name;
        std::function<void(source&, layer_numbers&)> change;
        bool halves   = false;
        double factor = 1.2;
    };
    auto const values_at = [](double offset) {
        return [=](source& random, layer_numbers& x) { layer_numbers::add_offsets(random, x.values, offset); };
    };
    auto const repeated = [](std::size_t kinds) {
        return [=](source&, layer_numbers& x) { x.repeat([=](std::size_t i) { return i % kinds; }); };
    };
    auto const large_queries = [](double offset) {
        return [=](source& random, layer_numbers& x) {
            for (double& q : x.queries) { q *= 20; }
            layer_numbers::add_offsets(random, x.keys, offset);
        };
    };
    for (kind const &one :
        {kind{"plain", values_at(0)}, {"values at 10 spreads", values_at(10)}, {"values at 30 spreads", values_at(30)},
            {"values of 10,000",
                [](source&, layer_numbers& x) {
                    for (double& v : x.values) { v = 1e4 + 1e3 * v; }
                },
                true},
            {"keys at 50 spreads",
                [](source& random, layer_numbers& x) { layer_numbers::add_offsets(random, x.keys, 50); }},
            {"large queries", large_queries(0)}, {"large queries, keys at 10 spreads", large_queries(10)},
            {"large queries, keys at 50 spreads", large_queries(50)},
            {"a sink without a value", [](source&, layer_numbers& x) { x.make_sink(10); }}, {"one token", repeated(1)},
            // One copy of each would do; losses add up, and some of the tokens lose all their copies.
            {"lines of three tokens", repeated(3), false, 2}, {"lines of five tokens", repeated(5), false, 2},
            {"lines of twenty tokens", repeated(20)},
            {"one token 300 times", [](source&, layer_numbers& x) {
                 x.repeat([](std::size_t i) { return i < 100 || i >= 400 ? i : std::size_t{100}; });
             }}})
    {
        source random{one.name.c_str()};
        layer_numbers numbers{random};
        one.change(random, numbers);
        auto const check = [&](auto const& x) {
            for (int const percent : {125, 250}) // tenths
            {
                double const evicted = x.error(presets::evict, percent);
                for (preset const& p : {presets::by_window, presets::best, presets::any_question})
                {
                    CAPTURE(one.name);
                    CAPTURE(percent);
                    CAPTURE(std::string{p.name});
                    CHECK(x.error(p, percent) <= one.factor * evicted + 0.001);
                }
            }
        };
        if (one.halves) { check(whole_layer<half>{numbers}); }
        else { check(whole_layer<float>{numbers}); }
    }
}
