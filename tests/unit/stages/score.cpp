// Tolerance against the oracle: errors of a loss are judged against the loss itself plus what the token would lose if it were
// dropped, 2 P |v|, because that is the scale on which the allocator compares rungs. A logit of size x carries an error of a few x * 2^-24,
// which the exponential turns into a relative error of P; the losses here stay within 3e-5 of that.
#include <mdkv/stages/score.hpp>

#include <mdkv/cpu/score.hpp>
#include <mdkv/stages/channels.hpp>

#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/layer.hpp"
#include "support/oracle.hpp"
#include "support/random.hpp"
#include "support/score_cases.hpp"
#include "support/sparse_memory.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace
{

using namespace mdkv;
using support::error_text;
using support::exact_layer;
using support::layer;
using support::layer_sizes;
using support::lse_of;
using support::mixed_rungs;
using support::paper_rungs;
using support::quantised_sets;
using support::tensor;
using support::worst_error;
using host    = cpu::backend;
using options = score_options<host>;

constexpr double tolerance = 3e-5;

/// Every norm over rows, and its power.
std::vector<std::pair<row_norm, support::oracle::real>> const norms{{row_norm::sum, 1}, {row_norm::euclidean, 2},
    {row_norm::maximum, std::numeric_limits<support::oracle::real>::infinity()}};

ratio_set at_run_time(std::vector<rung> const& rungs, rounding round = rounding::exact)
{
    return ratio_set{std::span<rung const>{rungs}, round};
}

/// The losses [H, R, N] of a layer, made in one call.
template <class T>
std::vector<float> scored(
    layer<T> const& x, ratio_set const& ratios, options choice = {}, cpu::executor_ref threads = {})
{
    tensor<float, 3> loss{{x.sizes.heads, static_cast<index_t>(ratios.size()), x.sizes.tokens}};
    if (!choice.first_query) { choice.first_query = x.sizes.first_query; }
    support::run(
        [&](host const& on) {
            score(on, x.queries.in(), x.keys.in(), x.values.in(), x.window_keys.in(), x.key_basis.in(),
                x.value_basis.in(), ratios, choice, loss.out());
        },
        threads);
    return loss.elements();
}

template <class T>
worst_error against_oracle(layer<T> const& x, std::vector<rung> const& rungs, std::vector<float> const& loss,
    support::oracle::scoring const& how = {})
{
    worst_error error;
    auto at = loss.begin();
    for (index_t h = 0; h < x.sizes.heads; ++h)
    {
        auto const want   = support::expected_scores(x, h, rungs, how);
        long double total = 0;
        for (long double const d : want.dropped) { total += d; }
        for (index_t r = 0; r < static_cast<index_t>(rungs.size()); ++r)
        {
            for (index_t t = 0; t < x.sizes.tokens; ++t)
            {
                // Tokens of next to no attention are compared on the scale of the average one's thousandth.
                long double const magnitude = want.dropped[static_cast<std::size_t>(t)] + want.loss(r, t)
                                              + 1e-3L * total / static_cast<long double>(x.sizes.tokens);
                error.add(static_cast<long double>(*at++), want.loss(r, t), magnitude, (h * 100 + r) * 1000000 + t);
            }
        }
    }
    return error;
}

template <class T>
void check_oracle(
    layer_sizes const& sizes, std::vector<rung> const& rungs = paper_rungs, rounding round = rounding::exact)
{
    layer<T> const x{sizes};
    worst_error const error = against_oracle(x, rungs, scored(x, at_run_time(rungs, round)));
    CAPTURE(error);
    CHECK(error.within(tolerance));
}

/// The losses of one rung and head.
std::vector<float> row(std::vector<float> const& loss, index_t index, index_t tokens)
{
    return {loss.begin() + index * tokens, loss.begin() + (index + 1) * tokens};
}

} // namespace

TEST_CASE_TEMPLATE("score agrees with the materialised Algorithm 1 for every head dimension and element type", T, float,
    half, bfloat16)
{
    for (index_t const dim : {32, 40, 56, 64, 80, 96, 128, 192, 256})
    {
        CAPTURE(dim);
        check_oracle<T>({.queries = 5, .tokens = 37, .window = 5, .dim = dim, .value_dim = dim});
    }
}

TEST_CASE("score agrees with the oracle at head dimensions 1, 7 and 576, and where keys and values have different ones")
{
    check_oracle<float>({.dim = 1, .value_dim = 1}, {drop, full});
    check_oracle<float>({.dim = 7, .value_dim = 7}, {drop, fraction(1, 7), fraction(3, 7), full});
    check_oracle<half>({.dim = 7, .value_dim = 7}, {drop, fraction(1, 4), fraction(1, 2), full}, rounding::down);
    check_oracle<half>({.heads = 1, .queries = 3, .tokens = 33, .dim = 576, .value_dim = 512, .decay = 0.98});
    for (auto const& [dim, value_dim] : {std::pair<index_t, index_t>{192, 128}, {64, 128}, {40, 8}, {8, 96}, {56, 256}})
    {
        CAPTURE(dim);
        check_oracle<half>({.queries = 3, .tokens = 35, .dim = dim, .value_dim = value_dim});
    }
}

