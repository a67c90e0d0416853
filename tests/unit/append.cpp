#include <mdkv/append.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>

#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/packed.hpp"
#include "support/random.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <initializer_list>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace
{

using namespace mdkv;
using support::error_text;
using support::index_t;
using support::packed_layer;
using support::tensor;

/// Token t of a [H, N, D] tensor as [H, D], laid out as asked.
template <class T>
tensor<T, 2> token(tensor<T, 3> const& from, index_t t, support::placement how = {})
{
    tensor<T, 2> row{{from.extent(0), from.extent(2)}, how};
    for (index_t h = 0; h < from.extent(0); ++h)
    {
        for (index_t d = 0; d < from.extent(2); ++d) { row.set(from.get(h, t, d), h, d); }
    }
    return row;
}

template <class T>
std::vector<std::byte> tail_of(cpu::cache<T> const& cache)
{
    auto const view = cache.view();
    return {view.tail, view.tail + cache.tail_bytes()};
}

} // namespace

TEST_CASE_TEMPLATE("an appended token reads back bit for bit, wherever it came from", T, float, half, bfloat16)
{
    packed_layer<T> const source{{.heads = 3, .tokens = 37, .window = 0, .dims = {24, 7}, .rungs = {drop, full}}, 1};
    for (index_t const capacity : {37, 48, 50})
    {
        for (support::placement const how : {support::placement{}, {.slack = 2}, {.misalign = 1}})
        {
            packed_layer<T> const empty{{.heads = 3, .tokens = 0, .window = 0, .dims = {24, 7}, .rungs = {drop, full}}};
            auto cache = empty.packed(capacity);
            for (index_t t = 0; t < 37; ++t)
            {
                auto const key   = token(source.keys, t, how);
                auto const value = token(source.values, t, how);
                support::run([&](cpu::backend const& on) { append(on, key.in(), value.in(), cache.view()); });
                CHECK(cache.appended() == t + 1);
            }
            for (index_t h = 0; h < 3; ++h)
            {
                auto const stored = support::stored_tokens(cache.view(), h);
                REQUIRE(stored.size() == 37);
                for (index_t t = 0; t < 37; ++t)
                {
                    std::vector<T> key;
                    std::vector<T> value;
                    for (index_t d = 0; d < 24; ++d) { key.push_back(source.keys.get(h, t, d)); }
                    for (index_t d = 0; d < 7; ++d) { value.push_back(source.values.get(h, t, d)); }
                    CHECK(support::same_bits(stored[static_cast<std::size_t>(t)].key, key));
                    CHECK(support::same_bits(stored[static_cast<std::size_t>(t)].value, value));
                }
            }
        }
    }
}

TEST_CASE("appending k tokens is packing them at the full rung")
{
    for (index_t const appended : {1, 15, 16, 17, 30})
    {
        support::packed_sizes sizes{.heads = 2, .tokens = 40 + appended, .window = 0, .dims = {32, 24}};
        packed_layer<half> whole{sizes};
        for (index_t h = 0; h < 2; ++h)
        {
            for (index_t t = 40; t < sizes.tokens; ++t) { whole.rung.set(3, h, t); }
        }
        auto const packed        = whole.packed();
        packed_layer<half> fewer = packed_layer<half>{sizes};
        fewer.rung.assign(whole.rung.elements());
        for (index_t h = 0; h < 2; ++h)
        {
            for (index_t t = 40; t < sizes.tokens; ++t) { fewer.rung.set(0, h, t); }
        }
        auto grown = fewer.packed(appended);
        for (index_t t = 40; t < sizes.tokens; ++t)
        {
            auto const key   = token(whole.keys, t);
            auto const value = token(whole.values, t);
            support::run([&](cpu::backend const& on) { append(on, key.in(), value.in(), grown.view()); });
        }
        tensor<float, 2> q{{6, 32}};
        support::source random{"append queries"};
        for (index_t i = 0; i < 6; ++i)
        {
            for (index_t d = 0; d < 32; ++d) { q.set(static_cast<float>(random.normal()), i, d); }
        }
        std::vector<std::vector<float>> got;
        for (cpu::cache<half> const* cache : std::initializer_list<cpu::cache<half> const*>{&packed, &grown})
        {
            tensor<float, 2> output{{6, 24}};
            tensor<float, 1> lse{{6}};
            support::run(
                [&](cpu::backend const& on) { attend(on, q.in(), cache->view(), {}, output.out(), lse.out()); });
            got.push_back(output.elements());
            got.push_back(lse.elements());
        }
        support::worst_error error;
        for (std::size_t i = 0; i < got[0].size(); ++i) { error.add(got[2][i], got[0][i], 1.0L); }
        for (std::size_t i = 0; i < got[1].size(); ++i) { error.add(got[3][i], got[1][i], 1.0L); }
        INFO(error);
        CHECK(error.within(3e-6));
    }
}

