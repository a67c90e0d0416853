#include <mdkv/stages/pool.hpp>

#include <mdkv/core/ground.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/executor.hpp>

#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/random.hpp"
#include "support/real.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using mdkv::index_t;
using mdkv::pool_options;
using mdkv::pooling;
using support::error_text;
using support::real;
using support::source;
using support::tensor;

tensor<float, 3> random_losses(
    source& random, index_t heads, index_t rungs, index_t tokens, support::placement how = {})
{
    tensor<float, 3> loss{{heads, rungs, tokens}, how};
    for (index_t h = 0; h < heads; ++h)
    {
        for (index_t r = 0; r < rungs; ++r)
        {
            for (index_t i = 0; i < tokens; ++i) { loss.set(static_cast<float>(random.normal()), h, r, i); }
        }
    }
    return loss;
}

tensor<float, 3> pooled(tensor<float, 3> const& loss, pool_options options, support::placement how = {},
    mdkv::cpu::executor_ref threads = {})
{
    tensor<float, 3> result{{loss.extent(0), loss.extent(1), loss.extent(2)}, how};
    support::run([&](mdkv::cpu::backend const& on) { mdkv::pool(on, loss.in(), options, result.out()); }, threads);
    return result;
}

} // namespace

TEST_CASE("pool is the largest, or the sum over the width, of the neighbours that exist")
{
    source random{"pool"};
    for (index_t const tokens : {1, 2, 6, 7, 16, 17, 31, 33, 100, 2600, 16384, 20000})
    {
        for (index_t const width : {1, 3, 7, 25, 51, 101, 1023, 1025})
        {
            if (tokens > 3000 && width > 51) { continue; }
            tensor<float, 3> const loss    = random_losses(random, 2, 2, tokens);
            tensor<float, 3> const largest = pooled(loss, {width, pooling::max});
            tensor<float, 3> const average = pooled(loss, {width, pooling::mean});
            bool all_largest               = true;
            support::worst_error error;
            for (index_t h = 0; h < 2; ++h)
            {
                for (index_t r = 0; r < 2; ++r)
                {
                    for (index_t i = 0; i < tokens; ++i)
                    {
                        float most = loss.get(h, r, i);
                        real sum   = 0;
                        real sizes = 0;
                        for (index_t t = std::max<index_t>(i - width / 2, 0); t <= std::min(i + width / 2, tokens - 1);
                             ++t)
                        {
                            most = std::max(most, loss.get(h, r, t));
                            sum += static_cast<real>(loss.get(h, r, t));
                            sizes += std::fabs(static_cast<real>(loss.get(h, r, t)));
                        }
                        all_largest = all_largest && largest.get(h, r, i) == most;
                        error.add(static_cast<real>(average.get(h, r, i)), sum / static_cast<real>(width),
                            sizes / static_cast<real>(width), i);
                    }
                }
            }
            CAPTURE(tokens);
            CAPTURE(width);
            CHECK(all_largest);
            INFO(error);
            CHECK(error.within(static_cast<double>(width + 1) * 0x1p-24)); // one rounding for each addition
        }
    }
}

TEST_CASE("a width of one copies, one beyond every token spreads one value over all")
{
    source random{"pool width"};
    tensor<float, 3> const loss = random_losses(random, 3, 4, 77);
    for (pooling const kind : {pooling::max, pooling::mean})
    {
        CHECK(pool_options{1, kind}.copies());
        CHECK_FALSE(pool_options{3, kind}.copies());
        CHECK(support::same_bits(pooled(loss, {1, kind}).elements(), loss.elements()));
    }
    CHECK_FALSE(pool_options{1, pooling::adaptive}.copies());
    std::vector<float> const all = loss.elements();
    std::vector<float> const got = pooled(loss, {std::numeric_limits<index_t>::max(), pooling::max}).elements();
    for (std::size_t row = 0; row < 12; ++row)
    {
        auto const first = all.begin() + static_cast<std::ptrdiff_t>(row * 77);
        for (std::size_t i = 0; i < 77; ++i) { CHECK(got[row * 77 + i] == *std::max_element(first, first + 77)); }
    }
}

