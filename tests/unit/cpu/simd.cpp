#include <mdkv/cpu/simd.hpp>

#include <mdkv/cpu/detail/products.hpp>

#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/random.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

namespace
{

using namespace mdkv;
namespace simd = cpu::simd;

simd::floats from(std::vector<float> const& v)
{
    return simd::load(v.data());
}

std::vector<float> to(simd::floats v)
{
    std::vector<float> out(simd::lanes);
    simd::store(out.data(), v);
    return out;
}

/// As many random floats as there are lanes.
std::vector<float> random_lanes(support::source& random, double low, double high)
{
    std::vector<float> v(simd::lanes);
    for (float& x : v) { x = static_cast<float>(random.uniform(low, high)); }
    return v;
}

/// Random bits in every lane, those of `mask`.
simd::ints random_words(support::source& random, std::uint32_t mask)
{
    simd::ints v{};
    for (int lane = 0; lane < simd::lanes; ++lane) { v[lane] = static_cast<std::int32_t>(random.bits() & mask); }
    return v;
}

template <element T>
int wrong_lanes(std::vector<std::byte> const& bytes, std::size_t elements, std::size_t shift)
{
    constexpr auto lanes = static_cast<std::size_t>(simd::lanes);
    int wrong            = 0;
    for (std::size_t i = 0; i + lanes <= elements; i += lanes)
    {
        std::byte const* const at = bytes.data() + shift + i * sizeof(T);
        float got[lanes];
        simd::store(got, simd::load(reinterpret_cast<T const*>(at)));
        for (std::size_t lane = 0; lane < lanes; ++lane)
        {
            T value;
            std::memcpy(static_cast<void*>(&value), at + lane * sizeof(T), sizeof value);
            float const want = widen(value);
            wrong += std::isnan(want) ? !std::isnan(got[lane]) : std::memcmp(&want, &got[lane], sizeof want) != 0;
        }
    }
    return wrong;
}

} // namespace

TEST_CASE_TEMPLATE("load widens every 16-bit pattern as widen does, also from odd addresses", T, half, bfloat16)
{
    for (std::size_t const shift : {0U, 1U})
    {
        std::vector<std::byte> bytes(shift + 2 * 0x10000U);
        for (std::uint32_t i = 0; i < 0x10000U; ++i)
        {
            auto const pattern = static_cast<std::uint16_t>(i);
            std::memcpy(bytes.data() + shift + 2 * i, &pattern, 2);
        }
        CHECK(wrong_lanes<T>(bytes, 0x10000, shift) == 0);
    }
}

TEST_CASE("load and store move floats bit for bit from odd addresses")
{
    support::source random{"simd load"};
    std::vector<std::byte> bytes(4 * 64 + 3);
    for (std::byte& b : bytes) { b = static_cast<std::byte>(random.bits() & 0xFFU); }
    for (std::size_t shift = 0; shift < 4; ++shift) { CHECK(wrong_lanes<float>(bytes, 64, shift) == 0); }
}

TEST_CASE("products of 16-bit numbers are added two by two, and the second bytes of pairs become numbers")
{
    support::source random{"simd products"};
    for (int i = 0; i < 100; ++i)
    {
        simd::pair_sums sum{};
        simd::ints want{};
        for (int time = 0; time < 3; ++time)
        {
            auto const a    = random_words(random, 0x00FF00FFU); // codes
            auto const b    = random_words(random, 0xFFFFFFFFU);
            auto const high = simd::high_bytes(b);
            sum             = simd::add_products(sum, a, b);
            for (int lane = 0; lane < simd::lanes; ++lane)
            {
                auto const half = [&](simd::ints const& v, int which) {
                    return int{static_cast<std::int16_t>(static_cast<std::uint32_t>(v[lane]) >> (16 * which))};
                };
                want[lane] += half(a, 0) * half(b, 0) + half(a, 1) * half(b, 1);
                CHECK(half(high, 0) == (half(b, 0) >> 8 & 0xFF));
                CHECK(half(high, 1) == (half(b, 1) >> 8 & 0xFF));
            }
        }
        CHECK_FALSE(simd::any(simd::widened(sum) != want));
    }
}

