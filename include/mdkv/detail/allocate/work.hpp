/// \file work.hpp: the operands of allocate's jobs, the memory they share, and how a piece of tokens is read (arXiv 2603.20616, section 4.3).
#pragma once

#include <mdkv/allocate.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/detail/threshold.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

// Every sum that decides is one of whole numbers, so that its order does not matter: the result is the same for any number
// of threads, on every backend, and would be if heads were spread over ranks. Sums of losses, which are only reported, are
// made in one fixed shape (`tree_sum`).

namespace mdkv::detail::dual
{

/// Tokens of one item of work, all of one head.
inline constexpr index_t piece_tokens = 2048;
/// Summands added up as a tree.
inline constexpr index_t columns = 256;
/// Pairs of rungs.
inline constexpr index_t pairs = index_t{max_rungs} * index_t{max_rungs};
/// Tokens of one limit, so that a token's number fits below the bits of a threshold.
inline constexpr index_t most_tokens = index_t{1} << 33;

/// A non-negative float's order is that of its bits. Three digits of them, the highest first, are histogram bins.
struct digit
{
    int low; ///< bits below
    int width;

    [[nodiscard]] MDKV_HD constexpr index_t bins() const noexcept { return index_t{1} << width; }
    [[nodiscard]] MDKV_HD static constexpr digit of_level(int level) noexcept
    {
        return level == 0 ? digit{21, 10} : level == 1 ? digit{10, 11} : digit{0, 10};
    }
};
inline constexpr index_t coarse_bins   = 1024;
inline constexpr index_t fine_bins     = 2048;
inline constexpr std::uint32_t no_more = 0x7f800000; ///< infinity: no threshold exceeds it

[[nodiscard]] MDKV_HD inline std::uint32_t bits_of(float x) noexcept
{
    return __builtin_bit_cast(std::uint32_t, x);
}
[[nodiscard]] MDKV_HD inline float float_of(std::uint32_t bits) noexcept
{
    return __builtin_bit_cast(float, bits);
}

/// 2^e, -1022 <= e <= 1023.
[[nodiscard]] MDKV_HD inline double power_of_two(int e) noexcept
{
    return __builtin_bit_cast(double, static_cast<std::uint64_t>(e + 1023) << 52U);
}

/// The least threshold of a bin of the first digit (infinity counts as 2^128).
[[nodiscard]] MDKV_OUTLINE MDKV_HD inline double coarse_edge(index_t bin) noexcept
{
    int const e = static_cast<int>(bin / 4);
    int const m = static_cast<int>(bin % 4);
    return e == 0 ? m * 0.25 * power_of_two(-126) : (1 + m * 0.25) * power_of_two(e - 127);
}

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

/// A token's two rungs at the multiplier in one byte: the cheapest of the best ones, and the costliest above it.
struct rung_code
{
    static constexpr std::uint8_t silent = 0x0f; ///< a loss of the token is not finite (the costliest is never cheaper)
    static constexpr std::uint8_t mute   = 0xff; ///< the same, after ties are decided

    // The low four bits are the former, the high ones the latter.
};

/// One limit, before and while its multiplier is searched.
struct limit_state
{
    index_t limit; ///< at most what all tokens could take
    allocation_status status;
    std::uint16_t allowed; ///< bit k: a head can pay for set k
    std::uint8_t set;      ///< of all heads where they have no choice: the set of fewest bytes
    index_t unused_bins;   ///< of the first digit, above the highest threshold
    index_t dual;          ///< lower bound on the loss, in quanta above the losses at set 0's cheapest rungs
    double offset;         ///< their sum

    [[nodiscard]] MDKV_HD bool over() const noexcept { return status == allocation_status::over_limit; }
    [[nodiscard]] MDKV_HD bool allows(index_t set_index) const noexcept { return (allowed >> set_index & 1) != 0; }
    /// Other sets' losses are compared with those of the first.
    [[nodiscard]] MDKV_HD bool needs(index_t set_index) const noexcept { return set_index == 0 || allows(set_index); }
};

/// One choice of sets for the heads of a limit, and its solution.
struct candidate_state
{
    bool active;
    std::uint32_t prefix; ///< digits of the multiplier found so far; at last all its bits
    index_t room;         ///< bytes left by the thresholds above the prefix
    index_t charged;      ///< for projections
    index_t given;        ///< bytes of ties
    index_t silent;       ///< tokens with a loss that is not finite
    index_t tokens[max_rungs];
    allocation report;
};

/// Operands and memory of all jobs of a call. A `problem` is one candidate of one limit.
struct work
{
    rung_costs costs;
    index_t unit; ///< bytes of the widest step
    index_t set_charge[max_rungs];
    std::uint16_t
        set_open[max_rungs]; ///< bit r: rung r is open. With a choice each set has all rungs of the one before
    index_t sets;
    bool choose; ///< heads choose their sets
    bool spend_leftover;

