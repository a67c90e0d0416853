#include <mdkv/core/cache.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>

#include "support/decoding.hpp"
#include "support/failing_resource.hpp"
#include "support/host.hpp"
#include "support/packed.hpp"
#include "support/random.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace
{

using namespace mdkv;
using support::error_text;
using support::index_t;
using support::packed_layer;

/// Everything a reader can learn from a cache, number for number.
template <class T>
std::vector<double> contents(cpu::cache<T> const& cache)
{
    std::vector<double> all;
    for (index_t h = 0; h < cache.layout().heads; ++h)
    {
        for (auto const& token : support::stored_tokens(cache.view(), h))
        {
            all.push_back(token.rung);
            all.insert(all.end(), token.key_numbers.begin(), token.key_numbers.end());
            all.insert(all.end(), token.value_numbers.begin(), token.value_numbers.end());
        }
    }
    return all;
}

static_assert(std::is_nothrow_move_constructible_v<cpu::cache<half>>);
static_assert(std::is_nothrow_move_assignable_v<cpu::cache<half>>);
static_assert(!std::is_copy_constructible_v<cpu::cache<half>>);
static_assert(std::is_trivially_copyable_v<cache_view<half, space::host>>);

} // namespace

TEST_CASE("a head is laid out without gaps: projections, projected runs, exact run")
{
    cache_layout const layout{paper_ratios, 2, 3, {16, 32}};
    CHECK(layout.full_rung == 3);
    CHECK_FALSE(layout.projected(0));
    CHECK(layout.projected(1));
    CHECK_FALSE(layout.projected(3));
    head_entry entry;
    mdkv::array<index_t, max_rungs> const tokens{100, 5, 0, 7};
    CHECK(
        lay_out_head<half>(layout, tokens, 1000, entry) == 1000 + 2 * (16 * 2 + 4 * 32 + 5 * (2 + 4) + 10 * (16 + 32)));
    CHECK(entry.key_columns == 2); // rung 2 is not in use
    CHECK(entry.value_columns == 4);
    CHECK(entry.key_projection == 1000);
    CHECK(entry.value_projection == 1000 + 2 * 32);
    CHECK(entry.runs[1] == run_entry{5, 1000 + 2 * 160, 1000 + 2 * 170});
    CHECK(entry.exact == run_entry{10, 1000 + 2 * 190, 1000 + 2 * 350});
    CHECK(entry.runs[3] == entry.exact);
}

TEST_CASE("rungs of codes are laid out by their bytes, and ask for projections only when they are in the basis")
{
    ratio_set const ratios{drop, fraction(1, 4).as(storage::int8), full_int4, fraction(3, 4).as(storage::int8), full};
    cache_layout const layout{ratios, 1, 3, {40, 64}};
    CHECK_FALSE((layout.rotated(0) || layout.rotated(1) || layout.rotated(3) || layout.rotated(4)));
    CHECK(layout.rotated(2)); // codes of vectors' own coordinates
    CHECK(layout.any_rotated());
    CHECK_FALSE(cache_layout{paper_ratios, 1, 0, {64, 64}}.any_rotated());
    CHECK(layout.full_rung == 4);
    CHECK(layout.projected(1));
    CHECK_FALSE(layout.projected(2));
    CHECK(layout.projected(3));
    CHECK(layout.own_run(2));
    CHECK_FALSE(layout.own_run(0));
    CHECK_FALSE(layout.own_run(4));
    CHECK(layout.key_bytes(1, 2) == 10 + 4);
    CHECK(layout.value_bytes(3, 2) == 48 + 4);
    CHECK(layout.key_bytes(4, 4) == 160);
    head_entry entry;
    index_t const codes = (2 * 40 + 64) * 2 + 9 * (20 + 4) + 9 * (32 + 4); // with the channels
    CHECK(lay_out_head<half>(layout, {7, 0, 9, 0, 2}, 100, entry) == 100 + codes + 5 * 104 * 2);
    CHECK(entry.key_columns == 0);
    CHECK(entry.channels == 100);
    CHECK(entry.runs[2] == run_entry{9, 388, 388 + 9 * 24});
    CHECK(entry.exact == run_entry{5, 100 + codes, 100 + codes + 5 * 80});
    index_t const projections = 2 * (40 * 10 + 64 * 16);
    CHECK(lay_out_head<half>(layout, {7, 3, 0, 0, 0}, 0, entry) == projections + 3 * (14 + 20) + 3 * 208);
    CHECK(entry.key_columns == 10);
    CHECK(entry.value_columns == 16);
    CHECK(lay_out_head<half>(layout, {7, 3, 0, 1, 0}, 0, entry)
          == 2 * (40 * 30 + 64 * 48) + 3 * (14 + 20) + (34 + 52) + 3 * 208);
    CHECK(entry.key_columns == 30);
}

