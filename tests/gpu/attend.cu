#include <mdkv/gpu/attend.cuh>

#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/attend_rows.cuh>
#include <mdkv/gpu/detail/attend_sums.cuh>

#include "gpu/support/attended.hpp"
#include "gpu/support/device.hpp"
#include "gpu/support/device_cache.hpp"
#include "support/added_error.hpp"
#include "support/compare.hpp"
#include "support/decoding.hpp"
#include "support/host.hpp"
#include "support/packed.hpp"
#include "support/random.hpp"

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using mdkv::half; // CUDA has a type of that name in the global namespace
using support::attended;
using support::device_cache;
using support::device_tensor;
using support::expects_same;
using support::index_t;
using support::on_cpu;
using support::on_gpu;
using support::packed_layer;
using support::packed_sizes;
using support::random_queries;
using support::tensor;

template <class T, class U>
void check(packed_sizes const& sizes, index_t group, int every_rung = -1)
{
    packed_layer<T> const layer{sizes, every_rung};
    auto const cache = layer.packed();
    expects_same<T, U>(cache, random_queries<U>(sizes.heads * group, sizes.dims.keys));
}

std::vector<rung> const codes{drop, fraction(1, 4).as(storage::int8), full_int4, full_int8, full};
std::vector<rung> const rotated{drop, fraction(1, 8), fraction(3, 4).as(storage::int8), full};

TEST_CASE("attention on the GPU is that of the CPU, whatever the group, the element and the head dimensions")
{
    for (index_t const group : {1, 3, 4, 8, 9}) { check<half, half>({.tokens = 150, .dims = {32, 32}}, group); }
    check<half, float>({.heads = 2, .tokens = 333, .window = 5, .dims = {128, 128}}, 4);
    check<float, float>({.heads = 1, .tokens = 70, .dims = {64, 48}}, 2);
    check<bfloat16, bfloat16>({.heads = 1, .tokens = 70, .dims = {40, 96}}, 2);
    check<half, float>({.heads = 1, .tokens = 40, .dims = {192, 128}}, 1);
    check<half, float>({.heads = 1, .tokens = 20, .dims = {576, 512}}, 1);
    check<half, float>({.heads = 1, .tokens = 40, .dims = {7, 1}, .rungs = {drop, full}}, 2);
}

TEST_CASE("stand-ins are attended on the GPU as on the CPU")
{
    check<half, float>({.heads = 3, .tokens = 70, .window = 5, .dims = {32, 24}, .stand_ins = 8}, 3);
    check<half, float>({.heads = 2, .tokens = 40, .window = 0, .dims = {32, 24}, .stand_ins = 17}, 2, 0);
    check<half, float>({.heads              = 2,
                           .tokens          = 70,
                           .window          = 0,
                           .dims            = {64, 24},
                           .rungs           = codes,
                           .stand_ins       = 17,
                           .coded_stand_ins = true},
        2);
    check<float, float>({.heads = 2, .tokens = 40, .dims = {32, 24}, .stand_ins = 8}, 2, 1); // nothing is dropped
}

TEST_CASE("tokens stored as codes are attended on the GPU as on the CPU, next to plain ones")
{
    for (auto const& rungs : {codes, rotated})
    {
        for (head_dims const dims : {head_dims{64, 64}, {128, 128}, {40, 40}, {35, 21}})
        {
            check<half, float>({.heads = 2, .tokens = 150, .window = 5, .dims = dims, .rungs = rungs, .common = 5}, 3);
        }
    }
    for (head_dims const dims : {head_dims{96, 96}, {80, 72}, {136, 128}, {192, 192}, {256, 256}})
    {
        check<half, float>({.heads = 1, .tokens = 90, .window = 17, .dims = dims, .rungs = codes, .common = 5}, 2);
    }
    check<half, half>({.heads = 4, .tokens = 40, .window = 3, .dims = {512, 512}, .rungs = codes}, 8);   // Gemma 4
    check<half, half>({.heads = 2, .tokens = 60, .window = 3, .dims = {256, 256}, .rungs = rotated}, 6); // Qwen 3.5
    // Keys of two coordinates take more bytes as codes than as elements.
    check<half, float>({.heads = 1, .tokens = 150, .window = 2, .dims = {2, 16}, .rungs = {drop, full_int8, full}}, 2);
    check<bfloat16, bfloat16>({.heads = 1, .tokens = 90, .window = 2, .dims = {64, 64}, .rungs = codes}, 2);
    check<float, float>({.heads = 1, .tokens = 90, .window = 2, .dims = {64, 64}, .rungs = rotated}, 5);
}

