/// \file finite.hpp: expects_finite: refuses keys, values or queries that hold a NaN or an infinity.
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/team.hpp>

#include <concepts>
#include <type_traits>

namespace MDKV_NAMESPACE
{

namespace detail
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

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const dim   = rows.extent(2);
        index_t const h     = item / blocks();
        index_t const begin = item % blocks() * rows_each;
        index_t const end   = rows.extent(1) - begin < rows_each ? rows.extent(1) : begin + rows_each;
        auto const share    = share_rows(t, (dim + vec16 - 1) / vec16);
        bool all            = true;
        for (index_t i = begin + share.row; all && i < end; i += share.rows)
        {
            T const* const x = rows.row(h, i);
            if constexpr (Team::lanes > 1) { all = finite(x, dim); }
            else
            {
                for (index_t d = share.column * vec16; d < dim; d += t.size() * vec16)
                {
                    all = all && (dim - d < vec16 ? finite(x + d, dim - d) : vec16_finite(x + d));
                }
            }
            if (!all) { t.min_across(first, h * rows.extent(1) + i); }
        }
    }

private:
    static constexpr index_t vec16          = 16 / sizeof(T); ///< elements of 16 bytes
    static constexpr std::uint32_t exponent = std::same_as<T, half>    ? 0x7c00U
                                              : std::same_as<T, float> ? 0x7f800000U
                                                                       : 0x7f80U;

    /// True when none of n elements is a NaN or an infinity: all ones in the exponent.
    [[nodiscard]] MDKV_HD static bool finite(T const* x, index_t n) noexcept
    {
        using bits         = std::conditional_t<sizeof(T) == 2, std::uint16_t, std::uint32_t>;
        constexpr auto all = static_cast<bits>(exponent);
        bits bad           = 0;
        for (index_t d = 0; d < n; ++d)
        {
            auto const found = static_cast<bits>(load_at(reinterpret_cast<bits const*>(x) + d) & all);
            bad              = static_cast<bits>(bad | (found == all ? 1 : 0));
        }
        return bad == 0;
    }

    /// The same for 16 bytes, two elements of 16 bits at a time: the sum sets the top bit of an element unless its exponent
    /// is all ones.
    [[nodiscard]] MDKV_HD static bool vec16_finite(T const* x) noexcept
    {
        constexpr std::uint32_t both = sizeof(T) == 2 ? 0x10001U : 1U;
        constexpr std::uint32_t top  = sizeof(T) == 2 ? 0x8000U : 0x80000000U;
        T all[std::size_t{vec16}];
        std::uint32_t words[4];
        load_all(x, all);
        __builtin_memcpy(words, static_cast<void const*>(all), sizeof words);
        std::uint32_t good = top * both;
        for (std::uint32_t const word : words) { good &= (~word & exponent * both) + (top - 1) * both; }
        return good == top * both;
    }
};

} // namespace detail

/// One NaN would spoil a head's Gram matrix and every softmax; this search comes first.
///
/// \param on         backend: threads
/// \param[in] name   name of the view, for the message
/// \param[in] rows   [H, N, D]
/// \param     layer  number for the message; negative: none
/// \cost   reads the view once
/// \sync   returns when done, on a GPU too: it waits for the device
/// \order  names the first offending row in (head, row) order, for any number of threads
/// \throws non_finite_input   naming the view, the head, the row and the layer (if not negative)
/// \see    tests/unit/engine/finite.cpp
template <backend B, element T>
void expects_finite(B const& on, char const* name, in_view<T, 3, B> rows, index_t layer = -1)
{
    detail::checks{on, "expects_finite"}.rows(name, rows, rows.extents(), "H,N,D");
    index_t const count = rows.extent(1);
    index_t const all   = checked_multiply(rows.extent(0), count);
    index_t found       = all;
    workspace::frame frame{on.scratch};
    index_t* const first = B::memory_space == space::host ? &found : frame.take<index_t>(1);
    if (rows.extent(2) == 0) { return; }
    detail::find_not_finite<B, T> const job{rows, first};
    if (first != &found) { run(on, detail::fill<index_t>{first, all, 1}, 1); }
    run(on, job, rows.extent(0) * job.blocks());
    if (first != &found) { fetch(on, first, &found, 1); }
    if (found == all) { return; }
    expects<non_finite_input>(
        layer < 0, name, ": NaN or infinity in layer ", layer, ", head ", found / count, ", row ", found % count);
    expects<non_finite_input>(false, name, ": NaN or infinity in head ", found / count, ", row ", found % count);
}

} // namespace MDKV_NAMESPACE
