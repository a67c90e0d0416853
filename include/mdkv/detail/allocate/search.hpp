/// \file search.hpp: allocate's jobs in their order: the search for the smallest multiplier that fits and for the first tie that does not, rungs, and the report (arXiv 2603.20616, sections 4.3, 4.4).
#pragma once

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/detail/allocate/work.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/ranks.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>

namespace MDKV_NAMESPACE::detail::dual
{

/// The first of n numbers that makes the sum exceed `left`; the last one if none does.
struct first_over
{
    index_t at;
    index_t before; ///< sum of the numbers before it

    /// \param x  x(i) is number i; not negative
    [[nodiscard]] MDKV_HD static first_over find(team auto const& t, index_t n, index_t left, auto const& x)
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
            index_t const step = opened.rungs.cost[j] - opened.rungs.cost[j - 1];
            for (int l = 0; l < lanes; ++l)
            {
                auto const at = static_cast<std::uint32_t>(lane(above[j], l));
                if (lane(hits[j], l) != 0) { body(i + l, at, step); }
            }
        }
    }
}

/// Begins the search of each limit; or again, without projected rungs, of limits that were solved with them. An item is a limit.
template <space S>
struct begin
{
    static constexpr char const* name = "allocate_begin";
    static constexpr int threads      = 32;

    work<S> w;
    bool again;

