#include <mdkv/engine/stored.hpp>

#include <mdkv/append.hpp>
#include <mdkv/attend.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/detail/stored_format.hpp>
#include <mdkv/engine/unpack.hpp>
#include <mdkv/presets.hpp>

#include "support/compare.hpp"
#include "support/decoding.hpp"
#include "support/host.hpp"
#include "support/packed.hpp"
#include "support/random.hpp"
#include "support/stored.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace
{

using namespace mdkv;
using support::error_text;
using support::file_in_memory;
using support::index_t;
using support::some_identity;
using support::tensor;

/// Output and log-sum-exps of some queries, as one list.
template <class T>
std::vector<float> attended(cache_view<T, space::host> const& cache)
{
    index_t const rows = 2 * cache.layout.heads;
    auto const queries = support::random_queries<float>(rows, cache.layout.dims.keys);
    tensor<float, 2> output{{rows, cache.layout.dims.values}};
    tensor<float, 1> lse{{rows}};
    support::run([&](cpu::backend const& on) { attend(on, queries.in(), cache, {}, output.out(), lse.out()); });
    std::vector<float> all = output.elements();
    for (float const x : lse.elements()) { all.push_back(x); }
    return all;
}

template <class T>
void expect_equal(cache_view<T const, space::host> const& got, cache_view<T const, space::host> const& want)
{
    CHECK(got.layout == want.layout);
    REQUIRE(got.arena_bytes == want.arena_bytes);
    CHECK(std::equal(got.arena, got.arena + got.arena_bytes, want.arena));
    CHECK(std::equal(got.heads, got.heads + got.layout.heads, want.heads));
    CHECK(*got.appended == *want.appended);
    CHECK(support::same_bits(attended(got), attended(want)));
}

support::packed_sizes mixed_sizes()
{
    return {.heads = 2,
        .tokens    = 23,
        .window    = 3,
        .dims      = {12, 8},
        .rungs     = {drop, fraction(1, 4), fraction(1, 2).as(storage::int8), full_int4, full_int8, full},
        .common    = 2,
        .stand_ins = 2};
}

/// Two layers with all kinds of runs, tails and positions.
template <class T = half>
support::layers_to_store<T> mixed_layers()
{
    support::layers_to_store<T> all;
    support::source random{"stored tails"};
    for (index_t const appended : {index_t{5}, index_t{0}})
    {
        auto sizes            = mixed_sizes();
        sizes.coded_stand_ins = appended == 0;
        all.caches.push_back(support::packed_layer<T>{sizes}.packed(appended + 2));
        support::append_random(all.caches.back(), random, appended);
        all.positions.push_back(tensor<std::int32_t, 2>{{sizes.heads, sizes.tokens + sizes.window + appended}});
        for (index_t h = 0; h < sizes.heads; ++h)
        {
            for (index_t i = 0; i < all.positions.back().extent(1); ++i)
            {
                all.positions.back().set(static_cast<std::int32_t>(i % 4 == 0 ? -1 : 11 * i), h, i);
            }
        }
    }
    return all;
}

template <class Exception = invalid_argument>
std::string refusal(std::vector<std::byte> const& bytes, cache_identity const& identity = some_identity,
    verify how = verify::everything)
{
    file_in_memory const file{bytes};
    return error_text<Exception>([&] { static_cast<void>(read<half>(file.bytes(), identity, how)); });
}

/// Attends and unpacks all layers of a file that `read` takes; whether it took it.
bool attend_all(std::span<std::byte const> bytes, verify how)
{
    try
    {
        auto const file = read<half>(bytes, some_identity, how);
        for (index_t i = 0; i < file.layers(); ++i)
        {
            auto const cache = file.layer(i);
            static_cast<void>(attended(cache));
            tensor<half, 3> keys{{cache.layout.heads, most_rows(cache), cache.layout.dims.keys}};
            tensor<half, 3> values{{cache.layout.heads, most_rows(cache), cache.layout.dims.values}};
            tensor<index_t, 1> kept{{cache.layout.heads}};
            support::run([&](cpu::backend const& on) { unpack(on, cache, keys.out(), values.out(), kept.out()); });
            auto const positions = file.positions(i);
            std::int64_t sum     = 0;
            for (index_t h = 0; h < positions.extent(0); ++h)
            {
                for (index_t s = 0; s < positions.extent(1); ++s) { sum += positions(h, s); }
            }
            CHECK(sum >= -positions.extent(0) * positions.extent(1));
        }
        return true;
    }
    catch (invalid_argument const&)
    {
        return false;
    }
}

} // namespace