/// Sums of tiles of values in codes whose scales differ, tile by tile, by more than a half can hold.
struct scaled_tiles
{
    static constexpr char const* name = "scaled_tiles";
    static constexpr int threads      = 32;
    using rows                        = gpu::kernels::attend_rows<half, storage::int8>;

    in_view<float, 1, gpu::backend> scales; // [tiles]
    out_view<float, 1, gpu::backend> to;    // [8 * 64]

    __device__ void operator()() const
    {
        gpu::kernels::attend_sums<64> all{};
        for (index_t t = 0; t < scales.extent(0); ++t)
        {
            std::uint32_t const scale = gpu::device::pair<half>(scales(t), scales(t));
            std::uint32_t const least = gpu::device::pair<half>(2.0F, 2.0F);
            std::uint32_t w[2][2];
            all.weigh<2>({1.0F, 1.0F, 1.0F, 1.0F}, scale, least, 0, w);
            for (int m = 0; m < 4; ++m)
            {
                rows::multiply_codes(0x03030303U, 0x03030303U, w[0], w[1], all.of[m], all.of[m]);
            }
        }
        all.join_lanes();
        all.write<storage::int8>(gpu::device::lane(), &to(0), {1.0F, 0.5F}, 64);
    }
};

TEST_CASE("scales of codes may differ by any factor, from one tile to the next")
{
    for (auto const& scales :
        {std::vector{0.0F, 1e-6F, 3.0F, 4e4F, 1e-3F, 6e4F}, {6e4F, 1e-6F}, {0.0F}, {1e-7F, 2e-7F}})
    {
        tensor<float, 1> all{{static_cast<index_t>(scales.size())}};
        all.assign(scales);
        device_tensor<float, 1> const from{all};
        device_tensor<float, 1> to{{8 * 64}};
        support::run_on_device([&](gpu::backend const& on) { gpu::launch(on, scaled_tiles{from.in(), to.out()}, 1); });
        double sum = 0;
        for (float const scale : scales) { sum += 16 * (2 + 3 * static_cast<double>(widen(narrow<half>(scale)))); }
        auto const got = to.host();
        for (index_t i = 0; i < 8 * 64; ++i)
        {
            CHECK(got.get(i) == doctest::Approx(i / 64 % 2 == 0 ? sum : sum / 2).epsilon(1e-6));
        }
    }
}

TEST_CASE("rounding of queries and weights adds a small part of what codes lose, on the GPU")
{
    for (rung const stored : {full_int4, full_int8})
    {
        for (index_t const coordinates : {128, 1, 0})
        {
            support::added_error const error{
                stored, 128, coordinates, [](auto const& cache, auto const& q) { return on_gpu(cache, q); }};
            CAPTURE(coordinates);
            CHECK(error.of_outputs() > 0);
            CHECK(error.of_outputs() <= 0.01);
            CHECK(error.lse <= 1e-3);
        }
    }
}

TEST_CASE("runs of every length around the tiles' edges are attended on the GPU")
{
    std::vector<rung> const rungs{drop, fraction(1, 4), full_int4, full_int8, full};
    for (index_t const tokens : {1, 2, 15, 16, 17, 33, 63, 64, 65, 129})
    {
        for (int const every : {1, 2, 3, 4})
        {
            check<half, float>({.heads = 1, .tokens = tokens, .window = 0, .dims = {40, 24}, .rungs = rungs}, 2, every);
        }
    }
}

