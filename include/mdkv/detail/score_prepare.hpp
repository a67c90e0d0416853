/// \file score_prepare.hpp: the small jobs around score's sweeps: queries in panels, a transposed basis, the join of log-sum-exps, the mean of values by attention (arXiv 2603.20616, section 4.2).
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/detail/channels.hpp>
#include <mdkv/detail/columns.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/quantiser.hpp>
#include <mdkv/detail/score_plan.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>

namespace MDKV_NAMESPACE::detail
{

/// Starting maximum of a softmax: lower than any logit, and finite so that differences are numbers.
inline constexpr float lowest_logit = -1e30F;

/// Queries, scaled, as columns of a panel, and the products of the basis' leading directions with them; of the transposed
/// directions a panel writes its share. An item is a panel of a head.
template <backend B, element U>
struct score_queries
{
    static constexpr char const* name = "score_queries";
    static constexpr int threads      = 128;

    in_view<U, 3, B> queries;
    in_view<float, 3, B> key_basis;
    score_plan plan;

    [[nodiscard]] MDKV_HD index_t panels() const noexcept { return plan.rows / plan.panel; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const h       = item / panels();
        index_t const panel   = item % panels();
        index_t const width   = plan.panel;
        index_t const dim     = plan.dim;
        score_head const head = plan.head(h);
        float* const to       = head.queries + panel * dim * width;
        auto const share      = share_rows(t, dim);
        for (index_t r = share.row; r < width; r += share.rows)
        {
            index_t const row   = panel * width + r;
            bool const padding  = row >= plan.query_rows;
            index_t const of    = h * (plan.query_rows / plan.per_head) + row / plan.per_head;
            U const* const from = padding ? nullptr : queries.row(of, row % plan.per_head);
            constexpr int lanes = Team::lanes;
            for (index_t d = share.column * lanes; d < dim; d += t.size() * lanes)
            {
                index_t const n = dim - d < lanes ? dim - d : lanes;
                float x[std::size_t{lanes}]{};
                if (!padding) { widen_some(t, from + d, n, x); }
                for (index_t l = 0; l < n; ++l) { to[(d + l) * width + r] = x[l] * plan.to_log2; }
            }
        }
        t.sync();
        constexpr int lanes   = Team::register_lanes;
        constexpr int all     = 4; // sums that grow side by side
        using floats          = lane_floats<lanes>;
        index_t const vectors = width / lanes;
        for (index_t i = t.rank(); i / vectors * all < plan.latent; i += t.size())
        {
            index_t const c = i / vectors * all;
            index_t const r = i % vectors * lanes;
            float const* directions[all]{};
            for (int k = 0; k < all; ++k) { directions[k] = key_basis.row(h, c + k < plan.latent ? c + k : c); }
            floats sums[all]{};
            for (index_t d = 0; d < dim; ++d)
            {
                MDKV_UNROLL
                for (int k = 0; k < all; ++k) { sums[k] += directions[k][d] * load_lanes<floats>(to + d * width + r); }
            }
            for (int k = 0; k < all && c + k < plan.latent; ++k)
            {
                store_lanes(head.latents + (panel * plan.latent + c + k) * width + r, sums[k]);
            }
        }
        index_t const columns = plan.key_columns();
        for (index_t d = panel; d < dim; d += panels())
        {
            for (index_t i = t.rank(); i < columns; i += t.size())
            {
                head.key_basis[d * columns + i] = i < plan.latent ? key_basis(h, i, d) : 0.0F;
            }
        }
    }
};

/// For every rung of codes and group of a key's coordinates the weight of a squared range: the variance of a logit for codes with a
/// step of 1, averaged over the queries. For rotated codes, also the channels of a head's keys, given or fitted here, and the
/// means of its values. An item is a head.
template <element T, element U, backend B>
struct score_channels
{
    static constexpr char const* name = "score_channels";
    static constexpr int threads      = 128;

    in_view<float, 3, B> given; // [H, 3, D]  or empty
    in_view<U, 3, B> queries;
    in_view<T, 3, B> keys;
    in_view<T, 3, B> values;
    score_plan plan;

    MDKV_HD void operator()(team auto const& t, index_t h) const
    {
        score_head const head = plan.head(h);
        index_t const groups  = plan.groups();
        float const natural   = plan.to_log2 / log2_e; // the factor of q.k
        float const rows      = static_cast<float>(plan.query_rows) * log2_e * log2_e;
        if (plan.rotates) { fit(t, h); }
        for (index_t i = t.rank(); i < plan.count * groups; i += t.size())
        {
            score_rung const& u = plan.rungs[i / groups];
            index_t const begin = i % groups * quantised_group;
            index_t const end   = begin + quantised_group < u.keys ? begin + quantised_group : u.keys;
            float sum           = 0;
            for (index_t d = begin; u.rotated() && d < end; ++d)
            {
                sum += head.channels[channel_queries * plan.dim + d];
            }
            for (index_t p = 0; u.projected && u.quantised() && p * plan.panel < plan.rows; ++p)
            {
                float const* const panel = head.latents + p * plan.panel * plan.latent;
                for (index_t j = begin * plan.panel; j < end * plan.panel; ++j) { sum += panel[j] * panel[j]; }
            }
            head.weights[i] = u.projected ? sum / (12.0F * rows) : sum * natural * natural / 12.0F;
        }
    }

private:
    MDKV_HD void fit(team auto const& t, index_t h) const
    {
        score_head const first = plan.head(0);
        index_t const heads    = keys.extent(0);
        index_t const step     = plan.head_bytes / index_t{sizeof(float)};
        out_view<float, 2, B> const means{first.means, {heads, plan.value_dim}, {step, 1}};
        out_view<float, 3, B> const own{first.channels, {heads, 3, plan.dim}, {step, plan.dim, 1}};
        fit_value_means<T, B>{values, means}.fit(t, h, values.extent(1), [](index_t i) { return i; });
        if (given.empty()) { fit_key_channels<T, U, B>{queries, keys, own}(t, h); }
        t.sync();
        for (index_t d = t.rank(); d < plan.dim; d += t.size())
        {
            auto const at              = [&](index_t row) { return given.empty() ? own(h, row, d) : given(h, row, d); };
            float const scale          = at(channel_scales);
            float const query          = at(channel_queries);
            own(h, channel_means, d)   = at(channel_means);
            own(h, channel_scales, d)  = 1.0F / scale;
            own(h, channel_queries, d) = query * scale * query * scale;
        }
        t.sync();
    }
};

/// Every head's mean of values by ||P||, which is near the rows' outputs. First sums of values by ||P||, and of ||P||, of pieces of
/// a head's tokens, an item each; then, if `join`, the means, of which a head is an item. Values that are not finite count as 0.
template <element T, backend B>
struct score_centre
{
    static constexpr char const* name = "score_centre";
    static constexpr int threads      = 128;

