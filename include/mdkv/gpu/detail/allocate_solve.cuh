/// \file allocate_solve.cuh: the dual of one limit when the rungs open to every head are given, decided between passes (arXiv 2603.20616, section 4.3)
#pragma once

#include <mdkv/allocate.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/detail/threshold.hpp>
#include <mdkv/gpu/collectives.cuh>
#include <mdkv/gpu/detail/allocate_block.cuh>
#include <mdkv/gpu/detail/allocate_passes.cuh>
#include <mdkv/gpu/detail/allocate_state.cuh>
#include <mdkv/gpu/detail/allocate_tokens.cuh>
#include <mdkv/gpu/device.cuh>

#include <cstddef>
#include <cstdint>

// The choice is that of cpu/detail/allocate_fixed.hpp, found without its sample and its shortlists:
//
// 1. `weigh`, three times: a radix select by the bits of the thresholds, which weigh what their steps cost. It ends at the
//    smallest multiplier whose choice fits, as a selection among all thresholds in order does; bytes are whole numbers.
// 2. `assign`: every token's rung there.
// 3. What is left is spent in one order over all upgrades: largest key first, where the key is the saving per byte or the
//    multiplier, whichever is less; then the lower head and position, then the cheaper rung. A leftover only falls, so the
//    key of a token that does not change never rises: upgrades whose key is the multiplier (a plateau) go in one walk
//    by position. As long as the widest step fits, none of them depends on what is left, and prefix sums tell how far that
//    goes; the piece in which it ends is walked here, the others by `survey`.
// 4. From then on every piece offers its best upgrade, and the best of these is made, one after the other. Making one changes
//    its own piece, and another only if a step that it could still pay for before can no longer be paid for: then all are
//    surveyed anew. That happens at most once for each pair of rungs, so this ends.

namespace mdkv::gpu::dual
{

/// All members are called by all threads of the one block that decides, and leave it synchronised.
class solver
{
public:
    __device__ solver(problem const& p, block_room const& own)
        : p_{p}
        , own_{own}
    {}

    /// For the offers that the heads have. False, and nothing begins, when not even the cheapest rungs fit.
    [[gnu::noinline]] __device__ bool begin(index_t limit) const
    {
        index_t cheapest = 0;
        index_t charged  = 0;
        index_t step     = p_.widest_step();
        for (index_t h = device::thread(); h < p_.heads(); h += threads)
        {
            offer const& o       = p_.offer_to(h);
            index_t const narrow = o.rungs.narrowest_step();
            cheapest += p_.tokens() * o.rungs.cost[0];
            charged += o.charge;
            step = narrow < step ? narrow : step;
        }
        cheapest            = device::block_sum(cheapest, own_.whole);
        charged             = device::block_sum(charged, own_.whole);
        index_t const spare = limit - charged - cheapest;
        // The narrowest: by the largest of what the widest step has beyond it.
        auto const beyond   = static_cast<std::uint64_t>(p_.widest_step() - step);
        index_t const least = p_.widest_step() - static_cast<index_t>(block_max(beyond, own_.key));
        if (spare < 0) { return false; }
        begin_with(spare, least);
        return true;
    }

    __device__ void begin_with(index_t spare, index_t narrowest_step) const
    {
        limit_state& s = p_.state();
        if (device::thread() == 0)
        {
            s.spare          = spare;
            s.narrowest_step = narrowest_step;
            s.taken          = 0;
            s.first          = 0;
            s.shift          = first_shift;
            s.spending_more  = false;
            s.next           = pass::weigh;
        }
        device::sync();
    }

    /// The pass that was asked for has been made: asks for the next, or leaves a solution in `now`.
    __device__ void go_on(pass made) const
    {
        switch (made)
        {
            case pass::weigh:
                select();
                break;
            case pass::assign:
            case pass::measure:
                walk(made == pass::measure);
                break;
            case pass::survey:
                serve();
                break;
            default:
                break;
        }
    }

