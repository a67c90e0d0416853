/// \file stand_in.hpp: jobs of stand_in: dropped tokens in clusters, the attention that they would get, and the token of each cluster.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/columns.hpp>
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
template <backend B, element T>
struct attend_dropped
{
    static constexpr char const* name = "attend_dropped";
    static constexpr int threads      = 128;
    static constexpr int tile         = tile_tokens;
    static constexpr index_t tiles    = 16;  ///< tiles of a strip
    static constexpr int sums         = 8;   ///< products of rows at a time
    static constexpr int block        = 128; ///< rows, or seeds, whose products are in scratch at a time

    in_view<T, 3, B> keys;
    in_view<std::uint8_t, 2, B> rungs;
    in_view<index_t, 2, B> seed_slots;     // from choose_seeds
    in_view<float, 3, B> seeds;            // from choose_seeds
    in_view<float, 3, B> queries;          // from scale_queries
    index_t first_query, each;             // row r sees tokens up to first_query + r % each
    out_view<std::int32_t, 2, B> clusters; // [H, N]
    out_view<float, 2, B> weights;         // [H, N]
    out_view<float, 4, B> shares;          // [H, strips, M, G * Q]

    struct scratch
    {
        carver& cut;
        index_t dim;
        float* columns        = cut.take<float>(dim * tile);   // [D, 16]  keys
        float* attention      = cut.take<float>(block * tile); // [rows, 16], before that products [seeds, 16]
        double* sums          = cut.take<double>(tile);        // [16]  over the rows
        float* least          = cut.take<float>(tile); // [16]  half the squared distance to the nearest seed so far
        std::int32_t* cluster = cut.take<std::int32_t>(tile); // [16]
    };

    [[nodiscard]] static index_t strips(index_t tokens) noexcept
    {
        return (tokens + tiles * tile - 1) / (tiles * tile);
    }
    [[nodiscard]] index_t items() const noexcept { return keys.extent(0) * strips(keys.extent(1)); }
    [[nodiscard]] index_t scratch_bytes() const noexcept { return bytes_of<scratch>(keys.extent(2)); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const h     = item / shares.extent(1);
        index_t const strip = item % shares.extent(1);
        index_t const rows  = shares.extent(3);
        carver cut          = t.scratch();
        scratch const memory{cut, keys.extent(2)};
        for (index_t j = 0; j < shares.extent(2); ++j)
        {
            for (index_t r = t.rank(); r < rows; r += t.size()) { shares(h, strip, j, r) = 0; }
        }
        for (index_t i = 0; i < tiles; ++i)
        {
            index_t const first = (strip * tiles + i) * tile;
            index_t const left  = keys.extent(1) - first;
            if (left <= 0) { break; }
            attend(t, memory, h, strip, first, static_cast<int>(left < tile ? left : tile));
        }
    }

private:
    template <team Team>
    MDKV_HD void attend(Team const& t, scratch const& memory, index_t h, index_t strip, index_t first, int count) const
    {
        auto const dim     = static_cast<int>(keys.extent(2));
        index_t const rows = shares.extent(3);
        t.sync();
        for (int i = member(t); i < dim * tile; i += members(t)) { memory.columns[i] = 0; }
        t.sync();
        widen_columns(
            t, count, dim, [&](int i) { return keys.row(h, first + i); }, memory.columns);
        t.sync();
        bool any = false;
        for (int i = 0; i < count; ++i) { any = any || rungs(h, first + i) == 0; }
        for (int i = member(t); i < tile; i += members(t))
        {
            memory.sums[i]    = 0;
            memory.cluster[i] = no_cluster;
        }
        for (index_t from = 0; any && from < seeds.extent(1); from += block)
        {
            index_t const left = seeds.extent(1) - from;
            auto const here    = static_cast<int>(left < block ? left : block);
            multiply(t, memory, seeds, h, from, here, [&](int j, int column, float const*, auto const& product) {
                for (int l = 0; l < Team::lanes; ++l) { memory.attention[j * tile + column + l] = product[l]; }
            });
            t.sync();
            for (int i = member(t); i < count; i += members(t))
            {
                if (rungs(h, first + i) == 0) { join_nearest(memory, h, first + i, i, from, here); }
            }
            t.sync();
        }
        for (int i = member(t); i < count; i += members(t)) { clusters(h, first + i) = memory.cluster[i]; }
        t.sync();
        for (index_t from = 0; any && from < rows; from += block)
        {
            auto const here = static_cast<int>(rows - from < block ? rows - from : block);
            multiply(t, memory, queries, h, from, here, [&](int r, int column, float const* row, auto const& product) {
                index_t const last = first_query + (from + r) % each;
                float const total  = row[dim]; // log-sum-exp of all keys that the row sees
                float power[Team::lanes];
                for (int l = 0; l < Team::lanes; ++l)
                {
                    bool const seen = memory.cluster[column + l] != no_cluster && first + column + l <= last;
                    float const x   = product[l] - total;
                    power[l]        = !seen ? -1000.0F : x < 0.0F ? x : 0.0F;
                }
                powers_of_two(t, power, memory.attention + r * tile + column);
            });
            t.sync();
            for (int r = 0; r < here; ++r)
            {
                for (int i = member(t); i < tile; i += members(t))
                {
                    memory.sums[i] += double{memory.attention[r * tile + i]};
                }
            }
            for (int r = member(t); r < here; r += members(t))
            {
                float* const share = shares.row(h, strip, 0) + from + r;
                for (int i = 0; i < tile; ++i)
                {
                    if (memory.cluster[i] != no_cluster)
                    {
                        share[memory.cluster[i] * rows] += memory.attention[r * tile + i];
                    }
                }
            }
            t.sync();
        }
        for (int i = member(t); i < count; i += members(t))
        {
            weights(h, first + i) = static_cast<float>(memory.sums[i]);
        }
    }

