/// \file search.hpp: the search for the smallest multiplier that fits, and for the first tie that does not, by histograms of thresholds (arXiv 2603.20616, section 4.3).
#pragma once

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/detail/allocate/work.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/team.hpp>

#include <cstddef>
#include <cstdint>

// At a multiplier m, with thresholds theta_j and steps s_j = c_j - c_(j-1) of each token,
//
//     bytes(m) = c_0 + sum_j s_j [theta_j > m]
//
// One histogram of thresholds, weighted with s_j, therefore gives the bytes at every edge between bins: a bisection that
// tries two thousand multipliers in a pass. A level is `weigh`, which fills the histogram, and `narrow`, which finds the bin of
// the multiplier; the bin is the next level's interval. At the multiplier itself they do the same for the ties by piece, and
// `assign` by token.

namespace MDKV_NAMESPACE::detail::dual
{

/// The first of n numbers that makes the sum exceed `left`; the last one if none does.
struct first_over
{
    index_t at;
    index_t before; ///< sum of the numbers before it

    /// \param x  x(i) is number i; not negative
    template <team Team, class X>
    [[nodiscard]] MDKV_HD static first_over find(Team const& t, index_t n, index_t left, X const& x)
    {
        index_t before = 0;
        for (index_t from = 0; from < n; from += t.size())
        {
            index_t const i    = from + t.rank();
            index_t const own  = i < n ? index_t{x(i)} : 0;
            auto const sums    = t.prefix(own);
            index_t const here = before + sums.before;
            if (before + sums.total > left || from + t.size() >= n)
            {
                bool const over = i < n && here <= left && (here + own > left || i == n - 1);
                return {t.sum(over ? i : 0), t.sum(over ? here : 0)};
            }
            before += sums.total;
        }
        return {};
    }
};

/// Calls body(token, above, step) for the thresholds of a piece that are in [multiplier, multiplier + 2^undecided): `above`
/// is the bits' distance from the multiplier, `step` the bytes of the threshold's step.
template <team Team, class Body>
[[gnu::always_inline]] MDKV_HD inline void for_thresholds(
    Team const& t, open_piece const& opened, limit_search const& search, Body const& body)
{
    constexpr int lanes     = Team::register_lanes;
    using ints              = lane_ints<lanes>;
    std::size_t const count = opened.rungs.count;
    auto const first        = static_cast<std::int32_t>(search.multiplier);
    auto const last         = static_cast<std::int32_t>((std::uint32_t{1} << search.undecided) - 1);
    neighbours<lanes> some;
    for (index_t i = t.rank() * lanes; i < opened.count; i += t.size() * lanes)
    {
        some.read(opened, i);
        ints above[max_rungs];
        ints hits[max_rungs]; // thresholds in the interval; entry 0: any
        hits[0] = ints{};
        for (std::size_t j = 1; j < count; ++j)
        {
            __builtin_memcpy(&above[j], &some.theta[j], sizeof above[j]);
            above[j] -= first;
            hits[j] = (above[j] >= 0) & (above[j] <= last);
            hits[0] |= hits[j];
        }
        for (std::size_t j = any_lane(t, hits[0]) ? 1 : count; j < count; ++j)
        {
            if (!any_lane(t, hits[j])) { continue; }
            for (int l = 0; l < lanes; ++l)
            {
                auto const at = static_cast<std::uint32_t>(lane(above[j], l));
                if (lane(hits[j], l) != 0) { body(i + l, at, opened.rungs.cost[j] - opened.rungs.cost[j - 1]); }
            }
        }
    }
}

/// Clears all sums, and begins the search of each limit. An item is a part of the sums, and one limit.
template <space S>
struct begin
{
    static constexpr char const* name       = "allocate_begin";
    static constexpr index_t words_per_item = 1 << 15;

    work<S> w;
    index_t words;    ///< words of all sums, from `histogram` on
    bool unprojected; ///< again, without projected rungs, for limits that were solved with them

    [[nodiscard]] index_t items() const noexcept
    {
        index_t const by_words = (words + words_per_item - 1) / words_per_item;
        return by_words > w.limits ? by_words : w.limits;
    }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const end = (item + 1) * words_per_item < words ? (item + 1) * words_per_item : words;
        for (index_t i = item * words_per_item + t.rank(); i < end; i += t.size()) { w.histogram[i] = 0; }
        if (item >= w.limits || t.rank() != 0) { return; }
        index_t const bytes  = w.bytes_of(item);
        index_t const bare   = w.least(false);
        limit_search& search = w.searches[item];
        bool const again     = unprojected && search.projected && bare >= 0 && bare <= bytes;
        bool const pays      = w.least(true) <= bytes || bare < 0;
        search               = {};
        search.active        = !unprojected || again;
        search.projected     = !unprojected && pays;
        search.status        = pays ? allocation_status::optimal : allocation_status::unprojected_only;
        search.left          = bytes - w.least(search.projected);
        if (search.left < 0)
        {
            search.status     = allocation_status::over_limit;
            search.multiplier = infinite_bits;
        }
    }
};

/// Adds up the bytes of the thresholds in each of a limit's bins; or those of each piece's ties, as if in one bin.
template <space S>
struct weigh
{
    static constexpr char const* name = "allocate_weigh";

    work<S> w;
    bool ties;

    [[nodiscard]] index_t items() const { return w.own_pieces(); }
    [[nodiscard]] static index_t scratch_bytes() { return index_t{sizeof(open_piece)}; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        piece const range          = w.own_piece(item);
        limit_search const& search = w.searches[range.limit];
        if (!search.goes_on(ties)) { return; }
        open_piece& opened  = open_piece::of(t, w, range);
        index_t const count = search.bins();
        int const shift     = search.shift();
        opened.clear(t, opened.sums, count);
        for_thresholds(t, opened, search,
            [&](index_t, std::uint32_t at, index_t step) { t.add(opened.sums + (at >> shift), step); });
        t.sync();
        std::int64_t* const to = ties ? w.ties + range.number : w.histogram + range.limit * bins;
        for (index_t b = t.rank(); b < count; b += t.size())
        {
            if (opened.sums[b] != 0) { t.add_across(to + b, opened.sums[b]); }
        }
    }
};

/// Finds the bin of the multiplier; or the piece of the first tie that does not fit, and the bytes for the ties of this piece. An
/// item is a limit.
template <space S>
struct narrow
{
    static constexpr char const* name = "allocate_narrow";

    work<S> w;
    bool ties;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        limit_search& search = w.searches[item];
        if (!search.goes_on(ties)) { return; }
        std::int64_t* const sums = ties ? w.ties + item * w.pieces() : w.histogram + item * bins;
        index_t const n          = ties ? w.pieces() : search.bins();
        std::int64_t* const last = sums + n - 1; // bins count from the highest one down
        first_over const found   = ties ? first_over::find(t, n, search.left, [&](index_t i) { return sums[i]; })
                                        : first_over::find(t, n, search.left, [&](index_t i) { return last[-i]; });
        t.sync();
        for (index_t b = t.rank(); b < n && !ties; b += t.size()) { sums[b] = 0; } // for the next level
        if (t.rank() != 0) { return; }
        search.left -= found.before;
        if (ties) { search.tie_piece = item * w.pieces() + found.at; }
        else
        {
            search.multiplier += static_cast<std::uint32_t>(n - 1 - found.at) << search.shift();
            search.undecided = search.shift();
        }
    }
};

} // namespace MDKV_NAMESPACE::detail::dual
