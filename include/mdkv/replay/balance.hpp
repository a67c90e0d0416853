/// \file balance.hpp: balance: the losses of all layers in one measure, for one budget.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/float_environment.hpp>
#include <mdkv/core/leverage.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/ranks.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>
#include <optional>

namespace MDKV_NAMESPACE
{

namespace detail
{

/// Makes numbers of the sums of leverages. An item is a piece of the tokens.
template <backend B>
struct widen_leverages
{
    static constexpr char const* name = "widen_leverages";
    static constexpr index_t piece    = 1024;

    in_view<leverage_sum, 1, B> sums;
    float* leverages; // [N]

    [[nodiscard]] index_t items() const noexcept { return (sums.extent(0) + piece - 1) / piece; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const end = sums.extent(0) - item * piece < piece ? sums.extent(0) : (item + 1) * piece;
        for (index_t i = item * piece + t.rank(); i < end; i += t.size()) { leverages[i] = leverage_of(sums(i)); }
    }
};

/// The factor that all losses of a token get by its surroundings, the mean leverage over the token and up to `reach` tokens on
/// each side, in units of the mean of all tokens; 1 if all leverages are 0. An item is a piece of the tokens.
template <backend B>
struct weigh_surroundings
{
    static constexpr char const* name = "weigh_surroundings";
    static constexpr index_t piece    = 1024;
    static constexpr index_t reach    = 8;

    in_view<float, 1, B> leverages;
    sum_pieces<B> of_all; // sums of the leverages of `tokens`, these and perhaps others
    index_t tokens;
    double power;
    double largest;  // largest factor
    double* factors; // [N]

    [[nodiscard]] index_t items() const noexcept { return (leverages.extent(0) + piece - 1) / piece; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const n     = leverages.extent(0);
        index_t const begin = item * piece;
        index_t const end   = n - begin < piece ? n : begin + piece;
        double const total  = of_all.total(t, 0);
        // 0 * total makes every factor NaN if a leverage is NaN or infinite.
        double const unit = total == 0 ? 0.0 : static_cast<double>(tokens) / total + 0 * total;
        for (index_t i = begin + t.rank(); i < end; i += t.size())
        {
            index_t const first = i < reach ? 0 : i - reach;
            index_t const last  = n - i <= reach ? n : i + reach + 1;
            double sum          = 0;
            for (index_t j = first; j < last; ++j) { sum += double{leverages(j)}; }
            double const surroundings = total == 0 ? 1.0 : sum / static_cast<double>(last - first) * unit;
            double const factor       = surroundings < 1 ? 1.0 : pow(surroundings, power);
            factors[i]                = factor > largest ? largest : factor; // a NaN stays
        }
    }
};

/// Multiplies every loss by the factors of its layer and token. An item is a row of a layer.
template <backend B>
struct balance_rows
{
    static constexpr char const* name = "balance";

    out_view<float, 4, B> losses;
    sum_pieces<B> of_layers; // sums at rung 0 of all layers and heads, on all ranks
    double const* factors;   // [N], or null
    double depth;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const r    = item % losses.extent(2);
        index_t const h    = item / losses.extent(2) % losses.extent(1);
        index_t const l    = item / losses.extent(2) / losses.extent(1);
        double const total = of_layers.total(t, l);
        double const count = static_cast<double>(of_layers.heads * losses.extent(3));
        double const late  = exp(depth * static_cast<double>(l) / static_cast<double>(losses.extent(0)));
        double const unit  = total == 0 ? 0 : late * count / total;
        float* const row   = losses.row(l, h, r);
        for (index_t i = t.rank(); i < losses.extent(3); i += t.size())
        {
            row[i] = static_cast<float>(double{row[i]} * unit * (factors == nullptr ? 1.0 : factors[i]));
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

    /// Losses of tokens whose surroundings (8 tokens on each side) have more than the mean leverage are multiplied by this power of it, in
    /// all layers alike: questions target unusual passages more often than the prompt's own attention predicts. Other
    /// losses stay, because most rows attend to some of these tokens. Finite, >= 0; 0: none.
    /// The factor is capped at 2^127 / (H * N * e^max(depth, 0)), so that losses stay finite.
    float leverage_power = 0.0F;

    /// [N]  the sums of add_leverage over all layers and heads; read, and needed, if leverage_power is above 0.
    std::optional<in_view<leverage_sum, 1, B>> leverages = std::nullopt;
};

namespace detail
{

/// The body of balance, for heads of which other ranks may have further ones; leverages are sums of all ranks.
template <backend B>
void balance_losses(
    B const& on, head_share const& heads, out_view<float, 4, B> losses, balance_options<B> const& options)
{
    index_t const L      = losses.extent(0);
    index_t const H      = losses.extent(1);
    index_t const N      = losses.extent(3);
    index_t const tokens = options.leverage_power > 0 ? N : 0; // tokens with a factor
    float_environment const standard;
    double const largest =
        0x1p127 / (static_cast<double>(heads.all * N) * std::exp(std::fmax(double{options.depth}, 0.0)));
    workspace::frame frame{*on.scratch, "balance"};
    sum_pieces<B> of_layers{
        {losses.data_handle(), {L, H, N}, {losses.stride(0), losses.stride(1), 1}}, nullptr, heads.all, heads.first};
    of_layers.sums      = frame.template take<double>(of_layers.room());
    auto* const widened = frame.template take<float>(tokens);
    sum_pieces<B> of_leverages{{widened, {1, 1, tokens}, {0, 0, 1}}, nullptr};
    of_leverages.sums = frame.template take<double>(of_leverages.room());
    double* factors   = frame.template take<double>(tokens);
    static_cast<void>(frame.ready());
    sum_over_ranks(on, heads.with, of_layers);
    if (tokens > 0)
    {
        run(on, widen_leverages<B>{*options.leverages, widened});
        run(on, of_leverages);
        run(on, weigh_surroundings<B>{
                    {widened, {tokens}, {1}}, of_leverages, tokens, double{options.leverage_power}, largest, factors});
    }
    else { factors = nullptr; }
    run(on, balance_rows<B>{losses, of_layers, factors, double{options.depth}}, L * H * losses.extent(2));
}

} // namespace detail

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
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads; in double
/// \throws invalid_argument        a shape disagrees, an option is out of its range, leverage_power is above 0 without leverages,
///                                 an output overlaps
/// \throws insufficient_workspace  naming the size needed; nothing was changed in either case
/// \see    tests/unit/replay/balance.cpp; docs/lab/2026-11/quality.md compares weights
template <backend B>
void balance(B const& on, out_view<float, 4, B> losses, balance_options<B> const& options = {})
{
    detail::expects_depth("balance: depth", options.depth);
    detail::expects_not_negative("balance", "leverage_power", options.leverage_power);
    expects(options.leverage_power == 0 || options.leverages, "balance: leverage_power is ", options.leverage_power,
        " without leverages");
    array<index_t, 4> const shape = losses.extents();
    detail::checks{on, "balance"}
        .in("options.leverages", options.leverages, {{shape[3]}}, "N")
        .out("losses", losses, shape, "L,H,R,N");
    if (!losses.empty()) { detail::balance_losses(on, {nullptr, shape[0], shape[1]}, losses, options); }
}

} // namespace MDKV_NAMESPACE
