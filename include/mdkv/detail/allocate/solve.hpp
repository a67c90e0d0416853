/// \file solve.hpp: allocate's jobs over limits: what a limit allows, the widths of projections, the multiplier, upgrades, the report (arXiv 2603.20616, sections 4.3, 4.4).
#pragma once

#include <mdkv/allocate.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/detail/allocate/choose.hpp>
#include <mdkv/detail/allocate/passes.hpp>
#include <mdkv/detail/allocate/weigh.hpp>
#include <mdkv/detail/allocate/work.hpp>
#include <mdkv/detail/team.hpp>

#include <cstddef>
#include <cstdint>

// At a multiplier m, with thresholds theta_j and steps s_j = c_j - c_(j-1) of each token,
//
//     bytes(m) = c_0 + sum_j s_j [theta_j > m]        loss(m) = L_0 - sum_j s_j theta_j [theta_j > m]
//
// so one histogram of thresholds, weighted with s_j and s_j theta_j, tells bytes and loss at every edge between bins: a
// bisection that tries a thousand multipliers in a pass. Three digits of a float's bits find the smallest one that fits.

namespace mdkv::detail::dual
{

/// Clears the histograms, and finds what each limit allows before any loss is read.
struct begin
{
    static constexpr char const* name       = "allocate_begin";
    static constexpr index_t words_per_item = 1 << 15;

    work w;

    [[nodiscard]] index_t words() const noexcept { return w.coarse_words() + w.problems() * fine_bins; }
    [[nodiscard]] index_t items() const noexcept
    {
        index_t const parts = (words() + words_per_item - 1) / words_per_item;
        return parts > w.limits ? parts : w.limits;
    }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const all = w.coarse_words() + w.problems() * fine_bins;
        index_t const end = (item + 1) * words_per_item < all ? (item + 1) * words_per_item : all;
        for (index_t i = item * words_per_item + t.rank(); i < end; i += t.size()) { w.coarse[i] = 0; }
        if (item >= w.limits) { return; }
        for (index_t b = t.rank(); b < w.candidates * pairs; b += t.size())
        {
            w.best[item * w.candidates * pairs + b] = ~std::uint64_t{0};
        }
        for (index_t h = t.rank(); h < w.candidates * w.heads; h += t.size())
        {
            w.unused_sets[item * w.candidates * w.heads + h] = w.sets - 1;
        }
        limit_state const state = allow(item);
        for (index_t h = t.rank(); h < w.heads; h += t.size())
        {
            w.set_of[item * w.candidates * w.heads + h] = state.set;
        }
        if (t.rank() != 0) { return; }
        w.states[item] = state;
        for (index_t c = 0; c < w.candidates; ++c)
        {
            candidate_state none{};
            none.active                      = c == 0;
            none.prefix                      = state.over() ? no_more : 0;
            none.charged                     = w.tokens == 0 ? 0 : w.heads * w.set_charge[state.set];
            w.found[item * w.candidates + c] = none;
        }
    }

private:
    [[nodiscard]] MDKV_HD limit_state allow(index_t item) const
    {
        index_t const limit = w.limit_values[item];
        limit_state state{};
        state.limit       = limit < 0 ? -1 : limit < w.most_bytes() ? limit : w.most_bytes();
        state.status      = allocation_status::optimal;
        state.unused_bins = coarse_bins - 1;
        if (!w.choose) // the first set is without projections, the second with all
        {
            bool const pays = w.sets > 1 && w.heads * w.least_bytes(1) <= state.limit;
            state.set       = pays ? 1 : 0;
            if (!pays && w.sets > 1) { state.status = allocation_status::unprojected_only; }
        }
        else
        {
            for (index_t k = 1; k < w.sets; ++k)
            {
                if (w.least_bytes(k) < w.least_bytes(state.set)) { state.set = static_cast<std::uint8_t>(k); }
            }
            index_t const others = (w.heads - 1) * w.least_bytes(state.set);
            bool projections     = false;
            for (index_t k = 0; k < w.sets; ++k)
            {
                if (others + w.least_bytes(k) > state.limit) { continue; }
                state.allowed = static_cast<std::uint16_t>(state.allowed | 1 << k);
                projections   = projections || w.set_charge[k] > 0;
            }
            if (!projections) { state.status = allocation_status::unprojected_only; }
        }
        if (w.heads * w.least_bytes(state.set) > state.limit) { state.status = allocation_status::over_limit; }
        return state;
    }
};

