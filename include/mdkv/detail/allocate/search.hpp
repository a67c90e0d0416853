/// \file search.hpp: the search of the smallest multiplier that fits, and of the first tie that does not, by histograms of thresholds (arXiv 2603.20616, section 4.3).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/detail/allocate/work.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/team.hpp>

#include <cstddef>
#include <cstdint>

// At a multiplier m, with thresholds theta_j and steps s_j = c_j - c_(j-1) of each token,
//
//     bytes(m) = c_0 + sum_j s_j [theta_j > m]
//
// so one histogram of thresholds, weighted with s_j, tells the bytes at every edge between bins: a bisection that tries
// a thousand multipliers in a pass.

namespace mdkv::detail::dual
{

/// Clears the histograms, and finds what each limit allows before any loss is read.
struct begin
{
    static constexpr char const* name       = "allocate_begin";
    static constexpr index_t words_per_item = 1 << 15;

    work w;
    index_t words; ///< from `fine` on

    [[nodiscard]] index_t items() const noexcept
    {
        index_t const parts = (words + words_per_item - 1) / words_per_item;
        return parts > w.limits ? parts : w.limits;
    }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const end = (item + 1) * words_per_item < words ? (item + 1) * words_per_item : words;
        for (index_t i = item * words_per_item + t.rank(); i < end; i += t.size()) { w.fine[i] = 0; }
        if (item >= w.limits) { return; }
        index_t const limit = w.limit_of(item);
        problem first{};
        index_t k    = 0;
        first.status = allocation_status::unprojected_only;
        for (index_t other = 0; other < w.sets; ++other)
        {
            bool const fits = w.chooses() ? w.affords(item, other) : w.heads * w.at(other).least <= limit;
            if (!fits || (w.at(other).charge == 0 && other + 1 < w.sets)) { continue; }
            first.status = allocation_status::optimal;
            k            = other;
        }
        if (w.chooses()) { k = w.least_set(); }
        if (w.heads * w.at(k).least > limit) { first.status = allocation_status::over_limit; }
        first.multiplier         = first.over() ? no_more : 0;
        first.room               = first.over() ? 0 : limit - w.heads * w.at(k).least;
        index_t const of_problem = w.rungs() * w.rungs();
        for (index_t b = t.rank(); b < w.candidates * of_problem; b += t.size())
        {
            w.best[item * w.candidates * of_problem + b] = ~std::uint64_t{0};
        }
        for (index_t i = t.rank(); i < w.candidates * w.heads; i += t.size())
        {
            index_t const c                             = i / w.heads; // the last candidate is for `choose` to fill in
            w.set_of[item * w.candidates * w.heads + i] = static_cast<std::uint8_t>(w.chooses() && c < w.sets ? c : k);
        }
        for (index_t c = t.rank(); c < w.candidates; c += t.size())
        {
            first.active                        = !w.chooses() || c == k;
            w.problems[item * w.candidates + c] = first;
        }
    }
};

/// Adds up the bytes of the steps whose threshold lies in each bin of one digit, of those that begin with the digits
/// found.
struct weigh
{
    static constexpr char const* name = "allocate_weigh";

    work w;
    int level;

