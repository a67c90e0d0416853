#include <mdkv/attend.hpp>

#include <mdkv/append.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/thread_pool.hpp>
#include <mdkv/merge.hpp>

#include "support/added_error.hpp"
#include "support/allocation_counter.hpp"
#include "support/compare.hpp"
#include "support/decoding.hpp"
#include "support/host.hpp"
#include "support/packed.hpp"
#include "support/random.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <span>
#include <utility>
#include <vector>

namespace
{

using namespace mdkv;
using support::error_text;
using support::index_t;
using support::packed_layer;
using support::packed_sizes;
using support::placement;
using support::random_queries;
using support::tensor;

template <class T>
using host_cache = cache_view<T const, space::host>;

/// What attend wrote.
template <class U>
struct result
{
    tensor<U, 2> output;
    tensor<float, 1> lse;

    result(index_t rows, index_t dim)
        : output{{rows, dim}}
        , lse{{rows}}
    {}
};

template <class T, class U>
result<U> attended(host_cache<T> const& cache, tensor<U, 2> const& queries, attend_options<cpu::backend> options = {},
    cpu::executor_ref threads = {})
{
    result<U> got{queries.extent(0), cache.layout.dims.values};
    support::run(
        [&](cpu::backend const& on) { attend(on, queries.in(), cache, options, got.output.out(), got.lse.out()); },
        threads);
    return got;
}

/// Rounding of one element type, relative.
template <class T>
constexpr double unit_rounding = std::same_as<T, float>  ? 0x1p-24
                                 : std::same_as<T, half> ? 0x1p-11
                                                         : 0x1p-8;

/// Compares with the definition, over what the cache holds. Sums run in float over at most some hundred tokens and
/// dimensions; their error is some roundings of |q||k| in the exponent. The output is rounded to U on top.
template <class T, class U>
void expects_definition(host_cache<T> const& cache, tensor<U, 2> const& queries, result<U> const& got, double scale)
{
    index_t const heads = cache.layout.heads;
    index_t const group = heads == 0 ? 0 : queries.extent(0) / heads;
    support::worst_error output;
    support::worst_error lse;
    for (index_t h = 0; h < heads; ++h)
    {
        auto const tokens = support::reconstructed_tokens(cache, h);
        for (index_t g = 0; g < group; ++g)
        {
            index_t const row = h * group + g;
            std::vector<double> q;
            for (index_t d = 0; d < queries.extent(1); ++d)
            {
                q.push_back(static_cast<double>(widen(queries.get(row, d))));
            }
            support::naive_attention const want{tokens, q, cache.layout.dims.values, scale};
            double size = 0;
            for (double const x : want.output) { size = std::max(size, std::fabs(x)); }
            for (index_t c = 0; c < cache.layout.dims.values; ++c)
            {
                double const expected = want.output[static_cast<std::size_t>(c)];
                output.add(static_cast<double>(widen(got.output.get(row, c))), expected, std::max(size, 1e-3), row);
            }
            if (tokens.empty()) { CHECK(got.lse.get(row) == -std::numeric_limits<float>::infinity()); }
            else { lse.add(got.lse.get(row), want.lse, std::max(1.0, std::fabs(want.lse)), row); }
        }
    }
    INFO(cache.layout.dims.keys, " x ", cache.layout.dims.values, " coordinates, group ", group);
    if (heads * group * cache.layout.dims.values > 0)
    {
        INFO(output);
        CHECK(output.within(2e-5 + 2 * unit_rounding<U> + support::integer_rounding(cache.layout)));
    }
    if (lse.compared() > 0)
    {
        INFO(lse);
        CHECK(lse.within(4e-6 + support::integer_rounding(cache.layout)));
    }
}

template <class T, class U>
void check_attention(packed_sizes const& sizes, index_t group, int every_rung = -1)
{
    packed_layer<T> const layer{sizes, every_rung};
    auto const cache = layer.packed();
    auto const q     = random_queries<U>(sizes.heads * group, sizes.dims.keys);
    auto const got   = attended<T, U>(cache.view(), q);
    expects_definition<T, U>(cache.view(), q, got, 1.0 / std::sqrt(static_cast<double>(sizes.dims.keys)));
}

} // namespace

TEST_CASE_TEMPLATE("attention over the packed cache is attention over the reconstructed tokens, whatever the group", T,
    float, half, bfloat16)
{
    for (index_t const group : {1, 2, 3, 4, 5, 6, 7, 8, 9, 17})
    {
        check_attention<T, float>({.heads = 2, .tokens = 333, .window = 5, .dims = {32, 32}}, group);
        check_attention<T, T>({.heads = 1, .tokens = 40, .window = 3, .dims = {64, 48}}, group);
    }
}

TEST_CASE_TEMPLATE(
    "attention follows the definition at every head dimension, also where D and Dv differ", T, float, half, bfloat16)
{
    for (index_t const dim : {1, 2, 7, 32, 40, 56, 64, 80, 96, 128, 192, 256, 576})
    {
        std::vector<rung> const rungs =
            dim < 8 ? std::vector<rung>{drop, full} : std::vector<rung>{drop, fraction(1, 8), fraction(1, 4), full};
        check_attention<T, float>({.heads = 1, .tokens = 70, .window = 3, .dims = {dim, dim}, .rungs = rungs}, 4);
    }
    for (head_dims const dims : {head_dims{192, 128}, {576, 512}, {64, 7}, {40, 96}, {8, 9}, {128, 1}})
    {
        std::vector<rung> const rungs = dims.values < 8 ? std::vector<rung>{drop, full}
                                                        : std::vector<rung>{drop, fraction(1, 8), fraction(1, 4), full};
        check_attention<T, float>({.heads = 2, .tokens = 37, .window = 1, .dims = dims, .rungs = rungs}, 3);
    }
    std::vector<rung> const codes{drop, fraction(1, 4).as(storage::int8), full_int4, full_int8, full};
    check_attention<T, float>(
        {.heads = 4, .tokens = 150, .window = 3, .dims = {512, 512}, .rungs = codes}, 8); // Gemma 4
    check_attention<T, float>(
        {.heads = 2, .tokens = 150, .window = 3, .dims = {256, 256}, .rungs = codes}, 6); // Qwen 3.5
}

