/// \file choose.hpp: which rungs are open to each head: the widths of projections that heads pay for by use, decided inside the dual (arXiv 2603.20616, section 4.3).
#pragma once

#include <mdkv/allocate.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/detail/allocate/weigh.hpp>
#include <mdkv/detail/allocate/work.hpp>
#include <mdkv/detail/team.hpp>

#include <cstddef>
#include <cstdint>

namespace mdkv::detail::dual
{

/// The costs, and the sets of rungs that a head may have: without projections and with all where all heads pay, or those
/// up to each width.
[[nodiscard]] inline work arrange(rung_costs const& costs, allocate_options options, index_t heads, index_t tokens)
{
    work w{};
    w.costs              = costs;
    w.tokens             = tokens;
    w.spend_leftover     = options.spend_leftover;
    index_t const widest = costs.widest_projection();
    index_t const step   = costs.bytes[costs.size() - 1] - costs.bytes[0];
    w.unit               = step > 0 ? step : 1;
    w.choose             = options.charge == projection_charge::by_use && widest > 0 && heads * tokens > 0;
    auto const open      = [&](auto const& is_open, index_t charge) {
        std::uint16_t mask = 0;
        for (std::size_t r = 0; r < costs.size(); ++r)
        {
            if (is_open(r)) { mask = static_cast<std::uint16_t>(mask | 1 << r); }
        }
        if (mask == 0 || (w.sets > 0 && mask == w.set_open[w.sets - 1])) { return; }
        w.set_open[w.sets]     = mask;
        w.set_charge[w.sets++] = charge;
    };
    if (!w.choose)
    {
        open([&](std::size_t r) { return !costs.projected[r]; }, 0);
        open([](std::size_t) { return true; }, widest);
        return w;
    }
    for (index_t charge = -1; charge < widest;)
    {
        index_t next = widest;
        for (std::size_t r = 0; r < costs.size(); ++r)
        {
            if (costs.projection[r] > charge && costs.projection[r] < next) { next = costs.projection[r]; }
        }
        charge = next;
        open([&](std::size_t r) { return costs.projection[r] <= charge; }, charge);
    }
    return w;
}

/// Finds the first digit of the multiplier. Where heads choose: at each edge between bins every head takes the set of least
/// loss + multiplier * bytes, projections included. Candidates are the heads' choices at the edge where the limit binds,
/// those met while heads that choose otherwise at the edge before change one by one, and the same set for every head; each
/// one's loss at the limit is read off its curve. The best one of the former is solved, and all of the latter that may
/// lose less.
struct choose
{
    static constexpr char const* name = "allocate_choose";

    work w;

    [[nodiscard]] static index_t scratch_bytes() { return room{carver{}}.bytes; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t limit) const
    {
        limit_state& state           = w.states[limit];
        candidate_state* const found = w.found + limit * w.candidates;
        std::uint8_t* const set_of   = w.set_of + limit * w.candidates * w.heads;
        if (state.over()) { return; }
        room const own{t.scratch()};
        curve_reader const read{w, limit};
        if (!w.choose)
        {
            fill(t, own, read, set_of);
            outcome const only = weigh_up(t, own, read);
            if (t.rank() == 0) { enter(found[0], only); }
            return;
        }
        std::uint8_t* const low  = w.wanted + limit * 2 * w.heads;
        std::uint8_t* const high = low + w.heads;
        outcome best;
        index_t changed = 0;
        if (want(t, read, state, low))
        {
            fill(t, own, read, low);
            for (index_t n = 0; n <= w.heads; ++n)
            {
                if (n > 0 && low[n - 1] == high[n - 1]) { continue; }
                for (index_t b = t.rank(); n > 0 && b < read.edges; b += t.size())
                {
                    own.taken[b] += read.taken(n - 1, high[n - 1], b) - read.taken(n - 1, low[n - 1], b);
                    own.lost[b] += read.lost(n - 1, high[n - 1], b) - read.lost(n - 1, low[n - 1], b);
                }
                outcome const here = weigh_up(t, own, read);
                if (here.bin < 0 || here.lost >= best.lost) { continue; }
                best    = here;
                changed = n;
            }
            for (index_t h = t.rank(); h < w.heads; h += t.size()) { set_of[h] = h < changed ? high[h] : low[h]; }
        }
        if (t.rank() == 0)
        {
            enter(found[0], best);
            own.least[0] = best.least;
        }
        index_t most = best.bin >= 0 ? best.most : INT64_MAX;
        for (index_t k = 0; k < w.sets; ++k)
        {
            outcome alike;
            std::uint8_t* const all = set_of + (1 + k) * w.heads;
            for (index_t h = t.rank(); h < w.heads; h += t.size()) { all[h] = static_cast<std::uint8_t>(k); }
            t.sync();
            if (state.allows(k) && w.heads * w.least_bytes(k) <= state.limit)
            {
                fill(t, own, read, all);
                alike = weigh_up(t, own, read);
                most  = alike.most < most ? alike.most : most;
            }
            if (t.rank() != 0) { continue; }
            enter(found[1 + k], alike);
            own.least[1 + k] = alike.least;
        }
        t.sync();
        if (t.rank() == 0) { leave_best(found, own, set_of, most); }
    }

private:
    struct room
    {
        index_t* taken; // [coarse_bins]  bytes of a candidate at each edge
        index_t* lost;  // [coarse_bins]  its loss, in quanta
        index_t* least; // [1 + max_rungs]  lower bound on a candidate's loss
        index_t bytes;

