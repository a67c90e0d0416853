#include <mdkv/pack.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/pack.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/packed.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace
{

using namespace mdkv;
using support::error_text;
using support::index_t;
using support::packed_layer;
using support::packed_sizes;
using support::placement;
using support::tensor;

template <class T>
std::vector<std::byte> arena_of(cpu::cache<T> const& cache)
{
    auto const view = cache.view();
    return {view.arena, view.arena + cache.arena_bytes()};
}

template <class T>
std::vector<head_entry> directory_of(cpu::cache<T> const& cache)
{
    auto const view = cache.view();
    return {view.heads, view.heads + cache.layout().heads};
}

template <class T>
std::vector<T> row_of(tensor<T, 3> const& from, index_t h, index_t t)
{
    std::vector<T> row;
    for (index_t d = 0; d < from.extent(2); ++d) { row.push_back(from.get(h, t, d)); }
    return row;
}

/// Unit in the last place of T at x.
template <class T>
double spacing(double x)
{
    int const digits = std::same_as<T, float> ? 24 : std::same_as<T, half> ? 11 : 8;
    int const least  = std::same_as<T, half> ? -24 : -140;
    return std::ldexp(1.0, x == 0.0 ? least : std::max(std::ilogb(x) + 1 - digits, least));
}

/// Stored coordinates are the dot products with the basis' rows: float sums, then one rounding to T.
template <class T>
void add_errors(support::worst_error& error, std::vector<T> const& stored, std::vector<T> const& original,
    tensor<float, 3> const& basis, index_t h)
{
    for (std::size_t c = 0; c < stored.size(); ++c)
    {
        double want = 0;
        double size = 0;
        for (std::size_t d = 0; d < original.size(); ++d)
        {
            double const term = static_cast<double>(widen(original[d])) * static_cast<double>(basis.get(h, c, d));
            want += term;
            size += std::fabs(term);
        }
        double const tolerance = 0.51 * spacing<T>(want) + static_cast<double>(original.size()) * 0x1p-24 * size;
        error.add(static_cast<double>(widen(stored[c])), want, tolerance, static_cast<index_t>(c));
    }
}

/// Every stored token against the layer it was packed from.
template <class T>
void check_contents(packed_layer<T> const& layer, cpu::cache<T> const& cache)
{
    support::worst_error error;
    auto const full_rung = static_cast<int>(layer.layout.full_rung);
    for (index_t h = 0; h < layer.sizes.heads; ++h)
    {
        auto const stored       = support::stored_tokens(cache.view(), h);
        std::size_t next        = 0;
        auto const expect_whole = [&](std::vector<T> const& key, std::vector<T> const& value) {
            REQUIRE(next < stored.size());
            CHECK(stored[next].rung == -1);
            CHECK(support::same_bits(stored[next].key, key));
            CHECK(support::same_bits(stored[next].value, value));
            ++next;
        };
        for (int r = 0; r < static_cast<int>(layer.sizes.rungs.size()); ++r)
        {
            for (index_t t = 0; t < layer.sizes.tokens; ++t)
            {
                if (layer.rung.get(h, t) != r || !layer.layout.projected(static_cast<std::size_t>(r))) { continue; }
                REQUIRE(next < stored.size());
                CHECK(stored[next].rung == r);
                CHECK(static_cast<index_t>(stored[next].key.size())
                      == layer.ratios.coordinates(static_cast<std::size_t>(r), layer.sizes.dims.keys));
                add_errors(error, stored[next].key, row_of(layer.keys, h, t), layer.key_basis, h);
                add_errors(error, stored[next].value, row_of(layer.values, h, t), layer.value_basis, h);
                ++next;
            }
        }
        for (index_t t = 0; t < layer.sizes.tokens; ++t)
        {
            if (layer.rung.get(h, t) == full_rung)
            {
                expect_whole(row_of(layer.keys, h, t), row_of(layer.values, h, t));
            }
        }
        for (index_t t = 0; t < layer.sizes.window; ++t)
        {
            expect_whole(row_of(layer.window_keys, h, t), row_of(layer.window_values, h, t));
        }
        CHECK(next == stored.size());
    }
    if (error.compared() > 0)
    {
        INFO(error);
        CHECK(error.within(1.0));
    }
}

} // namespace