TEST_CASE_TEMPLATE("every number of tokens around the tiles' and blocks' edges is attended", T, float, half)
{
    for (index_t const tokens :
        {1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 511, 513})
    {
        for (int const every : {1, 2, 3})
        {
            check_attention<T, float>({.heads = 1, .tokens = tokens, .window = 0, .dims = {16, 24}}, 2, every);
        }
    }
}

TEST_CASE("empty rungs, dropped heads, windows alone and empty caches are attended")
{
    for (int const every : {0, 1, 2, 3})
    {
        for (index_t const window : {0, 1, 16, 20})
        {
            check_attention<half, float>({.heads = 2, .tokens = 20, .window = window, .dims = {32, 32}}, 3, every);
        }
    }
    check_attention<half, float>({.heads = 2, .tokens = 0, .window = 6, .dims = {32, 32}}, 3);
    check_attention<half, float>({.heads = 2, .tokens = 0, .window = 0, .dims = {32, 32}}, 3);
    check_attention<half, float>({.heads = 0, .tokens = 5, .window = 2, .dims = {32, 32}}, 3);
    check_attention<float, half>(
        {.heads = 1, .tokens = 40, .window = 2, .dims = {40, 40}, .rungs = {fraction(1, 8), fraction(1, 2)}}, 2);
    check_attention<float, half>(
        {.heads = 1, .tokens = 40, .window = 2, .dims = {40, 40}, .rungs = {drop, fraction(7, 8)}}, 2, 1);
}

TEST_CASE_TEMPLATE("stand-ins are attended like tokens, in heads that have many, few or none", T, float, half)
{
    std::vector<rung> const mixed{drop, fraction(1, 8), full_int4, full};
    for (index_t const stand_ins : {1, 8, 40})
    {
        for (index_t const window : {0, 5, 16})
        {
            check_attention<T, float>(
                {.heads = 3, .tokens = 70, .window = window, .dims = {32, 24}, .rungs = mixed, .stand_ins = stand_ins},
                3);
        }
        check_attention<T, float>({.heads = 2, .tokens = 20, .window = 0, .stand_ins = stand_ins}, 2, 0); // alone
        check_attention<T, float>({.heads = 2, .tokens = 20, .stand_ins = stand_ins}, 2, 1); // nothing is dropped
    }
}

TEST_CASE("truncate_tail takes out appended tokens, and no stand-in")
{
    packed_layer<half> const layer{{.heads = 2, .tokens = 30, .dims = {32, 24}, .stand_ins = 8}};
    auto cache      = layer.packed(2);
    auto const q    = random_queries<float>(4, 32);
    auto const want = attended<half, float>(cache.view(), q);
    support::run([&](cpu::backend const& on) {
        append(on, slice<1>(layer.keys.in(), 0, 2), slice<1>(layer.values.in(), 0, 2), cache.view());
    });
    CHECK(attended<half, float>(cache.view(), q).lse.elements() != want.lse.elements());
    support::run([&](cpu::backend const& on) { truncate_tail(on, 0, cache.view()); });
    auto const got = attended<half, float>(cache.view(), q);
    CHECK(got.lse.elements() == want.lse.elements());
    CHECK(got.output.elements() == want.output.elements());
    CHECK(cache.view().heads[0].stand_ins == layer.stand_ins(0));
}

TEST_CASE("tokens stored as codes are attended as what they are read as, next to plain ones, whatever the group")
{
    std::vector<rung> const original{drop, fraction(1, 4).as(storage::int8), full_int4, full_int8, full};
    std::vector<rung> const in_basis{drop, fraction(1, 8), fraction(3, 4).as(storage::int8), full};
    for (auto const& rungs : {original, in_basis})
    {
        for (head_dims const dims : {head_dims{64, 64}, {128, 128}, {40, 40}, {35, 21}, {9, 47}})
        {
            for (index_t const group : {1, 3, 8, 9})
            {
                check_attention<half, float>(
                    {.heads = 2, .tokens = 333, .window = 5, .dims = dims, .rungs = rungs}, group);
            }
            check_attention<half, float>( // the mean key takes part in most logits
                {.heads = 2, .tokens = 333, .window = 5, .dims = dims, .rungs = rungs, .common = 5}, 3);
        }
    }
    check_attention<bfloat16, bfloat16>(
        {.heads = 1, .tokens = 90, .window = 2, .dims = {64, 64}, .rungs = original}, 2);
    check_attention<float, float>({.heads = 1, .tokens = 90, .window = 2, .dims = {64, 64}, .rungs = in_basis}, 5);
}

TEST_CASE("integer products lose less than a tenth of what the codes have lost")
{
    struct one
    {
        rung stored;
        index_t dim;
        index_t coordinates; // of a query; the others are 0
    };
    // With one coordinate a rotated query's are all alike, and with none all weights: their sums are as large as can be.
    constexpr one every[]{{full_int4, 64, 64}, {full_int4, 128, 128}, {full_int4, 64, 1}, {full_int4, 128, 1},
        {full_int4, 64, 0}, {full_int4, 128, 0}, {full_int8, 64, 64}, {full_int8, 128, 128}, {full_int8, 64, 1},
        {full_int8, 128, 0}};
    for (auto const& [stored, dim, coordinates] : every)
    {
        support::added_error const error{stored, dim, coordinates,
            [](auto const& cache, auto const& q) { return attended<half, float>(cache.view(), q); }};
        CAPTURE(dim);
        CAPTURE(coordinates);
        CAPTURE(error.of_outputs());
        CAPTURE(error.lse);
        CHECK(error.of_outputs() > 0); // what is compared is the products, not the numbers
        CHECK(error.of_outputs() <= 0.1);
        // What codes lose averages out over 700 tokens, what a query loses does not: an error of its own.
        CHECK(error.lse <= 2e-3);
    }
}