TEST_CASE("products of bytes are added four by four, of 4-bit codes with signed numbers and with others")
{
    support::source random{"simd bytes"};
    auto const byte = [](simd::ints const& v, int lane, int i) {
        return static_cast<int>(static_cast<std::uint32_t>(v[lane]) >> (8 * i) & 0xFFU);
    };
    for (int i = 0; i < 100; ++i)
    {
        auto const codes   = random_words(random, 0xFFFFFFFFU);
        auto const high    = simd::high_halves(codes);
        auto const low     = codes & 0x0f0f0f0f;
        auto const numbers = random_words(random, 0xFFFFFFFFU);
        auto const with    = simd::widened(simd::add_byte_products<true>(
            simd::add_byte_products<true>(simd::byte_sums{}, low, numbers), high, numbers));
        auto const without = simd::widened(simd::add_byte_products<false>(simd::byte_sums{}, numbers, high));
        for (int lane = 0; lane < simd::lanes; ++lane)
        {
            int signed_sum = 0;
            int sum        = 0;
            for (int k = 0; k < 4; ++k)
            {
                int const code = byte(codes, lane, k);
                CHECK(byte(high, lane, k) == code / 16);
                signed_sum += static_cast<std::int8_t>(byte(numbers, lane, k)) * (code / 16 + code % 16);
                sum += byte(numbers, lane, k) * (code / 16);
            }
            CHECK(with[lane] == signed_sum);
            CHECK(without[lane] == sum);
        }
    }
}

TEST_CASE("half is rounded as narrow rounds it, from both ends of its range, between neighbours and beyond")
{
    int wrong = 0;
    for (std::uint32_t i = 0; i < 0x10000U; ++i)
    {
        float const x = widen(half{static_cast<std::uint16_t>(i)});
        if (std::isnan(x)) { continue; }
        float const next = widen(half{static_cast<std::uint16_t>((i + 1) & 0xFFFFU)});
        float const tie  = std::isfinite(x) && std::isfinite(next) ? x / 2 + next / 2 : x * 1.5F;
        for (float const each : {x, tie, std::nextafter(tie, 0.0F), std::nextafter(tie, 2 * tie)})
        {
            half got[simd::lanes];
            simd::narrow_to(got, simd::broadcast(each));
            wrong += got[simd::lanes - 1].bits != narrow<half>(each).bits;
        }
    }
    CHECK(wrong == 0);
}

TEST_CASE("numbers are rounded to the nearest whole one, halves to the even one, and stored as bytes and as shorts")
{
    auto const rounded = [](float x) { return simd::to_nearest(simd::broadcast(x))[simd::lanes - 1]; };
    constexpr std::pair<float, int> every[]{
        {0.5F, 0}, {1.5F, 2}, {-0.5F, 0}, {-2.5F, -2}, {254.51F, 255}, {-127.49F, -127}, {32766.5F, 32766}};
    for (auto const& [x, whole] : every) { CHECK(rounded(x) == whole); }
    for (int const first : {-32768, -300, -128, -8, 0, 112, 240, 32752})
    {
        simd::ints numbers[16 / simd::lanes];
        for (int i = 0; i < 16; ++i) { numbers[i / simd::lanes][i % simd::lanes] = first + i; }
        std::byte with_sign[16];
        std::byte without[16];
        std::int16_t shorts[16];
        simd::store_bytes<true>(with_sign, numbers);
        simd::store_bytes<false>(without, numbers);
        simd::store_shorts(reinterpret_cast<std::byte*>(shorts), numbers);
        for (int i = 0; i < 16; ++i)
        {
            int const number = first + i;
            if (number >= -128 && number < 128) { CHECK(static_cast<std::int8_t>(with_sign[i]) == number); }
            if (number >= 0 && number < 256) { CHECK(static_cast<int>(without[i]) == number); }
            CHECK(shorts[i] == number);
        }
    }
}

TEST_CASE("broadcast fills every lane")
{
    CHECK(to(simd::broadcast(1.5F)) == std::vector<float>(simd::lanes, 1.5F));
}

TEST_CASE("max, min and abs work lane by lane")
{
    support::source random{"simd lanes"};
    for (int i = 0; i < 100; ++i)
    {
        auto const a    = random_lanes(random, -10, 10);
        auto const b    = random_lanes(random, -10, 10);
        auto const more = to(simd::larger(from(a), from(b)));
        auto const less = to(simd::smaller(from(a), from(b)));
        auto const size = to(simd::magnitude(from(a)));
        for (std::size_t lane = 0; lane < a.size(); ++lane)
        {
            CHECK(more[lane] == std::max(a[lane], b[lane]));
            CHECK(less[lane] == std::min(a[lane], b[lane]));
            CHECK(size[lane] == std::fabs(a[lane]));
        }
    }
}

