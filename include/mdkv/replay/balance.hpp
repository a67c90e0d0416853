/// \file balance.hpp: balance and join: losses of several layers, or by several sets of queries, in one measure (beyond arXiv 2603.20616).
#pragma once

#include <mdkv/core/float_environment.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/ranks.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/replay/leverage.hpp>

#include <cmath>
#include <optional>

namespace MDKV_NAMESPACE
{

namespace detail
{

/// Sums of the rows [l, *, *] from their pieces, added to those before. An item is a row l.
template <backend B>
struct add_totals
{
    static constexpr char const* name = "add_totals";

    sum_pieces<B> of;     // [L, H, N]
    double* after;        // [L]
    double const* before; // [L]  or null

    [[nodiscard]] index_t items() const noexcept { return of.rows.extent(0); }

    MDKV_HD void operator()(team auto const& t, index_t l) const
    {
        double const total = of.total(t, l);
        if (t.rank() == 0) { after[l] = (before == nullptr ? 0.0 : before[l]) + total; }
    }
};

/// The sums of rows over heads and tokens, of all ranks. Their memory is taken when it is made.
template <backend B>
struct row_totals
{
    sum_pieces<B> pieces;     ///< without `sums`: of contiguous memory
    double* totals = nullptr; ///< [L]

    /// \param rows   [L, H, N]
    row_totals(workspace::frame& frame, head_share const& heads, in_view<float, 3, B> const& rows)
        : pieces{rows, nullptr, heads.all, heads.first}
    {
        pieces.sums = frame.template take<double>(pieces.room());
        totals      = frame.template take<double>(rows.extent(0));
    }
    void find(B const& on, ranks const* with = nullptr, double const* before = nullptr) const
    {
        sum_over_ranks(on, with, pieces);
        run(on, add_totals<B>{pieces, totals, before});
    }
};

/// The unit of each layer's losses: one over their mean at rung 0, times a weight that grows by e^depth over all layers. 0 if no
/// token would lose anything.
struct layer_units
{
    double const* totals = nullptr; // [L]  sums at rung 0 over heads and tokens; null: the unit is the weight
    double count         = 0;       // number of summands
    double weight        = 1;
    double depth         = 0;
    index_t layers       = 1; // the model's

    [[nodiscard]] MDKV_HD double of(index_t l) const
    {
        double const late = weight * exp(depth * static_cast<double>(l) / static_cast<double>(layers));
        return totals == nullptr ? late : totals[l] == 0 ? 0.0 : late * count / totals[l];
    }
};

/// Losses times the unit of their layer and the factor of their token, and others times their unit beside them. An item is a row of
/// a layer.
template <backend B>
struct weigh_losses
{
    static constexpr char const* name = "weigh_losses";

    in_view<float, 4, B> losses; // [L, H, R, N]
    layer_units units;
    double const* factors;       // [N]           or null
    in_view<float, 4, B> others; // [L, H, R, N]  or empty
    layer_units other_units;
    out_view<float, 4, B> to; // [L, H, R, N]

    [[nodiscard]] index_t items() const noexcept { return to.extent(0) * to.extent(1) * to.extent(2); }

    MDKV_HD void operator()(team auto const& t, index_t item) const
    {
        index_t const r          = item % to.extent(2);
        index_t const h          = item / to.extent(2) % to.extent(1);
        index_t const l          = item / to.extent(2) / to.extent(1);
        bool const both          = !others.empty();
        double const unit        = units.of(l); // leaves float's range if losses are below its normal numbers
        double const other       = both ? other_units.of(l) : 0.0;
        float const* const first = losses.row(l, h, r);
        float const* const more  = both ? others.row(l, h, r) : nullptr;
        float* const row         = to.row(l, h, r);
        for (index_t i = t.rank(); i < to.extent(3); i += t.size())
        {
            double const x = double{first[i]} * unit * (factors == nullptr ? 1.0 : factors[i]);
            row[i]         = static_cast<float>(both ? x + double{more[i]} * other : x);
        }
    }
};

/// Adds up all tokens' leverages. An item is all of them.
template <backend B>
struct total_leverages
{
    static constexpr char const* name = "total_leverages";

    in_view<leverage_sum, 1, B> leverages; // [N]
    double* total;

