#include <mdkv/gpu/pack.cuh>

#include <mdkv/basis.hpp>
#include <mdkv/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/cache.hpp>

#include "gpu/support/device.hpp"
#include "gpu/support/device_packed.hpp"
#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/packed.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
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
    return {drop, part(1, 8), part(1, 4).as(storage::int4), part(1, 4).as(storage::int8), part(3, 4).as(storage::int4),
        full_int4, full_int4.rotated(), full_int8, full_int8.rotated(), full};
}

/// How far apart coded tokens may be: a code by one where its coordinate lies half way between two, which happens where
/// one backend rounds a product before it adds and the other does not; a half by one in its last place likewise.
struct code_differences
{
    index_t codes     = 0;
    index_t different = 0;
    bool near         = true;

    void add(support::coded_vector const& a, support::coded_vector const& b)
    {
        for (std::size_t c = 0; c < a.codes.size(); ++c)
        {
            ++codes;
            different += a.codes[c] != b.codes[c] ? 1 : 0;
            near = near && std::abs(a.codes[c] - b.codes[c]) <= 1;
        }
        for (std::size_t g = 0; g < a.scales.size(); ++g)
        {
            near = near && std::fabs(a.scales[g] - b.scales[g]) <= 0x1p-10 * std::fabs(b.scales[g]);
            near = near && std::fabs(a.minima[g] - b.minima[g]) <= 0x1p-10 * std::fabs(b.minima[g]);
        }
    }
    [[nodiscard]] bool few() const { return near && different * 1000 <= codes + 2000; }
};

/// The directory and all that is only copied must be the CPU's; what is computed, nearly so.
template <class T>
void check_same(cpu::cache<T> const& got, cpu::cache<T> const& want)
{
    CHECK(directory_of(got) == directory_of(want));
    CHECK(got.appended() == 0);
    auto const& layout = want.layout();
    code_differences codes;
    support::worst_error error;
    bool copies = true;
    for (index_t h = 0; h < layout.heads; ++h)
    {
        auto const a            = support::stored_tokens(got.view(), h);
        auto const b            = support::stored_tokens(want.view(), h);
        head_entry const& entry = want.view().heads[h];
        REQUIRE(a.size() == b.size());
        for (std::size_t i = 0; i < b.size(); ++i)
        {
            if (b[i].rung < 0)
            {
                copies = copies && support::same_bits(a[i].key, b[i].key) && support::same_bits(a[i].value, b[i].value);
            }
            else if (!b[i].key.empty())
            {
                // one rounding to T of sums that differ in theirs: two units of bfloat16's last place, at the most
                for (std::size_t c = 0; c < b[i].key.size(); ++c)
                {
                    error.add(a[i].key_numbers[c], b[i].key_numbers[c], std::fabs(b[i].key_numbers[c]) + 1e-2);
                }
                for (std::size_t c = 0; c < b[i].value.size(); ++c)
                {
                    error.add(a[i].value_numbers[c], b[i].value_numbers[c], std::fabs(b[i].value_numbers[c]) + 1e-2);
                }
            }
        }
        for (std::size_t r = 0; r < layout.rungs; ++r)
        {
            if (!layout.own_run(r) || layout.kinds[r] == storage::plain) { continue; }
            run_entry const& run = entry.runs[r];
            for (index_t t = 0; t < run.tokens; ++t)
            {
                auto const coded = [&](cpu::cache<T> const& cache, support::side which) {
                    bool const key = which == support::side::key;
                    return support::coded_token(cache.view().arena + (key ? run.keys : run.values), layout.kinds[r],
                        which, run.tokens, key ? layout.key_coordinates[r] : layout.value_coordinates[r], t);
                };
                for (support::side const which : {support::side::key, support::side::value})
                {
                    codes.add(coded(got, which), coded(want, which));
                }
            }
        }
        for (auto const& [at, count] : {std::pair{entry.key_projection, entry.key_columns * layout.dims.keys},
                 std::pair{entry.value_projection, entry.value_columns * layout.dims.values}})
        {
            auto const bytes = static_cast<std::size_t>(count) * sizeof(T);
            copies = copies && (bytes == 0 || std::memcmp(got.view().arena + at, want.view().arena + at, bytes) == 0);
        }
    }
    CHECK(copies);
    CHECK(codes.few());
    CHECK_MESSAGE((error.compared() == 0 || error.within(0x1p-7)), error);
}

} // namespace