/// Finds the next digit of every multiplier: the first bin above which the thresholds fit.
struct narrow_down
{
    static constexpr char const* name = "allocate_narrow";

    work w;
    int level;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t problem) const
    {
        candidate_state& found = w.found[problem];
        if (!found.active || w.states[problem / w.candidates].over()) { return; }
        digit const d            = digit::of_level(level);
        std::int64_t* const sums = w.fine + problem * fine_bins;
        index_t const room       = found.room;
        index_t carried          = 0;
        index_t bin              = d.bins();
        index_t above            = 0;
        for (index_t from = 0; from < d.bins(); from += t.size())
        {
            index_t const b       = d.bins() - 1 - from - t.rank();
            index_t const bytes   = b >= 0 ? sums[b] : 0;
            auto const before     = t.prefix(bytes);
            index_t const exceeds = carried + before.before;
            carried += before.total;
            if (b < 0) { continue; }
            sums[b] = 0; // for the next digit
            if (exceeds <= room)
            {
                bin   = b;
                above = exceeds;
            }
        }
        bin   = d.bins() - t.max(d.bins() - bin);
        above = t.max(above);
        if (t.rank() != 0) { return; }
        found.prefix = found.prefix << d.width | static_cast<std::uint32_t>(bin);
        found.room   = room - above;
    }
};

/// Numbers the bytes of ties piece by piece.
struct spread
{
    static constexpr char const* name = "allocate_spread";

    work w;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t problem) const
    {
        if (!w.found[problem].active) { return; }
        index_t const first = problem * w.pieces();
        index_t carried     = 0;
        for (index_t from = 0; from < w.pieces(); from += t.size())
        {
            index_t const p = from + t.rank();
            auto const sums = t.prefix(p < w.pieces() ? w.tied[first + p] : index_t{0});
            if (p < w.pieces()) { w.before[first + p] = carried + sums.before; }
            carried += sums.total;
        }
    }
};

/// Buys the best upgrades that ties have left bytes for, one at most of each pair of rungs, and reports.
struct upgrade
{
    static constexpr char const* name = "allocate_upgrade";

    work w;

    [[nodiscard]] static index_t scratch_bytes()
    {
        carver cut;
        static_cast<void>(cut.take<double>(columns));
        return cut.bytes();
    }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t problem) const
    {
        candidate_state& found = w.found[problem];
        if (!found.active) { return; }
        index_t const first = problem * w.pieces();
        auto cut            = t.scratch();
        double const loss   = ordered_sum(
            t, cut.template take<double>(columns), w.pieces(), [&](index_t p) { return w.losses[first + p]; });
        if (t.rank() != 0) { return; }
        double const saved = buy(problem, found);
        // Heads that choose pay for what they use in the end.
        for (index_t h = 0; h < w.heads && w.choose; ++h)
        {
            index_t const unused = w.unused_sets[problem * w.heads + h];
            found.charged        = (h == 0 ? 0 : found.charged) + w.set_charge[w.sets - 1 - unused];
        }
        tell(problem / w.candidates, found, loss, saved);
    }

