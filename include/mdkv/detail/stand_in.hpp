/// \file stand_in.hpp: jobs of stand_in: dropped tokens in clusters, the attention that they would get, and the token of each cluster.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/columns.hpp>
#include <mdkv/detail/panel.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace MDKV_NAMESPACE::detail
{

inline constexpr std::int32_t no_cluster = -1; ///< cluster of a kept token

/// How many of a head's seeds are among the last rows.
struct seed_shares
{
    index_t first         = 0;       ///< the first of these rows
    index_t const* behind = nullptr; ///< [H]  seeds among them; null: there are no such rows
};

/// Chooses the keys around which a head's clusters form: of its n dropped tokens the m = min(M, n) different ones with numbers
/// floor((j + 1/2) n / m). An item is a head.
template <backend B, element T>
struct choose_seeds
{
    static constexpr char const* name = "choose_seeds";

    in_view<T, 3, B> keys;
    in_view<std::uint8_t, 2, B> rungs;
    seed_shares shares;
    out_view<index_t, 2, B> seed_slots; // [H, M]  -1 beyond the last cluster
    out_view<float, 3, B> seeds; // [H, M, D + 1]  keys, half their squares behind them; zeros beyond the last cluster

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        index_t const tokens   = rungs.extent(1);
        index_t const most     = seed_slots.extent(1);
        index_t const dim      = keys.extent(2);
        index_t const behind   = shares.behind == nullptr ? 0 : shares.behind[h];
        index_t const split    = shares.behind == nullptr ? tokens : shares.first;
        index_t const clusters = choose(t, h, 0, split, 0, most - behind);
        for (index_t j = clusters + t.rank(); j < most; j += t.size()) { seed_slots(h, j) = -1; }
        t.sync();
        choose(t, h, split, tokens, clusters, behind);
        t.sync();
        for (index_t g = t.rank(); g < most; g += t.size())
        {
            index_t const at = seed_slots(h, g);
            float square     = 0;
            for (index_t d = 0; d < dim; ++d)
            {
                float const x  = at < 0 ? 0.0F : widen(load_at<T>(keys.row(h, at) + d));
                seeds(h, g, d) = x;
                square += x * x;
            }
            seeds(h, g, dim) = square / 2;
        }
    }

private:
    /// Chooses at most `most` seeds among rows [from, to), as clusters `first` and the next ones; returns how many.
    template <team Team>
    MDKV_HD index_t choose(Team const& t, index_t h, index_t from, index_t to, index_t first, index_t most) const
    {
        index_t const each  = (to - from + t.size() - 1) / t.size();
        index_t const left  = to - from - t.rank() * each;
        index_t const begin = left > 0 ? from + t.rank() * each : to;
        index_t const end   = to - begin < each ? to : begin + each;
        index_t dropped     = 0;
        for (index_t i = begin; i < end; ++i) { dropped += rungs(h, i) == 0 ? 1 : 0; }
        auto const all         = t.prefix(dropped);
        index_t const clusters = all.total < most ? all.total : most;
        index_t number         = all.before;
        index_t j              = 0;
        for (index_t i = begin; i < end; ++i)
        {
            if (rungs(h, i) != 0) { continue; }
            while (j < clusters && (2 * j + 1) * all.total / (2 * clusters) < number) { ++j; }
            for (; j < clusters && (2 * j + 1) * all.total / (2 * clusters) == number; ++j)
            {
                seed_slots(h, first + j) = i;
            }
            ++number;
        }
        return clusters;
    }
};

/// The log-sum-exp of row r of head h in base 2, from those of [H*G, Q] queries, of which a head has `rows`.
template <class View>
[[nodiscard]] MDKV_HD float lse_of_row(View const& lse, index_t h, index_t rows, index_t r)
{
    return log2_e * lse(h * (rows / lse.extent(1)) + r / lse.extent(1), r % lse.extent(1));
}

/// Finds the cluster of every dropped token (a seed's own cluster, any other token's nearest seed), the attention that all rows
/// would give the token, and the attention of each row, and of all, to each cluster. An item is a strip of a head.
template <backend B>
struct attend_dropped
{
    static constexpr char const* name = "attend_dropped";
    static constexpr int threads      = 128;
    static constexpr int strip        = 256; ///< tokens
    /// What is added to the attention to a token, so that a cluster has a mean though no row attends to it.
    static constexpr double least_weight = 0x1p-60;

