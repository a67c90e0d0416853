/// \file search.hpp: the search for the smallest multiplier that fits, and for the first tie that does not, by histograms of thresholds (arXiv 2603.20616, section 4.3).
#pragma once

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/detail/allocate/piece.hpp>
#include <mdkv/detail/allocate/work.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>

// At a multiplier m, with thresholds theta_j and steps s_j = c_j - c_(j-1) of each token,
//
//     bytes(m) = c_0 + sum_j s_j [theta_j > m]
//
// One histogram of thresholds, weighted with s_j, therefore gives the bytes at every edge between bins: a bisection that
// tries two thousand multipliers in a pass. A level is `weigh`, which fills the histogram, and `narrow`, which finds the bin of
// the multiplier; the bin is the next level's interval. If there are many tokens, a sample guesses the first interval: few
// thresholds are in it, and all others are only compared with its ends. At the multiplier itself `weigh_ties` and `find_tie`
// do the same for the ties, by piece and then by token.

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
/// is the bits' distance from the multiplier, `step` the bytes of the threshold's step. Returns the bytes of this member's
/// thresholds above the interval.
/// \param every  only one vector of neighbours in so many is read
template <team Team, class Body>
[[gnu::always_inline]] MDKV_HD inline index_t for_thresholds(
    Team const& t, open_piece const& opened, problem const& p, index_t every, Body const& body)
{
    constexpr int lanes     = Team::register_lanes;
    using ints              = lane_ints<lanes>;
    std::size_t const count = opened.rungs.count;
    auto const first        = static_cast<std::int32_t>(p.multiplier);
    auto const last         = static_cast<std::int32_t>((std::uint32_t{1} << p.undecided) - 1);
    ints const one          = ints{} + 1;
    ints over[max_rungs]{};
    neighbours<lanes> some;
    for (index_t i = (t.rank() * every + every / 2) * lanes; i < opened.count; i += t.size() * every * lanes)
    {
        some.read(opened, i);
        ints above[max_rungs];
        ints hits[max_rungs]; // thresholds in the interval; entry 0: any
        hits[0] = ints{};
        for (std::size_t j = 1; j < count; ++j)
        {
            __builtin_memcpy(&above[j], &some.theta[j], sizeof above[j]);
            above[j] -= first;
            over[j] += above[j] > last ? one : ints{};
            hits[j] = (above[j] >= 0) & (above[j] <= last);
            hits[0] |= hits[j];
        }
        for (std::size_t j = any_lane(t, hits[0]) ? 1 : count; j < count; ++j)
        {
            if (!any_lane(t, hits[j])) { continue; }
            for (int l = 0; l < lanes; ++l)
            {
                auto const at = static_cast<std::uint32_t>(lane(above[j], l));
                if (lane(hits[j], l) != 0) { body(i + l, at, opened.steps[j]); }
            }
        }
    }
    index_t bytes = 0;
    for (std::size_t j = 1; j < count; ++j)
    {
        for (int l = 0; l < lanes; ++l) { bytes += lane(over[j], l) * opened.steps[j]; }
    }
    return bytes;
}

/// Clears the histograms, and finds the sets that each limit allows before any loss is read.
struct begin
{
    static constexpr char const* name       = "allocate_begin";
    static constexpr index_t words_per_item = 1 << 15;

    work w;
    index_t words; ///< words of all sums, from `histogram` on

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
        if (item >= w.limits) { return; }
        index_t const limit = w.limit_of(item);
        problem first{};
        index_t k    = 0;
        first.status = allocation_status::unprojected_only;
        for (index_t other = 0; other < w.sets; ++other)
        {
            bool const fits = w.chooses() ? w.affords(item, other) : w.heads * w.set_at(other).least <= limit;
            if (!fits || (w.set_at(other).charge == 0 && other + 1 < w.sets)) { continue; }
            first.status = allocation_status::optimal;
            k            = other;
        }
        if (w.chooses()) { k = w.least_set(); }
        if (w.heads * w.set_at(k).least > limit) { first.status = allocation_status::over_limit; }
        first.multiplier         = first.over() ? infinite_bits : 0;
        first.undecided          = multiplier_bits;
        first.bin                = problem::any_bin;
        first.left               = first.over() ? 0 : limit - w.heads * w.set_at(k).least;
        index_t const of_problem = w.rungs() * w.rungs();
        for (index_t b = t.rank(); b < w.candidates * of_problem; b += t.size())
        {
            w.upgrades[item * w.candidates * of_problem + b] = no_upgrade;
        }
        for (index_t i = t.rank(); i < w.candidates * w.heads; i += t.size())
        {
            index_t const c                             = i / w.heads; // the last candidate is for `choose` to fill in
            w.set_of[item * w.candidates * w.heads + i] = static_cast<std::uint8_t>(w.chooses() && c < w.sets ? c : k);
        }
        for (index_t c = t.rank(); c < w.candidates; c += t.size())
        {
            first.active                        = !w.chooses() || c == k;
            w.problems[item * w.candidates + c] = first;
        }
    }
};

/// Adds up the bytes of the thresholds in each of a problem's bins and, if they are a guess, above them. A stretch without a
/// threshold in the bin that became the interval has none.
struct weigh
{
    static constexpr char const* name = "allocate_weigh";

    work w;
    index_t every; ///< above 1 for a sample

