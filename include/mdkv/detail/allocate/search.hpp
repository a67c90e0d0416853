/// \file search.hpp: the search for the smallest multiplier that fits, and for the first tie that does not, by histograms of thresholds (arXiv 2603.20616, section 4.3).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/detail/allocate/piece.hpp>
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
// tries two thousand multipliers in a pass. Few thresholds should fall into the bins of the first pass, because adding to a
// bin takes longer than finding a threshold: a sample finds the range of these bins. If the sample was wrong, later passes
// search all multipliers.

namespace mdkv::inline MDKV_MACHINE::detail::dual
{

/// The lowest bin above which all bytes fit; `bins` if nothing fits.
struct cut
{
    index_t bin;
    index_t above; ///< bytes above the bin
    index_t all;   ///< bytes in all bins and above them

    /// \param carried  bytes above all bins
    template <team Team>
    [[nodiscard]] MDKV_OUTLINE MDKV_HD static cut find(
        Team const& t, std::int64_t const* sums, index_t bins, index_t carried, index_t room)
    {
        cut here{bins, 0, carried};
        for (index_t from = 0; from < bins; from += t.size())
        {
            index_t const b    = bins - 1 - from - t.rank();
            auto const before  = t.prefix(b >= 0 ? index_t{sums[b]} : index_t{0});
            index_t const over = here.all + before.before;
            here.all += before.total;
            if (b < 0 || over > room) { continue; }
            here.bin   = b;
            here.above = over;
        }
        here.bin   = bins - t.largest(bins - here.bin);
        here.above = t.largest(here.above);
        return here;
    }
};

/// Adds up the bytes of a piece's steps by the bin of their threshold, at the last level by token from the last one down;
/// and the bytes above all bins. The tokens are runs of `run_tokens`, `stride` apart.
template <std::size_t Count, team Team>
MDKV_HD void add_thresholds(Team const& t, open_piece& own, problem const& p, seen_bins const& seen, index_t start,
    index_t tokens, index_t stride, int level)
{
    constexpr int lanes     = Team::register_lanes;
    using ints              = lane_ints<lanes>;
    std::size_t const count = Count == run_time ? own.rungs.count : Count;
    int const shift         = p.shift;
    ints const one          = ints{} + 1;
    ints const first        = ints{} + static_cast<std::int32_t>(p.multiplier);
    index_t const end       = index_t{p.multiplier} + (p.bins << shift) - 1;
    ints const last         = ints{} + static_cast<std::int32_t>(end < no_more ? end : index_t{no_more});
    neighbours<lanes, Count> group;
    ints above[neighbours<lanes, Count>::capacity]{};
    for (index_t n = t.rank() * lanes; n < tokens; n += t.size() * lanes)
    {
        group.read(own, start + n / run_tokens * stride + n % run_tokens);
        ints any{};
        for_rungs<Count>(1, count, [&](std::size_t j) {
            ints const bits = bits_as<ints>(group.steps.theta[j]);
            above[j] += bits > last ? one : ints{};
            any |= bits >= first ? (bits > last ? ints{} : one) : ints{};
        });
        std::uint64_t const hits = lane_word<lanes>(any);
        if (hits == 0) { continue; }
        // Add every step of a hit token. Steps outside the interval go to a dummy bin, which is cheaper than a test.
        std::int32_t bin[neighbours<lanes, Count>::capacity][std::size_t{lanes}];
        for_rungs<Count>(1, count, [&](std::size_t j) {
            ints const bits  = bits_as<ints>(group.steps.theta[j]);
            ints const other = ints{} + no_bin;
            ints const of    = bits >= first ? (bits > last ? other : (bits - first) >> shift) : other;
            __builtin_memcpy(bin[j], &of, sizeof of);
        });
        for_lanes_in(hits, [&](int l) {
            for_rungs<Count>(1, count, [&](std::size_t j) {
                std::int32_t const b = bin[j][l];
                t.add(own.sums + (level == token_level && b == 0 ? fine_bins - 1 - n - l : index_t{b}), own.step(j));
                seen.note(b);
            });
        });
    }
    for_rungs<Count>(1, count, [&](std::size_t j) {
        std::int32_t of[std::size_t{lanes}];
        __builtin_memcpy(of, &above[j], sizeof of);
        for (std::int32_t const n : of) { t.add(own.sums + fine_bins, n * own.step(j)); }
    });
}

/// Clears the histograms, finds the sets that each limit allows before any loss is read, and guesses its multiplier's range.
struct begin
{
    static constexpr char const* name       = "allocate_begin";
    static constexpr index_t words_per_item = 1 << 15;