TEST_CASE_TEMPLATE(
    "pack on the GPU writes the CPU's directory, copies and projections bit for bit and the rest to rounding", T, float,
    half, bfloat16)
{
    for (head_dims const dims : {head_dims{64, 64}, {40, 96}, {128, 128}, {9, 33}, {130, 200}})
    {
        packed_layer<T> layer{
            {.heads = 2, .tokens = 150, .window = 5, .dims = dims, .rungs = {drop, part(1, 8), part(1, 4), full}}};
        layer.stretch_keys();
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
            packed_layer<half> layer{
                {.heads = 2, .tokens = tokens, .window = 3, .dims = dims, .rungs = storage_rungs()}};
            layer.stretch_keys();
            check_same(packed_on_device(layer), layer.packed());
        }
    }
    packed_layer<float> const wide{{.tokens = 75, .dims = {40, 33}, .rungs = storage_rungs()}};
    check_same(packed_on_device(wide), wide.packed());
    packed_layer<bfloat16> const third{{.heads = 3, .tokens = 75, .dims = {56, 40}, .rungs = storage_rungs()}};
    check_same(packed_on_device(third), third.packed());
}

TEST_CASE("whole vectors and codes of the original coordinates are the CPU's byte for byte")
{
    for (head_dims const dims : {head_dims{64, 64}, {40, 5}, {33, 128}, {1, 2}})
    {
        for (int const every : {-1, 1, 2, 3})
        {
            packed_layer<half> const layer{
                {.heads = 2, .tokens = 83, .window = 3, .dims = dims, .rungs = {drop, full_int4, full_int8, full}},
                every};
            auto const got  = packed_on_device(layer);
            auto const want = layer.packed();
            check_same(got, want);
            CHECK(arena_of(got) == arena_of(want));
        }
    }
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
                                                   .rungs  = {drop, part(1, 2), full_int4, full}},
                    every};
                check_same(packed_on_device(layer), layer.packed());
            }
        }
    }
}

