#include <mdkv/compress.hpp>

#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/prompt.hpp>
#include <mdkv/recompress.hpp>
#include <mdkv/stages/allocate.hpp>
#include <mdkv/stages/basis.hpp>
#include <mdkv/stages/channels.hpp>
#include <mdkv/stages/pack.hpp>
#include <mdkv/stages/pool.hpp>

#include "support/compare.hpp"
#include "support/failing_resource.hpp"
#include "support/host.hpp"
#include "support/layer.hpp"
#include "support/oracle.hpp"
#include "support/packed.hpp"
#include "support/random.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace
{

using namespace mdkv;
using support::error_text;
using support::layer;
using support::layer_sizes;
using support::placement;
using support::tensor;
using support::worst_error;
using host = cpu::backend;

/// Parts of a preset, and a budget.
struct options
{
    budget limit = budget::kv_size(128);
    pool_options pooling{};
    projection_charge charge = projection_charge::if_better;
    float scale              = 0.0F;
};

template <class T>
preset preset_of(layer<T> const& x, ratio_set const& ratios, options const& choice)
{
    index_t const queries = std::max<index_t>(x.sizes.queries, 1);
    return {.name = "test",
        .ratios   = ratios,
        .pooling  = choice.pooling,
        .charge   = choice.charge,
        .window   = x.sizes.window,
        .queries  = queries,
        .question = queries,
        .scale    = choice.scale};
}

/// A layer's tokens and window as one prompt.
template <class T>
struct whole_prompt
{
    tensor<T, 3> queries, keys, values;

    explicit whole_prompt(layer<T> const& x, placement how = {})
        : queries{placed(x.queries, 0, x.queries, how)}
        , keys{placed(x.keys, x.window_keys.extent(1), x.window_keys, how)}
        , values{placed(x.values, x.window_values.extent(1), x.window_values, how)}
    {}

    [[nodiscard]] prompt_rows<host, T> rows() const { return {queries.in(), keys.in(), values.in()}; }

private:
    /// The rows of `first`, then n of `second`.
    static tensor<T, 3> placed(tensor<T, 3> const& first, index_t n, tensor<T, 3> const& second, placement how)
    {
        tensor<T, 3> all{{first.extent(0), first.extent(1) + n, first.extent(2)}, how};
        for (index_t h = 0; h < all.extent(0); ++h)
        {
            for (index_t i = 0; i < all.extent(1); ++i)
            {
                bool const in_first = i < first.extent(1);
                for (index_t d = 0; d < all.extent(2); ++d)
                {
                    all.set(in_first ? first.get(h, i, d) : second.get(h, i - first.extent(1), d), h, i, d);
                }
            }
        }
        return all;
    }
};

/// Compresses in one call.
template <class T>
compress_report compressed(layer<T> const& x, ratio_set const& ratios, options const& choice,
    cpu::cache<T>& destination, cpu::executor_ref threads = {}, placement how = {})
{
    whole_prompt<T> const all{x, how};
    compress_report report;
    support::run(
        [&](host const& on) {
            report = compress(on, all.rows(), preset_of(x, ratios, choice), choice.limit, destination);
        },
        threads);
    return report;
}

/// Everything that can be read from a cache.
struct contents
{
    std::vector<std::byte> arena;
    std::vector<head_entry> heads;
    cache_layout layout;
    index_t appended = 0;

    friend bool operator==(contents const&, contents const&) = default;
};

template <class T>
contents contents_of(cpu::cache<T> const& cache)
{
    auto const view = cache.view();
    return {{view.arena, view.arena + view.arena_bytes}, {view.heads, view.heads + view.layout.heads}, view.layout,
        cache.appended()};
}

/// Key and value of a token of an uncompressed run, read by the layout's description: keys in tiles of 16 tokens [D, 16],
/// the last tile as narrow as what is left; values one token after another.
template <class V, class T = std::remove_const_t<V>>
std::pair<std::vector<T>, std::vector<T>> exact_token(
    cache_view<V, space::host> const& view, index_t head, index_t token)
{
    run_entry const& run   = view.heads[head].exact;
    head_dims const dims   = view.layout.dims;
    index_t const tile     = token / 16;
    index_t const width    = std::min<index_t>(16, run.tokens - tile * 16);
    auto const* const keys = reinterpret_cast<T const*>(view.arena + run.keys) + tile * 16 * dims.keys;
    auto const* const rows = reinterpret_cast<T const*>(view.arena + run.values) + token * dims.values;
    std::pair<std::vector<T>, std::vector<T>> found;
    for (index_t d = 0; d < dims.keys; ++d) { found.first.push_back(keys[d * width + token % 16]); }
    found.second.assign(rows, rows + dims.values);
    return found;
}

/// How many elements of token `row` of (keys, values) differ from what the exact run holds at `place`, in bits.
template <class V, class T>
int differing(cache_view<V, space::host> const& view, index_t head, index_t place, tensor<T, 3> const& keys,
    tensor<T, 3> const& values, index_t row)
{
    auto const [k, v] = exact_token(view, head, place);
    int different     = 0;
    for (index_t d = 0; d < keys.extent(2); ++d)
    {
        T const want = keys.get(head, row, d);
        different += std::memcmp(&k[static_cast<std::size_t>(d)], &want, sizeof(T)) == 0 ? 0 : 1;
    }
    for (index_t d = 0; d < values.extent(2); ++d)
    {
        T const want = values.get(head, row, d);
        different += std::memcmp(&v[static_cast<std::size_t>(d)], &want, sizeof(T)) == 0 ? 0 : 1;
    }
    return different;
}

/// A set of a number of rungs that only the run knows: compress is compiled anew for every number that is known before.
ratio_set set_of(std::vector<rung> const& rungs, rounding how = rounding::exact)
{
    return ratio_set{rungs, how};
}

index_t full_bytes(layer_sizes const& s, std::size_t element_bytes)
{
    return s.heads * (s.tokens + s.window) * (s.dim + s.value_dim) * static_cast<index_t>(element_bytes);
}

} // namespace