TEST_CASE("what all keys of a head have in common costs attention over codes nothing")
{
    packed_sizes const sizes{
        .heads = 2, .tokens = 600, .window = 3, .dims = {64, 64}, .rungs = {drop, full_int4, full}};
    packed_sizes moved = sizes;
    moved.common       = 40; // codes of keys as they are would have steps of three
    auto const q       = random_queries<float>(4, 64);
    auto const lse_of  = [&](packed_sizes const& s, int rung) {
        return attended<float, float>(packed_layer<float>{s, rung}.packed().view(), q).lse;
    };
    auto const plain = lse_of(sizes, 2), codes = lse_of(sizes, 1), moved_plain = lse_of(moved, 2),
               moved_codes = lse_of(moved, 1);
    for (index_t i = 0; i < 4; ++i)
    {
        CHECK(std::fabs(codes.get(i) - plain.get(i)) < 0.02F);
        CHECK(std::fabs(moved_codes.get(i) - moved_plain.get(i)) < 0.02F);
    }
}

TEST_CASE_TEMPLATE(
    "a channel that all keys have in common and no query reads changes no attention, however large", T, float, bfloat16)
{
    for (rung const stored : {full_int4, full_int8})
    {
        auto const attention_at = [&](float common) {
            packed_layer<T> layer{{.heads = 2, .tokens = 200, .window = 3, .dims = {64, 64}, .rungs = {stored}}};
            auto q = random_queries<float>(4, 64);
            for (index_t h = 0; h < 2; ++h)
            {
                for (index_t t = 0; t < 200; ++t) { layer.keys.set(narrow<T>(common), h, t, 9); }
                for (index_t t = 0; t < 3; ++t) { layer.window_keys.set(narrow<T>(common), h, t, 9); }
            }
            for (index_t row = 0; row < 4; ++row) { q.set(0, row, 9); }
            return attended<T, float>(layer.packed().view(), q).output;
        };
        auto const small = attention_at(1e3F);
        for (float const common : {65504.0F, 66001.3F, 123456.7F, 3e5F})
        {
            auto const large = attention_at(common);
            for (index_t row = 0; row < 4; ++row)
            {
                for (index_t c = 0; c < 64; ++c)
                {
                    CHECK(std::fabs(large.get(row, c) - small.get(row, c)) < (stored == full_int8 ? 2e-3F : 3e-2F));
                }
            }
        }
    }
}

TEST_CASE("runs of codes of every length around the tiles' edges are attended")
{
    std::vector<rung> const rungs{
        drop, fraction(1, 4).as(storage::int8), full_int4, fraction(3, 4).as(storage::int8), full_int8};
    for (index_t tokens = 1; tokens <= 40; ++tokens)
    {
        for (int const every : {1, 2, 3, 4})
        {
            check_attention<half, float>(
                {.heads = 1, .tokens = tokens, .window = 0, .dims = {40, 26}, .rungs = rungs}, 3, every);
        }
    }
}

TEST_CASE("a group of codes that is not a number shows in every query of its head, and in no other head")
{
    for (rung const stored : {full_int4, full_int8, fraction(3, 4).as(storage::int8)})
    {
        for (index_t const tokens : {16, 37}) // the last token's tile is whole, narrow
        {
            for (bool const in_key : {true, false})
            {
                packed_layer<half> layer{
                    {.heads = 2, .tokens = tokens, .window = 3, .dims = {80, 80}, .rungs = {drop, stored, full}}, 1};
                auto const q     = random_queries<float>(6, 80);
                auto const clean = attended<half, float>(layer.packed().view(), q);
                (in_key ? layer.keys : layer.values)
                    .set(narrow<half>(std::numeric_limits<float>::quiet_NaN()), 1, tokens - 1, 70);
                auto const got = attended<half, float>(layer.packed().view(), q);
                CAPTURE(in_key);
                for (index_t i = 0; i < 3; ++i)
                {
                    for (index_t c = 0; c < 80; ++c) { CHECK(got.output.get(i, c) == clean.output.get(i, c)); }
                }
                for (index_t i = 3; i < 6; ++i)
                {
                    CHECK(std::isnan(got.lse.get(i)) == in_key);
                    // a value's group of columns is its own; in the basis it reaches all of them
                    CHECK(std::isnan(got.output.get(i, 70)));
                    CHECK(std::isnan(got.output.get(i, 3)) == (in_key || stored.projected()));
                }
            }
        }
    }
}

TEST_CASE("an empty cache gives zeros and a log-sum-exp of minus infinity, not NaN")
{
    packed_layer<half> const layer{{.heads = 2, .tokens = 9, .window = 0}, 0};
    auto const cache = layer.packed(4);
    auto const got   = attended<half, float>(cache.view(), random_queries<float>(6, 16));
    for (float const x : got.output.elements()) { CHECK(x == 0.0F); }
    for (float const x : got.lse.elements()) { CHECK(x == -std::numeric_limits<float>::infinity()); }
}

TEST_CASE("a cache without a layout is refused: nothing was packed into it, or it was moved from")
{
    cpu::cache<half> const none;
    CHECK(support::error_text<invalid_argument>([&] {
        attended<half, float>(none.view(), random_queries<float>(6, 16));
    }) == "attend: the cache has no layout: nothing was packed into it, or it was moved from");
}

TEST_CASE("an unpacked cache is an empty one")
{
    cache_layout const layout{paper_ratios, 2, 0, {16, 16}};
    cpu::cache<half> const cache{layout, 1000};
    auto const got = attended<half, float>(cache.view(), random_queries<float>(4, 16));
    for (float const x : got.output.elements()) { CHECK(x == 0.0F); }
}

