/// \file search.hpp: the search of the smallest multiplier that fits, and of the first tie that does not, by histograms of thresholds (arXiv 2603.20616, section 4.3).
#pragma once

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
// so one histogram of thresholds, weighted with s_j, tells the bytes at every edge between bins: a bisection that tries
// two thousand multipliers in a pass. A histogram of few tokens tells where the bins of the first pass over all should
// lie, so that few thresholds fall into them; where it is wrong, the passes that follow begin anew.

namespace mdkv::detail::dual
{

/// Clears the histograms, and finds what each limit allows before any loss is read.
struct begin
{
    static constexpr char const* name       = "allocate_begin";
    static constexpr index_t words_per_item = 1 << 15;

    work w;
    index_t words; ///< from `fine` on

    [[nodiscard]] index_t items() const noexcept
    {
        index_t const parts = (words + words_per_item - 1) / words_per_item;
        return parts > w.limits ? parts : w.limits;
    }

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
        first.multiplier         = first.over() ? no_more : 0;
        first.shift              = whole_shift;
        first.bins               = fine_bins;
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
    }
};

/// Adds up the bytes of the steps whose threshold lies in each of a problem's bins.
struct weigh
{
    static constexpr char const* name = "allocate_weigh";

    work w;
    bool sample; ///< of a part of the tokens

    [[nodiscard]] index_t items() const
    {
        return sample && !w.samples() ? 0 : w.blocks_per_head() * w.heads * w.all_problems();
    }
    [[nodiscard]] static index_t scratch_bytes() { return index_t{sizeof(open_piece)}; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        part const here  = w.block_of(item);
        problem const& p = w.problems[here.problem];
        if (!w.searches(p)) { return; }
        open_piece& own = *t.scratch().template take<open_piece>(1);
        bool opened     = false;
        for (index_t first = 0; first < here.count; first += piece_tokens)
        {
            seen_bins const seen{w.rungs_of(here) + first, w.rungs_of(here) + here.count};
            bool const some = seen.has(p.found);
            t.sync();
            seen.clear(t);
            if (!some) { continue; }
            if (!opened)
            {
                own.open(t, w, here, w.set_of[here.problem * w.heads + here.head]);
                own.clear_sums(t);
            }
            opened = true;
            t.sync();
            with_count(own.rungs.count, [&](auto count) { go<decltype(count)::value>(t, own, first, seen, p); });
        }
        if (!opened) { return; }
        t.sync();
        std::int64_t* const to = w.fine_of(here.problem);
        for (index_t b = t.rank(); b < p.bins; b += t.size())
        {
            if (own.sums[b] != 0) { t.add_across(to + b, own.sums[b]); }
        }
        if (t.rank() == 0 && p.guessed) { t.add_across(to + fine_bins, own.sums[fine_bins]); }
    }

private:
    /// \param start  of the piece in the block
    template <std::size_t Count, team Team>
    MDKV_HD void go(Team const& t, open_piece& own, index_t start, seen_bins const& seen, problem const& p) const
    {
        constexpr int lanes     = Team::register_lanes;
        using ints              = lane_ints<lanes>;
        std::size_t const count = Count == run_time ? own.rungs.count : Count;
        int const shift         = p.shift;
        ints const first        = ints{} + static_cast<std::int32_t>(p.multiplier);
        ints const last         = first + static_cast<std::int32_t>((static_cast<std::uint32_t>(p.bins) << shift) - 1);
        ints const one          = ints{} + 1;
        ints const no_bin       = ints{} + static_cast<std::int32_t>(fine_bins + 1);
        neighbours<lanes, Count> group;
        ints above[neighbours<lanes, Count>::capacity]{};
        index_t const end = sample ? tokens_in_sample(seen.count) : seen.count;
        for (index_t n = t.rank() * lanes; n < end; n += t.size() * lanes)
        {
            group.read(own, start + (sample ? n / sample_run * (sampled * sample_run) + n % sample_run : n));
            ints any{};
            for_rungs<Count>(1, count, [&](std::size_t j) {
                ints const bits = bits_as<ints>(group.steps.theta[j]);
                above[j] += bits > last ? one : ints{};
                any |= bits >= first ? (bits > last ? ints{} : one) : ints{};
            });
            std::uint64_t const lanes_hit = lane_word<lanes>(any);
            if (lanes_hit == 0) { continue; }
            std::int32_t bin[neighbours<lanes, Count>::capacity][lanes]; // a look at every lane would be slower
            for_rungs<Count>(1, count, [&](std::size_t j) {
                ints const bits   = bits_as<ints>(group.steps.theta[j]);
                ints const inside = bits >= first ? (bits > last ? no_bin : (bits - first) >> shift) : no_bin;
                __builtin_memcpy(bin[j], &inside, sizeof inside);
            });
            for_lanes_in(lanes_hit, [&](int l) {
                for_rungs<Count>(1, count, [&](std::size_t j) {
                    t.add(own.sums + bin[j][l], own.step(j));
                    seen.note(bin[j][l]);
                });
            });
        }
        for_rungs<Count>(1, count, [&](std::size_t j) {
            for_lanes<lanes>(above[j], [&](int, std::int32_t n) { t.add(own.sums + fine_bins, n * own.step(j)); });
        });
    }
};