TEST_CASE_TEMPLATE("compress is its stages one after another, bit for bit", T, float, half, bfloat16)
{
    layer<T> const x{{.heads = 2, .tokens = 200, .dim = 64, .value_dim = 40}};
    for (index_t const width : {1, 7})
    {
        CAPTURE(width);
        options choice{.limit = budget::fraction(1, 4)};
        choice.pooling.width = width;
        cpu::cache<T> cache;
        compress_report const report = compressed(x, paper_ratios, choice, cache);

        tensor<float, 3> key_basis{{2, 64, 64}}, value_basis{{2, 40, 40}}, loss{{2, 4, 200}}, pooled{{2, 4, 200}};
        tensor<float, 2> key_energy{{2, 64}}, value_energy{{2, 40}};
        tensor<std::uint8_t, 2> rung{{2, 200}};
        tensor<index_t, 1> limit{{1}};
        tensor<allocation, 1> chosen{{1}};
        limit.set(report.budget_bytes - report.window_bytes, 0);
        support::run([&](host const& on) { fit_basis(on, x.keys.in(), key_basis.out(), key_energy.out()); });
        support::run([&](host const& on) { fit_basis(on, x.values.in(), value_basis.out(), value_energy.out()); });
        support::run([&](host const& on) {
            score(on, x.queries.in(), x.keys.in(), x.values.in(), x.window_keys.in(), key_basis.in(), value_basis.in(),
                paper_ratios, {}, loss.out());
        });
        support::run([&](host const& on) { pool(on, loss.in(), choice.pooling, pooled.out()); });
        rung_costs const costs{paper_ratios, {64, 40}, sizeof(T)};
        support::run([&](host const& on) {
            allocate(on, {pooled.in(), rung.out()}, costs, limit.in(), {.charge = choice.charge}, chosen.out());
        });
        cache_layout const layout{paper_ratios, 2, 8, {64, 40}};
        index_t bytes = 0;
        support::run([&](host const& on) { bytes = packed_bytes<T>(on, rung.in(), layout); });
        cpu::cache<T> by_hand{layout, bytes};
        support::run([&](host const& on) {
            pack(on, x.keys.in(), x.values.in(), x.window_keys.in(), x.window_values.in(), key_basis.in(),
                value_basis.in(), rung.in(), by_hand.view());
        });
        CHECK(contents_of(cache) == contents_of(by_hand));
        CHECK(report.chosen.loss == chosen.get(0).loss);
        CHECK(report.chosen.tokens == chosen.get(0).tokens);
        CHECK(report.chosen.multiplier == chosen.get(0).multiplier);
        CHECK(report.resident_bytes == by_hand.arena_bytes());
    }
}

TEST_CASE_TEMPLATE("queries of another element than the keys give the cache of the same numbers in the keys' element",
    T, half, bfloat16)
{
    layer<T> const x{{.heads = 2, .tokens = 200, .dim = 64, .value_dim = 40}};
    auto const queries = support::converted<float>(x.queries);
    whole_prompt<T> const all{x};
    for (ratio_set const& ratios : {ratio_set{paper_ratios}, ratio_set{bit_ratios}})
    {
        options const choice{.limit = budget::fraction(1, 4)};
        cpu::cache<T> want;
        compress_report const wanted = compressed(x, ratios, choice, want);
        cpu::cache<T> got;
        compress_report report;
        support::run([&](host const& on) {
            prompt_rows<host, T, float> const rows{queries.in(), all.keys.in(), all.values.in()};
            report = compress(on, rows, preset_of(x, ratios, choice), choice.limit, got);
        });
        CHECK(contents_of(got) == contents_of(want));
        CHECK(report.chosen.loss == wanted.chosen.loss);
    }
}

TEST_CASE("every part of a preset reaches its stage: weights, uniform queries, the loss of codes, adaptive pooling")
{
    layer<half> const x{{.heads = 2, .tokens = 200, .dim = 64, .value_dim = 40}};
    auto const ratios  = set_of({drop, fraction(1, 4).as(storage::int8), full_int4, full_int8, full});
    preset p           = preset_of(x, ratios, {.pooling = {5, pooling::adaptive}});
    p.question         = 3;
    p.early_weight     = 0.25F;
    p.uniform          = 0.5F;
    index_t const rows = x.queries.in().extent(1);
    tensor<float, 1> weights{{rows}};
    for (index_t q = 0; q < rows; ++q) { weights.set(q < rows - 3 ? 0.25F : 1.0F, q); }
    whole_prompt<half> const all{x};
    cpu::cache<half> cache;
    compress_report report;
    support::run([&](host const& on) { report = compress(on, all.rows(), p, budget::fraction(1, 5), cache); });
    CHECK(report.chosen.tokens[2] > 0);

    tensor<float, 3> key_basis{{2, 64, 64}}, value_basis{{2, 40, 40}};
    tensor<float, 3> loss{{2, 5, 200}}, pooled{{2, 5, 200}};
    tensor<float, 2> key_energy{{2, 64}}, value_energy{{2, 40}};
    tensor<std::uint8_t, 2> rung{{2, 200}};
    tensor<index_t, 1> limit{{1}};
    tensor<allocation, 1> chosen{{1}};
    limit.set(report.budget_bytes - report.window_bytes, 0);
    support::run([&](host const& on) { fit_basis(on, x.keys.in(), key_basis.out(), key_energy.out()); });
    support::run([&](host const& on) { fit_basis(on, x.values.in(), value_basis.out(), value_energy.out()); });
    tensor<float, 3> channels{{2, 3, 64}};
    support::run([&](host const& on) { fit_channels(on, x.queries.in(), x.keys.in(), channels.out()); });
    score_options<host> scoring{.query_weights = weights.in()};
    scoring.channels        = channels.in();
    scoring.uniform_queries = 0.5F * (3 + 0.25F * static_cast<float>(rows - 3));
    support::run([&](host const& on) {
        score(on, x.queries.in(), x.keys.in(), x.values.in(), x.window_keys.in(), key_basis.in(), value_basis.in(),
            ratios, scoring, loss.out());
    });
    support::run([&](host const& on) { pool(on, loss.in(), p.pooling, pooled.out()); });
    rung_costs const costs{ratios, {64, 40}, 2};
    support::run([&](host const& on) {
        allocate(on, {pooled.in(), rung.out()}, costs, limit.in(), {.charge = p.charge}, chosen.out());
    });
    cache_layout const layout{ratios, 2, 8, {64, 40}};
    index_t bytes = 0;
    support::run([&](host const& on) { bytes = packed_bytes<half>(on, rung.in(), layout); });
    cpu::cache<half> by_hand{layout, bytes};
    support::run([&](host const& on) {
        pack(on, x.keys.in(), x.values.in(), x.window_keys.in(), x.window_values.in(), key_basis.in(), value_basis.in(),
            rung.in(), by_hand.view(), channels.in());
    });
    CHECK(contents_of(cache) == contents_of(by_hand));
}

