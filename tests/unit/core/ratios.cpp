#include <mdkv/core/ratios.hpp>

#include "support/host.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace
{

using namespace mdkv;
using support::error_text;

std::string refusal(std::vector<rung> const& rungs)
{
    return error_text<invalid_argument>([&] { static_cast<void>(ratio_set{std::span<rung const>{rungs}}); });
}

} // namespace

TEST_CASE("the paper's ratio set keeps 0, an eighth, a quarter and all of the coordinates")
{
    static_assert(paper_ratios.size() == 4);
    static_assert(paper_ratios.coordinates(0, 128) == 0);
    static_assert(paper_ratios.coordinates(1, 128) == 16);
    static_assert(paper_ratios.coordinates(2, 128) == 32);
    static_assert(paper_ratios.coordinates(3, 128) == 128);
    static_assert(paper_ratios.bytes(2, {128, 64}, 2) == 2 * (32 + 16));
    static_assert(paper_ratios.any_projected());
    static_assert(paper_ratios.full_rung() == 3);
    static_assert(paper_ratios.can_drop());
    CHECK(paper_ratios[1].projected());
    CHECK_FALSE(paper_ratios[0].projected());
    CHECK_FALSE(paper_ratios[3].projected());
}

TEST_CASE("a set without projected rungs needs no projection")
{
    static_assert(!evict_ratios.any_projected());
    CHECK(evict_ratios.full_rung() == 1);
}

TEST_CASE("a quantised vector costs its codes and four bytes for every group of 64 coordinates")
{
    static_assert(coordinate_bytes(storage::plain, 40, 2) == 80);
    static_assert(coordinate_bytes(storage::int8, 64, 2) == 64 + 4);
    static_assert(coordinate_bytes(storage::int4, 64, 2) == 32 + 4);
    static_assert(coordinate_bytes(storage::int4, 65, 4) == 33 + 8);
    static_assert(coordinate_bytes(storage::int4, 5, 4) == 3 + 4);
    static_assert(coordinate_bytes(storage::int8, 1, 2) == 5);
    static_assert(coordinate_bytes(storage::int8, 0, 2) == 0);
    static_assert(bit_ratios.bytes(1, {64, 40}, 2) == 36 + (20 + 4));
    CHECK(bit_ratios.bytes(3, {64, 40}, 4) == 416);
}

TEST_CASE("a rung is full only as it was, projected only in the basis, quantised only in codes")
{
    static_assert(full.full() && !full.projected() && !full.quantised());
    static_assert(!full_int4.full() && !full_int4.projected() && full_int4.quantised());
    static_assert(fraction(1, 4).projected() && !fraction(1, 4).quantised());
    static_assert(fraction(1, 4).as(storage::int8).projected() && fraction(1, 4).as(storage::int8).quantised());
    static_assert(!drop.projected() && !drop.quantised() && !drop.full());
    static_assert(!bit_ratios.any_projected());
    constexpr ratio_set mixed{drop, fraction(1, 4).as(storage::int8), full_int4, full_int8};
    static_assert(mixed.any_projected());
    CHECK(mixed.full_rung() == mixed.size());
}

TEST_CASE("storages are refused where they mean nothing, and so are two rungs of one storage that do not ascend")
{
    CHECK(refusal({drop.as(storage::int8), full})
          == "ratio_set: rung 0 drops the token; only rung 0 may, and it has no storage");
    CHECK(refusal({full_int4, drop}) == "ratio_set: rung 1 drops the token; only rung 0 may, and it has no storage");
    CHECK(refusal({full_int4, full_int8, full_int4})
          == "ratio_set: rungs must ascend; rung 2 (1/1) does not exceed rung 0 (1/1)");
    CHECK(refusal({fraction(1, 2).as(storage::int8), full_int4, fraction(1, 4).as(storage::int8)})
          == "ratio_set: rungs must ascend; rung 2 (1/4) does not exceed rung 0 (1/2)");
    CHECK(refusal({drop, fraction(1, 2), full_int4, fraction(3, 4).as(storage::int8), full_int8, full})
          == "threw nothing");
    CHECK(refusal({drop, fraction(1, 2).as(storage::int4), full})
          == "ratio_set: rung 1 (1/2) has int4; coordinates in a basis are plain or int8, because 4 bits lose those beside "
             "the largest");
    CHECK_THROWS_AS((ratio_set{full_int8, full_int8}), invalid_argument); // at compile time, where it is constexpr
}

TEST_CASE("rungs must ascend in bytes, which depend on dimension and element type")
{
    CHECK_NOTHROW(bit_ratios.expects_ascending({64, 64}, 2));
    CHECK_NOTHROW(ratio_set{drop, fraction(1, 4), full_int4, full}.expects_ascending({64, 64}, 2));
    CHECK_THROWS_AS(
        (ratio_set{drop, fraction(1, 4), full_int4, full}.expects_ascending({64, 64}, 4)), invalid_argument);
    CHECK(error_text<invalid_argument>([] {
        ratio_set{drop, fraction(1, 2), full_int4}.expects_ascending({64, 32}, 2);
    })
          == "ratio_set: rungs must ascend in bytes; rung 2 takes 56 bytes a token, rung 1 96 (dimensions 64 and 32, "
             "elements of 2 bytes)");
    CHECK(error_text<invalid_argument>([] {
        ratio_set{full_int4, fraction(1, 2).as(storage::int8)}.expects_ascending({64, 64}, 2);
    })
          == "ratio_set: rungs must ascend in bytes; rung 1 takes 72 bytes a token, rung 0 72 (dimensions 64 and 64, "
             "elements of 2 bytes)");
    // a vector so short that codes cost more than elements
    CHECK_THROWS_AS((ratio_set{full_int8, full}.expects_ascending({4, 4}, 2)), invalid_argument);
    CHECK_NOTHROW(ratio_set{full_int8, full}.expects_ascending({8, 8}, 2));
}

