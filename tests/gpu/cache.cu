#include <mdkv/gpu/cache.cuh>

#include <mdkv/append.hpp>
#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/gpu/memory.cuh>

#include "gpu/support/device_packed.hpp"
#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/packed.hpp"

#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using mdkv::half; // CUDA has a type of that name in the global namespace
using support::device_resource;
using support::error_text;
using support::index_t;
using support::owned_cache;
using support::packed_layer;
using support::tensor;

/// All bytes of a cache: arena, tail, then directory and count.
template <class T>
std::vector<std::byte> bytes_of(cpu::cache<T> const& cache)
{
    auto const view = cache.view();
    std::vector<std::byte> all{view.arena, view.arena + cache.arena_bytes()};
    all.insert(all.end(), view.tail, view.tail + cache.tail_bytes());
    auto const* const heads = reinterpret_cast<std::byte const*>(view.heads);
    all.insert(all.end(), heads, heads + cache.directory_bytes());
    return all;
}

static_assert(std::is_nothrow_move_constructible_v<owned_cache<half>>);
static_assert(std::is_nothrow_move_assignable_v<owned_cache<half>>);
static_assert(!std::is_copy_constructible_v<owned_cache<half>>);
static_assert(std::is_trivially_copyable_v<cache_view<half, space::device>>);
static_assert(gpu::memory_resource<gpu::pool_resource>);

TEST_CASE("a new cache on the device is empty, aligned and of the sizes asked for")
{
    device_resource memory;
    {
        cache_layout const layout{paper_ratios, 300, 2, {16, 8}};
        owned_cache<bfloat16> const cache{layout, 777, 5, nullptr, memory};
        auto const view = cache.view();
        CHECK(cache.layout() == layout);
        CHECK(cache.arena_bytes() == 777);
        CHECK(view.arena_bytes == 777);
        CHECK(cache.tail_capacity() == 5);
        CHECK(cache.tail_bytes() == 300 * 5 * (16 + 8) * 2);
        CHECK(reinterpret_cast<std::uintptr_t>(view.arena) % 16 == 0);
        auto const host = gpu::to_host(cache, nullptr);
        CHECK(host.appended() == 0);
        for (index_t h = 0; h < 300; ++h) { CHECK(host.view().heads[h] == head_entry{}); }
        CHECK(memory.outstanding() == 3);
    }
    CHECK(memory.outstanding() == 0);
}

TEST_CASE("a cache taken to the device and back is the same in every byte")
{
    for (std::vector<rung> const& rungs : {std::vector<rung>{drop, fraction(1, 8), fraction(1, 4), full},
             {drop, full_int4, fraction(3, 4).as(storage::int8), full}})
    {
        packed_layer<half> const layer{{.heads = 3, .tokens = 70, .window = 2, .rungs = rungs}};
        auto cache = layer.packed(20);
        tensor<half, 2> token{{3, 16}};
        token.assign(std::vector<half>(48, narrow<half>(1.5F)));
        for (int i = 0; i < 17; ++i)
        {
            support::run([&](cpu::backend const& on) { append(on, token.in(), token.in(), cache.view()); });
        }
        device_resource memory;
        auto const there = gpu::to_device(cache, nullptr, memory);
        auto const back  = gpu::to_host(there, nullptr);
        CHECK(back.layout() == cache.layout());
        CHECK(back.appended() == 17);
        CHECK(bytes_of(back) == bytes_of(cache));
    }
}

TEST_CASE("caches without heads, without an arena and without a tail go both ways")
{
    device_resource memory;
    auto const none = gpu::to_device(cpu::cache<float>{}, nullptr, memory);
    CHECK(none.view().heads == nullptr);
    CHECK(gpu::to_host(none, nullptr).view().heads == nullptr);
    CHECK(memory.outstanding() == 0);
    cpu::cache<float> const bare{cache_layout{paper_ratios, 2, 0, {16, 16}}, 0};
    CHECK(bytes_of(gpu::to_host(gpu::to_device(bare, nullptr, memory), nullptr)) == bytes_of(bare));
    cpu::cache<float> const headless{cache_layout{paper_ratios, 0, 0, {16, 16}}, 0};
    CHECK(bytes_of(gpu::to_host(gpu::to_device(headless, nullptr, memory), nullptr)) == bytes_of(headless));
}

TEST_CASE("a cache without a layout refuses a tail, and so does one whose memory was moved away")
{
    device_resource memory;
    owned_cache<half> none;
    CHECK_THROWS_AS(none.reserve_tail(3), invalid_argument);
    owned_cache<half> first{cache_layout{paper_ratios, 2, 1, {16, 16}}, 100, 3, nullptr, memory};
    owned_cache<half> const second{std::move(first)};
    CHECK(first.layout() == cache_layout{});
    CHECK_THROWS_AS(first.reserve_tail(3), invalid_argument);
    CHECK(memory.outstanding() == 3);
}