TEST_CASE("resident bytes are those of the buffer and never exceed the budget, whatever the budget and the ratio set")
{
    layer<half> const x{{.heads = 3, .tokens = 150, .window = 8, .dim = 32, .value_dim = 64}};
    index_t const whole = full_bytes(x.sizes, 2);
    support::source random{"compress budgets"};
    auto const check = [&](auto const& ratios) {
        for (int i = 0; i < 60; ++i)
        {
            index_t const window = 3 * 8 * 96 * 2;
            index_t const bytes  = window + random.below(whole - window + 1000);
            CAPTURE(bytes);
            cpu::cache<half> cache;
            compress_report const report = compressed(x, ratios, {.limit = budget::bytes(bytes)}, cache);
            CHECK(report.budget_bytes == bytes);
            CHECK(report.resident_bytes == cache.arena_bytes());
            CHECK(report.resident_bytes <= bytes);
            CHECK(report.full_bytes == whole);
            CHECK(report.window_bytes == window);
            bool const full_rung = cache.layout().full_rung < cache.layout().rungs;
            CHECK((report.status == compress_status::uncompressed) == (full_rung && bytes >= whole));
            if (report.status == compress_status::compressed)
            {
                index_t tokens = 0;
                for (index_t const t : report.chosen.tokens) { tokens += t; }
                CHECK(tokens == 3 * 150);
                CHECK(report.resident_bytes
                      == report.window_bytes + report.chosen.token_bytes + report.chosen.charged_bytes);
            }
        }
    };
    check(paper_ratios);
    check(evict_ratios);
    check(ratio_set{drop, fraction(1, 4)});
    check(set_of({drop, fraction(1, 16), fraction(1, 8), fraction(1, 4), fraction(1, 2), full}));
    check(bit_ratios);
    check(set_of({drop, fraction(1, 4).as(storage::int8), fraction(3, 4).as(storage::int8), full_int8, full}));
}

TEST_CASE("raising the budget never raises the loss")
{
    layer<float> const x{{.tokens = 150}};
    index_t const whole = full_bytes(x.sizes, 4);
    auto const check    = [&](auto const& ratios) {
        double before = std::numeric_limits<double>::infinity();
        for (int percent = 20; percent <= 100; percent += 2)
        {
            CAPTURE(percent);
            cpu::cache<float> cache;
            compress_report const report =
                compressed(x, ratios, {.limit = budget::bytes(whole * percent / 100)}, cache);
            CHECK(report.chosen.loss <= before);
            before = report.chosen.loss;
        }
        CHECK(before == 0.0);
    };
    check(evict_ratios);
    check(bit_ratios);
}

TEST_CASE_TEMPLATE("a budget that holds everything stores every bit of it, and no projection", T, float, half, bfloat16)
{
    layer<T> const x{{.heads = 3, .tokens = 53, .window = 9, .dim = 40, .value_dim = 24}};
    for (budget const limit : {budget::fraction(1, 1), budget::kv_size(62), budget::kv_size(10000),
             budget::fraction(3, 1), budget::bytes(full_bytes(x.sizes, sizeof(T)))})
    {
        cpu::cache<T> cache;
        compress_report const report = compressed(x, paper_ratios, {.limit = limit}, cache);
        CHECK(report.status == compress_status::uncompressed);
        CHECK(report.chosen.status == allocation_status::everything_kept);
        CHECK(report.chosen.tokens[3] == 3 * 53);
        CHECK(report.resident_bytes == full_bytes(x.sizes, sizeof(T)));
        auto const view = cache.view();
        int different   = 0;
        for (index_t h = 0; h < 3; ++h)
        {
            REQUIRE(view.heads[h].exact.tokens == 62);
            CHECK(view.heads[h].key_columns == 0);
            for (index_t t = 0; t < 53; ++t) { different += differing(view, h, t, x.keys, x.values, t); }
            for (index_t t = 0; t < 9; ++t)
            {
                different += differing(view, h, 53 + t, x.window_keys, x.window_values, t);
            }
        }
        CHECK(different == 0);
    }
}

TEST_CASE("one byte less than everything is no longer everything")
{
    layer<half> const x{{.tokens = 53}};
    cpu::cache<half> cache;
    compress_report const report =
        compressed(x, paper_ratios, {.limit = budget::bytes(full_bytes(x.sizes, 2) - 1)}, cache);
    CHECK(report.status == compress_status::compressed);
    CHECK(report.resident_bytes < full_bytes(x.sizes, 2));
}

