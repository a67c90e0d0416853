/// \file allocate_payers.cuh: what allocate decides once no pass is awaited: which heads pay for which projections, and when a limit is done (arXiv 2603.20616, section 4.3)
#pragma once

#include <mdkv/allocate.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/gpu/collectives.cuh>
#include <mdkv/gpu/detail/allocate_block.cuh>
#include <mdkv/gpu/detail/allocate_choices.cuh>
#include <mdkv/gpu/detail/allocate_guess.cuh>
#include <mdkv/gpu/detail/allocate_passes.cuh>
#include <mdkv/gpu/detail/allocate_solve.cuh>
#include <mdkv/gpu/detail/allocate_state.cuh>
#include <mdkv/gpu/detail/allocate_trials.cuh>
#include <mdkv/gpu/device.cuh>

#include <cstddef>
#include <cstdint>

// The steps are those of cpu/detail/allocate_charge.hpp:
//
// guess_begins, guess        some of the tokens tell roughly at which multiplier the limit binds
// first_trial ... _checked   the offers that the heads want there are solved; most often they are what the heads want at
//                            the multiplier found, too
// narrowing                  else the multiplier is bracketed until the heads want the same at both ends, or nearly
// choosing, choice_solved    combinations of offers, in the order of their bounds, until the next cannot win any more
// dual_begins ... _turned    without leftovers instead: what the heads want where the limit binds
// bounding ... finishing     the bound at the multiplier found; the best rungs are brought back
//
// Who pays is decided by comparing sums of losses. Those are added up in another order here than on the CPU, so two
// combinations whose losses agree to rounding may be told apart the other way; given who pays, the rungs are the CPU's.

namespace mdkv::gpu::dual
{

/// All members are called by all threads of the one block that decides, and leave it synchronised.
class payers
{
public:
    __device__ payers(problem const& p, block_room const& own)
        : p_{p}
        , own_{own}
        , solver_{p, own}
        , trials_{p, own}
        , choices_{p, own}
    {}

    /// A pass was made: asks for the next, or reports.
    [[gnu::noinline]] __device__ void decide() const
    {
        limit_state& s  = p_.state();
        pass const made = s.next;
        device::sync();
        if (device::thread() == 0) { s.next = pass::none; }
        device::sync();
        switch (made)
        {
            case pass::price:
                trials_.note();
                break;
            case pass::settle:
            case pass::turn:
                solver_.sum_up();
                break;
            default:
                solver_.go_on(made);
                break;
        }
        while (idle()) { step(); }
    }

private:
    [[nodiscard]] __device__ bool idle() const
    {
        device::sync();
        bool const yes = p_.state().next == pass::none && p_.state().at != stage::over;
        device::sync();
        return yes;
    }

    __device__ void step() const
    {
        switch (p_.state().at)
        {
            case stage::plain:
                report(p_.state().now);
                break;
            case stage::guess_begins:
                begin_guess();
                break;
            case stage::guess:
                guess();
                break;
            case stage::first_trial:
                solve_first();
                break;
            case stage::first_solved:
                check_first();
                break;
            case stage::first_checked:
                judge_first();
                break;
            case stage::narrowing:
                narrow();
                break;
            case stage::choosing:
                choose();
                break;
            case stage::choice_solved:
                compare();
                break;
            case stage::dual_begins:
                solve_dual();
                break;
            case stage::dual_cheapest:
            case stage::dual_solved:
                check_dual();
                break;
            case stage::dual_checked:
                judge_dual();
                break;
            case stage::dual_turned:
                turn_again();
                break;
            case stage::bounding:
                bound();
                break;
            case stage::last_trial:
                bring_back();
                break;
            default:
                report(p_.state().best);
                break;
        }
    }

    /// What one thread changes.
    template <class Change>
    __device__ void alone(Change const& change) const
    {
        device::sync();
        if (device::thread() == 0) { change(p_.state()); }
        device::sync();
    }
    __device__ void go_to(stage next) const
    {
        alone([&](limit_state& s) { s.at = next; });
    }

    __device__ void report(allocation const& result) const
    {
        alone([&](limit_state& s) {
            p_.all().report(p_.number()) = result;
            s.at                         = stage::over;
        });
    }

    __device__ void begin_guess() const
    {
        double const start  = sampled_guess{p_, own_}.multiplier();
        bool const guessing = p_.tokens() >= 2 * piece_tokens;
        alone([&](limit_state& s) {
            s.guessing = guessing;
            s.from     = start;
            trials_.begin_narrowing(start);
            trials_.ask(start);
            s.at = guessing ? stage::guess : stage::first_trial;
        });
    }

