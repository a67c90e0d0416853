/// \file assign.hpp: rungs at the multiplier, upgrades for the bytes that it leaves, and the report (arXiv 2603.20616, section 4.3).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/detail/allocate/piece.hpp>
#include <mdkv/detail/allocate/work.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/team.hpp>

#include <cstddef>
#include <cstdint>

namespace mdkv::inline MDKV_MACHINE::detail::dual
{

/// Gives every token its rung at the multiplier; ties that fit get their rung at a multiplier just below. Counts tokens by
/// rung, and finds the best upgrade of every pair of rungs.
struct assign
{
    static constexpr char const* name = "allocate_assign";

    work w;

    [[nodiscard]] index_t items() const { return w.pieces() * w.all_problems(); }
    [[nodiscard]] static index_t scratch_bytes() { return index_t{sizeof(open_piece)}; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        part const here = w.part_of(item);
        if (!w.problems[here.problem].active) { return; }
        open_piece& own = *t.scratch().template take<open_piece>(1);
        own.open(t, w, here, w.set_of[here.problem * w.heads + here.head]);
        own.clear(t, own.losses);
        with_count(own.rungs.count, [&](auto count) { go<decltype(count)::value>(t, own, here); });
        double const loss = tree_sum(t, own.losses);
        if (t.rank() == 0) { w.losses[item] = loss; }
    }

private:
    /// The best upgrade that one member has seen of each pair of rungs.
    template <std::size_t Rungs>
    struct upgrades
    {
        float saved[Rungs][Rungs];
        index_t token[Rungs][Rungs];
    };

    template <std::size_t Count, team Team>
    MDKV_HD void go(Team const& t, open_piece& own, part const& here) const
    {
        constexpr int lanes            = Team::register_lanes;
        constexpr std::size_t capacity = token_thresholds<lanes, Count>::capacity;
        using floats                   = lane_floats<lanes>;
        using ints                     = lane_ints<lanes>;
        problem& p                     = w.problems[here.problem];
        rung_table const& rungs        = own.rungs;
        std::size_t const count        = Count == run_time ? rungs.count : Count;
        floats const multiplier        = floats{} + bits_as<float>(p.multiplier);
        floats const below             = floats{} + bits_as<float>(p.multiplier == 0 ? 0U : p.multiplier - 1);
        index_t const ties             = here.piece < p.piece ? here.count : here.piece == p.piece ? p.token : 0;
        index_t const left             = w.spends(p) ? p.room : 0;
        std::uint8_t* const to         = w.rungs_of(here);
        ints const one                 = ints{} + 1;
        ints reached[capacity]{}; // tokens at a rung or above
        ints silent{};
        upgrades<capacity> best{};
        neighbours<lanes, Count> group;
        for (index_t i = t.rank() * lanes; i < here.count; i += t.size() * lanes)
        {
            group.read(own, i);
            floats bar = i + lanes <= ties ? below : multiplier;
            if (i < ties && i + lanes > ties)
            {
                float bars[std::size_t{lanes}];
                for (int l = 0; l < lanes; ++l) { bars[l] = bits_as<float>(p.multiplier - (i + l < ties ? 1U : 0U)); }
                __builtin_memcpy(&bar, bars, sizeof bar);
            }
            floats chosen = group.loss[0];
            ints rung     = ints{} + std::int32_t{rungs.index[0]};
            silent += group.silence == 0.0F ? ints{} : one;
            for_rungs<Count>(1, count, [&](std::size_t j) {
                floats const theta = group.steps.theta[j];
                chosen             = theta > bar ? group.loss[j] : chosen;
                rung               = theta > bar ? ints{} + std::int32_t{rungs.index[j]} : rung;
                reached[j] += theta > bar ? one : ints{};
            });
            double* const sums = own.losses + (i & (columns - 1));
            float losses[std::size_t{lanes}];
            __builtin_memcpy(losses, &chosen, sizeof chosen);
            MDKV_FOR_LANES(l, lanes)
            {
                sums[l] += double{losses[l]};
            }
            store_bytes<lanes>(rung, to + i, here.count - i);
            if (left > 0) { look<Count, lanes>(i, group.loss, rung, rungs, left, best); }
        }
        note<Count>(t, here, rungs, reached, silent, best, left);
    }