TEST_CASE("the checksum is that of its definition")
{
    std::vector<std::byte> digits;
    for (char const c : std::string{"123456789"}) { digits.push_back(static_cast<std::byte>(c)); }
    CHECK(detail::crc32c(0, digits.data(), 9) == 0xe3069283U);
    CHECK(detail::crc32c(detail::crc32c(0, digits.data(), 4), digits.data() + 4, 5) == 0xe3069283U);
    std::vector<std::byte> const zeros(32);
    CHECK(detail::crc32c(0, zeros.data(), 32) == 0x8a9136aaU); // RFC 3720, B.4
}

TEST_CASE_TEMPLATE(
    "caches come back as they were, and attention from a file's bytes has their bits", T, float, half, bfloat16)
{
    std::vector<ratio_set> sets{paper_ratios, evict_ratios, bit_ratios};
    for (preset const& p : {presets::best, presets::any_question, presets::by_window, presets::paper,
             presets::paper_literal, presets::evict})
    {
        sets.push_back(p.ratios);
    }
    support::source random{"stored caches"};
    for (ratio_set const& set : sets)
    {
        support::layers_to_store<T> stored;
        for (index_t const tokens : {index_t{0}, index_t{1}, index_t{70}})
        {
            for (index_t const appended : {index_t{0}, index_t{1}, index_t{16}, index_t{37}})
            {
                support::packed_sizes const sizes{.heads = 3,
                    .tokens                              = tokens,
                    .window                              = tokens == 1 ? 0 : 5,
                    .dims                                = {32, 16},
                    .rungs                               = {set.begin(), set.end()},
                    .scale                               = 0.25F,
                    .stand_ins                           = tokens / 10};
                stored.caches.push_back(support::packed_layer<T>{sizes}.packed(appended + (appended % 2 == 0 ? 0 : 9)));
                support::append_random(stored.caches.back(), random, appended);
            }
        }
        auto const bytes  = stored.written();
        auto const layers = stored.layers();
        CHECK(stored_bytes(stored.whole_place(), std::span{layers}) == std::ssize(bytes));
        CHECK(bytes.size() % 64 == 0);
        file_in_memory const file{bytes};
        auto const caches = read<T>(file.bytes(), some_identity);
        REQUIRE(caches.layers() == std::ssize(stored.caches));
        for (index_t i = 0; i < caches.layers(); ++i)
        {
            auto const& want = stored.caches[static_cast<std::size_t>(i)];
            auto const got   = caches.layer(i);
            expect_equal(got, want.view());
            CHECK(got.arena >= file.bytes().data()); // nothing was copied
            CHECK(got.arena < file.bytes().data() + bytes.size());
            CHECK(got.tail_capacity == want.appended());
        }
    }
}

TEST_CASE("place, positions and attachment come back")
{
    auto const stored = mixed_layers();
    file_in_memory const file{stored.written()};
    auto const caches       = read<half>(file.bytes(), some_identity, verify::bounds);
    cache_place const place = caches.place();
    CHECK(place.first_layer == 3);
    CHECK(place.model_layers == 20);
    CHECK(place.first_head == 2);
    CHECK(caches.heads() == 2);
    CHECK(place.model_heads == 12);
    CHECK(place.tokens == 600);
    auto const attachment = place.attachment;
    CHECK(std::vector<std::byte>{attachment.begin(), attachment.end()} == stored.attachment);
    for (index_t i = 0; i < 2; ++i)
    {
        auto const got   = caches.positions(i);
        auto const& want = stored.positions[static_cast<std::size_t>(i)];
        REQUIRE(got.extent(1) == want.extent(1));
        for (index_t h = 0; h < 2; ++h)
        {
            for (index_t s = 0; s < got.extent(1); ++s) { CHECK(got(h, s) == want.get(h, s)); }
        }
    }
    auto const lone = read<half>(file.bytes(), some_identity).layer(0, 1, 1); // a process with every second head
    auto const both = attended(caches.layer(0));
    auto queries    = support::random_queries<float>(4, 12);
    tensor<float, 2> mine{{2, 12}};
    CHECK(lone.layout.heads == 1);
    tensor<float, 2> output{{2, 8}};
    tensor<float, 1> lse{{2}};
    std::vector<float> const second = queries.elements();
    mine.assign(std::span{second}.subspan(24));
    support::run([&](cpu::backend const& on) { attend(on, mine.in(), lone, {}, output.out(), lse.out()); });
    CHECK(output.elements() == std::vector<float>(both.begin() + 16, both.begin() + 32));
    CHECK(error_text<invalid_argument>([&] { static_cast<void>(caches.layer(2)); })
          == "stored_caches: layer 2 is not among the file's 2");
    CHECK(error_text<invalid_argument>([&] { static_cast<void>(caches.layer(1, 1, 2)); })
          == "stored_caches: heads [1, 1 + 2) are not among the 2 of layer 1");
    for (index_t const head : {std::numeric_limits<index_t>::min(), std::numeric_limits<index_t>::max()})
    {
        auto const text = error_text<invalid_argument>([&] { static_cast<void>(caches.layer(1, head)); });
        CHECK(text.ends_with(") are not among the 2 of layer 1"));
    }
}