TEST_CASE("a full tail refuses the next token by its capacity and keeps what it has")
{
    packed_layer<half> const layer{{.heads = 2, .tokens = 8, .window = 1}};
    for (index_t const capacity : {0, 1, 16, 17})
    {
        auto cache = layer.packed(capacity);
        tensor<float, 2> key{{2, 16}};
        key.assign(std::vector<float>(32, 1.5F));
        auto const add = [&] {
            support::run([&](cpu::backend const& on) { append(on, key.in(), key.in(), cache.view()); });
        };
        for (index_t t = 0; t < capacity; ++t) { add(); }
        auto const before = tail_of(cache);
        CHECK(error_text<insufficient_workspace>(add)
              == "append: the tail holds " + std::to_string(capacity) + " tokens and has room for "
                     + std::to_string(capacity) + "; 1 more do not fit");
        CHECK(tail_of(cache) == before);
        CHECK(cache.appended() == capacity);
    }
}

TEST_CASE("several tokens at once are appended as one by one, from any strides")
{
    for (auto const& [tokens, first, dims] : std::vector<std::tuple<index_t, index_t, head_dims>>{{37, 0, {24, 7}},
             {37, 1, {24, 7}}, {37, 15, {24, 7}}, {37, 16, {24, 7}}, {37, 17, {24, 7}}, {37, 37, {24, 7}},
             {300, 0, {48, 32}}, {300, 3, {48, 32}}, {300, 49, {40, 31}}})
    {
        packed_layer<half> const source{
            {.heads = 3, .tokens = tokens, .window = 0, .dims = dims, .rungs = {drop, full}}, 1};
        packed_layer<half> const empty{{.heads = 3, .tokens = 0, .window = 0, .dims = dims, .rungs = {drop, full}}};
        auto one_by_one = empty.packed(tokens + 3);
        auto at_once    = empty.packed(tokens + 3);
        for (index_t t = 0; t < tokens; ++t)
        {
            auto const key   = token(source.keys, t);
            auto const value = token(source.values, t);
            support::run([&](cpu::backend const& on) { append(on, key.in(), value.in(), one_by_one.view()); });
        }
        support::run([&, first = first, tokens = tokens](cpu::backend const& on) {
            auto const some = [&](auto const& x, index_t begin, index_t count) {
                return slice<1>(x.in(), begin, count);
            };
            append(on, some(source.keys, 0, first), some(source.values, 0, first), at_once.view());
            append(on, some(source.keys, first, tokens - first), some(source.values, first, tokens - first),
                at_once.view());
        });
        CHECK(at_once.appended() == tokens);
        CHECK(tail_of(at_once) == tail_of(one_by_one));
    }
}

