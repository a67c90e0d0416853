/// \file allocate_choices.cuh: which combinations of offers the heads may have, and in what order they are solved (arXiv 2603.20616, section 4.3)
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/gpu/collectives.cuh>
#include <mdkv/gpu/detail/allocate_block.cuh>
#include <mdkv/gpu/detail/allocate_state.cuh>
#include <mdkv/gpu/detail/allocate_trials.cuh>
#include <mdkv/gpu/device.cuh>

#include <cstddef>
#include <cstdint>

namespace mdkv::gpu::dual
{

/// All members but the last two are called by all threads of the one block that decides, and leave it synchronised.
class choice_list
{
public:
    __device__ choice_list(problem const& p, block_room const& own)
        : p_{p}
        , own_{own}
        , trials_{p, own}
    {}

    /// All combinations where these are few; else the same offer for every head, and those met between the two trials.
    [[gnu::noinline]] __device__ void list() const
    {
        index_t combinations = 1;
        for (index_t h = 0; h < p_.heads() && combinations <= most_choices; ++h) { combinations *= p_.offers(); }
        bool const all      = combinations <= most_choices;
        index_t const alike = all ? 0 : p_.offers();
        index_t const count = all ? combinations : alike + list_nested(alike);
        for (index_t i = device::thread(); i < (all ? count : alike) * p_.heads(); i += threads)
        {
            index_t const c = i / p_.heads();
            index_t const h = i % p_.heads();
            index_t rest    = c;
            for (index_t g = 0; all && g < h; ++g) { rest /= p_.offers(); }
            p_.choice(c)[h] = static_cast<std::uint8_t>(all ? rest % p_.offers() : c);
        }
        device::sync();
        if (device::thread() == 0)
        {
            p_.state().choices = count;
            p_.state().choice  = 0;
            p_.state().last    = -1;
        }
        device::sync();
        rank();
    }

    /// What the choice loses at least, and which choice comes at a place.
    [[nodiscard]] __device__ double& bound_of(index_t c) const
    {
        return p_.room().bound[p_.number() * most_choices + c];
    }
    [[nodiscard]] __device__ index_t& order(index_t place) const
    {
        return p_.room().order[p_.number() * most_choices + place];
    }

private:
    /// From what fits to what does not, head by head in the order in which they turn as the multiplier falls; where there
    /// are too many, every so many-th.
    [[nodiscard]] __device__ index_t list_nested(index_t begin) const
    {
        limit_state const& s             = p_.state();
        index_t const high               = s.high >= 0 ? s.high : s.low;
        index_t const low                = s.low >= 0 ? s.low : high;
        std::uint8_t const* const before = p_.wanted(high);
        std::uint8_t const* const after  = p_.wanted(low);
        double* const turns              = p_.room().turns + p_.number() * p_.heads();
        index_t* const ranks             = p_.room().ranks + p_.number() * p_.heads();
        index_t turning                  = 0;
        for (index_t h = device::thread(); h < p_.heads(); h += threads)
        {
            if (before[h] == after[h]) { continue; }
            // What the offer it turns to costs more, at either end.
            double const at_low  = p_.value(low, h, after[h]) - p_.value(low, h, before[h]);
            double const at_high = p_.value(high, h, after[h]) - p_.value(high, h, before[h]);
            double const change  = at_low - at_high < -1e-300 ? at_low - at_high : -1e-300;
            turns[h]             = at_low / change;
            ++turning;
        }
        turning = device::block_sum(turning, own_.whole);
        for (index_t h = device::thread(); h < p_.heads(); h += threads)
        {
            ranks[h] = before[h] == after[h] ? -1 : 0;
            for (index_t g = 0; ranks[h] >= 0 && g < p_.heads(); ++g)
            {
                if (before[g] == after[g]) { continue; }
                ranks[h] += turns[g] > turns[h] || (turns[g] == turns[h] && g < h) ? 1 : 0;
            }
        }
        device::sync();
        index_t const places = most_choices - begin - 1;
        index_t const stride = turning > places ? (turning + places - 1) / places : 1;
        index_t const count  = 1 + (turning + stride - 1) / stride;
        for (index_t i = device::thread(); i < count * p_.heads(); i += threads)
        {
            index_t const c         = i / p_.heads();
            index_t const h         = i % p_.heads();
            bool const turned       = ranks[h] >= 0 && ranks[h] < c * stride;
            p_.choice(begin + c)[h] = turned ? after[h] : before[h];
        }
        device::sync();
        return count;
    }

    /// By their bounds, then by what they charge, then by their numbers.
    [[gnu::noinline]] __device__ void rank() const
    {
        limit_state const& s = p_.state();
        double* const bounds = p_.room().bounds + p_.number() * most_choices * most_trials;
        for (index_t i = device::thread(); i < s.choices * s.trials; i += threads)
        {
            bounds[i] = trials_.bound(p_.choice(i / s.trials), i % s.trials);
        }
        device::sync();
        for (index_t c = device::thread(); c < s.choices; c += threads)
        {
            double most = -infinite_double;
            for (index_t t = 0; t < s.trials; ++t)
            {
                most = bounds[c * s.trials + t] > most ? bounds[c * s.trials + t] : most;
            }
            bound_of(c) = most;
        }
        device::sync();
        for (index_t c = device::thread(); c < s.choices; c += threads)
        {
            index_t place = 0;
            for (index_t other = 0; other < s.choices; ++other) { place += comes_before(other, c) ? 1 : 0; }
            order(place) = c;
        }
        device::sync();
    }

    [[nodiscard]] __device__ bool comes_before(index_t a, index_t b) const
    {
        if (bound_of(a) != bound_of(b)) { return bound_of(a) < bound_of(b); }
        index_t more = 0; // that a is charged
        for (index_t h = 0; h < p_.heads(); ++h)
        {
            more += p_.offered(p_.choice(a)[h]).charge - p_.offered(p_.choice(b)[h]).charge;
        }
        return more < 0 || (more == 0 && a < b);
    }

    problem const& p_;
    block_room const& own_;
    multiplier_trials trials_;
};

} // namespace mdkv::gpu::dual