TEST_CASE_TEMPLATE(
    "full tokens and window are stored bit for bit, projected ones to rounding, in order", T, float, half, bfloat16)
{
    for (index_t const dim : {8, 40, 56, 64, 80, 96, 128, 192, 256, 576})
    {
        packed_layer<T> const layer{{.heads = 2, .tokens = 75, .window = 5, .dims = {dim, dim}}};
        check_contents(layer, layer.packed());
    }
    for (head_dims const dims : {head_dims{192, 128}, {40, 96}, {8, 9}, {512, 8}})
    {
        packed_layer<T> const layer{{.heads = 2, .tokens = 75, .window = 5, .dims = dims}};
        check_contents(layer, layer.packed());
    }
}

TEST_CASE("every token at one rung, none, or a few around a tile's edge")
{
    for (index_t const tokens : {0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 100})
    {
        for (int const every : {0, 1, 2, 3})
        {
            for (index_t const window : {0, 1, 16})
            {
                packed_layer<half> const layer{
                    {.heads = 1, .tokens = tokens, .window = window, .dims = {32, 16}}, every};
                check_contents(layer, layer.packed());
            }
        }
    }
}

TEST_CASE("ratio sets without drop, without full, and with many rungs are packed")
{
    for (std::vector<rung> const& rungs :
        {std::vector<rung>{part(1, 4), full}, {drop, part(3, 4)}, {full}, {drop}, {part(1, 2)},
            {drop, part(1, 16), part(2, 16), part(3, 16), part(4, 16), part(5, 16), part(6, 16), part(7, 16),
                part(8, 16), part(9, 16), part(10, 16), part(11, 16), part(12, 16), part(13, 16), part(14, 16), full}})
    {
        packed_layer<bfloat16> const layer{{.heads = 2, .tokens = 120, .window = 3, .dims = {64, 32}, .rungs = rungs}};
        check_contents(layer, layer.packed());
    }
}

TEST_CASE("the arena holds exactly what the budget is charged")
{
    packed_layer<half> const layer{{.heads = 3, .tokens = 64, .window = 2, .dims = {64, 32}}};
    index_t bytes = 0;
    for (index_t h = 0; h < 3; ++h)
    {
        index_t widest       = 0;
        index_t widest_value = 0;
        for (index_t t = 0; t < 64; ++t)
        {
            auto const r = std::size_t{layer.rung.get(h, t)};
            bytes += layer.ratios.bytes(r, {64, 32}, 2);
            widest       = r == 3 ? widest : std::max(widest, layer.ratios.coordinates(r, 64));
            widest_value = r == 3 ? widest_value : std::max(widest_value, layer.ratios.coordinates(r, 32));
        }
        bytes += 2 * (64 + 32) * 2 + (64 * widest + 32 * widest_value) * 2;
    }
    CHECK(layer.bytes() == bytes);
    packed_layer<half> const kept{{.heads = 3, .tokens = 64, .window = 2, .dims = {64, 32}}, 3};
    CHECK(kept.bytes() == 3 * 66 * 96 * 2); // full budget: no projection
    packed_layer<half> const dropped{{.heads = 3, .tokens = 64, .window = 2, .dims = {64, 32}}, 0};
    CHECK(dropped.bytes() == 3 * 2 * 96 * 2);
}

TEST_CASE("projections hold only the columns of the widest rung in use, rounded to the element type")
{
    packed_layer<half> layer{{.heads = 2, .tokens = 20, .window = 0, .dims = {32, 64}}, 1};
    layer.rung.set(2, 1, 7);
    auto const cache = layer.packed();
    for (index_t h = 0; h < 2; ++h)
    {
        auto const& entry = cache.view().heads[h];
        CHECK(entry.key_columns == (h == 0 ? 4 : 8));
        CHECK(entry.value_columns == (h == 0 ? 8 : 16));
        for (index_t c = 0; c < entry.key_columns; ++c)
        {
            for (index_t d = 0; d < 32; ++d)
            {
                auto const stored =
                    support::element_at<half>(cache.view().arena, entry.key_projection, d * entry.key_columns + c);
                CHECK(widen(stored) == widen(narrow<half>(layer.key_basis.get(h, c, d))));
            }
        }
        for (index_t c = 0; c < entry.value_columns; ++c)
        {
            for (index_t d = 0; d < 64; ++d)
            {
                auto const stored = support::element_at<half>(cache.view().arena, entry.value_projection, c * 64 + d);
                CHECK(widen(stored) == widen(narrow<half>(layer.value_basis.get(h, c, d))));
            }
        }
    }
}