TEST_CASE_TEMPLATE("tails of every length around the tiles' edges are attended", T, float, bfloat16)
{
    support::source random{"tails"};
    for (index_t const capacity : {1, 5, 16, 17, 31, 32, 40})
    {
        packed_layer<T> const layer{{.heads = 2, .tokens = 21, .window = 2, .dims = {24, 16}}};
        auto cache = layer.packed(capacity);
        for (index_t tokens = 1; tokens <= capacity; ++tokens)
        {
            append_random(cache, random, 1);
            auto const q   = random_queries<float>(4, 24);
            auto const got = attended<T, float>(cache.view(), q);
            INFO("capacity ", capacity, ", tokens ", tokens);
            expects_definition<T, float>(cache.view(), q, got, 1.0 / std::sqrt(24.0));
        }
    }
}

TEST_CASE_TEMPLATE("queries of the last n tokens at once see what those of one token each see", T, float, half)
{
    struct one_case
    {
        packed_sizes sizes;
        index_t group, n, appended;
        cpu::executor_ref threads{};
    };
    cpu::thread_pool two{2};
    std::vector<rung> const mixed{drop, fraction(1, 4), full_int4, full_int8, full};
    for (one_case const& c : {one_case{{.dims = {16, 24}}, 1, 1, 1}, one_case{{}, 3, 2, 2},
             one_case{{.heads = 3, .tokens = 90, .window = 5, .dims = {64, 32}, .rungs = mixed}, 4, 17, 33},
             one_case{{.heads = 1, .tokens = 0, .window = 0}, 2, 70, 70}, // nothing but the tail
             one_case{{.heads = 3, .tokens = 40, .dims = {16, 24}, .stand_ins = 8}, 2, 9, 20},
             one_case{
                 {.heads = 2, .tokens = 70, .dims = {32, 16}}, 2, 300, 420}, // whole blocks that a query does not see
             one_case{{.heads = 2, .tokens = 9000, .dims = {64, 64}, .rungs = mixed}, 3, 5, 300, two}}) // several parts
    {
        CAPTURE(c.n);
        packed_layer<T> const layer{c.sizes};
        auto cache         = layer.packed(c.appended);
        auto const [d, dv] = c.sizes.dims;
        auto const numbers = [&](index_t rows, index_t columns) {
            auto const flat = random_queries<T>(rows, columns);
            return flat.elements();
        };
        tensor<T, 3> keys{{c.sizes.heads, c.appended, d}};
        tensor<T, 3> values{{c.sizes.heads, c.appended, dv}};
        keys.assign(numbers(c.sizes.heads * c.appended, d));
        values.assign(numbers(c.sizes.heads * c.appended, dv));
        support::run([&](cpu::backend const& on) { append(on, keys.in(), values.in(), cache.view()); });
        index_t const rows = c.sizes.heads * c.group;
        tensor<float, 3> q{{rows, c.n, d}};
        q.assign(random_queries<float>(rows * c.n, d).elements());
        tensor<float, 3> output{{rows, c.n, dv}};
        tensor<float, 2> lse{{rows, c.n}};
        support::run(
            [&](cpu::backend const& on) { attend(on, q.in(), cache.view(), {}, output.out(), lse.out()); }, c.threads);
        support::worst_error outputs;
        support::worst_error lses;
        for (index_t i = 0; i < c.n; ++i)
        {
            index_t visible = c.appended - (c.n - 1 - i);
            auto before     = cache.view();
            before.appended = &visible;
            tensor<float, 2> one{{rows, d}};
            for (index_t r = 0; r < rows; ++r)
            {
                for (index_t k = 0; k < d; ++k) { one.set(q.get(r, i, k), r, k); }
            }
            auto const want = attended<T, float>(before, one);
            for (index_t r = 0; r < rows; ++r)
            {
                lses.add(lse.get(r, i), want.lse.get(r), 1.0, r);
                for (index_t k = 0; k < dv; ++k) { outputs.add(output.get(r, i, k), want.output.get(r, k), 1.0, r); }
            }
        }
        INFO(outputs);
        INFO(lses);
        CHECK(outputs.within(2e-5));
        CHECK(lses.within(1e-5));
    }
}

TEST_CASE_TEMPLATE(
    "sink logits equal a segment of zeros that is merged later, whatever they take of the softmax", T, float, half)
{
    constexpr float none = -std::numeric_limits<float>::infinity();
    std::vector<float> const sinks{none, 0.0F, 2.5F, 30.0F, 1e4F, -1e4F};
    std::vector<rung> const mixed{drop, fraction(1, 4), fraction(3, 4).as(storage::int8), full_int4, full_int8, full};
    for (packed_sizes const& sizes : {packed_sizes{.heads = 2, .tokens = 0, .window = 0, .dims = {32, 24}},
             packed_sizes{.heads = 2, .tokens = 300, .window = 3, .dims = {32, 24}, .rungs = mixed, .stand_ins = 4}})
    {
        packed_layer<T> const layer{sizes};
        auto cache = layer.packed(20);
        support::source random{"attend/sinks"};
        append_random(cache, random, 20);
        index_t const s = std::ssize(sinks), n = 20; // n: more than a panel of rows
        tensor<T, 3> q{{s, n, 32}};
        q.assign(random_queries<T>(s * n, 32).elements());
        tensor<T, 3> plain{{s, n, 24}};
        tensor<T, 3> with{{s, n, 24}};
        tensor<float, 2> plain_lse{{s, n}};
        tensor<float, 2> with_lse{{s, n}};
        support::run([&](cpu::backend const& on) {
            attend(on, q.in(), cache.view(), {}, plain.out(), plain_lse.out());
            attend(on, q.in(), cache.view(), {.lse_elsewhere = in(on, sinks.data(), s, 1)}, with.out(), with_lse.out());
        });
        support::worst_error outputs;
        support::worst_error lses;
        for (index_t r = 0; r < s; ++r)
        {
            for (index_t i = 0; i < n; ++i)
            {
                auto const own    = static_cast<double>(plain_lse.get(r, i));
                auto const other  = static_cast<double>(sinks[static_cast<std::size_t>(r)]);
                double const most = std::max(own, other);
                double const sum  = std::exp(own - most) + std::exp(other - most);
                lses.add(with_lse.get(r, i), most + std::log(sum), std::max(1.0, std::fabs(most)), r);
                for (index_t c = 0; c < 24; ++c)
                {
                    double const want = std::exp(own - most) / sum * static_cast<double>(widen(plain.get(r, i, c)));
                    outputs.add(
                        static_cast<double>(widen(with.get(r, i, c))), want, std::max(std::fabs(want), 1e-4), r);
                    if (other == none) { CHECK(with.get(r, i, c) == plain.get(r, i, c)); }
                }
                if (other == none) { CHECK(with_lse.get(r, i) == plain_lse.get(r, i)); }
            }
        }
        INFO(outputs);
        INFO(lses);
        CHECK(outputs.within(1e-6 + 2 * unit_rounding<T>));
        CHECK(lses.within(1e-6));
    }
}