private:
    /// Returns what the upgrades save.
    MDKV_HD double buy(index_t problem, candidate_state& found) const
    {
        double saved              = 0;
        index_t left              = found.room - found.given;
        std::uint64_t* const best = w.best + problem * pairs;
        while (true)
        {
            index_t next = 0;
            for (index_t p = 1; p < pairs; ++p) { next = best[p] < best[next] ? p : next; }
            if (best[next] == ~std::uint64_t{0}) { return saved; }
            auto const a        = static_cast<std::size_t>(next) / max_rungs;
            auto const c        = static_cast<std::size_t>(next) % max_rungs;
            auto const token    = static_cast<index_t>(best[next] & static_cast<std::uint64_t>(most_tokens - 1));
            index_t const bytes = w.costs.bytes[c] - w.costs.bytes[a];
            index_t const head  = token / w.tokens;
            index_t const at    = token % w.tokens;
            best[next]          = ~std::uint64_t{0};
            std::uint8_t& rung  = *w.rungs_at(problem, head, at);
            if (bytes > left || rung != a) { continue; }
            left -= bytes;
            rung              = static_cast<std::uint8_t>(c);
            float const* loss = w.loss + (problem / w.candidates * w.heads + head) * w.loss_of_head + at;
            saved += double{loss[static_cast<index_t>(a) * w.loss_of_rung]}
                     - double{loss[static_cast<index_t>(c) * w.loss_of_rung]};
            --found.tokens[a];
            ++found.tokens[c];
            index_t& unused = w.unused_sets[problem * w.heads + head];
            if (w.choose && w.sets - 1 - w.set_with(c) < unused) { unused = w.sets - 1 - w.set_with(c); }
        }
    }

    MDKV_HD void tell(index_t limit, candidate_state& found, double tied_loss, double saved) const
    {
        limit_state const& state = w.states[limit];
        allocation& report       = found.report;
        report.status            = state.status;
        if (!state.over() && found.silent > 0) { report.status = allocation_status::non_finite_loss; }
        if (!state.over())
        {
            float const m     = float_of(found.prefix == no_more ? no_more - 1 : found.prefix);
            report.multiplier = double{m} / static_cast<double>(w.unit);
        }
        double const loss    = tied_loss - saved;
        report.loss          = loss;
        report.limit         = w.limit_values[limit];
        report.charged_bytes = found.charged;
        for (std::size_t r = 0; r < w.costs.rungs; ++r)
        {
            report.tokens[r] = found.tokens[r];
            report.token_bytes += found.tokens[r] * w.costs.bytes[r];
        }
        // With ties or without them, the rungs are of least loss + multiplier * bytes.
        double bound = tied_loss - rounded_product(report.multiplier, static_cast<double>(found.room - found.given));
        if (w.choose && (state.allowed & (state.allowed - 1)) != 0)
        {
            bound = state.offset + static_cast<double>(state.dual) * power_of_two(w.quantum(highest_bin(state)));
        }
        report.dual = state.over() || loss < bound ? loss : bound;
    }
};

/// Takes the best of each limit's candidates.
struct pick
{
    static constexpr char const* name = "allocate_pick";

    work w;

    [[nodiscard]] index_t per_limit() const { return w.candidates == 1 || w.pieces() == 0 ? 1 : w.pieces(); }
    [[nodiscard]] index_t items() const { return w.limits * per_limit(); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const shares = w.candidates == 1 || w.pieces() == 0 ? 1 : w.pieces();
        index_t const limit  = item / shares;
        index_t const piece  = item % shares;
        index_t const first  = limit * w.candidates;
        index_t best         = first;
        while (!w.found[best].active) { ++best; }
        for (index_t c = best + 1; c < first + w.candidates; ++c)
        {
            if (w.found[c].active && w.found[c].report.loss < w.found[best].report.loss) { best = c; }
        }
        if (piece == 0 && t.rank() == 0) { w.report[limit] = w.found[best].report; }
        if (best == first) { return; }
        index_t const at               = piece % w.pieces_per_head * piece_tokens;
        index_t const head             = piece / w.pieces_per_head;
        index_t const count            = w.tokens - at < piece_tokens ? w.tokens - at : piece_tokens;
        std::uint8_t const* const from = w.rungs_at(best, head, at);
        std::uint8_t* const to         = w.rungs_at(first, head, at);
        for (index_t i = t.rank(); i < count; i += t.size()) { to[i] = from[i]; }
    }
};

/// The place where histograms of the limit's other tokens are added (heads on other ranks, other layers): `weigh` has
/// filled `sums`, and the jobs that follow read nothing else about tokens until `assign`. Where heads choose their sets a
/// row is one head's, and ranks fill in the rows of theirs; `limit_state::unused_bins` is then the least of all ranks.
/// Adds nothing: all heads of a limit are here.
template <backend B>
void combine(B const&, std::int64_t* /*sums*/, index_t /*count*/)
{}