    work w;
    index_t words; ///< words to clear, from `fine` on

    [[nodiscard]] index_t items() const noexcept
    {
        index_t const parts = (words + words_per_item - 1) / words_per_item;
        return parts > w.limits ? parts : w.limits;
    }
    [[nodiscard]] static index_t scratch_bytes() { return index_t{sizeof(open_piece)}; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const end = (item + 1) * words_per_item < words ? (item + 1) * words_per_item : words;
        for (index_t i = item * words_per_item + t.rank(); i < end; i += t.size()) { w.fine[i] = 0; }
        if (item >= w.limits) { return; }
        index_t const limit = w.limit_of(item);
        problem first{};
        index_t k    = 0;
        first.status = allocation_status::unprojected_only;
        for (index_t other = 0; other < w.sets; ++other)
        {
            bool const fits = w.chooses() ? w.affords(item, other) : w.heads * w.at(other).least <= limit;
            if (!fits || (w.at(other).charge == 0 && other + 1 < w.sets)) { continue; }
            first.status = allocation_status::optimal;
            k            = other;
        }
        if (w.chooses()) { k = w.least_set(); }
        if (w.heads * w.at(k).least > limit) { first.status = allocation_status::over_limit; }
        first.set_bins(0, fine_bins << whole_shift);
        first.multiplier         = first.over() ? no_more : 0;
        first.found              = -1;
        first.room               = first.over() ? 0 : limit - w.heads * w.at(k).least;
        index_t const of_problem = w.rungs() * w.rungs();
        for (index_t b = t.rank(); b < w.candidates * of_problem; b += t.size())
        {
            w.best[item * w.candidates * of_problem + b] = ~std::uint64_t{0};
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
        if (!w.chooses() && w.tokens > 0 && !first.over()) { guess(t, item, first); }
    }

private:
    /// Guesses the bins from a sample. Its bytes are off by a few standard deviations, each less than
    /// sqrt(bytes * most bytes of one token) if tokens are independent. Neighbours are not independent.
    template <team Team>
    MDKV_HD void guess(Team const& t, index_t item, problem p) const
    {
        open_piece& own      = *t.scratch().template take<open_piece>(1);
        index_t const taken  = w.sampled_runs * run_tokens;
        index_t const stride = w.sampled_runs > 1 ? w.tokens / w.sampled_runs : run_tokens;
        own.clear(t, own.sums);
        for (index_t h = 0; h < w.heads; ++h)
        {
            part const here{item, item, 0, h, 0, w.tokens};
            own.open(t, w, here, w.set_of[item * w.heads + h]);
            with_count(own.rungs.count, [&](auto count) {
                add_thresholds<decltype(count)::value>(t, own, p, seen_bins{w, here, 0}, 0, taken, stride, 0);
            });
            t.sync();
        }
        double const part_of_all = static_cast<double>(taken) / static_cast<double>(w.tokens);
        double const room        = static_cast<double>(p.room) * (part_of_all < 1 ? part_of_all : 1);
        auto slack               = static_cast<double>(w.unit);
        while (slack * slack < 16 * room * static_cast<double>(w.unit)) { slack *= 1.25; }
        index_t const low  = edge(t, own.sums, static_cast<index_t>(room + slack));
        index_t const high = edge(t, own.sums, static_cast<index_t>(room - slack)) + 1;
        if (t.rank() != 0) { return; }
        p.guessed = true;
        p.set_bins(static_cast<std::uint32_t>(low), high - low);
        w.problems[item] = p;
    }

    /// Approximate bits of the threshold above which there are `room` bytes.
    template <team Team>
    [[nodiscard]] MDKV_HD static index_t edge(Team const& t, std::int64_t const* sums, index_t room)
    {
        cut const at = cut::find(t, sums, fine_bins, 0, room);
        if (at.bin == fine_bins) { return (fine_bins << whole_shift) - 1; }
        auto const inside = static_cast<double>(sums[at.bin]);
        double const part =
            static_cast<double>(room - at.above) < inside ? static_cast<double>(room - at.above) / inside : 1;
        return static_cast<index_t>((static_cast<double>(at.bin + 1) - part) * (1 << whole_shift));
    }
};

/// Adds up the bytes in each of a problem's bins; then the bytes of ties in each piece, and of each token in the one piece
/// whose ties fit in part.
struct weigh
{
    static constexpr char const* name = "allocate_weigh";

