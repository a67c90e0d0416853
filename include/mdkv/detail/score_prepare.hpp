/// \file score_prepare.hpp: the small jobs around score's sweeps: queries in panels, transposed bases, the join of log-sum-exps (arXiv 2603.20616, section 4.2).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/quantiser.hpp>
#include <mdkv/detail/score_plan.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>
#include <cstring>

namespace mdkv::detail
{

/// Starting maximum of a softmax: lower than any logit, and finite so that differences are numbers.
inline constexpr float lowest_logit = -1e30F;

/// Queries, scaled, as columns of panels. An item is a row of a head.
template <backend B, element T>
struct score_queries
{
    static constexpr char const* name = "score_queries";
    static constexpr int threads      = 128;

    in_view<T, 3, B> queries;
    score_plan plan;
    score_operands operands;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const head = item / plan.rows;
        index_t const row  = item % plan.rows;
        bool const padding = row >= plan.query_rows;
        index_t const from = padding ? 0
                                     : queries.offset(head * (plan.query_rows / plan.per_head) + row / plan.per_head,
                                         row % plan.per_head, index_t{0});
        float* const to    = operands.of(head).queries + row / plan.panel * plan.panel * plan.dim + row % plan.panel;
        for (index_t d = t.rank(); d < plan.dim; d += t.size())
        {
            T value{}; // from any address
            if (!padding) { std::memcpy(&value, queries.data_handle() + from + d, sizeof value); }
            to[d * plan.panel] = widen(value) * plan.to_log2;
        }
    }
};

/// Leading directions of every head's basis, as rows or as columns, zero-padded.
template <backend B>
struct score_basis_copy
{
    in_view<float, 3, B> from;
    index_t to     = 0; ///< in a head's operands
    int directions = 0;
    int width      = 0; ///< of a row of the copy
    bool columns   = true;

    [[nodiscard]] MDKV_HD index_t rows() const noexcept
    {
        return directions == 0 ? 0 : columns ? from.extent(2) : index_t{directions};
    }
};

/// An item is a row of one copy of a head.
template <backend B>
struct score_bases
{
    static constexpr char const* name = "score_bases";
    static constexpr int threads      = 128;

    score_basis_copy<B> copies[3];
    score_operands operands;

    [[nodiscard]] MDKV_HD index_t per_head() const noexcept
    {
        return copies[0].rows() + copies[1].rows() + copies[2].rows();
    }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const head            = item / per_head();
        index_t row                   = item % per_head();
        score_basis_copy<B> const* at = copies;
        for (; row >= at->rows(); ++at) { row -= at->rows(); }
        float* const to = operands.memory + head * operands.per_head + at->to + row * at->width;
        for (index_t i = t.rank(); i < at->width; i += t.size())
        {
            index_t const direction = at->columns ? i : row;
            index_t const d         = at->columns ? row : i;
            bool const inside       = direction < at->directions && d < at->from.extent(2);
            to[i]                   = inside ? at->from(head, direction, d) : 0.0F;
        }
    }
};

/// Joins the states of a head's parts into log-sum-exps, a query's weight in them: P times w is
/// 2^(logit - (lse - log2 w)). An item is 256 rows of one head's softmaxes.
template <backend B>
struct score_join
{
    static constexpr char const* name = "score_join";
    static constexpr index_t per_item = 256;

    in_view<float, 2, B> lse;     // [H*G, Q]  natural logarithm, if given
    in_view<float, 1, B> weights; // [Q]       if given
    score_plan plan;
    score_operands operands;
    score_states states;
    bool lse_given;
    bool weighted;

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
            operands.of(head).lse[i] = joined(head, static_cast<int>(i / plan.rows), static_cast<int>(i % plan.rows));
        }
    }

private:
    [[nodiscard]] MDKV_HD float joined(index_t head, int softmax, int row) const
    {
        if (row >= plan.query_rows) { return -lowest_logit; } // weighs nothing
        int const query    = row % plan.per_head;
        float const weight = weighted ? log2f(weights(query)) : 0.0F;
        if (softmax == 0 && lse_given)
        {
            float const given = lse(head * (plan.query_rows / plan.per_head) + row / plan.per_head, query);
            // An infinite one would make all probabilities 0, and every token free to drop.
            return given > lowest_logit && given < -lowest_logit ? given * log2_e - weight : not_a_number;
        }
        float largest = lowest_logit;
        for (index_t part = 0; part < states.parts; ++part)
        {
            float const here = states.at(head, part, softmax).largest[row];
            largest          = here > largest ? here : largest;
        }
        float total = 0;
        for (index_t part = 0; part < states.parts; ++part)
        {
            score_state const s = states.at(head, part, softmax);
            total += s.sum[row] * exp2f(s.largest[row] - largest);
        }
        return largest + log2f(total) - weight;
    }
};

} // namespace mdkv::detail