TEST_CASE("queries of more tokens than were appended are refused")
{
    packed_layer<half> const layer{{}};
    auto cache = layer.packed(4);
    tensor<half, 3> const token{{2, 1, 16}};
    support::run([&](cpu::backend const& on) { append(on, token.in(), token.in(), cache.view()); });
    auto const refused = [&](index_t n) {
        tensor<half, 3> const q{{2, n, 16}};
        tensor<half, 3> output{{2, n, 16}};
        tensor<float, 2> lse{{2, n}};
        return error_text<invalid_argument>([&] {
            support::run(
                [&](cpu::backend const& on) { attend(on, q.in(), cache.view(), {}, output.out(), lse.out()); });
        });
    };
    CHECK(refused(2) == "attend: queries [H*G, n, D] are of 2 tokens, but 1 were appended");
}

namespace
{

/// Packed caches of one batch, and how many queries of each take part.
template <class T>
struct batch_of_caches
{
    std::vector<cpu::cache<T>> caches{};
    std::vector<index_t> counts{};

    void add(packed_sizes const& sizes, index_t appended, index_t queries)
    {
        packed_layer<T> const layer{sizes};
        caches.push_back(layer.packed(appended));
        support::source random{"batch", static_cast<std::int64_t>(caches.size())};
        append_random(caches.back(), random, appended);
        counts.push_back(queries);
    }
    [[nodiscard]] std::vector<sequence_view<T, space::host>> views() const
    {
        std::vector<sequence_view<T, space::host>> all;
        for (std::size_t i = 0; i < caches.size(); ++i) { all.push_back({caches[i].view(), counts[i]}); }
        return all;
    }
    [[nodiscard]] index_t tokens() const
    {
        index_t sum = 0;
        for (index_t const n : counts) { sum += n; }
        return sum;
    }
};

std::vector<rung> const rungs_of_codes{drop, fraction(1, 4), full_int4, full_int8, full};

/// A batch as it may come: sequences without a token, without a query, of several parts, of other rungs and windows.
template <class T>
batch_of_caches<T> mixed_batch()
{
    batch_of_caches<T> batch;
    batch.add({.heads = 2, .tokens = 333, .window = 5, .dims = {64, 32}, .rungs = rungs_of_codes}, 4, 1);
    batch.add({.heads = 2, .tokens = 0, .window = 0, .dims = {64, 32}, .rungs = rungs_of_codes}, 0, 1);
    batch.add({.heads = 2, .tokens = 40, .window = 3, .dims = {64, 32}, .rungs = rungs_of_codes}, 2, 0);
    batch.add({.heads = 2, .tokens = 1, .window = 0, .dims = {64, 32}}, 20, 17);
    batch.add({.heads = 2, .tokens = 500, .window = 0, .dims = {64, 32}, .rungs = rungs_of_codes}, 60, 55); // panels
    batch.add({.heads = 2, .tokens = 30000, .window = 0, .dims = {64, 32}, .rungs = {drop, full}}, 3, 2);
    return batch;
}

} // namespace

TEST_CASE_TEMPLATE("a batch of sequences gives the bits of a call for each, with any number of threads", T, float, half)
{
    auto const mixed = mixed_batch<T>();
    REQUIRE(mixed.caches.back().arena_bytes() > 3 * cpu::detail::least_split_bytes);
    batch_of_caches<T> one;
    one.add({.heads = 2, .tokens = 90, .window = 5, .dims = {64, 32}}, 3, 2);
    for (auto const* batch : {&mixed, &std::as_const(one)})
    {
        index_t const rows = 6;
        index_t const n    = batch->tokens();
        tensor<float, 3> q{{rows, n, 64}, {.swapped = true, .slack = 3}}; // an engine's [n, H*G, D]
        q.assign(random_queries<float>(rows * n, 64).elements());
        tensor<float, 3> want{{rows, n, 32}};
        tensor<float, 2> want_lse{{rows, n}};
        auto const sequences = batch->views();
        index_t first        = 0;
        for (auto const& [cache, count] : sequences)
        {
            index_t const at   = first;
            index_t const many = count;
            auto const& view   = cache;
            first += count;
            if (many == 0) { continue; }
            support::run([&](cpu::backend const& on) {
                attend(on, slice<1>(q.in(), at, many), view, {}, slice<1>(want.out(), at, many),
                    slice<1>(want_lse.out(), at, many));
            });
        }
        for (int const threads : {1, 2, 5})
        {
            cpu::thread_pool pool{threads};
            tensor<float, 3> output{{rows, n, 32}, {.swapped = true, .slack = 1}};
            tensor<float, 2> lse{{rows, n}};
            support::run(
                [&](cpu::backend const& on) { attend(on, q.in(), std::span{sequences}, {}, output.out(), lse.out()); },
                pool);
            CAPTURE(threads);
            CHECK(support::same_bits(output.elements(), want.elements()));
            CHECK(support::same_bits(lse.elements(), want_lse.elements()));
        }
    }
}