/// The lowest bin above which all fits, and what lies above it; `bins` where nothing fits.
struct cut
{
    index_t bin;
    index_t above;
    index_t all;

    /// \param carried  what lies above all bins
    template <team Team>
    [[nodiscard]] MDKV_HD static cut find(
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
        here.bin   = bins - t.max(bins - here.bin);
        here.above = t.max(here.above);
        return here;
    }
};

/// Finds which of its bins the multiplier is in, and what bins the next search has.
struct narrow
{
    static constexpr char const* name = "allocate_narrow";

    work w;
    bool sample;

    [[nodiscard]] index_t items() const { return sample && !w.samples() ? 0 : w.all_problems(); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        problem& p = w.problems[item];
        if (!w.searches(p)) { return; }
        std::int64_t* const sums = w.fine_of(item);
        if (sample) { guess(t, p, sums); }
        else
        {
            cut const at     = cut::find(t, sums, p.bins, p.guessed ? index_t{sums[fine_bins]} : 0, p.room);
            bool const wrong = p.guessed && (at.bin == p.bins || (at.all <= p.room && p.multiplier > 0));
            t.sync();
            if (t.rank() == 0)
            {
                p.room -= wrong ? 0 : at.above;
                p.found = wrong ? -1 : at.bin;
                if (wrong) { p.set_bins(0, index_t{fine_bins} << whole_shift); }
                else
                {
                    p.set_bins(p.multiplier + (static_cast<std::uint32_t>(at.bin) << p.shift), index_t{1} << p.shift);
                }
                p.guessed = false;
            }
        }
        for (index_t b = t.rank(); b <= fine_bins; b += t.size()) { sums[b] = 0; }
    }

private:
    /// The sum over a sample is off by a few of its standard deviations, of which sqrt(bytes of all * most of one) is
    /// more than one where tokens are as good as independent. Neighbours are not.
    template <team Team>
    MDKV_HD void guess(Team const& t, problem& p, std::int64_t const* sums) const
    {
        index_t const rest  = w.tokens % piece_tokens;
        index_t const taken = w.tokens / piece_tokens * tokens_in_sample(piece_tokens) + tokens_in_sample(rest);
        double const room   = static_cast<double>(p.room) * static_cast<double>(taken) / static_cast<double>(w.tokens);
        double const slack  = 4 * square_root(room * static_cast<double>(w.unit));
        index_t const low   = edge(t, p, sums, static_cast<index_t>(room + slack));
        index_t const high  = edge(t, p, sums, static_cast<index_t>(room - slack)) + 1;
        t.sync();
        if (t.rank() != 0) { return; }
        p.guessed = true;
        p.set_bins(static_cast<std::uint32_t>(low), high - low);
    }

