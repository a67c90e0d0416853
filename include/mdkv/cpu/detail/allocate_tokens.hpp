/// \file allocate_tokens.hpp: what allocate does with every token: vectors of them against a range of multipliers (arXiv 2603.20616, section 4.3)
#pragma once

#include <mdkv/allocate.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/tile.hpp>
#include <mdkv/detail/threshold.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace mdkv::cpu::dual
{

using mdkv::detail::best_upgrade;
using mdkv::detail::rung_table;
using mdkv::detail::token_thresholds;
using mdkv::detail::upgrade_choice;

/// Tokens per piece of work. Fixed, so that sums have one shape whatever the threads; 16 bits hold a position in it.
inline constexpr index_t chunk_tokens = 4096;
/// Undecided tokens per chunk whose losses are copied; those of further ones are gathered when they are needed again.
inline constexpr index_t copied_tokens = 512;

/// The multiplier (in units of the table) is known to be above `low`, or equal to it where it is 0, and at most `high`.
struct bracket
{
    float low  = 0.0F;
    float high = std::numeric_limits<float>::infinity();
};

struct chunk_state
{
    double loss             = 0;                  ///< of the chosen rungs
    std::int32_t undecided  = 0;                  ///< tokens with a threshold inside the bracket
    std::int32_t non_finite = 0;                  ///< tokens whose losses say nothing
    bool upgraded           = false;              ///< a rung was changed after `loss` was summed
    bool plateau            = true;               ///< a token may have an upgrade that saves exactly the multiplier
    std::array<std::int32_t, max_rungs> tokens{}; ///< decided tokens at each rung of the table
};

/// One limit and the tokens under it: those of all heads of a layer, or of one.
struct problem
{
    in_view<float, 3, backend> loss;
    out_view<std::uint8_t, 2, backend> rung;
    rung_table rungs;
    std::array<std::uint8_t, max_rungs> place{}; ///< rung of the ratio set -> rung of the table
    index_t first_head       = 0;
    index_t heads            = 0;
    chunk_state* chunks      = nullptr; ///< [heads * chunks_per_head()]
    std::uint16_t* undecided = nullptr; ///< [chunks, chunk_tokens]  positions in the chunk, ascending
    float* copies            = nullptr; ///< [chunks, rungs, copied_tokens]  their losses

    /// The rungs open to the tokens of a head. One table for all: whether a head uses projections is decided
    /// beforehand.
    [[nodiscard]] rung_table const& rungs_of(index_t /*head*/) const noexcept { return rungs; }

    [[nodiscard]] index_t tokens_per_head() const noexcept { return loss.extent(2); }
    [[nodiscard]] index_t chunks_per_head() const noexcept
    {
        return (tokens_per_head() + chunk_tokens - 1) / chunk_tokens;
    }
    [[nodiscard]] index_t chunk_count() const noexcept { return heads * chunks_per_head(); }
    [[nodiscard]] index_t token_count() const noexcept { return heads * tokens_per_head(); }

    void allow(std::size_t r, index_t bytes) noexcept
    {
        place[r] = static_cast<std::uint8_t>(rungs.count);
        rungs.add(r, bytes);
    }
};

/// Where one chunk's tokens lie.
struct chunk
{
    index_t number;
    index_t head;
    index_t first; ///< position of its first token
    index_t count;
    std::uint8_t* rung;
    std::uint16_t* undecided;
    float* copies;
    chunk_state* state;
    rung_table const* rungs;
    std::array<float const*, max_rungs> loss; ///< of the table's rungs, from the first token on

    chunk(problem const& p, index_t n) noexcept
        : number{n}
        , head{p.first_head + n / p.chunks_per_head()}
        , first{n % p.chunks_per_head() * chunk_tokens}
        , count{std::min(chunk_tokens, p.tokens_per_head() - first)}
        , rung{p.rung.data_handle() + p.rung.mapping()(head, first)}
        , undecided{p.undecided + n * chunk_tokens}
        , copies{p.copies + n * copied_tokens * p.loss.extent(1)}
        , state{p.chunks + n}
        , rungs{&p.rungs_of(head)}
        , loss{}
    {
        for (std::size_t r = 0; r < rungs->count; ++r)
        {
            loss[r] = p.loss.data_handle() + p.loss.mapping()(head, index_t{rungs->index[r]}, first);
        }
    }

    /// The losses of one token, by rung of the table. False, and all zero, when they are not finite.
    bool read(index_t position, float* losses) const noexcept
    {
        bool finite = true;
        for (std::size_t r = 0; r < rungs->count; ++r)
        {
            losses[r] = loss[r][position];
            finite    = finite && std::isfinite(losses[r]);
        }
        if (!finite) { std::fill_n(losses, rungs->count, 0.0F); }
        return finite;
    }
};

/// Calls body with the number of rungs as a constant where it is a usual one, or run_time: the whole of a compile-time
/// set of up to eight (what the registers hold), the paper's four in another one, and two, which are left where
/// projections cannot be paid for. Each constant is compiled apart.
template <std::size_t Capacity, class Body>
void with_rungs(std::size_t count, Body const& body)
{
    constexpr std::size_t usual = Capacity > 8 ? paper_ratios.size() : Capacity;
    if (count == usual) { return body(std::integral_constant<std::size_t, usual>{}); }
    if constexpr (usual > 2)
    {
        if (count == 2) { return body(std::integral_constant<std::size_t, 2>{}); }
    }
    if constexpr (usual > 1) { body(std::integral_constant<std::size_t, run_time>{}); }
}

/// body(1), ..., body(count - 1).
template <std::size_t Count, class Body>
[[gnu::always_inline]] inline void for_steps(std::size_t count, Body const& body)
{
    if constexpr (Count == run_time)
    {
        for (std::size_t j = 1; j < count; ++j) { body(j); }
    }
    else
    {
        tile::unroll<static_cast<int>(Count) - 1>([&](auto i)
                __attribute__((always_inline)) { body(std::integral_constant<std::size_t, i.value + 1>{}); });
    }
}

/// body(0), ..., body(count - 1).
template <std::size_t Count, class Body>
[[gnu::always_inline]] inline void for_rungs(std::size_t count, Body const& body)
{
    body(std::integral_constant<std::size_t, 0>{});
    for_steps<Count>(count, body);
}

// What the kernels below need of vectors beyond simd.hpp.
inline constexpr int half_lanes = simd::lanes / 2;
using half_floats  = float __attribute__((vector_size(sizeof(float) * static_cast<std::size_t>(half_lanes))));
using half_doubles = double __attribute__((vector_size(sizeof(double) * static_cast<std::size_t>(half_lanes))));
using byte_lanes   = std::uint8_t __attribute__((vector_size(static_cast<std::size_t>(simd::lanes))));

struct vector_operations
{
    using floats = simd::floats;
    [[nodiscard]] static floats broadcast(float x) noexcept { return simd::broadcast(x); }
    [[nodiscard]] static floats max(floats a, floats b) noexcept { return simd::max(a, b); }
    [[nodiscard]] static floats min(floats a, floats b) noexcept { return simd::min(a, b); }
};

/// Sums of floats in double, lane by lane.
struct double_sum
{
    half_doubles low{};
    half_doubles high{};

    [[gnu::always_inline]] void add(simd::floats v) noexcept
    {
        half_floats part[2];
        std::memcpy(part, &v, sizeof v);
        low += __builtin_convertvector(part[0], half_doubles);
        high += __builtin_convertvector(part[1], half_doubles);
    }
    [[nodiscard]] double total() const noexcept
    {
        half_doubles const both = low + high;
        double sum              = 0;
        for (int i = 0; i < half_lanes; ++i) { sum += both[i]; }
        return sum;
    }
};

/// The losses of as many tokens as there are lanes; lanes past `count` hold zeros.
template <std::size_t Count>
struct token_vector
{
    static constexpr std::size_t capacity = Count == run_time ? max_rungs : Count;

    simd::floats loss[capacity];

    [[gnu::always_inline]] void load(
        std::array<float const*, max_rungs> const& rows, std::size_t rungs, index_t at, index_t count) noexcept
    {
        if (count >= simd::lanes) [[likely]]
        {
            for_rungs<Count>(
                rungs, [&](auto r) __attribute__((always_inline)) { loss[r] = simd::load(rows[r] + at); });
            return;
        }
        for_rungs<Count>(
            rungs, [&](auto r) __attribute__((always_inline)) {
                float padded[simd::lanes]{};
                std::memcpy(padded, rows[r] + at, sizeof(float) * static_cast<std::size_t>(count));
                loss[r] = simd::load(padded);
            });
    }

    /// Zeroes the losses of tokens that have one that is not finite: such a token has nothing to gain. Returns how
    /// many.
    [[gnu::always_inline]] std::int32_t silence_non_finite(std::size_t rungs) noexcept
    {
        simd::floats zero = simd::broadcast(0.0F);
        for_rungs<Count>(
            rungs, [&](auto r) __attribute__((always_inline)) { zero += loss[r] * 0.0F; });
        simd::ints const bad = zero != zero;
        if (!simd::any(bad)) [[likely]] { return 0; }
        std::int32_t count = 0;
        for (int i = 0; i < simd::lanes; ++i) { count -= bad[i]; }
        for_rungs<Count>(
            rungs, [&](auto r) __attribute__((always_inline)) { loss[r] = bad ? simd::broadcast(0.0F) : loss[r]; });
        return count;
    }
};

[[gnu::always_inline]] inline void store_rungs(std::uint8_t* to, simd::ints rung, index_t count) noexcept
{
    byte_lanes const bytes = __builtin_convertvector(rung, byte_lanes);
    if (count >= simd::lanes) [[likely]] { std::memcpy(to, &bytes, sizeof bytes); }
    else { std::memcpy(to, &bytes, static_cast<std::size_t>(count)); }
}

/// Rungs as bytes, of a full vector, or of its first `count` tokens and zeros.
[[gnu::always_inline]] inline simd::ints load_rungs(std::uint8_t const* from, index_t count) noexcept
{
    byte_lanes bytes{};
    if (count >= simd::lanes) [[likely]] { std::memcpy(&bytes, from, sizeof bytes); }
    else { std::memcpy(&bytes, from, static_cast<std::size_t>(count)); }
    return __builtin_convertvector(bytes, simd::ints);
}

/// The one pass over all losses. Tokens without a threshold inside the bracket get their rung, are counted and have
/// their loss summed; the positions and losses of the others are kept for later.
template <std::size_t Count>
void decide(chunk const& tokens, bracket range) noexcept
{
    constexpr std::size_t capacity = Count == run_time ? max_rungs : Count;
    rung_table const& rungs        = *tokens.rungs;
    simd::floats const low         = simd::broadcast(range.low);
    simd::floats const high        = simd::broadcast(range.high);
    simd::ints const cheapest      = simd::broadcast(std::int32_t{rungs.index[0]});
    simd::ints taken_steps[capacity]{};
    chunk_state state;
    double_sum sum;
    index_t undecided = 0;
    for (index_t at = 0; at < tokens.count; at += simd::lanes)
    {
        index_t const left = tokens.count - at;
        token_vector<Count> v;
        v.load(tokens.loss, rungs.count, at, left);
        state.non_finite += v.silence_non_finite(rungs.count);
        simd::ints rung     = cheapest;
        simd::floats chosen = v.loss[0];
        if constexpr (Count != 1)
        {
            token_thresholds<vector_operations, Count> steps;
            steps.first(rungs, v.loss);
            if (simd::any(steps.theta[1] > low))
            {
                steps.others(rungs, v.loss);
                simd::ints open = simd::broadcast(std::int32_t{0});
                for_steps<Count>(
                    rungs.count, [&](auto j) __attribute__((always_inline)) {
                        open |= (steps.theta[j] > low) & (steps.theta[j] <= high);
                    });
                for_steps<Count>(
                    rungs.count, [&](auto j) __attribute__((always_inline)) {
                        simd::ints const taken = (steps.theta[j] > high) & ~open;
                        taken_steps[j] -= taken;
                        chosen = taken ? v.loss[j] : chosen;
                        rung   = taken ? simd::broadcast(std::int32_t{rungs.index[j]}) : rung;
                    });
                std::uint32_t lanes = simd::bits(open);
                if (lanes != 0) { chosen = open ? simd::broadcast(0.0F) : chosen; }
                for (; lanes != 0; lanes &= lanes - 1)
                {
                    index_t const position      = at + std::countr_zero(lanes);
                    tokens.undecided[undecided] = static_cast<std::uint16_t>(position);
                    if (undecided < copied_tokens)
                    {
                        for_rungs<Count>(
                            rungs.count, [&](auto r) __attribute__((always_inline)) {
                                tokens.copies[static_cast<index_t>(r) * copied_tokens + undecided] =
                                    tokens.loss[r][position];
                            });
                    }
                    ++undecided;
                }
            }
        }
        sum.add(chosen);
        store_rungs(tokens.rung + at, rung, left);
    }
    state.loss      = sum.total();
    state.undecided = static_cast<std::int32_t>(undecided);
    // A step is taken by the tokens of its rung and of all costlier ones.
    auto costlier = static_cast<std::int32_t>(tokens.count - undecided);
    for (std::size_t j = 0; j < rungs.count; ++j)
    {
        std::int32_t next = 0;
        if (j + 1 < rungs.count)
        {
            for (int i = 0; i < simd::lanes; ++i) { next += taken_steps[j + 1][i]; }
        }
        state.tokens[j] = costlier - next;
        costlier        = next;
    }
    *tokens.state = state;
}

/// Calls body(positions, how many, vector) for all undecided tokens of a chunk, in order, up to a vector at a time.
template <std::size_t Count, class Body>
void for_undecided(chunk const& tokens, Body const& body)
{
    std::size_t const rungs = tokens.rungs->count;
    index_t const total     = tokens.state->undecided;
    std::array<float const*, max_rungs> copies{};
    for (std::size_t r = 0; r < rungs; ++r) { copies[r] = tokens.copies + static_cast<index_t>(r) * copied_tokens; }
    for (index_t at = 0; at < total; at += simd::lanes)
    {
        std::uint16_t const* const positions = tokens.undecided + at;
        index_t const count                  = std::min<index_t>(total - at, simd::lanes);
        token_vector<Count> v;
        if (at + count <= copied_tokens) { v.load(copies, rungs, at, count); }
        else
        {
            for_rungs<Count>(rungs, [&](auto r) {
                float gathered[simd::lanes]{};
                for (index_t i = 0; i < count; ++i) { gathered[i] = tokens.loss[r][positions[i]]; }
                v.loss[r] = simd::load(gathered);
            });
        }
        body(positions, count, v);
    }
}

/// Gives the undecided tokens the rung they have at the multiplier, and notes whether a threshold equals it. An
/// upgrade's saving differs from the threshold it makes by rounding only, so the look-out is a little wider.
template <std::size_t Count>
void settle(chunk const& tokens, float multiplier)
{
    rung_table const& rungs = *tokens.rungs;
    simd::floats const m    = simd::broadcast(multiplier);
    simd::floats const near = m - m * 0x1p-20F;
    chunk_state& state      = *tokens.state;
    state.plateau           = multiplier < 0x1p-100F; // where a threshold has few bits, anything may equal it
    for_undecided<Count>(tokens, [&](std::uint16_t const* positions, index_t count, auto const& v) {
        token_thresholds<vector_operations, Count> steps;
        steps.first(rungs, v.loss);
        steps.others(rungs, v.loss);
        simd::ints rung     = simd::broadcast(std::int32_t{0});
        simd::floats chosen = v.loss[0];
        simd::ints equal    = rung;
        for_steps<Count>(
            rungs.count, [&](auto j) __attribute__((always_inline)) {
                simd::ints const taken = steps.theta[j] > m;
                rung -= taken;
                chosen = taken ? v.loss[j] : chosen;
                equal |= (steps.theta[j] >= near) & ~taken;
            });
        state.plateau = state.plateau || simd::any(equal);
        for (index_t i = 0; i < count; ++i)
        {
            auto const r              = static_cast<std::size_t>(rung[i]);
            tokens.rung[positions[i]] = rungs.index[r];
            state.loss += double{chosen[i]};
            ++state.tokens[r];
        }
    });
}

/// Whose upgrades are looked at.
enum class scope : std::uint8_t
{
    undecided,
    all
};

/// Calls visit(position) for every token of the chunk, in order, that may have an upgrade of key `bar()` or more within
/// `leftover()` bytes; both are asked anew for every vector.
template <std::size_t Count, class Leftover, class Bar, class Visit>
void for_upgradable(chunk const& tokens, scope which, Leftover const& leftover, Bar const& bar, Visit const& visit)
{
    constexpr std::size_t capacity = Count == run_time ? max_rungs : Count;
    rung_table const& rungs        = *tokens.rungs;
    auto const filter              = [&](simd::ints rung, auto const& v) {
        index_t const bytes = leftover();
        simd::floats best   = simd::broadcast(0.0F);
        for (std::size_t a = 0; a + 1 < capacity && a + 1 < rungs.count; ++a)
        {
            simd::ints const here = rung == simd::broadcast(std::int32_t{rungs.index[a]});
            if (!simd::any(here)) { continue; }
            simd::floats saved = simd::broadcast(0.0F);
            for (std::size_t c = a + 1; c < capacity && c < rungs.count && rungs.cost[c] - rungs.cost[a] <= bytes; ++c)
            {
                saved = simd::max(saved, mdkv::detail::saved_per_unit(rungs, v.loss, a, c));
            }
            best = here ? saved : best;
        }
        return simd::bits((best >= simd::broadcast(bar())) & (best > 0.0F));
    };
    if (which == scope::all)
    {
        for (index_t at = 0; at < tokens.count; at += simd::lanes)
        {
            index_t const left = tokens.count - at;
            token_vector<Count> v;
            v.load(tokens.loss, rungs.count, at, left);
            v.silence_non_finite(rungs.count);
            for (std::uint32_t hits = filter(load_rungs(tokens.rung + at, left), v); hits != 0; hits &= hits - 1)
            {
                visit(at + std::countr_zero(hits));
            }
        }
        return;
    }
    for_undecided<Count>(tokens, [&](std::uint16_t const* positions, index_t count, auto const& v) {
        std::uint8_t now[simd::lanes]{};
        for (index_t i = 0; i < count; ++i) { now[i] = tokens.rung[positions[i]]; }
        for (std::uint32_t hits = filter(load_rungs(now, simd::lanes), v); hits != 0; hits &= hits - 1)
        {
            visit(index_t{positions[std::countr_zero(hits)]});
        }
    });
}

/// Loss of the chosen rungs of a whole chunk, summed afresh: subtracting what an upgrade saved would leave the rounding
/// errors of a loss that may have been far larger.
inline double chosen_loss(problem const& p, chunk const& tokens) noexcept
{
    double sum = 0;
    float losses[max_rungs];
    for (index_t i = 0; i < tokens.count; ++i)
    {
        if (tokens.read(i, losses)) { sum += double{losses[p.place[tokens.rung[i]]]}; }
    }
    return sum;
}

} // namespace mdkv::cpu::dual