TEST_CASE("a batch of no sequences, and one without queries, leave nothing to do")
{
    batch_of_caches<half> batch;
    tensor<half, 3> none{{4, 0, 16}};
    tensor<float, 2> lse{{4, 0}};
    auto const attend_all = [&](auto const& sequences) {
        return support::run(
            [&](cpu::backend const& on) { attend(on, none.in(), std::span{sequences}, {}, none.out(), lse.out()); });
    };
    attend_all(batch.views());
    batch.add({.heads = 2, .tokens = 30, .window = 1, .dims = {16, 16}}, 0, 0);
    attend_all(batch.views());
    CHECK(lse.count() == 0);
}

TEST_CASE("arguments of a batch that do not fit are refused, naming the sequence, before anything is written")
{
    batch_of_caches<half> batch;
    for (index_t const queries : {1, 2, 1}) { batch.add({.heads = 2, .tokens = 30, .dims = {16, 24}}, 3, queries); }
    tensor<float, 3> const q{{4, 4, 16}};
    tensor<float, 3> output{{4, 4, 24}};
    tensor<float, 2> lse{{4, 4}};
    auto const before  = output.memory();
    auto const refused = [&](std::vector<sequence_view<half, space::host>> const& sequences, auto const& queries) {
        return error_text<invalid_argument>([&] {
            support::run([&](cpu::backend const& on) {
                attend(on, queries.in(), std::span{sequences}, {}, output.out(), lse.out());
            });
        });
    };
    auto const views = batch.views();
    auto bad         = views;
    bad[1].queries   = 3;
    CHECK(refused(bad, q) == "attend: queries [H*G, n, D] are of 4 tokens, those of the sequences of 5");
    bad[1].queries = -1;
    bad[2].queries = 4;
    CHECK(refused(bad, q) == "attend: sequence 1: queries is -1; it must not be negative");
    bad                   = views;
    bad[0].queries        = 0;
    bad[2].queries        = 2;
    index_t held          = 1;
    bad[2].cache.appended = &held;
    CHECK(refused(bad, q) == "attend: sequence 2: queries [H*G, n, D] are of 2 tokens, but 1 were appended");
    bad                = views;
    bad[2].cache.heads = nullptr;
    CHECK(refused(bad, q) == "attend: sequence 2: cache has no directory");
    CHECK(output.memory() == before);
    CHECK(refused(views, q) == "threw nothing");
}

TEST_CASE("the cache's scale replaces 1/sqrt(D), and the option's the cache's")
{
    auto const q = random_queries<float>(4, 16);
    for (float const scale : {0.7F, 0.0F})
    {
        packed_layer<half> const layer{{.tokens = 60, .scale = scale}};
        auto const cache = layer.packed();
        auto const got   = attended<half, float>(cache.view(), q);
        float const own  = scale > 0 ? scale : 0.25F;
        expects_definition<half, float>(cache.view(), q, got, static_cast<double>(own));
        CHECK(support::same_bits(
            attended<half, float>(cache.view(), q, {.scale = own}).output.elements(), got.output.elements()));
        auto const other = attended<half, float>(cache.view(), q, {.scale = 0.3F});
        expects_definition<half, float>(cache.view(), q, other, static_cast<double>(0.3F));
    }
}

TEST_CASE("each sequence of a batch has its own cache's scale")
{
    packed_layer<half> const one{{.tokens = 60, .scale = 0.7F}}, two{{.tokens = 60, .scale = 0.1F}};
    auto const first = one.packed(), second = two.packed();
    auto const q = random_queries<float>(4, 16);
    std::vector<sequence_view<half, space::host>> const both{{first.view()}, {second.view()}};
    tensor<float, 3> queries{{4, 2, 16}}, output{{4, 2, 16}};
    tensor<float, 2> lse{{4, 2}};
    for (index_t row = 0; row < 4; ++row)
    {
        for (index_t d = 0; d < 16; ++d)
        {
            queries.set(q.get(row, d), row, 0, d);
            queries.set(q.get(row, d), row, 1, d);
        }
    }
    support::run(
        [&](cpu::backend const& on) { mdkv::attend(on, queries.in(), std::span{both}, {}, output.out(), lse.out()); });
    auto const want_first  = attended<half, float>(first.view(), q),
               want_second = attended<half, float>(second.view(), q);
    for (index_t row = 0; row < 4; ++row)
    {
        CHECK(lse.get(row, 0) == want_first.lse.get(row));
        CHECK(lse.get(row, 1) == want_second.lse.get(row));
    }
}

TEST_CASE("a cache of many parts is attended like one of a single part, and any number of threads gives the same bits")
{
    packed_layer<float> const layer{{.heads = 2, .tokens = 9000, .window = 33, .dims = {128, 96}}};
    auto const cache = layer.packed();
    REQUIRE(cache.arena_bytes() > 4 * cpu::detail::least_split_bytes);
    auto const q   = random_queries<float>(6, 128);
    auto const one = attended<float, float>(cache.view(), q);
    expects_definition<float, float>(cache.view(), q, one, 1.0 / std::sqrt(128.0));
    for (int const threads : {2, 3, 8})
    {
        cpu::thread_pool pool{threads};
        auto const many = attended<float, float>(cache.view(), q, {}, pool);
        CHECK(support::same_bits(one.output.elements(), many.output.elements()));
        CHECK(support::same_bits(one.lse.elements(), many.lse.elements()));
    }
}

