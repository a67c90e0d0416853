#include <mdkv/core/float_environment.hpp>

#include <mdkv/core/types.hpp>

#include "support/strange_environment.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>

namespace
{

using namespace mdkv;

#if defined(MDKV_TEST_ENVIRONMENTS)

using support::control;
using support::strange_environment;

std::uint32_t bits_of(float x)
{
    return __builtin_bit_cast(std::uint32_t, x);
}

#endif

} // namespace

#if defined(MDKV_TEST_ENVIRONMENTS)

TEST_CASE("while one lives the thread computes as usual, and afterwards as it did before")
{
    for (std::uint64_t const bits : {control::flush, control::up, control::down, control::trapped})
    {
        strange_environment const strange{bits};
        std::uint64_t const before = control::read();
        {
            float_environment const standard;
            float volatile tiny  = 0x1p-140F;
            float volatile third = 3.0F;
            CHECK(tiny * 0x1p100F == 0x1p-40F);
            CHECK(bits_of(1.0F / third) == 0x3eaaaaabU);
            float volatile zero = 0.0F;
            CHECK(std::isnan(zero / zero)); // trapped elsewhere
        }
        CHECK(control::read() == before);
    }
}

TEST_CASE("half becomes float and back whatever the thread does with subnormal numbers")
{
    strange_environment const strange{control::flush};
    std::uint32_t wrong = 0;
    for (std::uint32_t bits = 0; bits < 0x400U; ++bits) // the subnormal ones
    {
        half const value{static_cast<std::uint16_t>(bits)};
        float const wide = widen(value);
        wrong += bits_of(wide) != bits_of(static_cast<float>(bits) * 0x1p-24F) || narrow<half>(wide).bits != bits;
    }
    CHECK(wrong == 0);
}

#else

TEST_CASE("on this processor the floating-point environment stays the caller's")
{
    static_assert(sizeof(float_environment) > 0);
}

#endif