TEST_CASE_TEMPLATE("queries of another element than the keys count as they are, unrounded", T, half, bfloat16)
{
    layer<float> const x{{.queries = 5, .tokens = 100}};
    auto const keys        = support::converted<T>(x.keys);
    auto const values      = support::converted<T>(x.values);
    auto const window_keys = support::converted<T>(x.window_keys);
    ratio_set const ratios = at_run_time({drop, fraction(1, 4), full_int4, full});
    auto const losses_of   = [&](auto const& q, auto const& k, auto const& v, auto const& w) {
        tensor<float, 3> loss{{2, 4, 100}};
        support::run([&](cpu::backend const& on) {
            score(on, q.in(), k.in(), v.in(), w.in(), x.key_basis.in(), x.value_basis.in(), ratios, {}, loss.out());
        });
        return loss.elements();
    };
    // Not bit for bit: compilers choose anew in each instantiation where a product and a sum become one operation.
    auto const apart = [](std::vector<float> const& a, std::vector<float> const& b) {
        worst_error error;
        for (std::size_t i = 0; i < a.size(); ++i) { error.add(a[i], b[i], std::max(std::fabs(b[i]), 1e-3F)); }
        return error;
    };
    auto const got         = losses_of(x.queries, keys, values, window_keys);
    worst_error const wide = apart(got, losses_of(x.queries, support::converted<float>(keys),
                                            support::converted<float>(values), support::converted<float>(window_keys)));
    CAPTURE(wide);
    CHECK(wide.within(2e-6));
    worst_error const rounded = apart(got, losses_of(support::converted<T>(x.queries), keys, values, window_keys));
    CAPTURE(rounded);
    CHECK_FALSE(rounded.within(1e-5));
}

TEST_CASE("any number of query heads may share a KV head")
{
    for (index_t group = 1; group <= 9; ++group)
    {
        for (index_t const queries : {1, 3, 8})
        {
            INFO("group ", group, ", queries ", queries);
            check_oracle<float>({.heads = 3, .group = group, .queries = queries, .tokens = 20, .window = 8});
        }
    }
}

TEST_CASE("any number of tokens is served, also those that fill no tile or block, or are cut into parts")
{
    for (index_t const tokens : {1, 2, 7, 15, 16, 17, 63, 64, 65, 127, 512, 513, 1000})
    {
        CAPTURE(tokens);
        check_oracle<float>({.heads = 1, .group = 3, .queries = 4, .tokens = tokens});
    }
    for (index_t const tokens : {1024, 4097, 6000})
    {
        CAPTURE(tokens);
        check_oracle<half>(
            {.heads = 1, .group = 1, .queries = 3, .tokens = tokens, .window = 5, .dim = 32, .value_dim = 32});
    }
}

TEST_CASE("windows of every size are part of the softmax and causal among themselves")
{
    for (index_t const window : {0, 1, 2, 15, 16, 17, 32, 100})
    {
        for (index_t const queries : {1, 5, 16})
        {
            INFO("window ", window, ", queries ", queries);
            check_oracle<float>({.queries = queries, .tokens = 40, .window = window});
        }
    }
}

TEST_CASE("queries may start anywhere: before the window, inside the tokens, at the first token, or after everything")
{
    for (index_t const window : {0, 6})
    {
        for (index_t const first : {0, 1, 3, 7, 30, 64, 89, 94, 95, 96, 100, 1000})
        {
            for (index_t const queries : {1, 9, 40})
            {
                INFO("window ", window, ", first ", first, ", queries ", queries);
                check_oracle<float>(
                    {.group = 3, .queries = queries, .tokens = 95, .window = window, .first_query = first});
            }
        }
    }
    check_oracle<float>({.group = 1, .queries = 70, .tokens = 9, .window = 0, .first_query = 0});
}

TEST_CASE("a token that no query may see loses nothing by being dropped")
{
    layer<float> const x{{.queries = 3, .tokens = 50, .window = 4, .first_query = 10}};
    std::vector<float> const loss = scored(x, paper_ratios);
    for (index_t h = 0; h < 2; ++h)
    {
        for (index_t r = 0; r < 4; ++r)
        {
            std::vector<float> const losses = row(loss, h * 4 + r, 50);
            for (std::size_t t = 13; t < 50; ++t) { CHECK(losses[t] == 0.0F); }
        }
        CHECK(row(loss, h * 4, 50)[12] > 0.0F);
    }
}

TEST_CASE("a first query far beyond the tokens sees every key, up to the largest index there is")
{
    layer<float> const x{{.queries = 3, .tokens = 50, .window = 4}};
    std::vector<float> const all = scored(x, paper_ratios, {.first_query = 54});
    for (index_t const first : {index_t{55}, index_t{1} << 40, std::numeric_limits<index_t>::max()})
    {
        CAPTURE(first);
        CHECK(support::same_bits(scored(x, paper_ratios, {.first_query = first}), all));
    }
}

TEST_CASE("log-sum-exps handed over give the losses that computing them gives, to rounding")
{
    for (auto const first : {std::optional<index_t>{}, std::optional<index_t>{20}})
    {
        layer<float> const x{{.group = 3, .queries = 7, .tokens = 150, .window = 7, .first_query = first}};
        tensor<float, 2> const lse = lse_of(x);
        worst_error const error =
            against_oracle(x, paper_rungs, scored(x, paper_ratios, {.first_query = first, .lse = lse.in()}));
        CAPTURE(error);
        CHECK(error.within(tolerance));
    }
}

