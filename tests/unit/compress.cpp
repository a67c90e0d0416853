// What compress promises of real prompts: losses, scratch, every head dimension, degenerate numbers. That it is a prompt of one
// layer, bit for bit, is in prompt.cpp; what it promises like prompt, reader and fold in pipelines.cpp.
#include <mdkv/compress.hpp>

#include <mdkv/mdkv.hpp>

#include "support/cases.hpp"
#include "support/host.hpp"
#include "support/packed.hpp"

#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace
{

using namespace mdkv;
using support::error_text;
using support::tensor;
using support::text;
using host = cpu::backend;

/// The paper's preset with another window, another set, and losses of each token alone.
preset paper(index_t window, ratio_set const& ratios = paper_ratios)
{
    preset p        = presets::paper;
    p.window        = window;
    p.ratios        = ratios;
    p.pooling.width = 1;
    return p;
}

template <class T>
compress_report compressed(text<T> const& x, preset const& p, budget limit, cpu::cache<T>&& cache = {})
{
    compress_report report;
    support::run([&](host const& on) { report = compress(on, x.whole(0), p, limit, cache); });
    CHECK(report.resident_bytes <= report.budget_bytes);
    CHECK(std::isfinite(report.chosen.loss));
    return report;
}

} // namespace

TEST_CASE_TEMPLATE("every head dimension compresses, with keys and values of different ones", T, float, half, bfloat16)
{
    for (auto const& [dim, value_dim] : {std::pair<index_t, index_t>{32, 32}, {40, 40}, {56, 56}, {64, 128}, {80, 80},
             {96, 96}, {128, 128}, {192, 128}, {256, 256}, {576, 512}})
    {
        CAPTURE(dim);
        text<T> const x{{.tokens = 90, .heads = 1, .group = 3, .dims = {dim, value_dim}, .last = 3}};
        CHECK(compressed(x, paper(3), budget::fraction(2, 3)).status == compress_status::compressed);
    }
    for (auto const& [heads, group, dim] : {std::array<index_t, 3>{4, 8, 512}, {2, 6, 256}}) // Gemma 4, Qwen 3.5
    {
        text<T> const x{{.layers = 2, .tokens = 300, .heads = heads, .group = group, .dims = {dim, dim}}};
        for (preset const& p : {presets::best, presets::any_question})
        {
            auto const made      = support::by_prompt(x, p, budget::fraction(1, 8)).caches;
            auto const bytes     = made[0].arena.size() + made[1].arena.size();
            auto const allocated = static_cast<std::size_t>(x.layer_bytes() / 4);
            CHECK(bytes <= allocated);
            CHECK(bytes > allocated * 9 / 10);
        }
    }
    for (auto const& [dim, ratios] : {std::pair{1, ratio_set{drop, full}}, {7, ratio_set{drop, fraction(2, 7), full}},
             {7, ratio_set{drop, fraction(1, 4), full}.rounded(rounding::down)}})
    {
        text<T> const x{{.tokens = 48, .dims = {dim, dim}}};
        CHECK(compressed(x, paper(8, ratios), budget::fraction(1, 2)).status == compress_status::compressed);
    }
}

TEST_CASE("one candidate, fewer candidates than dimensions, equal tokens, zero keys and zero values are compressed")
{
    for (index_t const tokens : {1, 2, 20})
    {
        text<float> const x{{.tokens = tokens + 2, .last = 2}};
        for (index_t const kept : {index_t{0}, tokens / 2}) { compressed(x, paper(2), budget::kv_size(2 + kept)); }
    }
    for (int const which : {0, 1, 2})
    {
        CAPTURE(which);
        text<float> x{{.tokens = 68}};
        auto const equal = [](tensor<float, 3>& rows, bool zero) {
            for (index_t i = 0; i < rows.count(); ++i)
            {
                index_t const h = i / rows.extent(2) / 68, t = i / rows.extent(2) % 68, d = i % rows.extent(2);
                rows.set(zero ? 0.0F : rows.get(h, 5, d), h, t, d);
            }
        };
        if (which != 1) { equal(x.all[0].keys, which == 2); }
        if (which != 2) { equal(x.all[0].values, which == 1); }
        compressed(x, paper(8), budget::kv_size(30));
    }
}

