#include <mdkv/core/types.hpp>

#include "support/compare.hpp"
#include "support/random.hpp"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string_view>
#include <type_traits>
#include <vector>

namespace
{

using namespace mdkv;

/// The value a 16-bit float stands for, by its definition.
double value_of(std::uint16_t bits, int exponent_bits, int fraction_bits)
{
    int const bias           = (1 << (exponent_bits - 1)) - 1;
    std::uint32_t const low  = bits & ((1U << fraction_bits) - 1U);
    std::uint32_t const high = (static_cast<std::uint32_t>(bits) >> fraction_bits) & ((1U << exponent_bits) - 1U);
    double const sign        = (bits & 0x8000U) != 0U ? -1.0 : 1.0;
    if (high == (1U << exponent_bits) - 1U)
    {
        return low != 0U ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
    }
    if (high == 0U) { return sign * std::ldexp(static_cast<double>(low), 1 - bias - fraction_bits); }
    return sign
           * std::ldexp(
               static_cast<double>(low + (1U << fraction_bits)), static_cast<int>(high) - bias - fraction_bits);
}

template <element T>
T from_bits(std::uint16_t bits)
{
    static_assert(sizeof(T) == 2);
    T value;
    std::memcpy(static_cast<void*>(&value), &bits, sizeof value);
    return value;
}

template <element T>
std::uint16_t to_bits(T value)
{
    std::uint16_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

template <class T>
constexpr int exponent_bits = std::is_same_v<T, half> ? 5 : 8;

} // namespace

TEST_CASE_TEMPLATE("widen is exact for every 16-bit pattern, subnormals and infinities included", T, half, bfloat16)
{
    int wrong = 0;
    for (std::uint32_t bits = 0; bits < 0x10000U; ++bits)
    {
        auto const pattern = static_cast<std::uint16_t>(bits);
        double const want  = value_of(pattern, exponent_bits<T>, 15 - exponent_bits<T>);
        auto const got     = static_cast<double>(widen(from_bits<T>(pattern)));
        bool const same = std::isnan(want) ? std::isnan(got) : got == want && std::signbit(got) == std::signbit(want);
        wrong += same ? 0 : 1;
    }
    CHECK(wrong == 0);
}

TEST_CASE_TEMPLATE("narrow undoes widen for every 16-bit pattern that is a number", T, half, bfloat16)
{
    int wrong = 0;
    for (std::uint32_t bits = 0; bits < 0x10000U; ++bits)
    {
        auto const pattern = static_cast<std::uint16_t>(bits);
        float const value  = widen(from_bits<T>(pattern));
        bool const same =
            std::isnan(value) ? std::isnan(widen(narrow<T>(value))) : to_bits(narrow<T>(value)) == pattern;
        wrong += same ? 0 : 1;
    }
    CHECK(wrong == 0);
}

TEST_CASE_TEMPLATE("narrow goes to the nearest value, and from the middle to the even one", T, half, bfloat16)
{
    int wrong = 0;
    for (std::uint32_t bits = 0; bits + 1U < 0x7fffU; ++bits)
    {
        auto const lower = static_cast<std::uint16_t>(bits);
        auto const upper = static_cast<std::uint16_t>(bits + 1U);
        float const low  = widen(from_bits<T>(lower));
        float const high = widen(from_bits<T>(upper));
        if (!std::isfinite(high)) { break; }
        auto const middle        = static_cast<float>((static_cast<double>(low) + static_cast<double>(high)) / 2.0);
        std::uint16_t const even = (bits & 1U) == 0U ? lower : upper;
        float const below        = std::nextafter(middle, 0.0F);
        float const above        = std::nextafter(middle, std::numeric_limits<float>::infinity());
        wrong += to_bits(narrow<T>(middle)) == even ? 0 : 1;
        wrong += below > low && to_bits(narrow<T>(below)) != lower ? 1 : 0;
        wrong += above < high && to_bits(narrow<T>(above)) != upper ? 1 : 0;
    }
    CHECK(wrong == 0);
}

TEST_CASE("float passes through widen and narrow bit for bit")
{
    support::source random{"types float"};
    int wrong = 0;
    for (int i = 0; i < 10000; ++i)
    {
        auto const bits  = static_cast<std::uint32_t>(random.bits());
        auto const value = std::bit_cast<float>(bits);
        if (std::isnan(value)) { continue; }
        wrong += std::bit_cast<std::uint32_t>(narrow<float>(widen(value))) == bits ? 0 : 1;
    }
    CHECK(wrong == 0);
}

TEST_CASE("an element is a float, a half or a bfloat16 and nothing else")
{
    static_assert(element<float> && element<half> && element<bfloat16>);
    static_assert(!element<double> && !element<int> && !element<float const> && !element<std::uint16_t>);
    CHECK(std::string_view{element_name<float>()} == "f32");
    CHECK(std::string_view{element_name<half>()} == "f16");
    CHECK(std::string_view{element_name<bfloat16>()} == "bf16");
}

TEST_CASE("an index is signed and has 64 bits")
{
    static_assert(std::is_signed_v<index_t> && sizeof(index_t) == 8);
    CHECK(std::numeric_limits<index_t>::max() == INT64_MAX);
}

namespace
{

/// Stores through one type around a store through the other; a compiler that takes the two for different objects returns 1.
template <class Foreign, class Own>
[[gnu::noinline]] std::uint16_t written_between(Foreign* foreign, Own* own)
{
    *foreign = Foreign{1};
    *own     = Own{2};
    return static_cast<std::uint16_t>(*foreign);
}

} // namespace

TEST_CASE("an engine's 16-bit numbers and ours are the same memory to the compiler")
{
    std::uint16_t bits = 0;
    CHECK(written_between(&bits, as_half(&bits)) == 2);
    CHECK(written_between(&bits, as_bfloat16(&bits)) == 2);
    short number = 0;
    CHECK(written_between(&number, as_half(&number)) == 2);
}

TEST_CASE_TEMPLATE("a 16-bit float is made of its bits, and of no number", T, half, bfloat16)
{
    CHECK(std::is_trivially_copyable_v<T>);
    CHECK(std::is_trivially_default_constructible_v<T>);
    CHECK(std::is_standard_layout_v<T>);
    CHECK(T{std::uint16_t{0x3c01}}.bits == 0x3c01);
    CHECK(T{}.bits == 0);
    CHECK_FALSE(std::is_constructible_v<T, float>);
    CHECK_FALSE(std::is_constructible_v<T, double>);
    CHECK_FALSE(std::is_constructible_v<T, std::conditional_t<std::is_same_v<T, half>, bfloat16, half>>);
    CHECK_FALSE(std::is_convertible_v<int, T>);

    std::vector<T> const two(2, narrow<T>(0.5F));
    std::vector<T> const copied{two}; // no list of one element
    CHECK(copied.size() == 2);
}
