/// \file assign.hpp: rungs at the multiplier, upgrades for the bytes that it leaves, and the report (arXiv 2603.20616, section 4.3).
#pragma once

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/detail/allocate/piece.hpp>
#include <mdkv/detail/allocate/work.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/team.hpp>

#include <cstddef>
#include <cstdint>

namespace MDKV_NAMESPACE::detail::dual
{

/// Bits of an upgrade that hold its token's number.
inline constexpr std::uint64_t token_bits = std::uint64_t{most_tokens} - 1;

/// The token of an upgrade.
[[nodiscard]] MDKV_HD inline piece token_of_upgrade(work const& w, index_t number, std::uint64_t upgrade)
{
    auto const token   = static_cast<index_t>(upgrade & token_bits);
    index_t const head = token / w.tokens;
    return {number, number / w.candidates, 0, head, w.own_head(head), token % w.tokens, 1};
}
/// Loss that a token of this rank saves at rung c instead of a.
[[nodiscard]] MDKV_HD inline double loss_saved(work const& w, piece const& token, index_t a, index_t c)
{
    float const* const loss = w.losses_of(token);
    return double{loss[a * w.loss_of_rung]} - double{loss[c * w.loss_of_rung]};
}

/// Gives every token its rung at the multiplier; ties that fit get their rung at a multiplier just below. Counts tokens by
/// rung, and finds the best upgrade of every pair of rungs.
struct assign
{
    static constexpr char const* name = "allocate_assign";

    work w;

    [[nodiscard]] index_t items() const { return w.own_pieces() * w.all_problems(); }
    [[nodiscard]] static index_t scratch_bytes() { return index_t{sizeof(open_piece)}; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        piece const range = w.own_piece(item);
        if (!w.problems[range.problem].active) { return; }
        open_piece& opened = open_piece::of(t, w, range);
        opened.clear(t, opened.losses, columns);
        choose_rungs(t, opened, range);
        double const loss = tree_sum(t, opened.losses);
        if (t.rank() == 0) { w.piece_losses[range.problem * w.pieces() + range.number] = loss; }
    }

private:
    /// The best upgrade of each pair of rungs in each lane of a member, and the first of the neighbours with its token.
    template <int Lanes>
    struct upgrades
    {
        lane_floats<Lanes> saved[max_rungs][max_rungs];
        lane_ints<Lanes> first[max_rungs][max_rungs];
    };

    template <team Team>
    MDKV_HD void choose_rungs(Team const& t, open_piece& opened, piece const& range) const
    {
        constexpr int lanes     = Team::register_lanes;
        using floats            = lane_floats<lanes>;
        using ints              = lane_ints<lanes>;
        problem const& p        = w.problems[range.problem];
        rung_table const& rungs = opened.rungs;
        float const multiplier  = float_of_bits(p.multiplier);
        float const below       = float_of_bits(p.multiplier == 0 ? 0U : p.multiplier - 1);
        index_t const ties      = range.number < p.tie_piece    ? range.count
                                  : range.number == p.tie_piece ? w.tie[2 * range.problem]
                                                                : 0;
        index_t const left      = w.spends(p) ? w.bytes_left(p) : 0;
        std::uint8_t* const to  = w.rungs_of(range);
        ints const one          = ints{} + 1;
        ints reached[max_rungs]{}; // tokens at a rung or above
        ints non_finite{};
        upgrades<lanes> best;
        for (std::size_t pair = 0; pair < max_rungs * rungs.count; ++pair)
        {
            best.saved[pair % max_rungs][pair / max_rungs] = floats{};
            best.first[pair % max_rungs][pair / max_rungs] = ints{};
        }
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
            index_t const tokens = range.count - i < lanes ? range.count - i : index_t{lanes};
            std::uint8_t bytes[std::size_t{lanes}];
            MDKV_FOR_LANES(l, lanes) { bytes[l] = static_cast<std::uint8_t>(numbers[l]); }
            if (tokens == lanes) { __builtin_memcpy(to + i, bytes, sizeof bytes); }
            for (int l = 0; tokens < lanes && l < tokens; ++l) { to[i + l] = bytes[l]; }
            if (left > 0) { find_upgrades(static_cast<std::int32_t>(i), some, rung, rungs, left, best); }
        }
        count_rungs(t, range, rungs, reached, non_finite);
        if (left > 0) { record_upgrades(t, range, rungs, best, left); }
    }

