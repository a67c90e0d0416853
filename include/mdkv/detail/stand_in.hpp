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

/// Rows of stand_in: the queries of a head, times the logits' factor, and behind each its log-sum-exp; both in base 2. An
/// item is a head.
template <backend B, element U>
struct scale_queries
{
    static constexpr char const* name = "scale_queries";

    in_view<U, 3, B> queries; // [H*G, Q, D]
    in_view<float, 2, B> lse; // [H*G, Q]
    float factor;
    out_view<float, 3, B> scaled; // [H, G*Q, D + 1]

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        index_t const dim  = queries.extent(2);
        index_t const each = queries.extent(1);
        auto const share   = share_rows(t, dim + 1);
        for (index_t r = share.row; r < scaled.extent(1); r += share.rows)
        {
            index_t const head = (h * scaled.extent(1) + r) / each;
            index_t const q    = r % each;
            for (index_t d = share.column; d <= dim; d += t.size())
            {
                scaled(h, r, d) =
                    log2_e * (d < dim ? factor * widen(load_at<U>(queries.row(head, q) + d)) : lse(head, q));
            }
        }
    }
};

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

/// The cluster of every dropped token (a seed's own cluster, any other token's nearest seed), the attention that all rows would
/// give the token, and the attention of each row to each cluster. An item is a strip of a head.
template <backend B>
struct attend_dropped
{
    static constexpr char const* name = "attend_dropped";
    static constexpr int threads      = 128;
    static constexpr int strip        = 256; ///< tokens

    in_view<float, 3, B> products;     // [H, M, n]  of seeds and keys
    out_view<float, 3, B> attention;   // [H, G * Q, n]  products of rows and keys, overwritten; room for whole tiles
    in_view<std::uint8_t, 2, B> rungs; // [H, n]
    in_view<index_t, 2, B> seed_slots; // from choose_seeds
    in_view<float, 3, B> seeds;        // from choose_seeds
    in_view<float, 3, B> queries;      // from scale_queries
    index_t from;                      // number of the first token
    index_t first_query, each;         // row r sees tokens up to first_query + r % each
    out_view<std::int32_t, 2, B> clusters; // [H, n]
    out_view<float, 2, B> weights;         // [H, n]
    out_view<float, 4, B> shares;          // [H, strips, M, G * Q]

    [[nodiscard]] MDKV_HD static index_t strips(index_t tokens) noexcept { return (tokens + strip - 1) / strip; }
    [[nodiscard]] index_t items() const noexcept { return shares.extent(0) * shares.extent(1); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        constexpr int lanes = Team::lanes;
        index_t const h     = item / shares.extent(1);
        index_t const s     = item % shares.extent(1);
        index_t const first = s * strip;
        index_t const rows  = attention.extent(1);
        index_t const dim   = queries.extent(2) - 1;
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
            float const total  = queries(h, r, dim); // log-sum-exp of all keys that the row sees
            index_t const last = first_query + r % each - from - first;
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
            for (int l = 0; l < lanes && i + l < count; ++l) { weights(h, first + i + l) = static_cast<float>(sum[l]); }
        }
        for (index_t r = t.rank(); r < rows; r += t.size())
        {
            float* const share = shares.row(h, s, 0) + r;
            for (index_t j = 0; j < shares.extent(2); ++j) { share[j * rows] = 0; }
            for (int i = 0; i < count; ++i)
            {
                if (cluster[i] != no_cluster) { share[cluster[i] * rows] += attention(h, r, first + i); }
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

/// Moves the key of each cluster from the mean, no further than `most_taken` allows: with large logits a step that suits most
/// rows' attention gives all attention of another row to the stand-in. An item is a cluster of a head.
template <backend B>
struct place_stand_in
{
    static constexpr char const* name = "stand_in";
    static constexpr int threads      = 128;
    static constexpr double most_taken =
        3; ///< log2 of the most attention that a row pays a stand-in, over its cluster's

    in_view<index_t, 2, B> seed_slots; // from choose_seeds
    in_view<float, 4, B> shares;
    in_view<float, 3, B> queries;        // from scale_queries
    out_view<float, 4, B> rows;          // [H, M, 3, G*Q]  shares, products with the step, longest steps
    out_view<float, 3, B> stand_in_keys; // from mean_of_cluster

    struct scratch
    {
        carver& cut;
        index_t dim;
        double* sums = cut.take<double>(dim); // [D]  the direction in which the key moves
    };

    [[nodiscard]] index_t items() const noexcept { return stand_in_keys.extent(0) * stand_in_keys.extent(1); }
    [[nodiscard]] index_t scratch_bytes() const noexcept { return bytes_of<scratch>(stand_in_keys.extent(2)); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const h      = item / stand_in_keys.extent(1);
        index_t const j      = item % stand_in_keys.extent(1);
        index_t const dim    = stand_in_keys.extent(2);
        index_t const count  = rows.extent(3);
        float* const key     = stand_in_keys.row(h, j);
        float* const share   = rows.row(h, j, 0);
        float* const lacks   = rows.row(h, j, 1); // the differences that logits lack, then products
        float* const longest = rows.row(h, j, 2);
        if (seed_slots(h, j) < 0) { return; }
        carver cut = t.scratch();
        scratch const memory{cut, dim};
        for (index_t r = t.rank(); r < count; r += t.size())
        {
            double sum = 0;
            for (index_t s = 0; s < shares.extent(1); ++s) { sum += double{shares(h, s, j, r)}; }
            share[r]             = static_cast<float>(sum);
            float const* const q = queries.row(h, r);
            bool const any       = share[r] > 0; // a row that pays a cluster nothing says nothing about its key
            lacks[r] = any ? static_cast<float>(double{q[dim]} + log2(double{share[r]}) - dot(q, key, dim)) : 0.0F;
        }
        t.sync();
        for (index_t d = t.rank(); d < dim; d += t.size()) { memory.sums[d] = 0; }
        for (index_t r = 0; r < count; ++r)
        {
            double const weight  = double{share[r]} * double{lacks[r]};
            float const* const q = queries.row(h, r);
            for (index_t d = t.rank(); d < dim; d += t.size()) { memory.sums[d] += weight * double{q[d]}; }
        }
        t.sync();
        for (index_t r = t.rank(); r < count; r += t.size())
        {
            double const product = dot(queries.row(h, r), memory.sums, dim);
            double const left    = double{lacks[r]} + most_taken;
            longest[r]           = product > 0 ? static_cast<float>((left > 0 ? left : 0.0) / product) : INFINITY;
            lacks[r]             = static_cast<float>(product);
        }
        t.sync();
        double squares = 0;
        double bends   = 0;
        for (index_t d = 0; d < dim; ++d) { squares += memory.sums[d] * memory.sums[d]; }
        for (index_t r = 0; r < count; ++r) { bends += double{share[r]} * double{lacks[r]} * double{lacks[r]}; }
        double step = bends > 0 ? squares / bends : 0.0;
        for (index_t r = 0; r < count; ++r)
        {
            double const most = double{longest[r]};
            step              = most < step ? most : step;
        }
        for (index_t d = t.rank(); d < dim; d += t.size())
        {
            key[d] = static_cast<float>(double{key[d]} + step * memory.sums[d]);
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