    MDKV_HD void operator()(team auto const& t, index_t) const
    {
        double sum = 0;
        for (index_t i = t.rank(); i < leverages.extent(0); i += t.size()) { sum += double{leverage_of(leverages(i))}; }
        sum = t.sum(sum);
        if (t.rank() == 0) { *total = sum; }
    }
};

/// The largest factor by a token's surroundings, with which so many losses still add up to a float.
[[nodiscard]] inline double largest_factor(double losses, float depth)
{
    return 0x1p127 / (losses * std::exp(std::fmax(double{depth}, 0.0)));
}

/// The factor that all losses of a token get by its surroundings, the mean leverage over the token and up to `reach` tokens on
/// each side, in units of the mean of all tokens; 1 if all leverages are 0. An item is a piece of the tokens.
template <backend B>
struct weigh_surroundings
{
    static constexpr char const* name = "weigh_surroundings";
    static constexpr index_t piece    = 1024;
    static constexpr index_t reach    = 8;

    in_view<leverage_sum, 1, B> leverages;
    double const* mass; // sum of the leverages of `tokens`, these and perhaps others
    index_t tokens;
    double power;
    double largest;  // largest factor
    double* factors; // [N]

    [[nodiscard]] index_t items() const noexcept { return (leverages.extent(0) + piece - 1) / piece; }

    MDKV_HD void operator()(team auto const& t, index_t item) const
    {
        index_t const n     = leverages.extent(0);
        index_t const begin = item * piece;
        index_t const end   = n - begin < piece ? n : begin + piece;
        double const total  = *mass;
        // 0 * total makes every factor NaN if a leverage is NaN or infinite.
        double const unit = total == 0 ? 0.0 : static_cast<double>(tokens) / total + 0 * total;
        for (index_t i = begin + t.rank(); i < end; i += t.size())
        {
            index_t const first = i < reach ? 0 : i - reach;
            index_t const last  = n - i <= reach ? n : i + reach + 1;
            double sum          = 0;
            for (index_t j = first; j < last; ++j) { sum += double{leverage_of(leverages(j))}; }
            double const surroundings = total == 0 ? 1.0 : sum / static_cast<double>(last - first) * unit;
            double const factor       = surroundings < 1 ? 1.0 : pow(surroundings, power);
            factors[i]                = factor > largest ? largest : factor; // a NaN stays
        }
    }
};

MDKV_OUTLINE constexpr void expects_depth(char const* option, float depth)
{
    expects(depth >= -40 && depth <= 40, option, " is ", depth, "; it must be between -40 and 40");
}

} // namespace detail

template <backend B>
struct balance_options
{
    /// Losses of layer l of L are multiplied by e^(depth * l / L): if it is above 0, late layers count more. Within +-40.
    float depth = 0.0F;

    /// Losses of tokens whose surroundings (8 tokens on each side) have more than the mean leverage are multiplied by this power of
    /// it, in all layers alike: questions target unusual passages more often than the prompt's own attention predicts. Finite,
    /// >= 0; 0: none. The factor is capped at 2^127 / (H * N * e^max(depth, 0)), so that losses stay finite.
    float leverage_power = 0.0F;

    /// [N]  the sums of add_leverage over all layers, heads and ranks; read, and needed, if leverage_power is above 0.
    std::optional<in_view<leverage_sum, 1, B>> leverages = std::nullopt;