    /// Updates the best upgrade of each pair of rungs that fits into `left` bytes with these neighbouring tokens.
    template <int Lanes>
    MDKV_HD static void find_upgrades(std::int32_t first, neighbours<Lanes> const& some, lane_ints<Lanes> const& rung,
        rung_table const& rungs, index_t left, upgrades<Lanes>& best)
    {
        for (std::size_t c = 1; c < rungs.count; ++c)
        {
            for (std::size_t a = 0; a < c; ++a)
            {
                if (rungs.cost[c] - rungs.cost[a] > left) { continue; }
                auto& most        = best.saved[a][c];
                auto const saved  = (some.loss[a] - some.loss[c]) * rungs.inverse[a][c];
                auto const better = (rung == std::int32_t{rungs.index[a]}) & (saved > most);
                best.first[a][c]  = better ? lane_ints<Lanes>{} + first : best.first[a][c];
                most              = better ? saved : most;
            }
        }
    }

    template <team Team>
    MDKV_HD void count_rungs(Team const& t, piece const& range, rung_table const& rungs,
        lane_ints<Team::register_lanes> const (&reached)[max_rungs],
        lane_ints<Team::register_lanes> const& non_finite) const
    {
        auto const over_lanes = [&](lane_ints<Team::register_lanes> const& x) {
            index_t sum = 0;
            for (int l = 0; l < Team::register_lanes; ++l) { sum += lane(x, l); }
            return t.sum(sum);
        };
        index_t const unusable     = over_lanes(non_finite);
        index_t above              = 0;
        std::int64_t* const counts = w.counts + (range.problem * w.heads + range.head) * index_t{max_rungs};
        for (std::size_t j = rungs.count; j-- > 0;)
        {
            index_t const up_to = j == 0 ? range.count : over_lanes(reached[j]);
            if (t.rank() == 0 && up_to > above) { t.add_across(counts + rungs.index[j], up_to - above); }
            above = up_to;
        }
        if (t.rank() == 0 && unusable > 0) { t.add_across(w.non_finite + range.problem, unusable); }
    }

    /// An upgrade as a number: less for more loss saved, then for the earlier token.
    [[nodiscard]] MDKV_HD static std::uint64_t upgrade_of(float saved, index_t token)
    {
        return static_cast<std::uint64_t>(0x7fffffffU - bits_of_float(saved)) << 33U
               | static_cast<std::uint64_t>(token);
    }

    template <team Team>
    MDKV_HD void record_upgrades(Team const& t, piece const& range, rung_table const& rungs,
        upgrades<Team::register_lanes> const& best, index_t left) const
    {
        std::uint64_t* const to = w.upgrades + range.problem * w.rungs() * w.rungs();
        for (std::size_t c = 1; c < rungs.count; ++c)
        {
            for (std::size_t a = 0; a < c; ++a)
            {
                if (rungs.cost[c] - rungs.cost[a] > left) { continue; }
                // The largest complement stands for the most loss saved, by the first token.
                std::uint64_t largest = 0;
                for (int l = 0; l < Team::register_lanes; ++l)
                {
                    float const saved   = lane(best.saved[a][c], l);
                    index_t const token = lane(best.first[a][c], l) + l;
                    if (!(saved > 0)) { continue; }
                    std::uint64_t const own = ~upgrade_of(saved, range.head * w.tokens + range.first + token);
                    largest                 = own > largest ? own : largest;
                }
                largest = t.largest(largest);
                if (t.rank() == 0 && largest != 0)
                {
                    t.min_across(to + rungs.index[a] * w.rungs() + rungs.index[c], ~largest);
                }
            }
        }
    }
};

/// Over ranks: the loss that each best upgrade saves, by the rank of its token.
struct value_upgrades
{
    static constexpr char const* name = "allocate_value_upgrades";
    static constexpr int threads      = 64;

    work w;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t number) const
    {
        index_t const pairs = w.rungs() * w.rungs();
        for (index_t i = t.rank(); i < pairs; i += t.size())
        {
            std::uint64_t const best = w.upgrades[number * pairs + i];
            if (best == no_upgrade) { continue; }
            piece const token = token_of_upgrade(w, number, best);
            if (token.own_head >= 0)
            {
                w.gains[number * pairs + i] = loss_saved(w, token, i / w.rungs(), i % w.rungs());
            }
        }
    }
};

/// Applies the best upgrades that the leftover bytes pay for, at most one for each pair of rungs, and reports each limit's
/// best problem.
struct conclude
{
    static constexpr char const* name = "allocate_conclude";

    work w;

