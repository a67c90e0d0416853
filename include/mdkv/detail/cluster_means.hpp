/// \file cluster_means.hpp: the job of stand_in that finds the mean key and the mean value of each cluster of dropped tokens.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/columns.hpp>
#include <mdkv/detail/team.hpp>

#include <cstddef>
#include <cstdint>

namespace MDKV_NAMESPACE::detail
{

/// The mean key of each cluster, or its mean value, weighted by attention, or uniformly if all weights are 0; zeros beyond a
/// head's last cluster. An item is a cluster of a head, and keys or values. Sums are in the order of tokens, and each token is
/// added once: a team lists its cluster's tokens of a stretch, then each member adds up coordinates of its own.
template <backend B, element T>
struct mean_of_cluster
{
    static constexpr char const* name = "stand_in_mean";
    static constexpr int threads      = 128;
    /// Tokens whose clusters are looked at before some are added: all the rows of a CPU's stay in its first cache.
    static constexpr int stretch = B::memory_space == space::host ? 64 : 1024;

    in_view<T, 3, B> keys, values;
    in_view<index_t, 2, B> seed_slots; // [H, M]  from choose_seeds
    in_view<std::int32_t, 2, B> clusters;
    in_view<float, 2, B> weights;
    out_view<float, 3, B> mean_keys, mean_values;

    struct scratch
    {
        carver& cut;
        index_t dim;
        double* sums        = cut.take<double>(dim);           // [D]
        double* weight      = cut.take<double>(stretch);       // [listed tokens]
        std::int32_t* token = cut.take<std::int32_t>(stretch); // [listed tokens]  ascending
    };

    [[nodiscard]] index_t items() const noexcept { return 2 * mean_keys.extent(0) * mean_keys.extent(1); }
    [[nodiscard]] index_t scratch_bytes() const noexcept
    {
        return bytes_of<scratch>(keys.extent(2) > values.extent(2) ? keys.extent(2) : values.extent(2));
    }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const j = item / 2 % mean_keys.extent(1);
        index_t const h = item / 2 / mean_keys.extent(1);
        if (item % 2 == 0) { mean(t, keys, h, j, mean_keys.row(h, j)); }
        else { mean(t, values, h, j, mean_values.row(h, j)); }
    }

private:
    template <team Team>
    MDKV_HD void mean(Team const& t, in_view<T, 3, B> const& of, index_t h, index_t j, float* to) const
    {
        index_t const dim = of.extent(2);
        index_t const n   = seed_slots(h, j) < 0 ? 0 : of.extent(1);
        carver cut        = t.scratch();
        scratch const memory{cut, dim};
        double total = 0;
        for (index_t d = t.rank(); d < dim; d += t.size()) { memory.sums[d] = 0; }
        for (int pass = 0; pass < 2 && total == 0; ++pass)
        {
            for (index_t first = 0; first < n; first += stretch)
            {
                int const listed = list(t, memory, h, j, first, n - first < stretch ? n : first + stretch, pass > 0);
                for (int k = 0; k < listed; ++k) { total += memory.weight[k]; }
                add(t, memory, of, h, listed);
            }
        }
        for (index_t d = t.rank(); d < dim; d += t.size())
        {
            to[d] = n == 0 ? 0.0F : static_cast<float>(memory.sums[d] / total);
        }
    }

    /// Lists the cluster's tokens of [begin, end) that have a weight, and returns their number.
    template <team Team>
    MDKV_HD int list(
        Team const& t, scratch const& memory, index_t h, index_t j, index_t begin, index_t end, bool uniformly) const
    {
        index_t const each = (end - begin + t.size() - 1) / t.size();
        index_t const from = begin + t.rank() * each;
        auto const count   = static_cast<int>(from >= end ? 0 : end - from < each ? end - from : each);
        auto const weight  = [&](index_t i) {
            return clusters(h, i) != j ? 0.0 : uniformly ? 1.0 : double{weights(h, i)};
        };
        int own = 0;
        for (int i = 0; i < count; ++i) { own += weight(from + i) != 0 ? 1 : 0; }
        auto const all = t.prefix(own); // (the last list is not read any more by then)
        int at         = all.before;
        for (int i = 0; i < count; ++i)
        {
            double const w = weight(from + i);
            if (w == 0) { continue; }
            memory.token[at]    = static_cast<std::int32_t>(from + i);
            memory.weight[at++] = w;
        }
        t.sync();
        return all.total;
    }

    template <team Team>
    MDKV_HD void add(Team const& t, scratch const& memory, in_view<T, 3, B> const& of, index_t h, int listed) const
    {
        constexpr int lanes = Team::lanes;
        index_t const dim   = of.extent(2);
        index_t const whole = dim / lanes * lanes;
        for (index_t d = t.rank() * lanes; d < whole; d += t.size() * lanes)
        {
            add_lanes<lanes>(t, memory, of, h, listed, d);
        }
        if constexpr (lanes > 1)
        {
            for (index_t d = whole; d < dim; ++d) { add_lanes<1>(t, memory, of, h, listed, d); }
        }
    }

    /// Adds coordinates d, d + 1, ... of the listed tokens.
    template <int Lanes, team Team>
    MDKV_HD void add_lanes(
        Team const& t, scratch const& memory, in_view<T, 3, B> const& of, index_t h, int listed, index_t d) const
    {
        double sum[std::size_t{Lanes}];
        for (int l = 0; l < Lanes; ++l) { sum[l] = memory.sums[d + l]; }
        for (int k = 0; k < listed; ++k)
        {
            float x[std::size_t{Lanes}];
            widen_lanes(t, of.row(h, memory.token[k]) + d, x);
            for (int l = 0; l < Lanes; ++l) { sum[l] += memory.weight[k] * double{x[l]}; }
        }
        for (int l = 0; l < Lanes; ++l) { memory.sums[d + l] = sum[l]; }
    }
};

} // namespace MDKV_NAMESPACE::detail
