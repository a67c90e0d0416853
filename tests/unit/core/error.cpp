#include <mdkv/core/error.hpp>

#include "support/host.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace
{

using namespace mdkv;
using support::error_text;

} // namespace

TEST_CASE("expects is silent when the condition holds and can run at compile time")
{
    static_assert((expects(true, "never"), true));
    CHECK_NOTHROW(expects(true, "never"));
}

TEST_CASE("expects throws the concatenation of its arguments, texts and numbers alike")
{
    std::string const name = "loss";
    CHECK(error_text<invalid_argument>([&] {
        expects(false, "score: ", name, " is ", 7, " of ", std::size_t{9}, ", ", 0.5F);
    }) == "score: loss is 7 of 9, 0.5");
    CHECK(error_text<invalid_argument>([] { expects(false, INT64_MIN, "|", UINT64_MAX); })
          == "-9223372036854775808|18446744073709551615");
}

TEST_CASE("expects throws the exception it is told to")
{
    CHECK_THROWS_AS(expects<size_overflow>(false, "x"), size_overflow);
    CHECK_THROWS_AS(expects<insufficient_workspace>(false, "x"), insufficient_workspace);
    CHECK_THROWS_AS(expects<mismatch>(false, "x"), mismatch);
    CHECK_THROWS_AS(expects<non_finite_input>(false, "x"), non_finite_input);
}

TEST_CASE("one catch clause covers everything the library throws itself")
{
    static_assert(std::is_base_of_v<std::runtime_error, error>);
    static_assert(std::is_base_of_v<error, invalid_argument>);
    static_assert(std::is_base_of_v<invalid_argument, size_overflow>);
    static_assert(std::is_base_of_v<invalid_argument, insufficient_workspace>);
    static_assert(std::is_base_of_v<invalid_argument, non_finite_input>);
    static_assert(std::is_base_of_v<invalid_argument, mismatch>);
    CHECK_THROWS_AS(expects<mismatch>(false, "x"), error);
}

TEST_CASE("checked_multiply and checked_add are right up to the last value and name both numbers beyond it")
{
    static_assert(checked_multiply(3, 5) == 15 && checked_add(3, -5) == -2);
    index_t const half_way = index_t{1} << 62;
    CHECK(checked_multiply(half_way - 1, 2) == INT64_MAX - 1);
    CHECK(checked_add(INT64_MAX, 0) == INT64_MAX);
    CHECK(checked_multiply(INT64_MAX, 0) == 0);
    CHECK(error_text<size_overflow>([&] { static_cast<void>(checked_multiply(half_way, 2)); })
          == "size 4611686018427387904 * 2 is beyond 64 bits");
    CHECK(error_text<size_overflow>([] { static_cast<void>(checked_add(INT64_MAX, 1)); })
          == "size 9223372036854775807 + 1 is beyond 64 bits");
    CHECK_THROWS_AS(static_cast<void>(checked_multiply(INT64_MIN, -1)), size_overflow);
    CHECK_THROWS_AS(static_cast<void>(checked_add(INT64_MIN, -1)), size_overflow);
}