    __device__ void guess() const
    {
        alone([&](limit_state& s) {
            if (trials_.narrow()) { return; }
            double const found = p_.tried(s.high >= 0 ? s.high : s.low).multiplier;
            s.guessing         = false;
            s.trials           = 0;
            s.low = s.high = -1;
            trials_.begin_narrowing(found);
            trials_.ask(found);
            s.at = stage::first_trial;
        });
    }

    /// Gives the heads these offers and begins to solve for them. False when not even the cheapest rungs would fit then.
    [[nodiscard]] __device__ bool begin(std::uint8_t const* choice, stage then) const
    {
        device::sync();
        for (index_t h = device::thread(); h < p_.heads(); h += threads) { p_.offer_of()[h] = choice[h]; }
        alone([&](limit_state& s) {
            s.now       = allocation{};
            s.now.limit = s.limit;
        });
        if (!solver_.begin(p_.state().limit)) { return false; }
        go_to(then);
        return true;
    }

    __device__ void solve_first() const
    {
        alone([&](limit_state& s) {
            s.ask_closed = s.non_finite;
            s.keep_rungs = false;
        });
        if (p_.all().spend_leftover && begin(p_.wanted(0), stage::first_solved))
        {
            for (index_t h = device::thread(); h < p_.heads(); h += threads) { p_.first_choice()[h] = p_.wanted(0)[h]; }
            device::sync();
            return;
        }
        go_to(stage::narrowing);
    }

    __device__ void check_first() const
    {
        if (!finished()) { return; }
        alone([&](limit_state& s) {
            s.best   = s.now;
            s.solved = s.first_solved = true;
            s.at                      = stage::first_checked;
            trials_.ask_once(s.best.multiplier);
        });
    }

    __device__ void judge_first() const
    {
        index_t const t = p_.state().found;
        bool const same = t >= 0 && equal(p_.first_choice(), p_.wanted(t));
        if (same) { choices_.list(); }
        go_to(same ? stage::choosing : stage::narrowing);
    }

    __device__ void narrow() const
    {
        alone([&](limit_state&) { static_cast<void>(trials_.narrow()); });
        if (p_.state().next != pass::none) { return; }
        bool const chooses = p_.all().spend_leftover;
        if (chooses) { choices_.list(); }
        go_to(chooses ? stage::choosing : stage::dual_begins);
    }

    [[nodiscard]] __device__ bool equal(std::uint8_t const* a, std::uint8_t const* b) const
    {
        bool differ = false;
        for (index_t h = device::thread(); h < p_.heads(); h += threads) { differ = differ || a[h] != b[h]; }
        return !block_any(differ, own_.whole);
    }

    /// Heads whose tokens do not use what they pay for give it back, and what that frees is spent in turn.
    /// \return whether the solution is complete; else a pass was asked for
    [[nodiscard]] __device__ bool finished() const
    {
        limit_state& s = p_.state();
        while (narrow_offers())
        {
            if (!p_.all().spend_leftover) { continue; }
            index_t const charge = charged(p_.offer_of());
            alone([&](limit_state&) {
                s.leftover = s.limit - charge - s.now.token_bytes;
                s.cap      = static_cast<float>(s.now.multiplier * p_.unit());
                if (s.cap > 0) { s.next = pass::measure; }
            });
            if (s.next != pass::none) { return false; }
        }
        index_t const charge = charged(p_.offer_of());
        alone([&](limit_state&) { s.now.charged_bytes = charge; });
        return true;
    }

    /// False when every head uses the widest projections it pays for.
    [[gnu::noinline]] [[nodiscard]] __device__ bool narrow_offers() const
    {
        unsigned* const needed = p_.room().needed + p_.number() * p_.heads();
        device::sync();
        for (index_t h = device::thread(); h < p_.heads(); h += threads) { needed[h] = 0; }
        device::sync();
        for (index_t n = device::thread(); n < p_.pieces(); n += threads)
        {
            std::size_t least = 0;
            for (std::size_t r = 0; r < p_.all().costs.rungs; ++r)
            {
                if (p_.piece(n).tokens[r] == 0) { continue; }
                std::size_t const k = p_.all().offered->offer_with(r);
                least               = k > least ? k : least;
            }
            device::atomic_max(needed + p_.head_of(n), static_cast<unsigned>(least));
        }
        device::sync();
        bool any = false;
        for (index_t h = device::thread(); h < p_.heads(); h += threads)
        {
            any              = any || needed[h] != p_.offer_of()[h];
            p_.offer_of()[h] = static_cast<std::uint8_t>(needed[h]);
        }
        return block_any(any, own_.whole);
    }

    [[nodiscard]] __device__ index_t charged(std::uint8_t const* choice) const
    {
        index_t sum = 0;
        for (index_t h = device::thread(); h < p_.heads(); h += threads) { sum += p_.offered(choice[h]).charge; }
        return device::block_sum(sum, own_.whole);
    }