/// Solves all limits. Thirteen launches on a GPU, whatever the losses.
template <backend B>
void solve(B const& on, work const& w)
{
    begin const first{w};
    run(on, first, first.items());
    weigh const coarse{w, 0};
    run(on, coarse, coarse.items());
    combine(on, w.coarse, w.coarse_words());
    run(on, curves{w}, w.limits * w.heads * w.rows);
    run(on, choose{w}, w.limits);
    for (int level = 1; level < 3; ++level)
    {
        weigh const fine{w, level};
        run(on, fine, fine.items());
        combine(on, w.fine, w.problems() * fine_bins);
        run(on, narrow_down{w, level}, w.problems());
    }
    assign const rungs{w};
    run(on, rungs, rungs.items());
    run(on, spread{w}, w.problems());
    settle const ties{w};
    run(on, ties, ties.items());
    run(on, upgrade{w}, w.problems());
    pick const last{w};
    run(on, last, last.items());
}

/// Takes the jobs' memory and solves. What `mdkv::allocate` is on every backend.
template <backend B>
void allocate_stage(B const& on, in_view<float, 3, B> loss, rung_costs const& costs, in_view<index_t, 1, B> limits,
    allocate_options options, out_view<std::uint8_t, 2, B> rung, out_view<allocation, 1, B> report)
{
    work w            = arrange(costs, options, loss.extent(0), loss.extent(2));
    index_t const all = loss.extent(0);
    w.limits          = limits.extent(0);
    w.heads           = w.limits == 1 ? all : 1;
    w.pieces_per_head = (w.tokens + piece_tokens - 1) / piece_tokens;
    w.rows            = w.choose ? w.sets : 1;
    w.candidates      = w.choose ? 1 + w.sets : 1;
    w.loss            = loss.data_handle();
    w.loss_of_head    = loss.stride(0);
    w.loss_of_rung    = loss.stride(1);
    w.limit_values    = limits.data_handle();
    w.rung            = rung.data_handle();
    w.rung_of_head    = rung.stride(0);
    w.report          = report.data_handle();
    // Every sum of bytes is at most this one.
    index_t const most = checked_multiply(checked_multiply(all, w.tokens), w.costs.bytes[w.costs.rungs - 1]);
    static_cast<void>(checked_add(most, checked_multiply(all, w.costs.widest_projection())));
    expects(all * w.tokens < most_tokens, "allocate: loss has ", all, " heads of ", w.tokens, " tokens; fewer than ",
        most_tokens, " in all are served");

    index_t const problems = w.problems();
    index_t const rows     = w.limits * w.heads * w.rows;
    workspace::frame frame{*on.scratch, "allocate"};
    w.coarse      = frame.template take<std::int64_t>(w.coarse_words() + problems * fine_bins);
    w.fine        = w.coarse == nullptr ? nullptr : w.coarse + w.coarse_words(); // null in a dry run
    w.states      = frame.template take<limit_state>(w.limits);
    w.found       = frame.template take<candidate_state>(problems);
    w.set_of      = frame.template take<std::uint8_t>(problems * w.heads);
    w.unused_sets = frame.template take<index_t>(problems * w.heads);
    w.tied        = frame.template take<index_t>(problems * w.pieces());
    w.before      = frame.template take<index_t>(problems * w.pieces());
    w.losses      = frame.template take<double>(problems * w.pieces());
    w.best        = frame.template take<std::uint64_t>(problems * pairs);
    if (w.choose)
    {
        w.offsets    = frame.template take<double>(w.limits * w.pieces() * w.rows);
        w.row_offset = frame.template take<double>(rows);
        w.wanted     = frame.template take<std::uint8_t>(2 * w.limits * w.heads);
        w.codes      = frame.template take<std::uint8_t>(w.limits * w.sets * w.heads * w.tokens);
    }
    static_cast<void>(frame.ready());
    solve(on, w);
}

} // namespace mdkv::detail::dual
