#include "machine.hpp"

#include <algorithm>
#include <memory>
#include <numeric>
#include <stdexcept>

namespace ptx
{

namespace
{

constexpr std::size_t most_resident  = 4;  // blocks at once, where they are shuffled
constexpr std::uint32_t longest_turn = 50; // of a warp, in runs of instructions, there

enum class outcome : std::uint8_t
{
    paused,
    at_barrier,
    done
};

/// Parties at one place become one: everywhere, or, in descending order, at what needs the others.
void join_parties(warp& w, std::vector<instruction> const& code)
{
    for (std::size_t a = 0; a < w.parties.size(); ++a)
    {
        party& first   = w.parties[a];
        flow const how = code[first.at].how;
        if (which_order() == order::descending && (how == flow::next || how == flow::branch || how == flow::leave))
        {
            continue;
        }
        for (std::size_t b = w.parties.size(); --b > a;)
        {
            party const& second = w.parties[b];
            if (second.at != first.at) { continue; }
            first.who |= second.who;
            // Whether they are enough now is looked at again; at a barrier both must have come.
            bool const both = first.wait == waiting::for_block && second.wait == waiting::for_block;
            first.wait      = both ? waiting::for_block : waiting::no;
            w.parties.erase(w.parties.begin() + static_cast<std::ptrdiff_t>(b));
        }
    }
}

/// The party that runs next; null if all wait.
party* choose(warp& w)
{
    party* best        = nullptr;
    std::uint32_t seen = 0;
    for (party& p : w.parties)
    {
        if (p.wait != waiting::no) { continue; }
        bool better = best == nullptr;
        if (!better)
        {
            switch (which_order())
            {
                case order::ascending:
                    better = p.at < best->at;
                    break;
                case order::descending:
                    better = p.who > best->who;
                    break;
                case order::shuffled:
                    better = random()() % (seen + 1) == 0;
                    break;
            }
        }
        if (better) { best = &p; }
        ++seen;
    }
    return best;
}

/// Ends lanes.
void leave(warp& w, instruction const& i, lanes who)
{
    w.alive &= ~who;
    for (flying_copy const& copy : w.copies)
    {
        if ((who >> copy.lane & 1) != 0) { report("ends without waiting for a copy", w, i, copy.lane); }
    }
    finish_copies(w, i, who, 0);
    for (party& p : w.parties) // those who wait for these lanes look again
    {
        if (p.wait == waiting::for_lanes) { p.wait = waiting::no; }
    }
}

/// Runs a party until it waits, ends or parts, or, if others are there or the turn is over, until control may stop.
void run_party(warp& w, party& p, std::uint32_t& turns)
{
    kernel& k         = *w.of->of->what;
    auto const* code  = k.code.data();
    std::uint32_t at  = p.at;
    bool const alone  = w.parties.size() == 1;
    auto* const watch = watching;
    for (bool first = true;; first = false)
    {
        instruction const& i = code[at];
        if (i.leader && !first)
        {
            p.at = at;
            if (!alone || turns == 0) { return; }
            --turns;
        }
        lanes const who = p.who;
        lanes on        = who;
        if (i.guard != nowhere)
        {
            lanes const yes = bits(w, i.guard);
            on &= i.unless ? ~yes : yes;
        }
        if (i.how == flow::next) [[likely]]
        {
            if (watch != nullptr) { watch->step(w, at, on); }
            if (on != 0)
            {
                ++k.hits[at];
                i.run(w, i, on);
            }
            ++at;
            continue;
        }
        if (i.how == flow::branch)
        {
            ++k.hits[at];
            if (watch != nullptr) { watch->step(w, at, on); }
            if (on == 0) { ++at; }
            else if (on == who) { at = i.target; }
            else
            {
                p.at  = at + 1;
                p.who = who & ~on;
                w.parties.push_back({i.target, on});
                return;
            }
            continue;
        }
        if (on == 0)
        {
            ++at;
            continue;
        }
        if (on != who) // the others go on by themselves
        {
            p.at  = at;
            p.who = on;
            w.parties.push_back({at + 1, who & ~on});
            return;
        }
        ++k.hits[at];
        p.at = at;
        if (i.how == flow::leave)
        {
            leave(w, i, who);
            w.parties.erase(w.parties.begin() + (&p - w.parties.data()));
            return;
        }
        if (i.how == flow::barrier)
        {
            if (watch != nullptr) { watch->step(w, at, on); }
            p.wait = waiting::for_block;
            return;
        }
        lanes const members =
            i.how == flow::whole_warp ? all_lanes : words<lanes>(w, i.at[i.operands - 1U])[std::countr_zero(who)];
        if ((members & ~w.alive) != 0)
        {
            report("warp function without lanes that have ended", w, i, std::countr_zero(who));
        }
        if ((members & who) != (members & w.alive))
        {
            p.wait = waiting::for_lanes;
            --k.hits[at];
            return;
        }
        if (watch != nullptr) { watch->step(w, at, on); }
        i.run(w, i, who);
        ++at;
    }
}

outcome run_warp(warp& w, std::uint32_t turns)
{
    auto const& code = w.of->of->what->code;
    while (!w.parties.empty())
    {
        if (w.parties.size() > 1) { join_parties(w, code); }
        party* const next = choose(w);
        if (next != nullptr)
        {
            if (turns == 0) { return outcome::paused; }
            run_party(w, *next, turns);
            continue;
        }
        party const& first = w.parties.front();
        auto const astray  = std::find_if(
            w.parties.begin(), w.parties.end(), [](party const& p) { return p.wait == waiting::for_lanes; });
        if (astray != w.parties.end())
        {
            report("warp function without all its lanes", w, code[astray->at], std::countr_zero(astray->who));
            throw std::runtime_error{"lanes wait for lanes that never come"};
        }
        if (w.parties.size() > 1)
        {
            report("lanes of a warp at two barriers", w, code[first.at], std::countr_zero(first.who));
        }
        return outcome::at_barrier;
    }
    return outcome::done;
}

void start_block(block& b, std::uint32_t number)
{
    launch const& l         = *b.of;
    kernel const& k         = *l.what;
    b.number                = number;
    b.done                  = false;
    b.interval              = next_interval(b);
    std::size_t const bytes = k.static_shared + l.dynamic_shared;
    b.shared.assign(bytes, std::byte{0xff}); // NaNs
    b.state.assign(bytes, allocated);
    b.cells.assign((bytes + 3) / 4, {});
    for (warp& w : b.warps)
    {
        w.alive   = all_lanes;
        w.parties = {{0, all_lanes}};
        w.copies.clear();
        w.groups = {};
        w.local.assign(k.local_bytes * warp_size, std::byte{0xff});
        w.local_state.assign(k.local_bytes * warp_size, allocated);
        for (auto const& [at, which] : k.specials)
        {
            for (std::uint32_t lane = 0; lane < warp_size; ++lane)
            {
                std::uint32_t value = 0;
                switch (which)
                {
                    case special::thread_x:
                        value = static_cast<std::uint32_t>(w.number) * warp_size + lane;
                        break;
                    case special::threads_x:
                        value = l.threads;
                        break;
                    case special::block_x:
                        value = number;
                        break;
                    case special::blocks_x:
                        value = l.blocks;
                        break;
                    case special::lane:
                        value = lane;
                        break;
                    case special::zero:
                        break;
                }
                words<std::uint32_t>(w, at)[lane] = value;
            }
        }
    }
}

/// Lets warps go on that have waited for the block.
void release(block& b)
{
    auto const& code = b.of->what->code;
    if (watching != nullptr) { watching->meet(b); }
    b.interval       = next_interval(b);
    bool const whole = std::all_of(b.warps.begin(), b.warps.end(), [](warp const& w) { return w.alive == all_lanes; });
    for (warp& w : b.warps)
    {
        for (party& p : w.parties)
        {
            if (!whole) { report("barrier that some threads never reach", w, code[p.at], std::countr_zero(p.who)); }
            ++p.at;
            p.wait = waiting::no;
        }
    }
}

/// Runs the block's warps, each for some turns, and, once they all wait, past the barrier.
void step(block& b, std::uint32_t turns)
{
    std::vector<std::size_t> numbers(b.warps.size());
    std::iota(numbers.begin(), numbers.end(), std::size_t{0});
    if (which_order() == order::descending) { std::reverse(numbers.begin(), numbers.end()); }
    if (which_order() == order::shuffled) { std::shuffle(numbers.begin(), numbers.end(), random()); }
    bool all_wait = true, all_done = true;
    for (std::size_t const number : numbers)
    {
        auto const turn =
            which_order() == order::shuffled ? 1 + static_cast<std::uint32_t>(random()()) % turns : nowhere;
        outcome const result = run_warp(b.warps[number], turn);
        all_wait             = all_wait && result != outcome::paused;
        all_done             = all_done && result == outcome::done;
    }
    if (all_done)
    {
        b.done = true;
        if (watching != nullptr) { watching->end(b); }
    }
    else if (all_wait) { release(b); }
}

/// Blocks that were run, with their memory, for the next launch.
std::vector<std::unique_ptr<block>>& resident_blocks()
{
    static std::vector<std::unique_ptr<block>> all;
    return all;
}

} // namespace

void run(launch what)
{
    begin_launch();
    kernel& k = *what.what;
    ++k.launches;
    if (watching != nullptr) { watching->begin(what); }
    auto& blocks           = resident_blocks();
    std::size_t const room = which_order() == order::shuffled ? most_resident : 1;
    std::size_t const used = std::min<std::size_t>(room, what.blocks);
    while (blocks.size() < used) { blocks.push_back(std::make_unique<block>()); }
    for (std::size_t n = 0; n < used; ++n)
    {
        block& b = *blocks[n];
        b.of     = &what;
        b.done   = true;
        b.warps.resize(what.threads / warp_size);
        for (std::size_t number = 0; number < b.warps.size(); ++number)
        {
            warp& w  = b.warps[number];
            w.of     = &b;
            w.number = static_cast<int>(number);
            w.registers.resize(k.frame.size() + 64);
            auto const address = reinterpret_cast<std::uintptr_t>(w.registers.data());
            w.frame            = w.registers.data() + (64 - address % 64) % 64;
            std::copy(k.frame.begin(), k.frame.end(), w.frame);
        }
    }
    std::vector<std::uint32_t> numbers(what.blocks);
    std::iota(numbers.begin(), numbers.end(), 0U);
    if (which_order() == order::shuffled) { std::shuffle(numbers.begin(), numbers.end(), random()); }
    if (which_order() != order::descending) { std::reverse(numbers.begin(), numbers.end()); } // the last one is next
    for (std::size_t running = 1; running > 0;)
    {
        running = 0;
        for (std::size_t n = 0; n < used; ++n)
        {
            block& b = *blocks[n];
            if (b.done && !numbers.empty())
            {
                start_block(b, numbers.back());
                if (watching != nullptr) { watching->begin(b); }
                numbers.pop_back();
            }
            if (b.done) { continue; }
            step(b, longest_turn);
            ++running;
        }
    }
}

void report(char const* kind, warp const& w, instruction const& i, int lane, std::string const& more)
{
    if (reported(kind, &i)) { return; }
    launch const& l = *w.of->of;
    for (std::string const word : {"race", "unwritten"}) // which a comment in the sources may explain
    {
        if (std::string_view{kind}.substr(0, word.size()) == word && l.code->explained(i, word))
        {
            return explain(kind, &i);
        }
    }
    report(kind, &i,
        short_name(l.what->name) + ", block " + std::to_string(w.of->number) + ", thread "
            + std::to_string(w.number * warp_size + lane) + (more.empty() ? "" : ", " + more) + ": "
            + l.code->place(i));
}

} // namespace ptx