    [[nodiscard]] index_t items() const { return w.pieces() * w.all_problems(); }
    [[nodiscard]] static index_t scratch_bytes() { return index_t{sizeof(open_piece)}; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        part const here  = w.part_of(item);
        problem const& p = w.problems[here.problem];
        if (!w.searches(p, level) || (level == token_level && here.piece != p.piece)) { return; }
        // Which bins have thresholds is noted in the piece's rungs, which are not known yet.
        std::uint8_t* const seen = w.rungs_of(here);
        bool const looks         = level == 2 || level == piece_level;
        bool const notes         = level == 1 || level == 2;
        auto const place         = [&](index_t bin) { return bin % here.count; };
        bool const none          = looks && seen[place(index_t{p.multiplier} % digit::of_level(level - 1).bins)] == 0;
        t.sync();
        for (index_t i = t.rank(); notes && i < here.count; i += t.size()) { seen[i] = 0; }
        if (none) { return; }
        open_piece& own    = *t.scratch().template take<open_piece>(1);
        index_t const bins = digit::of_level(level).bins;
        own.open(t, w, here, w.set_of[here.problem * w.heads + here.head]);
        with_count(own.rungs.count, [&](auto count) {
            for_groups<decltype(count)::value>(t, own, [&](index_t first, auto const&, auto const& theta, auto const&) {
                constexpr std::size_t constant = decltype(count)::value;
                std::size_t const rungs        = constant == run_time ? own.rungs.count : constant;
                for_rungs<constant>(1, rungs, [&](std::size_t j) { add(t, own, first, theta[j], j, p.multiplier); });
            });
        });
        t.sync();
        std::int64_t* const to = level == piece_level ? w.tied + here.problem * w.pieces() + w.pieces() - 1 - here.piece
                                                      : w.fine + here.problem * fine_bins;
        for (index_t b = t.rank(); b < bins; b += t.size())
        {
            if (own.sums[b] == 0) { continue; }
            t.add_across(to + b, own.sums[b]);
            if (notes) { seen[place(b)] = 1; }
        }
    }

private:
    template <team Team>
    [[gnu::always_inline]] MDKV_HD void add(Team const& t, open_piece& own, index_t first,
        float const (&theta)[Team::lanes], std::size_t j, std::uint32_t prefix) const
    {
        index_t const step = own.step(j);
        digit const d      = digit::of_level(level);
        auto const mask    = static_cast<std::uint32_t>(d.bins - 1);
        if (level == 0)
        {
            for (float const x : theta)
            {
                if (x > 0) { t.add(own.sums + (bits_of(x) >> 21U), step); }
            }
            return;
        }
        std::uint32_t hits = 0;
        MDKV_FOR_LANES(l, Team::lanes)
        {
            bool const hit = bits_of(theta[l]) >> d.low >> d.width == prefix;
            hits |= (hit ? 1U : 0U) << static_cast<unsigned>(l);
        }
        for (; hits != 0; hits &= hits - 1)
        {
            int const l             = lowest_bit(hits);
            std::uint32_t const bin = bits_of(theta[l]) >> d.low & mask;
            t.add(own.sums + (level == token_level ? fine_bins - 1 - first - l : index_t{bin}), step);
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
};

/// Finds the next digit: the lowest bin above which all fits.
struct narrow
{
    static constexpr char const* name = "allocate_narrow";

    work w;
    int level;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        problem& p = w.problems[item];
        if (!w.searches(p, level)) { return; }
        index_t const bins       = level == piece_level ? w.pieces() : digit::of_level(level).bins;
        std::int64_t* const sums = level == piece_level ? w.tied + item * bins : w.fine + item * fine_bins;
        index_t const room       = p.room;
        index_t carried          = 0;
        index_t bin              = bins;
        index_t above            = 0;
        for (index_t from = 0; from < bins; from += t.size())
        {
            index_t const b       = bins - 1 - from - t.rank();
            auto const before     = t.prefix(b >= 0 ? index_t{sums[b]} : index_t{0});
            index_t const exceeds = carried + before.before;
            carried += before.total;
            if (b < 0) { continue; }
            sums[b] = 0; // for the next digit
            if (exceeds <= room)
            {
                bin   = b;
                above = exceeds;
            }
        }
        bin   = bins - t.max(bins - bin);
        above = t.max(above);
        if (t.rank() != 0) { return; }
        p.room = room - above;
        if (level == piece_level) { p.piece = bins - 1 - bin; }
        else if (level == token_level) { p.token = bins - 1 - bin; }
        else { p.multiplier = p.multiplier << digit::of_level(level).width | static_cast<std::uint32_t>(bin); }
    }
};

} // namespace mdkv::detail::dual