TEST_CASE("a log-sum-exp that is a NaN, infinite or far too low makes its head's losses NaN or infinite")
{
    constexpr float infinity = std::numeric_limits<float>::infinity();
    layer<float> const x{{.dim = 64, .value_dim = 64}};
    for (float const bad : {std::numeric_limits<float>::quiet_NaN(), infinity, -infinity, 3e38F, -3e38F, -200.0F})
    {
        for (auto const& [rungs, norm] : {std::pair{paper_rungs, row_norm::sum}, {mixed_rungs, row_norm::sum},
                 {std::vector<rung>{drop, full}, row_norm::sum}, {mixed_rungs, row_norm::euclidean},
                 {mixed_rungs, row_norm::maximum}})
        {
            CAPTURE(bad);
            CAPTURE(rungs.size());
            tensor<float, 2> lse           = lse_of(x);
            std::vector<float> const right = scored(x, at_run_time(rungs), {.lse = lse.in(), .norm = norm});
            lse.set(bad, 3, 4); // of head 1
            std::vector<float> const losses = scored(x, at_run_time(rungs), {.lse = lse.in(), .norm = norm});
            auto const row_size             = static_cast<std::size_t>(x.sizes.tokens);
            int wrong                       = 0;
            for (std::size_t i = 0; i < losses.size(); ++i)
            {
                bool const as_before =
                    i / row_size / rungs.size() == 0 || i / row_size % rungs.size() == rungs.size() - 1;
                wrong += (as_before ? losses[i] == right[i] : !std::isfinite(losses[i])) ? 0 : 1;
            }
            CHECK(wrong == 0);
        }
    }
}

TEST_CASE("projected rungs alone have the losses that they have beside dropped and full tokens")
{
    layer<float> const x{{}};
    auto const alone  = scored(x, at_run_time({fraction(1, 4), fraction(1, 2)}));
    auto const beside = scored(x, at_run_time({drop, fraction(1, 4), fraction(1, 2), full}));
    for (std::size_t i = 0; i < alone.size(); ++i)
    {
        CHECK(alone[i] == beside[(i / 128 * 4 + i / 64 % 2 + 1) * 64 + i % 64]); // two heads of 64 tokens
    }
}

TEST_CASE("keys elsewhere take their part of every softmax, known by their log-sum-exps alone")
{
    constexpr float infinity = std::numeric_limits<float>::infinity();
    for (auto const& [norm, rungs] : {std::pair{row_norm::sum, paper_rungs}, {row_norm::maximum, mixed_rungs}})
    {
        CAPTURE(rungs.size());
        layer<float> const x{
            {.group = 3, .queries = 7, .tokens = 150, .window = 9, .dim = 64, .value_dim = 64, .first_query = 200}};
        ratio_set const ratios = at_run_time(rungs);
        // The window's keys are those elsewhere.
        tensor<float, 2> lse{{x.sizes.heads * 3, 7}};
        for (index_t h = 0; h < x.sizes.heads * 3; ++h)
        {
            for (index_t q = 0; q < 7; ++q)
            {
                support::real sum = 0;
                for (index_t w = 0; w < 9; ++w)
                {
                    support::real logit = 0;
                    for (index_t d = 0; d < 64; ++d)
                    {
                        logit += static_cast<support::real>(x.queries.get(h, q, d))
                                 * static_cast<support::real>(x.window_keys.get(h / 3, w, d));
                    }
                    sum += std::exp(logit / 8);
                }
                lse.set(static_cast<float>(std::log(sum)), h, q);
            }
        }
        auto const none           = in(host{nullptr}, static_cast<float const*>(nullptr), x.sizes.heads, 0, 64);
        auto const without_window = [&](options choice) {
            tensor<float, 3> loss{{x.sizes.heads, static_cast<index_t>(rungs.size()), 150}};
            choice.first_query = 200;
            choice.norm        = norm;
            support::run([&](host const& on) {
                score(on, x.queries.in(), x.keys.in(), x.values.in(), none, x.key_basis.in(), x.value_basis.in(),
                    ratios, choice, loss.out());
            });
            return loss.elements();
        };
        std::vector<float> const want = scored(x, ratios, {.norm = norm});
        std::vector<float> const got  = without_window({.lse_elsewhere = lse.in()});
        worst_error error;
        for (std::size_t i = 0; i < got.size(); ++i)
        {
            auto const dropped = static_cast<long double>(want[i / 150 / rungs.size() * rungs.size() * 150 + i % 150]);
            error.add(static_cast<long double>(got[i]), static_cast<long double>(want[i]),
                dropped + static_cast<long double>(want[i]) + 1e-3L, static_cast<std::int64_t>(i));
        }
        CAPTURE(error);
        CHECK(error.within(tolerance));
        std::vector<float> const alone = without_window({});
        CHECK(got != alone);
        tensor<float, 2> one{{x.sizes.heads * 3, 1}}; // of each head: its first query's
        tensor<float, 2> repeated{{x.sizes.heads * 3, 7}};
        for (index_t i = 0; i < repeated.count(); ++i) { repeated.set(lse.get(i / 7, 0), i / 7, i % 7); }
        for (index_t h = 0; h < one.count(); ++h) { one.set(lse.get(h, 0), h, 0); }
        CHECK(support::same_bits(
            without_window({.lse_elsewhere = one.in()}), without_window({.lse_elsewhere = repeated.in()})));
        for (float const bad : {std::numeric_limits<float>::quiet_NaN(), infinity, 3e38F})
        {
            lse.set(bad, 4, 2); // of head 1
            CHECK(std::isnan(without_window({.lse_elsewhere = lse.in()})[rungs.size() * 150]));
        }
        for (index_t i = 0; i < x.sizes.heads * 21; ++i) { lse.set(-infinity, i / 7, i % 7); }
        CHECK(support::same_bits(without_window({.lse_elsewhere = lse.in()}), alone));
    }
}

