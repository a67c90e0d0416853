#include <mdkv/stages/pack.hpp>

#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/stages/basis.hpp>

#include "gpu/support/device.hpp"
#include "gpu/support/device_packed.hpp"
#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/packed.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using mdkv::half; // CUDA has a type of that name in the global namespace
using support::device_layer;
using support::device_resource;
using support::device_tensor;
using support::error_text;
using support::index_t;
using support::owned_cache;
using support::packed_layer;
using support::packed_on_device;
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

/// Every storage, in the original basis and in the head's.
std::vector<rung> storage_rungs()
{
    return {drop, fraction(1, 8), fraction(1, 4).as(storage::int8), full_int4, fraction(3, 4).as(storage::int8),
        full_int8, full};
}

/// The CPU's directory. A GPU fuses products and sums where the host may not: copies
/// and projections have the same bits, coordinates of elements are two units of bfloat16's last place apart at the most, and
/// codes by one where a coordinate lies half way between two.
template <class T>
void check_same(cpu::cache<T> const& got, cpu::cache<T> const& want)
{
    CHECK(directory_of(got) == directory_of(want));
    CHECK(got.appended() == 0);
    bool near        = directory_of(got) == directory_of(want);
    auto const mine  = detail::without_const(got.view());
    auto const right = detail::without_const(want.view());
    for (index_t h = 0; near && h < want.layout().heads; ++h)
    {
        for (std::size_t i = 0; i < detail::most_runs(want.layout()); ++i)
        {
            for (bool const of_values : {false, true})
            {
                detail::stored_run const run = detail::run_of_head(right, h, i);
                detail::run_rows const& b    = run.rows(of_values);
                detail::run_rows a           = b;
                a.begin                      = mine.arena + (b.begin - right.arena);
                for (index_t t = 0; t < run.tokens; ++t)
                {
                    for (int c = 0; c < b.coordinates; ++c)
                    {
                        float const x    = support::stored_value<T>(a, t, c);
                        float const y    = support::stored_value<T>(b, t, c);
                        auto const group = b.group(t, c / int{quantised_group});
                        float const step =
                            b.kind == storage::plain
                                ? i < want.layout().rungs ? 0x1p-7F * (std::fabs(y) + 1e-2F) : 0.0F
                                : 1.01F
                                          * widen(detail::load_at<half>(
                                              b.begin + b.tile(t) + group.scale(static_cast<int>(t % tile_tokens))))
                                      + 0x1p-9F * std::fabs(y);
                        near = near && (std::fabs(x - y) <= step || (std::isnan(x) && std::isnan(y)));
                    }
                }
            }
        }
    }
    CHECK(near);
}

TEST_CASE_TEMPLATE("pack on the GPU gives the CPU's bits", T, float, half, bfloat16)
{
    for (head_dims const dims : {head_dims{64, 64}, {40, 96}, {128, 128}, {9, 33}, {130, 200}})
    {
        packed_layer<T> const layer{{.heads = 2,
            .tokens                         = 150,
            .window                         = 5,
            .dims                           = dims,
            .rungs                          = {drop, fraction(1, 8), fraction(1, 4), full}}};
        check_same(packed_on_device(layer), layer.packed());
    }
}

TEST_CASE("stand-ins are stored on the GPU as on the CPU, as many as a head drops tokens")
{
    for (index_t const stand_ins : {3, 20, 21})
    {
        bool const coded = stand_ins != 20;
        packed_layer<half> layer{{.heads = 3,
            .tokens                      = 50,
            .window                      = 5,
            .dims                        = {40, 24},
            .rungs                       = {drop, fraction(1, 8), full_int4, full},
            .stand_ins                   = stand_ins,
            .coded_stand_ins             = coded}};
        for (index_t t = 0; t < 50; ++t)
        {
            if (layer.rung.get(1, t) == 0) { layer.rung.set(1, 1, t); } // head 1 drops nothing
        }
        REQUIRE(layer.stand_ins(0) > 0);
        check_same(packed_on_device(layer), layer.packed());
    }
}

TEST_CASE("every storage at once, at aligned and at odd sizes, is the CPU's")
{
    for (head_dims const dims : {head_dims{64, 64}, {40, 56}, {100, 8}, {128, 64}})
    {
        for (index_t const tokens : {1, 16, 75, 700})
        {
            if (tokens > 100 && dims.keys != 64) { continue; }
            CAPTURE(dims.keys);
            CAPTURE(tokens);
            packed_layer<half> const layer{
                {.heads = 2, .tokens = tokens, .window = 3, .dims = dims, .rungs = storage_rungs(), .common = 5}};
            check_same(packed_on_device(layer), layer.packed());
        }
    }
    packed_layer<float> const wide{{.tokens = 75, .dims = {40, 33}, .rungs = storage_rungs()}};
    check_same(packed_on_device(wide), wide.packed());
    packed_layer<bfloat16> const third{{.heads = 3, .tokens = 75, .dims = {56, 40}, .rungs = storage_rungs()}};
    check_same(packed_on_device(third), third.packed());
}

