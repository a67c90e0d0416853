/// \file allocate_state.cuh: what the passes of allocate keep in device memory: one record a limit, one a piece of tokens
#pragma once

#include <mdkv/allocate.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/allocate_offers.hpp>
#include <mdkv/detail/threshold.hpp>
#include <mdkv/gpu/backend.cuh>

#include <cstddef>
#include <cstdint>

#include <cuda/std/array>

// A limit is solved by one kind of launch, repeated: its blocks make one pass over the tokens, whichever the limit's record
// asks for, and the last of them to finish decides what is asked for next. The host enqueues a number of such launches that
// does not depend on the data, those that come when all is done return at once, and a last launch of one block a limit makes
// what passes are still missing. All sums have a shape of their own, so the result does not depend on who made a pass.

namespace mdkv::gpu::dual
{

using mdkv::detail::menu;
using mdkv::detail::offer;
using mdkv::detail::rung_table;

inline constexpr int threads            = 256;
inline constexpr index_t piece_tokens   = 1024; ///< tokens of one head that a block looks at
inline constexpr index_t most_trials    = 48;   ///< multipliers that are tried at most
inline constexpr index_t most_choices   = 64;   ///< combinations of offers that are considered at most
inline constexpr int first_shift        = 20;   ///< of 31 bits of a threshold, the first pass looks at eleven
inline constexpr int shift_step         = 10;   ///< and each of the others at ten more
inline constexpr index_t exact_bins     = 2048;
inline constexpr int sample_shift       = 17; ///< the sample looks at a threshold's exponent and six bits more
inline constexpr index_t sample_bins    = (index_t{0x7f800000} >> sample_shift) + 1;
inline constexpr index_t sample_block   = 16;   ///< tokens that the sample takes from each place
inline constexpr index_t sample_blocks  = 1024; ///< places
inline constexpr index_t guess_tokens   = 128;  ///< a guess looks at so many of every piece
inline constexpr index_t guess_unit     = 4096; ///< and scales up what it sees of so many
inline constexpr float no_float_above   = 0x1.fffffep127F;
inline constexpr float infinite         = __builtin_huge_valf();
inline constexpr double infinite_double = __builtin_huge_val();

/// What a pass does.
enum class pass : std::uint8_t
{
    none,
    weigh,   ///< bytes of steps by threshold
    assign,  ///< every token's rung at the multiplier
    measure, ///< the same sums, of the rungs there are
    survey,  ///< upgrades of the plateau, then each piece's best upgrade
    price,   ///< what every head would take under every offer at a multiplier
    settle,  ///< every token the same rung
    turn,    ///< every token's rung at the multiplier, in double
    restore  ///< the rungs that were kept
};

/// What is to be decided once there is no pass to wait for.
enum class stage : std::uint8_t
{
    plain, ///< the offers are given
    guess_begins,
    guess,
    first_trial,
    first_solved,
    first_checked,
    narrowing,
    choosing,
    choice_solved,
    dual_begins,
    dual_cheapest,
    dual_solved,
    dual_checked,
    dual_turned,
    bounding,
    last_trial,
    finishing,
    over
};

/// Some tokens of one head.
struct piece_state
{
    double loss;             ///< of their rungs
    double least;            ///< of their cheapest losses; `settle` only
    index_t plateau;         ///< bytes of their upgrades that save exactly the multiplier
    std::uint64_t best;      ///< key, then the lower position, then the rung of the table: largest first
    std::int32_t non_finite; ///< tokens whose losses say nothing
    ::cuda::std::array<std::int32_t, max_rungs> tokens; ///< at each rung of the ratio set
};

/// What some tokens lose and take under one offer when each has the rung of its least loss + multiplier * bytes.
struct outlay
{
    double loss;
    double bytes;
};

/// One multiplier that was tried.
struct trial
{
    double multiplier;
    double bytes; ///< that the heads would take
    double dual;  ///< a lower bound on every loss within the limit
};

/// Where the search between trials stands.
enum class narrowing : std::uint8_t
{
    from_zero,
    upwards,
    downwards,
    closing,
    between ///< a trial between the two ends was made
};

/// One limit.
struct limit_state
{
    pass next;
    stage at;
    unsigned arrived; ///< blocks that have made the pass
    index_t limit;
    std::size_t everywhere; ///< the rung of all tokens, for `settle`