    /// Updates the best upgrade of each pair of rungs that fits into `left` bytes with these neighbouring tokens.
    template <std::size_t Count, int Lanes, std::size_t Rungs>
    [[gnu::always_inline]] MDKV_HD static void look(index_t first, lane_floats<Lanes> const (&loss)[Rungs],
        lane_ints<Lanes> const& rung, rung_table const& rungs, index_t left, upgrades<Rungs>& best)
    {
        using ints               = lane_ints<Lanes>;
        std::size_t const count  = Count == run_time ? rungs.count : Count;
        auto const for_all_pairs = [&](auto const& body) {
            for_rungs<Count>(1, count, [&](std::size_t c) {
                for_rungs<Count>(0, c, [&](std::size_t a) {
                    if (rungs.cost[c] - rungs.cost[a] > left) { return; }
                    auto const saved = (loss[a] - loss[c]) * rungs.inverse[a][c];
                    ints const more  = saved > best.saved[a][c] ? ints{} + 1 : ints{};
                    body(a, c, saved, rung == std::int32_t{rungs.index[a]} ? more : ints{});
                });
            });
        };
        ints any{};
        for_all_pairs([&](std::size_t, std::size_t, auto const&, ints const& more) { any |= more; });
        if (lane_word<Lanes>(any) == 0) { return; }
        for_all_pairs([&](std::size_t a, std::size_t c, auto const& saved, ints const& more) {
            float of[std::size_t{Lanes}];
            __builtin_memcpy(of, &saved, sizeof of);
            for_lanes_in(lane_word<Lanes>(more), [&](int l) {
                if (!(of[l] > best.saved[a][c])) { return; }
                best.saved[a][c] = of[l];
                best.token[a][c] = first + l;
            });
        });
    }

    /// An upgrade as a number: less for more loss saved, then for the earlier token.
    [[nodiscard]] MDKV_HD static std::uint64_t upgrade_of(float saved, index_t token)
    {
        return static_cast<std::uint64_t>(0x7fffffffU - bits_as<std::uint32_t>(saved)) << 33U
               | static_cast<std::uint64_t>(token);
    }