TEST_CASE_TEMPLATE("strides, odd addresses and any number of threads pack the same bytes", T, half, bfloat16)
{
    packed_sizes const sizes{.heads = 3, .tokens = 150, .window = 9, .dims = {40, 56}};
    packed_layer<T> const plain{sizes};
    auto const want = plain.packed();
    for (placement const how :
        {placement{.swapped = true}, {.slack = 3}, {.misalign = 1}, {.swapped = true, .slack = 1, .misalign = 3},
            {.fence = support::guard::after}, {.fence = support::guard::before}})
    {
        packed_layer<T> const laid{sizes, -1, how};
        CHECK(arena_of(laid.packed()) == arena_of(want));
    }
    for (int const threads : {2, 5})
    {
        cpu::thread_pool pool{threads};
        CHECK(arena_of(plain.packed(0, pool)) == arena_of(want));
    }
}

TEST_CASE("NaN in dropped tokens changes no byte")
{
    packed_layer<half> layer{{.heads = 2, .tokens = 60, .window = 2}};
    auto const want = layer.packed();
    for (index_t h = 0; h < 2; ++h)
    {
        for (index_t t = 0; t < 60; ++t)
        {
            if (layer.rung.get(h, t) != 0) { continue; }
            for (index_t d = 0; d < 16; ++d)
            {
                layer.keys.set(narrow<half>(std::numeric_limits<float>::quiet_NaN()), h, t, d);
                layer.values.set(narrow<half>(std::numeric_limits<float>::infinity()), h, t, d);
            }
        }
    }
    CHECK(arena_of(layer.packed()) == arena_of(want));
}

TEST_CASE("packing empties the tail")
{
    packed_layer<half> const layer{{}};
    auto cache             = layer.packed(4);
    *cache.view().appended = 3;
    support::run([&](cpu::backend const& on) { layer.pack(on, cache.view()); });
    CHECK(cache.appended() == 0);
}

TEST_CASE("no heads, no tokens and no window are packed to nothing")
{
    packed_layer<half> const heads{{.heads = 0}};
    CHECK(heads.bytes() == 0);
    CHECK(heads.packed().arena_bytes() == 0);
    packed_layer<half> const tokens{{.heads = 2, .tokens = 0, .window = 0}};
    CHECK(tokens.bytes() == 0);
    CHECK(support::stored_tokens(tokens.packed().view(), 1).empty());
}

TEST_CASE("an unknown rung is refused by head and token, and nothing changes")
{
    packed_layer<half> layer{{.heads = 2, .tokens = 300}};
    auto cache           = layer.packed();
    auto const before    = arena_of(cache);
    auto const directory = directory_of(cache);
    layer.rung.set(4, 1, 268);
    CHECK(error_text<invalid_argument>([&] { static_cast<void>(layer.bytes()); })
          == "packed_bytes: rung of head 1, token 268 is 4; it must be below 4");
    CHECK(error_text<invalid_argument>([&] {
        support::run([&](cpu::backend const& on) { layer.pack(on, cache.view()); });
    }) == "pack: rung of head 1, token 268 is 4; it must be below 4");
    CHECK(arena_of(cache) == before);
    CHECK(directory_of(cache) == directory);
}

