/// \file stand_in.hpp: stand_in: a few tokens that take the place of all dropped ones of a head (beyond arXiv 2603.20616).
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/columns.hpp>
#include <mdkv/detail/panel.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/detail/sort_slots.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>
#include <optional>

namespace MDKV_NAMESPACE
{

struct stand_in_options
{
    float scale = 0.0F; ///< factor of q.k; 0 means 1/sqrt(D)

    /// See score_options: query i sees the tokens up to first_query + i. Unset: the queries are the last ones of `tokens`.
    std::optional<index_t> first_query = std::nullopt;

    /// For folds: rows from `first_present` on are no tokens but a cache's stand-ins. Null: none are.
    index_t first_present        = 0;
    index_t const* present_seeds = nullptr; ///< [H]  how many of a head's seeds are among them
};

namespace detail
{

inline constexpr std::int32_t no_cluster = -1; ///< cluster of a kept token

/// Chooses the keys around which a head's clusters form: of its n dropped tokens the m = min(M, n) different ones with numbers
/// floor((j + 1/2) n / m). An item is a head.
template <backend B, element T>
struct choose_seeds
{
    static constexpr char const* name = "choose_seeds";

    in_view<T, 3, B> keys;
    in_view<std::int32_t, 2, B> dropped; // [H, N]  positions of dropped tokens
    in_view<index_t, 2, B> first;        // [H, 2]  their number is the second
    stand_in_options options;
    out_view<index_t, 2, B> seed_slots; // [H, M]  -1 beyond the last cluster
    out_view<float, 3, B> seeds; // [H, M, D + 1]  keys, half their squares behind them; zeros beyond the last cluster