    /// Multiplies the tile's keys by rows [from, from + count) of a head; calls take(row's number, column, row, products).
    template <team Team, class Take>
    MDKV_HD void multiply(Team const& t, scratch const& memory, in_view<float, 3, B> const& all, index_t h,
        index_t from, int count, Take const& take) const
    {
        constexpr int vectors = tile / Team::lanes; // vectors of a column
        auto const dim        = static_cast<int>(keys.extent(2));
        for (int i = member(t); i < (count + sums - 1) / sums * vectors; i += members(t))
        {
            int const r      = i / vectors * sums;
            int const column = i % vectors * Team::lanes;
            float const* row[sums]{};
            for (int k = 0; k < sums; ++k) { row[k] = all.row(h, from + (r + k < count ? r + k : r)); }
            float product[sums][Team::lanes];
            column_products(t, row, memory.columns + column, dim, product);
            for (int k = 0; k < sums && r + k < count; ++k) { take(r + k, column, row[k], product[k]); }
        }
    }

    /// Puts token i of the tile in the cluster of the nearest of `count` seeds, if none before `from` is as near. Half the
    /// squared distance is |k|^2 / 2 - k.s + |s|^2 / 2. A seed is in its own cluster, so that no cluster is empty even if keys
    /// are equal.
    MDKV_HD void join_nearest(scratch const& memory, index_t h, index_t token, int i, index_t from, int count) const
    {
        for (int j = 0; j < count && seed_slots(h, from + j) >= 0; ++j)
        {
            float const distance = seeds(h, from + j, keys.extent(2)) - memory.attention[j * tile + i];
            bool const own       = seed_slots(h, from + j) == token;
            if (!own && memory.cluster[i] != no_cluster && !(distance < memory.least[i])) { continue; }
            memory.least[i]   = own ? -INFINITY : distance;
            memory.cluster[i] = static_cast<std::int32_t>(from + j);
        }
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
