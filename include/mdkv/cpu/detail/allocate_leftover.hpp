/// \file allocate_leftover.hpp: what the multiplier leaves of a budget, spent on the upgrades that save most per byte (arXiv 2603.20616, section 4.3)
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/detail/allocate_problem.hpp>
#include <mdkv/cpu/detail/allocate_tokens.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/detail/threshold.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

// The order is: largest key first, where the key is what the upgrade saves per byte (in float, as the thresholds are)
// or the multiplier, whichever is less; then the lower head, the lower position, the cheaper rung. An upgrade is made
// if it fits into what is left then, from the rung the token has by then, to any costlier one. That is one order over
// all tokens; the steps below only avoid looking at all of them for every upgrade:
//
// 1. Upgrades that save exactly the multiplier (a plateau, and there may be a million) go by position, in one walk.
//    What is left then is less than the widest step, because all of them together did not fit.
// 2. The best few candidates are collected and served best first. The best candidate left out is known; once it would
//    be its turn, the next few are collected.
//
// Both look at the undecided tokens first: nobody else has a key above the lower end of the bracket.

namespace mdkv::cpu::dual
{

/// Whose upgrades are looked at.
enum class scope : std::uint8_t
{
    undecided,
    all
};

/// Calls visit(position) for every token of the chunk, in order, that may have an upgrade of key `bar()` or more within
/// `leftover()` bytes; both are asked anew for every vector.
template <std::size_t Count, class Leftover, class Bar, class Visit>
void for_upgradable(chunk const& tokens, scope which, Leftover const& leftover, Bar const& bar, Visit const& visit)
{
    constexpr std::size_t capacity = Count == run_time ? max_rungs : Count;
    rung_table const& rungs        = *tokens.rungs;
    auto const filter              = [&](simd::ints rung, auto const& v) {
        index_t const bytes = leftover();
        simd::floats best   = simd::broadcast(0.0F);
        for (std::size_t a = 0; a + 1 < capacity && a + 1 < rungs.count; ++a)
        {
            simd::ints const here = rung == simd::broadcast(std::int32_t{rungs.index[a]});
            if (!simd::any(here)) { continue; }
            simd::floats saved = simd::broadcast(0.0F);
            for (std::size_t c = a + 1; c < capacity && c < rungs.count && rungs.cost[c] - rungs.cost[a] <= bytes; ++c)
            {
                saved = simd::max(saved, mdkv::detail::saved_per_unit(rungs, v.loss, a, c));
            }
            best = simd::select(here, saved, best);
        }
        return simd::bits((best >= simd::broadcast(bar())) & (best > 0.0F));
    };
    if (which == scope::all)
    {
        for (index_t at = 0; at < tokens.count; at += simd::lanes)
        {
            index_t const left = tokens.count - at;
            token_vector<Count> v;
            load_tokens(v, tokens, at);
            for (std::uint32_t hits = filter(load_rungs(tokens.rung + at, left), v); hits != 0; hits &= hits - 1)
            {
                visit(at + std::countr_zero(hits));
            }
        }
        return;
    }
    for_undecided<Count>(tokens, [&](std::uint16_t const* positions, index_t count, auto const& v) {
        std::uint8_t now[simd::lanes]{};
        for (index_t i = 0; i < count; ++i) { now[i] = tokens.rung[positions[i]]; }
        for (std::uint32_t hits = filter(load_rungs(now, simd::lanes), v); hits != 0; hits &= hits - 1)
        {
            visit(index_t{positions[std::countr_zero(hits)]});
        }
    });
}

/// Loss of the chosen rungs of a whole chunk, summed afresh: subtracting what an upgrade saved would leave the rounding
/// errors of a loss that may have been far larger.
inline double chosen_loss(chunk const& tokens) noexcept
{
    double sum = 0;
    float losses[max_rungs];
    for (index_t i = 0; i < tokens.count; ++i)
    {
        if (tokens.read(i, losses)) { sum += double{losses[tokens.open->place[tokens.rung[i]]]}; }
    }
    return sum;
}

struct upgrade
{
    float key;
    std::uint8_t target; ///< rung of the table
    index_t token;       ///< counted over the heads of the problem

    [[nodiscard]] friend bool operator<(upgrade const& a, upgrade const& b) noexcept // a is served after b
    {
        return a.key < b.key || (a.key == b.key && a.token > b.token);
    }
};

/// Candidates collected at a time, by each slot.
inline constexpr index_t candidates = 1024;

/// The best few of a stream of upgrades, and the best one that was not kept. The heap's top is the worst kept.
class shortlist
{
public:
    shortlist() = default;
    explicit shortlist(upgrade* room) noexcept
        : kept_{room}
    {}

    void offer(upgrade const& u) noexcept
    {
        auto const worst_first = [](upgrade const& a, upgrade const& b) { return b < a; };
        if (count_ < candidates)
        {
            kept_[count_++] = u;
            std::push_heap(kept_, kept_ + count_, worst_first);
            return;
        }
        if (u < kept_[0])
        {
            refuse(u);
            return;
        }
        refuse(kept_[0]);
        std::pop_heap(kept_, kept_ + count_, worst_first);
        kept_[count_ - 1] = u;
        std::push_heap(kept_, kept_ + count_, worst_first);
    }

    void refuse(upgrade const& u) noexcept
    {
        if (!truncated_ || refused_ < u) { refused_ = u; }
        truncated_ = true;
    }

