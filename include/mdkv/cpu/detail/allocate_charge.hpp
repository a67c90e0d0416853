/// \file allocate_charge.hpp: which heads pay for projections, and for how wide ones, decided inside the dual (arXiv 2603.20616, section 4.3)
#pragma once

#include <mdkv/allocate.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/detail/allocate_fixed.hpp>
#include <mdkv/cpu/detail/allocate_menu.hpp>
#include <mdkv/cpu/detail/allocate_multiplier.hpp>
#include <mdkv/cpu/detail/allocate_problem.hpp>
#include <mdkv/cpu/detail/allocate_trials.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

// 1. Every eighth token tells roughly at which multiplier the limit binds (multiplier_trials::guess_multiplier).
// 2. The offers that the heads want there are solved, as in allocate_fixed.hpp. Most often they are what the heads want at
//    the multiplier found, too (settles): that was the dual.
// 3. Else the multiplier is bracketed until the heads want the same at both ends, or nearly (multiplier_trials::narrow).
// 4. What the heads may have is listed: all combinations of offers where these are few; else those met between the two
//    ends, one head after the other (nested), and the same offer for every head (list_choices).
// 5. Every multiplier that was tried bounds the loss of every combination from below. They are solved in the order of
//    their bounds, until the next cannot win any more (solve_choices).

namespace mdkv::cpu::dual
{

/// Combinations of offers that are considered at most.
inline constexpr index_t most_choices = 64;

/// Scratch of `payers`.
struct charge_room
{
    trial_room trials;
    std::uint8_t* choices  = nullptr; ///< [most_choices, heads]
    std::uint8_t* first    = nullptr; ///< [heads]  the choice that was solved first
    double* turns          = nullptr; ///< [heads]
    index_t* by_turn       = nullptr; ///< [heads]
    std::uint8_t* offer_of = nullptr; ///< [heads]
    std::uint8_t* saved    = nullptr; ///< [heads, N]

    charge_room() = default;
    charge_room(workspace::frame& frame, problem const& p, menu const& offered)
        : trials{frame, p, offered}
        , choices{frame.take<std::uint8_t>(most_choices * p.heads)}
        , first{frame.take<std::uint8_t>(p.heads)}
        , turns{frame.take<double>(p.heads)}
        , by_turn{frame.take<index_t>(p.heads)}
        , offer_of{frame.take<std::uint8_t>(p.heads)}
        , saved{frame.take<std::uint8_t>(p.token_count())}
    {}
};

/// Solves one limit when heads pay for the projections they use.
template <std::size_t Capacity>
class payers
{
public:
    payers(backend const& on, problem const& p, menu const& offered, index_t limit, allocate_options options,
        room const& scratch, charge_room const& own)
        : on_{on}
        , problem_{p}
        , menu_{offered}
        , limit_{limit}
        , options_{options}
        , scratch_{scratch}
        , own_{own}
        , trials_{on, problem_, offered, limit, !options.spend_leftover, scratch.counters, own.trials}
    {
        problem_.offers   = menu_.offers.data();
        problem_.offer_of = own_.offer_of;
    }

    /// \param[in,out] report  its status and limit are set
    void solve(allocation& report)
    {
        double const guess  = trials_.guess_multiplier();
        bool const choose   = options_.spend_leftover || options_.same_count_per_head;
        index_t const first = trials_.try_multiplier(guess);
        problem_.ask_closed = trials_.non_finite();
        if (!choose || !settles(first, report)) { trials_.narrow(guess); }
        if (choose)
        {
            list_choices();
            solve_choices(report);
        }
        else { solve_dual(report); }
        trials_.try_once(report.multiplier);
        report.dual = std::min(trials_.dual(), report.loss); // no more than it, but for rounding
    }

private:
    /// Solves what the heads want at a trial. True when they want the same at the multiplier this finds.
    bool settles(index_t t, allocation& report)
    {
        if (options_.same_count_per_head || !take(trials_.wanted(t))) { return false; }
        std::memcpy(own_.first, trials_.wanted(t), at(problem_.heads));
        solve_choice(report);
        solved_ = first_solved_ = true;
        index_t const found     = trials_.try_once(report.multiplier);
        return found >= 0 && std::equal(own_.first, own_.first + problem_.heads, trials_.wanted(found));
    }

    [[nodiscard]] std::uint8_t* add_choice() noexcept { return own_.choices + choices_++ * problem_.heads; }