    [[nodiscard]] static index_t scratch_bytes() { return columns * index_t{sizeof(double)}; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t limit) const
    {
        double* const sums = t.scratch().template take<double>(columns);
        index_t best       = -1;
        for (index_t c = 0; c < w.candidates; ++c)
        {
            index_t const number = limit * w.candidates + c;
            problem& p           = w.problems[number];
            if (!p.active) { continue; }
            double const* const losses = w.piece_losses + number * w.pieces();
            double const loss          = ordered_sum(t, sums, w.pieces(), [&](index_t i) { return losses[i]; });
            if (t.rank() != 0) { continue; }
            write_report(number, p, loss);
            if (best < 0 || p.report.loss < w.problems[best].report.loss) { best = number; }
        }
        if (t.rank() != 0) { return; }
        w.best_problem[limit] = best;
        w.report[limit]       = w.problems[best].report;
    }

private:
    [[nodiscard]] MDKV_HD std::int64_t* counts(index_t number, index_t head) const
    {
        return w.counts + (number * w.heads + head) * index_t{max_rungs};
    }

    /// Applies upgrades within `left` bytes, and returns the loss that they save.
    MDKV_HD double apply_upgrades(index_t number, index_t left) const
    {
        double saved              = 0;
        std::uint64_t* const best = w.upgrades + number * w.rungs() * w.rungs();
        while (true)
        {
            index_t next = 0;
            for (index_t i = 1; i < w.rungs() * w.rungs(); ++i) { next = best[i] < best[next] ? i : next; }
            if (best[next] == no_upgrade) { return saved; }
            index_t const a   = next / w.rungs();
            index_t const c   = next % w.rungs();
            piece const token = token_of_upgrade(w, number, best[next]);
            index_t const bytes =
                w.costs.bytes[static_cast<std::size_t>(c)] - w.costs.bytes[static_cast<std::size_t>(a)];
            std::uint64_t const same = best[next] & token_bits;
            best[next]               = no_upgrade;
            if (bytes > left) { continue; }
            left -= bytes;
            for (index_t i = 0; i < w.rungs() * w.rungs(); ++i) // no second upgrade of the token
            {
                if ((best[i] & token_bits) == same) { best[i] = no_upgrade; }
            }
            if (token.own_head >= 0) { *w.rungs_of(token) = static_cast<std::uint8_t>(c); }
            saved += w.gains == nullptr ? loss_saved(w, token, a, c) : w.gains[number * w.rungs() * w.rungs() + next];
            --counts(number, token.head)[a];
            ++counts(number, token.head)[c];
        }
    }

    MDKV_HD void write_report(index_t number, problem const& p, double tied_loss) const
    {
        allocation& report = w.problems[number].report;
        report             = {};
        report.status      = !p.over() && w.non_finite[number] > 0 ? allocation_status::non_finite_loss : p.status;
        report.limit       = w.limit_values[number / w.candidates];
        report.loss        = tied_loss - apply_upgrades(number, w.bytes_left(p));
        for (index_t h = 0; h < w.heads && w.tokens > 0; ++h)
        {
            index_t widest = w.by_use ? 0 : w.set_at(w.set_of[number * w.heads + h]).charge;
            bool rotated   = false;
            for (std::size_t r = 0; r < w.costs.rungs; ++r)
            {
                index_t const tokens = counts(number, h)[r];
                report.tokens[r] += tokens;
                report.token_bytes += tokens * w.costs.bytes[r];
                widest  = tokens > 0 && w.costs.projection[r] > widest ? w.costs.projection[r] : widest;
                rotated = rotated || (tokens > 0 && w.costs.rotated[r]);
            }
            report.charged_bytes += widest + (rotated ? w.costs.channels : 0);
        }
        report.dual = report.loss;
        if (p.over()) { return; }
        float const m     = float_of_bits(p.multiplier == infinite_bits ? infinite_bits - 1 : p.multiplier);
        report.multiplier = double{m} / static_cast<double>(w.widest_step);
        // With or without ties, the rungs minimise loss + multiplier * bytes.
        double const own = tied_loss - rounded_product(report.multiplier, static_cast<double>(w.bytes_left(p)));
        double const bound =
            w.chooses() && p.status == allocation_status::optimal ? w.lower_bound[number / w.candidates] : own;
        report.dual = report.loss < bound ? report.loss : bound;
    }
};

/// Copies the rungs of each limit's best problem to the caller's view.
struct copy_best
{
    static constexpr char const* name = "allocate_copy_best";

    work w;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const own                = w.own_pieces();
        piece to                         = w.own_piece(item / own * w.candidates * own + item % own);
        piece from                       = to;
        from.problem                     = w.best_problem[to.limit];
        std::uint8_t const* const source = w.rungs_of(from);
        std::uint8_t* const target       = w.rungs_of(to);
        for (index_t i = t.rank(); source != target && i < to.count; i += t.size()) { target[i] = source[i]; }
    }
};

} // namespace MDKV_NAMESPACE::detail::dual