    in_view<T, 3, B> values;
    score_plan plan;
    bool join;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        for (int d = member(t); join && d < plan.value_dim; d += members(t))
        {
            float sum  = 0;
            float mass = 0;
            for (index_t piece = 0; piece < plan.value_pieces(); ++piece)
            {
                float const* const of_piece = plan.value_sums(item, piece);
                sum += of_piece[d];
                mass += of_piece[plan.value_dim];
            }
            plan.head(item).centre[d] = mass > 0.0F ? sum / mass : 0.0F;
        }
        if (join) { return; }
        index_t const h         = item / plan.value_pieces();
        index_t const piece     = item % plan.value_pieces();
        constexpr int lanes     = Team::register_lanes;
        using floats            = lane_floats<lanes>;
        index_t const begin     = piece * plan.value_piece;
        index_t const end       = begin + plan.value_piece < plan.past ? begin + plan.value_piece : plan.past;
        float const* const rows = plan.total(h, 0);
        float* const to         = plan.value_sums(h, piece);
        for (index_t d = member(t) * lanes; d < plan.value_dim; d += members(t) * lanes)
        {
            auto const n = static_cast<int>(plan.value_dim - d < lanes ? plan.value_dim - d : lanes);
            floats sum{};
            float mass = 0;
            for (index_t i = begin; i < end; ++i)
            {
                float const one = plan.mass_of(rows[i]);
                sum += finite_lanes(t, values.row(h, i) + d, n) * one;
                mass += one;
            }
            float line[std::size_t{lanes}];
            store_lanes(line, sum);
            for (int l = 0; l < n; ++l) { to[d + l] = line[l]; }
            if (d == 0) { to[plan.value_dim] = mass; }
        }
    }
};

/// Joins the states of a head's splits into log-sum-exps that include the query's weight w: P times w is
/// 2^(logit - (lse - log2 w)). An item is a softmax of a head.
template <backend B>
struct score_join
{
    static constexpr char const* name = "score_join";

    in_view<float, 2, B> lse;       // [H*G, Q]  natural logarithm, or empty
    in_view<float, 2, B> elsewhere; // [H*G, Q]  or empty
    float early_weight;             // weight before the last `question` queries
    index_t question;
    score_plan plan;

    MDKV_HD void operator()(team auto const& t, index_t item) const
    {
        index_t const head = item / plan.softmaxes;
        auto const softmax = static_cast<int>(item % plan.softmaxes);
        float* const to    = plan.head(head).lse + softmax * plan.rows;
        for (int row = member(t); row < plan.rows; row += members(t)) { to[row] = joined(head, softmax, row); }
    }

private:
    [[nodiscard]] MDKV_HD float joined(index_t head, int softmax, int row) const
    {
        if (row >= plan.query_rows) { return -lowest_logit; } // a row that pads weighs nothing
        index_t const of   = head * (plan.query_rows / plan.per_head) + row / plan.per_head;
        int const query    = row % plan.per_head;
        float const weight = query < plan.per_head - question ? log2f(early_weight) : 0.0F;
        if (softmax == 0 && !lse.empty())
        {
            float const given = lse(of, query);
            // An infinite log-sum-exp would make all probabilities 0, and every token free to drop.
            return given > lowest_logit && given < -lowest_logit ? given * log2_e - weight : not_a_number;
        }
        float outside = elsewhere.empty() ? lowest_logit : of_query(elsewhere, of, query);
        if (!(outside < -lowest_logit)) { return not_a_number; }
        outside       = outside > lowest_logit ? outside * log2_e : lowest_logit;
        float largest = outside;
        for (index_t split = 0; split < plan.splits; ++split)
        {
            float const here = plan.state(head, split, softmax)[row];
            largest          = here > largest ? here : largest;
        }
        float total = elsewhere.empty() ? 0.0F : exp2f(outside - largest);
        for (index_t split = 0; split < plan.splits; ++split)
        {
            float const* const here = plan.state(head, split, softmax) + row;
            total += here[plan.rows] * exp2f(*here - largest);
        }
        return largest + log2f(total) - weight;
    }
};

} // namespace MDKV_NAMESPACE::detail
