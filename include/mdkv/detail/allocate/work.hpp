/// \file work.hpp: the operands of allocate's jobs, and the memory they share (arXiv 2603.20616, section 4.3).
#pragma once

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

// Every sum over tokens that decides a rung is a sum of whole numbers, so that its order does not matter: the result is
// the same for any number of threads, on every backend, and would stay the same if heads were spread over ranks. Sums of
// losses are made in one fixed shape (`tree_sum`).

namespace mdkv::inline MDKV_MACHINE::detail::dual
{

/// Tokens of one piece, an item of work, all of one head.
inline constexpr index_t piece_tokens = 2048;
/// Number of summands that `tree_sum` adds up.
inline constexpr index_t columns = 256;
/// Tokens of one limit, so that a token's number fits below the bits of a threshold.
inline constexpr index_t most_tokens = index_t{1} << 33;

/// Bins of one histogram.
inline constexpr index_t fine_bins   = 2048;
inline constexpr index_t coarse_bins = 1024;
inline constexpr std::int32_t no_bin = fine_bins + 1;
/// Number of a threshold's low bits, below those that number its fine bin.
inline constexpr int whole_shift = 20;
/// Levels of the search: a guess of the multiplier, three levels of all its bits, two for the first tie that does not fit.
inline constexpr int piece_level = 4; ///< finds the piece of that tie
inline constexpr int token_level = 5; ///< finds the token of that tie in its piece
/// Neighbouring tokens in one run of a sample.
inline constexpr index_t run_tokens    = 16;
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
    bool active; ///< is to be solved
    allocation_status status;
    // Non-negative floats are ordered like their bits: the multiplier's bits lie in `bins` bins of 2^shift from here on.
    std::uint32_t multiplier;
    int shift;
    index_t bins;
    bool guessed;   ///< the bins come from a sample and may miss the multiplier
    index_t room;   ///< bytes still to spend below the bins; all of them if `guessed`
    index_t found;  ///< the bin of the last search that these bins divide; negative if pieces have not noted their bins
    index_t piece;  ///< ties before this piece are given the costlier rung
    index_t token;  ///< ties of `piece` before this token are given the costlier rung, too
    index_t silent; ///< tokens with a non-finite loss
    allocation report;

    [[nodiscard]] MDKV_HD bool over() const noexcept { return status == allocation_status::over_limit; }

    /// Divides the `values` bit patterns from `from` on into at most fine_bins bins, each as small as possible.
    MDKV_HD void set_bins(std::uint32_t from, index_t values) noexcept
    {
        multiplier = from;
        for (shift = 0; values > fine_bins << shift;) { ++shift; }
        bins = (values + (index_t{1} << shift) - 1) >> shift;
    }
};

/// Tokens of one piece of one problem.
struct part
{
    index_t problem;
    index_t limit;
    index_t piece; ///< number in the problem
    index_t head;  ///< number in the limit
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
    int dropped_bits; ///< dropped of a threshold's last 21 bits: no sum of bytes times the rest leaves 64 bits

    float const* loss; // [H, R, N]
    index_t loss_of_head;
    index_t loss_of_rung;
    index_t const* limit_values; // [limits]
    std::uint8_t* rung;          // [H, N]
    index_t rung_of_head;
    allocation* report; // [limits]

    index_t limits;
    index_t heads; ///< heads of a limit
    index_t tokens;
    index_t pieces_per_head;
    index_t pieces_per_block; ///< pieces that share a histogram
    index_t sampled_runs;     ///< runs that the sample takes of a head

    std::int64_t* fine;   // [problems, fine_bins + 1]  bytes in each bin, and above them
    std::int64_t* tied;   // [problems, pieces]  bytes, the last piece first
    std::int64_t* counts; // [problems, heads, max_rungs]  tokens at each rung
    std::int64_t* coarse; // [limits * heads, sets, 2, coarse_bins]  bytes; sums of thresholds' last bits, then losses
    problem* problems;    // [problems]
    std::uint8_t* set_of; // [problems, heads]
    double* losses;       // [problems, pieces]
    std::uint64_t* best;  // [problems, R, R]  the best upgrade
    double* offsets;      // [limits, pieces, sets]  least losses
    double* dual;         // [limits]  lower bounds of the loss with the heads' choices
    index_t* winner;      // [limits]  the problem of least loss
    std::uint8_t* codes;  // [limits, candidates - 1, heads, N]  rungs of all candidates but the first

    [[nodiscard]] MDKV_HD bool chooses() const noexcept { return candidates > 1; }
    [[nodiscard]] MDKV_HD index_t pieces() const noexcept { return heads * pieces_per_head; }
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
    [[nodiscard]] MDKV_HD std::int64_t* fine_of(index_t number) const noexcept
    {
        return fine + number * (fine_bins + 1);
    }
    /// Whether a problem has something to search at a level.
    [[nodiscard]] MDKV_HD bool searches(problem const& p, int level) const noexcept
    {
        return p.active && !p.over() && (level < piece_level ? p.bins > 1 || p.guessed : spends(p));
    }
    /// Whether the bytes that the multiplier leaves go to ties and upgrades.
    [[nodiscard]] MDKV_HD bool spends(problem const& p) const noexcept
    {
        return spend_leftover && p.multiplier != 0 && !p.over();
    }
    [[nodiscard]] MDKV_HD part part_of(index_t item) const noexcept
    {
        index_t const piece = item % pieces();
        index_t const first = piece % pieces_per_head * piece_tokens;
        index_t const owner = item / pieces();
        return {owner, owner / candidates, piece, piece / pieces_per_head, first,
            tokens - first < piece_tokens ? tokens - first : piece_tokens};
    }
    [[nodiscard]] MDKV_HD index_t blocks_per_head() const noexcept
    {
        return (pieces_per_head + pieces_per_block - 1) / pieces_per_block;
    }
    /// The part of a block's first piece, with the tokens of all its pieces.
    [[nodiscard]] MDKV_HD part block_of(index_t item) const noexcept
    {
        index_t const head = item / blocks_per_head();
        part here          = part_of(head * pieces_per_head + item % blocks_per_head() * pieces_per_block);
        index_t const most = pieces_per_block * piece_tokens;
        here.count         = tokens - here.first < most ? tokens - here.first : most;
        return here;
    }
    [[nodiscard]] MDKV_HD std::uint8_t* rungs_of(part const& p) const noexcept
    {
        index_t const c = p.problem % candidates;
        if (c == 0) { return rung + (p.limit * heads + p.head) * rung_of_head + p.first; }
        return codes + ((p.limit * (candidates - 1) + c - 1) * heads + p.head) * tokens + p.first;
    }
};
static_assert(std::is_trivially_copyable_v<work>);

} // namespace mdkv::inline MDKV_MACHINE::detail::dual