TEST_CASE("an arena one byte too small is refused by both sizes, and nothing changes")
{
    packed_layer<half> const layer{{.heads = 2, .tokens = 50}};
    index_t const bytes = layer.bytes();
    cpu::cache<half> cache{layer.layout, bytes - 1};
    std::memset(cache.view().arena, 0x5A, static_cast<std::size_t>(bytes - 1));
    auto const before = arena_of(cache);
    CHECK(error_text<insufficient_workspace>([&] {
        support::run([&](cpu::backend const& on) { layer.pack(on, cache.view()); });
    }) == "pack: the arena holds " + std::to_string(bytes - 1) + " bytes, " + std::to_string(bytes) + " are needed");
    CHECK(arena_of(cache) == before);
    CHECK(directory_of(cache) == std::vector<head_entry>(2));
}

TEST_CASE("wrong shapes, missing bases and overlapping memory are refused by name")
{
    packed_layer<half> const layer{{.heads = 2, .tokens = 50, .window = 3, .dims = {16, 24}}};
    auto cache        = layer.packed();
    auto const before = arena_of(cache);
    tensor<half, 3> const short_values{{2, 49, 24}};
    tensor<half, 3> const wide_window{{2, 3, 17}};
    tensor<float, 3> const no_basis{{0, 0, 0}};
    tensor<float, 3> const small_basis{{2, 15, 16}};
    tensor<std::uint8_t, 2> const one_head{{1, 50}};
    auto const refused = [&](auto const& v, auto const& wk, auto const& uk, auto const& r) {
        return error_text<invalid_argument>([&] {
            support::run([&](cpu::backend const& on) {
                mdkv::pack(on, layer.keys.in(), v.in(), wk.in(), layer.window_values.in(), uk.in(),
                    layer.value_basis.in(), r.in(), cache.view());
            });
        });
    };
    auto const& x = layer;
    CHECK(refused(short_values, x.window_keys, x.key_basis, x.rung)
          == "pack: values must be [H,N,Dv] = [2, 50, 24], its extent 1 is 49");
    CHECK(refused(x.values, wide_window, x.key_basis, x.rung)
          == "pack: window_keys must be [H,W,D] = [2, 3, 16], its extent 2 is 17");
    CHECK(refused(x.values, x.window_keys, small_basis, x.rung)
          == "pack: key_basis must be [H,D,D] = [2, 16, 16], its extent 1 is 15");
    CHECK(refused(x.values, x.window_keys, x.key_basis, one_head)
          == "pack: rung must be [H,N] = [2, 50], its extent 0 is 1");
    index_t ones = 0;
    for (index_t t = 0; t < 50; ++t) { ones += x.rung.get(0, t) == 1; }
    CHECK(refused(x.values, x.window_keys, no_basis, x.rung)
          == "pack: head 0 has " + std::to_string(ones)
                 + " tokens at projected rung 1, but key_basis or value_basis is empty");
    auto const overlap = error_text<invalid_argument>([&] {
        support::run([&](cpu::backend const& on) {
            auto const inside = in(on, reinterpret_cast<half*>(cache.view().arena), {2, 50, 16}, {index_t{0}, 0, 1});
            mdkv::pack(on, inside, x.values.in(), x.window_keys.in(), x.window_values.in(), x.key_basis.in(),
                x.value_basis.in(), x.rung.in(), cache.view());
        });
    });
    CHECK(overlap == "pack: cache.arena overlaps keys");
    CHECK(arena_of(cache) == before);
}

TEST_CASE("bases may be left out when no token is at a projected rung")
{
    packed_layer<half> const layer{{.heads = 2, .tokens = 50, .window = 3}, 3};
    auto const want = layer.packed();
    cpu::cache<half> cache{layer.layout, layer.bytes()};
    tensor<float, 3> const no_basis{{0, 0, 0}};
    support::run([&](cpu::backend const& on) {
        mdkv::pack(on, layer.keys.in(), layer.values.in(), layer.window_keys.in(), layer.window_values.in(),
            no_basis.in(), no_basis.in(), layer.rung.in(), cache.view());
    });
    CHECK(arena_of(cache) == arena_of(want));
}

TEST_CASE("a dry run packs nothing")
{
    packed_layer<half> const layer{{}};
    cpu::cache<half> cache{layer.layout, layer.bytes()};
    CHECK(support::scratch_bytes([&](cpu::backend const& on) { layer.pack(on, cache.view()); }) == 0);
    CHECK(directory_of(cache) == std::vector<head_entry>(2));
}