    /// About the bits of the threshold above which there are so many bytes.
    template <team Team>
    [[nodiscard]] MDKV_HD static index_t edge(Team const& t, problem const& p, std::int64_t const* sums, index_t room)
    {
        cut const at = cut::find(t, sums, p.bins, 0, room);
        if (at.bin == p.bins) { return (p.bins << whole_shift) - 1; }
        double const part =
            sums[at.bin] > 0 ? static_cast<double>(room - at.above) / static_cast<double>(sums[at.bin]) : 0;
        return static_cast<index_t>((static_cast<double>(at.bin + 1) - (part < 1 ? part : 1)) * (1 << whole_shift));
    }
};

/// Adds up the bytes that tokens take of the steps whose threshold is the multiplier.
/// \param place  of a token of the piece, in own.sums
template <team Team, class Place>
MDKV_HD void weigh_tokens_tied(Team const& t, open_piece& own, std::uint32_t multiplier, Place const& place)
{
    with_count(own.rungs.count, [&](auto constant) {
        constexpr int lanes         = Team::register_lanes;
        constexpr std::size_t Count = decltype(constant)::value;
        std::size_t const count     = Count == run_time ? own.rungs.count : Count;
        using ints                  = lane_ints<lanes>;
        neighbours<lanes, Count> group;
        for (index_t i = t.rank() * lanes; i < own.count; i += t.size() * lanes)
        {
            group.read(own, i);
            for_rungs<Count>(1, count, [&](std::size_t j) {
                index_t const step = own.step(j);
                ints const bits    = bits_as<ints>(group.steps.theta[j]);
                ints const tied    = bits == static_cast<std::int32_t>(multiplier) ? ints{} + 1 : ints{};
                for_lanes_in(lane_word<lanes>(tied), [&](int l) { t.add(own.sums + place(i + l), step); });
            });
        }
    });
    t.sync();
}

/// The bytes of each piece's ties.
struct weigh_ties
{
    static constexpr char const* name = "allocate_weigh_ties";

    work w;

    [[nodiscard]] index_t items() const { return w.pieces() * w.all_problems(); }
    [[nodiscard]] static index_t scratch_bytes() { return index_t{sizeof(open_piece)}; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        part const here  = w.part_of(item);
        problem const& p = w.problems[here.problem];
        if (!w.spends(p) || !seen_bins{w.rungs_of(here), w.rungs_of(here) + here.count}.has(p.found)) { return; }
        open_piece& own = *t.scratch().template take<open_piece>(1);
        own.open(t, w, here, w.set_of[here.problem * w.heads + here.head]);
        own.clear_sums(t);
        weigh_tokens_tied(t, own, p.multiplier, [](index_t) { return index_t{0}; });
        if (t.rank() == 0) { w.tied[(here.problem + 1) * w.pieces() - 1 - here.piece] = own.sums[0]; }
    }
};

/// Finds the first tie that there are no bytes for.
struct break_ties
{
    static constexpr char const* name = "allocate_break_ties";

    work w;

    [[nodiscard]] static index_t scratch_bytes() { return index_t{sizeof(open_piece)}; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        problem& p = w.problems[item];
        if (!w.spends(p)) { return; }
        index_t const pieces = w.pieces();
        cut const of_pieces  = cut::find(t, w.tied + item * pieces, pieces, 0, p.room);
        index_t const piece  = pieces - 1 - of_pieces.bin;
        part const here      = w.part_of(item * pieces + piece);
        open_piece& own      = *t.scratch().template take<open_piece>(1);
        own.open(t, w, here, w.set_of[item * w.heads + here.head]);
        own.clear_sums(t);
        weigh_tokens_tied(t, own, p.multiplier, [](index_t i) { return fine_bins - 1 - i; });
        cut const of_tokens = cut::find(t, own.sums, fine_bins, 0, p.room - of_pieces.above);
        t.sync();
        if (t.rank() != 0) { return; }
        p.piece = piece;
        p.token = fine_bins - 1 - of_tokens.bin;
        p.room -= of_pieces.above + of_tokens.above;
    }
};

} // namespace mdkv::detail::dual
