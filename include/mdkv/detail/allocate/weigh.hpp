/// \file weigh.hpp: histograms of thresholds, and the curves of bytes and losses that they make (arXiv 2603.20616, section 4.3).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/detail/allocate/work.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/detail/threshold.hpp>

#include <cstddef>
#include <cstdint>

namespace mdkv::detail::dual
{

/// Adds up the bytes of the steps whose threshold lies in each bin of one digit: of all thresholds, or of those that begin
/// with the digits found. Where heads choose, the first digit has a histogram for every set, and sums what steps save, too.
struct weigh
{
    static constexpr char const* name = "allocate_weigh";

    work w;
    int level;

    [[nodiscard]] index_t items() const { return w.pieces() * (level == 0 ? w.limits * w.rows : w.problems()); }
    [[nodiscard]] index_t scratch_bytes() const { return room{carver{}, *this}.bytes; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const piece = item % w.pieces();
        index_t const head  = piece / w.pieces_per_head;
        index_t const share = item / w.pieces();
        index_t const limit = share / (level == 0 ? w.rows : w.candidates);
        index_t const row   = level == 0 ? share % w.rows : 0;
        index_t const from  = level == 0 ? limit * w.candidates : share;
        limit_state& state  = w.states[limit];
        index_t const set   = level == 0 && w.choose ? row : index_t{w.set_of[from * w.heads + head]};
        if (state.over() || (level == 0 ? w.choose && !state.needs(set) : !w.found[share].active)) { return; }

        std::uint32_t const prefix = level == 0 ? 0 : w.found[share].prefix;
        index_t const first        = piece % w.pieces_per_head * piece_tokens;
        std::uint8_t* const seen   = w.rungs_at(share, head, first); // until rungs are known
        index_t const seen_count   = w.tokens - first < piece_tokens ? w.tokens - first : piece_tokens;
        auto const place           = [&](index_t bin) { return bin < seen_count ? bin : 0; };
        if (level == 2 && seen[place(prefix % fine_bins)] == 0) { return; }
        room const own{t.scratch(), *this};
        own.tokens->open(t, w, limit * w.heads + head, piece % w.pieces_per_head, set);
        index_t const bins  = digit::of_level(level).bins();
        index_t const words = level == 0 && w.choose ? 2 * bins : bins;
        for (index_t b = t.rank(); b < words; b += t.size()) { own.sums[b] = 0; }
        t.sync();
        for (index_t at = 0; at < own.tokens->count; at += columns)
        {
            find_thresholds(t, *own.tokens, w.costs.rungs, at, own.theta);
            if (level == 0) { add_all(t, own, own.tokens->rungs); }
            else { add_inside(t, own, own.tokens->rungs, prefix); }
        }
        if (level == 0 && w.choose)
        {
            double const sum = offset(t, own, set);
            if (t.rank() == 0) { w.offsets[(limit * w.pieces() + piece) * w.rows + row] = sum; }
        }
        t.sync();
        std::int64_t* const to = level == 0 ? w.coarse_row(limit * w.heads + head, row) : w.fine + share * fine_bins;
        index_t highest        = -1;
        std::int64_t const* const sums = own.sums;
        bool const second              = level == 1;
        for (index_t i = t.rank(); second && i < seen_count; i += t.size()) { seen[i] = 0; }
        t.sync();
        for (index_t b = t.rank(); b < words; b += t.size())
        {
            if (sums[b] == 0) { continue; }
            t.add_across(to + b, sums[b]);
            if (second) { seen[place(b)] = 1; }
            if (b < bins) { highest = b; }
        }
        if (level > 0 || !w.choose) { return; }
        highest = t.max(highest);
        if (t.rank() == 0 && highest >= 0) { t.min_across(&state.unused_bins, bins - 1 - highest); }
    }

private:
    struct room
    {
        open_piece* tokens;
        std::int64_t* sums; // [2, bins]
        float* theta;       // [rungs, columns]
        double* sum;        // [columns]
        index_t bytes;

        MDKV_HD room(carver cut, weigh const& job)
            : tokens{cut.take<open_piece>(1)}
            , sums{cut.take<std::int64_t>(fine_bins)}
            , theta{cut.take<float>(static_cast<index_t>(job.w.costs.rungs) * columns)}
            , sum{cut.take<double>(job.w.choose ? columns : 0)}
            , bytes{cut.bytes()}
        {}
    };

    template <team Team>
    MDKV_HD void add_all(Team const& t, room const& own, rung_table const& rungs) const
    {
        bool const save = w.choose;
        int const shift = save ? w.saved_shift() : 0;
        for (std::size_t j = 1; j < rungs.count; ++j)
        {
            index_t const step = rungs.cost[j] - rungs.cost[j - 1];
            float const* x     = own.theta + static_cast<index_t>(j) * columns;
            for (index_t i = t.rank(); i < columns; i += t.size())
            {
                std::uint32_t const bits = bits_of(x[i]);
                if (Team::lanes == 1 && bits == 0) { continue; } // most are not
                index_t const bytes = bits != 0 ? step : 0;
                t.add(own.sums + (bits >> 21), bytes);
                if (save) { t.add(own.sums + coarse_bins + (bits >> 21), bytes * ((bits & 0x1fffffU) >> shift)); }
            }
        }
    }