    template <std::size_t Count, team Team, std::size_t Rungs>
    MDKV_HD void note(Team const& t, part const& here, rung_table const& rungs,
        lane_ints<Team::register_lanes> const (&reached)[Rungs], lane_ints<Team::register_lanes> const& silent,
        upgrades<Rungs> const& best, index_t left) const
    {
        auto const over_lanes = [&](lane_ints<Team::register_lanes> const& x) {
            std::int32_t of[Team::register_lanes];
            __builtin_memcpy(of, &x, sizeof of);
            index_t sum = 0;
            for (std::int32_t const n : of) { sum += n; }
            return t.sum(sum);
        };
        std::size_t const count  = Count == run_time ? rungs.count : Count;
        index_t const none       = over_lanes(silent);
        index_t above            = 0;
        std::int64_t* const told = w.counts + (here.problem * w.heads + here.head) * index_t{max_rungs};
        for (std::size_t j = count; j-- > 0;)
        {
            index_t const up_to = j == 0 ? here.count : over_lanes(reached[j]);
            if (t.rank() == 0 && up_to > above) { t.add_across(told + rungs.index[j], up_to - above); }
            above = up_to;
        }
        if (t.rank() == 0 && none > 0) { t.add_across(&w.problems[here.problem].silent, none); }
        std::uint64_t* const to = w.best + here.problem * w.rungs() * w.rungs();
        for (std::size_t c = 1; left > 0 && c < count; ++c)
        {
            for (std::size_t a = 0; a < c; ++a)
            {
                if (rungs.cost[c] - rungs.cost[a] > left) { continue; }
                // The largest complement stands for the most loss saved, by the first token.
                index_t const token         = here.head * w.tokens + here.first + best.token[a][c];
                std::uint64_t const largest = t.largest(best.saved[a][c] > 0 ? ~upgrade_of(best.saved[a][c], token) : 0);
                if (t.rank() == 0 && largest != 0)
                {
                    t.min_across(to + rungs.index[a] * w.rungs() + rungs.index[c], ~largest);
                }
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
        double* const room = t.scratch().template take<double>(columns);
        index_t best       = -1;
        for (index_t c = 0; c < w.candidates; ++c)
        {
            index_t const number = limit * w.candidates + c;
            problem& p           = w.problems[number];
            if (!p.active) { continue; }
            double const* const losses = w.losses + number * w.pieces();
            double const loss          = ordered_sum(t, room, w.pieces(), [&](index_t i) { return losses[i]; });
            if (t.rank() != 0) { continue; }
            tell(number, p, loss);
            if (best < 0 || p.report.loss < w.problems[best].report.loss) { best = number; }
        }
        if (t.rank() != 0) { return; }
        w.winner[limit] = best;
        w.report[limit] = w.problems[best].report;
    }

private:
    [[nodiscard]] MDKV_HD std::int64_t* counts(index_t number, index_t head) const
    {
        return w.counts + (number * w.heads + head) * index_t{max_rungs};
    }

    /// Applies upgrades within `left` bytes, and returns the loss that they save.
    MDKV_HD double buy(index_t number, index_t left) const
    {
        double saved              = 0;
        std::uint64_t* const best = w.best + number * w.rungs() * w.rungs();
        while (true)
        {
            index_t next = 0;
            for (index_t i = 1; i < w.rungs() * w.rungs(); ++i) { next = best[i] < best[next] ? i : next; }
            if (best[next] == ~std::uint64_t{0}) { return saved; }
            index_t const a  = next / w.rungs();
            index_t const c  = next % w.rungs();
            auto const token = static_cast<index_t>(best[next] & static_cast<std::uint64_t>(most_tokens - 1));
            index_t const bytes =
                w.costs.bytes[static_cast<std::size_t>(c)] - w.costs.bytes[static_cast<std::size_t>(a)];
            index_t const head  = token / w.tokens;
            index_t const at    = token % w.tokens;
            index_t const limit = number / w.candidates;
            std::uint8_t& rung  = *w.rungs_of({number, limit, 0, head, at, 1});
            best[next]          = ~std::uint64_t{0};
            if (bytes > left || rung != a) { continue; }
            left -= bytes;
            rung              = static_cast<std::uint8_t>(c);
            float const* loss = w.loss + (limit * w.heads + head) * w.loss_of_head + at;
            saved += double{loss[a * w.loss_of_rung]} - double{loss[c * w.loss_of_rung]};
            --counts(number, head)[a];
            ++counts(number, head)[c];
        }
    }

    MDKV_HD void tell(index_t number, problem const& p, double tied_loss) const
    {
        allocation& report = w.problems[number].report;
        report             = {};
        report.status      = !p.over() && p.silent > 0 ? allocation_status::non_finite_loss : p.status;
        report.limit       = w.limit_values[number / w.candidates];
        report.loss        = tied_loss - buy(number, p.room);
        for (index_t h = 0; h < w.heads && w.tokens > 0; ++h)
        {
            index_t widest = w.by_use ? 0 : w.at(w.set_of[number * w.heads + h]).charge;
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
        float const m     = bits_as<float>(p.multiplier == no_more ? no_more - 1 : p.multiplier);
        report.multiplier = double{m} / static_cast<double>(w.unit);
        // With or without ties, the rungs minimise loss + multiplier * bytes.
        double const own = tied_loss - rounded_product(report.multiplier, static_cast<double>(p.room));
        double const bound =
            w.chooses() && p.status == allocation_status::optimal ? w.dual[number / w.candidates] : own;
        report.dual = report.loss < bound ? report.loss : bound;
    }
};

/// Copies the rungs of each limit's best problem to the caller's view.
struct pick
{
    static constexpr char const* name = "allocate_pick";

    work w;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        part to                          = w.part_of(item / w.pieces() * w.candidates * w.pieces() + item % w.pieces());
        part from                        = to;
        from.problem                     = w.winner[to.limit];
        std::uint8_t const* const source = w.rungs_of(from);
        std::uint8_t* const target       = w.rungs_of(to);
        for (index_t i = t.rank(); source != target && i < to.count; i += t.size()) { target[i] = source[i]; }
    }
};

} // namespace mdkv::inline MDKV_MACHINE::detail::dual
