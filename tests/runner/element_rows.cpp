#include "runner/element_rows.hpp"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

#include <mdkv/core/types.hpp>

#include "support/compare.hpp"
#include "support/random.hpp"

TEST_CASE_TEMPLATE(
    "rows of every 16-bit pattern widen as one element does, at every length around a register", T, mdkv::half)
{
    std::vector<T> all(65536);
    for (std::size_t i = 0; i < all.size(); ++i) { all[i] = std::bit_cast<T>(static_cast<std::uint16_t>(i)); }
    std::vector<float> got(all.size());
    runner::widen_row(all.data(), std::ssize(all), got.data());
    bool equal = true;
    for (std::size_t i = 0; i < all.size(); ++i)
    {
        float const want = mdkv::widen(all[i]);
        equal            = equal && (std::isnan(want) ? std::isnan(got[i]) : support::ulps(got[i], want) == 0);
    }
    CHECK(equal);
    for (std::int64_t count = 0; count < 40; ++count)
    {
        std::vector<float> short_row(41, -7.0F);
        runner::widen_row(all.data() + 0x3C00, count, short_row.data());
        for (std::int64_t i = 0; i < 41; ++i)
        {
            float const want = i < count ? mdkv::widen(all[static_cast<std::size_t>(0x3C00 + i)]) : -7.0F;
            CHECK(short_row[static_cast<std::size_t>(i)] == want);
        }
    }
}

TEST_CASE_TEMPLATE(
    "rows narrow and round as one element does, ties to even, overflow to infinity", T, float, mdkv::half)
{
    std::vector<float> values = {0.0F, -0.0F, 1.0F, 1.0F + 0x1p-11F, 1.0F + 0x1p-8F, 65520.0F, -65519.0F, 3.4e38F,
        1e-7F, 0x1p-25F, -0x1p-24F, 6e-8F};
    support::source random("element rows");
    for (int i = 0; i < 1000; ++i)
    {
        values.push_back(static_cast<float>(std::ldexp(random.normal(), static_cast<int>(random.below(40)) - 25)));
    }
    for (std::int64_t const count : {std::int64_t{7}, std::int64_t{65}, std::ssize(values)})
    {
        std::vector<T> narrow(static_cast<std::size_t>(count));
        runner::narrow_row(values.data(), count, narrow.data());
        std::vector<float> rounded = values;
        runner::round_row<T>(rounded.data(), count);
        bool equal = true;
        for (std::int64_t i = 0; i < std::ssize(values); ++i)
        {
            auto const at    = static_cast<std::size_t>(i);
            float const want = i < count ? mdkv::widen(mdkv::narrow<T>(values[at])) : values[at];
            equal            = equal && support::ulps(rounded[at], want) == 0;
            if (i < count) { equal = equal && support::ulps(mdkv::widen(narrow[at]), want) == 0; }
        }
        CHECK(equal);
    }
}
