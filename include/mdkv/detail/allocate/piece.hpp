/// \file piece.hpp: how a team reads a piece of one head's tokens: their losses and thresholds, the bins it has seen, its sums (arXiv 2603.20616, section 4.3).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/detail/allocate/work.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/detail/threshold.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace mdkv::inline MDKV_MACHINE::detail::dual
{

/// The bins of the last search in which a piece has thresholds, noted in the memory of its rungs, which are not known yet.
struct seen_bins
{
    std::uint8_t* of;
    index_t count; ///< tokens of the piece
    index_t mask;

    /// \param first  first token of the piece, counted in the block
    MDKV_HD seen_bins(work const& w, part const& block, index_t first) noexcept
        : of{w.rungs_of(block) + first}
        , count{block.count - first < piece_tokens ? block.count - first : piece_tokens}
        , mask{count == piece_tokens ? piece_tokens - 1 : 0} // a shorter piece only notes that it has some bin
    {}
    [[nodiscard]] MDKV_HD bool has(index_t bin) const noexcept { return bin < 0 || of[bin & mask] != 0; }
    MDKV_HD void note(index_t bin) const noexcept { of[bin & mask] = 1; }
    template <team Team>
    MDKV_HD void clear(Team const& t) const noexcept
    {
        for (index_t i = t.rank(); i < count; i += t.size()) { of[i] = 0; }
    }
};

/// A team's memory for a piece: the rungs open to its head, its losses, and sums.
struct alignas(16) open_piece
{
    std::int64_t sums[fine_bins + 2]; ///< sums of the bins, of thresholds above them, and of thresholds in none
    double losses[columns];
    rung_table rungs;
    float const* rows[max_rungs]; ///< losses of open rungs, then of the others
    std::size_t all;              ///< number of rungs, open and closed
    index_t count;                ///< number of tokens

    /// All members of the team fill it together.
    template <team Team>
    MDKV_HD void open(Team const& t, work const& w, part const& p, index_t k)
    {
        if (t.rank() == 0)
        {
            all                = w.costs.rungs;
            count              = p.count;
            rungs.count        = 0;
            std::size_t closed = all;
            for (std::size_t r = 0; r < all; ++r)
            {
                bool const is_open                     = (w.at(k).open >> r & 1) != 0;
                rows[is_open ? rungs.count : --closed] = w.loss + (p.limit * w.heads + p.head) * w.loss_of_head
                                                         + static_cast<index_t>(r) * w.loss_of_rung + p.first;
                if (!is_open) { continue; }
                rungs.add(r, w.costs.bytes[r]);
                std::size_t const c = rungs.count - 1;
                for (std::size_t a = 0; a < c; ++a) { rungs.inverse[a][c] = w.inverse[rungs.index[a]][r]; }
            }
        }
        t.sync();
    }
    template <team Team, class V, std::size_t N>
    MDKV_HD static void clear(Team const& t, V (&sums_of)[N])
    {
        for (index_t i = t.rank(); i < index_t{N}; i += t.size()) { sums_of[i] = 0; }
        t.sync();
    }
    [[nodiscard]] MDKV_HD index_t step(std::size_t j) const noexcept { return rungs.cost[j] - rungs.cost[j - 1]; }
};

/// The first n of neighbouring losses, then 0.
template <int Lanes>
MDKV_OUTLINE MDKV_HD void read_some(float const* from, index_t n, lane_floats<Lanes>& loss)
{
    float some[std::size_t{Lanes}]{};
    for (index_t l = 0; l < n; ++l) { some[l] = from[l]; }
    loss = load_lanes<lane_floats<Lanes>>(some);
}

/// The losses of neighbouring tokens, one a lane; 0 past the end.
template <int Lanes>
[[nodiscard, gnu::always_inline]] MDKV_HD inline lane_floats<Lanes> read_losses(
    float const* row, index_t first, index_t count)
{
    lane_floats<Lanes> loss;
    if (first + Lanes <= count) { loss = load_lanes<lane_floats<Lanes>>(row + first); }
    else { read_some<Lanes>(row + first, count - first, loss); }
    return loss;
}

/// Neighbouring tokens of a piece, one a lane.
template <int Lanes, std::size_t Count>
struct neighbours
{
    using floats                          = lane_floats<Lanes>;
    static constexpr std::size_t capacity = token_thresholds<Lanes, Count>::capacity;

    floats loss[capacity]; ///< losses of the open rungs; 0 past the end, and for tokens with a non-finite loss
    floats silence;        ///< non-zero for tokens with a NaN or infinite loss
    token_thresholds<Lanes, Count> steps;

    [[gnu::always_inline]] MDKV_HD void read(open_piece const& from, index_t first)
    {
        std::size_t const count = Count == run_time ? from.rungs.count : Count;
        silence                 = floats{};
        for_rungs<Count>(0, count, [&](std::size_t r) {
            loss[r] = read_losses<Lanes>(from.rows[r], first, from.count);
            silence += loss[r] * 0.0F;
        });
        for (std::size_t r = count; r < from.all; ++r)
        {
            silence += read_losses<Lanes>(from.rows[r], first, from.count) * 0.0F;
        }
        for_rungs<Count>(0, count, [&](std::size_t r) { loss[r] = silence == 0.0F ? loss[r] : floats{}; });
        steps.find(from.rungs, loss);
    }
};

/// Calls body with the number of rungs: as a constant if it is 4, the usual one.
template <class Body>
MDKV_HD void with_count(std::size_t count, Body const& body)
{
    if (count == 4) { body(std::integral_constant<std::size_t, 4>{}); }
    else { body(std::integral_constant<std::size_t, run_time>{}); }
}

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
/// \param room  [columns]
template <team Team, class X>
[[nodiscard]] MDKV_HD double ordered_sum(Team const& t, double* room, index_t n, X const& x)
{
    double total = 0;
    for (index_t from = 0; from < n; from += columns)
    {
        for (index_t c = t.rank(); c < columns; c += t.size()) { room[c] = from + c < n ? x(from + c) : 0.0; }
        total += tree_sum(t, room);
    }
    return total;
}

} // namespace mdkv::inline MDKV_MACHINE::detail::dual
