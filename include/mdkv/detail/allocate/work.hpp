/// \file work.hpp: the operands of allocate's jobs, and the memory they share (arXiv 2603.20616, section 4.3).
#pragma once

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

// A call has one limit for all heads, or one for each head. A *problem* is a limit with a set of rungs for every head; its
// solution is a multiplier, which gives every token a rung by its thresholds (detail/threshold.hpp), the ties at the multiplier
// that take the costlier rung, and a few upgrades. Only if heads pay for the projections that they use does a limit have several
// problems, its *candidates*; the one of least loss is its solution.
//
//     limit --+-- candidate 0:  problem --+-- head 0:  rung_set --+-- piece 0:  2,048 tokens
//             +-- candidate 1:  problem   +-- head 1 ...          +-- piece 1 ...
//             +-- ...
//
// Jobs in their order, and the members of `work` and `problem` that they write:
//
//     begin            problems, set_of, upgrades; clears all sums
//     weigh_sets       curve_bins, least_losses     bytes and losses of thresholds by bin
//     curves           curve_bins                   the same above and below each edge          if heads choose
//     choose           set_of, problem: active, multiplier, undecided, left; lower_bound
//     weigh            histogram, seen              bytes of thresholds by bin                  two to five times
//     narrow           problem: multiplier, undecided, left, guessed, bin; clears histogram
//     weigh_ties       ties                         bytes of ties by piece
//     find_tie         problem: tie_piece; tie
//     assign           rungs, counts, non_finite, piece_losses, upgrades
//     value_upgrades   gains                                                                    over ranks
//     conclude         rungs, counts, problem: report; best_problem, report
//     copy_best        rungs of candidate 0, which are the caller's                             if heads choose
//
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
/// An upgrade that does not exist, see `assign::upgrade_of`.
inline constexpr std::uint64_t no_upgrade = ~std::uint64_t{0};

/// Bits of a multiplier that one level of the search decides, and bins of its histogram.
inline constexpr int level_bits = 11;
inline constexpr index_t bins   = index_t{1} << level_bits;
static_assert(piece_tokens <= bins, "sums by bin are also sums by token of a piece");
/// Bits of a multiplier, a non-negative float: 11, 11 and 9 of them are decided by three levels.
inline constexpr int multiplier_bits = 31;
/// Most bits that a sample leaves undecided, half of an octave: two levels are left if the guess is right.
inline constexpr int guess_bits = 2 * level_bits;
/// One vector of neighbours in so many is in the sample, which limits of fewer tokens do without.
inline constexpr index_t sample_share  = 16;
inline constexpr index_t least_sampled = 1 << 15;
/// Bins of a head's curve, each as wide as the lowest `coarse_bits` bits of a multiplier: two levels are left.
inline constexpr index_t coarse_bins         = 1024;
inline constexpr int coarse_bits             = 21;
inline constexpr std::uint32_t infinite_bits = 0x7f800000; ///< bits of a multiplier that no threshold exceeds

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
    index_t left;      ///< bytes still to spend by thresholds below multiplier + 2^undecided, by ties, and by upgrades
    index_t tie_piece; ///< the piece of the first tie that does not fit; ties before it take the costlier rung
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

/// Tokens of one head of one problem: a piece, or a stretch.
struct piece
{
    index_t problem;
    index_t limit;
    index_t number;   ///< among the problem's pieces, or stretches, on all ranks
    index_t head;     ///< number in the limit, on all ranks
    index_t own_head; ///< number in the limit among this rank's heads; negative for a head of another rank
    index_t first;    ///< first token
    index_t count;    ///< tokens
};

/// Operands and memory of all jobs of a call.
struct work
{
    // Costs and candidates
    rung_costs costs;
    index_t widest_step;                                           ///< bytes from the cheapest rung to the costliest
    mdkv::array<mdkv::array<float, max_rungs>, max_rungs> inverse; ///< factors of all rungs, see rung_table
    mdkv::array<rung_set, max_rungs> set;                          ///< each set has all rungs of the set before
    index_t sets;
    index_t candidates; ///< problems of a limit: if heads choose, one for each set, and one with the heads' choices
    bool by_use;
    bool spend_leftover;
    int dropped_bits; ///< dropped of a threshold's last coarse_bits: no sum of bytes times the others leaves 64 bits

    // Operands of the caller
    float const* loss; // [H, R, N], or [R, M]: see first_token
    index_t loss_of_head;
    index_t loss_of_rung;
    index_t const* first_token;  // [own_heads + 1]  where heads' tokens begin among all M; null: each head has N
    index_t const* limit_values; // [limits]
    std::uint8_t* rung;          // [H, N]
    index_t rung_of_head;
    allocation* report; // [limits]

    // Limits, heads and pieces
    index_t limits;
    index_t heads;        ///< heads of a limit, on all ranks
    index_t own_heads;    ///< this rank's heads of a limit, whose losses and rungs are in its memory
    index_t own_in_layer; ///< this rank's heads of one layer; their numbers follow each other
    index_t layer_stride; ///< distance of two layers' numbers of heads
    index_t first_head;   ///< number of this rank's first head
    index_t tokens;       ///< tokens of the longest head
    index_t pieces_per_head;
    index_t stretches_per_head;

    // State of problems
    problem* problems;         // [problems]
    std::uint8_t* set_of;      // [problems, heads]
    std::uint8_t* seen;        // [problems, own stretches, bins]  whether its last level has thresholds in a bin
    std::uint64_t* upgrades;   // [problems, R, R]  the best one from each rung to each, see assign::upgrade_of
    std::uint8_t* other_rungs; // [limits, candidates - 1, own heads, N]  rungs of all candidates but the first
    double* lower_bound;       // [limits]  least loss with any choice of the heads
    index_t* best_problem;     // [limits]  the problem of least loss