TEST_CASE("owners and views are written as layers without positions, by default all that the model has")
{
    auto stored = mixed_layers();
    stored.positions.clear();
    stored.attachment.clear();
    stored.place     = {.model_layers = 2, .model_heads = 2};
    auto const bytes = stored.written();
    std::vector<std::byte> file;
    auto const sink = [&](std::span<std::byte const> part) { file.insert(file.end(), part.begin(), part.end()); };
    write(sink, some_identity, {}, std::span{stored.caches});
    CHECK(file == bytes);
    std::vector const views{stored.caches[0].view(), stored.caches[1].view()};
    CHECK(stored_bytes({.first_layer = 5, .first_head = 1}, std::span{views}) == std::ssize(bytes));
}

TEST_CASE("files without layers, without heads and without tokens come back")
{
    support::layers_to_store<half> none;
    file_in_memory const no_layers{none.written()};
    CHECK(read<half>(no_layers.bytes(), some_identity).layers() == 0);
    none.caches.emplace_back(cache_layout{evict_ratios, 0, 0, {64, 64}}, 0, 0);
    none.caches.emplace_back(cache_layout{bit_ratios, 0, 7, {64, 64}}, 0, 5);
    file_in_memory const no_heads{none.written()};
    auto const caches = read<half>(no_heads.bytes(), some_identity);
    REQUIRE(caches.layers() == 2);
    CHECK(caches.layer(1).layout.heads == 0);
}

TEST_CASE("a cache without a layout is not written: nothing was packed into it, or it was moved from")
{
    auto stored = mixed_layers();
    static_cast<void>(cpu::cache<half>{std::move(stored.caches[1])});
    CHECK(error_text<invalid_argument>([&] { static_cast<void>(stored.written()); })
          == "write: layer 1 has no layout: nothing was packed into it, or it was moved from");
}

TEST_CASE("bytes follow from the caches alone: not from room in a tail, nor from the memory there")
{
    auto const once = mixed_layers();
    auto again      = mixed_layers();
    again.caches[0].reserve_tail(100);
    CHECK(once.written() == again.written());
}

TEST_CASE("a stored cache goes on with a tail of the caller's")
{
    auto stored = mixed_layers();
    file_in_memory const file{stored.written()};
    auto const before = file.bytes();
    std::vector<std::byte> const copy{before.begin(), before.end()};
    auto const cache = read<half>(file.bytes(), some_identity).layer(0);
    std::vector<std::byte> tail(2 * 40 * 20 * sizeof(half));
    index_t appended = -1;
    cache_view<half, space::host> grown;
    support::run([&](cpu::backend const& on) { grown = with_tail(on, cache, tail, 40, appended); });
    CHECK(appended == 5);
    stored.caches[0].reserve_tail(40);
    support::source random{"goes on"};
    for (int i = 0; i < 30; ++i)
    {
        tensor<float, 2> key{{2, 12}};
        tensor<float, 2> value{{2, 8}};
        for (auto* x : {&key, &value})
        {
            for (index_t h = 0; h < 2; ++h)
            {
                for (index_t d = 0; d < x->extent(1); ++d) { x->set(static_cast<float>(random.normal()), h, d); }
            }
        }
        for (auto const& to : {grown, stored.caches[0].view()})
        {
            support::run([&](cpu::backend const& on) { append(on, key.in(), value.in(), to); });
        }
        CHECK(support::same_bits(attended(grown), attended(stored.caches[0].view())));
    }
    CHECK(std::equal(copy.begin(), copy.end(), file.bytes().begin())); // nothing was written there
    auto const refused = [&](std::span<std::byte> room, index_t tokens) {
        return error_text<invalid_argument>([&] {
            support::run(
                [&](cpu::backend const& on) { static_cast<void>(with_tail(on, cache, room, tokens, appended)); });
        });
    };
    CHECK(refused(std::span{tail}.first(100), 40)
          == "with_tail: the tail has 100 bytes for 40 tokens; 3200 are needed, and 5 tokens were appended");
    CHECK(refused(tail, 4)
          == "with_tail: the tail has 3200 bytes for 4 tokens; 320 are needed, and 5 tokens were appended");
    CHECK(refused(tail, -1) == "with_tail: tail_tokens is -1; it must not be negative");
}