TEST_CASE("sets without drop, without a full rung, and with the most rungs are packed as by the CPU")
{
    for (std::vector<rung> const& rungs : {std::vector<rung>{part(1, 4), full}, {drop, part(3, 4)}, {full}, {drop},
             {drop, part(1, 16), part(2, 16), part(3, 16), part(4, 16), part(5, 16), part(6, 16), part(7, 16),
                 part(8, 16), part(9, 16), part(10, 16), part(11, 16), part(12, 16), part(13, 16), part(14, 16), full}})
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

TEST_CASE("where the arena is too small nothing is written to it and no head holds a token")
{
    packed_layer<half> const layer{{.heads = 3, .tokens = 50, .window = 4}};
    auto const got = packed_on_device(layer, 2, -1);
    CHECK(directory_of(got) == std::vector<head_entry>(3));
    CHECK(arena_of(got) == std::vector<std::byte>(static_cast<std::size_t>(layer.bytes() - 1), std::byte{0xFF}));
}

TEST_CASE("bases may be left out while no token is at a projected rung; otherwise no head holds a token")
{
    for (int const every : {1, 2, 3})
    {
        packed_layer<half> layer{
            {.heads = 2, .tokens = 50, .window = 3, .rungs = {drop, full_int4, full_int4.rotated(), full}}, every};
        auto const want = layer.packed();
        for (auto* basis : {&layer.key_basis, &layer.query_basis, &layer.value_basis})
        {
            *basis = tensor<float, 3>{{0, 0, 0}};
        }
        device_layer<half> const there{layer};
        device_resource memory;
        owned_cache<half> cache{layer.layout, layer.bytes(), 0, nullptr, memory};
        support::run_on_device([&](gpu::backend const& on) { there.pack(on, cache.view()); });
        auto const got = gpu::to_host(cache, nullptr);
        if (every != 2) { check_same(got, want); }
        else { CHECK(directory_of(got) == std::vector<head_entry>(2)); }
    }
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

TEST_CASE("NaN in dropped tokens changes no byte, and one in a group of codes spoils that group alone")
{
    packed_layer<half> layer{
        {.heads = 1, .tokens = 40, .window = 0, .dims = {40, 70}, .rungs = {drop, full_int4, full_int8, full}}};
    auto const before    = packed_on_device(layer);
    half const nan       = narrow<half>(std::numeric_limits<float>::quiet_NaN());
    half const inf       = narrow<half>(std::numeric_limits<float>::infinity());
    index_t kept         = 0;
    index_t spoilt_codes = 0;
    for (index_t t = 0; t < 40; ++t)
    {
        int const r = layer.rung.get(0, t);
        if (r == 0) { layer.keys.set(nan, 0, t, 3); }
        if (r == 0 || ((r == 1 || r == 2) && kept++ == 2)) { layer.values.set(inf, 0, t, 66); }
    }
    auto const after = packed_on_device(layer);
    auto const was   = support::stored_tokens(before.view(), 0);
    auto const is    = support::stored_tokens(after.view(), 0);
    REQUIRE(was.size() == is.size());
    for (std::size_t i = 0; i < was.size(); ++i)
    {
        CHECK(was[i].key_numbers == is[i].key_numbers);
        for (std::size_t c = 0; c < 70; ++c)
        {
            bool const same = was[i].value_numbers[c] == is[i].value_numbers[c];
            CHECK((same || (c / 64 == 1 && std::isnan(is[i].value_numbers[c]))));
            spoilt_codes += same ? 0 : 1;
        }
    }
    CHECK(spoilt_codes == 6);
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
        CHECK(arena_of(packed_on_device(layer)) == arena_of(layer.packed()));

        // Sums beyond float: not a number, of which there are several, so no bytes are compared.
        for (index_t d = 0; d < 32; ++d) { layer.keys.set(d % 2 == 0 ? -3.2e38F : 3.3e38F, 0, 3, d); }
        auto const cache  = packed_on_device(layer);
        auto const stored = support::stored_tokens(cache.view(), 0);
        for (double const x : stored[3].key_numbers) { CHECK(std::isnan(x)); }
        for (double const x : stored[4].key_numbers) { CHECK(x == doctest::Approx(0.5).epsilon(1e-3)); }
    }
}

TEST_CASE("packed_bytes on the GPU is what pack fills, and names a rung that is none")
{
    packed_layer<half> layer{{.heads = 3, .tokens = 90, .window = 2, .dims = {64, 40}, .rungs = storage_rungs()}};
    auto const on_device = [&] {
        device_tensor<std::uint8_t, 2> const rung{layer.rung};
        workspace count;
        CHECK(packed_bytes<half>(gpu::backend{nullptr, &count}, rung.in(), layer.layout) == 0);
        support::device_memory const memory{std::vector<std::byte>(count.bytes()), 0};
        workspace scratch{{memory.data(), count.bytes()}};
        return packed_bytes<half>(gpu::backend{nullptr, &scratch}, rung.in(), layer.layout);
    };
    CHECK(on_device() == layer.bytes());
    layer.rung.set(10, 1, 71);
    CHECK(error_text<invalid_argument>([&] { static_cast<void>(on_device()); })
          == "packed_bytes: rung of head 1, token 71 is 10; it must be below 10");
}

TEST_CASE("keys that are not aligned to their elements are refused by name, and a dry run packs nothing")
{
    packed_layer<half> const layer{{.heads = 2, .tokens = 9, .window = 1}, -1, {.misalign = 1}};
    CHECK(error_text<invalid_argument>([&] { static_cast<void>(packed_on_device(layer)); })
          == "pack: keys is not aligned to 2 bytes");
    packed_layer<half> const right{{.heads = 2, .tokens = 9, .window = 1}};
    device_layer<half> const there{right};
    device_resource memory;
    owned_cache<half> cache{right.layout, right.bytes(), 0, nullptr, memory};
    workspace count;
    there.pack({nullptr, &count}, cache.view());
    CHECK(count.bytes() > 0);
    CHECK(directory_of(gpu::to_host(cache, nullptr)) == std::vector<head_entry>(2));
}