    out_view<float, 3, B> products;    // [H, M, n]  of seeds and keys; then the attention to the tokens of each cluster
    out_view<float, 3, B> attention;   // [H, G * Q + 1, n]  products of rows and keys; then attention, and its sum
    in_view<std::uint8_t, 2, B> rungs; // [H, n]
    in_view<index_t, 2, B> seed_slots; // from choose_seeds
    in_view<float, 3, B> seeds;        // from choose_seeds
    in_view<float, 2, B> lse;          // [H * G, Q]
    index_t from;                      // number of the first token
    index_t first_query;               // row r sees tokens up to first_query + r % Q
    out_view<std::int32_t, 2, B> clusters; // [H, n]  scratch
    out_view<float, 4, B> shares;          // [H, strips, M, G * Q + 1]  of each row, then of all

    [[nodiscard]] MDKV_HD static index_t strips(index_t tokens) noexcept { return (tokens + strip - 1) / strip; }
    [[nodiscard]] index_t items() const noexcept { return shares.extent(0) * shares.extent(1); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        constexpr int lanes = Team::lanes;
        index_t const h     = item / shares.extent(1);
        index_t const s     = item % shares.extent(1);
        index_t const first = s * strip;
        index_t const rows  = attention.extent(1) - 1;
        auto const count    = static_cast<int>(rungs.extent(1) - first < strip ? rungs.extent(1) - first : strip);
        std::int32_t* const cluster = clusters.row(h) + first;
        for (int i = member(t); i < count; i += members(t))
        {
            cluster[i] = rungs(h, first + i) == 0 ? nearest(h, first + i) : no_cluster;
        }
        t.sync();
        for (index_t r = 0; r < rows; ++r)
        {
            float* const x     = attention.row(h, r) + first;
            float const total  = lse_of_row(lse, h, rows, r); // over all keys that the row sees
            index_t const last = first_query + r % lse.extent(1) - from - first;
            for (int i = member(t) * lanes; i < count; i += members(t) * lanes)
            {
                float power[std::size_t{lanes}];
                for (int l = 0; l < lanes; ++l)
                {
                    bool const seen = i + l < count && i + l <= last && cluster[i + l] != no_cluster;
                    power[l]        = !seen ? -1000.0F : x[i + l] < total ? x[i + l] - total : 0.0F;
                }
                powers_of_two(t, power, x + i);
            }
        }
        t.sync();
        for (int i = member(t) * lanes; i < count; i += members(t) * lanes)
        {
            double sum[std::size_t{lanes}]{};
            for (index_t r = 0; r < rows; ++r)
            {
                float const* const x = attention.row(h, r) + first + i;
                for (int l = 0; l < lanes; ++l) { sum[l] += double{x[l]}; }
            }
            float* const weight = attention.row(h, rows) + first + i;
            std::int32_t own[std::size_t{lanes}];
            for (int l = 0; l < lanes; ++l) { weight[l] = static_cast<float>(sum[l] + least_weight); }
            for (int l = 0; l < lanes; ++l) { own[l] = i + l < count ? cluster[i + l] : no_cluster; }
            for (std::int32_t j = 0; j < products.extent(1); ++j)
            {
                float* const of_cluster = products.row(h, j) + first + i;
                for (int l = 0; l < lanes; ++l) { of_cluster[l] = own[l] == j ? weight[l] : 0.0F; }
            }
        }
        t.sync();
        for (index_t r = t.rank(); r <= rows; r += t.size())
        {
            float* const share = shares.row(h, s, 0) + r;
            for (index_t j = 0; j < shares.extent(2); ++j) { share[j * (rows + 1)] = 0; }
            for (int i = 0; i < count; ++i)
            {
                if (cluster[i] != no_cluster) { share[cluster[i] * (rows + 1)] += attention(h, r, first + i); }
            }
        }
    }

private:
    /// The cluster of a token, whose half squared distance to a seed is |k|^2 / 2 - k.s + |s|^2 / 2. A seed is in its own
    /// cluster, so that no cluster is empty even if keys are equal.
    [[nodiscard]] MDKV_HD std::int32_t nearest(index_t h, index_t i) const
    {
        std::int32_t cluster = no_cluster;
        float least          = 0;
        for (index_t j = 0; j < products.extent(1) && seed_slots(h, j) >= 0; ++j)
        {
            if (seed_slots(h, j) == from + i) { return static_cast<std::int32_t>(j); }
            float const distance = seeds(h, j, seeds.extent(2) - 1) - products(h, j, i);
            if (cluster != no_cluster && !(distance < least)) { continue; }
            least   = distance;
            cluster = static_cast<std::int32_t>(j);
        }
        return cluster;
    }
};