TEST_CASE("another identity, element type, version, address or kind of file is refused by name")
{
    auto const bytes = mixed_layers().written();
    cache_identity other{some_identity};
    other[0] = 0x4f;
    CHECK(refusal<mismatch>(bytes, other)
          == "read: byte 24: the file is of the identity 5eed07ff00000000..., not 4fed07ff00000000...");
    other     = some_identity;
    other[31] = 1;
    CHECK(refusal<mismatch>(bytes, other).starts_with("read: byte 24: the file is of the identity 5eed07ff00000000"));
    file_in_memory const file{bytes};
    CHECK(error_text<mismatch>([&] { static_cast<void>(read<float>(file.bytes(), some_identity)); })
          == "read: byte 8: the file has elements of type 2; 1 (f32) is needed");
    auto const changed = [&](std::size_t at, std::initializer_list<int> with) {
        auto damaged = bytes;
        for (int const byte : with) { damaged[at++] = static_cast<std::byte>(byte); }
        return refusal(damaged);
    };
    CHECK(changed(0, {'G', 'G', 'U', 'F'}) == "read: byte 0: this is no file of compressed caches");
    CHECK(changed(8, {4, 3, 2, 1, 2, 0, 1, 0}) // as files of version 2.1 begin
          == "read: byte 12: the file is of version 2; this library reads version 3");
    CHECK(changed(12, {4}) == "read: byte 12: the file is of version 4; this library reads version 3");
    CHECK(changed(12, {0, 3}).starts_with("read: byte 12: the file is of version 768;")); // of a big-endian machine
    CHECK(changed(120, {1}) == "read: the file is damaged: its checksum differs");
    tensor<std::byte, 1> moved{{std::ssize(bytes)}, {.misalign = 8}};
    CHECK(error_text<invalid_argument>([&] {
        static_cast<void>(read<half>({moved.data(), bytes.size()}, some_identity));
    }) == "read: the bytes are not aligned to 64; map the file, or read it into such memory");
    CHECK(refusal({}) == "read: the file has 0 bytes, fewer than a header");
}

TEST_CASE("files cut at any byte, and longer ones, are refused")
{
    auto const bytes = mixed_layers().written();
    for (verify const how : {verify::everything, verify::bounds})
    {
        for (std::size_t size = 0; size < bytes.size(); size += how == verify::bounds || size < 400 ? 1 : 61)
        {
            auto const text =
                refusal({bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size)}, some_identity, how);
            if (!text.starts_with("read: the file has ")) { FAIL(text); }
        }
        auto more = bytes;
        more.resize(bytes.size() + 64);
        CHECK(refusal(more, some_identity, how).starts_with("read: the file has "));
    }
}

TEST_CASE("a file with any byte changed is refused, or can be attended without an access outside of it")
{
    auto const bytes = mixed_layers().written();
    support::source random{"changed bytes"};
    file_in_memory file{bytes};
    int taken = 0;
    for (std::size_t i = 0; i < bytes.size(); ++i)
    {
        file[i] ^= static_cast<std::byte>(1 + random.below(255));
        if (attend_all(file.bytes(), verify::everything)) { FAIL("byte ", i); }
        taken += attend_all(file.bytes(), verify::bounds) ? 1 : 0;
        file[i] = bytes[i];
    }
    CHECK(taken > 0); // in codes and elements
}