TEST_CASE("ratio sets of one to sixteen rungs, with and without 0 and 1, are all scored")
{
    std::vector<rung> sixteen{drop};
    for (int i = 1; i < 15; ++i) { sixteen.push_back(fraction(2 * i, 32)); }
    sixteen.push_back(full);
    std::vector<std::vector<rung>> const sets{{drop}, {full}, {fraction(1, 4)}, {drop, full}, {fraction(1, 8), full},
        {drop, fraction(1, 2)}, {fraction(1, 8), fraction(1, 4)}, {drop, fraction(1, 8), full},
        {drop, fraction(1, 32), fraction(1, 8), fraction(1, 2), full},
        {drop, fraction(1, 32), fraction(3, 32), fraction(1, 4), fraction(31, 32), full}, sixteen};
    for (auto const& set : sets)
    {
        CAPTURE(set.size());
        check_oracle<float>({.value_dim = set.size() == 16 ? 64 : 32}, set);
    }
}

TEST_CASE("quantised rungs agree with an oracle that quantises by itself")
{
    for (index_t const dim : {64, 40})
    {
        auto const x = exact_layer<bfloat16>(
            {.queries = 5, .tokens = 75, .window = 6, .dim = dim, .value_dim = 104 - dim, .first_query = 70});
        for (std::size_t set = 0; set < quantised_sets.size(); ++set)
        {
            CAPTURE(dim);
            CAPTURE(set);
            worst_error const error =
                against_oracle(x, quantised_sets[set], scored(x, at_run_time(quantised_sets[set])));
            CAPTURE(error);
            CHECK(error.within(tolerance));
        }
    }
}

TEST_CASE("log-sum-exps handed over and weights of the queries count at every kind of rung")
{
    auto const x =
        exact_layer<bfloat16>({.group = 3, .queries = 4, .tokens = 130, .window = 4, .dim = 64, .value_dim = 64});
    tensor<float, 2> const lse = lse_of(x);
    for (float const early : {0.25F, 0.0F, 37.5F})
    {
        for (bool const lse_given : {false, true})
        {
            CAPTURE(early);
            CAPTURE(lse_given);
            options choice{.early_weight = early, .question = 1};
            if (lse_given) { choice.lse = lse.in(); }
            worst_error const error = against_oracle(
                x, mixed_rungs, scored(x, at_run_time(mixed_rungs), choice), {.weights = {early, early, early, 1}});
            CAPTURE(error);
            CHECK(error.within(tolerance));
        }
    }
    CHECK(support::same_bits( // all are the question's
        scored(x, at_run_time(mixed_rungs), {.early_weight = 0.25F, .question = 4}),
        scored(x, at_run_time(mixed_rungs))));
}

TEST_CASE("rows may be joined by their sum, their Euclidean norm or their maximum, at every kind of rung")
{
    for (auto const& [norm, power] : norms)
    {
        for (auto const& rungs : {paper_rungs, mixed_rungs, quantised_sets[0]})
        {
            auto const x = exact_layer<bfloat16>(
                {.group = 3, .queries = 5, .tokens = 75, .window = 6, .dim = 64, .value_dim = 40, .first_query = 74});
            CAPTURE(static_cast<int>(norm));
            CAPTURE(rungs.size());
            worst_error const error = against_oracle(x, rungs,
                scored(x, at_run_time(rungs), {.early_weight = 37.5F, .question = 3, .norm = norm}),
                {.weights = {37.5, 37.5, 1, 1, 1}, .power = power});
            CAPTURE(error);
            CHECK(error.within(tolerance));
        }
    }
}

TEST_CASE("queries whose attention is even count as rows of zeros, in every norm over rows")
{
    constexpr index_t given = 3, even = 4; // queries
    std::vector<rung> const rungs{
        drop, fraction(1, 4), full_int4, full_int8, full}; // rows of zeros change the noise of codes in a basis
    layer_sizes const sizes{.group = 2, .queries = given + even, .tokens = 75, .window = 6, .dim = 64, .value_dim = 40};
    auto x       = exact_layer<bfloat16>(sizes);
    auto const H = sizes.heads * sizes.group;
    for (index_t i = 0; i < H * even * sizes.dim; ++i)
    {
        x.queries.set(narrow<bfloat16>(0.0F), i / sizes.dim / even, given + i / sizes.dim % even, i % sizes.dim);
    }
    auto const first   = slice<1>(x.queries.in(), 0, given);
    auto const without = [&](ratio_set const& ratios, options choice) {
        tensor<float, 3> loss{{sizes.heads, static_cast<index_t>(ratios.size()), sizes.tokens}};
        support::run([&](host const& on) {
            score(on, first, x.keys.in(), x.values.in(), x.window_keys.in(), x.key_basis.in(), x.value_basis.in(),
                ratios, choice, loss.out());
        });
        return loss.elements();
    };
    tensor<float, 3> channels{{sizes.heads, 3, sizes.dim}}; // rows of zeros would change those of the queries at hand
    support::run([&](host const& on) { fit_channels(on, first, x.keys.in(), channels.out()); });
    for (auto const& [norm, power] : norms)
    {
        CAPTURE(static_cast<int>(norm));
        options choice{.first_query = 200, .channels = channels.in(), .norm = norm};
        std::vector<float> const want  = scored(x, at_run_time(rungs), choice);
        std::vector<float> const alone = without(at_run_time(rungs), choice);
        choice.uniform_queries         = even;
        std::vector<float> const got   = without(at_run_time(rungs), choice);
        CHECK(got != alone);
        worst_error error;
        for (std::size_t i = 0; i < got.size(); ++i)
        {
            error.add(static_cast<long double>(got[i]), static_cast<long double>(want[i]),
                static_cast<long double>(want[i]) + 1e-3L, static_cast<std::int64_t>(i));
        }
        CAPTURE(error);
        CHECK(error.within(tolerance));
    }
}