    MDKV_HD void operator()(team auto const& t, index_t h) const
    {
        index_t const all    = first(h, 1);
        index_t const most   = seed_slots.extent(1);
        index_t const dim    = keys.extent(2);
        index_t const behind = options.present_seeds == nullptr ? 0 : options.present_seeds[h];
        index_t n            = all; // dropped tokens before the last rows
        while (options.present_seeds != nullptr && n > 0 && dropped(h, n - 1) >= options.first_present) { --n; }
        index_t const m     = n < most - behind ? n : most - behind;
        index_t const later = all - n < behind ? all - n : behind;
        auto const seed     = [&](index_t j, index_t of, index_t begin, index_t count) {
            return index_t{dropped(h, begin + (2 * j + 1) * count / (2 * of))};
        };
        for (index_t g = t.rank(); g < most; g += t.size())
        {
            index_t const at = g < m ? seed(g, m, 0, n) : g < m + later ? seed(g - m, later, n, all - n) : -1;
            float square     = 0;
            for (index_t d = 0; d < dim; ++d)
            {
                float const x  = at < 0 ? 0.0F : widen(load_at<T>(keys.row(h, at) + d));
                seeds(h, g, d) = x;
                square += x * x;
            }
            seeds(h, g, dim) = square / 2;
            seed_slots(h, g) = at;
        }
    }
};

/// The log-sum-exp of row r of head h in base 2, from those of [H*G, Q] queries, of which a head has `rows`.
[[nodiscard]] MDKV_HD float lse_of_row(auto const& lse, index_t h, index_t rows, index_t r)
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
    out_view<std::int32_t, 2, B> clusters; // [H, n]  scratch, of whole strips
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
        for (int i = member(t); i < strip; i += members(t))
        {
            cluster[i] = i < count && rungs(h, first + i) == 0 ? nearest(h, first + i) : no_cluster;
        }
        t.sync();
        for (index_t r = 0; r < rows; ++r)
        {
            float* const x    = attention.row(h, r) + first;
            float const total = lse_of_row(lse, h, rows, r); // over all keys that the row sees
            index_t const end = first_query + r % lse.extent(1) - from - first + 1;
            auto const seen   = static_cast<int>(end < count ? end : count);
            for (int i = member(t) * lanes; i < count; i += members(t) * lanes)
            {
                float power[std::size_t{lanes}];
                for (int l = 0; l < lanes; ++l)
                {
                    bool const attends = i + l < seen && cluster[i + l] != no_cluster;
                    power[l]           = !attends ? -1000.0F : x[i + l] < total ? x[i + l] - total : 0.0F;
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
            for (int l = 0; l < lanes; ++l) { own[l] = cluster[i + l]; }
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
    static constexpr char const* name  = "stand_in";
    static constexpr int threads       = 128;
    static constexpr double most_taken = 3; ///< log2 of the most attention to a stand-in over that to its cluster

    in_view<index_t, 2, B> seed_slots; // from choose_seeds
    in_view<float, 4, B> shares;
    in_view<float, 3, B> queries;                         // [H, G * Q, D]  times the logits' factor in base 2
    in_view<float, 2, B> lse;                             // [H * G, Q]
    out_view<float, 4, B> rows;                           // [H, M, 2, G * Q]  shares, differences that logits lack
    out_view<float, 3, B> stand_in_keys, stand_in_values; // sums, weighted by attention, of clusters' keys and values

    [[nodiscard]] index_t items() const noexcept { return stand_in_keys.extent(0) * stand_in_keys.extent(1); }
    [[nodiscard]] index_t scratch_bytes() const noexcept { return stand_in_keys.extent(2) * index_t{sizeof(double)}; }

    MDKV_HD void operator()(team auto const& t, index_t item) const
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

} // namespace detail

/// Up to M extra tokens per head that approximate the joint attention of the dropped tokens (rung 0), which `attend`
/// otherwise ignores (docs/method.md); `pack` stores them behind the head's window. A head that drops n tokens has min(M, n) of
/// them, because one that stands for none would draw attention from kept tokens.
///
/// \param on            backend: threads, scratch
/// \param[in]  queries  [H*G, Q, D]  the prompt's last ones, after position encoding, of any element type U (`stand_in_queries`)
/// \param[in]  keys     [H, N, D]    the tokens that may be dropped, same encoding
/// \param[in]  values   [H, N, Dv]
/// \param[in]  rungs    [H, N]       from `allocate`: 0 for dropped tokens, if the ratio set can drop
/// \param[in]  lse      [H*G, Q]     see score_options: over all keys that each query sees, keys kept elsewhere included
/// \param[in]  tokens   number of the prompt's tokens, N + W: the N, and the W after them, which are never compressed
/// \param[in]  options  scale, positions of the queries
/// \param[out] stand_in_keys    [H, M, D]   zeros beyond a head's last stand-in
/// \param[out] stand_in_values  [H, M, Dv]
/// \pre    queries, keys, values and lse are finite; an attention above 1, of a log-sum-exp too low, counts as 1
/// \cost   O(H*N*(D*(G*Q + M) + Dv*M)) multiply-adds, keys read three times; scratch O(H*(G*Q*(D + M*N/256) + M*D + N))
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads; logits and clusters' sums in float, others in double
/// \throws invalid_argument        a shape disagrees, an output overlaps, or an option is out of its range
/// \see    tests/unit/replay/stand_in.cpp, docs/method.md, docs/lab/2026-11/quality.md
template <backend B, element T, element U>
void stand_in(B const& on, in_view<U, 3, B> queries, in_view<T, 3, B> keys, in_view<T, 3, B> values,
    in_view<std::uint8_t, 2, B> rungs, in_view<float, 2, B> lse, index_t tokens, stand_in_options const& options,
    out_view<float, 3, B> stand_in_keys, out_view<float, 3, B> stand_in_values)
{
    using namespace detail;
    index_t const heads       = keys.extent(0);
    index_t const past        = keys.extent(1);
    index_t const dim         = keys.extent(2);
    index_t const query_heads = queries.extent(0);
    index_t const per_head    = queries.extent(1);
    index_t const clusters    = stand_in_keys.extent(1);
    expects(heads == 0 || (query_heads % heads == 0 && query_heads >= heads), "stand_in: queries [H*G, Q, D] has ",
        query_heads, " query heads, which ", heads, " KV heads do not divide");
    expects(heads == 0 || (dim >= 1 && values.extent(2) >= 1), "stand_in: head dimensions are ", dim, " and ",
        values.extent(2), "; they must be at least 1");
    expects(heads == 0 || per_head >= 1, "stand_in: queries [H*G, Q, D] has Q = 0");
    expects_not_negative("stand_in", "scale", options.scale);
    expects(tokens >= past, "stand_in: tokens is ", tokens, ", below N = ", past);
    expects(!options.first_query || *options.first_query >= 0, "stand_in: first_query is ",
        options.first_query.value_or(0), "; it must not be negative");
    expects(options.first_query || per_head <= tokens, "stand_in: ", per_head, " queries are more than the ", tokens,
        " tokens; say where they start (first_query)");
    checks{on, "stand_in"}
        .rows("queries", queries, {query_heads, per_head, dim}, "H*G,Q,D")
        .rows("keys", keys, {heads, past, dim}, "H,N,D")
        .rows("values", values, {heads, past, values.extent(2)}, "H,N,Dv")
        .in("rungs", rungs, {heads, past}, "H,N")
        .in("lse", lse, {query_heads, per_head}, "H*G,Q")
        .out("stand_in_keys", stand_in_keys, {heads, clusters, dim}, "H,M,D")
        .out("stand_in_values", stand_in_values, {heads, clusters, values.extent(2)}, "H,M,Dv");
    if (heads == 0 || clusters == 0) { return; }
    index_t const rows = query_heads / heads * per_head;
    using work         = attend_dropped<B>;
    workspace::frame frame{on.scratch};
    auto const widened    = scratch_view<float>(on, frame, query_heads, per_head, dim);
    auto const dropped    = scratch_view<std::int32_t>(on, frame, heads, past);
    auto const first      = scratch_view<index_t>(on, frame, heads, index_t{2});
    auto const seed_slots = scratch_view<index_t>(on, frame, heads, clusters);
    auto const seeds      = scratch_view<float>(on, frame, heads, clusters, dim + 1);
    auto const products   = scratch_view<float>(on, frame, heads, clusters, panel_depth);
    auto const attention  = scratch_view<float>(on, frame, heads, rows + 1, panel_depth);
    auto const cluster    = scratch_view<std::int32_t>(on, frame, heads, panel_depth);
    auto const shares     = scratch_view<float>(on, frame, heads, work::strips(past), clusters, rows + 1);
    auto const lacking    = scratch_view<float>(on, frame, heads, clusters, 2, rows);
    in_view<float, 3, B> const scaled{widened.data_handle(), {heads, rows, dim}, {rows * dim, dim, 1}};
    run(on, copy_rows<B, U, float>{queries, widened, scale_in_base_two(options.scale, dim)});
    run(on, sort_slots<B>{rungs, dropped, first}, heads); // rung 0 alone
    run(on, choose_seeds<B, T>{keys, as_input(dropped), as_input(first), options, seed_slots, seeds}, heads);
    for_pieces(past, panel_depth, [&](index_t at, index_t count) {
        auto const part   = slice<1>(keys, at, count);
        auto const logits = slice<2>(attention, 0, count);
        auto const seed   = slice<2>(products, 0, count);
        multiply<B, T, float>(on, {as_input(slice<2>(seeds, 0, dim))}, {part}, {seed});
        multiply<B, T, float>(on, {scaled}, {part}, {slice<1>(logits, 0, rows)});
        run(on, work{seed, logits, slice<1>(rungs, at, count), as_input(seed_slots), as_input(seeds), lse, at,
                    options.first_query.value_or(tokens - per_head), slice<1>(cluster, 0, count),
                    slice<1>(shares, work::strips(at), work::strips(count))});
        auto const add_up = [&](in_view<T, 3, B> const& of, out_view<float, 3, B> const& to) {
            multiply<B, T, float>(on, {as_input(seed)}, {slice<1>(of, at, count), true}, {.to = to, .add = at > 0});
        };
        add_up(keys, stand_in_keys);
        add_up(values, stand_in_values);
    });
    run(on, place_stand_in<B>{
                as_input(seed_slots), as_input(shares), scaled, lse, lacking, stand_in_keys, stand_in_values});
}

} // namespace MDKV_NAMESPACE
