/// \file sum_pieces.hpp: sums of many numbers in double, in an order that does not depend on the number of threads.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/team.hpp>

namespace mdkv::inline MDKV_MACHINE::detail
{

/// Sums of pieces of rows. An item is a piece; a row's pieces are neighbours.
template <backend B>
struct sum_pieces
{
    static constexpr char const* name = "sum_pieces";
    static constexpr index_t piece    = 4096;

    in_view<float, 3, B> rows; // [L, H, N]
    double* sums;              // [L, H, pieces]

    [[nodiscard]] MDKV_HD index_t pieces() const noexcept { return (rows.extent(2) + piece - 1) / piece; }
    [[nodiscard]] MDKV_HD index_t items() const noexcept { return rows.extent(0) * rows.extent(1) * pieces(); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const row      = item / pieces();
        index_t const begin    = item % pieces() * piece;
        index_t const left     = rows.extent(2) - begin;
        index_t const end      = begin + (left < piece ? left : piece);
        float const* const all = rows.row(row / rows.extent(1), row % rows.extent(1));
        double sum             = 0;
        for (index_t i = begin + t.rank(); i < end; i += t.size()) { sum += double{all[i]}; }
        sum = t.sum(sum);
        if (t.rank() == 0) { sums[item] = sum; }
    }

    /// Sum of the rows [l, *, *], from their pieces.
    template <team Team>
    [[nodiscard]] MDKV_HD double total(Team const& t, index_t l) const
    {
        index_t const each = rows.extent(1) * pieces();
        double sum         = 0;
        for (index_t i = t.rank(); i < each; i += t.size()) { sum += sums[l * each + i]; }
        return t.sum(sum);
    }
};

} // namespace mdkv::inline MDKV_MACHINE::detail