TEST_CASE("a cache of many parts of codes gives the same bits for any number of threads")
{
    packed_layer<half> const layer{{.heads = 2,
        .tokens                            = 12000,
        .window                            = 33,
        .dims                              = {128, 128},
        .rungs                             = {drop, fraction(3, 4).as(storage::int8), full_int8, full}}};
    auto const cache = layer.packed();
    REQUIRE(cache.arena_bytes() > 3 * cpu::detail::least_split_bytes);
    auto const q   = random_queries<float>(6, 128);
    auto const one = attended<half, float>(cache.view(), q);
    for (int const threads : {2, 3, 8})
    {
        cpu::thread_pool pool{threads};
        auto const many = attended<half, float>(cache.view(), q, {}, pool);
        CHECK(support::same_bits(one.output.elements(), many.output.elements()));
        CHECK(support::same_bits(one.lse.elements(), many.lse.elements()));
    }
}

TEST_CASE("logits far apart and far from zero neither overflow nor lose the largest")
{
    packed_layer<float> layer{{.heads = 1, .tokens = 700, .window = 0, .dims = {8, 8}, .rungs = {drop, full}}, 1};
    for (index_t t = 0; t < 700; ++t)
    {
        for (index_t d = 0; d < 8; ++d)
        {
            layer.keys.set(static_cast<float>(t - 350) * (t % 2 == 0 ? 1.0F : -1.0F), 0, t, d);
        }
    }
    auto const cache = layer.packed();
    auto const q     = random_queries<float>(3, 8);
    auto const got   = attended<float, float>(cache.view(), q);
    expects_definition<float, float>(cache.view(), q, got, 1.0 / std::sqrt(8.0));
}

TEST_CASE("two halves merged by their log-sum-exps are the whole")
{
    packed_sizes const sizes{.heads = 2, .tokens = 90, .window = 7, .dims = {32, 24}};
    packed_layer<half> const whole{sizes};
    // The same layer with some tokens' rungs dropped: left keeps even tokens and no window, right the rest.
    packed_sizes no_window = sizes;
    no_window.window       = 0;
    packed_layer<half> left{no_window};
    packed_layer<half> right{sizes};
    for (auto* part : {&left, &right})
    {
        part->keys.assign(whole.keys.elements());
        part->values.assign(whole.values.elements());
        part->key_basis.assign(whole.key_basis.elements());
        part->value_basis.assign(whole.value_basis.elements());
        for (index_t h = 0; h < 2; ++h)
        {
            for (index_t t = 0; t < 90; ++t)
            {
                bool const mine = (t % 2 == 0) == (part == &left);
                part->rung.set(mine ? whole.rung.get(h, t) : std::uint8_t{0}, h, t);
            }
        }
    }
    right.window_keys.assign(whole.window_keys.elements());
    right.window_values.assign(whole.window_values.elements());

    auto const all   = whole.packed();
    auto const one   = left.packed();
    auto const other = right.packed();
    auto const q     = random_queries<float>(8, 32);
    auto const want  = attended<half, float>(all.view(), q);
    auto a           = attended<half, float>(one.view(), q);
    auto const b     = attended<half, float>(other.view(), q);
    result<float> got{8, 24};
    support::run([&](cpu::backend const& on) {
        merge_attention(on, a.output.in(), a.lse.in(), b.output.in(), b.lse.in(), got.output.out(), got.lse.out());
    });
    support::worst_error output;
    for (index_t i = 0; i < 8; ++i)
    {
        for (index_t c = 0; c < 24; ++c) { output.add(got.output.get(i, c), want.output.get(i, c), 1.0L, i); }
        output.add(got.lse.get(i), want.lse.get(i), 1.0L, i);
    }
    INFO(output);
    CHECK(output.within(3e-6));
}

TEST_CASE("the cache's memory may begin at any address, and not a byte outside it is read")
{
    support::source random{"fences"};
    for (index_t const tokens : {1, 3, 16, 35})
    {
        for (int const every : {-1, 1, 2, 3, 4})
        {
            packed_layer<half> const layer{{.heads     = 2,
                                               .tokens = tokens,
                                               .window = 1,
                                               .dims   = {40, 24},
                                               .rungs  = {drop, fraction(1, 8), full_int4, full_int8, full}},
                every};
            auto cache = layer.packed(21);
            append_random(cache, random, 19);
            auto const q    = random_queries<float>(4, 40);
            auto const want = attended<half, float>(cache.view(), q);
            for (placement const how : {placement{.fence = support::guard::after},
                     placement{.fence = support::guard::before}, placement{.misalign = 1}, placement{.misalign = 2}})
            {
                tensor<std::byte, 1> arena{{cache.arena_bytes()}, how};
                tensor<std::byte, 1> tail{{cache.tail_bytes()}, how};
                auto view = cache.view();
                std::memcpy(arena.data(), view.arena, static_cast<std::size_t>(cache.arena_bytes()));
                std::memcpy(tail.data(), view.tail, static_cast<std::size_t>(cache.tail_bytes()));
                view.arena     = arena.data();
                view.tail      = tail.data();
                auto const got = attended<half, float>(view, q);
                CHECK(support::same_bits(want.output.elements(), got.output.elements()));
                CHECK(support::same_bits(want.lse.elements(), got.lse.elements()));
            }
        }
    }
}

TEST_CASE("NaN in the arena's slack and in unused tail slots changes no bit")
{
    packed_layer<half> const layer{{.heads = 2, .tokens = 50, .window = 3}};
    auto clean = layer.packed(20);
    cpu::cache<half> roomy{layer.layout, clean.arena_bytes() + 100, 20};
    std::memset(roomy.view().arena, 0xFF, static_cast<std::size_t>(roomy.arena_bytes()));
    std::memset(clean.view().tail, 0, static_cast<std::size_t>(clean.tail_bytes()));
    std::memset(roomy.view().tail, 0xFF, static_cast<std::size_t>(roomy.tail_bytes()));
    support::run([&](cpu::backend const& on) { layer.pack(on, roomy.view()); });
    for (auto* cache : {&clean, &roomy})
    {
        support::source same{"slack"};
        append_random(*cache, same, 3);
    }
    auto const q = random_queries<float>(6, 16);
    auto const a = attended<half, float>(clean.view(), q);
    auto const b = attended<half, float>(roomy.view(), q);
    CHECK(support::same_bits(a.output.elements(), b.output.elements()));
    CHECK(support::same_bits(a.lse.elements(), b.lse.elements()));
}

