/// \file balance.hpp: the jobs of balance: factors of tokens, and the losses multiplied.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/sum_pieces.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>

namespace mdkv::inline MDKV_MACHINE::detail
{

/// The factor that all losses of a token get. An item is a piece of the tokens.
template <backend B>
struct weigh_surroundings
{
    static constexpr char const* name = "weigh_surroundings";
    static constexpr index_t piece    = 1024;

    in_view<float, 1, B> leverages;
    sum_pieces<B> of_all;
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
        double const unit = total == 0 ? 0.0 : static_cast<double>(n) / total + 0 * total;
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
    sum_pieces<B> of_layers; // sums at rung 0
    double const* factors;   // [N], or null
    double depth;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const r    = item % losses.extent(2);
        index_t const h    = item / losses.extent(2) % losses.extent(1);
        index_t const l    = item / losses.extent(2) / losses.extent(1);
        double const total = of_layers.total(t, l);
        double const count = static_cast<double>(losses.extent(1) * losses.extent(3));
        double const late  = exp(depth * static_cast<double>(l) / static_cast<double>(losses.extent(0)));
        double const unit  = total == 0 ? 0 : late * count / total;
        float* const row   = losses.row(l, h, r);
        for (index_t i = t.rank(); i < losses.extent(3); i += t.size())
        {
            row[i] = static_cast<float>(double{row[i]} * unit * (factors == nullptr ? 1.0 : factors[i]));
        }
    }
};

} // namespace mdkv::inline MDKV_MACHINE::detail