TEST_CASE("tokens that do not all fit are refused before the first is written")
{
    packed_layer<half> const layer{{.heads = 2, .tokens = 8, .window = 1}};
    auto cache        = layer.packed(4);
    auto const before = tail_of(cache);
    tensor<half, 3> const k{{2, 5, 16}};
    auto const add = [&](auto const& keys, auto const& values) {
        support::run([&](cpu::backend const& on) { append(on, keys.in(), values.in(), cache.view()); });
    };
    CHECK(error_text<insufficient_workspace>([&] { add(k, k); })
          == "append: the tail holds 0 tokens and has room for 4; 5 more do not fit");
    CHECK(tail_of(cache) == before);
    CHECK(cache.appended() == 0);
}

TEST_CASE("append, attend and truncate_tail take a cache's owner or its view, with equal bits")
{
    packed_layer<half> const layer{{.heads = 2, .tokens = 20, .window = 1}, 3};
    auto owner      = layer.packed(4);
    auto other      = layer.packed(4);
    auto const rows = [&](index_t first, index_t n) { return slice<1>(layer.keys.in(), first, n); };
    tensor<half, 3> queries{{4, 3, 16}};
    for (index_t i = 0; i < 4 * 3 * 16; ++i)
    {
        queries.set(layer.values.get(i % 2, i / 48, i % 16), i / 48, i / 16 % 3, i % 16);
    }
    auto const decode = [&](cpu::backend const& on, auto&& to, auto const& from, std::vector<half>& got) {
        tensor<half, 3> output{{4, 3, 16}};
        tensor<half, 2> one{{4, 16}};
        tensor<float, 2> lse{{4, 3}};
        tensor<float, 1> lse_of_one{{4}};
        append(on, rows(0, 3), rows(3, 3), to);
        append(on, token(layer.keys, 7).in(), token(layer.keys, 8).in(), to);
        truncate_tail(on, 3, to);
        attend(on, queries.in(), from, {}, output.out(), lse.out());
        attend(on, token(queries, 1).in(), from, {}, one.out(), lse_of_one.out());
        got = output.elements();
        for (half const x : one.elements()) { got.push_back(x); }
    };
    std::vector<half> by_owner;
    std::vector<half> by_view;
    support::run([&](cpu::backend const& on) { decode(on, owner, owner, by_owner); });
    support::run([&](cpu::backend const& on) { decode(on, other.view(), std::as_const(other).view(), by_view); });
    CHECK(owner.appended() == 3);
    CHECK(tail_of(owner) == tail_of(other));
    CHECK(support::same_bits(by_owner, by_view));
}

TEST_CASE("truncate_tail takes the last tokens back, and the next ones take their places")
{
    packed_layer<half> const layer{{.heads = 2, .tokens = 8, .window = 1}};
    auto cache            = layer.packed(4);
    auto const append_row = [&](float x) {
        tensor<half, 2> row{{2, 16}};
        row.assign(std::vector<half>(32, narrow<half>(x)));
        support::run([&](cpu::backend const& on) { append(on, row.in(), row.in(), cache.view()); });
    };
    auto const truncate = [&](index_t tokens) {
        support::run([&](cpu::backend const& on) { truncate_tail(on, tokens, cache.view()); });
    };
    for (float const x : {1.0F, 2.0F}) { append_row(x); }
    auto const want = support::stored_tokens(cache.view(), 1);
    append_row(3.0F);
    truncate(7);
    CHECK(cache.appended() == 3);
    truncate(1);
    CHECK(cache.appended() == 1);
    append_row(2.0F);
    auto const got = support::stored_tokens(cache.view(), 1);
    REQUIRE(got.size() == want.size());
    for (std::size_t i = 0; i < got.size(); ++i) { CHECK(support::same_bits(got[i].key, want[i].key)); }
    CHECK(
        error_text<invalid_argument>([&] { truncate(-1); }) == "truncate_tail: tokens is -1; it must not be negative");
    CHECK(support::run([&](cpu::backend const& on) { truncate_tail(on, 2, cache.view()); }) == 0);
    CHECK(cache.appended() == 2);
}