    void list_choices()
    {
        index_t const heads  = problem_.heads;
        index_t combinations = 1;
        for (index_t h = 0; h < heads && combinations <= most_choices; ++h) { combinations *= trials_.offers(); }
        if (!options_.same_count_per_head && combinations <= most_choices)
        {
            for (index_t c = 0; c < combinations; ++c)
            {
                std::uint8_t* const choice = add_choice();
                for (index_t h = 0, rest = c; h < heads; ++h, rest /= trials_.offers())
                {
                    choice[h] = static_cast<std::uint8_t>(rest % trials_.offers());
                }
            }
            return;
        }
        for (index_t k = 0; k < trials_.offers(); ++k) { std::memset(add_choice(), static_cast<int>(k), at(heads)); }
        if (!options_.same_count_per_head) { list_nested(); }
    }

    /// From what fits to what does not, head by head in the order in which they turn as the multiplier falls; where there
    /// are too many, every so many-th.
    void list_nested()
    {
        index_t const heads = problem_.heads;
        index_t const high  = trials_.high() >= 0 ? trials_.high() : trials_.low();
        index_t const low   = trials_.low() >= 0 ? trials_.low() : high;
        index_t turning     = 0;
        for (index_t h = 0; h < heads; ++h)
        {
            index_t const before = trials_.wanted(high)[h];
            index_t const after  = trials_.wanted(low)[h];
            if (before == after) { continue; }
            // What the offer it turns to costs more, at either end.
            double const at_low     = trials_.value(low, h, after) - trials_.value(low, h, before);
            double const at_high    = trials_.value(high, h, after) - trials_.value(high, h, before);
            own_.turns[h]           = at_low / std::min(at_low - at_high, -1e-300);
            own_.by_turn[turning++] = h;
        }
        std::sort(own_.by_turn, own_.by_turn + turning, [&](index_t a, index_t b) {
            return own_.turns[a] > own_.turns[b] || (own_.turns[a] == own_.turns[b] && a < b);
        });
        index_t const places = most_choices - choices_ - 1;
        index_t const stride = std::max<index_t>((turning + places - 1) / places, 1);
        std::memcpy(own_.offer_of, trials_.wanted(high), at(heads));
        std::memcpy(add_choice(), own_.offer_of, at(heads));
        for (index_t i = 0; i < turning; ++i)
        {
            own_.offer_of[own_.by_turn[i]] = trials_.wanted(low)[own_.by_turn[i]];
            if ((i + 1) % stride == 0 || i + 1 == turning) { std::memcpy(add_choice(), own_.offer_of, at(heads)); }
        }
    }

    [[nodiscard]] index_t charge_of(std::uint8_t const* choice) const noexcept
    {
        index_t sum = 0;
        for (index_t h = 0; h < problem_.heads; ++h) { sum += menu_.offers[choice[h]].charge; }
        return sum;
    }

    void solve_choices(allocation& report)
    {
        struct ranked
        {
            double bound;
            index_t charge;
            index_t number;
        };
        std::array<ranked, most_choices> order{};
        for (index_t c = 0; c < choices_; ++c)
        {
            std::uint8_t const* const choice   = own_.choices + c * problem_.heads;
            order[static_cast<std::size_t>(c)] = {trials_.bound(choice), charge_of(choice), c};
        }
        std::sort(order.begin(), order.begin() + choices_, [](ranked const& a, ranked const& b) {
            if (a.bound != b.bound) { return a.bound < b.bound; }
            return a.charge < b.charge || (a.charge == b.charge && a.number < b.number);
        });
        std::uint8_t const* last = own_.first;
        for (index_t i = 0; i < choices_; ++i)
        {
            ranked const& next = order[static_cast<std::size_t>(i)];
            if (solved_ && next.bound > report.loss) { return; }
            std::uint8_t const* const choice = own_.choices + next.number * problem_.heads;
            auto const same                  = [&](std::uint8_t const* other) {
                return solved_ && std::equal(choice, choice + problem_.heads, other);
            };
            if (same(last) || (first_solved_ && same(own_.first)) || !take(choice)) { continue; }
            last = choice;
            if (solved_) { copy_rungs(false); }
            allocation now;
            now.limit = limit_;
            solve_choice(now);
            bool const better = !solved_ || now.loss < report.loss
                                || (now.loss == report.loss && now.charged_bytes < report.charged_bytes);
            if (better) { report = now; }
            else { copy_rungs(true); }
            solved_ = true;
        }
    }

    /// Keeps the rungs, or brings them back.
    void copy_rungs(bool back)
    {
        on_.for_each(problem_.chunk_count(), [&](index_t n, index_t) {
            chunk const tokens{problem_, n};
            std::uint8_t* const kept =
                own_.saved + (tokens.head - problem_.first_head) * problem_.tokens_per_head() + tokens.first;
            std::memcpy(back ? tokens.rung : kept, back ? kept : tokens.rung, at(tokens.count));
        });
    }