TEST_CASE("long runs of codes are attended on the GPU")
{
    for (index_t const dim : {64, 128, 256})
    {
        for (int const every : {1, 2})
        {
            check<half, float>({.heads     = 1,
                                   .tokens = 397,
                                   .window = 3,
                                   .dims   = {dim, dim},
                                   .rungs  = {drop, full_int4, full_int8, full},
                                   .common = 5},
                8, every);
        }
        for (index_t const tokens : {701, 702, 703, 704}) // runs begin at any multiple of their tokens' bytes
        {
            check<half, float>(
                {.heads = 1, .tokens = tokens, .window = 0, .dims = {dim, dim}, .rungs = {full_int4, full_int8}}, 2);
        }
    }
    check<float, float>({.heads = 1, .tokens = 300, .dims = {128, 128}, .rungs = {full_int4, full}}, 2, 0);
}

/// Whether no two of the lanes that shared memory serves at once want other words of the same bank. A lane loads `Words` words
/// of 32 bits from `place(lane)` on.
template <int Words, class Place>
bool meets_other_banks(Place const& place)
{
    constexpr int at_once = 32 / Words; // lanes
    for (int first = 0; first < 32; first += at_once)
    {
        std::uint32_t taken = 0;
        for (int i = 0; i < 32; ++i)
        {
            taken |= 1U << static_cast<unsigned>(place(first + i / Words) / 4 + i % Words) % 32U;
        }
        if (taken != ~0U) { return false; }
    }
    return true;
}

template <storage Kind>
void expects_other_banks()
{
    using rows = gpu::kernels::attend_rows<half, Kind>;
    for (int k = 0; k < rows::unit / 64; ++k)
    {
        CAPTURE(k);
        CHECK(meets_other_banks<2>([&](int lane) { return rows::key_words(lane, k); }));
        for (int const first : {0, rows::middle(64)})
        {
            CHECK(meets_other_banks<4>([&](int lane) { return rows::value_words(lane, k, rows::words(64), first); }));
        }
    }
}

TEST_CASE("lanes that load words of codes together find them in different banks of shared memory")
{
    expects_other_banks<storage::int4>();
    expects_other_banks<storage::int8>();
}

TEST_CASE("a cache of many slices is attended on the GPU, and twice with the same bits")
{
    packed_layer<half> const layer{{.heads = 2, .tokens = 1500, .window = 33, .dims = {64, 64}, .rungs = codes}};
    auto const cache = layer.packed();
    REQUIRE(cache.arena_bytes() / 2 > 8 * gpu::kernels::attend_slice_bytes);
    auto const q = random_queries<float>(4, 64);
    expects_same<half, float>(cache, q);
    attended<float> const once  = on_gpu(cache, q);
    attended<float> const twice = on_gpu(cache, q);
    CHECK(support::same_bits(once.output.elements(), twice.output.elements()));
    CHECK(support::same_bits(once.lse.elements(), twice.lse.elements()));
}

TEST_CASE("heads of very unequal lengths, one of them empty, are attended on the GPU in slices of nearly equal bytes")
{
    packed_layer<half> layer{{.heads = 4, .tokens = 2000, .window = 0, .dims = {64, 64}, .rungs = codes}, 0};
    for (index_t h = 0; h < 3; ++h)
    {
        for (index_t t = 0; t < (h == 0 ? 1950 : h == 1 ? 40 : 1); ++t)
        {
            layer.rung.set(static_cast<std::uint8_t>(1 + t % (static_cast<index_t>(codes.size()) - 1)), h, t);
        }
    }
    expects_same<half, float>(layer.packed(), random_queries<float>(8, 64));
}