TEST_CASE("max and min give the second operand where one is NaN")
{
    float const nan = std::numeric_limits<float>::quiet_NaN();
    CHECK(to(simd::larger(simd::broadcast(nan), simd::broadcast(2.0F))) == std::vector<float>(simd::lanes, 2.0F));
    CHECK(to(simd::smaller(simd::broadcast(nan), simd::broadcast(2.0F))) == std::vector<float>(simd::lanes, 2.0F));
    CHECK(std::isnan(to(simd::larger(simd::broadcast(2.0F), simd::broadcast(nan)))[0]));
}

TEST_CASE("sum adds all lanes and max_lane finds the largest wherever it is")
{
    support::source random{"simd sum"};
    for (int i = 0; i < 200; ++i)
    {
        auto v          = random_lanes(random, -10, 10);
        double sum      = 0;
        double absolute = 0;
        float most      = v[0];
        for (float const x : v)
        {
            sum += static_cast<double>(x);
            absolute += std::fabs(static_cast<double>(x));
            most = std::max(most, x);
        }
        CHECK(std::fabs(static_cast<double>(simd::sum(from(v))) - sum) <= 1e-6 * absolute);
        CHECK(simd::max_lane(from(v)) == most);
    }
    for (std::size_t lane = 0; lane < static_cast<std::size_t>(simd::lanes); ++lane)
    {
        std::vector<float> v(simd::lanes, -1.0F);
        v[lane] = 3.0F;
        CHECK(simd::max_lane(from(v)) == 3.0F);
    }
}

TEST_CASE("any sees a single true lane, and none in all false ones")
{
    for (std::size_t lane = 0; lane < static_cast<std::size_t>(simd::lanes); ++lane)
    {
        std::vector<float> v(simd::lanes, 0.0F);
        v[lane] = 1.0F;
        CHECK(simd::any(from(v) > simd::broadcast(0.5F)));
    }
    CHECK_FALSE(simd::any(simd::broadcast(0.0F) > simd::broadcast(0.5F)));
}

TEST_CASE("exp2 is within 2e-7 of the truth from 2^-126 to 2^127")
{
    support::source random{"simd exp2"};
    support::worst_error error;
    for (int i = 0; i < 20000; ++i)
    {
        bool const near_zero = i % 2 == 0;
        auto const v         = random_lanes(random, near_zero ? -2 : -126, near_zero ? 2 : 127);
        auto const got       = to(simd::exp2(from(v)));
        for (std::size_t lane = 0; lane < v.size(); ++lane)
        {
            long double const want = std::exp2(static_cast<long double>(v[lane]));
            error.add(static_cast<long double>(got[lane]), want, want, i);
        }
    }
    CAPTURE(error);
    CHECK(error.within(2e-7));
}

TEST_CASE("exp2 of whole numbers is exact, and what is below 2^-126 is exactly 0")
{
    for (int n = -126; n <= 127; ++n)
    {
        CAPTURE(n);
        CHECK(to(simd::exp2(simd::broadcast(static_cast<float>(n))))[0] == std::ldexp(1.0F, n));
    }
    for (float const x : {-126.5F, -127.0F, -1000.0F, -1e30F, -std::numeric_limits<float>::infinity()})
    {
        CAPTURE(x);
        CHECK(to(simd::exp2(simd::broadcast(x))) == std::vector<float>(simd::lanes, 0.0F));
    }
}

TEST_CASE("exp2 keeps a NaN")
{
    for (float const x : to(simd::exp2(simd::broadcast(std::numeric_limits<float>::quiet_NaN()))))
    {
        CHECK(std::isnan(x));
    }
}

TEST_CASE("exp2 never falls where its argument rises")
{
    float before = 0.0F;
    int falls    = 0;
    for (float x = -3.0F; x < 3.0F; x += 1.0F / 4096.0F)
    {
        float const now = to(simd::exp2(simd::broadcast(x)))[0];
        falls += now < before ? 1 : 0;
        before = now;
    }
    CHECK(falls == 0);
}