TEST_CASE("attending over an uncompressed cache is exact attention")
{
    layer<float> const x{{.heads = 2, .group = 3, .tokens = 53, .window = 9}};
    cpu::cache<float> cache;
    compressed(x, paper_ratios, {.limit = budget::fraction(1, 1)}, cache);
    tensor<float, 2> queries{{6, 32}}, output{{6, 32}};
    tensor<float, 1> lse{{6}};
    for (index_t g = 0; g < 6; ++g)
    {
        for (index_t d = 0; d < 32; ++d) { queries.set(x.queries.get(g, 7, d), g, d); }
    }
    support::run(
        [&](host const& on) { attend(on, queries.in(), std::as_const(cache).view(), {}, output.out(), lse.out()); });
    worst_error error;
    for (index_t h = 0; h < 2; ++h)
    {
        auto const keys   = support::stacked(support::rows_of(x.keys, h), support::rows_of(x.window_keys, h));
        auto const values = support::stacked(support::rows_of(x.values, h), support::rows_of(x.window_values, h));
        support::oracle::matrix q{3, 32};
        for (index_t g = 0; g < 3; ++g)
        {
            for (index_t d = 0; d < 32; ++d) { q(g, d) = static_cast<support::real>(queries.get(h * 3 + g, d)); }
        }
        auto const scale = static_cast<support::real>(x.scale());
        auto const want  = support::oracle::attention(q, keys, values, scale);
        auto const norms = support::oracle::softmax(q, keys, scale, keys.rows).lse;
        for (index_t g = 0; g < 3; ++g)
        {
            for (index_t d = 0; d < 32; ++d)
            {
                error.add(static_cast<long double>(output.get(h * 3 + g, d)), want(g, d), 1);
            }
            error.add(static_cast<long double>(lse.get(h * 3 + g)), norms[static_cast<std::size_t>(g)], 10);
        }
    }
    CAPTURE(error);
    CHECK(error.within(1e-5));
}

TEST_CASE(
    "a model's own scale told to compress is that of scores, attention and folds, and needs to be told nowhere else")
{
    layer<float> const x{{.heads = 2, .group = 3, .tokens = 90, .window = 9}};
    for (float const scale : {0.0F, 0.5F})
    {
        for (auto const limit : {budget::fraction(1, 1), budget::fraction(1, 2)})
        {
            options choice{.limit = limit};
            choice.scale = scale;
            cpu::cache<float> cache, folded;
            compressed(x, bit_ratios, choice, cache);
            CHECK(cache.layout().scale == scale);
            tensor<float, 2> queries{{6, 32}}, output{{6, 32}};
            tensor<float, 1> lse{{6}};
            for (index_t g = 0; g < 6; ++g)
            {
                for (index_t d = 0; d < 32; ++d) { queries.set(x.queries.get(g, 7, d), g, d); }
            }
            auto const attend_with = [&](attend_options const& given) {
                support::run([&](host const& on) {
                    attend(on, queries.in(), std::as_const(cache).view(), given, output.out(), lse.out());
                });
                return output.elements();
            };
            auto const got = attend_with({});
            CHECK(support::same_bits(attend_with({.scale = scale}), got));
            double const used = scale > 0 ? double{scale} : x.scale();
            worst_error error;
            for (index_t g = 0; g < 6; ++g)
            {
                std::vector<double> query;
                for (index_t d = 0; d < 32; ++d) { query.push_back(double{queries.get(g, d)}); }
                support::naive_attention const want{
                    support::reconstructed_tokens(std::as_const(cache).view(), g / 3), query, 32, used};
                for (index_t c = 0; c < 32; ++c)
                {
                    error.add(output.get(g, c), want.output[static_cast<std::size_t>(c)], 1);
                }
            }
            CAPTURE(error);
            CHECK(error.within(2e-2)); // of integer products
            folded                 = cache.copy();
            auto const limit_bytes = budget::bytes(cache.arena_bytes() - 500);
            auto const fold        = [&](float given, cpu::cache<float>& to) {
                support::run([&](host const& on) {
                    recompress(on, slice<1>(x.queries.in(), 0, 4), bit_ratios,
                               recompress_options<host>{.limit = limit_bytes, .scale = given}, to);
                });
            };
            fold(0, folded);
            CHECK(folded.layout().scale == scale);
            cpu::cache<float> again = cache.copy();
            fold(scale, again);
            CHECK(contents_of(again) == contents_of(folded));
        }
    }
}

TEST_CASE("a view of the caller's memory gets the bytes of an owner, if its layout and scale are those of the call")
{
    layer<float> const x{{.heads = 2, .group = 1, .tokens = 60, .window = 5}};
    whole_prompt<float> const all{x};
    preset const p = preset_of(x, bit_ratios, {.scale = 0.5F});
    cpu::cache<float> owner;
    compressed(x, bit_ratios, {.limit = budget::fraction(1, 2), .scale = 0.5F}, owner);
    auto const into = [&](float scale, index_t bytes) {
        cpu::cache<float> cache{{bit_ratios, 2, 5, {32, 32}, scale}, bytes};
        auto place             = cache.view();
        std::string const text = error_text<error>(
            [&] { support::run([&](host const& on) { compress(on, all.rows(), p, budget::fraction(1, 2), place); }); });
        if (text == "threw nothing") { CHECK(contents_of(cache) == contents_of(owner)); }
        return text;
    };
    CHECK(into(0.5F, owner.arena_bytes()) == "threw nothing");
    CHECK(into(0.0F, owner.arena_bytes()) == "prompt::pack: to.layout is not that of the preset and the layers");
    CHECK(into(0.5F, owner.arena_bytes() - 1).starts_with("pack: the arena holds "));
}

TEST_CASE("the window is kept bit for bit at every budget, after the full tokens in ascending order")
{
    layer<half> const x{{.heads = 2, .tokens = 120, .window = 11, .dim = 40, .value_dim = 40}};
    for (budget const limit : {budget::kv_size(11), budget::kv_size(30), budget::fraction(1, 2)})
    {
        cpu::cache<half> cache;
        compressed(x, paper_ratios, {.limit = limit}, cache);
        auto const view = cache.view();
        int different   = 0;
        for (index_t h = 0; h < 2; ++h)
        {
            index_t const kept = view.heads[h].exact.tokens - 11;
            REQUIRE(kept >= 0);
            for (index_t t = 0; t < 11; ++t)
            {
                different += differing(view, h, kept + t, x.window_keys, x.window_values, t);
            }
            index_t place = 0; // every kept token is some prompt token, and they ascend
            for (index_t t = 0; t < 120 && place < kept; ++t)
            {
                if (differing(view, h, place, x.keys, x.values, t) == 0) { ++place; }
            }
            CHECK(place == kept);
        }
        CHECK(different == 0);
    }
}