    // Sums, cleared by `begin`; over ranks each rank adds up its own heads' part, and `sum_over_ranks` joins them
    std::int64_t* histogram; // [problems, bins + 1]  bytes of the thresholds in each bin, and above a guess
    std::int64_t* ties;      // [problems, pieces]  bytes
    std::int64_t* tie;       // [problems, 2]  the first tie that does not fit: token in its piece, bytes left behind it
    std::int64_t* counts;    // [problems, heads, max_rungs]  tokens at each rung
    std::int64_t* non_finite; // [problems]  tokens with a non-finite loss
    double* piece_losses;     // [problems, pieces]
    double* gains;            // [problems, R, R]  loss that upgrades save; null on one rank
    std::int64_t* curve_bins; // [limits * heads, sets, 2, coarse_bins]  bytes; thresholds' last bits, then losses
    double* least_losses;     // [limits, pieces, sets]

    [[nodiscard]] MDKV_HD bool chooses() const noexcept { return candidates > 1; }
    [[nodiscard]] MDKV_HD index_t pieces() const noexcept { return heads * pieces_per_head; }
    [[nodiscard]] MDKV_HD index_t own_pieces() const noexcept { return own_heads * pieces_per_head; }
    [[nodiscard]] MDKV_HD index_t own_stretches() const noexcept { return own_heads * stretches_per_head; }
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
        for (index_t k = 1; k < sets; ++k) { least = set_at(k).least < set_at(least).least ? k : least; }
        return least;
    }
    /// Whether one head can have set k if all others have the least set.
    [[nodiscard]] MDKV_HD bool affords(index_t limit, index_t k) const noexcept
    {
        return (heads - 1) * set_at(least_set()).least + set_at(k).least <= limit_of(limit);
    }
    [[nodiscard]] MDKV_HD rung_set const& set_at(index_t k) const noexcept { return set[static_cast<std::size_t>(k)]; }
    /// Bytes, then losses, of a head with a set, by bin and then by edge; `head` is counted over all limits.
    [[nodiscard]] MDKV_HD std::int64_t* curve(index_t head, index_t k) const noexcept
    {
        return curve_bins + (head * sets + k) * 2 * coarse_bins;
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
    /// Bytes that ties at the multiplier leave for upgrades.
    [[nodiscard]] MDKV_HD index_t bytes_left(problem const& p) const noexcept
    {
        return spends(p) ? tie[2 * (&p - problems) + 1] : p.left;
    }
    /// A head's number among this rank's heads of a limit; -1 for a head of another rank.
    [[nodiscard]] MDKV_HD index_t own_head(index_t head) const noexcept
    {
        index_t const at    = head - first_head;
        index_t const layer = at / layer_stride;
        index_t const here  = layer * own_in_layer + at % layer_stride;
        return at >= 0 && at % layer_stride < own_in_layer && here < own_heads ? here : -1;
    }
    /// Piece `number` of a problem, on any rank.
    [[nodiscard]] MDKV_HD piece piece_of(index_t problem, index_t number) const noexcept
    {
        index_t const first = number % pieces_per_head * piece_tokens;
        index_t const head  = number / pieces_per_head;
        index_t const here  = own_head(head);
        return {problem, problem / candidates, number, head, here, first, tokens_from(here, first, piece_tokens)};
    }
    /// Item `item` of this rank's pieces of all problems.
    [[nodiscard]] MDKV_HD piece own_piece(index_t item) const noexcept
    {
        return own_part(item, piece_tokens, pieces_per_head);
    }
    [[nodiscard]] MDKV_HD piece own_stretch(index_t item) const noexcept
    {
        return own_part(item, stretch_tokens, stretches_per_head);
    }
    [[nodiscard]] MDKV_HD float const* losses_of(piece const& p) const noexcept
    {
        return loss + first_of(p, loss_of_head);
    }
    [[nodiscard]] MDKV_HD std::uint8_t* rungs_of(piece const& p) const noexcept
    {
        index_t const c = p.problem % candidates;
        if (c == 0) { return rung + first_of(p, rung_of_head); }
        return other_rungs + ((p.limit * (candidates - 1) + c - 1) * own_heads + p.own_head) * tokens + p.first;
    }

private:
    [[nodiscard]] MDKV_HD piece own_part(index_t item, index_t size, index_t per_head) const noexcept
    {
        index_t const problem = item / (own_heads * per_head);
        index_t const here    = item / per_head % own_heads;
        index_t const number  = item % per_head;
        index_t const head    = first_head + here / own_in_layer * layer_stride + here % own_in_layer;
        index_t const first   = number * size;
        return {
            problem, problem / candidates, head * per_head + number, head, here, first, tokens_from(here, first, size)};
    }
    /// Tokens of this rank's head from one on, at most `size`.
    [[nodiscard]] MDKV_HD index_t tokens_from(index_t own_head, index_t first, index_t size) const noexcept
    {
        index_t const all = first_token == nullptr ? tokens
                            : own_head < 0         ? 0
                                                   : first_token[own_head + 1] - first_token[own_head];
        return all - first < 0 ? 0 : all - first < size ? all - first : size;
    }
    /// Distance of a piece's first token from the first of all, in memory of the caller.
    [[nodiscard]] MDKV_HD index_t first_of(piece const& p, index_t of_head) const noexcept
    {
        index_t const head =
            first_token == nullptr ? (p.limit * own_heads + p.own_head) * of_head : first_token[p.own_head];
        return head + p.first;
    }
};
static_assert(std::is_trivially_copyable_v<work>);

} // namespace MDKV_NAMESPACE::detail::dual
