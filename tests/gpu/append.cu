#include <mdkv/append.hpp>

#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/cache.cuh>

#include "gpu/support/device.hpp"
#include "gpu/support/device_packed.hpp"
#include "support/host.hpp"
#include "support/packed.hpp"

#include <cstddef>
#include <cstring>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using mdkv::half; // CUDA has a type of that name in the global namespace
using support::device_resource;
using support::device_tensor;
using support::index_t;
using support::owned_cache;
using support::packed_layer;
using support::tensor;

/// Token t of a [H, N, D] tensor as [H, D], in another element type, laid out as asked.
template <class U, class T>
tensor<U, 2> token(tensor<T, 3> const& from, index_t t, support::placement how = {})
{
    tensor<U, 2> row{{from.extent(0), from.extent(2)}, how};
    for (index_t h = 0; h < from.extent(0); ++h)
    {
        for (index_t d = 0; d < from.extent(2); ++d) { row.set(narrow<U>(widen(from.get(h, t, d))), h, d); }
    }
    return row;
}

template <class T>
std::vector<std::byte> tail_of(cpu::cache<T> const& cache)
{
    auto const view = cache.view();
    return {view.tail, view.tail + cache.tail_bytes()};
}

template <class T, class U>
void append_on_device(owned_cache<T>& cache, tensor<U, 2> const& key, tensor<U, 2> const& value)
{
    device_tensor<U, 2> const k{key};
    device_tensor<U, 2> const v{value};
    support::run_on_device([&](gpu::backend const& on) { append(on, k.in(), v.in(), cache.view()); });
}

/// The same tokens appended by both backends, bytes of the whole tail compared after each.
template <class T, class U>
void check_appends(index_t capacity, index_t tokens, support::placement how)
{
    packed_layer<T> const layer{{.heads = 3, .tokens = tokens, .window = 0, .dims = {24, 7}, .rungs = {drop, full}}};
    cpu::cache<T> want{layer.layout, 0, capacity};
    std::memset(want.view().tail, 0xFF, static_cast<std::size_t>(want.tail_bytes()));
    device_resource memory;
    owned_cache<T> cache{layer.layout, 0, capacity, nullptr, memory};
    for (index_t t = 0; t < tokens; ++t)
    {
        auto const key   = token<U>(layer.keys, t, how);
        auto const value = token<U>(layer.values, t, how);
        append_on_device(cache, key, value);
        support::run([&](cpu::backend const& on) { append(on, key.in(), value.in(), want.view()); });
    }
    auto const got = gpu::to_host(cache, nullptr);
    CHECK(got.appended() == tokens);
    CHECK(tail_of(got) == tail_of(want));
}

TEST_CASE_TEMPLATE(
    "appended tokens are where the CPU puts them, bit for bit, from any element type", T, float, half, bfloat16)
{
    for (index_t const capacity : {19, 32, 40})
    {
        check_appends<T, T>(capacity, 19, {});
        check_appends<T, T>(capacity, 17, {.slack = 2});
        check_appends<T, float>(capacity, 3, {});
    }
    check_appends<T, half>(16, 16, {});
    check_appends<T, bfloat16>(1, 1, {});
    check_appends<T, T>(5, 0, {});
}

TEST_CASE("a full tail keeps what it has and counts what it refused")
{
    packed_layer<half> const layer{{.heads = 2, .tokens = 9, .window = 1}};
    for (index_t const capacity : {0, 1, 8})
    {
        device_resource memory;
        owned_cache<half> cache{layer.layout, 0, capacity, nullptr, memory};
        std::vector<std::byte> filled;
        for (index_t t = 0; t < 9; ++t)
        {
            append_on_device(cache, token<half>(layer.keys, t), token<half>(layer.values, t));
            if (t + 1 == capacity) { filled = tail_of(gpu::to_host(cache, nullptr)); }
        }
        index_t counted = 0;
        gpu::copy({}, cache.view().appended, &counted, sizeof counted);
        CHECK(counted == 9);
        auto const got = gpu::to_host(cache, nullptr);
        CHECK(got.appended() == capacity); // what a reader may read
        CHECK(tail_of(got) == filled);
    }
}

