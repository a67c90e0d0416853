#include <mdkv/detail/quantiser.hpp>

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/team.hpp>
#include <mdkv/detail/hadamard.hpp>
#include <mdkv/detail/lanes.hpp>

#include "support/compare.hpp"
#include "support/packed.hpp"
#include "support/random.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

namespace
{

using namespace mdkv;
using quantiser = detail::quantiser<>;
using support::index_t;

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity  = std::numeric_limits<float>::infinity();

/// A group of up to 64 numbers around some offset, both of any size that half can hold.
std::vector<float> random_group(support::source& random)
{
    auto const size   = static_cast<float>(std::exp2(random.uniform(-22.0, 14.0)));
    auto const offset = static_cast<float>(random.uniform(-1.0, 1.0) * std::exp2(random.uniform(-22.0, 14.0)));
    std::vector<float> group(static_cast<std::size_t>(1 + random.below(64)));
    for (float& x : group) { x = offset + size * static_cast<float>(random.uniform(-1.0, 1.0)); }
    return group;
}

quantiser fitted(std::vector<float> const& group, storage kind)
{
    auto const [low, high] = std::minmax_element(group.begin(), group.end());
    return {*low, *high, kind};
}

} // namespace

TEST_CASE(
    "a coordinate is read within half a step, or half's rounding of minimum and scale; a group read and written again "
    "is the same group")
{
    support::source random{"quantiser"};
    support::worst_error error;
    int rewritten = 0;
    for (int i = 0; i < 20000; ++i)
    {
        storage const kind             = i % 2 == 0 ? storage::int8 : storage::int4;
        std::vector<float> const group = random_group(random);
        quantiser const q              = fitted(group, kind);
        auto const most                = static_cast<float>(detail::most_code(kind));
        float const least              = *std::min_element(group.begin(), group.end());
        // a rounded minimum cuts what is below it; a scale below the normal halves is rounded to a multiple of 2^-24
        double const limit =
            std::max(0.5 * static_cast<double>(q.scale), std::fabs(static_cast<double>(least)) * 0x1p-11)
            + (q.scale < 0x1p-14F ? double{most} * 0x1p-25 : 0.0) + 0x1p-23 * std::fabs(static_cast<double>(least));
        std::vector<float> read;
        for (float const x : group)
        {
            float const code = q.codes(x, most);
            CHECK_UNARY(code >= 0 && code <= most);
            read.push_back(q.values(code));
            error.add(read.back(), x, limit, i);
        }
        quantiser const again = fitted(read, kind);
        bool const settled    = q.scale >= 0x1p-14F && q.scale >= std::fabs(q.minimum) / 1000;
        if (!settled || group.size() < 2) { continue; }
        ++rewritten;
        CHECK(again.minimum == q.minimum);
        CHECK(again.scale == q.scale);
        for (std::size_t c = 0; c < group.size(); ++c) { CHECK(again.codes(read[c], most) == q.codes(group[c], most)); }
    }
    INFO(error);
    CHECK(error.within(1.0 + 1e-6));
    CHECK(rewritten > 5000);
}

TEST_CASE("a constant group has no scale, a group beyond half is cut, one with a NaN or an infinity is NaN")
{
    for (storage const kind : {storage::int8, storage::int4})
    {
        auto const most = static_cast<float>(detail::most_code(kind));
        for (float const x : {0.0F, 1.5F, -2048.0F, 65504.0F, 0x1p-24F})
        {
            quantiser const q{x, x, kind};
            CHECK(q.scale == 0);
            CHECK(q.codes(x, most) == 0);
            CHECK(q.values(0.0F) == x);
        }
        quantiser const rounded{1.0007F, 1.0007F, kind}; // half's neighbours lie on either side
        CHECK(rounded.scale >= 0);
        CHECK(std::fabs(rounded.values(rounded.codes(1.0007F, most)) - 1.0007F) <= 0x1p-11F);
        quantiser const huge{-1e9F, 1e9F, kind};
        CHECK(huge.values(huge.codes(-1e9F, most)) == -65504.0F);
        CHECK(huge.values(huge.codes(1e9F, most)) == doctest::Approx(65504.0).epsilon(1e-3));
        for (auto const& [low, high] :
            {std::array<float, 2>{nan_value, 1}, {0, nan_value}, {-infinity, 0}, {0, infinity}, {infinity, infinity}})
        {
            quantiser const q{low, high, kind};
            CHECK(std::isnan(q.values(q.codes(0.5F, most))));
            CHECK(q.codes(nan_value, most) == 0);
        }
    }
}

