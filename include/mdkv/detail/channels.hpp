/// \file channels.hpp: jobs that find what keys and values of a head have in common, coordinate by coordinate.
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/detail/columns.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>

namespace MDKV_NAMESPACE::detail
{

/// Rows of the channels [H, 3, D].
inline constexpr index_t channel_means   = 0;
inline constexpr index_t channel_scales  = 1;
inline constexpr index_t channel_queries = 2;

/// The largest scale, and the inverse of the least: both are normal halves.
inline constexpr float largest_channel_scale = 1024.0F;

inline constexpr index_t most_sampled = 512;

/// A row from i to i + step - 1, below `count`: rows at a fixed distance would miss, or meet too often, what a text repeats.
[[nodiscard]] MDKV_HD constexpr index_t sampled_row(index_t i, index_t step, index_t count) noexcept
{
    auto const width = static_cast<std::uint32_t>(step < count - i ? step : count - i);
    auto const mixed = (static_cast<std::uint32_t>(i) ^ 0x2C1B3C6DU) * 0x9E3779B9U;
    return i + index_t{(mixed ^ mixed >> 15) % width};
}

/// A number, or 0 for a NaN or an infinity.
[[nodiscard]] MDKV_HD auto finite_or_zero(auto x) noexcept
{
    return x * 0.0F == 0.0F ? x : decltype(x){};
}

/// n lanes of a row's coordinates; NaNs and infinities are 0.
template <team Team, class T>
[[nodiscard]] MDKV_HD auto finite_lanes(Team const& t, T const* from, int n)
{
    float line[std::size_t{Team::register_lanes}]{};
    widen_some(t, from, n, line);
    return finite_or_zero(load_lanes<lane_floats<Team::register_lanes>>(line));
}

/// Means over `count` rows, or one of every few if they are more than `most_sampled`, of the two numbers that add(x, first,
/// second) adds to sums for each row's n lanes x.
template <team Team, class Row, class Add>
[[nodiscard]] MDKV_HD auto sampled_means(Team const& t, index_t count, int n, Row const& row, Add const& add)
{
    struct two
    {
        lane_floats<Team::register_lanes> first, second;
    } sums{};
    index_t const step = (count + most_sampled - 1) / most_sampled;
    for (index_t i = 0; i < count; i += step)
    {
        add(finite_lanes(t, row(step == 1 ? i : sampled_row(i, step, count)), n), sums.first, sums.second);
    }
    auto const rows = static_cast<float>(count == 0 ? 1 : (count + step - 1) / step);
    return two{sums.first / rows, sums.second / rows};
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

    MDKV_HD void operator()(team auto const& t, index_t h) const
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
            // Differences from one of the rows: sums of the rows themselves would be rounded.
            floats const about          = count == 0 ? floats{} : finite_lanes(t, key(count / 2), n);
            auto const [shift, squares] = sampled_means(t, count, n, key, [&](auto const& x, auto& sum, auto& square) {
                sum += x - about;
                square += (x - about) * (x - about);
            });
            auto const square           = [](auto const& x, auto& sum, auto&) { sum += x * x; };
            floats const asked          = sampled_means(t, per_head, n, row, square).first;
            floats const mean           = finite_or_zero(about + shift);
            floats const spread         = finite_or_zero(squares - shift * shift);
            floats const power          = per_head == 0 ? floats{} + 1.0F : finite_or_zero(asked);
            for (int l = 0; l < n; ++l)
            {
                float const query                   = sqrtf(lane(power, l));
                channels(h, channel_means, d + l)   = lane(mean, l);
                channels(h, channel_scales, d + l)  = scale_of(lane(mean, l), lane(spread, l), query);
                channels(h, channel_queries, d + l) = query;
            }
        }
    }

private:
    [[nodiscard]] MDKV_HD static float scale_of(float mean, float variance, float query)
    {
        constexpr float most = largest_channel_scale * largest_channel_scale;
        float const spread   = variance > 0 ? sqrtf(variance) : 0.0F;
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
            auto const n       = static_cast<int>(dim - d < lanes ? dim - d : lanes);
            auto const row     = [&](index_t i) { return values.row(h, token(i)) + d; };
            floats const first = count == 0 ? floats{} : finite_lanes(t, row(count / 2), n);
            auto const mean_of = [&](auto const& of) {
                return finite_or_zero(
                    sampled_means(t, count, n, row, [&](auto const& x, auto& sum, auto&) { sum += of(x); }).first);
            };
            floats const about         = first + mean_of([&](floats const& x) { return x - first; });
            auto const distance        = [&](floats const& x) { return x < about ? about - x : x - about; };
            floats const most          = 4.0F * mean_of(distance);
            auto const [inlier, share] = sampled_means(t, count, n, row, [&](auto const& x, auto& sum, auto& inliers) {
                sum += distance(x) <= most ? x - about : floats{};
                inliers += distance(x) <= most ? floats{} + 1.0F : floats{};
            });
            floats const deviation     = finite_or_zero(inlier) / (share > 0.0F ? share : floats{} + 1.0F);
            for (int l = 0; l < n; ++l) { means(h, d + l) = lane(about + deviation, l); }
        }
    }
};

} // namespace MDKV_NAMESPACE::detail
