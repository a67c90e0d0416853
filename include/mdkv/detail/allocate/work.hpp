/// \file work.hpp: thresholds of tokens, the operands of allocate's jobs, the memory they share, and how a team reads a piece of one head's tokens (arXiv 2603.20616, section 4.3).
#pragma once

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/ranks.hpp>
#include <mdkv/detail/team.hpp>

#include <type_traits>

// The solution for a limit is a multiplier, which gives every token of its heads a rung by its thresholds, and the ties at the
// multiplier that take the costlier rung. A limit has heads, and a head has pieces of 2,048 tokens. Jobs in their order, and the
// members of `work` and `limit_search` that they write, once all sums are 0:
//
//     begin     searches
//     weigh     histogram                        bytes of thresholds by bin     three times (docs/method.md)
//     narrow    search: multiplier, undecided, left; clears histogram
//     weigh     ties                             bytes of ties by piece
//     narrow    search: tie_piece, left
//     assign    rung, counts, non_finite, piece_losses
//     conclude  report
//
// Every sum over tokens that decides a rung is a sum of whole numbers, so that its order does not matter: the result is
// the same for any number of threads, on every backend, and if heads are spread over ranks. Sums of losses are made in one
// fixed shape (`tree_sum`).

namespace MDKV_NAMESPACE::detail
{

/// The rungs that tokens may take, cheapest first, and the factors that compare them.
struct rung_table
{
    std::size_t count = 0;
    mdkv::array<std::uint8_t, max_rungs> index{}; ///< rung in the caller's ratio set; then other rungs
    mdkv::array<index_t, max_rungs> cost{};       ///< bytes per token
    mdkv::array<mdkv::array<float, max_rungs>, max_rungs> inverse{}; ///< [a][c]: unit / (cost_c - cost_a)

    /// Adds a rung that costs more than those before it. Tables whose tokens compete for the same bytes need the same unit.
    constexpr void add(std::size_t rung, index_t bytes, index_t unit) noexcept
    {
        for (std::size_t a = 0; a < count; ++a)
        {
            inverse[a][count] = static_cast<float>(static_cast<double>(unit) / static_cast<double>(bytes - cost[a]));
        }
        index[count]  = static_cast<std::uint8_t>(rung);
        cost[count++] = bytes;
    }
};

/// Finds the thresholds of neighbouring tokens (docs/method.md, in units of docs/numerics.md), one token a lane. Losses must be
/// finite. Every quotient is computed once and enters all thresholds, so that these fall with the rung in floating point, too. A
/// negative one counts as 0; it is infinite if a difference of losses leaves the range of float.
/// \param loss   losses at the rungs of the table, cheapest first
/// \param theta  thresholds 1, ..., rungs.count - 1; the others stay unset
template <class Floats>
[[gnu::always_inline]] MDKV_HD inline void find_thresholds(
    rung_table const& rungs, Floats const (&loss)[max_rungs], Floats (&theta)[max_rungs]) noexcept
{
    for (std::size_t c = 1; c < rungs.count; ++c)
    {
        Floats least = Floats{} + __builtin_huge_valf();
        theta[c]     = Floats{};
        for (std::size_t a = 0; a < c; ++a)
        {
            least        = smaller((loss[a] - loss[c]) * rungs.inverse[a][c], least);
            theta[a + 1] = larger(least, theta[a + 1]);
        }
    }
}

namespace dual
{

/// Tokens of one piece, an item of most jobs, all of one head.
inline constexpr index_t piece_tokens = 2048;
/// Number of summands that `tree_sum` adds up.
inline constexpr index_t columns = 256;

/// Bits of a multiplier that one level of the search decides, and bins of its histogram.
inline constexpr int level_bits = 11;
inline constexpr index_t bins   = index_t{1} << level_bits;
static_assert(piece_tokens <= bins, "sums by bin are also sums by token of a piece");
/// Bits of a multiplier, a non-negative float: 11, 11 and 9 of them are decided by three levels.
inline constexpr int multiplier_bits         = 31;
inline constexpr std::uint32_t infinite_bits = 0x7f800000; ///< bits of a multiplier that no threshold exceeds

/// The search for one limit's multiplier.
struct limit_search
{
    bool active              = false;
    bool projected           = false; ///< rungs with projections are open, and every head pays for the widest ones
    allocation_status status = allocation_status::optimal;
    std::uint32_t multiplier = 0; ///< its bits, which are ordered like the numbers; the undecided ones are 0
    int undecided            = multiplier_bits; ///< number of undecided low bits
    index_t left             = 0; ///< bytes still to spend by thresholds below multiplier + 2^undecided, and by ties
    index_t tie_piece = -1; ///< the piece of the first tie that does not fit; ties before it take the costlier rung