    // The solution that is being made, for the offers that the heads have.
    allocation now;
    index_t spare;    ///< bytes beyond every token's cheapest rung
    index_t leftover; ///< of those, what is not spent
    index_t narrowest_step;
    index_t taken; ///< bytes of the steps above the bins
    std::uint32_t first;
    int shift;
    float cap;          ///< the multiplier, in units of the tables
    bool ask_closed;    ///< a rung that is not open may tell that a token's losses say nothing
    bool keep_rungs;    ///< `assign` keeps the rungs there were
    index_t walked;     ///< pieces whose plateau is spent whole by `survey`
    bool spending_more; ///< the multiplier's own leftover is spent

    // Which heads pay for which projections.
    allocation best;
    bool solved;       ///< `best` is that of a choice
    bool first_solved; ///< the choice that was solved first
    bool best_is_kept; ///< its rungs are the kept ones
    double multiplier; ///< of the trial that is being made
    bool guessing;     ///< trials are made with some of the tokens
    bool non_finite;   ///< a token had a loss that was not finite
    double steepest;   ///< no multiplier above it is tried: its prices would leave the range of float
    index_t trials;
    index_t found; ///< the trial at the multiplier that was asked for last; -1: none can be made
    index_t low;   ///< the trial that does not fit, and the one that does, next to where the limit binds; -1: none
    index_t high;
    narrowing narrow;
    double from;
    double factor;
    double weight_low;
    double weight_high;
    double turn_step; ///< by which the multiplier of a turn grows
    index_t choices;
    index_t choice; ///< the next
    index_t last;   ///< solved; -1: the first one
};

/// Scratch for heads that pay for what they use; [limits] in front of every shape.
struct payers_room
{
    std::uint8_t* kept    = nullptr; ///< [heads, N]  rungs
    index_t* sample       = nullptr; ///< [sample_bins]
    outlay* outlays       = nullptr; ///< [pieces, offers]
    std::int32_t* silent  = nullptr; ///< [pieces]  tokens whose losses say nothing
    trial* trials         = nullptr; ///< [most_trials]
    double* values        = nullptr; ///< [most_trials, heads, offers]  loss + multiplier * all bytes
    double* bytes         = nullptr; ///< [heads, offers]  of the last trial
    std::uint8_t* wanted  = nullptr; ///< [most_trials, heads]  the offer of least value
    unsigned* needed      = nullptr; ///< [heads]  the first offer that has what is used
    std::uint8_t* first   = nullptr; ///< [heads]  the choice that was solved first
    std::uint8_t* choices = nullptr; ///< [most_choices, heads]
    double* bounds        = nullptr; ///< [most_choices, most_trials]
    double* bound         = nullptr; ///< [most_choices]
    index_t* order        = nullptr; ///< [most_choices]  by their bounds
    double* turns         = nullptr; ///< [heads]
    index_t* ranks        = nullptr; ///< [heads]  the order in which they turn; -1: they do not
};

/// Everything a kernel is told.
struct work
{
    in_view<float, 3, backend> loss;
    in_view<index_t, 1, backend> limits;
    out_view<std::uint8_t, 2, backend> rung;
    out_view<allocation, 1, backend> report;
    rung_costs<run_time> costs;
    bool spend_leftover     = true;
    bool by_use             = false;
    index_t offers          = 1; ///< that a head chooses from; 1 where they are given
    index_t heads           = 0; ///< under one limit
    index_t pieces_per_head = 0;
    index_t pieces          = 0; ///< under one limit

    menu* offered             = nullptr; ///< by use only
    offer* given              = nullptr; ///< [limits]  not by use
    limit_state* states       = nullptr; ///< [limits]
    piece_state* piece_states = nullptr; ///< [limits, pieces]
    std::uint8_t* offer_of    = nullptr; ///< [limits, heads]
    index_t* bins             = nullptr; ///< [limits, exact_bins]
    payers_room payers{};

    [[nodiscard]] MDKV_HD index_t tokens() const { return loss.extent(2); }
    [[nodiscard]] MDKV_HD index_t limit_count() const { return limits.extent(0); }