TEST_CASE("a layout that fits no head dimension or has a negative size is refused")
{
    CHECK(error_text<invalid_argument>([] {
        cache_layout const bad{paper_ratios, 1, 0, {12, 16}};
    }) == "ratio_set: rung 1 (1/8) of key dimension 12 is not a whole number of coordinates");
    CHECK(error_text<invalid_argument>([] {
        cache_layout const bad{paper_ratios, -1, 0, {16, 16}};
    }) == "cache_layout: heads (-1) and window (0) must not be negative");
}

TEST_CASE("the README says how many bytes a head's entry in the directory takes")
{
    std::ifstream file{MDKV_TEST_DATA_DIR "/../../README.md"};
    std::string const text{std::istreambuf_iterator<char>{file}, {}};
    CHECK(text.find("directory (" + std::to_string(sizeof(head_entry)) + " bytes a head)") != std::string::npos);
}

TEST_CASE("a new cache is empty, aligned and of the sizes asked for")
{
    cache_layout const layout{paper_ratios, 3, 2, {16, 8}};
    cpu::cache<bfloat16> const cache{layout, 777, 5};
    auto const view = cache.view();
    CHECK(cache.layout() == layout);
    CHECK(cache.arena_bytes() == 777);
    CHECK(view.arena_bytes == 777);
    CHECK(cache.tail_capacity() == 5);
    CHECK(cache.tail_bytes() == 3 * 5 * (16 + 8) * 2);
    CHECK(cache.directory_bytes() >= index_t{3 * sizeof(head_entry)});
    CHECK(cache.appended() == 0);
    CHECK(reinterpret_cast<std::uintptr_t>(view.arena) % 64 == 0);
    CHECK(reinterpret_cast<std::uintptr_t>(view.tail) % 64 == 0);
    for (index_t h = 0; h < 3; ++h) { CHECK(view.heads[h] == head_entry{}); }
}

TEST_CASE("a default-made cache has no heads and can be moved, copied and looked at")
{
    cpu::cache<float> cache;
    CHECK(cache.view().heads == nullptr);
    CHECK(cache.appended() == 0);
    cpu::cache<float> other = cache.copy();
    other                   = std::move(cache);
    CHECK(other.arena_bytes() == 0);
}

TEST_CASE("sizes that are negative or beyond 64 bits are refused by name")
{
    cache_layout const layout{paper_ratios, 3, 2, {16, 8}};
    using cache = cpu::cache<half>;
    CHECK(error_text<invalid_argument>([&] { cache const bad(layout, -1); })
          == "cache: arena_bytes is -1; it must not be negative");
    CHECK(error_text<invalid_argument>([&] { cache const bad(layout, 0, -2); })
          == "cache: tail_tokens is -2; it must not be negative");
    CHECK(error_text<size_overflow>([&] { cache const bad(layout, 0, INT64_MAX / 8); })
          == "size 144 * 1152921504606846975 is beyond 64 bits");
    cache good(layout, 0, 4);
    CHECK(
        error_text<invalid_argument>([&] { good.reserve_tail(-1); }) == "cache: tokens is -1; it must not be negative");
    CHECK(error_text<size_overflow>([&] { good.reserve_tail(INT64_MAX / 8); })
          == "size 144 * 1152921504606846975 is beyond 64 bits");
    CHECK(good.tail_capacity() == 4);
}