    template <team Team>
    MDKV_HD void add_inside(Team const& t, room const& own, rung_table const& rungs, std::uint32_t prefix) const
    {
        digit const d   = digit::of_level(level);
        auto const mask = static_cast<std::uint32_t>(d.bins() - 1);
        for (std::size_t j = 1; j < rungs.count; ++j)
        {
            index_t const step = rungs.cost[j] - rungs.cost[j - 1];
            float const* x     = own.theta + static_cast<index_t>(j) * columns;
            for (index_t i = t.rank() * Team::lanes; i < columns; i += t.size() * Team::lanes)
            {
                std::uint32_t hits = 0;
                MDKV_FOR_LANES(l, Team::lanes)
                {
                    std::uint32_t const bits = bits_of(x[i + l]);
                    hits |= (bits != 0 && bits >> d.low >> d.width == prefix ? 1U : 0U) << static_cast<unsigned>(l);
                }
                for (; hits != 0; hits &= hits - 1)
                {
                    t.add(own.sums + (bits_of(x[i + lowest_bit(hits)]) >> d.low & mask), step);
                }
            }
        }
    }

    [[nodiscard]] MDKV_HD static int lowest_bit(std::uint32_t bits)
    {
#if defined(__CUDA_ARCH__)
        return __ffs(static_cast<int>(bits)) - 1;
#else
        return __builtin_ctz(bits);
#endif
    }

    /// What the piece loses at the set's cheapest rung; beyond the first set, more than at the first set's.
    template <team Team>
    MDKV_HD double offset(Team const& t, room const& own, index_t set) const
    {
        open_piece const& tokens = *own.tokens;
        std::size_t first        = 0;
        while (tokens.rungs.index[first] != w.cheapest_of(0)) { ++first; }
        if (set > 0 && first == 0) { return 0; }
        for (index_t c = t.rank(); c < columns; c += t.size())
        {
            double total = 0;
            for (index_t i = c; i < tokens.count; i += columns)
            {
                float silence = 0;
                for (std::size_t r = 0; r < w.costs.rungs; ++r) { silence += tokens.rows[r][i] * 0.0F; }
                double const less = set == 0 ? 0.0 : double{tokens.rows[first][i]};
                total += silence == 0.0F ? double{tokens.rows[0][i]} - less : 0.0;
            }
            own.sum[c] = total;
        }
        return tree_sum(t, own.sum);
    }
};

/// The highest bin of the first digit that a threshold of the limit lies in; 0 where there is none.
[[nodiscard]] MDKV_HD inline index_t highest_bin(limit_state const& state) noexcept
{
    return coarse_bins - 1 - state.unused_bins;
}

/// Makes of a row's sums what all thresholds in bins above take and save (the latter in quanta, rounded up).
struct curves
{
    static constexpr char const* name = "allocate_curves";

    work w;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const head       = item / w.rows;
        index_t const row        = item % w.rows;
        index_t const limit      = head / w.heads;
        limit_state const& state = w.states[limit];
        if (state.over() || (w.choose && !state.needs(row))) { return; }
        std::int64_t* const bytes = w.coarse_row(head, row);
        std::int64_t* const saved = bytes + coarse_bins;
        int const shift           = w.choose ? w.saved_shift() : 0;
        double const factor =
            w.choose ? power_of_two(-w.quantum(highest_bin(state))) / static_cast<double>(w.unit) : 0.0;
        index_t bytes_above = 0;
        index_t saved_above = 0;
        for (index_t from = 0; from < coarse_bins; from += t.size())
        {
            index_t const b = coarse_bins - 1 - from - t.rank();
            index_t x       = 0;
            index_t y       = 0;
            if (b >= 0)
            {
                x = bytes[b];
                if (w.choose && x > 0) { y = quanta(b, x, saved[b], shift, factor); }
            }
            auto const here = t.prefix(x);
            if (b >= 0) { bytes[b] = bytes_above + here.before; }
            bytes_above += here.total;
            if (!w.choose) { continue; }
            auto const there = t.prefix(y);
            if (b >= 0) { saved[b] = saved_above + there.before; }
            saved_above += there.total;
        }
        if (!w.choose) { return; }
        auto cut              = t.scratch();
        double* const room    = cut.template take<double>(columns);
        double const* const x = w.offsets + head * w.pieces_per_head * w.rows + row;
        double const sum      = ordered_sum(t, room, w.pieces_per_head, [&](index_t p) { return x[p * w.rows]; });
        if (t.rank() == 0) { w.row_offset[item] = sum; }
    }

    [[nodiscard]] static index_t scratch_bytes()
    {
        carver cut;
        static_cast<void>(cut.take<double>(columns));
        return cut.bytes();
    }

private:
    /// \param rest  sum over steps of bytes * the digits of their thresholds below the first
    [[nodiscard]] MDKV_HD static index_t quanta(index_t bin, index_t bytes, index_t rest, int shift, double factor)
    {
        int const e       = static_cast<int>(bin / 4);
        double const unit = power_of_two((e == 0 ? 1 : e) - 150 + shift);
        double const sum  = rounded_product(coarse_edge(bin), static_cast<double>(bytes))
                           + rounded_product(unit, static_cast<double>(rest));
        return static_cast<index_t>(sum * factor) + 1;
    }
};

} // namespace mdkv::detail::dual
