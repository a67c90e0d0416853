/// \file allocate_trials.cuh: multipliers that are tried: which one next, what every head would take there, and what that bounds (arXiv 2603.20616, section 4.3)
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/gpu/collectives.cuh>
#include <mdkv/gpu/detail/allocate_block.cuh>
#include <mdkv/gpu/detail/allocate_passes.cuh>
#include <mdkv/gpu/detail/allocate_state.cuh>
#include <mdkv/gpu/device.cuh>

#include <cmath>
#include <cstddef>
#include <cstdint>

// The multipliers are those of cpu/detail/allocate_trials.hpp, to rounding. What is a loop of passes there is cut at its
// passes here: next_multiplier goes on where the last trial left it.

namespace mdkv::gpu::dual
{

/// All members are called by all threads of the one block that decides, and leave it synchronised, unless they say otherwise.
class multiplier_trials
{
public:
    __device__ multiplier_trials(problem const& p, block_room const& own)
        : p_{p}
        , own_{own}
    {}

    /// Asks for a trial. By one thread.
    __device__ void ask(double multiplier) const
    {
        limit_state& s = p_.state();
        s.multiplier   = multiplier;
        s.found        = s.trials;
        s.next         = pass::price;
    }

    /// The trial at a multiplier, one that was made before if there is one. By one thread.
    __device__ void ask_once(double multiplier) const
    {
        limit_state& s = p_.state();
        for (index_t t = 0; t < s.trials; ++t)
        {
            if (p_.tried(t).multiplier == multiplier)
            {
                s.found = t;
                return;
            }
        }
        s.found = -1;
        if (multiplier < s.steepest && s.trials < most_trials) { ask(multiplier); }
    }

    /// Begins to look for two neighbours of the multiplier at which the limit binds. By one thread.
    __device__ void begin_narrowing(double multiplier) const
    {
        limit_state& s = p_.state();
        s.narrow       = narrowing::from_zero;
        s.from         = multiplier;
        s.factor       = 1.25;
        s.weight_low   = 1;
        s.weight_high  = 1;
    }

    /// Asks for the next trial of that search. False where it ends. By one thread.
    [[gnu::noinline]] __device__ bool narrow() const
    {
        limit_state& s = p_.state();
        if (s.narrow == narrowing::from_zero)
        {
            s.narrow = narrowing::upwards;
            if (s.from == 0 && s.high < 0)
            {
                trial const& free = p_.tried(s.low);
                s.from            = within(fabs(free.dual) / free.bytes, 1e-30, s.steepest);
                return asked(s.from);
            }
        }
        if (s.narrow == narrowing::upwards)
        {
            if (s.high < 0 && s.from < s.steepest && s.trials < most_trials / 2)
            {
                double const up = p_.tried(s.low).multiplier * s.factor;
                s.from          = up < s.steepest ? up : s.steepest;
                s.factor *= s.factor;
                return asked(s.from);
            }
            s.narrow = narrowing::downwards;
        }
        if (s.narrow == narrowing::downwards)
        {
            if (s.low < 0 && s.from > 0 && s.trials < most_trials / 2)
            {
                s.from = s.factor < 1e9 ? p_.tried(s.high).multiplier / s.factor : 0.0;
                s.factor *= s.factor;
                return asked(s.from);
            }
            s.narrow = narrowing::closing;
        }
        return s.low >= 0 && s.high >= 0 && close_bracket();
    }

    /// The trial's pass was made: what every head would take, and what that bounds. The bracket is narrowed.
    [[gnu::noinline]] __device__ void note() const
    {
        limit_state& s  = p_.state();
        index_t const t = s.trials;
        add_up(t);
        double bytes = 0;
        double dual  = 0;
        for (index_t h = device::thread(); h < p_.heads(); h += threads)
        {
            index_t least = 0;
            for (index_t k = 1; k < p_.offers(); ++k) { least = p_.value(t, h, k) < p_.value(t, h, least) ? k : least; }
            p_.wanted(t)[h] = static_cast<std::uint8_t>(least);
            bytes += bytes_of(h, least);
            dual += p_.value(t, h, least);
        }
        bytes       = device::block_sum(bytes, own_.real);
        dual        = device::block_sum(dual, own_.real);
        bool silent = false;
        for (index_t n = device::thread(); n < p_.pieces(); n += threads)
        {
            silent = silent || p_.room().silent[p_.number() * p_.pieces() + n] > 0;
        }
        silent = block_any(silent, own_.whole);
        if (device::thread() == 0)
        {
            p_.tried(t)    = {s.multiplier, bytes, dual - s.multiplier * static_cast<double>(s.limit)};
            s.trials       = t + 1;
            s.non_finite   = s.non_finite || (silent && !s.guessing);
            double const m = s.multiplier;
            if (fits(t))
            {
                if (s.high < 0 || m <= p_.tried(s.high).multiplier) { s.high = t; }
            }
            else if (s.low < 0 || m >= p_.tried(s.low).multiplier) { s.low = t; }
        }
        device::sync();
    }

    /// No allocation within the limit loses less. By any thread.
    [[nodiscard]] __device__ double dual() const
    {
        double most = -infinite_double;
        for (index_t t = 0; t < p_.state().trials; ++t) { most = p_.tried(t).dual > most ? p_.tried(t).dual : most; }
        return most;
    }

