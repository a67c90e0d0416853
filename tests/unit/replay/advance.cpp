// Tolerances: an advanced coordinate differs from the exact turn of the same row by the rounding of a float product and
// of T. A row encoded anew differs by the rounding of the encoded row besides.
#include <mdkv/replay/replay.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include "support/advance_cases.hpp"
#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/random.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

namespace
{

using namespace mdkv;
using support::advance_case;
using support::encoded;
using support::error_text;
using support::random_rows;
using support::tensor;
using host = cpu::backend;

template <class T>
tensor<T, 3> advanced(tensor<T, 3> const& rows, index_t positions, rotary_encoding<host> const& encoding,
    support::placement how = {}, cpu::executor_ref threads = {})
{
    tensor<T, 3> to{{rows.extent(0), rows.extent(1), rows.extent(2)}, how};
    support::run([&](host const& on) { advance(on, rows.in(), positions, encoding, to.out()); }, threads);
    return to;
}

/// The largest difference between two tensors, relative to the length of the coordinate's pair.
template <class T>
double worst(tensor<T, 3> const& got, tensor<double, 3> const& want, advance_case const& x)
{
    double most = 0;
    for (index_t h = 0; h < got.extent(0); ++h)
    {
        for (index_t i = 0; i < got.extent(1); ++i)
        {
            for (index_t d = 0; d < got.extent(2); ++d)
            {
                index_t const other = support::partner(d, x);
                double const a      = want.get(h, i, d);
                double const b      = other < 0 ? 0.0 : want.get(h, i, other);
                most = std::max(most, std::fabs(double{widen(got.get(h, i, d))} - a) / std::sqrt(a * a + b * b));
            }
        }
    }
    return most;
}

template <class T>
constexpr double unit = std::is_same_v<T, float>  ? 0x1p-24
                        : std::is_same_v<T, half> ? 0x1p-11
                                                  : 0x1p-8;

} // namespace

TEST_CASE_TEMPLATE("advanced rows are those encoded anew, to rounding", T, float, half, bfloat16)
{
    for (advance_case const& x : support::advance_cases())
    {
        for (index_t const by : {0, 1, 37, 8064, 1000000, -300})
        {
            CAPTURE(x.dim);
            CAPTURE(x.rotating);
            CAPTURE(by);
            auto const plain          = random_rows<double>(3, 70, x.dim);
            auto const before         = encoded(plain, x, 300);
            auto const after          = encoded(plain, x, 300 + by);
            tensor<double, 1> const f = support::table_of(x);
            rotary_encoding<host> encoding{.base = x.base, .rotating = x.rotating, .pairs = x.pairs};
            if (x.table) { encoding.frequencies = f.in(); }
            CHECK(worst(advanced(support::rounded<T>(before), by, encoding), after, x) < 3 * unit<T> + 0x1p-22);
        }
    }
}

TEST_CASE("no positions ahead leave the bits of rows as they are, and there and back is the same row to rounding")
{
    auto const rows = support::rounded<half>(random_rows<double>(2, 5, 64));
    CHECK(support::same_bits(advanced(rows, 0, {}).elements(), rows.elements()));
    auto const there = advanced(support::rounded<float>(random_rows<double>(2, 5, 64)), 5000, {});
    CHECK(worst(advanced(there, -5000, {}), random_rows<double>(2, 5, 64), {.dim = 64}) < 0x1p-21);
}

TEST_CASE("rows may lie anywhere, be advanced in place and by any number of threads, with the same bits")
{
    auto const rows = support::rounded<bfloat16>(random_rows<double>(4, 200, 40));
    rotary_encoding<host> const encoding{.rotating = 24, .pairs = rotary_pairs::neighbours};
    auto const want = advanced(rows, 2048, encoding).elements();
    for (support::placement const how : {support::placement{.swapped = true}, {.slack = 3}, {.misalign = 1}})
    {
        CHECK(support::same_bits(advanced(rows.relaid(how), 2048, encoding).elements(), want));
    }
    CHECK(support::same_bits(advanced(rows, 2048, encoding, {.swapped = true, .slack = 5}).elements(), want));
    cpu::thread_pool three{3};
    CHECK(support::same_bits(advanced(rows, 2048, encoding, {}, three).elements(), want));
    tensor<bfloat16, 3> own = rows.relaid({.swapped = true});
    support::run([&](host const& on) { advance(on, own.in(), 2048, encoding, own.out()); });
    CHECK(support::same_bits(own.elements(), want));
}

TEST_CASE("a NaN stays in its pair, and coordinates that do not rotate keep their bits")
{
    auto rows = support::rounded<half>(random_rows<double>(1, 3, 16));
    rows.set(narrow<half>(std::numeric_limits<float>::quiet_NaN()), 0, 1, 2);
    auto const got = advanced(rows, 9, {.rotating = 8});
    for (index_t d = 0; d < 16; ++d)
    {
        CAPTURE(d);
        CHECK(std::isnan(widen(got.get(0, 1, d))) == (d == 2 || d == 6));
        if (d >= 8) { CHECK(got.get(0, 1, d).bits == rows.get(0, 1, d).bits); }
        CHECK(!std::isnan(widen(got.get(0, 0, d))));
    }
}

TEST_CASE("advance refuses rotating coordinates that are odd in number or more than there are, and a base that is none")
{
    auto const rows    = support::rounded<float>(random_rows<double>(2, 3, 8));
    auto const refusal = [&](rotary_encoding<host> const& encoding) {
        return error_text<invalid_argument>([&] { static_cast<void>(advanced(rows, 1, encoding)); });
    };
    CHECK(refusal({.rotating = 7})
          == "advance: encoding.rotating is 7, which makes 7 of 8 coordinates; that must be an even number, at most "
             "all of them");
    CHECK(refusal({.rotating = 10})
          == "advance: encoding.rotating is 10, which makes 10 of 8 coordinates; that must be an even number, at most "
             "all of them");
    CHECK(refusal({.rotating = -2})
          == "advance: encoding.rotating is -2, which makes -2 of 8 coordinates; that must be an even number, at most "
             "all of them");
    CHECK(refusal({.base = 0}) == "advance: encoding.base is 0; it must be positive and finite");
    CHECK(refusal({.base = std::numeric_limits<double>::quiet_NaN()})
          == "advance: encoding.base is nan; it must be positive and finite");
    CHECK(refusal({.base = std::numeric_limits<double>::infinity()})
          == "advance: encoding.base is inf; it must be positive and finite");
}