    MDKV_HD void operator()(team auto const& t, index_t limit) const
    {
        if (t.rank() != 0) { return; }
        index_t const bytes  = w.bytes_of(limit);
        index_t const bare   = w.least(false);
        limit_search& search = w.searches[limit];
        bool const pays      = w.least(true) <= bytes || bare < 0;
        bool const active    = !again || (search.projected && bare >= 0 && bare <= bytes);
        search               = {.active = active, .projected = !again && pays};
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

    MDKV_HD void operator()(team auto const& t, index_t item) const
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

    MDKV_HD void operator()(team auto const& t, index_t item) const
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

/// Gives every token its rung at the multiplier; ties that fit get their rung at a multiplier just below. Counts tokens by
/// rung, and adds up their losses.
template <space S>
struct assign
{
    static constexpr char const* name = "allocate_assign";

    work<S> w;
    bool stores; ///< false: rungs are only tried

    [[nodiscard]] index_t items() const { return w.own_pieces(); }
    [[nodiscard]] static index_t scratch_bytes() { return index_t{sizeof(open_piece)}; }

    MDKV_HD void operator()(team auto const& t, index_t item) const
    {
        piece const range          = w.own_piece(item);
        limit_search const& search = w.searches[range.limit];
        if (!search.active) { return; }
        open_piece& opened = open_piece::of(t, w, range);
        index_t ties       = range.number < search.tie_piece ? range.count : 0;
        if (range.number == search.tie_piece)
        {
            opened.clear(t, opened.sums, range.count);
            for_thresholds(t, opened, search,
                [&](index_t token, std::uint32_t, index_t step) { t.add(opened.sums + token, step); });
            t.sync();
            ties = first_over::find(t, range.count, search.left, [&](index_t i) { return opened.sums[i]; }).at;
        }
        opened.clear(t, opened.losses, columns);
        choose_rungs(t, opened, range, ties);
        double const loss = tree_sum(t, opened.losses);
        if (t.rank() == 0) { w.piece_losses[range.number] = loss; }
    }

private:
    /// \param ties  tokens before which ties take the costlier rung
    template <team Team>
    MDKV_HD void choose_rungs(Team const& t, open_piece& opened, piece const& range, index_t ties) const
    {
        constexpr int lanes      = Team::register_lanes;
        using floats             = lane_floats<lanes>;
        using ints               = lane_ints<lanes>;
        std::uint32_t const bits = w.searches[range.limit].multiplier;
        rung_table const& rungs  = opened.rungs;
        float const multiplier   = float_of_bits(bits);
        float const below        = float_of_bits(bits == 0 ? 0U : bits - 1);
        std::uint8_t* const to   = w.of.rungs_of(range.own) + range.first;
        ints const one           = ints{} + 1;
        ints reached[max_rungs]{}; // tokens at a rung or above
        ints non_finite{};
        neighbours<lanes> some;
        for (index_t i = t.rank() * lanes; i < range.count; i += t.size() * lanes)
        {
            some.read(opened, i);
            non_finite += some.non_finite;
            float bars[std::size_t{lanes}];
            MDKV_FOR_LANES(l, lanes) { bars[l] = i + l < ties ? below : multiplier; }
            auto const bar = load_lanes<floats>(bars);
            floats chosen  = some.loss[0];
            ints rung      = ints{} + std::int32_t{rungs.index[0]};
            for (std::size_t j = 1; j < rungs.count; ++j)
            {
                reached[j] += some.theta[j] > bar ? one : ints{};
                chosen = some.theta[j] > bar ? some.loss[j] : chosen;
                rung   = some.theta[j] > bar ? ints{} + std::int32_t{rungs.index[j]} : rung;
            }
            float losses[std::size_t{lanes}];
            std::int32_t numbers[std::size_t{lanes}];
            store_lanes(losses, chosen);
            __builtin_memcpy(numbers, &rung, sizeof numbers);
            double* const sums = opened.losses + (i & (columns - 1));
            MDKV_FOR_LANES(l, lanes) { sums[l] += double{losses[l]}; }
            if (!stores) { continue; }
            index_t const tokens = range.count - i < lanes ? range.count - i : index_t{lanes};
            std::uint8_t bytes[std::size_t{lanes}];
            MDKV_FOR_LANES(l, lanes) { bytes[l] = static_cast<std::uint8_t>(numbers[l]); }
            if (tokens == lanes) { __builtin_memcpy(to + i, bytes, sizeof bytes); }
            for (int l = 0; tokens < lanes && l < tokens; ++l) { to[i + l] = bytes[l]; }
        }
        auto const over_lanes = [&](ints const& x) {
            index_t sum = 0;
            for (int l = 0; l < lanes; ++l) { sum += lane(x, l); }
            return t.sum(sum);
        };
        index_t const unusable     = over_lanes(non_finite);
        index_t above              = 0;
        std::int64_t* const counts = w.counts + range.head * index_t{max_rungs};
        for (std::size_t j = rungs.count; j-- > 0;)
        {
            index_t const up_to = j == 0 ? range.count : over_lanes(reached[j]);
            if (t.rank() == 0 && up_to > above) { t.add_across(counts + rungs.index[j], up_to - above); }
            above = up_to;
        }
        if (t.rank() == 0 && unusable > 0) { t.add_across(w.non_finite + range.limit, unusable); }
    }
};

/// Reports on each limit that was searched; on a limit that was searched again, only if that loses less. An item is a limit.
template <space S>
struct conclude
{
    static constexpr char const* name = "allocate_conclude";

    work<S> w;
    bool again;

    [[nodiscard]] static index_t scratch_bytes() { return columns * index_t{sizeof(double)}; }

    MDKV_HD void operator()(team auto const& t, index_t limit) const
    {
        limit_search& search = w.searches[limit];
        if (!search.active) { return; }
        double const* const x = w.piece_losses + limit * w.pieces();
        double* const sums    = t.scratch().template take<double>(columns);
        double loss           = 0; // in the same order for every team
        for (index_t from = 0; from < w.pieces(); from += columns)
        {
            for (index_t c = t.rank(); c < columns; c += t.size())
            {
                sums[c] = from + c < w.pieces() ? x[from + c] : 0.0;
            }
            loss += tree_sum(t, sums);
        }
        t.sync(); // all have seen that the search was active
        if (t.rank() != 0) { return; }
        allocation found     = report_of(limit, search, loss);
        allocation& report   = w.report[limit];
        double const earlier = again && report.dual < found.dual ? report.dual : found.dual; // the bound of both
        search.active        = !again || found.loss < report.loss;
        report               = search.active ? found : report;
        report.dual          = earlier;
    }

private:
    [[nodiscard]] MDKV_HD allocation report_of(index_t limit, limit_search const& search, double loss) const
    {
        allocation report{.status = search.status, .loss = loss, .dual = loss, .limit = w.limit_values[limit]};
        index_t const paid = search.projected && w.of.longest() > 0 ? w.heads * w.charge : 0;
        index_t channels   = 0;
        for (index_t h = limit * w.heads; h < (limit + 1) * w.heads && w.of.longest() > 0; ++h)
        {
            bool rotated = false;
            for (std::size_t r = 0; r < w.costs.rungs; ++r)
            {
                index_t const tokens = w.counts[h * index_t{max_rungs} + static_cast<index_t>(r)];
                report.tokens[r] += tokens;
                report.token_bytes += tokens * w.costs.bytes[r];
                rotated = rotated || (tokens > 0 && w.costs.rotated[r]);
            }
            channels += rotated ? w.costs.channels : 0;
        }
        report.charged_bytes = paid + channels;
        if (search.over()) { return report; }
        if (w.non_finite[limit] > 0) { report.status = allocation_status::non_finite_loss; }
        float const m     = float_of_bits(search.multiplier == infinite_bits ? infinite_bits - 1 : search.multiplier);
        report.multiplier = double{m} / static_cast<double>(w.widest_step);
        // With or without ties, the rungs minimise loss + multiplier * bytes.
        index_t const left = w.bytes_of(limit) - paid - report.token_bytes;
        double const bound = fma(-report.multiplier, static_cast<double>(left), loss); // rounded alike on every machine
        report.dual        = loss < bound ? loss : bound;
        return report;
    }
};

/// The jobs of one search in their order.
/// \param words  of all sums, from `histogram` on
/// \param again  without projected rungs; only what loses less than before is kept
template <backend B>
void solve(B const& on, work<B::memory_space> const& w, index_t words, bool again)
{
    constexpr space S       = B::memory_space;
    ranks const* const with = w.share.with;
    run(on, fill<std::int64_t>{w.histogram, 0, words});
    run(on, begin<S>{w, again}, w.limits);
    for (bool const ties : {false, false, false, true}) // three levels
    {
        run(on, weigh<S>{w, ties});
        sum_over_ranks(on, with, ties ? w.ties : w.histogram, w.limits * (ties ? w.pieces() : bins));
        run(on, narrow<S>{w, ties}, w.limits);
    }
    run(on, assign<S>{w, !again});
    sum_over_ranks(on, with, w.counts, w.limits * (w.heads * index_t{max_rungs} + 1 + w.pieces()));
    run(on, conclude<S>{w, again}, w.limits);
    if (again) { run(on, assign<S>{w, true}); }
}

} // namespace MDKV_NAMESPACE::detail::dual