TEST_CASE("drop or keep equals keeping the tokens of largest pooled loss")
{
    for (index_t const width : {1, 7})
    {
        layer<float> const x{{.heads = 2, .tokens = 100, .window = 4}};
        options choice{.limit = budget::kv_size(4 + 20)};
        choice.pooling.width = width;
        cpu::cache<float> cache;
        compress_report const report = compressed(x, evict_ratios, choice, cache);
        CHECK(report.chosen.tokens[1] == 40);

        struct candidate
        {
            float loss;
            index_t head, token;
        };
        tensor<float, 3> loss{{2, 2, 100}};
        support::run([&](host const& on) {
            score(on, x.queries.in(), x.keys.in(), x.values.in(), x.window_keys.in(), x.key_basis.in(),
                x.value_basis.in(), evict_ratios, {}, loss.out());
        });
        std::vector<candidate> order;
        for (index_t h = 0; h < 2; ++h)
        {
            for (index_t t = 0; t < 100; ++t)
            {
                float most = 0;
                for (index_t j = std::max<index_t>(0, t - width / 2); j <= std::min<index_t>(99, t + width / 2); ++j)
                {
                    most = std::max(most, loss.get(h, 0, j));
                }
                order.push_back({most, h, t});
            }
        }
        std::stable_sort(
            order.begin(), order.end(), [](candidate const& a, candidate const& b) { return a.loss > b.loss; });
        std::array<index_t, 2> kept{};
        int different = 0;
        order.resize(40);
        std::sort(order.begin(), order.end(), [](candidate const& a, candidate const& b) {
            return a.head != b.head ? a.head < b.head : a.token < b.token;
        });
        auto const view = cache.view();
        for (candidate const& c : order)
        {
            different += differing(view, c.head, kept[static_cast<std::size_t>(c.head)]++, x.keys, x.values, c.token);
        }
        CHECK(different == 0);
        CHECK(view.heads[0].exact.tokens == kept[0] + 4);
    }
}

TEST_CASE_TEMPLATE("every head dimension compresses, with keys and values of different ones", T, float, half, bfloat16)
{
    for (auto const& [dim, value_dim] : {std::pair<index_t, index_t>{32, 32}, {40, 40}, {56, 56}, {64, 128}, {80, 80},
             {96, 96}, {128, 128}, {192, 128}, {256, 256}, {576, 512}})
    {
        CAPTURE(dim);
        layer<T> const x{
            {.heads = 1, .group = 3, .queries = 3, .tokens = 300, .window = 3, .dim = dim, .value_dim = value_dim}};
        cpu::cache<T> cache;
        compress_report const report = compressed(x, paper_ratios, {.limit = budget::fraction(2, 3)}, cache);
        CHECK(report.status == compress_status::compressed);
        CHECK(report.resident_bytes <= report.budget_bytes);
        CHECK(std::isfinite(report.chosen.loss));
    }
    auto const half_of = [](layer<T> const& x, auto const& ratios) {
        cpu::cache<T> cache;
        compress_report const report = compressed(x, ratios, {.limit = budget::fraction(1, 2)}, cache);
        return report.status == compress_status::compressed && report.resident_bytes == cache.arena_bytes()
               && report.resident_bytes <= report.budget_bytes;
    };
    CHECK(half_of(layer<T>{{.tokens = 40, .dim = 1, .value_dim = 1}}, set_of({drop, full})));
    layer<T> const seven{{.tokens = 40, .dim = 7, .value_dim = 7}};
    CHECK(half_of(seven, set_of({drop, fraction(2, 7), full})));
    CHECK(half_of(seven, set_of({drop, fraction(1, 4), full}, rounding::down)));
}

TEST_CASE("keys and values of exact low rank are kept with next to no loss at a fraction of the bytes")
{
    layer<float> const x{{.heads = 1, .tokens = 600, .window = 8, .dim = 64, .value_dim = 64, .rank = 8}};
    options choice{.limit = budget::fraction(1, 4)};
    choice.pooling.width = 1;
    cpu::cache<float> cache;
    compress_report const report = compressed(x, paper_ratios, choice, cache);
    tensor<float, 3> loss{{1, 2, 600}};
    support::run([&](host const& on) {
        score(on, x.queries.in(), x.keys.in(), x.values.in(), x.window_keys.in(), x.key_basis.in(), x.value_basis.in(),
            evict_ratios, {}, loss.out());
    });
    double dropping_all = 0;
    for (index_t t = 0; t < 600; ++t) { dropping_all += static_cast<double>(loss.get(0, 0, t)); }
    CAPTURE(report.chosen.loss);
    CHECK(report.chosen.loss <= 1e-3 * dropping_all);
    CHECK(report.chosen.tokens[0] == 0);
}

TEST_CASE("the scratch of compress grows by bytes per token, not by query rows per token")
{
    auto const bytes = [](index_t tokens, index_t queries) {
        layer<half> const x{{.heads = 2, .group = 4, .queries = queries, .tokens = tokens, .window = 32}};
        whole_prompt<half> const all{x};
        cpu::cache<half> cache;
        return support::run([&](host const& on) {
            preset p  = presets::paper;
            p.queries = queries;
            static_cast<void>(compress(on, all.rows(), p, budget::kv_size(512), cache));
        });
    };
    index_t const one = bytes(10000, 32);
    index_t const two = bytes(20000, 32);
    // Losses, pooled losses, rungs and the allocator's copies; 8 times more query rows do not appear.
    CHECK(two - one <= index_t{10000} * 2 * (3 * 4 * index_t{sizeof(float)} + 32));
    CHECK(bytes(20000, 256) - bytes(10000, 256) <= two - one);
}

