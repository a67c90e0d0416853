/// \file score_prepare.hpp: the small jobs around score's sweeps: queries in panels, transposed bases, the join of log-sum-exps, the mean of values by attention (arXiv 2603.20616, section 4.2).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/channels.hpp>
#include <mdkv/detail/columns.hpp>
#include <mdkv/detail/quantiser.hpp>
#include <mdkv/detail/score_plan.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>

namespace MDKV_NAMESPACE::detail
{

/// Starting maximum of a softmax: lower than any logit, and finite so that differences are numbers.
inline constexpr float lowest_logit = -1e30F;

/// Queries, scaled, as columns of panels. An item is a panel of a head.
template <backend B, element U>
struct score_queries
{
    static constexpr char const* name = "score_queries";
    static constexpr int threads      = 128;

    in_view<U, 3, B> queries;
    score_plan plan;

    [[nodiscard]] MDKV_HD index_t panels() const noexcept { return plan.rows / plan.panel; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const head  = item / panels();
        index_t const first = item % panels() * plan.panel;
        index_t const dim   = plan.dim;
        index_t const panel = plan.panel;
        float* const to     = plan.head(head).queries + first * dim;
        auto const share    = share_rows(t, dim);
        for (index_t r = share.row; r < panel; r += share.rows)
        {
            index_t const row   = first + r;
            bool const padding  = row >= plan.query_rows;
            index_t const of    = head * (plan.query_rows / plan.per_head) + row / plan.per_head;
            U const* const from = padding ? nullptr : queries.row(of, row % plan.per_head);
            constexpr int lanes = Team::lanes;
            for (index_t d = share.column * lanes; d < dim; d += t.size() * lanes)
            {
                index_t const n = dim - d < lanes ? dim - d : lanes;
                float x[std::size_t{lanes}]{};
                if (!padding) { widen_some(t, from + d, n, x); }
                for (index_t l = 0; l < n; ++l) { to[(d + l) * panel + r] = x[l] * plan.to_log2; }
            }
        }
    }
};

/// Leading directions of every head's key basis as columns, zero-padded. An item is a row of one transposed basis.
template <backend B>
struct score_bases
{
    static constexpr char const* name = "score_bases";
    static constexpr int threads      = 128;

    in_view<float, 3, B> key_basis;
    score_plan plan;

    [[nodiscard]] MDKV_HD index_t per_head() const noexcept { return plan.latent > 0 ? plan.dim : 0; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const d     = item % per_head();
        index_t const width = plan.key_columns();
        float* const to     = plan.head(item / per_head()).key_basis + d * width;
        for (index_t i = t.rank(); i < width; i += t.size())
        {
            to[i] = i < plan.latent ? key_basis(item / per_head(), i, d) : 0.0F;
        }
    }
};

/// The channels of a head's keys for the noise of codes, given or fitted here: means, 1 / scales, and for every group the
/// variance of a logit for codes with a step of 1, averaged over the queries; and the means of its values. An item is a head.
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

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        out_view<float, 2, B> const means{
            plan.head(0).means, {keys.extent(0), plan.value_dim}, {plan.head_floats(), 1}};
        fit_value_means<T, B>{values, means}.fit(t, h, values.extent(1), [](index_t i) { return i; });
        index_t const dim = plan.dim;
        float* const mean = plan.head(h).channels; // [3, dim]
        if (given.empty())
        {
            out_view<float, 3, B> const own{
                plan.head(0).channels, {keys.extent(0), 3, dim}, {plan.head_floats(), dim, 1}};
            fit_key_channels<T, U, B>{queries, keys, own}(t, h);
        }
        for (index_t i = t.rank(); i < 3 * dim && !given.empty(); i += t.size())
        {
            mean[i] = given(h, i / dim, i % dim);
        }
        t.sync();
        float* const scale = mean + dim;
        float* const query = scale + dim;
        for (index_t d = t.rank(); d < dim; d += t.size())
        {
            query[d] = query[d] * scale[d] * query[d] * scale[d];
            scale[d] = 1.0F / scale[d];
        }
        t.sync();
        float const natural = plan.to_log2 / log2_e; // the factor of q.k
        for (index_t g = t.rank(); g < plan.groups(); g += t.size())
        {
            index_t const begin = g * quantised_group;
            index_t const end   = begin + quantised_group < dim ? begin + quantised_group : dim;
            float sum           = 0;
            for (index_t d = begin; d < end; ++d) { sum += query[d]; }
            query[dim + g] = sum * natural * natural / 12.0F;
        }
    }
};

/// For every rung of codes in the basis and every group of its coordinates the variance of a logit for codes with a step of
/// 1, averaged over the queries. An item is a head.
struct score_noise
{
    static constexpr char const* name = "score_noise";
    static constexpr int threads      = 128;

    score_plan plan;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        score_head const head = plan.head(h);
        index_t const size    = quantised_group;
        float const rows      = static_cast<float>(plan.query_rows) * log2_e * log2_e;
        for (index_t i = t.rank(); i < plan.noise_floats(); i += t.size())
        {
            score_rung const& u = plan.rungs[i / plan.groups()];
            index_t const begin = i % plan.groups() * size;
            index_t const end   = begin + size < u.keys ? begin + size : u.keys;
            float sum           = 0;
            for (index_t p = 0; u.projected && p * plan.panel < plan.rows; ++p)
            {
                float const* const panel = head.latents + p * plan.panel * plan.key_columns();
                for (index_t j = begin * plan.panel; j < end * plan.panel; ++j) { sum += panel[j] * panel[j]; }
            }
            head.noise[i] = sum / (12.0F * rows);
        }
    }
};