    mdkv::ranks const* ranks = nullptr; ///< other ranks that have further heads of each layer, and make the same call
};

/// Makes the losses of different layers comparable, so that one call of allocate over [L*H, R, N] shares one budget among
/// all layers of a model: each layer's losses are divided by their mean at rung 0 over its heads and tokens, and
/// multiplied by the two factors of the options.
///
/// \param on               backend: threads, scratch
/// \param[in,out] losses   [L, H, R, N]  pooled or joined. A layer that loses nothing at rung 0 gets zeros; a loss that is
///                         not finite stays so (allocate reports it), and at rung 0 makes its layer NaN or infinite
/// \param[in]     options  weights of layers and tokens
/// \pre    losses >= 0; a leverage that is not finite makes all losses NaN
/// \cost   reads every loss once, losses at rung 0 twice, and writes each once; O(N); scratch O(L*H*N / 4,096 + N)
/// \sync   returns when done (cpu); enqueued on the stream (gpu), which is waited for over ranks
/// \order  bitwise reproducible for equal inputs, for any number of threads; in double
/// \throws invalid_argument        a shape disagrees, an option is out of its range, leverage_power is above 0 without leverages,
///                                 an output overlaps; nothing was changed
/// \see    tests/unit/replay/balance.cpp; docs/lab/2026-11/quality.md compares weights
template <backend B>
void balance(B const& on, out_view<float, 4, B> losses, balance_options<B> const& options = {})
{
    using namespace detail;
    expects_depth("balance: depth", options.depth);
    expects_not_negative("balance", "leverage_power", options.leverage_power);
    expects(options.leverage_power == 0 || options.leverages, "balance: leverage_power is ", options.leverage_power,
        " without leverages");
    auto const [L, H, R, N] = losses.extents().items;
    checks{on, "balance"}
        .in("options.leverages", options.leverages, {{N}}, "N")
        .out("losses", losses, losses.extents(), "L,H,R,N");
    if (R == 0 || (losses.empty() && options.ranks == nullptr)) { return; }
    head_share const heads{options.ranks, L, H};
    auto const count = static_cast<double>(heads.all * N);
    float_environment const standard;
    workspace::frame frame{on.scratch};
    row_totals<B> const of_layers{
        frame, heads, {losses.data_handle(), {L, H, N}, {losses.stride(0), losses.stride(1), 1}}};
    of_layers.find(on, options.ranks);
    double* factors = nullptr;
    if (options.leverage_power > 0)
    {
        factors             = frame.template take<double>(N);
        double* const total = frame.template take<double>(1);
        run(on, total_leverages<B>{*options.leverages, total}, 1);
        run(on, weigh_surroundings<B>{*options.leverages, total, N, double{options.leverage_power},
                    largest_factor(count, options.depth), factors});
    }
    run(on, weigh_losses<B>{
                as_input(losses), {of_layers.totals, count, 1, double{options.depth}, L}, factors, {}, {}, losses});
}

/// Joins losses by two sets of rows. One set may have many rows of one kind (all of a prompt's queries, replayed), the
/// other few rows (the last ones, which are most like the next), so each set is measured by its own mean:
///
///     joined = first / mean(first) + weight * second / mean(second)
///
/// with the means over all heads and tokens of the losses at rung 0, which drops tokens if any rung does.
///
/// \param on            backend: threads, scratch
/// \param[in]  first    [H, R, N]
/// \param[in]  second   [H, R, N]  losses at the same rungs
/// \param[in]  weight   factor of the second set; >= 0
/// \param[out] joined   [H, R, N]  may be `first` itself. A set whose mean is 0 adds nothing; a NaN at rung 0 makes all NaN
/// \param[in]  others   see balance_options::ranks
/// \cost   reads and writes every loss once; scratch O(H*N / 4,096)
/// \sync   returns when done (cpu); enqueued on the stream (gpu), which is waited for over ranks
/// \order  bitwise reproducible for equal inputs, for any number of threads; in double
/// \throws invalid_argument        a shape disagrees, weight is negative or non-finite, output overlaps more than `first`;
///                                 nothing was changed
/// \see    tests/unit/replay/join.cpp; docs/lab/2026-11/quality.md compares other ways to join
template <backend B>
void join(B const& on, in_view<float, 3, B> first, in_view<float, 3, B> second, float weight,
    out_view<float, 3, B> joined, ranks const* others = nullptr)
{
    using namespace detail;
    expects_not_negative("join", "weight", weight);
    array<index_t, 3> const shape = first.extents();
    checks arguments{on, "join"};
    // In place, `first` is also the output, whose check covers it.
    if (joined.data_handle() != first.data_handle() || joined.strides() != first.strides())
    {
        arguments.in("first", first, shape, "H,R,N");
    }
    arguments.in("second", second, shape, "H,R,N").out("joined", joined, shape, "H,R,N");
    if (shape[1] == 0) { return; }
    head_share const heads{others, 1, shape[0]};
    workspace::frame frame{on.scratch};
    auto const unit_of = [&](in_view<float, 3, B> const& x, float factor) {
        row_totals<B> const sums{frame, heads, {x.data_handle(), {1, shape[0], shape[2]}, {0, x.stride(0), 1}}};
        sums.find(on, others);
        return layer_units{sums.totals, static_cast<double>(heads.all * shape[2]), double{factor}};
    };
    auto const rows = []<class V>(view<V, 3, B::memory_space> const& x) { // with a dimension of layers
        return view<V, 4, B::memory_space>{
            x.data_handle(), {1, x.extent(0), x.extent(1), x.extent(2)}, {0, x.stride(0), x.stride(1), 1}};
    };
    layer_units const unit  = unit_of(first, 1);
    layer_units const other = unit_of(second, weight);
    run(on, weigh_losses<B>{rows(first), unit, nullptr, rows(second), other, rows(joined)});
}

} // namespace MDKV_NAMESPACE