TEST_CASE("an empty prompt and a model without heads are compressed to what they are")
{
    layer<half> const window_only{{.heads = 2, .tokens = 0, .window = 8}};
    cpu::cache<half> cache;
    compress_report report = compressed(window_only, paper_ratios, {.limit = budget::kv_size(8)}, cache);
    CHECK(report.status == compress_status::uncompressed);
    CHECK(report.resident_bytes == 2 * 8 * 64 * 2);
    int different = 0;
    for (index_t t = 0; t < 8; ++t)
    {
        different +=
            differing(std::as_const(cache).view(), 1, t, window_only.window_keys, window_only.window_values, t);
    }
    CHECK(different == 0);

    layer<half> const nothing{{.heads = 2, .queries = 0, .tokens = 0, .window = 0}};
    report = compressed(nothing, paper_ratios, {.limit = budget::bytes(0)}, cache);
    CHECK(report.resident_bytes == 0);
    CHECK(cache.arena_bytes() == 0);

    layer<half> const no_heads{{.heads = 0, .tokens = 10}};
    report = compressed(no_heads, paper_ratios, {}, cache);
    CHECK(report.resident_bytes == 0);
    CHECK(cache.layout().heads == 0);
}

TEST_CASE("a prompt shorter than the window and one just as long are kept whole, without any projection")
{
    for (index_t const tokens : {3, 8})
    {
        layer<half> const x{{.heads = 2, .queries = 3, .tokens = 0, .window = tokens}};
        cpu::cache<half> cache;
        compress_report const report = compressed(x, paper_ratios, {.limit = budget::kv_size(8)}, cache);
        CHECK(report.status == compress_status::uncompressed);
        CHECK(cache.view().heads[0].key_columns == 0);
        CHECK(cache.view().heads[0].exact.tokens == tokens);
    }
}

TEST_CASE("a prompt without a window is compressed, and one without queries refused")
{
    layer<half> const x{{.queries = 4, .tokens = 50, .window = 0}};
    cpu::cache<half> cache;
    compressed(x, paper_ratios, {.limit = budget::fraction(1, 2)}, cache);
    CHECK(cache.arena_bytes() > 0);
    contents const before = contents_of(cache);
    layer<half> const without{{.queries = 0, .tokens = 50, .window = 0}};
    CHECK(error_text<invalid_argument>([&] {
        compressed(without, paper_ratios, {.limit = budget::fraction(1, 2)}, cache);
    }) == "prompt::finish_layer: queries [H*G, Q, D] has Q = 0; it must be from 1 to the 50 tokens");
    CHECK(contents_of(cache) == before);
}

TEST_CASE("one candidate, fewer candidates than dimensions, equal tokens, zero keys and zero values are compressed")
{
    for (index_t const tokens : {1, 2, 20})
    {
        layer<float> const x{{.queries = 2, .tokens = tokens, .window = 2}};
        for (budget const limit : {budget::kv_size(2), budget::kv_size(2 + tokens / 2)})
        {
            cpu::cache<float> cache;
            compress_report const report = compressed(x, paper_ratios, {.limit = limit}, cache);
            CHECK(report.resident_bytes <= report.budget_bytes);
        }
    }
    for (int which = 0; which < 3; ++which)
    {
        CAPTURE(which);
        layer<float> x{{.tokens = 60}};
        for (index_t h = 0; h < 2; ++h)
        {
            for (index_t t = 0; t < 60; ++t)
            {
                for (index_t d = 0; d < 32; ++d)
                {
                    if (which != 1) { x.keys.set(which == 2 ? 0.0F : x.keys.get(h, 5, d), h, t, d); }
                    if (which != 2) { x.values.set(which == 1 ? 0.0F : x.values.get(h, 5, d), h, t, d); }
                }
            }
        }
        cpu::cache<float> cache;
        compress_report const report = compressed(x, paper_ratios, {.limit = budget::kv_size(30)}, cache);
        CHECK(report.resident_bytes <= report.budget_bytes);
        CHECK(std::isfinite(report.chosen.loss));
    }
}

TEST_CASE("equal losses are kept in the lower head at the lower positions")
{
    layer<float> x{{.heads = 2, .queries = 1, .tokens = 40, .window = 2}};
    for (index_t h = 0; h < 2; ++h)
    {
        for (index_t t = 0; t < 40; ++t)
        {
            // All attention is equal and so are the values' lengths; the values themselves tell the tokens apart.
            for (index_t d = 0; d < 32; ++d)
            {
                x.keys.set(0.0F, h, t, d);
                x.values.set(d == t % 32 ? (t < 32 ? 1.0F : -1.0F) : 0.0F, h, t, d);
            }
        }
        for (index_t t = 0; t < 2; ++t)
        {
            for (index_t d = 0; d < 32; ++d) { x.window_keys.set(0.0F, h, t, d); }
        }
    }
    cpu::cache<float> cache;
    compressed(x, evict_ratios, {.limit = budget::kv_size(2 + 30)}, cache);
    auto const view = std::as_const(cache).view();
    REQUIRE(view.heads[0].exact.tokens == 40 + 2);
    REQUIRE(view.heads[1].exact.tokens == 20 + 2);
    int different = 0;
    for (index_t t = 0; t < 20; ++t) { different += differing(view, 1, t, x.keys, x.values, t); }
    CHECK(different == 0);
}

TEST_CASE("a budget below the window is refused, naming the least one that works, and that one works")
{
    layer<half> const x{{.heads = 2, .tokens = 50, .window = 8}};
    cpu::cache<half> cache;
    CHECK(error_text<invalid_argument>([&] { compressed(x, paper_ratios, {.limit = budget::bytes(2047)}, cache); })
          == "prompt::allocate: a budget of 2047 bytes a layer cannot hold the window of 8 tokens; at least 2048 bytes "
             "are needed");
    CHECK(error_text<invalid_argument>([&] { compressed(x, paper_ratios, {.limit = budget::kv_size(7)}, cache); })
          == "prompt::allocate: a budget of 1792 bytes a layer cannot hold the window of 8 tokens; at least 2048 bytes "
             "are needed");
    CHECK(cache.layout().heads == 0);
    compress_report const report = compressed(x, paper_ratios, {.limit = budget::bytes(2048)}, cache);
    CHECK(report.resident_bytes == 2048);
    CHECK(report.chosen.tokens[0] == 100);
}