TEST_CASE("all tokens at one rung, none, and a few around a tile's edge are the CPU's, with and without a window")
{
    for (index_t const tokens : {0, 1, 15, 16, 17, 63, 64, 65, 130})
    {
        for (int const every : {0, 1, 2, 3})
        {
            for (index_t const window : {0, 1, 16})
            {
                if (tokens > 17 && window == 1) { continue; }
                packed_layer<half> const layer{{.heads     = 1,
                                                   .tokens = tokens,
                                                   .window = window,
                                                   .dims   = {32, 16},
                                                   .rungs  = {drop, fraction(1, 2), full_int4, full}},
                    every};
                check_same(packed_on_device(layer), layer.packed());
            }
        }
    }
}

TEST_CASE("sets without drop, without a full rung, and with the most rungs are packed as by the CPU")
{
    for (std::vector<rung> const& rungs :
        {std::vector<rung>{fraction(1, 4), full}, {drop, fraction(3, 4)}, {full}, {drop},
            {drop, fraction(1, 16), fraction(2, 16), fraction(3, 16), fraction(4, 16), fraction(5, 16), fraction(6, 16),
                fraction(7, 16), fraction(8, 16), fraction(9, 16), fraction(10, 16), fraction(11, 16), fraction(12, 16),
                fraction(13, 16), fraction(14, 16), full}})
    {
        packed_layer<bfloat16> const layer{{.heads = 2, .tokens = 120, .window = 3, .dims = {64, 32}, .rungs = rungs}};
        check_same(packed_on_device(layer), layer.packed());
    }
    packed_layer<half> const no_heads{{.heads = 0}};
    CHECK(packed_on_device(no_heads).appended() == 0);
}

TEST_CASE("strides, swapped dimensions and addresses that are no multiple of 16 change no byte")
{
    support::packed_sizes const sizes{
        .heads = 3, .tokens = 90, .window = 9, .dims = {40, 56}, .rungs = storage_rungs()};
    auto const want = arena_of(packed_on_device(packed_layer<half>{sizes}));
    for (support::placement const how : {support::placement{.swapped = true}, {.slack = 3}, {.slack = 8},
             {.misalign = 2}, {.swapped = true, .slack = 1}})
    {
        CHECK(arena_of(packed_on_device(packed_layer<half>{sizes, -1, how})) == want);
    }
}

TEST_CASE("more room than needed changes nothing, and what is behind the packed bytes is left alone")
{
    packed_layer<half> const layer{{.heads = 2, .tokens = 50, .window = 4, .dims = {16, 16}, .rungs = storage_rungs()}};
    auto const tight = arena_of(packed_on_device(layer));
    auto const roomy = arena_of(packed_on_device(layer, 0, 77));
    CHECK(std::equal(tight.begin(), tight.end(), roomy.begin()));
    CHECK(std::vector<std::byte>(roomy.end() - 77, roomy.end()) == std::vector<std::byte>(77, std::byte{0xFF}));
}

TEST_CASE("where tokens do not fit or have no basis nothing is written, and no head holds a token")
{
    packed_layer<half> layer{
        {.heads = 3, .tokens = 50, .window = 4, .rungs = {drop, full_int4, fraction(3, 4).as(storage::int8), full}}};
    index_t const bytes = layer.bytes();
    struct outcome
    {
        std::vector<std::byte> arena;
        std::vector<head_entry> directory;
    };
    auto const packed = [&](index_t room) {
        device_layer<half> const there{layer};
        device_resource memory;
        owned_cache<half> cache{layer.layout, room, 2, nullptr, memory};
        support::run_on_device([&](gpu::backend const& on) {
            mdkv::pack(on, there.keys.in(), there.values.in(), there.window_keys.in(), there.window_values.in(),
                there.key_basis.in(), there.value_basis.in(), there.rung.in(), cache.view());
        });
        auto const got = gpu::to_host(cache, nullptr);
        return outcome{arena_of(got), directory_of(got)};
    };
    CHECK(packed(bytes).directory == directory_of(layer.packed()));
    outcome const small = packed(bytes - 1);
    CHECK(small.directory == std::vector<head_entry>(3));
    CHECK(small.arena == std::vector<std::byte>(static_cast<std::size_t>(bytes - 1), std::byte{0xFF}));
    for (auto* basis : {&layer.key_basis, &layer.value_basis}) { *basis = tensor<float, 3>{{0, 0, 0}}; }
    outcome const unbased = packed(bytes);
    CHECK(unbased.directory == std::vector<head_entry>(3));
    CHECK(unbased.arena == std::vector<std::byte>(static_cast<std::size_t>(bytes), std::byte{0xFF}));
    layer           = packed_layer<half>{layer.sizes, 1}; // nothing is projected
    auto const want = layer.packed();
    for (auto* basis : {&layer.key_basis, &layer.value_basis}) { *basis = tensor<float, 3>{{0, 0, 0}}; }
    CHECK(packed(layer.bytes()).arena == arena_of(want));
}