TEST_CASE("a moved cache keeps its memory, a copied one has its own")
{
    packed_layer<half> const layer{{}};
    auto cache = layer.packed(6);
    support::source random{"cache"};
    append_random(cache, random, 4);
    auto const want        = contents(cache);
    auto* const arena      = cache.view().arena;
    cpu::cache<half> moved = std::move(cache);
    CHECK(moved.view().arena == arena);
    CHECK(contents(moved) == want);

    auto copied = moved.copy();
    CHECK(copied.view().arena != arena);
    CHECK(contents(copied) == want);
    append_random(copied, random, 1);
    CHECK(contents(moved) == want);
    CHECK(copied.appended() == 5);
    moved = std::move(copied);
    CHECK(moved.appended() == 5);
}

TEST_CASE("a cache without a layout refuses a tail, and so does one whose memory was moved away")
{
    cpu::cache<float> none;
    CHECK(error_text<invalid_argument>([&] { none.reserve_tail(3); })
          == "cache: a cache without a layout has no room for 3 tokens");
    cpu::cache<float> first{cache_layout{paper_ratios, 2, 1, {16, 16}}, 100, 3};
    cpu::cache<float> const second{std::move(first)};
    CHECK(first.layout() == cache_layout{});
    CHECK(first.tail_capacity() == 0);
    CHECK(first.view().heads == nullptr);
    CHECK_THROWS_AS(first.reserve_tail(3), invalid_argument);
    CHECK(second.tail_capacity() == 3);
}

TEST_CASE("growing the tail keeps every appended token, wherever the old and new last tiles end")
{
    support::source random{"reserve"};
    packed_layer<half> const layer{{.heads = 3, .tokens = 5, .window = 1, .dims = {24, 16}}};
    for (index_t const capacity : {0, 1, 7, 15, 16, 17, 20, 32, 33})
    {
        for (index_t const larger : {1, 8, 16, 18, 31, 32, 40, 64, 65})
        {
            for (index_t const filled : {capacity, capacity / 2})
            {
                auto cache = layer.packed(capacity);
                append_random(cache, random, filled);
                auto const want = contents(cache);
                cache.reserve_tail(larger);
                CHECK(cache.tail_capacity() == std::max(capacity, larger));
                CHECK(cache.appended() == filled);
                CHECK(contents(cache) == want);
                index_t const room = cache.tail_capacity() - filled;
                append_random(cache, random, room);
                CHECK(cache.appended() == filled + room);
            }
        }
    }
}

TEST_CASE("clearing the tail forgets the appended tokens and nothing else")
{
    packed_layer<half> const layer{{}};
    auto cache      = layer.packed(6);
    auto const want = contents(cache);
    support::source random{"clear"};
    append_random(cache, random, 6);
    *cache.view().appended = 0;
    CHECK(cache.appended() == 0);
    CHECK(contents(cache) == want);
    append_random(cache, random, 6);
    CHECK(cache.appended() == 6);
}

TEST_CASE("when the k-th allocation fails nothing changes, nothing leaks, and a retry succeeds")
{
    support::failing_resource memory;
    packed_layer<half> const layer{{}};
    for (support::failure const how : {support::failure::once, support::failure::from_on})
    {
        int failures = 0;
        for (int k = 0; k < 10; ++k)
        {
            memory.arm(how, k);
            try
            {
                cpu::cache<half> const made{layer.layout, layer.bytes(), 4, &memory};
            }
            catch (std::bad_alloc const&)
            {
                ++failures;
            }
            CHECK(memory.outstanding() == 0);
        }
        CHECK(failures == 3); // arena, directory, tail
    }

    memory.arm(support::failure::never);
    auto cache = layer.packed(18, {}, &memory);
    support::source random{"failing"};
    append_random(cache, random, 17);
    auto const want         = contents(cache);
    std::size_t const bytes = memory.outstanding();
    memory.arm(support::failure::once, 0);
    CHECK_THROWS_AS(cache.reserve_tail(40), std::bad_alloc);
    CHECK(cache.tail_capacity() == 18);
    CHECK(contents(cache) == want);
    CHECK(memory.outstanding() == bytes);
    for (int k = 0; k < 3; ++k)
    {
        memory.arm(support::failure::once, k);
        CHECK_THROWS_AS(static_cast<void>(cache.copy()), std::bad_alloc);
        CHECK(memory.outstanding() == bytes);
    }
    memory.arm(support::failure::never);
    cache.reserve_tail(40);
    CHECK(cache.tail_capacity() == 40);
    CHECK(contents(cache) == want);
    cache = {};
    CHECK(memory.outstanding() == 0);
}