TEST_CASE("a budget that holds the window but no projections stores none and says so")
{
    layer<half> const x{{.heads = 2, .tokens = 200, .window = 8}};
    // A head's projections: 2 * 32 * 8 halves at the rung 1/4. One byte less than what every head pays leaves them out.
    for (projection_charge const charge : {projection_charge::always, projection_charge::if_better})
    {
        CAPTURE(static_cast<int>(charge));
        index_t const needed = 2048 + 2 * 2 * 32 * 8 * 2;
        cpu::cache<half> cache;
        options choice{.limit = budget::bytes(needed - 1)};
        choice.charge                = charge;
        compress_report const report = compressed(x, paper_ratios, choice, cache);
        CHECK(report.chosen.status == allocation_status::unprojected_only);
        CHECK(report.chosen.charged_bytes == 0);
        CHECK(report.chosen.tokens[1] + report.chosen.tokens[2] == 0);
        CHECK(report.chosen.tokens[3] > 0);
        for (index_t h = 0; h < 2; ++h) { CHECK(cache.view().heads[h].key_columns == 0); }
        choice.limit = budget::bytes(needed);
        CHECK(compressed(x, paper_ratios, choice, cache).chosen.status == allocation_status::optimal);
    }
}

TEST_CASE("a ratio set without 0 has a least budget, which is named and works")
{
    layer<half> const x{{.heads = 2, .tokens = 50, .window = 8}};
    ratio_set const ratios{fraction(1, 4), full};
    cpu::cache<half> cache;
    std::string const text =
        error_text<invalid_argument>([&] { compressed(x, ratios, {.limit = budget::bytes(2048)}, cache); });
    index_t const least = 2048 + 2 * 50 * 16 * 2 + 2 * (2 * 32 * 8 * 2);
    CHECK(text
          == "prompt::allocate: a budget of 2048 bytes a layer cannot hold every token at its cheapest rung; at least "
                 + std::to_string(least) + " bytes are needed");
    compress_report const report = compressed(x, ratios, {.limit = budget::bytes(least)}, cache);
    CHECK(report.resident_bytes == least);
    CHECK(report.chosen.tokens[0] == 100);
    CHECK_THROWS_AS(compressed(x, ratios, {.limit = budget::bytes(least - 1)}, cache), invalid_argument);
}

TEST_CASE("a ratio set without 1 still keeps the window as it is")
{
    layer<half> const x{{.heads = 2, .tokens = 100, .window = 8}};
    cpu::cache<half> cache;
    compress_report const report =
        compressed(x, ratio_set{drop, fraction(1, 4)}, {.limit = budget::fraction(1, 3)}, cache);
    CHECK(report.resident_bytes <= report.budget_bytes);
    int different = 0;
    for (index_t t = 0; t < 8; ++t)
    {
        different += differing(std::as_const(cache).view(), 1, t, x.window_keys, x.window_values, t);
    }
    CHECK(different == 0);
    CHECK(cache.view().heads[1].exact.tokens == 8);
}

TEST_CASE("NaN and infinity anywhere are refused, naming input, head and row, and the destination stays as it was")
{
    layer<half> const good{{.heads = 2, .tokens = 60}};
    cpu::cache<half> cache;
    compressed(good, paper_ratios, {.limit = budget::fraction(1, 2)}, cache);
    contents const before = contents_of(cache);
    for (float const bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()})
    {
        auto const refusal = [&](auto which, index_t head, index_t row) {
            layer<half> x{good.sizes};
            which(x).set(narrow<half>(bad), head, row, 31);
            return error_text<non_finite_input>([&] { compressed(x, paper_ratios, {}, cache); });
        };
        CHECK(refusal([](layer<half>& x) -> auto& { return x.queries; }, 3, 2)
              == "queries: NaN or infinity in layer 0, head 3, row 2");
        CHECK(refusal([](layer<half>& x) -> auto& { return x.keys; }, 1, 59)
              == "keys: NaN or infinity in layer 0, head 1, row 59");
        CHECK(refusal([](layer<half>& x) -> auto& { return x.values; }, 0, 0)
              == "values: NaN or infinity in layer 0, head 0, row 0");
        CHECK(refusal([](layer<half>& x) -> auto& { return x.window_keys; }, 1, 7)
              == "keys: NaN or infinity in layer 0, head 1, row 67");
        CHECK(refusal([](layer<half>& x) -> auto& { return x.window_values; }, 1, 7)
              == "values: NaN or infinity in layer 0, head 1, row 67");
        CHECK(contents_of(cache) == before);
    }
}

TEST_CASE("the destination is whole or as it was when the k-th allocation fails, for every k, once or for good")
{
    layer<half> const x{{.heads = 2, .tokens = 80}};
    layer<half> const other{{.heads = 2, .tokens = 50, .salt = 9}};
    cpu::cache<half> good;
    compressed(x, paper_ratios, {.limit = budget::fraction(1, 2)}, good);
    contents const want = contents_of(good);
    for (auto const how : {support::failure::once, support::failure::from_on})
    {
        int failed = 0;
        for (int k = 0;; ++k)
        {
            REQUIRE(k < 100);
            support::failing_resource memory;
            {
                cpu::cache<half> cache{cache_layout{evict_ratios, 0, 0, {32, 32}}, 0, 0, &memory};
                compressed(other, paper_ratios, {.limit = budget::fraction(1, 2)}, cache);
                contents const before = contents_of(cache);
                memory.arm(how, k);
                bool threw = false;
                try
                {
                    compressed(x, paper_ratios, {.limit = budget::fraction(1, 2)}, cache);
                }
                catch (std::bad_alloc const&)
                {
                    threw = true;
                }
                memory.arm(support::failure::never);
                if (!threw)
                {
                    CHECK(contents_of(cache) == want);
                    k = -1;
                }
                else
                {
                    ++failed;
                    CHECK(contents_of(cache) == before);
                    compressed(x, paper_ratios, {.limit = budget::fraction(1, 2)}, cache); // a retry succeeds
                    CHECK(contents_of(cache) == want);
                }
            }
            CHECK(memory.outstanding() == 0);
            if (k == -1) { break; }
        }
        CHECK(failed > 0);
    }
}

