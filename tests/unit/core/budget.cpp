#include <mdkv/core/budget.hpp>

#include "support/host.hpp"

#include <doctest/doctest.h>

#include <cstdint>

namespace
{

using namespace mdkv;
using support::error_text;

constexpr layer_shape shape{.heads = 3, .group = 3, .tokens = 2016, .window = 32, .dims = {64, 64}, .element_bytes = 2};

} // namespace

TEST_CASE("bytes of a layer count every head, key and value coordinate once")
{
    static_assert(shape.token_bytes() == (64 + 64) * 2);
    static_assert(shape.full_bytes() == 3 * 2048 * 256);
    static_assert(shape.window_bytes() == 3 * 32 * 256);
    constexpr layer_shape uneven{
        .heads = 2, .group = 1, .tokens = 5, .window = 0, .dims = {192, 128}, .element_bytes = 4};
    CHECK(uneven.token_bytes() == (192 + 128) * 4);
    CHECK(uneven.window_bytes() == 0);
}

TEST_CASE("the three units of a budget are converted exactly")
{
    CHECK(budget::bytes(12345).in_bytes(shape) == 12345);
    CHECK(budget::kv_size(64).in_bytes(shape) == 3 * 64 * 256);
    CHECK(budget::fraction(1, 10).in_bytes(shape) == shape.full_bytes() / 10);
    CHECK(budget::fraction(1, 1).in_bytes(shape) == shape.full_bytes());
    CHECK(budget::fraction(0, 7).in_bytes(shape) == 0);
}

TEST_CASE("a fraction is rounded down to a byte and exact where 64 bits would overflow on the way")
{
    constexpr layer_shape small{.heads = 1, .group = 1, .tokens = 1, .window = 0, .dims = {1, 1}, .element_bytes = 5};
    CHECK(budget::fraction(1, 3).in_bytes(small) == 3); // 10 / 3
    CHECK(budget::fraction(2, 3).in_bytes(small) == 6);
    // full_bytes is about 2^50, numerator about 2^30: the plain product would need 80 bits.
    constexpr layer_shape large{
        .heads = 1 << 14, .group = 1, .tokens = 1 << 26, .window = 0, .dims = {512, 512}, .element_bytes = 1};
    index_t const num = (index_t{1} << 30) - 1;
    index_t const den = index_t{1} << 30;
    CHECK(budget::fraction(num, den).in_bytes(large) == (index_t{1} << 50) - (index_t{1} << 20));
}

TEST_CASE("a negative budget and a zero denominator are refused with their values")
{
    CHECK(error_text<invalid_argument>([] { static_cast<void>(budget::bytes(-1)); }) == "budget: -1 is negative");
    CHECK_THROWS_AS(static_cast<void>(budget::kv_size(-5)), invalid_argument);
    CHECK_THROWS_AS(static_cast<void>(budget::fraction(-1, 2)), invalid_argument);
    CHECK(error_text<invalid_argument>([] { static_cast<void>(budget::fraction(1, 0)); })
          == "budget: the denominator is 0; it must be at least 1");
}

TEST_CASE("sizes that leave 64 bits are refused, not wrapped")
{
    CHECK_THROWS_AS(static_cast<void>(budget::kv_size(INT64_MAX).in_bytes(shape)), size_overflow);
    layer_shape huge = shape;
    huge.heads       = INT64_MAX / 2;
    CHECK_THROWS_AS(static_cast<void>(huge.full_bytes()), size_overflow);
}

TEST_CASE("a layer shape names what is wrong with it")
{
    auto const complaint = [](auto change) {
        layer_shape bad = shape;
        change(bad);
        return error_text<invalid_argument>([&] { bad.expects_valid("compress"); });
    };
    CHECK(complaint([](layer_shape& s) { s.heads = -1; }) == "compress: heads is -1; it must not be negative");
    CHECK(complaint([](layer_shape& s) { s.group = 0; }) == "compress: group is 0; it must be at least 1");
    CHECK(complaint([](layer_shape& s) { s.tokens = -2; }) == "compress: tokens is -2; it must not be negative");
    CHECK(complaint([](layer_shape& s) { s.window = -3; }) == "compress: window is -3; it must not be negative");
    CHECK(complaint([](layer_shape& s) { s.dims.values = 0; })
          == "compress: head dimensions are 64 and 0; they must be at least 1");
    CHECK(complaint([](layer_shape& s) { s.element_bytes = 0; })
          == "compress: element_bytes is 0; it must be at least 1");
    CHECK(complaint([](layer_shape& s) { s.tokens = index_t{1} << 31; })
          == "compress: 2147483648 + 32 tokens are more than the limit of 2147483647");
    CHECK_NOTHROW(shape.expects_valid("compress"));
    layer_shape none = shape;
    none.heads       = 0;
    none.tokens      = 0;
    CHECK_NOTHROW(none.expects_valid("compress"));
    CHECK(none.full_bytes() == 0);
}

TEST_CASE("a projection costs the leading columns of both bases, as many as its rung has coordinates")
{
    static_assert(projection_bytes(paper_ratios, 2, {64, 64}, 2) == 2 * (64 * 16) * 2);
    static_assert(projection_bytes(evict_ratios, 1, {64, 64}, 2) == 0);
    CHECK(projection_bytes(paper_ratios, 2, {192, 128}, 4) == (192 * 48 + 128 * 32) * 4);
    CHECK(projection_bytes(ratio_set{drop, fraction(1, 8)}, 1, {64, 64}, 2) == 2 * (64 * 8) * 2);
    for (std::size_t r = 0; r < bit_ratios.size(); ++r) { CHECK(projection_bytes(bit_ratios, r, {64, 64}, 2) == 0); }
}

TEST_CASE("a rung costs the projection that its coordinates need, however they are stored")
{
    constexpr ratio_set mixed{drop, fraction(1, 8).as(storage::int8), fraction(1, 4).as(storage::int8), full_int4,
        fraction(3, 4).as(storage::int8), full};
    static_assert(projection_bytes(mixed, 0, {64, 32}, 2) == 0);
    static_assert(projection_bytes(mixed, 1, {64, 32}, 2) == (64 * 8 + 32 * 4) * 2);
    static_assert(projection_bytes(mixed, 2, {64, 32}, 2) == (64 * 16 + 32 * 8) * 2);
    static_assert(projection_bytes(mixed, 3, {64, 32}, 2) == 0);
    static_assert(projection_bytes(mixed, 4, {64, 32}, 2) == (64 * 48 + 32 * 24) * 2);
    static_assert(projection_bytes(mixed, 5, {64, 32}, 2) == 0);
}