TEST_CASE("a NaN in one query shows in its own row and in no other")
{
    packed_layer<half> const layer{{.heads = 2, .tokens = 50, .window = 3}};
    auto const cache = layer.packed();
    auto q           = random_queries<float>(6, 16);
    auto const clean = attended<half, float>(cache.view(), q);
    q.set(std::numeric_limits<float>::quiet_NaN(), 4, 7);
    auto const got = attended<half, float>(cache.view(), q);
    for (index_t i = 0; i < 6; ++i)
    {
        CHECK(std::isnan(got.lse.get(i)) == (i == 4));
        for (index_t c = 0; c < 16; ++c)
        {
            if (i == 4) { CHECK(std::isnan(got.output.get(i, c))); }
            else { CHECK(got.output.get(i, c) == clean.output.get(i, c)); }
        }
    }
}

TEST_CASE("neither attend nor append asks for memory, once scratch has grown")
{
    packed_layer<half> const layer{{.heads = 2, .tokens = 3000, .window = 3, .dims = {128, 128}}};
    auto cache = layer.packed(20);
    auto q     = random_queries<float>(6, 128);
    result<float> got{6, 128};
    tensor<float, 2> key{{2, 128}};
    key.assign(std::vector<float>(256, 0.5F));
    auto const view = cache.view();
    auto const call = [&](cpu::backend const& on) {
        append(on, key.in(), key.in(), view);
        attend(on, q.in(), view, {}, got.output.out(), got.lse.out());
    };
    workspace scratch{cpu::host_memory{}};
    cpu::backend const on{&scratch};
    call(on);
    std::int64_t allocations = -1;
    {
        support::allocation_counter const counter;
        call(on);
        allocations = counter.count();
    }
    CHECK(allocations == 0);
    CHECK(cache.appended() == 2);
    support::allocation_counter const counter;
    ::operator delete(::operator new(1));
    CHECK(counter.count() == 1); // the counter counts
}

namespace
{

/// Two threads that call no task: what is asked of them touches no memory.
struct idle_executor
{
    static int threads() { return 2; }
    void parallel_for(index_t, cpu::executor_ref::task_function, void*) {}
};

} // namespace

TEST_CASE("scratch is that of one panel of rows, however many queries there are and whatever the arena holds")
{
    packed_layer<half> const layer{{.heads = 4, .tokens = 20, .window = 3, .dims = {64, 64}, .rungs = rungs_of_codes}};
    for (index_t const arena : {index_t{1} << 16, index_t{1} << 26, index_t{1} << 29})
    {
        auto* const nowhere = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40);
        index_t appended    = 8192;
        std::vector<head_entry> heads(4);
        host_cache<half> const cache{
            layer.layout, nowhere, arena, heads.data(), nowhere + (std::uintptr_t{1} << 32), 8192, &appended};
        for (index_t const group : {1, 3, 8, 40})
        {
            idle_executor pool;
            auto const bytes_of = [&](index_t n) {
                auto const at = [&](int i) { return reinterpret_cast<float*>(nowhere + (std::uintptr_t(i) << 36)); };
                in_view<float, 3, cpu::backend> const q{at(1), {4 * group, n, 64}, {n * 64, 64, 1}};
                out_view<float, 3, cpu::backend> const to{at(2), {4 * group, n, 64}, {n * 64, 64, 1}};
                out_view<float, 2, cpu::backend> const lse{at(3), {4 * group, n}, {n, 1}};
                std::vector<sequence_view<half, space::host>> const two{{cache, n - 1}, {cache, 1}};
                return std::pair{support::run([&](cpu::backend const& on) { attend(on, q, cache, {}, to, lse); }, pool),
                    support::run([&](cpu::backend const& on) { attend(on, q, std::span{two}, {}, to, lse); }, pool)};
            };
            // A panel has 32 rows, or one token's where these are more.
            index_t const panel     = std::max<index_t>(32 / group, 1);
            auto const [one, batch] = bytes_of(panel + 1);
            CAPTURE(arena);
            CAPTURE(group);
            CHECK(bytes_of(512) == std::pair{one, batch});
            CHECK(bytes_of(4096) == std::pair{one, batch});
            // Parts of each of two sequences, and threads: softmax state, sums and queries in three bases, logits.
            index_t const rows_of_panel = std::max<index_t>(32, group);
            CHECK(batch <= rows_of_panel * (2 * (4 + 513) + 2) * 4 * 4 * 64 + (index_t{1} << 18));
        }
    }
}

TEST_CASE("queries [H*G, D] are checked like those of one token, and a cache without a directory is refused")
{
    packed_layer<half> const layer{{.heads = 2, .tokens = 50, .window = 3, .dims = {16, 24}}};
    auto const cache   = layer.packed();
    auto const q       = random_queries<float>(4, 16);
    auto const refused = [&](auto const& view, index_t width, index_t sums) {
        tensor<float, 2> output{{4, width}};
        tensor<float, 1> lse{{sums}};
        return error_text<invalid_argument>([&] {
            support::run([&](cpu::backend const& on) { attend(on, q.in(), view, {}, output.out(), lse.out()); });
        });
    };
    CHECK(refused(cache.view(), 24, 4) == "threw nothing");
    CHECK(refused(cache.view(), 16, 4) == "attend: output must be [H*G,n,Dv] = [4, 1, 24], its extent 2 is 16");
    CHECK(refused(cache.view(), 24, 3) == "attend: lse must be [H*G,n] = [4, 1], its extent 0 is 3");
    auto none  = cache.view();
    none.heads = nullptr;
    CHECK(refused(none, 24, 4) == "attend: cache has no directory");
}