TEST_CASE("empty rungs, windows alone, tails of every length and empty caches are attended on the GPU")
{
    for (int const every : {0, 1, 3})
    {
        for (index_t const window : {0, 1, 20})
        {
            check<half, float>({.tokens = 20, .window = window, .dims = {32, 32}}, 3, every);
        }
    }
    check<half, float>({.tokens = 0, .window = 6, .dims = {32, 32}}, 3);
    check<half, float>({.tokens = 0, .window = 0, .dims = {32, 32}}, 3);
    check<half, float>({.heads = 0, .tokens = 5, .window = 2, .dims = {32, 32}}, 3);
    support::source random{"gpu/tails"};
    for (index_t const capacity : {1, 17, 40})
    {
        packed_layer<half> const layer{{.heads = 2, .tokens = 21, .window = 2, .dims = {24, 16}, .scale = 0.7F}};
        auto cache = layer.packed(capacity);
        for (index_t tokens = 1; tokens <= capacity; tokens += capacity > 20 ? 11 : 8)
        {
            append_random(cache, random, tokens - cache.appended());
            expects_same<half, float>(cache, random_queries<float>(4, 24), {.scale = 0.3F});
            expects_same<half, float>(cache, random_queries<float>(4, 24));
        }
    }
}

TEST_CASE("queries of the last n tokens at once see the same tokens on the GPU as on the CPU")
{
    for (index_t const n : {1, 2, 17, 70})
    {
        packed_layer<half> const layer{{.heads = 2, .tokens = 60, .window = 3, .dims = {64, 24}, .rungs = codes}};
        auto cache = layer.packed(90);
        support::source random{"gpu/several queries"};
        append_random(cache, random, 80);
        tensor<float, 3> q{{4, n, 64}};
        q.assign(random_queries<float>(4 * n, 64).elements());
        expects_same<half, float>(cache, q);
    }
}

TEST_CASE("sink logits take their part of the softmax on the GPU as on the CPU")
{
    std::vector<float> const sinks{
        -std::numeric_limits<float>::infinity(), 0.0F, 2.5F, 30.0F, 1e4F, -3.0F, -1e4F, 1.0F};
    packed_layer<half> const layer{{.heads = 2, .tokens = 300, .window = 3, .dims = {64, 24}, .rungs = rotated}};
    auto cache = layer.packed(90);
    expects_same<half, half>(cache, random_queries<half>(8, 64), {.sinks = sinks});
    support::source random{"gpu/sinks"};
    append_random(cache, random, 80);
    tensor<float, 3> q{{8, 17, 64}};
    q.assign(random_queries<float>(8 * 17, 64).elements());
    expects_same<half, float>(cache, q, {.sinks = sinks});
    packed_layer<half> const empty{{.heads = 2, .tokens = 0, .window = 0, .dims = {64, 24}}};
    expects_same<half, half>(empty.packed(), random_queries<half>(8, 64), {.sinks = sinks});
}