TEST_CASE("several tokens at once are where the CPU puts them, bit for bit, and truncate_tail takes the last ones back")
{
    packed_layer<half> const layer{{.heads = 3, .tokens = 37, .window = 0, .dims = {24, 7}, .rungs = {drop, full}}};
    cpu::cache<half> want{layer.layout, 0, 30};
    std::memset(want.view().tail, 0xFF, static_cast<std::size_t>(want.tail_bytes()));
    device_resource memory;
    owned_cache<half> cache{layer.layout, 0, 30, nullptr, memory};
    device_tensor<half, 3> const keys{layer.keys};
    device_tensor<half, 3> const values{layer.values};
    auto const add = [&](index_t first, index_t count) {
        support::run_on_device([&](gpu::backend const& on) {
            append(on, slice<1>(keys.in(), first, count), slice<1>(values.in(), first, count), cache.view());
        });
    };
    add(0, 17);
    add(17, 5);
    support::run_on_device([&](gpu::backend const& on) { truncate_tail(on, 19, cache.view()); });
    CHECK(gpu::to_host(cache, nullptr).appended() == 19);
    add(19, 11);
    support::run([&](cpu::backend const& on) {
        append(on, slice<1>(layer.keys.in(), 0, 30), slice<1>(layer.values.in(), 0, 30), want.view());
    });
    CHECK(tail_of(gpu::to_host(cache, nullptr)) == tail_of(want));
    add(30, 7); // no room: counted, not written
    index_t counted = 0;
    gpu::copy({}, cache.view().appended, &counted, sizeof counted);
    CHECK(counted == 37);
    CHECK(tail_of(gpu::to_host(cache, nullptr)) == tail_of(want));
}

TEST_CASE_TEMPLATE(
    "many tokens at once, which many blocks copy, are where the CPU puts them, bit for bit", T, half, float)
{
    for (head_dims const dims : {head_dims{48, 32}, head_dims{40, 31}})
    {
        packed_layer<half> const layer{{.heads = 3, .tokens = 400, .window = 0, .dims = dims, .rungs = {drop, full}}};
        tensor<T, 3> keys{{3, 400, dims.keys}};
        tensor<T, 3> values{{3, 400, dims.values}};
        for (index_t t = 0; t < 400; ++t)
        {
            auto const key   = token<T>(layer.keys, t);
            auto const value = token<T>(layer.values, t);
            for (index_t h = 0; h < 3; ++h)
            {
                for (index_t d = 0; d < dims.keys; ++d) { keys.set(key.get(h, d), h, t, d); }
                for (index_t d = 0; d < dims.values; ++d) { values.set(value.get(h, d), h, t, d); }
            }
        }
        cpu::cache<half> want{layer.layout, 0, 370};
        std::memset(want.view().tail, 0xFF, static_cast<std::size_t>(want.tail_bytes()));
        device_resource memory;
        owned_cache<half> cache{layer.layout, 0, 370, nullptr, memory};
        device_tensor<T, 3> const there_keys{keys};
        device_tensor<T, 3> const there_values{values};
        auto const add = [&](index_t first, index_t count) {
            support::run_on_device([&](gpu::backend const& on) {
                append(on, slice<1>(there_keys.in(), first, count), slice<1>(there_values.in(), first, count),
                    cache.view());
            });
        };
        add(0, 21);
        add(21, 179);
        CHECK(gpu::to_host(cache, nullptr).appended() == 200);
        add(200, 200); // thirty of them have no room
        support::run([&](cpu::backend const& on) {
            append(on, slice<1>(keys.in(), 0, 370), slice<1>(values.in(), 0, 370), want.view());
        });
        CHECK(tail_of(gpu::to_host(cache, nullptr)) == tail_of(want));
        index_t counted = 0;
        gpu::copy({}, cache.view().appended, &counted, sizeof counted);
        CHECK(counted == 400);
    }
}

TEST_CASE("packing again empties the tail")
{
    packed_layer<half> const layer{{.heads = 2, .tokens = 40, .window = 1}};
    support::device_layer<half> const there{layer};
    device_resource memory;
    owned_cache<half> cache{layer.layout, layer.bytes(), 4, nullptr, memory};
    append_on_device(cache, token<half>(layer.keys, 0), token<half>(layer.values, 0));
    CHECK(gpu::to_host(cache, nullptr).appended() == 1);
    support::run_on_device([&](gpu::backend const& on) { there.pack(on, cache.view()); });
    CHECK(gpu::to_host(cache, nullptr).appended() == 0);
}

} // namespace