    void take_scratch(workspace::frame& frame)
    {
        index_t const n = limit_count();
        offered         = frame.take<menu>(by_use ? 1 : 0);
        given           = frame.take<offer>(by_use ? 0 : n);
        states          = frame.take<limit_state>(n);
        piece_states    = frame.take<piece_state>(n * pieces);
        offer_of        = frame.take<std::uint8_t>(n * heads);
        bins            = frame.take<index_t>(n * exact_bins);
        if (!by_use) { return; }
        payers.kept    = frame.take<std::uint8_t>(n * heads * tokens());
        payers.sample  = frame.take<index_t>(n * sample_bins);
        payers.outlays = frame.take<outlay>(n * pieces * offers);
        payers.silent  = frame.take<std::int32_t>(n * pieces);
        payers.trials  = frame.take<trial>(n * most_trials);
        payers.values  = frame.take<double>(n * most_trials * heads * offers);
        payers.bytes   = frame.take<double>(n * heads * offers);
        payers.wanted  = frame.take<std::uint8_t>(n * most_trials * heads);
        payers.needed  = frame.take<unsigned>(n * heads);
        payers.first   = frame.take<std::uint8_t>(n * heads);
        payers.choices = frame.take<std::uint8_t>(n * most_choices * heads);
        payers.bounds  = frame.take<double>(n * most_choices * most_trials);
        payers.bound   = frame.take<double>(n * most_choices);
        payers.order   = frame.take<index_t>(n * most_choices);
        payers.turns   = frame.take<double>(n * heads);
        payers.ranks   = frame.take<index_t>(n * heads);
    }
};

/// One limit as a block sees it.
class problem
{
public:
    __device__ problem(work const& w, index_t number)
        : all_{w}
        , number_{number}
        , state_{w.states + number}
    {}

    [[nodiscard]] __device__ work const& all() const { return all_; }
    [[nodiscard]] __device__ limit_state& state() const { return *state_; }
    [[nodiscard]] __device__ index_t number() const { return number_; }
    [[nodiscard]] __device__ index_t heads() const { return all_.heads; }
    [[nodiscard]] __device__ index_t tokens() const { return all_.tokens(); }
    [[nodiscard]] __device__ index_t pieces() const { return all_.pieces; }
    [[nodiscard]] __device__ index_t offers() const { return all_.offers; }
    [[nodiscard]] __device__ index_t first_head() const { return number_ * all_.heads; }
    [[nodiscard]] __device__ piece_state& piece(index_t n) const { return all_.piece_states[number_ * pieces() + n]; }
    [[nodiscard]] __device__ index_t head_of(index_t piece) const { return piece / all_.pieces_per_head; }
    [[nodiscard]] __device__ std::uint8_t* offer_of() const { return all_.offer_of + number_ * heads(); }
    [[nodiscard]] __device__ index_t* bins() const { return all_.bins + number_ * exact_bins; }
    [[nodiscard]] __device__ index_t widest_step() const
    {
        return all_.costs.bytes[all_.costs.rungs - 1] - all_.costs.bytes[0];
    }
    [[nodiscard]] __device__ double unit() const { return static_cast<double>(widest_step() > 1 ? widest_step() : 1); }

    [[nodiscard]] __device__ offer const& offered(index_t k) const
    {
        return all_.by_use ? all_.offered->offers[static_cast<std::size_t>(k)] : all_.given[number_];
    }
    /// What is open to a head of this limit.
    [[nodiscard]] __device__ offer const& offer_to(index_t head) const { return offered(offer_of()[head]); }

    // What heads that pay for what they use are chosen with.
    [[nodiscard]] __device__ payers_room const& room() const { return all_.payers; }
    [[nodiscard]] __device__ trial& tried(index_t t) const { return room().trials[number_ * most_trials + t]; }
    [[nodiscard]] __device__ double& value(index_t t, index_t head, index_t k) const
    {
        return room().values[((number_ * most_trials + t) * heads() + head) * offers() + k];
    }
    [[nodiscard]] __device__ std::uint8_t* wanted(index_t t) const
    {
        return room().wanted + (number_ * most_trials + t) * heads();
    }
    [[nodiscard]] __device__ std::uint8_t* choice(index_t c) const
    {
        return room().choices + (number_ * most_choices + c) * heads();
    }
    [[nodiscard]] __device__ std::uint8_t* first_choice() const { return room().first + number_ * heads(); }
    [[nodiscard]] __device__ std::uint8_t& kept(index_t head, index_t token) const
    {
        return room().kept[(first_head() + head) * tokens() + token];
    }

private:
    work const& all_;
    index_t number_;
    limit_state* state_;
};

} // namespace mdkv::gpu::dual