    /// Solves for what own_.offer_of holds. Heads whose tokens do not use what they pay for give it back, and what that
    /// frees is spent in turn.
    void solve_choice(allocation& report)
    {
        assign<Capacity>(on_, problem_, limit_ - problem_.charged() - problem_.cheapest(), options_, scratch_, report);
        while (narrow_offers())
        {
            if (!options_.spend_leftover) { continue; }
            assign_more<Capacity>(
                on_, problem_, limit_ - problem_.charged() - report.token_bytes, options_, scratch_, report);
        }
        report.charged_bytes = problem_.charged();
    }

    /// False when every head uses the widest projections it pays for.
    bool narrow_offers()
    {
        bool any = false;
        for (index_t h = 0; h < problem_.heads; ++h)
        {
            offer const& now  = menu_.offers[own_.offer_of[h]];
            std::size_t least = 0;
            auto const chunks = problem_.chunks_per_head();
            auto const used   = [&](std::size_t r) {
                return std::any_of(problem_.chunks + h * chunks, problem_.chunks + (h + 1) * chunks,
                      [&](chunk_state const& state) { return state.tokens[r] > 0; });
            };
            for (std::size_t r = 0; r < now.rungs.count; ++r)
            {
                if (used(r)) { least = std::max(least, menu_.offer_with(now.rungs.index[r])); }
            }
            if (least == own_.offer_of[h]) { continue; }
            any = true;
            for (index_t n = h * chunks; n < (h + 1) * chunks; ++n)
            {
                chunk_state& state = problem_.chunks[n];
                auto const counts  = std::exchange(state.tokens, {});
                for (std::size_t r = 0; r < now.rungs.count; ++r)
                {
                    if (counts[r] > 0) { state.tokens[menu_.offers[least].place[now.rungs.index[r]]] = counts[r]; }
                }
            }
            own_.offer_of[h] = static_cast<std::uint8_t>(least);
        }
        // The undecided tokens' losses were kept by the rungs of the tables there were.
        for (index_t n = 0; any && n < problem_.chunk_count(); ++n)
        {
            problem_.chunks[n].undecided = 0;
            problem_.chunks[n].plateau   = true;
        }
        return any;
    }

    /// The choice of the dual itself, before anything left over is spent: everybody has the least loss + multiplier *
    /// bytes, so that no allocation of as many bytes loses less.
    void solve_dual(allocation& report)
    {
        allocation const unsolved = report;
        if (trials_.high() < 0 || !take(trials_.wanted(trials_.high())))
        {
            std::memset(
                own_.offer_of, static_cast<int>(menu_.cheapest(problem_.tokens_per_head())), at(problem_.heads));
            solve_choice(report);
            return;
        }
        solve_choice(report);
        index_t const there = trials_.try_once(report.multiplier);
        if (there < 0
            || std::equal(
                trials_.wanted(there), trials_.wanted(there) + problem_.heads, trials_.wanted(trials_.high())))
        {
            return;
        }
        // At the multiplier that would use up the limit, heads want other offers: their turn leaves a remainder.
        double step = 0x1p-20; // doubled each time: at tiny multipliers a float's next value is far
        for (double turn = trials_[trials_.high()].multiplier;; turn = turn > 0 ? turn * (1 + step) : 1e-300, step *= 2)
        {
            report            = unsolved;
            report.multiplier = turn;
            take(trials_.wanted(trials_.high()));
            on_.for_each(problem_.chunk_count(), [&](index_t n, index_t) {
                decide_at(problem_, chunk{problem_, n}, turn);
            });
            sum_up(on_, problem_, report);
            while (narrow_offers()) {}
            report.charged_bytes = problem_.charged();
            // That it fits was found in float.
            if (report.token_bytes + report.charged_bytes <= limit_) { return; }
        }
    }

    /// Gives the heads these offers. False when not even the cheapest rungs would fit then.
    bool take(std::uint8_t const* choice)
    {
        std::memcpy(own_.offer_of, choice, at(problem_.heads));
        return problem_.charged() + problem_.cheapest() <= limit_;
    }

    [[nodiscard]] static constexpr std::size_t at(index_t n) noexcept { return static_cast<std::size_t>(n); }

    backend const& on_;
    problem problem_;
    menu const& menu_;
    index_t limit_;
    allocate_options options_;
    room const& scratch_;
    charge_room const& own_;
    multiplier_trials<Capacity> trials_;
    index_t choices_   = 0;
    bool solved_       = false; ///< the report is that of a choice
    bool first_solved_ = false; ///< own_.first is one that was solved
};

} // namespace mdkv::cpu::dual