    /// What the rungs lose and take, piece by piece in a fixed order.
    [[gnu::noinline]] __device__ void sum_up() const
    {
        limit_state& s = p_.state();
        double loss    = 0;
        double least   = 0;
        index_t silent = 0;
        for (index_t n = device::thread(); n < p_.pieces(); n += threads)
        {
            loss += p_.piece(n).loss;
            least += p_.piece(n).least;
            silent += p_.piece(n).non_finite;
        }
        loss   = device::block_sum(loss, own_.real);
        silent = device::block_sum(silent, own_.whole);
        least  = device::block_sum(least, own_.real);
        if (device::thread() == 0)
        {
            s.now.loss        = loss;
            s.now.token_bytes = 0;
            bool const settled =
                s.now.status == allocation_status::over_limit || s.now.status == allocation_status::everything_kept;
            if (settled) { s.now.dual = s.now.status == allocation_status::over_limit ? loss : least; }
            else if (silent > 0) { s.now.status = allocation_status::non_finite_loss; }
        }
        for (std::size_t r = 0; r < max_rungs; ++r)
        {
            index_t count = 0;
            for (index_t n = device::thread(); r < p_.all().costs.rungs && n < p_.pieces(); n += threads)
            {
                count += p_.piece(n).tokens[r];
            }
            count = r < p_.all().costs.rungs ? device::block_sum(count, own_.whole) : 0;
            if (device::thread() != 0) { continue; }
            s.now.tokens[r] = count;
            s.now.token_bytes += count > 0 ? count * p_.all().costs.bytes[r] : 0;
        }
        device::sync();
    }

private:
    [[nodiscard]] __device__ bool affordable() const { return p_.state().leftover >= p_.state().narrowest_step; }

    /// Narrows the multiplier down to one bin.
    [[gnu::noinline]] __device__ void select() const
    {
        limit_state& s        = p_.state();
        found_bin const found = find_bin(p_.bins(), exact_bins, s.spare - s.taken, own_);
        for (index_t b = device::thread(); b < exact_bins; b += threads) { p_.bins()[b] = 0; }
        device::sync();
        if (device::thread() == 0)
        {
            s.next = pass::weigh;
            if (found.bin < 0) // everything that saves anything fits
            {
                s.cap  = 0;
                s.next = pass::assign;
            }
            else
            {
                s.taken += found.above;
                s.first += static_cast<std::uint32_t>(found.bin) << s.shift;
                s.cap  = float_of(s.first);
                s.next = s.shift == 0 ? pass::assign : pass::weigh;
                s.shift -= shift_step;
            }
            s.now.multiplier = double{s.cap < no_float_above ? s.cap : no_float_above} / p_.unit();
        }
        device::sync();
    }

    /// Spends on the plateau.
    [[gnu::noinline]] __device__ void walk(bool more) const
    {
        limit_state& s = p_.state();
        if (!more)
        {
            sum_up();
            index_t const cheapest = cheapest_bytes();
            if (device::thread() == 0)
            {
                // Every token has the rung of its least loss + multiplier * bytes.
                s.leftover = s.spare - (s.now.token_bytes - cheapest);
                s.now.dual = s.now.loss - s.now.multiplier * static_cast<double>(s.leftover);
            }
            device::sync();
        }
        bool const spends  = p_.all().spend_leftover && s.cap > 0.0F && affordable();
        index_t const edge = spends ? whole_pieces() : 0;
        index_t left       = s.leftover;
        if (spends)
        {
            left -= plateau_before(edge);
            if (edge < p_.pieces()) { left = piece_pass{p_, own_, edge}.walk_until(left); }
        }
        device::sync();
        if (device::thread() == 0)
        {
            s.leftover = left;
            s.walked   = edge;
            s.next     = spends ? pass::survey : pass::none;
        }
        device::sync();
    }