/// Divides the sums of each cluster's keys and values by its attention, and moves the key from the mean, no further than
/// `most_taken` allows: with large logits a step that suits most rows' attention gives all attention of another row to the
/// stand-in. An item is a cluster of a head.
template <backend B>
struct place_stand_in
{
    static constexpr char const* name = "stand_in";
    static constexpr int threads      = 128;
    static constexpr double most_taken =
        3; ///< log2 of the most attention that a row pays a stand-in, over its cluster's

    in_view<index_t, 2, B> seed_slots; // from choose_seeds
    in_view<float, 4, B> shares;
    in_view<float, 3, B> queries;                         // [H, G * Q, D]  times the logits' factor in base 2
    in_view<float, 2, B> lse;                             // [H * G, Q]
    out_view<float, 4, B> rows;                           // [H, M, 2, G * Q]  shares, differences that logits lack
    out_view<float, 3, B> stand_in_keys, stand_in_values; // sums, weighted by attention, of clusters' keys and values

    [[nodiscard]] index_t items() const noexcept { return stand_in_keys.extent(0) * stand_in_keys.extent(1); }
    [[nodiscard]] index_t scratch_bytes() const noexcept { return stand_in_keys.extent(2) * index_t{sizeof(double)}; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const h        = item / stand_in_keys.extent(1);
        index_t const j        = item % stand_in_keys.extent(1);
        index_t const dim      = stand_in_keys.extent(2);
        index_t const count    = rows.extent(3);
        float* const key       = stand_in_keys.row(h, j);
        float* const share     = rows.row(h, j, 0);
        float* const lacks     = rows.row(h, j, 1);
        bool const empty       = seed_slots(h, j) < 0;
        auto const over_strips = [&](index_t r) {
            double sum = 0;
            for (index_t s = 0; s < shares.extent(1); ++s) { sum += double{shares(h, s, j, r)}; }
            return sum;
        };
        auto const divide = [&](out_view<float, 3, B> const& sums, double by) {
            for (index_t d = t.rank(); d < sums.extent(2); d += t.size())
            {
                sums(h, j, d) = empty ? 0.0F : static_cast<float>(double{sums(h, j, d)} / by);
            }
        };
        double const all = over_strips(count);
        divide(stand_in_keys, all);
        divide(stand_in_values, all);
        t.sync();
        if (empty) { return; }
        double* const way = t.scratch().template take<double>(dim); // the direction in which the key moves
        for (index_t r = t.rank(); r < count; r += t.size())
        {
            share[r]            = static_cast<float>(over_strips(r));
            bool const any      = share[r] > 0; // a row that pays a cluster nothing says nothing about its key
            double const wanted = double{lse_of_row(lse, h, count, r)} + log2(double{share[r]});
            lacks[r]            = any ? static_cast<float>(wanted - dot(queries.row(h, r), key, dim)) : 0.0F;
        }
        t.sync();
        for (index_t d = t.rank(); d < dim; d += t.size()) { way[d] = 0; }
        for (index_t r = 0; r < count; ++r)
        {
            double const weight  = double{share[r]} * double{lacks[r]};
            float const* const q = queries.row(h, r);
            for (index_t d = t.rank(); d < dim; d += t.size()) { way[d] += weight * double{q[d]}; }
        }
        t.sync();
        double bends   = 0;
        double longest = INFINITY; // step
        for (index_t r = t.rank(); r < count; r += t.size())
        {
            double const product = dot(queries.row(h, r), way, dim);
            double const left    = double{lacks[r]} + most_taken;
            double const most    = product > 0 ? (left > 0 ? left : 0.0) / product : INFINITY;
            longest              = most < longest ? most : longest;
            bends += double{share[r]} * product * product;
        }
        bends          = t.sum(bends);
        longest        = -t.largest(-longest);
        double squares = 0;
        for (index_t d = 0; d < dim; ++d) { squares += way[d] * way[d]; }
        double const best = bends > 0 ? squares / bends : 0.0;
        double const step = longest < best ? longest : best;
        for (index_t d = t.rank(); d < dim; d += t.size())
        {
            key[d] = static_cast<float>(double{key[d]} + step * way[d]);
        }
    }

private:
    template <class V>
    [[nodiscard]] MDKV_HD static double dot(float const* a, V const* b, index_t dim)
    {
        constexpr int lanes = 8; // a number of sums that compilers vectorise
        double partial[lanes]{};
        index_t d = 0;
        for (; d + lanes <= dim; d += lanes)
        {
            for (int l = 0; l < lanes; ++l) { partial[l] += double{a[d + l]} * double{b[d + l]}; }
        }
        double sum = 0;
        for (; d < dim; ++d) { sum += double{a[d]} * double{b[d]}; }
        for (double const x : partial) { sum += x; }
        return sum;
    }
};

} // namespace MDKV_NAMESPACE::detail