    float const* loss; // [H, R, N]
    index_t loss_of_head;
    index_t loss_of_rung;
    index_t const* limit_values; // [limits]
    std::uint8_t* rung;          // [H, N]
    index_t rung_of_head;
    allocation* report; // [limits]

    index_t limits;
    index_t heads; ///< of a limit
    index_t tokens;
    index_t pieces_per_head;
    index_t candidates; ///< of a limit; the others than the first have every head at the same set
    index_t rows;       ///< of a head in `coarse`: one for each set to choose from

    std::int64_t* coarse;   // [limits, heads, rows, 2, coarse_bins]  bytes; loss saved, in its bin's units
    std::int64_t* fine;     // [problems, fine_bins]
    limit_state* states;    // [limits]
    candidate_state* found; // [problems]
    std::uint8_t* set_of;   // [problems, heads]
    index_t* unused_sets;   // [problems, heads]  wider than all that the head's rungs need
    index_t* tied;          // [problems, pieces]  bytes
    index_t* before;        // [problems, pieces]  bytes tied in pieces before
    double* losses;         // [problems, pieces]
    std::uint64_t* best;    // [problems, pairs]  the best upgrade
    double* offsets;        // [limits * pieces, rows]  losses at a set's cheapest rung (less those at set 0's)
    double* row_offset;     // [limits, heads, rows]
    std::uint8_t* wanted;   // [limits, 2, heads]  sets at both sides of the binding edge
    std::uint8_t* codes;    // [limits, candidates - 1, heads, N]

    [[nodiscard]] MDKV_HD index_t pieces() const noexcept { return heads * pieces_per_head; }
    [[nodiscard]] MDKV_HD index_t problems() const noexcept { return limits * candidates; }
    [[nodiscard]] MDKV_HD index_t coarse_words() const noexcept
    {
        return limits * heads * rows * (choose ? 2 : 1) * coarse_bins;
    }
    /// Sums of one row: bytes and, where heads choose, what is saved.
    [[nodiscard]] MDKV_HD std::int64_t* coarse_row(index_t head, index_t row) const noexcept
    {
        return coarse + (head * rows + row) * (choose ? 2 : 1) * coarse_bins;
    }
    /// Of q in `coarse`, so that no sum leaves 64 bits: 0 below 2^62 bytes * steps of a threshold's digits.
    [[nodiscard]] MDKV_HD int saved_shift() const noexcept
    {
        int shift = 0;
        while (
            shift < 21 && static_cast<double>(tokens) * static_cast<double>(unit) * power_of_two(21 - shift) > 0x1p62)
        {
            ++shift;
        }
        return shift;
    }
    [[nodiscard]] MDKV_OUTLINE MDKV_HD int cheapest_of(index_t set) const noexcept
    {
        int r = 0;
        while ((set_open[set] >> r & 1) == 0) { ++r; }
        return r;
    }
    /// From the cheaper to the costlier rung of a code.
    [[nodiscard]] MDKV_HD index_t tied_bytes(std::uint8_t code) const noexcept
    {
        return costs.bytes[static_cast<std::size_t>(code >> 4)] - costs.bytes[static_cast<std::size_t>(code & 15)];
    }
    /// The first set that a rung is open in.
    [[nodiscard]] MDKV_OUTLINE MDKV_HD index_t set_with(std::size_t rung_index) const noexcept
    {
        index_t k = 0;
        while ((set_open[k] >> rung_index & 1) == 0) { ++k; }
        return k;
    }
    /// The least that a head takes with a set.
    [[nodiscard]] MDKV_HD index_t least_bytes(index_t set) const noexcept
    {
        return tokens == 0 ? 0 : set_charge[set] + tokens * costs.bytes[static_cast<std::size_t>(cheapest_of(set))];
    }
    /// The most that all heads of a limit can take.
    [[nodiscard]] MDKV_HD index_t most_bytes() const noexcept
    {
        return tokens == 0 ? 0 : heads * (costs.widest_projection() + tokens * costs.bytes[costs.rungs - 1]);
    }
    /// Losses are counted in 2^this where heads choose: the sum of all that can be lost then stays below 2^60.
    [[nodiscard]] MDKV_HD int quantum(index_t highest_bin) const noexcept
    {
        int size = 1;
        while (size < 62 && (most_bytes() / unit + 1) >> size != 0) { ++size; }
        int const exponent = static_cast<int>((highest_bin + 1) / 4) - 126;
        return (exponent < -125 ? -125 : exponent) + size - 60;
    }
    /// Whether ties and upgrades are given what the multiplier leaves.
    [[nodiscard]] MDKV_HD bool spends(index_t problem) const noexcept
    {
        return spend_leftover && found[problem].prefix != 0 && !states[problem / candidates].over();
    }
    /// Where the rungs of a problem's piece are.
    [[nodiscard]] MDKV_HD std::uint8_t* rungs_at(index_t problem, index_t head, index_t first) const noexcept
    {
        index_t const limit = problem / candidates;
        index_t const c     = problem % candidates;
        if (c == 0) { return rung + (limit * heads + head) * rung_of_head + first; }
        return codes + ((limit * (candidates - 1) + c - 1) * heads + head) * tokens + first;
    }
};
static_assert(std::is_trivially_copyable_v<work>);

/// A piece of one head's tokens, the rungs open to it, and its losses: those of open rungs, then of the others.
struct open_piece
{
    rung_table rungs;
    float const* rows[max_rungs];
    index_t count; ///< tokens