TEST_CASE("a token whose rung the layout does not have is dropped")
{
    packed_layer<half> layer{{.heads = 2, .tokens = 50, .window = 3}};
    layer.rung.set(0, 0, 7);
    layer.rung.set(0, 1, 49);
    auto const want     = layer.packed();
    index_t const bytes = layer.bytes();
    layer.rung.set(4, 0, 7);
    layer.rung.set(200, 1, 49);
    device_layer<half> const there{layer};
    device_resource memory;
    owned_cache<half> cache{layer.layout, bytes, 0, nullptr, memory};
    support::run_on_device([&](gpu::backend const& on) { there.pack(on, cache.view()); });
    check_same(gpu::to_host(cache, nullptr), want);
}

TEST_CASE("constant, tiny, huge and signed zero groups are coded as by the CPU")
{
    struct ends
    {
        float low, high;
    };
    std::vector<ends> const all{{0, 0}, {-0.0F, -0.0F}, {0, -0.0F}, {-0.0F, 0}, {0.5F, 0.5F}, {65504, 65504},
        {-65504, 65504}, {1e-6F, 2e-6F}, {-1e-10F, 1e-10F}, {-1e30F, 65000}, {2e5F, 3e5F}};
    for (rung const u : {full_int4, full_int8})
    {
        packed_layer<float> layer{
            {.heads = 1, .tokens = static_cast<index_t>(all.size()), .window = 0, .dims = {32, 20}, .rungs = {u}}};
        for (index_t t = 0; t < layer.sizes.tokens; ++t)
        {
            auto const [low, high] = all[static_cast<std::size_t>(t)];
            for (index_t d = 0; d < 32; ++d) { layer.keys.set(d % 2 == 0 ? low : high, 0, t, d); }
            for (index_t d = 0; d < 20; ++d) { layer.values.set(d < 8 ? low : high, 0, t, d); }
        }
        check_same(packed_on_device(layer), layer.packed());

        // Sums beyond float: not a number, of which there are several, so no bytes are compared. Values have a small mean.
        for (index_t i = 0; i < layer.sizes.tokens * 20; ++i)
        {
            layer.values.set(i / 20 == 4 ? 0.5F : 0.0F, 0, i / 20, i % 20);
        }
        for (index_t d = 0; d < 32; ++d) { layer.keys.set(d % 2 == 0 ? -3.2e38F : 3.3e38F, 0, 3, d); }
        auto const cache  = packed_on_device(layer);
        auto const stored = support::stored_tokens(cache.view(), 0);
        for (double const x : stored[3].key_numbers) { CHECK(std::isnan(x)); }
        for (double const x : stored[4].value_numbers) { CHECK(std::fabs(x - 0.5) < 0.05); } // half a step of int4
    }
}

TEST_CASE("packed_bytes on the GPU is what pack fills, and names a rung that is none")
{
    packed_layer<half> layer{{.heads = 3, .tokens = 90, .window = 2, .dims = {64, 40}, .rungs = storage_rungs()}};
    auto const on_device = [&] {
        device_tensor<std::uint8_t, 2> const rung{layer.rung};
        index_t bytes = 0;
        support::run_on_device_now(
            [&](gpu::backend const& on) { bytes = packed_bytes<half>(on, rung.in(), layer.layout); });
        return bytes;
    };
    CHECK(on_device() == layer.bytes());
    layer.rung.set(9, 1, 71);
    CHECK(error_text<invalid_argument>([&] { static_cast<void>(on_device()); })
          == "packed_bytes: rung of head 1, token 71 is 9; it must be below 7");
}

} // namespace
