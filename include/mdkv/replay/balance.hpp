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
#include <cstdint>
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

/// The factor that all losses of a token get. An item is a piece of the tokens.
template <backend B>
struct weigh_surroundings
{
    static constexpr char const* name = "weigh_surroundings";
    static constexpr index_t piece    = 1024;

    in_view<float, 1, B> leverages;
    sum_pieces<B> of_all; // sums of the leverages of `tokens`, these and perhaps others
    index_t tokens;
    index_t reach;
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
    index_t first_layer;     // number of this rank's first layer
    double const* factors;   // [N], or null
    double depth;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const r     = item % losses.extent(2);
        index_t const h     = item / losses.extent(2) % losses.extent(1);
        index_t const l     = item / losses.extent(2) / losses.extent(1);
        index_t const layer = first_layer + l;
        auto const& all     = of_layers.rows;
        double const total  = of_layers.total(t, layer);
        double const count  = static_cast<double>(all.extent(1) * all.extent(2));
        double const late   = exp(depth * static_cast<double>(layer) / static_cast<double>(all.extent(0)));
        double const unit   = total == 0 ? 0 : late * count / total;
        float* const row    = losses.row(l, h, r);
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

    /// Losses of tokens whose surroundings (`reach`) have more than the mean leverage are multiplied by this power of it, in
    /// all layers alike: questions target unusual passages more often than the prompt's own attention predicts. Other
    /// losses stay, because most rows attend to some of these tokens. Finite, >= 0; 0: none.
    /// The factor is capped at 2^127 / (H * N * e^max(depth, 0)), so that losses stay finite.
    float leverage_power = 0.0F;

    /// [N]  the sums of add_leverage over all layers, on each rank over the heads of its own; read, and needed, if leverage_power is above 0.
    std::optional<in_view<leverage_sum, 1, B>> leverages = std::nullopt;

    /// The surroundings of a token are the mean leverage over the token and up to `reach` tokens on each side, in units of
    /// the mean of all tokens; 1 if all leverages are 0.
    index_t reach = 8;
};

/// Makes the losses of different layers comparable, so that one call of allocate over [L*H, R, N] shares one budget among
/// all layers of a model: each layer's losses are divided by their mean at rung 0 over its heads and tokens, and
/// multiplied by the two factors of the options. Over ranks (`mdkv::ranks`) layers and heads are this rank's, means those of
/// all ranks' heads, and L that of all layers.
///
/// \param on               backend: threads, scratch, ranks
/// \param[in,out] losses   [L, H, R, N]  pooled or joined. A layer that loses nothing at rung 0 gets zeros; a loss that is
///                         not finite stays so (allocate reports it), and at rung 0 makes its layer NaN or infinite
/// \param[in]     options  weights of layers and tokens
/// \pre    losses >= 0; a leverage that is not finite makes all losses NaN
/// \cost   reads every loss once, losses at rung 0 twice, and writes each once; O(N * reach); scratch O(L*H*N / 4,096 + N). Over
///         ranks two exchanges of 8 bytes for 4,096 tokens of each head, and if leverage_power is above 0 one of 8 bytes a token
/// \sync   returns when done (cpu); enqueued on the stream (gpu); over ranks a GPU is waited for
/// \order  bitwise reproducible for equal inputs, for any number of threads; in double
/// \throws invalid_argument        a shape disagrees, an option is out of its range, leverage_power is above 0 without leverages,
///                                 an output overlaps; over ranks as allocate's, on every rank; nothing was changed
/// \see    tests/unit/replay/balance.cpp; docs/lab/2026-11/quality.md compares weights
template <backend B>
void balance(B const& on, out_view<float, 4, B> losses, balance_options<B> const& options = {})
{
    detail::agreement agreed{on};
    auto const* const ranks = detail::ranks_of(on);
    detail::expects_depth("balance: depth", options.depth);
    detail::expects_not_negative("balance", "leverage_power", options.leverage_power);
    expects(options.leverage_power == 0 || options.leverages, "balance: leverage_power is ", options.leverage_power,
        " without leverages");
    expects(options.reach >= 0, "balance: reach is ", options.reach, "; it must not be negative");
    array<index_t, 4> const shape = losses.extents();
    detail::checks arguments{on, "balance"};
    arguments.in("options.leverages", options.leverages, {{shape[3]}}, "N").out("losses", losses, shape, "L,H,R,N");
    if (losses.empty() && ranks == nullptr) { return; }
    auto const numbers  = detail::number_heads(on, "balance", shape[0] * shape[1], shape[0] > 0 ? shape[0] : 1);
    index_t const heads = numbers.shard.heads; // heads of a layer on all ranks
    float_environment const standard;
    double const largest =
        0x1p127 / (static_cast<double>(heads * shape[3]) * std::exp(std::fmax(double{options.depth}, 0.0)));
    index_t const tokens = options.leverage_power > 0 ? shape[3] : 0; // tokens with a factor
    auto leverages       = options.leverages.value_or(in_view<leverage_sum, 1, B>{});
    detail::sum_pieces<B> of_layers{
        {losses.data_handle(), {shape[0], shape[1], shape[3]}, {losses.stride(0), losses.stride(1), 1}}, nullptr};
    detail::sum_pieces<B> of_all{
        {losses.data_handle(), {numbers.shard.layers, heads, shape[3]}, {0, 0, 1}}, nullptr}; // sums alone
    workspace::frame frame{*on.scratch};
    of_layers.sums      = frame.template take<double>(of_layers.items());
    of_all.sums         = ranks == nullptr ? of_layers.sums : frame.template take<double>(of_all.items() + 2);
    auto* const summed  = frame.template take<leverage_sum>(ranks == nullptr ? 0 : tokens);
    auto* const widened = frame.template take<float>(tokens);
    detail::sum_pieces<B> of_leverages{{widened, {1, 1, tokens}, {0, 0, 1}}, nullptr};
    of_leverages.sums   = frame.template take<double>(of_leverages.items());
    double* factors     = frame.template take<double>(tokens);
    agreed.settle("balance",
        array<detail::shared_number, 4>{{{"losses: number N of tokens", shape[3]}, {"options.depth", options.depth},
            {"options.leverage_power", options.leverage_power}, {"options.reach", options.reach}}});
    run(on, of_layers);
    if (ranks != nullptr)
    {
        auto* const words = reinterpret_cast<std::int64_t*>(of_all.sums);
        detail::expects_every_head(on, "balance", numbers, words);
        detail::scatter_sums(on, numbers, of_layers, of_all.sums);
        detail::sum_over_ranks(on, words, of_all.items());
    }
    if (tokens > 0)
    {
        if (ranks != nullptr)
        {
            in_view<leverage_sum, 3, B> const own{leverages.data_handle(), {1, 1, tokens}, {tokens, tokens, 1}};
            run(on, detail::copy_rows<B, leverage_sum>{own, {summed, {1, 1, tokens}, {tokens, tokens, 1}}});
            detail::sum_over_ranks(on, summed, tokens);
            leverages = {summed, {tokens}, {1}};
        }
        run(on, detail::widen_leverages<B>{leverages, widened});
        run(on, of_leverages);
        run(on, detail::weigh_surroundings<B>{{widened, {tokens}, {1}}, of_leverages, tokens, options.reach,
                    double{options.leverage_power}, largest, factors});
    }
    else { factors = nullptr; }
    run(on, detail::balance_rows<B>{losses, of_all, numbers.shard.first_layer, factors, double{options.depth}},
        shape[0] * shape[1] * shape[2]);
}

} // namespace MDKV_NAMESPACE