TEST_CASE("a moved cache keeps its memory, and what it replaces is given back")
{
    device_resource memory;
    cache_layout const layout{paper_ratios, 2, 1, {16, 16}};
    owned_cache<half> first{layout, 100, 3, nullptr, memory};
    auto* const arena = first.view().arena;
    owned_cache<half> second{std::move(first)};
    CHECK(second.view().arena == arena);
    owned_cache<half> third{layout, 50, 0, nullptr, memory};
    CHECK(memory.outstanding() == 5);
    third = std::move(second);
    CHECK(third.view().arena == arena);
    CHECK(memory.outstanding() == 3);
}

TEST_CASE("growing the tail on the device keeps every appended token, as growing it on the host does")
{
    packed_layer<half> const layer{{.heads = 3, .tokens = 40, .window = 1, .dims = {24, 16}}};
    for (index_t const capacity : {0, 1, 15, 16, 17, 33})
    {
        for (index_t const larger : {1, 16, 18, 32, 40})
        {
            for (index_t const filled : {capacity, capacity / 2})
            {
                auto cache = layer.packed(capacity);
                for (index_t t = 0; t < filled; ++t)
                {
                    tensor<half, 2> key{{3, 24}};
                    tensor<half, 2> value{{3, 16}};
                    for (index_t h = 0; h < 3; ++h)
                    {
                        for (index_t d = 0; d < 24; ++d) { key.set(layer.keys.get(h, t, d), h, d); }
                        for (index_t d = 0; d < 16; ++d) { value.set(layer.values.get(h, t, d), h, d); }
                    }
                    support::run([&](cpu::backend const& on) { append(on, key.in(), value.in(), cache.view()); });
                }
                device_resource memory;
                auto there = gpu::to_device(cache, nullptr, memory);
                there.reserve_tail(larger);
                cache.reserve_tail(larger);
                auto const got = gpu::to_host(there, nullptr);
                CHECK(got.tail_capacity() == cache.tail_capacity());
                CHECK(got.appended() == filled);
                for (index_t h = 0; h < 3; ++h)
                {
                    auto const a = support::stored_tokens(got.view(), h);
                    auto const b = support::stored_tokens(cache.view(), h);
                    REQUIRE(a.size() == b.size());
                    bool same = true;
                    for (std::size_t i = 0; i < a.size(); ++i)
                    {
                        same = same && support::same_bits(a[i].key, b[i].key)
                               && support::same_bits(a[i].value, b[i].value);
                    }
                    CHECK(same);
                }
                CHECK(memory.outstanding() == (there.tail_bytes() > 0 ? 3 : 2));
            }
        }
    }
}

TEST_CASE("growing a tail that refused tokens forgets that they were counted")
{
    packed_layer<half> const layer{{.heads = 2, .tokens = 4, .window = 1}};
    device_resource memory;
    owned_cache<half> cache{layer.layout, 0, 3, nullptr, memory};
    index_t const counted = 5;
    gpu::copy({}, &counted, cache.view().appended, sizeof counted);
    cache.reserve_tail(20);
    index_t after = 0;
    gpu::copy({}, cache.view().appended, &after, sizeof after);
    CHECK(after == 3);
    memory.fail_after(0);
    CHECK_THROWS_AS(cache.reserve_tail(30), std::bad_alloc);
    CHECK(cache.tail_capacity() == 20);
    CHECK(error_text<invalid_argument>([&] { cache.reserve_tail(-1); })
          == "cache: tokens is -1; it must not be negative");
}

TEST_CASE("when the k-th allocation fails nothing leaks, and sizes out of range are refused by name")
{
    device_resource memory;
    cache_layout const layout{paper_ratios, 2, 1, {16, 16}};
    using cache = owned_cache<half>;
    for (int k = 0; k < 3; ++k)
    {
        memory.fail_after(k);
        CHECK_THROWS_AS((cache{layout, 100, 3, nullptr, memory}), std::bad_alloc);
        CHECK(memory.outstanding() == 0);
    }
    memory.fail_after(-1);
    CHECK(error_text<invalid_argument>([&] { cache const bad(layout, -1, 0, nullptr, memory); })
          == "cache: arena_bytes is -1; it must not be negative");
    CHECK(error_text<invalid_argument>([&] { cache const bad(layout, 0, -2, nullptr, memory); })
          == "cache: tail_tokens is -2; it must not be negative");
    CHECK(error_text<size_overflow>([&] { cache const bad(layout, 0, INT64_MAX / 8, nullptr, memory); })
          == "size 128 * 1152921504606846975 is beyond 64 bits");
    CHECK(memory.outstanding() == 0);
}

} // namespace