        MDKV_HD explicit room(carver cut)
            : taken{cut.take<index_t>(coarse_bins)}
            , lost{cut.take<index_t>(coarse_bins)}
            , least{cut.take<index_t>(1 + index_t{max_rungs})}
            , bytes{cut.bytes()}
        {}
    };

    /// A candidate at the limit.
    struct outcome
    {
        index_t bin   = -1; ///< of the multiplier; negative where no multiplier fits
        index_t room  = 0;  ///< bytes left at the bin's upper edge
        index_t lost  = INT64_MAX;
        index_t least = INT64_MAX; ///< it loses no less
        index_t most  = INT64_MAX; ///< nor more
    };

    /// Bytes and losses of heads at the upper edge of a bin.
    struct curve_reader
    {
        work const& w;
        index_t first; ///< head of the limit
        index_t limit; ///< bytes
        index_t edges;
        double scale  = 0; ///< quanta in a loss
        double factor = 0; ///< the same, for multipliers and bytes
        double largest;

        MDKV_HD curve_reader(work const& all, index_t item)
            : w{all}
            , first{item * all.heads}
            , limit{all.states[item].limit}
            , edges{all.choose ? highest_bin(all.states[item]) + 1 : coarse_bins}
            , largest{0x1p60 / static_cast<double>(all.heads > 0 ? all.heads : 1)}
        {
            if (!all.choose) { return; }
            scale  = power_of_two(-all.quantum(edges - 1));
            factor = scale / static_cast<double>(all.unit);
        }

        [[nodiscard]] MDKV_HD index_t taken(index_t h, index_t set, index_t b) const
        {
            return w.least_bytes(set) + w.coarse_row(first + h, w.choose ? set : 0)[b];
        }
        [[nodiscard]] MDKV_HD index_t lost(index_t h, index_t set, index_t b) const
        {
            double offset = set == 0 ? 0.0 : w.row_offset[(first + h) * w.rows + set] * scale;
            offset        = offset < -largest ? -largest : offset < largest ? offset : largest;
            return static_cast<index_t>(offset) - w.coarse_row(first + h, set)[coarse_bins + b];
        }
        /// In quanta, rounded down.
        [[nodiscard]] MDKV_HD index_t price(index_t b, index_t bytes) const
        {
            return static_cast<index_t>(coarse_edge(b + 1) * static_cast<double>(bytes) * factor);
        }
        [[nodiscard]] MDKV_HD index_t value(index_t h, index_t set, index_t b) const
        {
            return lost(h, set, b) + price(b, taken(h, set, b));
        }
        [[nodiscard]] MDKV_HD index_t best_set(limit_state const& state, index_t h, index_t b) const
        {
            index_t best  = -1;
            index_t least = 0;
            for (index_t k = 0; k < w.sets; ++k)
            {
                if (!state.allows(k)) { continue; }
                index_t const here = value(h, k, b);
                if (best < 0 || here < least)
                {
                    best  = k;
                    least = here;
                }
            }
            return best;
        }
    };