    /// All members of the team fill it together. `head` is counted over all limits.
    template <team Team>
    MDKV_HD void open(Team const& t, work const& w, index_t problem, index_t piece)
    {
        index_t const head = piece / w.pieces_per_head;
        open(t, w, problem / w.candidates * w.heads + head, piece % w.pieces_per_head,
            w.set_of[problem * w.heads + head]);
    }
    template <team Team>
    MDKV_HD void open(Team const& t, work const& w, index_t head, index_t piece, index_t set)
    {
        index_t const first   = piece * piece_tokens;
        std::size_t const all = w.costs.rungs;
        t.sync(); // an earlier piece may still be read
        if (t.rank() == 0)
        {
            rungs.count        = 0;
            std::size_t closed = all;
            for (std::size_t r = 0; r < all; ++r)
            {
                bool const is_open = (w.set_open[set] >> r & 1) != 0;
                rows[is_open ? rungs.count : --closed] =
                    w.loss + head * w.loss_of_head + static_cast<index_t>(r) * w.loss_of_rung + first;
                if (is_open) { rungs.add(r, w.costs.bytes[r]); }
            }
            count = w.tokens - first < piece_tokens ? w.tokens - first : piece_tokens;
        }
        t.sync();
        for (index_t e = t.rank(); e < pairs; e += t.size())
        {
            rungs.compare(static_cast<std::size_t>(e) / max_rungs, static_cast<std::size_t>(e) % max_rungs, w.unit);
        }
        t.sync();
    }
};

/// As many neighbouring elements as there are lanes; `none` past the end.
template <int Lanes, class To, class From>
[[gnu::always_inline]] MDKV_HD inline void read_lanes(
    To (&to)[Lanes], From const* from, index_t at, index_t count, To none) noexcept
{
    if (at + Lanes <= count)
    {
        MDKV_FOR_LANES(l, Lanes)
        {
            to[l] = from[at + l];
        }
    }
    else
    {
        MDKV_FOR_LANES(l, Lanes)
        {
            to[l] = at + l < count ? To{from[at + l]} : none;
        }
    }
}

/// The thresholds of `columns` neighbouring tokens, each member's in turn: row j those of step j, row 0 the silence of
/// tokens that have a loss which is not finite (not a number; otherwise 0). Their thresholds are 0, as past the end.
template <std::size_t Count, team Team>
MDKV_HD void find_as_many(Team const& t, open_piece const& from, std::size_t all, index_t first, float* theta)
{
    constexpr int lanes     = Team::lanes;
    std::size_t const count = Count == run_time ? from.rungs.count : Count;
    float loss[token_thresholds<lanes, Count>::capacity][lanes];
    token_thresholds<lanes, Count> steps;
    for (index_t i = t.rank() * lanes; i < columns; i += t.size() * lanes)
    {
        float silence[lanes]{};
        for (std::size_t r = 0; r < count; ++r)
        {
            read_lanes(loss[r], from.rows[r], first + i, from.count, 0.0F);
            MDKV_FOR_LANES(l, lanes)
            {
                silence[l] += loss[r][l] * 0.0F;
            }
        }
        for (std::size_t r = count; r < all; ++r)
        {
            float closed[lanes];
            read_lanes(closed, from.rows[r], first + i, from.count, 0.0F);
            MDKV_FOR_LANES(l, lanes)
            {
                silence[l] += closed[l] * 0.0F;
            }
        }
        for (std::size_t r = 0; r < count; ++r)
        {
            MDKV_FOR_LANES(l, lanes)
            {
                loss[r][l] = silence[l] == 0.0F ? loss[r][l] : 0.0F;
            }
        }
        steps.find(from.rungs, loss);
        MDKV_FOR_LANES(l, lanes)
        {
            theta[i + l] = silence[l];
        }
        for (std::size_t j = 1; j < count; ++j)
        {
            MDKV_FOR_LANES(l, lanes)
            {
                theta[static_cast<index_t>(j) * columns + i + l] = steps.theta[j][l];
            }
        }
    }
}

template <team Team>
MDKV_HD void find_thresholds(Team const& t, open_piece const& from, std::size_t all, index_t first, float* theta)
{
    if (from.rungs.count == 4) { find_as_many<4>(t, from, all, first, theta); }
    else { find_as_many<run_time>(t, from, all, first, theta); }
}

/// The sum of `columns` doubles, which are lost, in the same order for every team.
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

} // namespace mdkv::detail::dual
