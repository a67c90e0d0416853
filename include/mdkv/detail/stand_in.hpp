/// \file stand_in.hpp: the job of stand_in that makes the token of each group of dropped ones.
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/element.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>
#include <cstdint>

namespace mdkv::inline MDKV_MACHINE::detail
{

/// The stand-in of each group; zeros beyond a head's last group. An item is a group of a head.
template <backend B, element T>
struct place_stand_in
{
    static constexpr char const* name = "stand_in";
    static constexpr int threads      = 128;

    in_view<T, 3, B> keys, values;
    in_view<index_t, 2, B> places; // from choose_seeds
    in_view<std::int32_t, 2, B> groups;
    in_view<float, 2, B> weights;
    in_view<float, 4, B> shares;
    in_view<float, 3, B> queries; // from scale_queries
    out_view<float, 4, B> rows;   // [H, M, 2, G*Q]  shares, and the differences that logits lack
    out_view<float, 3, B> stand_in_keys, stand_in_values;

    struct scratch
    {
        carver& cut;
        index_t dim;
        double* sums = cut.take<double>(dim); // [D]  sums of a mean, then the direction in which the key moves
    };

    [[nodiscard]] index_t items() const noexcept { return stand_in_keys.extent(0) * stand_in_keys.extent(1); }
    [[nodiscard]] index_t scratch_bytes() const noexcept
    {
        return bytes_of<scratch>(keys.extent(2) > values.extent(2) ? keys.extent(2) : values.extent(2));
    }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const h     = item / stand_in_keys.extent(1);
        index_t const j     = item % stand_in_keys.extent(1);
        index_t const dim   = keys.extent(2);
        index_t const count = rows.extent(3);
        float* const key    = stand_in_keys.row(h, j);
        float* const share  = rows.row(h, j, 0);
        float* const lacks  = rows.row(h, j, 1);
        carver cut          = t.scratch();
        scratch const mine{cut, dim > values.extent(2) ? dim : values.extent(2)};
        if (places(h, j) < 0)
        {
            for (index_t d = t.rank(); d < dim; d += t.size()) { key[d] = 0; }
            for (index_t d = t.rank(); d < values.extent(2); d += t.size()) { stand_in_values(h, j, d) = 0; }
            return;
        }
        mean(t, keys, h, j, mine.sums, key);
        mean(t, values, h, j, mine.sums, stand_in_values.row(h, j));
        t.sync();
        for (index_t r = t.rank(); r < count; r += t.size())
        {
            double sum = 0;
            for (index_t s = 0; s < shares.extent(1); ++s) { sum += double{shares(h, s, j, r)}; }
            double const least   = 0x1p-30; // share of a group that no row attends to
            share[r]             = static_cast<float>(sum > least ? sum : least);
            float const* const q = queries.row(h, r);
            lacks[r]             = static_cast<float>(double{q[dim]} + log2(double{share[r]}) - dot(q, key, dim));
        }
        t.sync();
        for (index_t d = t.rank(); d < dim; d += t.size()) { mine.sums[d] = 0; }
        for (index_t r = 0; r < count; ++r)
        {
            double const weight  = double{share[r]} * double{lacks[r]};
            float const* const q = queries.row(h, r);
            for (index_t d = t.rank(); d < dim; d += t.size()) { mine.sums[d] += weight * double{q[d]}; }
        }
        t.sync();
        for (index_t r = t.rank(); r < count; r += t.size())
        {
            lacks[r] = static_cast<float>(dot(queries.row(h, r), mine.sums, dim));
        }
        t.sync();
        double squares = 0;
        double bends   = 0;
        for (index_t d = 0; d < dim; ++d) { squares += mine.sums[d] * mine.sums[d]; }
        for (index_t r = 0; r < count; ++r) { bends += double{share[r]} * double{lacks[r]} * double{lacks[r]}; }
        double const step = bends > 0 ? squares / bends : 0.0;
        for (index_t d = t.rank(); d < dim; d += t.size())
        {
            key[d] = static_cast<float>(double{key[d]} + step * mine.sums[d]);
        }
    }

private:
    /// The mean of a group's keys or values, weighted by attention, or uniformly if they get none. Members split the dims.
    template <team Team>
    MDKV_HD void mean(Team const& t, in_view<T, 3, B> const& of, index_t h, index_t j, double* sums, float* to) const
    {
        double total = 0;
        for (index_t d = t.rank(); d < of.extent(2); d += t.size()) { sums[d] = 0; }
        for (int pass = 0; pass < 2 && total == 0; ++pass)
        {
            for (index_t i = 0; i < of.extent(1); ++i)
            {
                double const weight = groups(h, i) != j ? 0.0 : pass > 0 ? 1.0 : double{weights(h, i)};
                if (weight == 0) { continue; }
                total += weight;
                T const* const row = of.row(h, i);
                for (index_t d = t.rank(); d < of.extent(2); d += t.size())
                {
                    sums[d] += weight * double{widen(load_at<T>(row + d))};
                }
            }
        }
        for (index_t d = t.rank(); d < of.extent(2); d += t.size()) { to[d] = static_cast<float>(sums[d] / total); }
    }

    template <class V>
    [[nodiscard]] MDKV_HD static double dot(float const* a, V const* b, index_t dim)
    {
        constexpr int lanes = 8; // a number of sums that compilers vectorise
        double part[lanes]{};
        index_t d = 0;
        for (; d + lanes <= dim; d += lanes)
        {
            for (int l = 0; l < lanes; ++l) { part[l] += double{a[d + l]} * double{b[d + l]}; }
        }
        double sum = 0;
        for (; d < dim; ++d) { sum += double{a[d]} * double{b[d]}; }
        for (double const x : part) { sum += x; }
        return sum;
    }
};

} // namespace mdkv::inline MDKV_MACHINE::detail