    work w;
    int level;

    [[nodiscard]] index_t items() const { return w.blocks_per_head() * w.heads * w.all_problems(); }
    [[nodiscard]] static index_t scratch_bytes() { return index_t{sizeof(open_piece)}; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        part const here  = w.block_of(item);
        problem const& p = w.problems[here.problem];
        if (!w.searches(p, level)) { return; }
        open_piece& own = *t.scratch().template take<open_piece>(1);
        bool opened     = false;
        for (index_t first = 0; first < here.count; first += piece_tokens)
        {
            index_t const piece = here.piece + first / piece_tokens;
            seen_bins const seen{w, here, first};
            bool const some = seen.has(p.found) && (level != token_level || piece == p.piece);
            t.sync();
            if (level < piece_level) { seen.clear(t); }
            if (!some) { continue; }
            if (!opened)
            {
                own.open(t, w, here, w.set_of[here.problem * w.heads + here.head]);
                own.clear(t, own.sums);
            }
            opened = true;
            t.sync();
            with_count(own.rungs.count, [&](auto count) {
                add_thresholds<decltype(count)::value>(t, own, p, seen, first, seen.count, run_tokens, level);
            });
            if (level != piece_level) { continue; }
            t.sync();
            if (t.rank() == 0)
            {
                w.tied[(here.problem + 1) * w.pieces() - 1 - piece] = own.sums[0];
                own.sums[0]                                         = 0;
            }
        }
        if (!opened || level == piece_level) { return; }
        t.sync();
        std::int64_t* const to = w.fine_of(here.problem);
        index_t const bins     = level == token_level ? fine_bins : p.bins;
        for (index_t b = t.rank(); b < bins; b += t.size())
        {
            if (own.sums[b] != 0) { t.add_across(to + b, own.sums[b]); }
        }
        if (t.rank() == 0 && p.guessed) { t.add_across(to + fine_bins, own.sums[fine_bins]); }
    }
};

/// Finds the bin of the multiplier, and the bins of the next search; at the last two levels the first tie that does not
/// fit.
struct narrow
{
    static constexpr char const* name = "allocate_narrow";

    work w;
    int level;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        problem& p = w.problems[item];
        if (!w.searches(p, level)) { return; }
        bool const by_piece      = level == piece_level;
        std::int64_t* const sums = by_piece ? w.tied + item * w.pieces() : w.fine_of(item);
        index_t const bins       = by_piece ? w.pieces() : level == token_level ? fine_bins : p.bins;
        cut const at             = cut::find(t, sums, bins, p.guessed ? index_t{sums[fine_bins]} : 0, p.room);
        bool const wrong         = p.guessed && (at.bin == bins || (at.all <= p.room && p.multiplier > 0));
        t.sync();
        for (index_t b = t.rank(); b <= fine_bins && !by_piece; b += t.size()) { sums[b] = 0; } // for the next search
        if (t.rank() != 0) { return; }
        p.room -= wrong ? 0 : at.above;
        if (by_piece) { p.piece = bins - 1 - at.bin; }
        else if (level == token_level) { p.token = bins - 1 - at.bin; }
        else
        {
            p.found   = wrong ? -1 : at.bin;
            p.guessed = false;
            if (wrong) { p.set_bins(0, fine_bins << whole_shift); }
            else { p.set_bins(p.multiplier + (static_cast<std::uint32_t>(at.bin) << p.shift), index_t{1} << p.shift); }
        }
    }
};

} // namespace mdkv::inline MDKV_MACHINE::detail::dual