TEST_CASE("a maximum over rows is that of its largest row, and a single row's loss is the same in every norm")
{
    layer<float> const x{{.heads = 1, .group = 1, .queries = 4, .tokens = 70}};
    std::vector<float> const most = scored(x, evict_ratios, {.first_query = 200, .norm = row_norm::maximum});
    std::vector<float> by_row(most.size(), 0.0F);
    for (std::size_t i = 0; i < 4; ++i)
    {
        auto const row_of = [&](row_norm norm) {
            tensor<float, 3> loss{{1, 2, 70}};
            support::run([&](host const& on) {
                score(on, slice<1>(x.queries.in(), static_cast<index_t>(i), 1), x.keys.in(), x.values.in(),
                    x.window_keys.in(), x.key_basis.in(), x.value_basis.in(), evict_ratios,
                    {.first_query = 200, .norm = norm}, loss.out());
            });
            return loss.elements();
        };
        std::vector<float> const sum       = row_of(row_norm::sum);
        std::vector<float> const euclidean = row_of(row_norm::euclidean);
        CHECK(support::same_bits(sum, row_of(row_norm::maximum)));
        for (std::size_t t = 0; t < sum.size(); ++t)
        {
            by_row[t] = std::max(by_row[t], sum[t]);
            CHECK(euclidean[t] == doctest::Approx(double{sum[t]}).epsilon(1e-6));
        }
    }
    CHECK(support::same_bits(most, by_row));
}

TEST_CASE("a prompt may be scored chunk by chunk, each chunk with its own queries and some keys that all of them see")
{
    constexpr index_t tokens = 200;
    constexpr index_t chunk  = 64;
    constexpr index_t sinks  = 4;
    layer<half> const x{{.heads = 2, .group = 2, .queries = tokens, .tokens = tokens, .window = 0}};
    for (auto const& [norm, power] : norms)
    {
        CAPTURE(static_cast<int>(norm));
        tensor<float, 3> loss{{2, 4, tokens}};
        for (index_t from = 0; from < tokens; from += chunk)
        {
            index_t const n        = std::min(chunk, tokens - from);
            index_t const sinks_of = from == 0 ? 0 : sinks; // the first chunk's are among its keys
            auto const queries     = slice<1>(x.queries.in(), from, n);
            auto const keys        = slice<1>(x.keys.in(), from, n);
            auto const values      = slice<1>(x.values.in(), from, n);
            auto const seen        = slice<1>(x.keys.in(), 0, sinks_of);
            auto const own         = [&](out_view<float, 3, host> to) {
                support::run([&](host const& on) {
                    score(on, queries, keys, values, seen, x.key_basis.in(), x.value_basis.in(), paper_ratios,
                                {.first_query = n + sinks_of, .norm = norm}, to);
                });
            };
            own(slice<2>(loss.out(), from, n));
            tensor<float, 3> alone{{2, 4, n}};
            own(alone.out());
            int wrong = 0;
            for (index_t i = 0; i < 8 * n; ++i)
            {
                auto const [h, r, t] = std::array{i / n / 4, i / n % 4, i % n};
                wrong += loss.get(h, r, from + t) == alone.get(h, r, t) ? 0 : 1;
            }
            CHECK(wrong == 0);
        }
        std::vector<float> const all = loss.elements();
        CHECK(std::all_of(all.begin(), all.begin() + tokens, [](float l) { return l > 0; })); // dropped, of head 0
    }
}