TEST_CASE("a file with any numbers in its records is refused, or can be attended without an access outside of it")
{
    auto const bytes = mixed_layers().written();
    support::source random{"changed numbers"};
    file_in_memory file{bytes};
    std::int64_t const numbers[]{0, 1, 2, -1, 63, 64, 4096, 1 << 16, INT32_MAX, INT64_MAX, INT64_MIN,
        std::int64_t{1} << 40, std::int64_t{1} << 60};
    int taken = 0;
    for (int round = 0; round < 20000; ++round)
    {
        // the header behind its identity and the records, or the directory and the positions of the first layer
        index_t const records = sizeof(detail::file_header) + 2 * sizeof(detail::layer_record);
        bool const in_records = random.below(2) == 0;
        index_t const begin   = in_records ? 56 : detail::aligned(records + 3);
        index_t const size    = in_records ? records - begin : 2 * sizeof(head_entry) + 2 * 31 * sizeof(std::int32_t);
        for (index_t i = random.below(3); i >= 0; --i)
        {
            index_t const width  = random.below(2) == 0 ? 8 : 4;
            auto const at        = static_cast<std::size_t>(begin + random.below(size / width) * width);
            std::uint64_t number = 0; // wraps around
            std::memcpy(&number, &file[at], static_cast<std::size_t>(width));
            number += static_cast<std::uint64_t>(random.below(129)) - 64;
            if (random.below(2) == 0)
            {
                number = static_cast<std::uint64_t>(numbers[random.below(std::ssize(numbers))]);
            }
            std::memcpy(&file[at], &number, static_cast<std::size_t>(width));
        }
        taken += attend_all(file.bytes(), verify::bounds) ? 1 : 0;
        std::memcpy(&file[0], bytes.data(), bytes.size());
    }
    MESSAGE("taken: ", taken, " of 20000");
    CHECK(taken > 0);
}

TEST_CASE("layers that cannot be stored are refused before anything is written")
{
    auto const refused = [](support::layers_to_store<half> const& all) {
        bool wrote      = false;
        auto const list = all.layers();
        auto const text = error_text<invalid_argument>([&] {
            write([&](std::span<std::byte const>) { wrote = true; }, some_identity, all.whole_place(), std::span{list});
        });
        CHECK(!wrote);
        return text;
    };
    support::layers_to_store<half> all = mixed_layers();
    all.place.model_layers             = 4;
    CHECK(refused(all) == "write: place from layer 3: first_layer is 3; it must lie in [0, 2]");
    all.place.first_layer = all.place.model_layers = std::numeric_limits<index_t>::max();
    CHECK(refused(all).ends_with(": first_layer is 9223372036854775807; it must lie in [0, 9223372036854775805]"));
    all.place.model_layers = std::numeric_limits<index_t>::min();
    CHECK(refused(all).ends_with(": model_layers is -9223372036854775808; it must lie in [2, 9223372036854775807]"));
    all                  = mixed_layers();
    all.place.first_head = -1;
    CHECK(refused(all) == "write: place from layer 3: first_head is -1; it must lie in [0, 10]");
    all = mixed_layers();
    for (index_t const tokens : {index_t{-1}, index_t{INT32_MAX} + 1})
    {
        all.place.tokens = tokens;
        CHECK(refused(all).find("tokens is " + std::to_string(tokens) + "; it must lie in [0, 2") != std::string::npos);
    }
    all.place.tokens = 20;
    CHECK(refused(all).ends_with(" tokens; place.tokens allows 20"));
    all              = mixed_layers();
    all.positions[1] = tensor<std::int32_t, 2>{{2, 1}};
    CHECK(refused(all).starts_with("write: layer 1: positions [H, S] are [2, 1]; the cache has 2 heads of at most "));
    all = mixed_layers();
    all.positions[0].set(600, 1, 2);
    CHECK(refused(all) == "write: layer 0: a position of head 1 lies outside of [-1, 600), the text's tokens");
    all.positions.clear();
    all.caches.emplace_back(cache_layout{bit_ratios, 1, 0, {16, 16}}, 0);
    CHECK(refused(all) == "write: layer 2 has 1 heads, layer 0 2");
    all.caches.back() = cpu::cache<half>{cache_layout{bit_ratios, 2, 5, {16, 16}}, 100000};
    CHECK(refused(all).starts_with("write: layer 2: the directory's entry of head 0 is none"));
    all.caches.pop_back();
}