TEST_CASE("a batch of sequences has on the GPU the bits of a call for each, in one launch or several")
{
    struct one_case
    {
        packed_sizes sizes;
        index_t appended, n;
    };
    std::vector<one_case> cases;
    std::vector<rung> const few{drop, full};
    for (index_t i = 0; i < 50; ++i) // beyond a launch's
    {
        cases.push_back({{.heads = 2, .tokens = 3 + i, .window = i % 3, .dims = {16, 24}, .rungs = few}, 5, i % 3});
    }
    cases.push_back({{.heads = 2, .tokens = 900, .window = 5, .dims = {16, 24}, .rungs = codes}, 0, 1}); // slices
    cases.push_back({{.heads = 2, .tokens = 0, .window = 0, .dims = {16, 24}, .rungs = codes}, 0, 1});
    cases.push_back({{.heads = 2, .tokens = 40, .window = 1, .dims = {16, 24}, .rungs = codes}, 20, 17});
    std::vector<device_cache<half>> stored;
    std::vector<sequence_view<half, space::device>> sequences;
    index_t n = 0;
    for (one_case const& c : cases)
    {
        packed_layer<half> const layer{c.sizes};
        auto cache = layer.packed(c.appended);
        support::source random{"gpu/batch", c.sizes.tokens};
        append_random(cache, random, c.appended);
        stored.emplace_back(cache.view());
        sequences.push_back({stored.back().view(), c.n});
        n += c.n;
    }
    for (std::size_t i = 0; i < stored.size(); ++i) { sequences[i].cache = stored[i].view(); }
    tensor<float, 3> q{{6, n, 16}};
    q.assign(random_queries<float>(6 * n, 16).elements());
    device_tensor<float, 3> const queries{q};
    device_tensor<float, 3> output{{6, n, 24}, {.swapped = true}};
    device_tensor<float, 2> lse{{6, n}};
    support::run_on_device(
        [&](gpu::backend const& on) { attend(on, queries.in(), std::span{sequences}, {}, output.out(), lse.out()); });
    device_tensor<float, 3> want{{6, n, 24}};
    device_tensor<float, 2> want_lse{{6, n}};
    index_t first = 0;
    for (auto const& sequence : sequences)
    {
        index_t const count = sequence.queries;
        if (count > 0)
        {
            support::run_on_device([&](gpu::backend const& on) {
                attend(on, slice<1>(queries.in(), first, count), sequence.cache, {}, slice<1>(want.out(), first, count),
                    slice<1>(want_lse.out(), first, count));
            });
        }
        first += count;
    }
    CHECK(support::same_bits(output.elements(), want.elements()));
    CHECK(support::same_bits(lse.elements(), want_lse.elements()));
    sequences[7].cache.arena += 1;
    CHECK(support::error_text<invalid_argument>([&] {
        support::run_on_device([&](gpu::backend const& on) {
            attend(on, queries.in(), std::span{sequences}, {}, output.out(), lse.out());
        });
    }) == "attend: sequence 7: the cache's arena and tail must be aligned to 16 bytes on the GPU");
}

TEST_CASE("a tail that counts more tokens than it has room for is read to its end and no further, on the GPU")
{
    packed_layer<half> const layer{{.heads = 1, .tokens = 21, .window = 2, .dims = {24, 16}}};
    auto cache = layer.packed(5);
    support::source random{"gpu/full tail"};
    append_random(cache, random, 5);
    auto const q           = random_queries<float>(2, 24);
    auto const want        = on_cpu(cache, q);
    *cache.view().appended = 9;
    CHECK(on_gpu(cache, q).lse.get(1) == doctest::Approx(want.lse.get(1)).epsilon(1e-5));
}

TEST_CASE(
    "a query that is not a number shows in its own row and in no other, and far logits keep the largest, on the GPU")
{
    packed_layer<half> const layer{{.heads = 1, .tokens = 50, .dims = {32, 32}}};
    auto const cache = layer.packed();
    auto q           = random_queries<float>(4, 32, {.slack = 3});
    for (index_t d = 0; d < 32; ++d) { q.set(q.get(1, d) * 60.0F, 1, d); }
    auto const clean = on_gpu(cache, q);
    expects_same<half, float>(cache, q);
    q.set(std::numeric_limits<float>::quiet_NaN(), 2, 7);
    auto const got = on_gpu(cache, q);
    for (index_t i = 0; i < 4; ++i)
    {
        CHECK(std::isnan(got.lse.get(i)) == (i == 2));
        for (index_t c = 0; c < 32; ++c)
        {
            if (i == 2) { CHECK(std::isnan(got.output.get(i, c))); }
            else { CHECK(got.output.get(i, c) == clean.output.get(i, c)); }
        }
    }
}

TEST_CASE(
    "head dimensions beyond a block's shared memory are refused by name on the GPU, and an arena at an odd address")
{
    packed_layer<float> const layer{{.heads = 1, .tokens = 3, .window = 1, .dims = {4096, 16}, .rungs = {drop, full}}};
    auto const cache = layer.packed();
    auto const q     = random_queries<float>(1, 4096);
    CHECK(support::error_text<invalid_argument>([&] { static_cast<void>(on_gpu(cache, q)); }).find("shared memory")
          != std::string::npos);
}

} // namespace