TEST_CASE(
    "constant groups lose what half rounds of their sum, and zeros nothing; groups of next to no spread or beyond "
    "half's range lose a number")
{
    std::vector<rung> const rungs{drop, full_int4, fraction(3, 4).as(storage::int8), full_int8, full};
    auto const all_losses = [&](index_t dim, auto const& entry, bool same_keys = false) {
        layer<float> x{{.tokens = 70, .dim = dim, .value_dim = dim}};
        for (index_t h = 0; h < 2; ++h)
        {
            for (index_t t = 0; t < 70; ++t)
            {
                for (index_t d = 0; d < dim; ++d)
                {
                    x.keys.set(entry(same_keys ? 0 : t, d), h, t, d);
                    x.values.set(entry(t + 1, d), h, t, d);
                }
            }
        }
        return scored(x, at_run_time(rungs));
    };
    auto const constant = [](index_t t, index_t) { return 0.5F - 0.25F * static_cast<float>(t % 8); };
    for (index_t const dim : {8, 32})
    {
        // A turned group of n is its sum and n - 1 zeros; where the sum is the minimum, its rounding moves all n.
        float const limit = std::sqrt(static_cast<float>(dim)) * 1.01F * 0x1p-11F;

        std::vector<float> const loss = all_losses(dim, constant, true);
        for (index_t const h : {0, 1})
        {
            std::vector<float> const dropped = row(loss, 5 * h, 70);
            for (index_t const r : {1, 3, 4}) // not in the basis, where coordinates are any number
            {
                std::vector<float> const lost = row(loss, 5 * h + r, 70);
                for (std::size_t t = 0; t < 70; ++t)
                {
                    CHECK(lost[t] <= (r == 4 ? 0.0F : limit * dropped[t] / 2)); // that is 2 P |v|
                }
            }
        }
    }
    auto const zero = [](index_t, index_t) { return 0.0F; };
    for (float const l : row(all_losses(12, zero), 1, 70)) { CHECK(l == 0.0F); }
    // Spreads whose scale is a subnormal half, or none at all; then minima and maxima that are cut.
    for (float const size : {1e-3F, 1e-5F, 1e-7F, 1e-9F, 1e-30F, 1e5F, 1e7F})
    {
        CAPTURE(size);
        int wrong = 0;
        for (float const l :
            all_losses(40, [&](index_t t, index_t d) { return size * static_cast<float>(t * 7 + d * 3 % 11); }))
        {
            wrong += std::isfinite(l) && l >= 0.0F ? 0 : 1;
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE(
    "a value that is no number makes its own token's losses NaN at every rung but the full one, and nobody else's")
{
    for (index_t const dim : {3, 40})
    {
        layer<half> x{{.heads = 1, .tokens = 70, .dim = 64, .value_dim = 64}};
        x.values.set(half{}, 0, 66, dim); // for the mean
        layer<half> y{x.sizes};
        y.values.set(narrow<half>(std::numeric_limits<float>::quiet_NaN()), 0, 66, dim);
        std::vector<float> const want = scored(x, at_run_time(mixed_rungs));
        std::vector<float> const got  = scored(y, at_run_time(mixed_rungs));
        int wrong                     = 0;
        for (std::size_t i = 0; i + 70 < got.size(); ++i)
        {
            wrong += (i % 70 == 66 ? std::isnan(got[i]) : got[i] == want[i]) ? 0 : 1;
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("one head broadcast with stride 0 counts as many equal heads")
{
    layer<float> const one{{.heads = 1, .group = 1}};
    std::vector<float> const want = scored(one, paper_ratios);
    tensor<float, 3> loss{{3, 4, 64}};
    host const any{};
    auto const three = [&](auto const& t) {
        return in(any, t.data(), {3, t.extent(1), t.extent(2)}, {0, t.stride(1), 1});
    };
    support::run([&](host const& on) {
        score(on, three(one.queries), three(one.keys), three(one.values), three(one.window_keys), three(one.key_basis),
            three(one.value_basis), paper_ratios, {}, loss.out());
    });
    std::vector<float> const got = loss.elements();
    for (std::size_t h = 0; h < 3; ++h)
    {
        CHECK(support::same_bits({got.begin() + static_cast<std::ptrdiff_t>(h * want.size()),
                                     got.begin() + static_cast<std::ptrdiff_t>((h + 1) * want.size())},
            want));
    }
}

TEST_CASE("keys and values more than 2^31 elements apart are found")
{
    layer<half> const x{{.tokens = 20, .window = 3}};
    index_t const step = (index_t{1} << 31) + 64;
    support::sparse_memory const memory{static_cast<std::size_t>(2 * step) * sizeof(half)};
    auto* const data = memory.as<half>(); // head by head: 20 keys, 20 values, 3 window keys
    for (index_t h = 0; h < 2; ++h)
    {
        for (index_t d = 0; d < 32; ++d)
        {
            for (index_t t = 0; t < 20; ++t)
            {
                data[h * step + t * 32 + d]        = x.keys.get(h, t, d);
                data[h * step + (20 + t) * 32 + d] = x.values.get(h, t, d);
            }
            for (index_t t = 0; t < 3; ++t) { data[h * step + (40 + t) * 32 + d] = x.window_keys.get(h, t, d); }
        }
    }
    tensor<float, 3> loss{{2, 4, 20}};
    host const any{};
    auto const part = [&](index_t first, index_t count) {
        return in(any, data + first * 32, {2, count, 32}, {step, 32, 1});
    };
    support::run([&](host const& on) {
        score(on, x.queries.in(), part(0, 20), part(20, 20), part(40, 3), x.key_basis.in(), x.value_basis.in(),
            paper_ratios, {}, loss.out());
    });
    CHECK(support::same_bits(loss.elements(), scored(x, paper_ratios)));
}

TEST_CASE("the loss of the full rung is exactly 0 and no loss is negative")
{
    layer<half> const x{{.tokens = 300, .dim = 64, .value_dim = 64}};
    for (auto const& rungs : {paper_rungs, mixed_rungs})
    {
        auto const count              = static_cast<index_t>(rungs.size());
        std::vector<float> const loss = scored(x, at_run_time(rungs));
        int negative                  = 0;
        for (float const l : loss) { negative += l >= 0.0F ? 0 : 1; }
        CHECK(negative == 0);
        for (index_t h = 0; h < 2; ++h)
        {
            for (float const l : row(loss, h * count + count - 1, 300)) { CHECK(l == 0.0F); }
        }
    }
}

TEST_CASE("keys and values of rank r lose nothing at the rung of r coordinates, up to rounding")
{
    // Rank 8 of 64: the rungs of 8 and 16 coordinates hold everything.
    layer<float> const x{{.tokens = 200, .dim = 64, .value_dim = 64, .rank = 8}};
    std::vector<float> const loss = scored(x, paper_ratios);
    worst_error error;
    for (index_t h = 0; h < 2; ++h)
    {
        std::vector<float> const dropped = row(loss, h * 4, 200);
        for (index_t r = 1; r < 3; ++r)
        {
            std::vector<float> const kept = row(loss, h * 4 + r, 200);
            for (std::size_t t = 0; t < 200; ++t)
            {
                error.add(static_cast<long double>(kept[t]), 0, static_cast<long double>(dropped[t]) + 1e-12L);
            }
        }
    }
    CAPTURE(error);
    CHECK(error.within(tolerance));
}

TEST_CASE("the losses of dropping sum up to twice the attention mass times |v|")
{
    // All values of length 1: the sum over tokens is twice the attention that is not on the window.
    layer<float> x{{.tokens = 120, .window = 0, .value_dim = 32}};
    for (index_t h = 0; h < 2; ++h)
    {
        for (index_t t = 0; t < 120; ++t)
        {
            for (index_t d = 0; d < 32; ++d) { x.values.set(d == t % 32 ? 1.0F : 0.0F, h, t, d); }
        }
    }
    std::vector<float> const loss = scored(x, evict_ratios);
    for (index_t h = 0; h < 2; ++h)
    {
        double sum = 0;
        for (float const l : row(loss, h * 2, 120)) { sum += static_cast<double>(l); }
        CHECK(sum == doctest::Approx(2.0 * 2 * 8).epsilon(1e-5)); // 2 * G * Q
    }
}

TEST_CASE("permuting the tokens permutes the losses")
{
    layer<float> const x{{.tokens = 90, .first_query = 1000}};
    std::vector<index_t> const order = support::source{"score permutation"}.permutation(90);
    layer<float> y                   = layer<float>{x.sizes};
    for (index_t h = 0; h < 2; ++h)
    {
        for (index_t t = 0; t < 90; ++t)
        {
            for (index_t d = 0; d < 32; ++d)
            {
                y.keys.set(x.keys.get(h, order[static_cast<std::size_t>(t)], d), h, t, d);
                y.values.set(x.values.get(h, order[static_cast<std::size_t>(t)], d), h, t, d);
            }
        }
    }
    for (auto const& rungs : {paper_rungs, mixed_rungs})
    {
        auto const count           = static_cast<index_t>(rungs.size());
        std::vector<float> const a = scored(x, at_run_time(rungs));
        std::vector<float> const b = scored(y, at_run_time(rungs));
        worst_error error;
        for (index_t i = 0; i < 2 * count; ++i)
        {
            std::vector<float> const dropped = row(a, i / count * count, 90);
            for (std::size_t t = 0; t < 90; ++t)
            {
                auto const from = static_cast<std::size_t>(order[t]);
                error.add(static_cast<long double>(row(b, i, 90)[t]), static_cast<long double>(row(a, i, 90)[from]),
                    static_cast<long double>(dropped[from] + row(a, i, 90)[from]) + 1e-6L);
            }
        }
        CAPTURE(error);
        CHECK(error.within(2 * tolerance)); // two roundings
    }
}

TEST_CASE("one orthogonal rotation of queries, keys and key basis changes nothing")
{
    layer<float> const x{{.tokens = 90}};
    layer<float> y{x.sizes};
    support::source random{"score rotation"};
    support::rotation const turn{random, 32, 9};
    auto const rotate = [&](tensor<float, 3>& t) {
        for (index_t h = 0; h < t.extent(0); ++h)
        {
            for (index_t i = 0; i < t.extent(1); ++i)
            {
                std::vector<double> v;
                for (index_t d = 0; d < 32; ++d) { v.push_back(static_cast<double>(t.get(h, i, d))); }
                turn.apply(v);
                for (index_t d = 0; d < 32; ++d) { t.set(static_cast<float>(v[static_cast<std::size_t>(d)]), h, i, d); }
            }
        }
    };
    rotate(y.queries);
    rotate(y.keys);
    rotate(y.window_keys);
    rotate(y.key_basis);
    worst_error const error = against_oracle(x, paper_rungs, scored(y, paper_ratios));
    CAPTURE(error);
    CHECK(error.within(tolerance));
}

TEST_CASE("directions' signs do not matter")
{
    layer<float> const x{{.tokens = 90}};
    layer<float> y{x.sizes};
    for (index_t h = 0; h < 2; ++h)
    {
        for (index_t i = 0; i < 32; i += 3)
        {
            for (index_t d = 0; d < 32; ++d)
            {
                y.key_basis.set(-x.key_basis.get(h, i, d), h, i, d);
                y.value_basis.set(-x.value_basis.get(h, i, d), h, i, d);
            }
        }
    }
    CHECK(support::same_bits(scored(x, paper_ratios), scored(y, paper_ratios)));
}

TEST_CASE("scaling the values by a power of two scales every loss by it, bit for bit")
{
    layer<float> const x{{.tokens = 90}};
    layer<float> y{x.sizes};
    for (index_t h = 0; h < 2; ++h)
    {
        for (index_t t = 0; t < 90; ++t)
        {
            for (index_t d = 0; d < 32; ++d) { y.values.set(x.values.get(h, t, d) * 8.0F, h, t, d); }
        }
    }
    std::vector<float> a = scored(x, paper_ratios);
    for (float& l : a) { l *= 8.0F; }
    CHECK(support::same_bits(a, scored(y, paper_ratios)));
}

TEST_CASE("a scale of one's own replaces 1/sqrt(D)")
{
    layer<float> const x{{}};
    layer<float> y{x.sizes};
    for (index_t h = 0; h < 4; ++h)
    {
        for (index_t i = 0; i < 8; ++i)
        {
            for (index_t d = 0; d < 32; ++d) { y.queries.set(x.queries.get(h, i, d) * 0.5F, h, i, d); }
        }
    }
    auto const want = scored(y, paper_ratios);
    auto const got  = scored(x, paper_ratios, {.scale = static_cast<float>(0.5 * x.scale())});
    worst_error error;
    for (std::size_t i = 0; i < want.size(); ++i)
    {
        error.add(static_cast<long double>(got[i]), static_cast<long double>(want[i]),
            1e-3L + static_cast<long double>(want[i]));
    }
    CAPTURE(error);
    CHECK(error.within(1e-5));
}

TEST_CASE("extreme logits leave finite losses: one token takes all attention")
{
    layer<float> const x{{.tokens = 40, .logits = 60.0}};
    std::vector<float> const loss = scored(x, paper_ratios);
    int wrong                     = 0;
    for (float const l : loss) { wrong += std::isfinite(l) && l >= 0.0F ? 0 : 1; }
    CHECK(wrong == 0);
    double most = 0;
    for (float const l : row(loss, 0, 40)) { most = std::max(most, static_cast<double>(l)); }
    CHECK(most > 0.1);
}

TEST_CASE("zero keys, zero values and equal tokens are scored like any others")
{
    layer<float> x{{.tokens = 30}};
    for (index_t h = 0; h < 2; ++h)
    {
        for (index_t t = 0; t < 30; ++t)
        {
            for (index_t d = 0; d < 32; ++d)
            {
                if (h == 0) { x.keys.set(0.0F, h, t, d); }
                else { x.keys.set(x.keys.get(h, 0, d), h, t, d); }
                if (h == 0) { x.values.set(0.0F, h, t, d); }
                else { x.values.set(x.values.get(h, 0, d), h, t, d); }
            }
        }
    }
    std::vector<float> const loss = scored(x, paper_ratios, {.first_query = 1000});
    for (index_t r = 0; r < 4; ++r)
    {
        for (float const l : row(loss, r, 30)) { CHECK(l == 0.0F); }
        std::vector<float> const equal = row(loss, 4 + r, 30);
        worst_error error;
        for (float const l : equal)
        {
            error.add(
                static_cast<long double>(l), static_cast<long double>(equal[0]), static_cast<long double>(equal[0]));
        }
        CHECK(error.within(1e-5));
    }
}

TEST_CASE("the scratch a call needs does not grow with the number of tokens")
{
    auto const bytes = [](index_t tokens) {
        layer<half> const x{{.heads = 2, .group = 2, .queries = 32, .tokens = tokens, .window = 32}};
        tensor<float, 3> loss{{2, 4, tokens}};
        return support::run([&](host const& on) {
            score(on, x.queries.in(), x.keys.in(), x.values.in(), x.window_keys.in(), x.key_basis.in(),
                x.value_basis.in(), paper_ratios, {}, loss.out());
        });
    };
    index_t const some = bytes(1 << 13);
    CHECK(bytes(1 << 14) == some);
    // Far less than one probability per query row and token.
    CHECK(some < index_t{64} * (1 << 14) * index_t{sizeof(float)} / 4);
}

TEST_CASE("score refuses weights of queries that are negative or not finite")
{
    layer<float> const x{{}};
    for (float const bad : {-1.0F, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()})
    {
        CHECK(error_text<invalid_argument>([&] {
            static_cast<void>(scored(x, paper_ratios, {.early_weight = bad}));
        }).starts_with("score: early_weight is "));
    }
    CHECK(error_text<invalid_argument>([&] { static_cast<void>(scored(x, paper_ratios, {.question = -1})); })
          == "score: question is -1; it must not be negative");
}

TEST_CASE("score refuses more queries than tokens unless they say where they start, and a start before the first token")
{
    layer<float> const x{{.queries = 20, .tokens = 10, .window = 9}};
    auto const refusal = [&](options const& choice) {
        return error_text<invalid_argument>([&] { static_cast<void>(scored(x, paper_ratios, choice)); });
    };
    CHECK(refusal({}) == "score: 20 queries are more than the 10 + 9 tokens; say where they start (first_query)");
    CHECK(refusal({.first_query = -1}) == "score: first_query is -1; it must not be negative");
}

TEST_CASE("score refuses rungs that are no whole number of coordinates, naming rung and dimension")
{
    layer<float> const x{{.dim = 20, .value_dim = 32}};
    CHECK(error_text<invalid_argument>([&] { static_cast<void>(scored(x, paper_ratios)); })
          == "ratio_set: rung 1 (1/8) of key dimension 20 is not a whole number of coordinates");
    layer<float> const y{{.dim = 32, .value_dim = 20}};
    CHECK(error_text<invalid_argument>([&] { static_cast<void>(scored(y, paper_ratios)); })
          == "ratio_set: rung 1 (1/8) of value dimension 20 is not a whole number of coordinates");
}