    /// The curve of a candidate.
    template <team Team>
    MDKV_HD void fill(Team const& t, room const& own, curve_reader const& read, std::uint8_t const* set_of) const
    {
        for (index_t b = t.rank(); b < read.edges; b += t.size())
        {
            own.taken[b] = own.lost[b] = 0;
            for (index_t h = 0; h < w.heads; ++h)
            {
                own.taken[b] += read.taken(h, set_of[h], b);
                if (w.choose) { own.lost[b] += read.lost(h, set_of[h], b); }
            }
        }
    }

    template <team Team>
    [[nodiscard]] MDKV_HD outcome weigh_up(Team const& t, room const& own, curve_reader const& read) const
    {
        index_t fits = -1; // edges from here to the last
        for (index_t b = t.rank(); b < read.edges; b += t.size())
        {
            if (own.taken[b] <= read.limit && fits < 0) { fits = read.edges - b; }
        }
        fits = t.max(fits);
        t.sync();
        outcome here;
        if (fits < 0) { return here; }
        index_t const b = read.edges - fits;
        here.bin        = b;
        here.room       = read.limit - own.taken[b];
        here.most = here.lost = own.lost[b];
        if (w.choose)
        {
            here.least = own.lost[b] + read.price(b, own.taken[b]) - read.price(b, read.limit);
            if (b > 0)
            {
                // Between two edges, as if the loss were straight.
                double const way =
                    static_cast<double>(here.room) / static_cast<double>(own.taken[b - 1] - own.taken[b]);
                here.lost -= static_cast<index_t>(static_cast<double>(own.lost[b] - own.lost[b - 1]) * way);
                index_t const before =
                    own.lost[b - 1] + read.price(b - 1, own.taken[b - 1]) - read.price(b - 1, read.limit);
                here.least = before > here.least ? before : here.least;
            }
        }
        t.sync();
        return here;
    }

    /// The sets that heads want at the edge before the binding one, and at that one. Sets the limit's dual. Whether there
    /// is such an edge.
    template <team Team>
    [[nodiscard]] MDKV_HD bool want(
        Team const& t, curve_reader const& read, limit_state& state, std::uint8_t* wanted) const
    {
        index_t fits = -1;
        index_t dual = INT64_MIN;
        for (index_t b = t.rank(); b < read.edges; b += t.size())
        {
            index_t taken = 0;
            index_t value = 0;
            for (index_t h = 0; h < w.heads; ++h)
            {
                index_t const k = read.best_set(state, h, b);
                taken += read.taken(h, k, b);
                value += read.value(h, k, b);
            }
            value -= read.price(b, read.limit);
            dual = value > dual ? value : dual;
            if (taken <= read.limit && fits < 0) { fits = read.edges - b; }
        }
        fits = t.max(fits);
        dual = t.max(dual);
        if (t.rank() == 0)
        {
            state.dual   = dual;
            state.offset = 0;
            for (index_t h = 0; h < w.heads; ++h) { state.offset += w.row_offset[(read.first + h) * w.rows]; }
        }
        index_t const high = read.edges - fits;
        for (index_t h = t.rank(); fits >= 0 && h < w.heads; h += t.size())
        {
            wanted[h]           = static_cast<std::uint8_t>(read.best_set(state, h, high > 0 ? high - 1 : 0));
            wanted[w.heads + h] = static_cast<std::uint8_t>(read.best_set(state, h, high));
        }
        t.sync();
        return fits >= 0;
    }

    MDKV_HD static void enter(candidate_state& found, outcome const& at)
    {
        found.active = at.bin >= 0;
        found.prefix = at.bin >= 0 ? static_cast<std::uint32_t>(at.bin) : 0;
        found.room   = at.room;
    }

    /// Leaves out what cannot be best, and the first where all its heads have one set.
    MDKV_HD void leave_best(candidate_state* found, room const& own, std::uint8_t const* set_of, index_t most) const
    {
        for (index_t c = 0; c < w.candidates; ++c)
        {
            bool alike    = c == 0;
            index_t total = 0;
            for (index_t h = 0; h < w.heads; ++h)
            {
                std::uint8_t const set = set_of[c * w.heads + h];
                alike                  = alike && set == set_of[0];
                total += w.set_charge[set];
            }
            found[c].charged = total;
            found[c].active  = found[c].active && own.least[c] <= most && !(alike && found[1 + set_of[0]].active);
        }
    }
};

} // namespace mdkv::detail::dual