TEST_CASE("groups that get their quantisers side by side get the same ones as each alone")
{
    support::source random{"quantisers"};
    for (float const size : {0.0F, 1e-9F, 1e-6F, 1e-3F, 1.0F, 3e4F, 6.6e4F, 1e30F, infinity, nan_value})
    {
        CAPTURE(size);
        for (auto const kind : {storage::int8, storage::int4})
        {
            constexpr int lanes = 4;
            float least[lanes], most[lanes], x[lanes];
            for (int l = 0; l < lanes; ++l)
            {
                least[l] = (l == 3 ? 1 : size) * static_cast<float>(random.uniform() - 1);
                most[l]  = least[l] + (l % 4 == 2 ? 0 : size) * static_cast<float>(random.uniform());
                x[l]     = static_cast<float>(random.uniform(-1, 1)) * (l == 3 ? 1 : size);
            }
            using floats = detail::lane_floats<lanes>;
            detail::quantiser<lanes> const together{
                detail::load_lanes<floats>(least), detail::load_lanes<floats>(most), kind};
            auto const last     = static_cast<float>(detail::most_code(kind));
            floats const codes  = together.codes(detail::load_lanes<floats>(x), last);
            floats const values = together.values(codes);
            for (int l = 0; l < lanes; ++l)
            {
                quantiser const alone{least[l], most[l], kind};
                auto const same = [](float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); };
                CHECK(same(together.minimum[l], alone.minimum));
                CHECK(same(together.scale[l], alone.scale));
                CHECK(same(together.inverse[l], alone.inverse));
                CHECK(codes[l] == alone.codes(x[l], last));
                CHECK(same(values[l], alone.values(alone.codes(x[l], last))));
            }
        }
    }
}

TEST_CASE("packed groups are the quantiser's, to the last bit, and neighbours do not spoil each other")
{
    support::source random{"groups of a tile"};
    for (int i = 0; i < 200; ++i)
    {
        storage const kind = i % 2 == 0 ? storage::int8 : storage::int4;
        index_t const g    = 1 + random.below(64);
        support::packed_layer<float> layer{{.heads = 1,
            .tokens                                = 16,
            .window                                = 0,
            .dims                                  = {g, g},
            .rungs                                 = {kind == storage::int8 ? full_int8 : full_int4}}};
        std::vector<std::vector<float>> groups;
        for (index_t t = 0; t < 16; ++t)
        {
            std::vector<float> group = random_group(random);
            group.resize(static_cast<std::size_t>(g), group[0]);
            for (float const spoilt : {nan_value, -infinity, 3e38F})
            {
                if (random.below(8) == 0) { group[static_cast<std::size_t>(random.below(g))] = spoilt; }
            }
            for (index_t c = 0; c < g; ++c)
            {
                layer.keys.set(group[static_cast<std::size_t>(c)], 0, t, c);
                layer.values.set(group[static_cast<std::size_t>(c)], 0, t, c);
            }
            groups.push_back(group);
        }
        auto const cache = layer.packed();
        for (std::size_t t = 0; t < 16; ++t)
        {
            for (support::side const side : {support::side::value, support::side::key})
            {
                auto group = groups[t];
                for (index_t c = 0; c < g; ++c)
                {
                    float& x = group[static_cast<std::size_t>(c)];
                    if (side == support::side::value)
                    {
                        x -= static_cast<float>(support::value_mean<float>(cache.view(), 0, c));
                        continue;
                    }
                    x -= static_cast<float>(support::key_mean<float>(cache.view(), 0, c));
                    x *= 1.0F / static_cast<float>(support::key_scale<float>(cache.view(), 0, c));
                }
                detail::hadamard<1>(cpu::team{nullptr}, group.data(), static_cast<int>(g));
                bool const finite = std::all_of(group.begin(), group.end(), [](float x) { return std::isfinite(x); });
                quantiser const q = finite ? fitted(group, kind) : quantiser{nan_value, nan_value, kind};
                run_entry const& run = cache.view().heads[0].runs[0];
                auto const stored =
                    support::coded_token(cache.view().arena + (side == support::side::key ? run.keys : run.values),
                        kind, side, 16, g, static_cast<index_t>(t));
                CAPTURE(i);
                CAPTURE(t);
                CHECK(std::isnan(stored.scales[0]) == !finite);
                CHECK(std::isnan(stored.minima[0]) == !finite);
                if (finite)
                {
                    CHECK(stored.scales[0] == static_cast<double>(q.scale));
                    CHECK(stored.minima[0] == static_cast<double>(q.minimum));
                }
                for (std::size_t c = 0; c < group.size(); ++c)
                {
                    CHECK(stored.codes[c] == q.codes(group[c], static_cast<float>(detail::most_code(kind))));
                }
            }
        }
    }
}
