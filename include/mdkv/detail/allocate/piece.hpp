/// \file piece.hpp: how a team reads a piece of one head's tokens: their losses and thresholds, and its sums (arXiv 2603.20616, section 4.3).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/detail/allocate/work.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/detail/threshold.hpp>

#include <cstddef>
#include <cstdint>

namespace MDKV_NAMESPACE::detail::dual
{

/// A team's memory for a piece: the rungs open to its head, its losses, and sums.
struct alignas(16) open_piece
{
    std::int64_t sums[bins]; ///< bytes, by bin or by token
    double losses[columns];
    rung_table rungs;
    index_t steps[max_rungs];     ///< bytes from each open rung but the first to the one before it
    float const* rows[max_rungs]; ///< losses of open rungs, then of the others
    std::size_t all;              ///< number of rungs, open and closed
    index_t count;                ///< number of tokens

    /// The team's memory, opened for a piece of a head that has set k.
    template <team Team>
    [[nodiscard]] MDKV_HD static open_piece& of(Team const& t, work const& w, piece const& p, index_t k)
    {
        open_piece& opened = *t.scratch().template take<open_piece>(1);
        if (t.rank() == 0) { opened.open(w, p, k); }
        t.sync();
        return opened;
    }
    /// Opened with the set that the piece's problem gives to its head.
    template <team Team>
    [[nodiscard]] MDKV_HD static open_piece& of(Team const& t, work const& w, piece const& p)
    {
        return of(t, w, p, w.set_of[p.problem * w.heads + p.head]);
    }
    template <team Team, class V>
    MDKV_HD static void clear(Team const& t, V* x, index_t n)
    {
        for (index_t i = t.rank(); i < n; i += t.size()) { x[i] = 0; }
        t.sync();
    }

private:
    MDKV_HD void open(work const& w, piece const& p, index_t k)
    {
        all                = w.costs.rungs;
        count              = p.count;
        rungs.count        = 0;
        std::size_t closed = all;
        for (std::size_t r = 0; r < all; ++r)
        {
            bool const is_open                     = (w.set_at(k).open >> r & 1) != 0;
            rows[is_open ? rungs.count : --closed] = w.losses_of(p) + static_cast<index_t>(r) * w.loss_of_rung;
            if (!is_open) { continue; }
            rungs.add(r, w.costs.bytes[r]);
            std::size_t const c = rungs.count - 1;
            steps[c]            = c == 0 ? 0 : rungs.cost[c] - rungs.cost[c - 1];
            for (std::size_t a = 0; a < c; ++a) { rungs.inverse[a][c] = w.inverse[rungs.index[a]][r]; }
        }
    }
};

/// Neighbouring tokens of a piece, one a lane.
template <int Lanes>
struct neighbours
{
    using floats = lane_floats<Lanes>;
    using ints   = lane_ints<Lanes>;

    floats loss[max_rungs];  ///< at the open rungs; 0 past the end, and for tokens with a non-finite loss
    floats theta[max_rungs]; ///< thresholds 1, ..., rungs.count - 1
    ints non_finite;         ///< 1 for tokens with a NaN or infinite loss, also at a closed rung

    MDKV_HD void read(open_piece const& from, index_t first)
    {
        floats zero{}; // NaN for tokens with a non-finite loss
        for (std::size_t r = 0; r < from.all; ++r)
        {
            float const* const row = from.rows[r] + first;
            if (first + Lanes <= from.count) { loss[r] = load_lanes<floats>(row); }
            else
            {
                float padded[std::size_t{Lanes}]{};
                for (int l = 0; first + l < from.count; ++l) { padded[l] = row[l]; }
                loss[r] = load_lanes<floats>(padded);
            }
            zero += loss[r] * 0.0F;
        }
        non_finite = zero == 0.0F ? ints{} : ints{} + 1;
        for (std::size_t r = 0; r < from.rungs.count; ++r) { loss[r] = zero == 0.0F ? loss[r] : floats{}; }
        find_thresholds(from.rungs, loss, theta);
    }
};

/// The sum of `columns` doubles, in the same order for every team; overwrites them.
template <team Team>
[[nodiscard]] MDKV_OUTLINE MDKV_HD double tree_sum(Team const& t, double* x)
{
    for (index_t width = columns / 2; width > 0; width /= 2)
    {
        t.sync();
        for (index_t c = t.rank(); c < width; c += t.size()) { x[c] += x[c + width]; }
    }
    t.sync();
    double const total = x[0];
    t.sync();
    return total;
}

/// The sum of x(0), ..., x(n - 1), in the same order for every team.
/// \param scratch  [columns]
template <team Team, class X>
[[nodiscard]] MDKV_HD double ordered_sum(Team const& t, double* scratch, index_t n, X const& x)
{
    double total = 0;
    for (index_t from = 0; from < n; from += columns)
    {
        for (index_t c = t.rank(); c < columns; c += t.size()) { scratch[c] = from + c < n ? x(from + c) : 0.0; }
        total += tree_sum(t, scratch);
    }
    return total;
}

} // namespace MDKV_NAMESPACE::detail::dual
