/// \file channels.hpp: jobs that find mean and scale of every channel of keys, the queries' rms, and the mean of every channel of values.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/columns.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace MDKV_NAMESPACE::detail
{

/// Rows of the channels [H, 3, D].
inline constexpr index_t channel_means   = 0;
inline constexpr index_t channel_scales  = 1;
inline constexpr index_t channel_queries = 2;

/// The largest scale, and the inverse of the least: both are normal halves.
inline constexpr float largest_channel_scale = 1024.0F;

inline constexpr index_t most_sampled = 1024;

/// A row from i to i + step - 1, below `count`: rows at a fixed distance would miss, or meet too often, what a text repeats.
[[nodiscard]] MDKV_HD constexpr index_t sampled_row(index_t i, index_t step, index_t count) noexcept
{
    auto const width = static_cast<std::uint32_t>(step < count - i ? step : count - i);
    std::uint32_t x  = static_cast<std::uint32_t>(i) * 0x9E3779B9U;
    x                = (x ^ x >> 15) * 0x2C1B3C6DU;
    return i + index_t{(x ^ x >> 12) % width};
}

/// Mean of `of(x)` over `count` rows, or one of every few if they are more than `most_sampled`, n lanes of each; 0 if the sum
/// leaves float's range.
template <team Team, class Row, class Of>
[[nodiscard]] MDKV_HD auto sampled_mean(Team const& t, index_t count, int n, Row const& row, Of const& of)
{
    constexpr int Lanes = Team::register_lanes;
    using floats        = lane_floats<Lanes>;
    index_t const step  = (count + most_sampled - 1) / most_sampled;
    float line[std::size_t{Lanes}]{};
    floats sum{};
    for (index_t i = 0; i < count; i += step)
    {
        auto const* const from = row(step == 1 ? i : sampled_row(i, step, count));
        if (n == Lanes) { widen_lanes(t, from, line); }
        for (int l = 0; l < n && n < Lanes; ++l)
        {
            line[l] = widen(load_at<std::remove_cvref_t<decltype(*from)>>(from + l));
        }
        floats const x = load_lanes<floats>(line);
        sum += of(x * 0.0F == 0.0F ? x : floats{});
    }
    sum = sum * 0.0F == 0.0F ? sum : floats{};
    return count == 0 ? sum : sum / static_cast<float>((count + step - 1) / step);
}

/// Mean of the rows themselves. A second pass makes the mean of large numbers exact: a sum of them is rounded.
template <team Team, class Row>
[[nodiscard]] MDKV_HD auto sampled_mean(Team const& t, index_t count, int n, Row const& row)
{
    auto const about = sampled_mean(t, count, n, row, [](auto const& x) { return x; });
    return about + sampled_mean(t, count, n, row, [&](auto const& x) { return x - about; });
}

/// The channels of a head's keys. An item is a head.
template <element T, element U, backend B>
struct fit_key_channels
{
    static constexpr char const* name = "fit_channels";
    static constexpr int threads      = 128;

    in_view<U, 3, B> queries;       // [H*G, Q, D]
    in_view<T, 3, B> keys;          // [H, N, D]
    out_view<float, 3, B> channels; // [H, 3, D]

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        fit(t, h, keys.extent(1), [](index_t i) { return i; });
    }

    /// Fits the channels to the keys of `count` tokens; the i-th is token(i).
    template <team Team, class Token>
    MDKV_HD void fit(Team const& t, index_t h, index_t count, Token const& token) const
    {
        constexpr int lanes    = Team::register_lanes;
        using floats           = lane_floats<lanes>;
        index_t const dim      = keys.extent(2);
        index_t const per_head = queries.extent(0) / keys.extent(0) * queries.extent(1); // rows
        for (index_t d = member(t) * lanes; d < dim; d += members(t) * lanes)
        {
            auto const n   = static_cast<int>(dim - d < lanes ? dim - d : lanes);
            auto const key = [&](index_t i) { return keys.row(h, token(i)) + d; };
            auto const row = [&](index_t i) {
                index_t const g = i / queries.extent(1);
                return queries.row(h * (per_head / queries.extent(1)) + g, i % queries.extent(1)) + d;
            };
            floats const none{};
            floats const mean = sampled_mean(t, count, n, key);
            floats const spread =
                sampled_mean(t, count, n, key, [&](floats const& x) { return (x - mean) * (x - mean); });
            floats const asked =
                per_head == 0 ? none + 1.0F : sampled_mean(t, per_head, n, row, [](floats const& x) { return x * x; });
            float by_lane[3][std::size_t{lanes}];
            store_lanes(by_lane[0], mean);
            store_lanes(by_lane[1], spread);
            store_lanes(by_lane[2], asked);
            for (int l = 0; l < n; ++l)
            {
                float const query                   = sqrtf(by_lane[2][l]);
                channels(h, channel_means, d + l)   = by_lane[0][l];
                channels(h, channel_scales, d + l)  = scale_of(by_lane[0][l], sqrtf(by_lane[1][l]), query);
                channels(h, channel_queries, d + l) = query;
            }
        }
    }

private:
    [[nodiscard]] MDKV_HD static float scale_of(float mean, float spread, float query)
    {
        constexpr float most = largest_channel_scale * largest_channel_scale;
        if (!(spread > 0x1p-20F * fabsf(mean))) { return 1.0F; } // no spread, or only that of rounding
        if (spread >= most * query) { return largest_channel_scale; }
        return query >= most * spread ? 1.0F / largest_channel_scale : sqrtf(spread / query);
    }
};

/// The means of the channels of a head's values, without numbers farther from the mean than four times the mean distance: a
/// few huge values do not shift those of all tokens.
template <element T, backend B>
struct fit_value_means
{
    in_view<T, 3, B> values;     // [H, N, Dv]
    out_view<float, 2, B> means; // [H, Dv]

    /// Fits the means to the values of `count` tokens; the i-th is token(i).
    template <team Team, class Token>
    MDKV_HD void fit(Team const& t, index_t h, index_t count, Token const& token) const
    {
        constexpr int lanes = Team::register_lanes;
        using floats        = lane_floats<lanes>;
        index_t const dim   = values.extent(2);
        for (index_t d = member(t) * lanes; d < dim; d += members(t) * lanes)
        {
            auto const n = static_cast<int>(dim - d < lanes ? dim - d : lanes);
            auto const row         = [&](index_t i) { return values.row(h, token(i)) + d; };
            floats const about     = sampled_mean(t, count, n, row);
            auto const distance    = [&](floats const& x) { return x < about ? about - x : x - about; };
            floats const most      = 4.0F * sampled_mean(t, count, n, row, distance);
            auto const inlier      = [&](floats const& x) { return distance(x) <= most ? x - about : floats{}; };
            auto const counts      = [&](floats const& x) { return distance(x) <= most ? floats{} + 1.0F : floats{}; };
            floats const share     = sampled_mean(t, count, n, row, counts);
            floats const deviation = sampled_mean(t, count, n, row, inlier) / (share > 0.0F ? share : floats{} + 1.0F);
            float by_lane[std::size_t{lanes}];
            store_lanes(by_lane, about + deviation);
            for (int l = 0; l < n; ++l) { means(h, d + l) = by_lane[l]; }
        }
    }
};

} // namespace MDKV_NAMESPACE::detail