    /// An upgrade of a smaller key is of no interest.
    [[nodiscard]] float bar() const noexcept { return count_ < candidates ? 0.0F : kept_[0].key; }
    [[nodiscard]] upgrade* kept() const noexcept { return kept_; }
    [[nodiscard]] index_t count() const noexcept { return count_; }
    [[nodiscard]] bool truncated() const noexcept { return truncated_; }
    [[nodiscard]] upgrade const& refused() const noexcept { return refused_; }

private:
    upgrade* kept_ = nullptr;
    index_t count_ = 0;
    upgrade refused_{};
    bool truncated_ = false;
};

/// Spends what the multiplier left of one problem's budget.
template <std::size_t Capacity>
class spender
{
public:
    /// \param cap    the multiplier, in units of the table
    /// \param trust  above this key only undecided tokens have upgrades
    /// \param room   [slots + 1, candidates]
    /// \param lists  [slots]
    spender(
        backend const& on, problem const& p, index_t leftover, float cap, float trust, upgrade* room, shortlist* lists)
        : on_{on}
        , problem_{p}
        , leftover_{leftover}
        , narrowest_step_{p.narrowest_step()}
        , cap_{cap}
        , trust_{trust}
        , room_{room}
        , lists_{lists}
    {}

    /// \return bytes that are still left
    index_t spend()
    {
        walk(cap_ > trust_ ? scope::undecided : scope::all);
        while (affordable() && serve_best(scope::undecided, trust_)) {}
        while (affordable() && serve_best(scope::all, 0.0F)) {}
        return leftover_;
    }

private:
    [[nodiscard]] bool affordable() const noexcept { return leftover_ >= narrowest_step_; }

    [[nodiscard]] upgrade_choice choose(chunk const& tokens, index_t position) const noexcept
    {
        float losses[max_rungs];
        tokens.read(position, losses);
        return best_upgrade(*tokens.rungs, losses, tokens.open->place[tokens.rung[position]], leftover_, cap_);
    }

    void make(chunk const& tokens, index_t position, std::size_t target) noexcept
    {
        std::size_t const from = tokens.open->place[tokens.rung[position]];
        leftover_ -= tokens.rungs->cost[target] - tokens.rungs->cost[from];
        tokens.rung[position]  = tokens.rungs->index[target];
        tokens.state->upgraded = true;
        --tokens.state->tokens[from];
        ++tokens.state->tokens[target];
    }

    /// All upgrades whose key is the multiplier, by position.
    void walk(scope which)
    {
        for (index_t n = 0; n < problem_.chunk_count() && affordable(); ++n)
        {
            chunk const tokens{problem_, n};
            if (which == scope::undecided && !tokens.state->plateau) { continue; }
            with_rungs<Capacity>(tokens.rungs->count, [&](auto count) {
                for_upgradable<decltype(count)::value>(
                    tokens, which, [&] { return leftover_; }, [&] { return cap_; },
                    [&](index_t position) {
                        for (upgrade_choice c = choose(tokens, position); c.key >= cap_; c = choose(tokens, position))
                        {
                            make(tokens, position, c.target);
                        }
                    });
            });
        }
    }

    /// Collects the best candidates and serves them while they are the best there are. False when there was none.
    bool serve_best(scope which, float floor)
    {
        index_t const chunks = problem_.chunk_count();
        index_t const slots  = on_.slots(chunks);
        for (index_t s = 0; s < slots; ++s) { lists_[s] = shortlist{room_ + s * candidates}; }
        on_.for_each(chunks, [&](index_t n, index_t slot) {
            chunk const tokens{problem_, n};
            index_t const start = n / problem_.chunks_per_head() * problem_.tokens_per_head() + tokens.first;
            shortlist& list     = lists_[slot];
            with_rungs<Capacity>(tokens.rungs->count, [&](auto count) {
                for_upgradable<decltype(count)::value>(
                    tokens, which, [&] { return leftover_; }, [&] { return std::max(list.bar(), floor); },
                    [&](index_t position) {
                        upgrade_choice const c = choose(tokens, position);
                        if (c.key > floor)
                        {
                            list.offer({c.key, static_cast<std::uint8_t>(c.target), start + position});
                        }
                    });
            });
        });
        shortlist best{room_ + slots * candidates};
        for (index_t s = 0; s < slots; ++s)
        {
            for (index_t k = 0; k < lists_[s].count(); ++k) { best.offer(lists_[s].kept()[k]); }
            if (lists_[s].truncated()) { best.refuse(lists_[s].refused()); }
        }
        return serve(best, floor);
    }

    bool serve(shortlist const& best, float floor)
    {
        upgrade* const queue = best.kept();
        index_t count        = best.count();
        bool served          = false;
        std::make_heap(queue, queue + count);
        while (count > 0 && affordable())
        {
            std::pop_heap(queue, queue + count);
            upgrade const u = queue[--count];
            if (u.key <= floor || (best.truncated() && u < best.refused())) { break; }
            served             = true;
            index_t const head = u.token / problem_.tokens_per_head();
            index_t const at   = u.token % problem_.tokens_per_head();
            chunk const tokens{problem_, head * problem_.chunks_per_head() + at / chunk_tokens};
            index_t const position = at % chunk_tokens;
            std::size_t const from = tokens.open->place[tokens.rung[position]];
            if (tokens.rungs->cost[u.target] - tokens.rungs->cost[from] <= leftover_)
            {
                make(tokens, position, u.target);
            }
            // Either way its next best upgrade is another one.
            upgrade_choice const next = choose(tokens, position);
            if (next.key > 0.0F)
            {
                queue[count++] = {next.key, static_cast<std::uint8_t>(next.target), u.token};
                std::push_heap(queue, queue + count);
            }
        }
        return served;
    }

    backend const& on_;
    problem const& problem_;
    index_t leftover_;
    index_t narrowest_step_;
    float cap_;
    float trust_;
    upgrade* room_;
    shortlist* lists_;
};

} // namespace mdkv::cpu::dual