TEST_CASE("sets without 0 and without 1 are allowed and say so")
{
    ratio_set const middle{fraction(1, 4), fraction(1, 2)};
    CHECK_FALSE(middle.can_drop());
    CHECK(middle.full_rung() == middle.size());
    CHECK(middle.any_projected());
}

TEST_CASE("a run-time set behaves like the compile-time set of the same rungs")
{
    for (rung const& u : bit_ratios)
    {
        ratio_set const one{std::span<rung const>{&u, 1}};
        CHECK(one.bytes(0, {96, 33}, 2)
              == bit_ratios.bytes(static_cast<std::size_t>(&u - bit_ratios.begin()), {96, 33}, 2));
    }
    std::vector<rung> const rungs{drop, fraction(1, 8), fraction(1, 4), full};
    ratio_set const set{std::span<rung const>{rungs}};
    REQUIRE(set.size() == paper_ratios.size());
    for (std::size_t r = 0; r < set.size(); ++r)
    {
        CHECK(set[r] == paper_ratios[r]);
        CHECK(set.coordinates(r, 96) == paper_ratios.coordinates(r, 96));
        CHECK(set.bytes(r, {96, 32}, 4) == paper_ratios.bytes(r, {96, 32}, 4));
    }
    CHECK(set.full_rung() == 3);
    CHECK(set.end() - set.begin() == 4);
}

TEST_CASE("a run-time set refuses rungs out of order, equal, outside [0, 1], none and too many, naming them")
{
    CHECK(refusal({}) == "ratio_set: it must have at least one rung");
    CHECK(refusal({fraction(1, 4), fraction(1, 8)})
          == "ratio_set: rungs must ascend; rung 1 (1/8) does not exceed rung 0 (1/4)");
    CHECK(refusal({drop, fraction(1, 4), fraction(2, 8)})
          == "ratio_set: rungs must ascend; rung 2 (2/8) does not exceed rung 1 (1/4)");
    CHECK(refusal({drop, fraction(9, 8)}) == "ratio_set: rung 1 is 9/8; it must lie in [0, 1]");
    CHECK(refusal({fraction(-1, 8)}) == "ratio_set: rung 0 is -1/8; it must lie in [0, 1]");
    CHECK(refusal({fraction(1, 0)}) == "ratio_set: rung 0 has the denominator 0; it must be positive");
    CHECK(refusal({fraction(1, -2)}) == "ratio_set: rung 0 has the denominator -2; it must be positive");
    std::vector<rung> many;
    for (int i = 0; i <= 16; ++i) { many.push_back(fraction(i, 32)); }
    CHECK(refusal(many) == "ratio_set: 17 rungs are more than the limit of 16");
    many.pop_back();
    CHECK(refusal(many) == "threw nothing");
}

TEST_CASE("numerators and denominators near 2^31 are compared exactly")
{
    // The two differ by 1 part in 2^62: products of 32-bit numbers need 64 bits.
    CHECK(refusal({fraction(INT32_MAX - 2, INT32_MAX - 1), fraction(INT32_MAX - 1, INT32_MAX)}) == "threw nothing");
    CHECK(refusal({fraction(INT32_MAX - 1, INT32_MAX), fraction(INT32_MAX - 2, INT32_MAX - 1)}) != "threw nothing");
}

TEST_CASE("a rung that is no whole number of coordinates is refused, unless rounding down is asked for")
{
    CHECK(error_text<invalid_argument>([] { paper_ratios.expects_fit("key", 20); })
          == "ratio_set: rung 1 (1/8) of key dimension 20 is not a whole number of coordinates");
    ratio_set const rounded = paper_ratios.rounded(rounding::down);
    CHECK_NOTHROW(rounded.expects_fit("key", 20));
    CHECK(rounded.coordinates(1, 20) == 2);
    CHECK(rounded.coordinates(2, 20) == 5);
    CHECK_NOTHROW(paper_ratios.expects_fit("key", 40));
    CHECK_NOTHROW(paper_ratios.expects_fit("value", 576));
}

TEST_CASE("rounding down keeps at least one coordinate")
{
    ratio_set const rounded = ratio_set{drop, fraction(1, 8), full}.rounded(rounding::down);
    CHECK(rounded.coordinates(1, 7) == 1);
    CHECK_NOTHROW(rounded.expects_fit("key", 7));
}

TEST_CASE("two rungs that round to the same number of coordinates are refused, naming both")
{
    CHECK(error_text<invalid_argument>([] { paper_ratios.rounded(rounding::down).expects_fit("value", 7); })
          == "ratio_set: rungs 1 and 2 both keep 1 coordinates of value dimension 7");
    CHECK_THROWS_AS((ratio_set{fraction(1, 8), full}.rounded(rounding::down).expects_fit("key", 1)), invalid_argument);
    // as many coordinates in another storage are another rung
    CHECK_NOTHROW((ratio_set{fraction(1, 8), fraction(1, 7).as(storage::int8), full_int8}
                       .rounded(rounding::down)
                       .expects_fit("key", 7)));
}

TEST_CASE("every supported head dimension fits the paper's ratio set")
{
    for (index_t const dim : {32, 40, 56, 64, 80, 96, 128, 192, 256})
    {
        CAPTURE(dim);
        CHECK_NOTHROW(paper_ratios.expects_fit("key", dim));
        CHECK(paper_ratios.coordinates(1, dim) * 8 == dim);
        CHECK(paper_ratios.coordinates(2, dim) * 4 == dim);
    }
}