TEST_CASE("keys and values of exact low rank are kept with next to no loss at a fraction of the bytes")
{
    text<float> const x{{.tokens = 608, .heads = 1, .dims = {64, 64}, .rank = 8}};
    compress_report const report = compressed(x, paper(8), budget::fraction(1, 4));
    double const dropping_all    = compressed(x, paper(8), budget::kv_size(8)).chosen.loss;
    CAPTURE(report.chosen.loss);
    CHECK(dropping_all > 0);
    CHECK(report.chosen.loss <= 1e-3 * dropping_all);
    CHECK(report.chosen.tokens[0] == 0);
}

TEST_CASE("the scratch of compress grows by bytes per token, not by query rows per token")
{
    auto const bytes = [](index_t tokens, index_t queries) {
        text<half> const x{{.tokens = tokens, .group = 4, .dims = {32, 32}, .last = 0}};
        auto rows    = x.part(0, 0, tokens);
        rows.queries = slice<1>(rows.queries, tokens - queries, queries);
        cpu::cache<half> cache;
        return support::run([&](host const& on) {
            preset p  = presets::paper;
            p.queries = queries;
            compress(on, rows, p, budget::kv_size(512), cache);
        });
    };
    index_t const one = bytes(4000, 32);
    index_t const two = bytes(8000, 32);
    // Losses, pooled losses, rungs and the allocator's copies; 8 times more query rows do not appear.
    CHECK(two - one <= index_t{4000} * 2 * (3 * 4 * index_t{sizeof(float)} + 32));
    CHECK(bytes(8000, 256) - bytes(4000, 256) <= two - one);
}

TEST_CASE("compress refuses too few queries for a preset that replays, and more tokens than kept positions can number")
{
    text<half> const x{{.tokens = 30, .last = 8}};
    cpu::cache<half> cache;
    auto const refusal = [&](prompt_rows<host, half> const& rows, preset const& p) {
        return error_text<error>(
            [&] { support::run([&](host const& on) { compress(on, rows, p, budget::kv_size(64), cache); }); });
    };
    CHECK(refusal(x.whole(0), presets::best)
          == "compress: queries [H*G, Q, D] has Q = 8; preset \"best\" replays the queries of all 30 tokens");
    // One row seen 2^31 times: the sizes are huge, the memory is not.
    tensor<half, 3> const one{{1, 1, 8}};
    auto const rows = [&](index_t n) { return in(host{}, one.data(), {1, n, 8}, {0, 0, 1}); };
    CHECK(refusal({rows(1), rows((index_t{1} << 31) + 32), rows((index_t{1} << 31) + 32)}, presets::paper)
          == "compress: 2147483680 + 0 tokens are more than the limit of 2147483647");
}

TEST_CASE("what the losses promise is what attention pays: the window's own queries change by no more than the loss")
{
    // The loss bounds the change if the other tokens stay; together they interact, so the bound is met within a factor.
    text<float> const x{{.tokens = 208, .dims = {32, 32}, .last = 8}};
    for (int const percent : {15, 30, 60})
    {
        CAPTURE(percent);
        cpu::cache<float> small, whole;
        support::run([&](host const& on) { compress(on, x.whole(0), paper(8), budget::fraction(1, 1), whole); });
        compress_report report;
        support::run([&](host const& on) {
            report = compress(on, x.whole(0), paper(8), budget::fraction(percent, 100), small);
        });
        tensor<float, 3> got{{4, 8, 32}}, want{{4, 8, 32}};
        tensor<float, 2> lse{{4, 8}};
        double change = 0;
        for (index_t i = 0; i < 8; ++i)
        {
            auto const query = x.part(0, 200 + i, 1).queries;
            support::run([&](host const& on) {
                attend(
                    on, query, std::as_const(small).view(), {}, slice<1>(got.out(), i, 1), slice<1>(lse.out(), i, 1));
                attend(
                    on, query, std::as_const(whole).view(), {}, slice<1>(want.out(), i, 1), slice<1>(lse.out(), i, 1));
            });
        }
        auto const is = got.elements(), was = want.elements();
        for (std::size_t row = 0; row < is.size(); row += 32)
        {
            double square = 0;
            for (std::size_t d = row; d < row + 32; ++d) { square += std::pow(double{is[d]} - double{was[d]}, 2); }
            change += std::sqrt(square);
        }
        CAPTURE(change);
        CAPTURE(report.chosen.loss);
        CHECK(change > 0);
        CHECK(change <= 2 * report.chosen.loss);
    }
}