    [[nodiscard]] __device__ index_t cheapest_bytes() const
    {
        index_t sum = 0;
        for (index_t h = device::thread(); h < p_.heads(); h += threads)
        {
            sum += p_.tokens() * p_.offer_to(h).rungs.cost[0];
        }
        return device::block_sum(sum, own_.whole);
    }

    /// Pieces from the first on whose plateau can be spent without anyone being short of the widest step.
    [[nodiscard]] __device__ index_t whole_pieces() const
    {
        index_t const most  = p_.state().leftover - p_.widest_step();
        index_t const each  = (p_.pieces() + threads - 1) / threads;
        index_t const begin = device::thread() * each;
        index_t mine        = 0;
        for (index_t n = begin; n < begin + each && n < p_.pieces(); ++n) { mine += p_.piece(n).plateau; }
        index_t sum   = device::block_prefix(mine, own_.whole).before;
        index_t whole = 0;
        for (index_t n = begin; n < begin + each && n < p_.pieces(); ++n)
        {
            sum += p_.piece(n).plateau;
            whole += sum <= most ? 1 : 0;
        }
        return device::block_sum(whole, own_.whole);
    }

    [[nodiscard]] __device__ index_t plateau_before(index_t end) const
    {
        index_t sum = 0;
        for (index_t n = device::thread(); n < end; n += threads) { sum += p_.piece(n).plateau; }
        return device::block_sum(sum, own_.whole);
    }

    /// Makes the best upgrades until there is none, or all must be looked at anew.
    [[gnu::noinline]] __device__ void serve() const
    {
        limit_state& s = p_.state();
        bool anew      = false;
        while (!anew && affordable())
        {
            std::uint64_t best = 0; // key, then the lower piece
            for (index_t n = device::thread(); n < p_.pieces(); n += threads)
            {
                std::uint64_t const key = p_.piece(n).best >> 32U;
                std::uint64_t const u   = (key << 32U) | static_cast<std::uint64_t>(0xffffffff - n);
                best                    = key > 0 && u > best ? u : best;
            }
            best = block_max(best, own_.key);
            if (best == 0) { break; }
            index_t const n            = 0xffffffff - static_cast<index_t>(best & 0xffffffffU);
            std::uint64_t const chosen = p_.piece(n).best;
            auto const target          = static_cast<std::size_t>(chosen & 0xffU);
            index_t const position     = piece_tokens - 1 - static_cast<index_t>((chosen >> 8U) & 0xffffffU);
            piece_pass const here{p_, own_, n};
            index_t const before = s.leftover;
            index_t const after  = before - (here.rungs().cost[target] - here.rungs().cost[here.rung_of(position)]);
            device::sync();
            if (device::thread() == 0)
            {
                here.set(position, target);
                s.leftover = after;
                s.walked   = 0;
            }
            device::sync();
            here.survey(false);
            device::sync();
            anew = no_longer_open(before, after);
        }
        if (device::thread() == 0)
        {
            s.walked = 0;
            s.next   = anew && affordable() ? pass::survey : pass::none;
        }
        device::sync();
        if (s.next == pass::none) { sum_up(); }
    }

    /// Whether some upgrade could be paid for before, and cannot after.
    [[nodiscard]] __device__ bool no_longer_open(index_t before, index_t after) const
    {
        // The costs of all rungs, whether open or not: a pair too many only makes all be looked at once more.
        index_t const rungs = static_cast<index_t>(p_.all().costs.rungs);
        bool closes         = false;
        for (index_t pair = device::thread(); pair < rungs * rungs; pair += threads)
        {
            auto const a        = static_cast<std::size_t>(pair / rungs);
            auto const c        = static_cast<std::size_t>(pair % rungs);
            index_t const bytes = p_.all().costs.bytes[c] - p_.all().costs.bytes[a];
            closes              = closes || (bytes > after && bytes <= before);
        }
        return block_any(closes, own_.whole);
    }

    problem const& p_;
    block_room const& own_;
};

} // namespace mdkv::gpu::dual
