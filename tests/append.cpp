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

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
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
              == "append: the tail is full: it holds " + std::to_string(capacity) + " tokens and has room for "
                     + std::to_string(capacity));
        CHECK(tail_of(cache) == before);
        CHECK(cache.appended() == capacity);
    }
}

TEST_CASE("a token of the wrong shape, a null one, and one inside the tail are refused by name")
{
    packed_layer<half> const layer{{.heads = 2, .tokens = 8, .window = 1, .dims = {16, 24}}};
    auto cache         = layer.packed(4);
    auto const before  = tail_of(cache);
    auto const refused = [&](auto const& key, auto const& value) {
        return error_text<invalid_argument>(
            [&] { support::run([&](cpu::backend const& on) { append(on, key(on), value(on), cache.view()); }); });
    };
    tensor<half, 2> const k{{2, 16}};
    tensor<half, 2> const v{{2, 24}};
    tensor<half, 2> const one_head{{1, 16}};
    auto const given = [](auto const& x) { return [&x](cpu::backend const&) { return x.in(); }; };
    auto const null  = [](cpu::backend const& on) { return in(on, static_cast<half*>(nullptr), 2, 24); };
    auto const own = [&](cpu::backend const& on) { return in(on, reinterpret_cast<half*>(cache.view().tail), 2, 16); };
    CHECK(refused(given(one_head), given(v)) == "append: key must be [H,D] = [2, 16], its extent 0 is 1");
    CHECK(refused(given(k), given(k)) == "append: value must be [H,Dv] = [2, 24], its extent 1 is 16");
    CHECK(refused(given(k), null) == "append: value is null but not empty");
    CHECK(refused(own, given(v)) == "append: cache.tail overlaps key");
    CHECK(cache.appended() == 0);
    CHECK(tail_of(cache) == before);
}

TEST_CASE("a dry run appends nothing")
{
    packed_layer<half> const layer{{.heads = 2, .tokens = 8, .window = 1}};
    auto cache = layer.packed(4);
    tensor<half, 2> const k{{2, 16}};
    CHECK(support::scratch_bytes([&](cpu::backend const& on) { append(on, k.in(), k.in(), cache.view()); }) == 0);
    CHECK(cache.appended() == 0);
}

TEST_CASE("a tail inside the workspace and a token over the directory are refused")
{
    packed_layer<half> const layer{{.heads = 2, .tokens = 8, .window = 1}};
    auto cache = layer.packed(4);
    support::scratch_memory memory{4096};
    workspace scratch{memory.span()};
    cpu::backend const on{&scratch};
    tensor<half, 2> const k{{2, 16}};
    auto elsewhere = cache.view();
    elsewhere.tail = memory.span().data();
    CHECK(error_text<invalid_argument>([&] { append(on, k.in(), k.in(), elsewhere); })
          == "append: cache.tail overlaps the workspace");
    auto const counter = in(on, reinterpret_cast<half*>(cache.view().appended), {2, 16}, {0, 1});
    CHECK(error_text<invalid_argument>([&] { append(on, counter, k.in(), cache.view()); })
          == "append: cache.appended overlaps key");
    CHECK(cache.appended() == 0);
}
