/// \file allocate_guess.cuh: a first multiplier, judged from some of the tokens, when heads pay for what they use
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/gpu/collectives.cuh>
#include <mdkv/gpu/detail/allocate_block.cuh>
#include <mdkv/gpu/detail/allocate_state.cuh>
#include <mdkv/gpu/detail/allocate_tokens.cuh>
#include <mdkv/gpu/device.cuh>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace mdkv::gpu::dual
{

/// The sample is that of cpu/detail/allocate_multiplier.hpp, with one offer for all heads; its sums are whole numbers, so
/// the guess is the same. By all threads of one block.
class sampled_guess
{
public:
    __device__ sampled_guess(problem const& p, block_room const& own)
        : p_{p}
        , own_{own}
        , open_{p.offered(widest_for_all())}
        , per_head_{(p.tokens() + sample_block - 1) / sample_block}
        , stride_{(p.heads() * per_head_ + sample_blocks - 1) / sample_blocks}
        , places_{(p.heads() * per_head_ - stride_ / 2 + stride_ - 1) / stride_}
    {}

    /// Where the multiplier lies when every head has the widest offer that all can have.
    [[gnu::noinline]] [[nodiscard]] __device__ double multiplier() const
    {
        limit_state const& s  = p_.state();
        index_t const used    = p_.heads() * (open_.charge + p_.tokens() * open_.rungs.cost[0]);
        index_t const spare   = s.limit > used ? s.limit - used : 0;
        index_t const tokens  = p_.heads() * p_.tokens();
        index_t const sampled = weigh();
        double const target   = static_cast<double>(spare) * static_cast<double>(sampled) / static_cast<double>(tokens);
        double margin         = 0;
        if (sampled < tokens) { margin = spread(lower_edge(bin_reaching(target))); }
        float const low      = lower_edge(bin_reaching(target + margin));
        index_t const top    = target >= margin ? bin_reaching(target - margin) : sample_bins - 1;
        float const edge     = lower_edge(top + 1);
        bool const open      = top >= sample_bins - 1 || edge <= low || edge > no_float_above;
        double const middle  = open ? double{low} : (double{low} + double{edge}) / 2;
        double const guessed = middle / p_.unit();
        return guessed < s.steepest ? guessed : s.steepest;
    }

private:
    [[nodiscard]] __device__ index_t widest_for_all() const
    {
        auto const fits = [&](index_t k) {
            return p_.heads() * p_.all().offered->least_bytes(static_cast<std::size_t>(k), p_.tokens())
                   <= p_.state().limit;
        };
        index_t k = p_.offers() - 1;
        while (k > 0 && !fits(k)) { --k; }
        return fits(k) ? k : static_cast<index_t>(p_.all().offered->cheapest(p_.tokens()));
    }

    [[nodiscard]] __device__ index_t* bins() const { return p_.room().sample + p_.number() * sample_bins; }

    /// body(thresholds) of the tokens of a place; returns how many there are.
    template <class Body>
    __device__ index_t for_place(index_t place, index_t from, index_t step, Body const& body) const
    {
        index_t const b     = stride_ / 2 + place * stride_;
        index_t const row   = p_.first_head() + b / per_head_;
        index_t const first = b % per_head_ * sample_block;
        index_t const left  = p_.tokens() - first;
        index_t const count = left < sample_block ? left : sample_block;
        loss_rows<run_time> const rows{p_.all(), open_.rungs, row, false};
        for (index_t i = from; i < count && open_.rungs.count > 1; i += step)
        {
            token<run_time> const t{rows, first + i};
            body(thresholds_of<run_time>{open_.rungs, t.loss});
        }
        return count;
    }

    /// \return the number of tokens in the sample
    __device__ index_t weigh() const
    {
        for (index_t b = device::thread(); b < sample_bins; b += threads) { bins()[b] = 0; }
        device::sync();
        index_t sampled = 0;
        for (index_t i = device::thread(); i < places_ * sample_block; i += threads)
        {
            index_t const count = for_place(i / sample_block, i % sample_block, sample_block, [&](auto const& steps) {
                for (std::size_t j = 1; j < open_.rungs.count; ++j)
                {
                    if (!(steps.theta[j] > 0.0F)) { continue; }
                    device::atomic_add(bins() + (order_of(steps.theta[j]) >> sample_shift), open_.rungs.step(j));
                }
            });
            sampled += i % sample_block == 0 ? count : 0;
        }
        return device::block_sum(sampled, own_.whole); // synchronises
    }

    [[nodiscard]] __device__ index_t bin_reaching(double bytes) const
    {
        return find_bin(bins(), sample_bins, bytes, own_).bin;
    }
    [[nodiscard]] __device__ static float lower_edge(index_t bin)
    {
        return bin <= 0 ? 0.0F : float_of(static_cast<std::uint32_t>(bin << sample_shift) - 1);
    }

    /// Neighbours resemble each other, so the spread is measured between places, not between tokens.
    [[nodiscard]] __device__ double spread(float middle) const
    {
        double sum     = 0;
        double squares = 0;
        for (index_t place = device::thread(); place < places_; place += threads)
        {
            double here = 0;
            for_place(place, 0, 1, [&](auto const& steps) {
                for (std::size_t j = 1; j < open_.rungs.count; ++j)
                {
                    here += steps.theta[j] > middle ? static_cast<double>(open_.rungs.step(j)) : 0.0;
                }
            });
            sum += here;
            squares += here * here;
        }
        sum                   = device::block_sum(sum, own_.real);
        squares               = device::block_sum(squares, own_.real);
        double const variance = squares - sum * sum / static_cast<double>(places_);
        // The last term: where only a handful of tokens lie above, their number is no normal variable.
        return 2.5 * sqrt(variance > 0 ? variance : 0.0) + 4 * static_cast<double>(open_.rungs.unit);
    }

    problem const& p_;
    block_room const& own_;
    offer const& open_;
    index_t per_head_;
    index_t stride_;
    index_t places_;
};

} // namespace mdkv::gpu::dual
