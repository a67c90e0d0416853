/// \file work.hpp: the operands of allocate's jobs, and the memory they share (arXiv 2603.20616, section 4.3).
#pragma once

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

// Every sum over tokens that decides a rung is a sum of whole numbers, so that its order does not matter: the result is
// the same for any number of threads, on every backend, and if heads are spread over ranks. Sums of losses are made in one
// fixed shape (`tree_sum`).

namespace MDKV_NAMESPACE::detail::dual
{

/// Tokens of one piece, an item of most jobs, all of one head.
inline constexpr index_t piece_tokens = 2048;
/// Tokens of one stretch. Pieces are grouped, so that fewer histograms are added to the limit's.
inline constexpr index_t stretch_tokens = 4 * piece_tokens;
/// Number of summands that `tree_sum` adds up.
inline constexpr index_t columns = 256;
/// Tokens of one limit, so that a token's number fits below the bits of a threshold.
inline constexpr index_t most_tokens = index_t{1} << 33;

/// Bits of a multiplier that one level of the search decides, and bins of its histogram.
inline constexpr int level_bits = 11;
inline constexpr index_t bins   = index_t{1} << level_bits;
static_assert(piece_tokens <= bins, "sums by bin are also sums by token of a piece");
/// Bits of a multiplier, a non-negative float: 11, 11 and 9 of them are decided by three levels.
inline constexpr int multiplier_bits = 31;
/// Most bits that a sample leaves undecided, half of an octave: two levels are left if the guess is right.
inline constexpr int guess_bits = 2 * level_bits;
/// One group of neighbours in so many is in the sample, which limits of fewer tokens do without.
inline constexpr index_t sample_share  = 16;
inline constexpr index_t least_sampled = 1 << 15;
/// Bins of a head's curve, each as wide as the lowest `coarse_bits` bits of a multiplier: two levels are left.
inline constexpr index_t coarse_bins   = 1024;
inline constexpr int coarse_bits       = 21;
inline constexpr std::uint32_t no_more = 0x7f800000; ///< infinity: no threshold exceeds it

/// a * b, rounded before anything is added to it on every machine, though compilers may fuse products with sums.
[[nodiscard]] MDKV_HD inline double rounded_product(double a, double b) noexcept
{
#if defined(__CUDA_ARCH__)
    return __dmul_rn(a, b);
#else
    double product = a * b;
    asm("" : "+m"(product));
    return product;
#endif
}

/// Rungs that a head may use, and its charge for their projections.
struct rung_set
{
    std::uint16_t open; ///< bit r: rung r
    index_t charge;
    index_t least; ///< bytes of a head with all tokens at the cheapest rung, projections included
};

/// One limit with a set of rungs for every head, and its solution.
struct problem
{
    static constexpr index_t any_bin = -1;

    bool active; ///< is to be solved
    allocation_status status;
    std::uint32_t multiplier; ///< its bits, which are ordered like the numbers; the undecided ones are 0
    int undecided;            ///< number of undecided low bits
    bool guessed;             ///< the interval is a sample's, and may be wrong
    index_t bin;              ///< the bin of the last level that became the interval, or any_bin
    index_t left;  ///< bytes still to spend by thresholds below multiplier + 2^undecided, then by ties and upgrades
    index_t piece; ///< the piece of the first tie that does not fit; ties before it take the costlier rung
    index_t token; ///< that tie's number in its piece
    allocation report;

    [[nodiscard]] MDKV_HD bool over() const noexcept { return status == allocation_status::over_limit; }
    /// Number of low bits that the next level leaves undecided.
    [[nodiscard]] MDKV_HD int shift() const noexcept { return undecided > level_bits ? undecided - level_bits : 0; }
    /// Bins of the next level, each of 2^shift() multipliers.
    [[nodiscard]] MDKV_HD index_t bins() const noexcept { return index_t{1} << (undecided - shift()); }
    /// Sets an interval around a sample's multiplier, which lies in a bin of `here` bytes with `before` of them above. `error`
    /// is the standard deviation of the bytes above: the interval is at least four wide.
    MDKV_HD void guess(std::uint32_t lowest, double before, double here, double error) noexcept
    {
        double const width = static_cast<double>(1U << shift());
        std::uint32_t const middle =
            lowest + static_cast<std::uint32_t>(before < here ? width * (1 - before / here) : 0);
        for (undecided = shift(); undecided < guess_bits && here < 4 * error; ++undecided) { here *= 2; }
        std::uint32_t const half = 1U << (undecided - 1);
        multiplier               = middle > half ? middle - half : 0;
        guessed                  = true;
        bin                      = any_bin;
    }
};

/// Tokens of one piece, or stretch, of one problem.
struct part
{
    index_t problem;
    index_t limit;
    index_t piece; ///< number among the problem's pieces, or stretches, on all ranks
    index_t head;  ///< number in the limit, on all ranks
    index_t own;   ///< number in the limit among this rank's heads; negative for a head of another rank
    index_t first;
    index_t count;
};

/// Operands and memory of all jobs of a call.
struct work
{
    rung_costs costs;
    mdkv::array<mdkv::array<float, max_rungs>, max_rungs> inverse; ///< inverses for all rungs, see rung_table
    index_t unit;                                                  ///< bytes of the widest step
    mdkv::array<rung_set, max_rungs> set;                          ///< each set has all rungs of the set before
    index_t sets;
    index_t candidates; ///< problems of a limit: if heads choose, one for each set, and one with the heads' choices
    bool by_use;
    bool spend_leftover;
    int dropped_bits; ///< dropped of a threshold's last coarse_bits: no sum of bytes times the others leaves 64 bits

