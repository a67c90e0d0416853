/// \file allocate_multiplier.hpp: the smallest multiplier whose choice fits: by selection among thresholds, or by bisection (arXiv 2603.20616, section 4.3)
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/detail/allocate_problem.hpp>
#include <mdkv/cpu/detail/allocate_tokens.hpp>
#include <mdkv/cpu/simd.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace mdkv::cpu::dual
{

/// Bytes that the tokens' thresholds are weighted with, in bins; scratch of the search.
struct bins
{
    // Floats that are not negative are ordered as their bits are. The sample looks at the exponent and six bits more.
    static constexpr int sample_shift     = 17;
    static constexpr index_t sample_count = (index_t{0x7f800000} >> sample_shift) + 1;
    static constexpr index_t exact_count  = 2048;

    index_t* sample = nullptr; ///< [sample_count]
    index_t* exact  = nullptr; ///< [slots, exact_count]
    index_t* above  = nullptr; ///< [slots]
};

[[nodiscard]] inline std::uint32_t order_of(float threshold) noexcept
{
    return std::bit_cast<std::uint32_t>(threshold);
}

/// Tokens that the sample takes from each place, and places: each is one cache line of every rung's losses.
inline constexpr index_t sample_block  = 16;
inline constexpr index_t sample_blocks = 1024;

/// Calls body(thresholds of a vector of tokens) for the sample, place by place; `next()` before each place.
template <std::size_t Capacity, class Next, class Body>
index_t for_sample(problem const& p, Next const& next, Body const& body)
{
    index_t const per_head = (p.tokens_per_head() + sample_block - 1) / sample_block;
    index_t const all      = p.heads * per_head;
    index_t const stride   = (all + sample_blocks - 1) / sample_blocks;
    index_t sampled        = 0;
    for (index_t b = stride / 2; b < all; b += stride)
    {
        index_t const head      = p.first_head + b / per_head;
        index_t const first     = b % per_head * sample_block;
        index_t const count     = std::min(sample_block, p.tokens_per_head() - first);
        rung_table const& rungs = p.rungs_of(head);
        std::array<float const*, max_rungs> rows{};
        for (std::size_t r = 0; r < rungs.count; ++r)
        {
            rows[r] = p.loss.data_handle() + p.loss.mapping()(head, index_t{rungs.index[r]}, first);
        }
        next();
        if (rungs.count > 1) // one rung has no thresholds
        {
            with_rungs<Capacity>(rungs.count, [&](auto constant) {
                constexpr std::size_t usual = decltype(constant)::value;
                for (index_t at = 0; at < count; at += simd::lanes)
                {
                    token_vector<usual> v;
                    v.load(rows, rungs.count, at, count - at);
                    v.silence_non_finite(rungs.count);
                    token_thresholds<vector_operations, usual> steps;
                    steps.first(rungs, v.loss);
                    steps.others(rungs, v.loss);
                    body(constant, rungs, steps);
                }
            });
        }
        sampled += count;
    }
    return sampled;
}

/// Where the multiplier lies, judged from a sample: two and a half standard errors to each side of the sample's own. A
/// wrong guess costs another pass, nothing else.
///
/// \param spare  bytes there are beyond every token's cheapest rung
template <std::size_t Capacity>
[[nodiscard]] bracket guess_bracket(problem const& p, index_t spare, bins const& scratch)
{
    std::fill_n(scratch.sample, bins::sample_count, index_t{0});
    index_t const sampled = for_sample<Capacity>(
        p, [] {},
        [&](auto constant, rung_table const& rungs, auto const& steps) {
            for_steps<decltype(constant)::value>(rungs.count, [&](auto j) {
                for (int i = 0; i < simd::lanes; ++i)
                {
                    float const theta = steps.theta[j][i];
                    if (theta > 0.0F) { scratch.sample[order_of(theta) >> bins::sample_shift] += rungs.step(j); }
                }
            });
        });
    double const target = static_cast<double>(spare) * static_cast<double>(sampled)
                          / static_cast<double>(std::max<index_t>(p.token_count(), 1));
    auto const bin_reaching = [&](double bytes) {
        index_t sum = 0;
        index_t bin = bins::sample_count - 1;
        for (; bin >= 0; --bin)
        {
            sum += scratch.sample[bin];
            if (static_cast<double>(sum) > bytes) { break; }
        }
        return bin; // -1: all of them together do not
    };
    auto const lower_edge = [](index_t bin) {
        return bin <= 0 ? 0.0F : std::bit_cast<float>(static_cast<std::uint32_t>(bin << bins::sample_shift) - 1);
    };

    double margin = 0;
    if (sampled < p.token_count())
    {
        // Neighbours resemble each other, so the spread is measured between places, not between tokens.
        float const middle = lower_edge(bin_reaching(target));
        double sum         = 0;
        double squares     = 0;
        double here        = 0;
        double places      = 0;
        auto const close   = [&] {
            sum += here;
            squares += here * here;
            here = 0;
        };
        for_sample<Capacity>(
            p,
            [&] {
                close();
                places += 1;
            },
            [&](auto constant, rung_table const& rungs, auto const& steps) {
                for_steps<decltype(constant)::value>(rungs.count, [&](auto j) {
                    std::int32_t taken         = 0;
                    simd::ints const indicator = steps.theta[j] > simd::broadcast(middle);
                    for (int i = 0; i < simd::lanes; ++i) { taken -= indicator[i]; }
                    here += static_cast<double>(taken) * static_cast<double>(rungs.step(j));
                });
            });
        close();
        // The last term: where only a handful of tokens lie above, their number is no normal variable.
        margin = 2.5 * std::sqrt(std::max(squares - sum * sum / places, 0.0)) + 4 * static_cast<double>(p.unit());
    }
    bracket guess;
    guess.low         = lower_edge(bin_reaching(target + margin));
    index_t const top = target >= margin ? bin_reaching(target - margin) : bins::sample_count - 1;
    if (top < bins::sample_count - 1) { guess.high = lower_edge(top + 1); }
    if (guess.high <= guess.low) { guess.high = std::numeric_limits<float>::infinity(); }
    return guess;
}

/// Bytes of steps whose threshold lies above a range of floats, and inside it, bin by bin; undecided tokens only.
struct weighing
{
    index_t above  = 0;
    index_t inside = 0;
};

/// Adds the steps of one chunk to the bins. Returns the bytes of those above.
template <std::size_t Count>
index_t weigh_chunk(chunk const& tokens, index_t* bin, std::uint32_t first, std::uint32_t last, int shift)
{
    constexpr std::size_t capacity = Count == run_time ? max_rungs : Count;
    rung_table const& rungs        = *tokens.rungs;
    simd::floats const low         = simd::broadcast(std::bit_cast<float>(first));
    simd::floats const high        = simd::broadcast(std::bit_cast<float>(last));
    simd::ints above_steps[capacity]{};
    for_undecided<Count>(tokens, [&](std::uint16_t const*, index_t, auto const& v) {
        token_thresholds<vector_operations, Count> steps;
        steps.first(rungs, v.loss);
        steps.others(rungs, v.loss);
        // Thresholds fall from step to step: those inside are steps begin + 1 ... end.
        simd::ints begin = simd::broadcast(std::int32_t{0});
        simd::ints end   = begin;
        for_steps<Count>(
            rungs.count, [&](auto j) __attribute__((always_inline)) {
                simd::ints const above = steps.theta[j] > high;
                above_steps[j] -= above;
                begin -= above;
                end -= steps.theta[j] >= low;
            });
        std::uint32_t lanes = simd::bits(begin != end);
        if (lanes == 0) { return; }
        float theta[capacity][simd::lanes];
        for_steps<Count>(
            rungs.count, [&](auto j) __attribute__((always_inline)) { simd::store(theta[j], steps.theta[j]); });
        for (; lanes != 0; lanes &= lanes - 1)
        {
            int const i = std::countr_zero(lanes);
            for (auto j = static_cast<std::size_t>(begin[i]) + 1; j <= static_cast<std::size_t>(end[i]); ++j)
            {
                bin[(order_of(theta[j][i]) - first) >> shift] += rungs.step(j);
            }
        }
    });
    index_t above = 0;
    for (std::size_t j = 1; j < capacity && j < rungs.count; ++j)
    {
        for (int i = 0; i < simd::lanes; ++i) { above += above_steps[j][i] * rungs.step(j); }
    }
    return above;
}

template <std::size_t Capacity>
weighing weigh(
    backend const& on, problem const& p, bins const& scratch, std::uint32_t first, std::uint32_t last, int shift)
{
    index_t const chunks = p.chunk_count();
    index_t const slots  = on.slots(chunks);
    std::fill_n(scratch.exact, slots * bins::exact_count, index_t{0});
    std::fill_n(scratch.above, slots, index_t{0});
    on.for_each(chunks, [&](index_t n, index_t slot) {
        chunk const tokens{p, n};
        index_t* const bin = scratch.exact + slot * bins::exact_count;
        with_rungs<Capacity>(tokens.rungs->count, [&](auto count) {
            scratch.above[slot] += weigh_chunk<decltype(count)::value>(tokens, bin, first, last, shift);
        });
    });
    weighing total;
    for (index_t s = 0; s < slots; ++s)
    {
        total.above += scratch.above[s];
        for (index_t b = 0; b < bins::exact_count; ++b)
        {
            index_t const bytes = scratch.exact[s * bins::exact_count + b];
            total.inside += bytes;
            if (s > 0) { scratch.exact[b] += bytes; }
        }
    }
    return total;
}

/// Fewest low bits to leave out so that [first, last] falls into the bins.
[[nodiscard]] inline int shift_for(std::uint32_t first, std::uint32_t last) noexcept
{
    int shift = 0;
    while (((last - first) >> shift) >= bins::exact_count) { ++shift; }
    return shift;
}

/// Bytes that the tokens' rungs take beyond each one's cheapest, by the counts of the chunks.
[[nodiscard]] inline index_t bytes_above_cheapest(problem const& p) noexcept
{
    index_t bytes = 0;
    for (index_t n = 0; n < p.chunk_count(); ++n)
    {
        rung_table const& rungs = p.rungs_of(p.head_of(n));
        for (std::size_t r = 1; r < rungs.count; ++r)
        {
            bytes += index_t{p.chunks[n].tokens[r]} * (rungs.cost[r] - rungs.cost[0]);
        }
    }
    return bytes;
}

/// Decides every token it can, and returns the multiplier for the others: exactly the smallest at which all fit.
/// The undecided have thresholds in the bracket, which is corrected if the multiplier lies outside; none of the decided
/// has.
template <std::size_t Capacity>
[[nodiscard]] float narrow_down(backend const& on, problem const& p, index_t spare, bins const& scratch, bracket& range)
{
    index_t decided = 0; // bytes of the decided tokens' steps
    while (true)
    {
        on.for_each(p.chunk_count(), [&](index_t n, index_t) {
            chunk const tokens{p, n};
            with_rungs<Capacity>(
                tokens.rungs->count, [&](auto count) { decide<decltype(count)::value>(tokens, range); });
        });
        decided             = bytes_above_cheapest(p);
        std::uint32_t first = order_of(range.low) + 1;
        std::uint32_t last  = order_of(range.high);
        int shift           = shift_for(first, last);
        weighing found      = weigh<Capacity>(on, p, scratch, first, last, shift);
        if (decided + found.above > spare) // the guess was too low
        {
            range = {range.high, std::numeric_limits<float>::infinity()};
            continue;
        }
        if (decided + found.above + found.inside <= spare)
        {
            if (range.low == 0.0F) { return 0.0F; } // everything that saves anything fits
            range = {0.0F, range.low};              // the guess was too high
            continue;
        }
        while (true)
        {
            index_t taken = decided + found.above;
            index_t bin   = bins::exact_count - 1;
            for (; taken + scratch.exact[bin] <= spare; --bin) { taken += scratch.exact[bin]; }
            first += static_cast<std::uint32_t>(bin) << shift;
            if (shift == 0) { return std::bit_cast<float>(first); }
            last  = std::min(last, first + ((std::uint32_t{1} << shift) - 1));
            shift = shift_for(first, last);
            found = weigh<Capacity>(on, p, scratch, first, last, shift);
        }
    }
}

/// The same from nothing.
template <std::size_t Capacity>
[[nodiscard]] float select_multiplier(
    backend const& on, problem const& p, index_t spare, bins const& scratch, bracket& range)
{
    range = guess_bracket<Capacity>(p, spare, scratch);
    return narrow_down<Capacity>(on, p, spare, scratch, range);
}

/// Gives every token of a chunk the rung of least loss + multiplier * bytes (the cheapest of several), in double.
/// The one function that both searches and assigns, so that what was found to fit is what is assigned.
[[gnu::noinline]] inline void decide_at(problem const& p, chunk const& tokens, double multiplier) noexcept
{
    rung_table const& rungs = *tokens.rungs;
    std::array<double, max_rungs> price{};
    for (std::size_t r = 0; r < rungs.count; ++r) { price[r] = multiplier * static_cast<double>(rungs.cost[r]); }
    chunk_state state;
    float losses[max_rungs];
    for (index_t i = 0; i < tokens.count; ++i)
    {
        std::size_t best = 0;
        if (!tokens.read(i, losses)) { ++state.non_finite; }
        double least = double{losses[0]} + price[0];
        for (std::size_t r = 1; r < rungs.count; ++r)
        {
            double const sum = double{losses[r]} + price[r];
            if (sum < least)
            {
                least = sum;
                best  = r;
            }
        }
        tokens.rung[i] = rungs.index[best];
        state.loss += double{losses[best]};
        ++state.tokens[best];
    }
    p.chunks[tokens.number] = state;
}

/// The largest difference between two losses of one token.
[[nodiscard]] inline double widest_difference(backend const& on, problem const& p)
{
    on.for_each(p.chunk_count(), [&](index_t n, index_t) {
        chunk const tokens{p, n};
        double widest = 0;
        float losses[max_rungs];
        for (index_t i = 0; i < tokens.count; ++i)
        {
            tokens.read(i, losses);
            auto const [least, most] = std::minmax_element(losses, losses + tokens.rungs->count);
            widest                   = std::max(widest, double{*most} - double{*least});
        }
        tokens.state->loss = widest;
    });
    double widest = 0;
    for (index_t n = 0; n < p.chunk_count(); ++n) { widest = std::max(widest, p.chunks[n].loss); }
    return widest;
}

/// The search of the paper with an end: halves [0, a multiplier nobody pays], keeping the side that fits, until the
/// lower end is a multiplier that does not fit, and sixty times more. All tokens have their rung when it returns.
/// \return loss per byte
[[nodiscard]] inline double bisect_multiplier(backend const& on, problem const& p, index_t spare)
{
    auto const bytes_at = [&](double multiplier) {
        on.for_each(p.chunk_count(), [&](index_t n, index_t) { decide_at(p, chunk{p, n}, multiplier); });
        return bytes_above_cheapest(p);
    };
    if (bytes_at(0.0) <= spare) { return 0.0; }
    double low  = 0;
    double high = 2 * widest_difference(on, p) / static_cast<double>(p.narrowest_step()); // nobody pays that
    for (int halvings = 0; halvings < 60;)
    {
        double const middle = low + (high - low) / 2;
        if (bytes_at(middle) <= spare) { high = middle; }
        else { low = middle; }
        halvings += low > 0 ? 1 : 0;
    }
    static_cast<void>(bytes_at(high));
    return high;
}

} // namespace mdkv::cpu::dual