TEST_CASE(
    "adaptive pooling is the largest loss, worth half for every half width it is away, up to eight widths at least")
{
    source random{"pool adaptive"};
    for (index_t const tokens : {1, 2, 17, 300, 700})
    {
        for (index_t const width : {index_t{1}, index_t{3}, index_t{7}, index_t{25}, index_t{101}, index_t{100001},
                 std::numeric_limits<index_t>::max()})
        {
            tensor<float, 3> loss = random_losses(random, 2, 3, tokens);
            for (index_t i = 0; i < tokens; ++i)
            {
                loss.set(std::fabs(loss.get(0, 1, i)), 0, 1, i); // as losses are
                loss.set(i == tokens / 3 ? 5.0F : 0.0F, 1, 2, i);
            }
            tensor<float, 3> const got = pooled(loss, {width, pooling::adaptive});
            support::worst_error error;
            int below = 0;
            for (index_t h = 0; h < 2; ++h)
            {
                for (index_t r = 0; r < 3; ++r)
                {
                    for (index_t i = 0; i < tokens; ++i)
                    {
                        real most = -std::numeric_limits<real>::infinity();
                        real near = most; // within eight widths
                        for (index_t j = 0; j < tokens; ++j)
                        {
                            real const away = static_cast<real>(std::abs(i - j));
                            real const faded =
                                static_cast<real>(loss.get(h, r, j)) * std::exp2(-2 * away / static_cast<real>(width));
                            most = std::max(most, faded);
                            if (away <= 8 * static_cast<real>(width)) { near = std::max(near, faded); }
                        }
                        // Whatever the distance, a few roundings; what is below the smallest normal float has fewer digits.
                        auto const found = static_cast<real>(got.get(h, r, i));
                        auto const bound = found < near ? near : std::min(found, most);
                        error.add(found, bound, std::max(std::fabs(bound), real{0x1p-126}), i);
                        below += got.get(h, r, i) < loss.get(h, r, i) ? 1 : 0;
                    }
                }
            }
            CAPTURE(tokens);
            CAPTURE(width);
            INFO(error);
            CHECK(error.within(4 * 0x1p-24));
            CHECK(below == 0);
        }
    }
}

TEST_CASE("a higher peak reaches farther with adaptive pooling, and never over what stands higher")
{
    tensor<float, 3> loss{{1, 1, 200}};
    for (index_t i = 0; i < 200; ++i) { loss.set(1.0F, 0, 0, i); }
    loss.set(1024.0F, 0, 0, 100);
    loss.set(2.0F, 0, 0, 20);
    tensor<float, 3> const got = pooled(loss, {9, pooling::adaptive});
    auto const reach           = [&](index_t peak, index_t step) {
        index_t i = peak;
        while (got.get(0, 0, i + step) > 1.0F) { i += step; }
        return (i - peak) * step;
    };
    CHECK(reach(20, -1) == 4); // one halving, four and a half tokens
    CHECK(reach(20, 1) == 4);
    CHECK(reach(100, -1) == 44); // ten
    CHECK(reach(100, 1) == 44);
    CHECK(got.get(0, 0, 100) == 1024.0F);
    CHECK(got.get(0, 0, 20) == 2.0F);
    CHECK(got.get(0, 0, 0) == 1.0F);
    CHECK(got.get(0, 0, 199) == 1.0F);
}

TEST_CASE("a NaN reaches all its neighbours and nobody else, with adaptive pooling its own token alone")
{
    source random{"pool nan"};
    for (index_t const bad : {0, 1, 20, 50, 99})
    {
        for (pooling const kind : {pooling::max, pooling::mean})
        {
            tensor<float, 3> loss = random_losses(random, 1, 1, 100);
            loss.set(std::numeric_limits<float>::quiet_NaN(), 0, 0, bad);
            tensor<float, 3> const got = pooled(loss, {7, kind});
            for (index_t i = 0; i < 100; ++i) { CHECK(std::isnan(got.get(0, 0, i)) == (std::abs(i - bad) <= 3)); }
        }
    }
    for (index_t const bad : {0, 20, 99})
    {
        tensor<float, 3> loss = random_losses(random, 1, 2, 100);
        loss.set(std::numeric_limits<float>::quiet_NaN(), 0, 0, bad);
        loss.set(std::numeric_limits<float>::infinity(), 0, 1, bad);
        tensor<float, 3> const got = pooled(loss, {7, pooling::adaptive});
        for (index_t i = 0; i < 100; ++i)
        {
            CHECK(std::isnan(got.get(0, 0, i)) == (i == bad));
            CHECK((std::abs(i - bad) > 56 || got.get(0, 1, i) == std::numeric_limits<float>::infinity()));
        }
    }
    tensor<float, 3> loss = random_losses(random, 1, 1, 40);
    for (index_t i = 0; i < 40; ++i) { loss.set(-std::numeric_limits<float>::infinity(), 0, 0, i); }
    for (pooling const kind : {pooling::max, pooling::adaptive})
    {
        CHECK(pooled(loss, {7, kind}).get(0, 0, 20) == -std::numeric_limits<float>::infinity());
    }
}

TEST_CASE("pool refuses a width that is even or not positive")
{
    std::vector<float> values(2000, 1.0F);
    mdkv::workspace scratch{support::nan_memory{}};
    mdkv::cpu::backend const on{&scratch, {}};
    auto const call = [&](auto const& from, pool_options options, auto const& to) {
        return error_text<mdkv::invalid_argument>([&] { mdkv::pool(on, from, options, to); });
    };
    auto const loss = mdkv::in(on, values.data(), 2, 4, 100);
    auto const out  = mdkv::out(on, values.data() + 1000, 2, 4, 100);
    CHECK(call(loss, {.width = 4}, out) == "pool: width is 4; it must be odd and at least 1");
    CHECK(call(loss, {.width = 0}, out) == "pool: width is 0; it must be odd and at least 1");
    CHECK(call(loss, {.width = -3}, out) == "pool: width is -3; it must be odd and at least 1");
}