    float const* loss; // [H, R, N], or [R, M]: see first_token
    index_t loss_of_head;
    index_t loss_of_rung;
    index_t const* first_token;  // [own + 1]  where heads' tokens begin among all M; null: each head has N
    index_t const* limit_values; // [limits]
    std::uint8_t* rung;          // [H, N]
    index_t rung_of_head;
    allocation* report; // [limits]

    index_t limits;
    index_t heads;         ///< heads of a limit, on all ranks
    index_t own;           ///< this rank's heads of a limit, whose losses and rungs are in its memory
    index_t own_in_layer;  ///< this rank's heads of one layer; their numbers follow each other
    index_t head_of_layer; ///< distance of two layers' numbers of heads
    index_t first_head;    ///< number of this rank's first head
    index_t tokens;        ///< tokens of the longest head
    index_t pieces_per_head;
    index_t stretches_per_head;

    std::int64_t* fine;   // [problems, bins + 1]  bytes of the thresholds in each bin, and above a guess
    std::int64_t* ties;   // [problems, pieces]  bytes
    std::int64_t* tied;   // [problems, 2]  a problem's `token` and `left`, by the rank of the tie; null on one rank
    std::int64_t* counts; // [problems, heads, max_rungs]  tokens at each rung
    std::int64_t* spoilt; // [problems]  tokens with a non-finite loss
    double* losses;       // [problems, pieces]
    double* gains; // [problems, R, R]  loss that the best upgrades save, by the ranks of their tokens; null on one rank
    std::int64_t* coarse; // [limits * heads, sets, 2, coarse_bins]  bytes; sums of thresholds' last bits, then losses
    double* offsets;      // [limits, pieces, sets]  least losses
    problem* problems;    // [problems]
    std::uint8_t* set_of; // [problems, heads]
    std::uint8_t* seen;  // [problems, own stretches, bins]  whether a stretch has thresholds in a bin of its last level
    std::uint64_t* best; // [problems, R, R]  the best upgrade
    double* dual;        // [limits]  lower bounds of the loss with the heads' choices
    index_t* winner;     // [limits]  the problem of least loss
    std::uint8_t* codes; // [limits, candidates - 1, own heads, N]  rungs of all candidates but the first