    /// No allocation of these offers within the limit loses less, as one trial tells. By any thread.
    [[nodiscard]] __device__ double bound(std::uint8_t const* choice, index_t t) const
    {
        double sum = -p_.tried(t).multiplier * static_cast<double>(p_.state().limit);
        for (index_t h = 0; h < p_.heads(); ++h) { sum += p_.value(t, h, choice[h]); }
        return sum - 0x1p-20 * fabs(sum); // rungs were chosen in float
    }

private:
    [[nodiscard]] __device__ static double within(double x, double low, double high)
    {
        return x < low ? low : high < x ? high : x;
    }
    [[nodiscard]] __device__ double& bytes_of(index_t head, index_t k) const
    {
        return p_.room().bytes[(p_.number() * p_.heads() + head) * p_.offers() + k];
    }
    [[nodiscard]] __device__ bool fits(index_t t) const
    {
        return p_.tried(t).bytes <= static_cast<double>(p_.state().limit);
    }
    __device__ bool asked(double multiplier) const
    {
        ask(multiplier);
        return true;
    }

    /// Interpolates the bytes over the logarithm of the multiplier; of a side that stays, the weight is halved.
    __device__ bool close_bracket() const
    {
        limit_state& s     = p_.state();
        bool const exactly = !p_.all().spend_leftover && !s.guessing;
        if (s.narrow == narrowing::between)
        {
            bool const fitted = fits(s.trials - 1);
            s.weight_low      = fitted ? s.weight_low / 2 : 1;
            s.weight_high     = fitted ? 1 : s.weight_high / 2;
        }
        s.narrow = narrowing::between;
        if (s.trials + 1 >= (exactly ? most_trials : most_trials / 2)) { return false; }
        index_t const different = different_heads();
        if (!s.guessing && different == 0) { return false; }
        trial const& low  = p_.tried(s.low);
        trial const& high = p_.tried(s.high);
        // One head's turn: both of its offers are solved, or bounded away.
        if (!exactly && different == 1 && high.multiplier < 1.05 * low.multiplier) { return false; }
        if (s.guessing && high.multiplier < 1.01 * low.multiplier) { return false; }
        if (high.multiplier <= low.multiplier * (1 + 0x1p-22)) { return false; }
        auto const limit   = static_cast<double>(s.limit);
        double const over  = s.weight_low * (low.bytes - limit);
        double const under = s.weight_high * (limit - high.bytes);
        double const next  = mdkv::detail::multiplier_between(low.multiplier, high.multiplier, over, under);
        return next > low.multiplier && next < high.multiplier && asked(next);
    }

    [[nodiscard]] __device__ index_t different_heads() const
    {
        std::uint8_t const* const at_low  = p_.wanted(p_.state().low);
        std::uint8_t const* const at_high = p_.wanted(p_.state().high);
        index_t different                 = 0;
        for (index_t h = 0; h < p_.heads(); ++h) { different += at_low[h] != at_high[h] ? 1 : 0; }
        return different;
    }

    /// Every head's loss and bytes under every offer: one warp each.
    __device__ void add_up(index_t t) const
    {
        limit_state const& s  = p_.state();
        index_t const each    = s.guessing ? guess_unit / piece_tokens : 1;
        index_t const of_head = p_.all().pieces_per_head;
        for (index_t place = device::warp(); place < p_.heads() * p_.offers(); place += threads / device::warp_size)
        {
            index_t const h = place / p_.offers();
            index_t const k = place % p_.offers();
            outlay sum{0, 0};
            for (index_t first = device::lane() * each; first < of_head; first += device::warp_size * each)
            {
                outlay const part = of_unit(h, k, first, first + each < of_head ? first + each : of_head);
                sum.loss += part.loss;
                sum.bytes += part.bytes;
            }
            sum.loss  = device::warp_sum(sum.loss);
            sum.bytes = device::warp_sum(sum.bytes) + static_cast<double>(p_.offered(k).charge);
            if (device::lane() != 0) { continue; }
            p_.value(t, h, k) = sum.loss + s.multiplier * sum.bytes;
            bytes_of(h, k)    = sum.bytes;
        }
        device::sync();
    }

    /// Of neighbouring pieces; of a guess, scaled up to all of their tokens.
    [[nodiscard]] __device__ outlay of_unit(index_t head, index_t k, index_t first, index_t end) const
    {
        outlay sum{0, 0};
        index_t seen = 0;
        for (index_t n = first; n < end; ++n)
        {
            index_t const place = p_.number() * p_.pieces() + head * p_.all().pieces_per_head + n;
            outlay const& part  = p_.room().outlays[place * p_.offers() + k];
            sum.loss += part.loss;
            sum.bytes += part.bytes;
            seen += piece_pass::guess_count(n * piece_tokens, p_.tokens());
        }
        if (!p_.state().guessing) { return sum; }
        index_t const left = p_.tokens() - first * piece_tokens;
        double const scale = static_cast<double>(left < guess_unit ? left : guess_unit) / static_cast<double>(seen);
        return {sum.loss * scale, sum.bytes * scale};
    }

    problem const& p_;
    block_room const& own_;
};

} // namespace mdkv::gpu::dual