/// Finds all that the sweeps need. multiply() writes the queries' coordinates in the bases, once both are there.
template <backend B, element T, element U, class Multiply>
void prepare_score(B const& on, score_plan const& plan, in_view<U, 3, B> queries, in_view<T, 3, B> keys,
    in_view<T, 3, B> values, in_view<float, 3, B> key_basis, score_options<B> const& options, Multiply const& multiply)
{
    index_t const heads = keys.extent(0);
    score_queries<B, U> const panels{queries, plan};
    run(on, panels, heads * panels.panels());
    score_bases<B> const bases{key_basis, plan};
    run(on, bases, heads * bases.per_head());
    multiply();
    run(on, score_channels<T, U, B>{options.channels.value_or(in_view<float, 3, B>{}), queries, keys, values, plan},
        plan.rotates ? heads : 0);
    run(on, score_noise{plan}, plan.codes ? heads : 0);
}

/// Sums of values by ||P||, and of ||P||. Values that are not finite count as 0. An item is a piece of a head's tokens.
template <element T, backend B>
struct score_value_sums
{
    static constexpr char const* name = "score_value_sums";
    static constexpr int threads      = 128;

    in_view<T, 3, B> values;
    score_plan plan;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        constexpr int lanes     = Team::register_lanes;
        using floats            = lane_floats<lanes>;
        index_t const h         = item / plan.value_pieces();
        index_t const piece     = item % plan.value_pieces();
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
                float const one = mass_of(plan, rows[i]);
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

/// Finds every head's mean of values by ||P||, which is near the rows' outputs. An item is a head.
struct score_centre
{
    static constexpr char const* name = "score_centre";
    static constexpr int threads      = 128;

    score_plan plan;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        for (int d = member(t); d < plan.value_dim; d += members(t))
        {
            float sum  = 0;
            float mass = 0;
            for (index_t piece = 0; piece < plan.value_pieces(); ++piece)
            {
                float const* const of_piece = plan.value_sums(h, piece);
                sum += of_piece[d];
                mass += of_piece[plan.value_dim];
            }
            plan.head(h).centre[d] = mass > 0.0F ? sum / mass : 0.0F;
        }
    }
};

/// Joins the states of a head's splits into log-sum-exps that include the query's weight w: P times w is
/// 2^(logit - (lse - log2 w)). An item is 256 rows of one head's softmaxes.
template <backend B>
struct score_join
{
    static constexpr char const* name = "score_join";
    static constexpr index_t per_item = 256;

    in_view<float, 2, B> lse;       // [H*G, Q]  natural logarithm, or empty
    in_view<float, 2, B> elsewhere; // [H*G, Q]  or empty
    in_view<float, 1, B> weights;   // [Q]       or empty
    score_plan plan;
    score_states states;

    [[nodiscard]] MDKV_HD index_t per_head() const noexcept
    {
        return (index_t{plan.softmaxes} * plan.rows + per_item - 1) / per_item;
    }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const head  = item / per_head();
        index_t const begin = item % per_head() * per_item;
        for (index_t i = begin + t.rank(); i < begin + per_item && i < index_t{plan.softmaxes} * plan.rows;
             i += t.size())
        {
            plan.head(head).lse[i] = joined(head, static_cast<int>(i / plan.rows), static_cast<int>(i % plan.rows));
        }
    }

    static void run_for(
        B const& on, score_options<B> const& options, score_plan const& plan, score_states const& states, index_t heads)
    {
        score_join const job{options.lse.value_or(in_view<float, 2, B>{}),
            options.lse_elsewhere.value_or(in_view<float, 2, B>{}),
            options.query_weights.value_or(in_view<float, 1, B>{}), plan, states};
        run(on, job, heads * job.per_head());
    }

private:
    [[nodiscard]] MDKV_HD float joined(index_t head, int softmax, int row) const
    {
        if (row >= plan.query_rows) { return -lowest_logit; } // a row that pads weighs nothing
        index_t const of   = head * (plan.query_rows / plan.per_head) + row / plan.per_head;
        int const query    = row % plan.per_head;
        float const weight = weights.empty() ? 0.0F : log2f(weights(query));
        if (softmax == 0 && !lse.empty())
        {
            float const given = lse(of, query);
            // An infinite log-sum-exp would make all probabilities 0, and every token free to drop.
            return given > lowest_logit && given < -lowest_logit ? given * log2_e - weight : not_a_number;
        }
        float outside = elsewhere.empty() ? lowest_logit : elsewhere(of, query);
        if (!(outside < -lowest_logit)) { return not_a_number; }
        outside       = outside > lowest_logit ? outside * log2_e : lowest_logit;
        float largest = outside;
        for (index_t split = 0; split < states.splits; ++split)
        {
            float const here = states.largest(head, split, softmax)[row];
            largest          = here > largest ? here : largest;
        }
        float total = elsewhere.empty() ? 0.0F : exp2f(outside - largest);
        for (index_t split = 0; split < states.splits; ++split)
        {
            float const here = states.largest(head, split, softmax)[row];
            total += states.sum(head, split, softmax)[row] * exp2f(here - largest);
        }
        return largest + log2f(total) - weight;
    }
};

} // namespace MDKV_NAMESPACE::detail