    [[nodiscard]] MDKV_HD bool chooses() const noexcept { return candidates > 1; }
    [[nodiscard]] MDKV_HD index_t pieces() const noexcept { return heads * pieces_per_head; }
    [[nodiscard]] MDKV_HD index_t own_pieces() const noexcept { return own * pieces_per_head; }
    [[nodiscard]] MDKV_HD index_t own_stretches() const noexcept { return own * stretches_per_head; }
    [[nodiscard]] MDKV_HD index_t all_problems() const noexcept { return limits * candidates; }
    [[nodiscard]] MDKV_HD index_t rungs() const noexcept { return static_cast<index_t>(costs.rungs); }
    /// A limit's bytes without the channels of keys, and at most the bytes that all its heads can take.
    [[nodiscard]] MDKV_HD index_t limit_of(index_t limit) const noexcept
    {
        index_t const most  = heads * (costs.widest_projection() + tokens * costs.bytes[costs.rungs - 1]);
        index_t const given = limit_values[limit];
        index_t const left  = given > heads * costs.channels ? given - heads * costs.channels : given < 0 ? given : 0;
        return left < most ? left : most;
    }
    /// The set with the fewest bytes.
    [[nodiscard]] MDKV_HD index_t least_set() const noexcept
    {
        index_t least = 0;
        for (index_t k = 1; k < sets; ++k) { least = at(k).least < at(least).least ? k : least; }
        return least;
    }
    /// Whether one head can have set k if all others have the least set.
    [[nodiscard]] MDKV_HD bool affords(index_t limit, index_t k) const noexcept
    {
        return (heads - 1) * at(least_set()).least + at(k).least <= limit_of(limit);
    }
    [[nodiscard]] MDKV_HD rung_set const& at(index_t k) const noexcept { return set[static_cast<std::size_t>(k)]; }
    /// Bytes and losses of a head with a set; `head` is counted over all limits.
    [[nodiscard]] MDKV_HD std::int64_t* row(index_t head, index_t k) const noexcept
    {
        return coarse + (head * sets + k) * 2 * coarse_bins;
    }
    /// Whether the search for a problem's multiplier goes on.
    [[nodiscard]] MDKV_HD bool searches(problem const& p) const noexcept
    {
        return p.active && !p.over() && p.undecided > 0;
    }
    /// Whether the bytes that the multiplier leaves go to ties and upgrades.
    [[nodiscard]] MDKV_HD bool spends(problem const& p) const noexcept
    {
        return p.active && !p.over() && spend_leftover && p.multiplier != 0;
    }
    /// A tie's token in its piece, and the bytes left behind it.
    [[nodiscard]] MDKV_HD index_t token_of(problem const& p) const noexcept
    {
        return tied == nullptr || !spends(p) ? p.token : tied[2 * (&p - problems)];
    }
    [[nodiscard]] MDKV_HD index_t left_of(problem const& p) const noexcept
    {
        return tied == nullptr || !spends(p) ? p.left : tied[2 * (&p - problems) + 1];
    }
    /// A head's number among this rank's heads of a limit; -1 for a head of another rank.
    [[nodiscard]] MDKV_HD index_t own_head(index_t head) const noexcept
    {
        index_t const at    = head - first_head;
        index_t const layer = at / head_of_layer;
        index_t const here  = layer * own_in_layer + at % head_of_layer;
        return at >= 0 && at % head_of_layer < own_in_layer && here < own ? here : -1;
    }
    /// Piece number `piece` of a problem, on any rank.
    [[nodiscard]] MDKV_HD part piece_of(index_t number, index_t piece) const noexcept
    {
        index_t const first = piece % pieces_per_head * piece_tokens;
        index_t const head  = piece / pieces_per_head;
        index_t const here  = own_head(head);
        return {number, number / candidates, piece, head, here, first, tokens_from(here, first, piece_tokens)};
    }
    /// Tokens of a head of this rank from one on, at most `size`.
    [[nodiscard]] MDKV_HD index_t tokens_from(index_t head, index_t first, index_t size) const noexcept
    {
        index_t const all = first_token == nullptr ? tokens : head < 0 ? 0 : first_token[head + 1] - first_token[head];
        return all - first < 0 ? 0 : all - first < size ? all - first : size;
    }
    /// Number `item` of this rank's pieces of all problems.
    [[nodiscard]] MDKV_HD part part_of(index_t item) const noexcept
    {
        return part_of(item, piece_tokens, pieces_per_head);
    }
    [[nodiscard]] MDKV_HD part stretch_of(index_t item) const noexcept
    {
        return part_of(item, stretch_tokens, stretches_per_head);
    }
    [[nodiscard]] MDKV_HD part part_of(index_t item, index_t size, index_t per_head) const noexcept
    {
        index_t const owner = item / (own * per_head);
        index_t const here  = item / per_head % own;
        index_t const piece = item % per_head;
        index_t const first = piece * size;
        index_t const head  = first_head + here / own_in_layer * head_of_layer + here % own_in_layer;
        return {owner, owner / candidates, head * per_head + piece, head, here, first, tokens_from(here, first, size)};
    }
    [[nodiscard]] MDKV_HD float const* losses_of(part const& p) const noexcept
    {
        return loss + (first_token == nullptr ? (p.limit * own + p.own) * loss_of_head : first_token[p.own]) + p.first;
    }
    [[nodiscard]] MDKV_HD std::uint8_t* rungs_of(part const& p) const noexcept
    {
        index_t const c = p.problem % candidates;
        if (c == 0)
        {
            return rung + (first_token == nullptr ? (p.limit * own + p.own) * rung_of_head : first_token[p.own])
                   + p.first;
        }
        return codes + ((p.limit * (candidates - 1) + c - 1) * own + p.own) * tokens + p.first;
    }
};
static_assert(std::is_trivially_copyable_v<work>);

} // namespace MDKV_NAMESPACE::detail::dual
