/// \file allocate_trials.hpp: multipliers that are tried: what every head would take at each, and what that bounds (arXiv 2603.20616, section 4.3)
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/detail/allocate_menu.hpp>
#include <mdkv/cpu/detail/allocate_multiplier.hpp>
#include <mdkv/cpu/detail/allocate_problem.hpp>
#include <mdkv/cpu/detail/allocate_tokens.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace mdkv::cpu::dual
{

/// Multipliers that are tried at most.
inline constexpr index_t most_trials = 48;

/// The guess looks at so many tokens of every so many.
inline constexpr index_t guess_tokens = 128;
inline constexpr index_t guess_stride = 1024;

/// One multiplier that was tried.
struct trial
{
    double multiplier = 0;
    double bytes      = 0; ///< that the heads would take
    double dual       = 0; ///< a lower bound on every loss within the limit
};

/// Scratch of `multiplier_trials`.
struct trial_room
{
    outlay* outlays          = nullptr; ///< [chunks, offers]
    std::int32_t* non_finite = nullptr; ///< [chunks]
    trial* trials            = nullptr; ///< [most_trials]
    double* values           = nullptr; ///< [most_trials, heads, offers]  loss + multiplier * all bytes
    std::uint8_t* wanted     = nullptr; ///< [most_trials, heads]  the offer of least value

    trial_room() = default;
    trial_room(workspace::frame& frame, problem const& p, menu const& offered)
    {
        auto const offers = static_cast<index_t>(offered.count);
        outlays           = frame.take<outlay>(p.chunk_count() * offers);
        non_finite        = frame.take<std::int32_t>(p.chunk_count());
        trials            = frame.take<trial>(most_trials);
        values            = frame.take<double>(most_trials * p.heads * offers);
        wanted            = frame.take<std::uint8_t>(most_trials * p.heads);
    }
};

/// At a multiplier every head wants the offer of least loss + multiplier * (bytes + projections), and the bytes of all
/// fall as the multiplier grows. One pass tells every head's outlay under all offers.
template <std::size_t Capacity>
class multiplier_trials
{
public:
    /// \param exactly  whether `narrow` may stop only where the heads want the same at both ends, or at a head's turn
    multiplier_trials(backend const& on, problem const& p, menu const& offered, index_t limit, bool exactly,
        bins const& counters, trial_room const& room)
        : on_{on}
        , problem_{p}
        , menu_{offered}
        , limit_{limit}
        , exactly_{exactly}
        , counters_{counters}
        , room_{room}
        , steepest_{1e37 / static_cast<double>(1 + *std::max_element(offered.bytes.begin(), offered.bytes.end()))}
    {}

    [[nodiscard]] index_t offers() const noexcept { return static_cast<index_t>(menu_.count); }
    /// The trial that does not fit, and the one that does, next to the multiplier at which the limit binds; -1: none.
    [[nodiscard]] index_t low() const noexcept { return low_; }
    [[nodiscard]] index_t high() const noexcept { return high_; }
    /// A token had a loss that was not finite.
    [[nodiscard]] bool non_finite() const noexcept { return non_finite_; }
    [[nodiscard]] trial const& operator[](index_t t) const noexcept { return room_.trials[t]; }
    [[nodiscard]] std::uint8_t const* wanted(index_t t) const noexcept { return room_.wanted + t * problem_.heads; }
    [[nodiscard]] double value(index_t t, index_t head, index_t offer) const noexcept
    {
        return room_.values[(t * problem_.heads + head) * offers() + offer];
    }

    /// No allocation within the limit loses less.
    [[nodiscard]] double dual() const noexcept
    {
        double most = -std::numeric_limits<double>::infinity();
        for (index_t t = 0; t < count_; ++t) { most = std::max(most, room_.trials[t].dual); }
        return most;
    }

    /// No allocation of these offers within the limit loses less.
    [[nodiscard]] double bound(std::uint8_t const* choice) const noexcept
    {
        double most = -std::numeric_limits<double>::infinity();
        for (index_t t = 0; t < count_; ++t)
        {
            double sum = -room_.trials[t].multiplier * static_cast<double>(limit_);
            for (index_t h = 0; h < problem_.heads; ++h) { sum += value(t, h, choice[h]); }
            most = std::max(most, sum - 0x1p-20 * std::fabs(sum)); // rungs were chosen in float
        }
        return most;
    }

    /// One pass: what every head would take, and what that bounds. The bracket is narrowed.
    index_t try_multiplier(double multiplier)
    {
        price_chunks(multiplier);
        index_t const t = count_++;
        trial now{multiplier, 0, 0};
        for (index_t h = 0; h < problem_.heads; ++h)
        {
            double least       = std::numeric_limits<double>::infinity();
            double bytes       = 0;
            std::uint8_t offer = 0;
            for (index_t k = 0; k < offers(); ++k)
            {
                outlay sum{0, static_cast<double>(menu_.offers[static_cast<std::size_t>(k)].charge)};
                for (index_t n = 0; n < problem_.chunks_per_head(); ++n)
                {
                    outlay const& part = room_.outlays[(h * problem_.chunks_per_head() + n) * offers() + k];
                    sum.loss += part.loss;
                    sum.bytes += part.bytes;
                }
                double const v                                        = sum.loss + multiplier * sum.bytes;
                room_.values[(t * problem_.heads + h) * offers() + k] = v;
                if (v < least || k == 0)
                {
                    least = v;
                    bytes = sum.bytes;
                    offer = static_cast<std::uint8_t>(k);
                }
            }
            room_.wanted[t * problem_.heads + h] = offer;
            now.bytes += bytes;
            now.dual += least;
        }
        now.dual -= multiplier * static_cast<double>(limit_);
        room_.trials[t] = now;
        note(t);
        return t;
    }

    /// The trial at a multiplier, one that was made before if there is one; -1 where none can be made.
    index_t try_once(double multiplier)
    {
        for (index_t t = 0; t < count_; ++t)
        {
            if (room_.trials[t].multiplier == multiplier) { return t; }
        }
        return multiplier < steepest_ && count_ < most_trials ? try_multiplier(multiplier) : -1;
    }

    /// Roughly where the limit binds, by some of the tokens; where a head has few, as if all had the widest offer.
    [[nodiscard]] double guess_multiplier()
    {
        double const start = first_guess();
        if (problem_.tokens_per_head() < 2 * guess_stride) { return start; }
        guessing_ = true;
        try_multiplier(start);
        narrow(start);
        double const found = room_.trials[high_ >= 0 ? high_ : low_].multiplier;
        guessing_          = false;
        count_             = 0;
        low_ = high_ = -1;
        return found;
    }

    /// Finds a trial that does not fit, low_, and one that does, high_; either may be missing at the ends of what can be
    /// tried. The multiplier is one that was tried.
    void narrow(double multiplier)
    {
        if (multiplier == 0 && high_ < 0)
        {
            trial const& free = room_.trials[low_];
            multiplier        = std::clamp(std::fabs(free.dual) / free.bytes, 1e-30, steepest_);
            try_multiplier(multiplier);
        }
        double factor = 1.25;
        for (; high_ < 0 && multiplier < steepest_ && count_ < most_trials / 2; factor *= factor)
        {
            multiplier = std::min(room_.trials[low_].multiplier * factor, steepest_);
            try_multiplier(multiplier);
        }
        for (; low_ < 0 && multiplier > 0 && count_ < most_trials / 2; factor *= factor)
        {
            multiplier = factor < 1e9 ? room_.trials[high_].multiplier / factor : 0.0;
            try_multiplier(multiplier);
        }
        if (low_ >= 0 && high_ >= 0) { close_bracket(); }
    }

private:
    [[nodiscard]] bool fits(index_t t) const noexcept { return room_.trials[t].bytes <= static_cast<double>(limit_); }

    void price_chunks(double multiplier)
    {
        on_.for_each(problem_.chunk_count(), [&](index_t n, index_t) {
            index_t const first = n % problem_.chunks_per_head() * chunk_tokens;
            index_t const count = std::min(chunk_tokens, problem_.tokens_per_head() - first);
            outlay* const sums  = room_.outlays + n * offers();
            if (!guessing_)
            {
                room_.non_finite[n] = price_tokens_at(n, first, count, multiplier, sums);
                return;
            }
            std::array<outlay, max_rungs> piece;
            index_t seen = 0;
            std::fill_n(sums, offers(), outlay{});
            index_t const start =
                count > guess_stride ? guess_stride / 2 : 0; // the first tokens are no token like others
            for (index_t at = start; at < count; at += guess_stride)
            {
                index_t const some = std::min(guess_tokens, count - at);
                static_cast<void>(price_tokens_at(n, first + at, some, multiplier, piece.data()));
                for (index_t k = 0; k < offers(); ++k)
                {
                    sums[k].loss += piece[static_cast<std::size_t>(k)].loss;
                    sums[k].bytes += piece[static_cast<std::size_t>(k)].bytes;
                }
                seen += some;
            }
            double const scale = static_cast<double>(count) / static_cast<double>(seen);
            for (index_t k = 0; k < offers(); ++k) { sums[k] = {sums[k].loss * scale, sums[k].bytes * scale}; }
        });
        for (index_t n = 0; n < problem_.chunk_count() && !guessing_; ++n)
        {
            non_finite_ = non_finite_ || room_.non_finite[n] > 0;
        }
    }

    std::int32_t price_tokens_at(index_t chunk, index_t first, index_t count, double multiplier, outlay* sums) const
    {
        std::array<float const*, max_rungs> rows{};
        for (std::size_t j = 0; j < menu_.rungs; ++j)
        {
            rows[j] = problem_.loss.data_handle()
                      + problem_.loss.mapping()(problem_.head_of(chunk), index_t{menu_.order[j]}, first);
        }
        std::int32_t non_finite = 0;
        with_rungs<Capacity>(menu_.rungs, [&](auto constant) {
            non_finite = price_tokens<decltype(constant)::value>(menu_, rows, count, multiplier, sums);
        });
        return non_finite;
    }

    /// Where the multiplier lies when every head has the widest offer that all can have, by the sample.
    [[nodiscard]] double first_guess() const
    {
        auto const spare = [&](std::size_t k) {
            return limit_ - problem_.heads * menu_.least_bytes(k, problem_.tokens_per_head());
        };
        std::size_t k = menu_.count - 1;
        while (k > 0 && spare(k) < 0) { --k; }
        if (spare(k) < 0) { k = menu_.cheapest(problem_.tokens_per_head()); }
        problem alike       = problem_;
        alike.offers        = &menu_.offers[k];
        alike.offer_of      = nullptr;
        bracket const guess = guess_bracket<Capacity>(alike, std::max<index_t>(spare(k), 0), counters_);
        bool const open     = guess.high > std::numeric_limits<float>::max();
        double const middle = open ? double{guess.low} : (double{guess.low} + double{guess.high}) / 2;
        return std::min(middle / static_cast<double>(std::max<index_t>(problem_.unit(), 1)), steepest_);
    }

    /// Keeps the ends of the bracket: of the trials that fit the one of the smallest multiplier, and the reverse.
    void note(index_t t) noexcept
    {
        double const m = room_.trials[t].multiplier;
        if (fits(t))
        {
            if (high_ < 0 || m <= room_.trials[high_].multiplier) { high_ = t; }
        }
        else if (low_ < 0 || m >= room_.trials[low_].multiplier) { low_ = t; }
    }

    /// Interpolates the bytes over the logarithm of the multiplier; of a side that stays, the weight is halved.
    void close_bracket()
    {
        bool const exactly = exactly_ && !guessing_;
        double weight_low  = 1;
        double weight_high = 1;
        while (count_ + 1 < (exactly ? most_trials : most_trials / 2) && (guessing_ || different_heads() > 0))
        {
            trial const& low  = room_.trials[low_];
            trial const& high = room_.trials[high_];
            // One head's turn: both of its offers are solved, or bounded away.
            if (!exactly && different_heads() == 1 && high.multiplier < 1.05 * low.multiplier) { return; }
            if (guessing_ && high.multiplier < 1.01 * low.multiplier) { return; }
            if (high.multiplier <= low.multiplier * (1 + 0x1p-22)) { return; }
            double const over  = weight_low * (low.bytes - static_cast<double>(limit_));
            double const under = weight_high * (static_cast<double>(limit_) - high.bytes);
            double const next  = mdkv::detail::multiplier_between(low.multiplier, high.multiplier, over, under);
            if (!(next > low.multiplier && next < high.multiplier)) { return; }
            index_t const t = try_multiplier(next);
            weight_low      = fits(t) ? weight_low / 2 : 1;
            weight_high     = fits(t) ? 1 : weight_high / 2;
        }
    }

    [[nodiscard]] index_t different_heads() const noexcept
    {
        index_t different = 0;
        for (index_t h = 0; h < problem_.heads; ++h) { different += wanted(low_)[h] != wanted(high_)[h] ? 1 : 0; }
        return different;
    }

    backend const& on_;
    problem const& problem_;
    menu const& menu_;
    index_t limit_;
    bool exactly_;
    bins const& counters_;
    trial_room const& room_;
    double steepest_; ///< no multiplier above it is tried: its prices would leave the range of float
    index_t count_   = 0;
    index_t low_     = -1;
    index_t high_    = -1;
    bool guessing_   = false; ///< trials are made with some of the tokens
    bool non_finite_ = false;
};

} // namespace mdkv::cpu::dual