    /// Begins the next combination that may win.
    [[gnu::noinline]] __device__ void choose() const
    {
        limit_state& s = p_.state();
        device::sync();
        index_t const place = s.choice;
        bool const ended = place >= s.choices || (s.solved && choices_.bound_of(choices_.order(place)) > s.best.loss);
        if (ended) { return go_to(stage::bounding); }
        index_t const number             = choices_.order(place);
        std::uint8_t const* const choice = p_.choice(number);
        bool const known                 = (s.solved && s.last >= 0 && equal(choice, p_.choice(s.last)))
                           || (s.first_solved && equal(choice, p_.first_choice()));
        alone([&](limit_state&) {
            s.choice     = place + 1;
            s.keep_rungs = s.solved && !s.best_is_kept;
        });
        if (known || !begin(choice, stage::choice_solved)) { return; }
        alone([&](limit_state&) {
            s.best_is_kept = s.solved;
            s.last         = number;
        });
    }

    __device__ void compare() const
    {
        if (!finished()) { return; }
        alone([&](limit_state& s) {
            bool const better = !s.solved || s.now.loss < s.best.loss
                                || (s.now.loss == s.best.loss && s.now.charged_bytes < s.best.charged_bytes);
            if (better)
            {
                s.best         = s.now;
                s.best_is_kept = false;
            }
            s.solved = true;
            s.at     = stage::choosing;
        });
    }

    /// The choice of the dual itself, before anything left over is spent: everybody has the least loss + multiplier *
    /// bytes, so that no allocation of as many bytes loses less.
    __device__ void solve_dual() const
    {
        index_t const high = p_.state().high;
        if (high >= 0 && begin(p_.wanted(high), stage::dual_solved)) { return; }
        auto const cheapest = static_cast<std::uint8_t>(p_.all().offered->cheapest(p_.tokens()));
        for (index_t h = device::thread(); h < p_.heads(); h += threads) { p_.first_choice()[h] = cheapest; }
        // It fits, or the status would be over_limit.
        static_cast<void>(begin(p_.first_choice(), stage::dual_cheapest));
    }

    __device__ void check_dual() const
    {
        if (!finished()) { return; }
        alone([&](limit_state& s) {
            bool const settled = s.at == stage::dual_cheapest;
            s.best             = s.now;
            s.at               = settled ? stage::bounding : stage::dual_checked;
            if (!settled) { trials_.ask_once(s.best.multiplier); }
        });
    }

    __device__ void judge_dual() const
    {
        limit_state const& s = p_.state();
        if (s.found < 0 || equal(p_.wanted(s.found), p_.wanted(s.high))) { return go_to(stage::bounding); }
        // At the multiplier that would use up the limit, heads want other offers: their turn leaves a remainder.
        turn(p_.tried(s.high).multiplier, 0x1p-20);
    }

    /// \param step  by so much the multiplier grows, should it not fit; ever more, so that this ends where losses are nothing
    ///              beside their rounding
    __device__ void turn(double multiplier, double step) const
    {
        std::uint8_t const* const wanted = p_.wanted(p_.state().high);
        device::sync();
        for (index_t h = device::thread(); h < p_.heads(); h += threads) { p_.offer_of()[h] = wanted[h]; }
        alone([&](limit_state& s) {
            s.now            = allocation{};
            s.now.limit      = s.limit;
            s.now.multiplier = multiplier;
            s.turn_step      = step;
            s.next           = pass::turn;
            s.at             = stage::dual_turned;
        });
    }

    __device__ void turn_again() const
    {
        while (narrow_offers()) {}
        index_t const charge = charged(p_.offer_of());
        limit_state& s       = p_.state();
        // That it fits was found in float.
        if (s.now.token_bytes + charge > s.limit)
        {
            double const more = s.now.multiplier > 0 ? s.now.multiplier * (1 + s.turn_step) : 1e-300;
            return turn(more, 2 * s.turn_step);
        }
        alone([&](limit_state&) {
            s.now.charged_bytes = charge;
            s.best              = s.now;
            s.at                = stage::bounding;
        });
    }

    __device__ void bound() const
    {
        alone([&](limit_state& s) {
            trials_.ask_once(s.best.multiplier);
            s.at = stage::last_trial;
        });
    }

    __device__ void bring_back() const
    {
        alone([&](limit_state& s) {
            double const dual = trials_.dual();
            s.best.dual       = dual < s.best.loss ? dual : s.best.loss; // no more than it, but for rounding
            s.next            = s.best_is_kept ? pass::restore : pass::none;
            s.at              = stage::finishing;
        });
    }

    problem const& p_;
    block_room const& own_;
    solver solver_;
    multiplier_trials trials_;
    choice_list choices_;
};

} // namespace mdkv::gpu::dual