    [[nodiscard]] MDKV_HD bool over() const noexcept { return status == allocation_status::over_limit; }
    /// Whether the search for the multiplier goes on; or that for ties, to which the bytes go that the multiplier leaves.
    [[nodiscard]] MDKV_HD bool goes_on(bool ties) const noexcept
    {
        return active && !over() && (ties ? multiplier != 0 : undecided > 0);
    }
    /// Number of low bits that the next level leaves undecided.
    [[nodiscard]] MDKV_HD int shift() const noexcept { return undecided > level_bits ? undecided - level_bits : 0; }
    /// Bins of the next level, each of 2^shift() multipliers.
    [[nodiscard]] MDKV_HD index_t bins() const noexcept { return index_t{1} << (undecided - shift()); }
};

/// Tokens of one head of one limit.
struct piece
{
    index_t limit;
    index_t number; ///< among all pieces, on all ranks
    index_t head;   ///< number of the head, on all ranks
    index_t own;    ///< number of the head among this rank's
    index_t first;  ///< first token
    index_t count;  ///< tokens
};

/// Operands and memory of all jobs of a call.
template <space S>
struct work
{
    rung_costs costs;
    rung_table open[2]{}; ///< rungs without projections; all rungs
    index_t charge;       ///< bytes of a head's widest projections
    index_t widest_step;  ///< bytes from the cheapest rung to the costliest, or 1
    list_losses<S> of;
    index_t const* limit_values; // [limits]
    allocation* report;          // [limits]

    head_share share; ///< this rank's heads of each layer
    index_t limits;
    index_t heads; ///< heads of a limit, on all ranks
    index_t pieces_per_head;

    limit_search* searches = nullptr; // [limits]

    // Sums, behind each other; over ranks each rank adds up its own heads' part, and `sum_over_ranks` joins them
    std::int64_t* histogram  = nullptr; // [limits, bins]  bytes of the thresholds in each bin
    std::int64_t* ties       = nullptr; // [limits, pieces]  bytes
    std::int64_t* counts     = nullptr; // [limits, heads, max_rungs]  tokens at each rung
    std::int64_t* non_finite = nullptr; // [limits]  tokens with a non-finite loss
    double* piece_losses     = nullptr; // [limits, pieces]

    /// Pieces of a limit.
    [[nodiscard]] MDKV_HD index_t pieces() const noexcept { return heads * pieces_per_head; }
    [[nodiscard]] MDKV_HD index_t own_pieces() const noexcept { return of.heads() * pieces_per_head; }
    /// A limit's bytes without the channels of keys, and at most the bytes that all its heads can take.
    [[nodiscard]] MDKV_HD index_t bytes_of(index_t limit) const noexcept
    {
        index_t const most  = heads * (charge + of.longest() * costs.bytes[costs.rungs - 1]);
        index_t const given = limit_values[limit];
        index_t const left  = given > heads * costs.channels ? given - heads * costs.channels : given < 0 ? -1 : 0;
        return left < most ? left : most;
    }
    /// Bytes of a limit's heads with all tokens at the cheapest open rung; -1 if no rung is open.
    [[nodiscard]] MDKV_HD index_t least(bool projected) const noexcept
    {
        if (open[projected].count == 0) { return -1; }
        return of.longest() == 0 ? 0 : heads * ((projected ? charge : 0) + of.longest() * open[projected].cost[0]);
    }
    /// Item `item` of this rank's pieces.
    [[nodiscard]] MDKV_HD piece own_piece(index_t item) const noexcept
    {
        index_t const own   = item / pieces_per_head;
        index_t const head  = share.first + own / share.own * share.all + own % share.own;
        index_t const part  = item % pieces_per_head;
        index_t const first = part * piece_tokens;
        index_t const rest  = of.count(own) > first ? of.count(own) - first : 0;
        return {
            head / heads, head * pieces_per_head + part, head, own, first, rest < piece_tokens ? rest : piece_tokens};
    }
};
static_assert(std::is_trivially_copyable_v<work<space::host>>);

/// A team's memory for a piece: the rungs open to its head, its losses, and sums.
struct alignas(16) open_piece
{
    std::int64_t sums[bins]; ///< bytes, by bin or by token
    double losses[columns];
    rung_table rungs;
    float const* rows[max_rungs]; ///< losses of open rungs, then of the others
    std::size_t all;              ///< number of rungs, open and closed
    index_t count;                ///< number of tokens

    /// The team's memory, opened for a piece.
    template <team Team, space S>
    [[nodiscard]] MDKV_HD static open_piece& of(Team const& t, work<S> const& w, piece const& p)
    {
        open_piece& opened = *t.scratch().template take<open_piece>(1);
        if (t.rank() == 0)
        {
            opened.all   = w.costs.rungs;
            opened.count = p.count;
            opened.rungs = w.open[w.searches[p.limit].projected];
            for (std::size_t r = 0; r < opened.all; ++r)
            {
                opened.rows[r] = w.of.losses_at(p.own, index_t{opened.rungs.index[r]}) + p.first;
            }
        }
        t.sync();
        return opened;
    }
    MDKV_HD static void clear(team auto const& t, auto* x, index_t n)
    {
        for (index_t i = t.rank(); i < n; i += t.size()) { x[i] = 0; }
        t.sync();
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
[[nodiscard]] MDKV_OUTLINE MDKV_HD double tree_sum(team auto const& t, double* x)
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

} // namespace dual

} // namespace MDKV_NAMESPACE::detail