    [[nodiscard]] index_t items() const { return w.own_stretches() * w.all_problems(); }
    [[nodiscard]] static index_t scratch_bytes() { return index_t{sizeof(open_piece)}; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        piece const range        = w.own_stretch(item);
        problem const& p         = w.problems[range.problem];
        std::uint8_t* const seen = w.seen + item * bins;
        if (!w.searches(p) || (p.bin != problem::any_bin && seen[p.bin] == 0)) { return; }
        open_piece& opened  = open_piece::of(t, w, range);
        index_t const count = p.bins();
        opened.clear(t, opened.sums, count);
        int const shift     = p.shift();
        index_t const above = t.sum(for_thresholds(t, opened, p, every,
            [&](index_t, std::uint32_t at, index_t step) { t.add(opened.sums + (at >> shift), step); }));
        t.sync();
        std::int64_t* const to = w.histogram + range.problem * (bins + 1);
        for (index_t b = t.rank(); b < count; b += t.size())
        {
            seen[b] = opened.sums[b] != 0 ? 1 : 0;
            if (opened.sums[b] != 0) { t.add_across(to + b, opened.sums[b]); }
        }
        if (t.rank() == 0 && p.guessed && above > 0) { t.add_across(to + bins, above); }
    }
};

/// Finds the bin of the multiplier. A sample's bin becomes a guess; if the multiplier may lie outside of it, all of its bits
/// are searched for.
struct narrow
{
    static constexpr char const* name = "allocate_narrow";

    work w;
    index_t every; ///< above 1 for a sample

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        problem& p = w.problems[item];
        if (!w.searches(p)) { return; }
        std::int64_t* const sums = w.histogram + item * (bins + 1);
        index_t const last       = p.bins() - 1;
        index_t const left       = (p.left - sums[bins]) / every;
        first_over const found   = first_over::find(t, p.bins(), left, [&](index_t i) { return sums[last - i]; });
        index_t const bin        = last - found.at;
        index_t const bytes      = sums[bin];
        t.sync();
        for (index_t b = t.rank(); b <= bins; b += t.size()) { sums[b] = 0; } // for the next level
        if (t.rank() != 0) { return; }
        std::uint32_t const lowest = p.multiplier + (static_cast<std::uint32_t>(bin) << p.shift());
        if (every > 1)
        {
            double const error = sqrt(static_cast<double>(left) * static_cast<double>(w.widest_step));
            return p.guess(lowest, static_cast<double>(left - found.before), static_cast<double>(bytes), error);
        }
        bool const wrong = p.guessed && (left < 0 || (bin == 0 && lowest > 0));
        p.left           = wrong ? p.left : left - found.before;
        p.multiplier     = wrong ? 0 : lowest;
        p.undecided      = wrong ? multiplier_bits : p.shift();
        p.bin            = wrong ? problem::any_bin : bin;
        p.guessed        = false;
    }
};

/// Adds up the bytes that the ties of each piece would take. Skips stretches whose histogram has no entry in the last level's bin.
struct weigh_ties
{
    static constexpr char const* name = "allocate_weigh_ties";

    work w;

    [[nodiscard]] index_t items() const { return w.own_pieces() * w.all_problems(); }
    [[nodiscard]] static index_t scratch_bytes() { return index_t{sizeof(open_piece)}; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        piece const range     = w.own_piece(item);
        problem const& p      = w.problems[range.problem];
        index_t const stretch = range.own_head * w.stretches_per_head + range.first / stretch_tokens;
        if (!w.spends(p) || w.seen[(range.problem * w.own_stretches() + stretch) * bins + p.bin] == 0) { return; }
        open_piece& opened = open_piece::of(t, w, range);
        index_t all        = 0;
        for_thresholds(t, opened, p, 1, [&](index_t, std::uint32_t, index_t step) { all += step; });
        all = t.sum(all);
        if (t.rank() == 0) { w.ties[range.problem * w.pieces() + range.number] = all; }
    }
};

/// Finds the first tie that does not fit: its piece on every rank, the token and the bytes behind it on the rank of its head.
struct find_tie
{
    static constexpr char const* name = "allocate_find_tie";

    work w;

    [[nodiscard]] static index_t scratch_bytes() { return index_t{sizeof(open_piece)}; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        problem& p = w.problems[item];
        if (!w.spends(p)) { return; }
        std::int64_t const* const ties = w.ties + item * w.pieces();
        first_over const of_pieces     = first_over::find(t, w.pieces(), p.left, [&](index_t i) { return ties[i]; });
        index_t const left             = p.left - of_pieces.before;
        piece const range              = w.piece_of(item, of_pieces.at);
        if (t.rank() == 0) { p.tie_piece = of_pieces.at; }
        if (range.own_head < 0) { return; }
        open_piece& opened = open_piece::of(t, w, range);
        opened.clear(t, opened.sums, range.count);
        for_thresholds(
            t, opened, p, 1, [&](index_t token, std::uint32_t, index_t step) { t.add(opened.sums + token, step); });
        t.sync();
        first_over const of_tokens = first_over::find(t, range.count, left, [&](index_t i) { return opened.sums[i]; });
        if (t.rank() != 0) { return; }
        w.tie[2 * item]     = of_tokens.at;
        w.tie[2 * item + 1] = left - of_tokens.before;
    }
};

} // namespace MDKV_NAMESPACE::detail::dual