TEST_CASE("an executor that throws in any loop leaves the destination as it was")
{
    struct refusing
    {
        int calls_left;
        int threads() const { return 2; }
        void parallel_for(index_t count, cpu::executor_ref::task_function task, void* context)
        {
            if (calls_left-- == 0) { throw std::runtime_error{"no more threads"}; }
            for (index_t i = 0; i < count; ++i) { task(context, i); }
        }
    };
    layer<half> const x{{.heads = 2, .tokens = 700}};
    layer<half> const other{{.heads = 2, .tokens = 50, .salt = 9}};
    cpu::cache<half> cache;
    compressed(other, paper_ratios, {.limit = budget::fraction(1, 2)}, cache);
    contents const before = contents_of(cache);
    int refused           = 0;
    for (int k = 0;; ++k)
    {
        REQUIRE(k < 1000);
        refusing executor{k};
        std::string const text = error_text<std::runtime_error>(
            [&] { compressed(x, paper_ratios, {.limit = budget::fraction(1, 2)}, cache, executor); });
        if (text == "threw nothing") { break; }
        CHECK(text == "no more threads");
        CHECK(contents_of(cache) == before);
        ++refused;
    }
    CHECK(refused > 5);
    cpu::cache<half> fresh;
    compressed(x, paper_ratios, {.limit = budget::fraction(1, 2)}, fresh);
    CHECK(contents_of(cache) == contents_of(fresh));
}

TEST_CASE("compress refuses a preset that replays without all queries, and rungs that do not fit a head dimension")
{
    layer<half> const x{{.heads = 2, .tokens = 22}};
    whole_prompt<half> const all{x};
    cpu::cache<half> cache;
    CHECK(error_text<invalid_argument>([&] {
        support::run([&](host const& on) { compress(on, all.rows(), presets::best, budget::fraction(1, 2), cache); });
    }) == "compress: queries [H*G, Q, D] has Q = 8; preset \"best\" replays the queries of all 30 tokens");
    layer<half> const odd{{.heads = 2, .tokens = 30, .dim = 20, .value_dim = 20}};
    CHECK(error_text<invalid_argument>([&] { compressed(odd, paper_ratios, {}, cache); })
          == "ratio_set: rung 1 (1/8) of key dimension 20 is not a whole number of coordinates");
}

TEST_CASE("compress refuses more tokens than kept positions can number")
{
    // One row seen 2^31 times: the sizes are huge, the memory is not.
    tensor<half, 3> const one{{1, 1, 8}};
    host const any{};
    index_t const many = (index_t{1} << 31) + presets::paper.window;
    auto const rows    = in(any, one.data(), {1, many, 8}, {0, 0, 1});
    auto const few     = in(any, one.data(), {1, 1, 8}, {0, 0, 1});
    cpu::cache<half> cache;
    CHECK(error_text<size_overflow>([&] {
        support::run([&](host const& on) {
            compress(on, prompt_rows<host, half>{few, rows, rows}, presets::paper, budget::kv_size(64), cache);
        });
    }) == "compress: 2147483680 + 0 tokens are more than the limit of 2147483647");
}

TEST_CASE("a destination that held another model's layer takes the new one's form")
{
    layer<half> const first{{.heads = 4, .tokens = 60, .dim = 64, .value_dim = 64}};
    layer<half> const second{{.heads = 2, .tokens = 90, .window = 3, .dim = 32, .value_dim = 40}};
    cpu::cache<half> cache;
    cpu::cache<half> fresh;
    compressed(first, paper_ratios, {.limit = budget::fraction(1, 2)}, cache);
    compressed(second, paper_ratios, {.limit = budget::fraction(1, 2)}, cache);
    compressed(second, paper_ratios, {.limit = budget::fraction(1, 2)}, fresh);
    CHECK(contents_of(cache) == contents_of(fresh));
}

TEST_CASE("what the losses promise is what attention pays: the window's own queries change by no more than the loss")
{
    // The loss bounds the change if the other tokens stay; together they interact, so the bound is met within a factor.
    layer<float> const x{{.heads = 2, .group = 2, .queries = 8, .tokens = 200, .window = 8}};
    for (int const percent : {15, 30, 60})
    {
        CAPTURE(percent);
        options choice{.limit = budget::fraction(percent, 100)};
        choice.pooling.width = 1;
        cpu::cache<float> cache;
        compress_report const report = compressed(x, paper_ratios, choice, cache);
        double change                = 0;
        for (index_t i = 0; i < 8; ++i)
        {
            tensor<float, 2> queries{{4, 32}}, output{{4, 32}};
            tensor<float, 1> lse{{4}};
            for (index_t g = 0; g < 4; ++g)
            {
                for (index_t d = 0; d < 32; ++d) { queries.set(x.queries.get(g, i, d), g, d); }
            }
            support::run([&](host const& on) {
                attend(on, queries.in(), std::as_const(cache).view(), {}, output.out(), lse.out());
            });
            for (index_t h = 0; h < 2; ++h)
            {
                auto const keys = support::stacked(support::rows_of(x.keys, h), support::rows_of(x.window_keys, h));
                auto const values =
                    support::stacked(support::rows_of(x.values, h), support::rows_of(x.window_values, h));
                support::oracle::matrix q{2, 32};
                for (index_t g = 0; g < 2; ++g)
                {
                    for (index_t d = 0; d < 32; ++d)
                    {
                        q(g, d) = static_cast<support::real>(queries.get(h * 2 + g, d));
                    }
                }
                auto const want = support::oracle::attention(q, keys, values, static_cast<support::real>(x.scale()));
                for (index_t g = 0; g < 2; ++g)
                {
                    double square = 0;
                    for (index_t d = 0; d < 32; ++d)
                    {
                        double const away =
                            static_cast<double>(output.get(h * 2 + g, d)) - static_cast<double>(want(g, d));
                        square += away * away;
                    }
                    change += std::sqrt(square);
                }
            }
        }
        CAPTURE(change);
        CAPTURE(report.chosen.loss);
        CHECK(change > 0);
        CHECK(change <= 2 * report.chosen.loss);
    }
}
