/// \file finite.hpp: expects_finite, written once over run and team: the first row that holds a NaN or an infinity.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/element.hpp>
#include <mdkv/detail/team.hpp>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace mdkv::detail
{

/// Lowers `first` to the first offending row, counted over all heads. An item is some rows of one head.
template <backend B, element T>
struct find_not_finite
{
    static constexpr char const* name  = "find_not_finite";
    static constexpr int threads       = 128;
    static constexpr index_t rows_each = 64;

    in_view<T, 3, B> rows;
    index_t* first;

    [[nodiscard]] MDKV_HD index_t blocks() const noexcept { return (rows.extent(1) + rows_each - 1) / rows_each; }

    /// True when none of elements begin, begin + step, ... < n is a NaN or an infinity: all ones in the exponent.
    [[nodiscard]] MDKV_HD static bool finite(T const* x, index_t n, index_t begin = 0, index_t step = 1) noexcept
    {
        using bits              = std::conditional_t<sizeof(T) == 2, std::uint16_t, std::uint32_t>;
        constexpr auto exponent = static_cast<bits>(sizeof(T) == 4            ? 0x7f800000U
                                                    : std::is_same_v<T, half> ? 0x7c00U
                                                                              : 0x7f80U);
        bits bad                = 0;
        for (index_t d = begin; d < n; d += step)
        {
            T const value = read_element<B>(x + d);
            bits element  = 0;
            std::memcpy(&element, static_cast<void const*>(&value), sizeof element);
            bad = static_cast<bits>(bad | ((element & exponent) == exponent ? 1 : 0));
        }
        return bad == 0;
    }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const dim   = rows.extent(2);
        index_t const h     = item / blocks();
        index_t const begin = item % blocks() * rows_each;
        index_t const end   = rows.extent(1) - begin < rows_each ? rows.extent(1) : begin + rows_each;
        auto const mine     = share_rows(t, dim);
        for (index_t row = begin + mine.row; row < end; row += mine.rows)
        {
            if (finite(rows.data_handle() + h * rows.stride(0) + row * rows.stride(1), dim, mine.column, t.size()))
            {
                continue;
            }
            t.min_across(first, h * rows.extent(1) + row);
            return;
        }
    }
};

template <backend B, element T>
void expects_finite_impl(B const& on, char const* name, in_view<T, 3, B> rows, index_t layer)
{
    index_t const count = rows.extent(1);
    index_t const all   = checked_multiply(rows.extent(0), count);
    index_t place       = all;
    workspace::frame frame{*on.scratch, "expects_finite"};
    index_t* const first = B::memory_space == space::host ? &place : frame.take<index_t>(1);
    if (!frame.ready() || rows.extent(2) == 0) { return; }
    find_not_finite<B, T> const job{rows, first};
    if (first != &place) { run(on, fill<index_t>{first, all, 1}, 1); }
    run(on, job, rows.extent(0) * job.blocks());
    if (first != &place) { fetch(on, first, &place, 1); }
    if (place == all) { return; }
    if (layer >= 0)
    {
        fail<non_finite_input>(
            name, ": NaN or infinity in layer ", layer, ", head ", place / count, ", row ", place % count);
    }
    fail<non_finite_input>(name, ": NaN or infinity in head ", place / count, ", row ", place % count);
}

} // namespace mdkv::detail
