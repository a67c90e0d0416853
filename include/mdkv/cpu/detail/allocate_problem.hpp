/// \file allocate_problem.hpp: one limit, the tokens under it, the rungs open to each head, and how vectors of tokens are read (arXiv 2603.20616, section 4.3)
#pragma once

#include <mdkv/allocate.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/tile.hpp>
#include <mdkv/detail/allocate_offers.hpp>
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
using mdkv::detail::offer;
using mdkv::detail::rung_table;
using mdkv::detail::token_thresholds;
using mdkv::detail::upgrade_choice;

/// Tokens per piece of work. Fixed, so that sums have one shape whatever the threads; 16 bits hold a position in it.
inline constexpr index_t chunk_tokens = 4096;
/// Undecided tokens per chunk whose losses are copied; those of further ones are gathered when they are needed again.
inline constexpr index_t copied_tokens = 512;

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
    index_t first_head           = 0;
    index_t heads                = 0;
    offer const* offers          = nullptr; ///< their tables share a unit
    std::uint8_t const* offer_of = nullptr; ///< [heads]  which of the offers a head has; null: all have the first
    bool ask_closed              = false;   ///< a rung that is not open may tell that a token's losses say nothing
    chunk_state* chunks          = nullptr; ///< [heads * chunks_per_head()]
    std::uint16_t* undecided     = nullptr; ///< [chunks, chunk_tokens]  positions in the chunk, ascending
    float* copies                = nullptr; ///< [chunks, rungs, copied_tokens]  their losses

    /// What is open to a head (counted as the losses' heads are).
    [[nodiscard]] offer const& offer_to(index_t head) const noexcept
    {
        return offer_of == nullptr ? offers[0] : offers[offer_of[head - first_head]];
    }
    [[nodiscard]] rung_table const& rungs_of(index_t head) const noexcept { return offer_to(head).rungs; }
    /// The table of all heads, where they have the same.
    [[nodiscard]] rung_table const& common_rungs() const noexcept { return rungs_of(first_head); }

    [[nodiscard]] index_t unit() const noexcept { return offers[0].rungs.unit; }
    [[nodiscard]] index_t tokens_per_head() const noexcept { return loss.extent(2); }
    [[nodiscard]] index_t chunks_per_head() const noexcept
    {
        return (tokens_per_head() + chunk_tokens - 1) / chunk_tokens;
    }
    [[nodiscard]] index_t chunk_count() const noexcept { return heads * chunks_per_head(); }
    [[nodiscard]] index_t head_of(index_t chunk) const noexcept { return first_head + chunk / chunks_per_head(); }
    [[nodiscard]] index_t token_count() const noexcept { return heads * tokens_per_head(); }

    /// Bytes of the projections.
    [[nodiscard]] index_t charged() const noexcept
    {
        index_t sum = 0;
        for (index_t h = 0; h < heads; ++h) { sum += offer_to(first_head + h).charge; }
        return sum;
    }
    /// Bytes of every token at the cheapest rung open to it.
    [[nodiscard]] index_t cheapest() const noexcept
    {
        index_t sum = 0;
        for (index_t h = 0; h < heads; ++h) { sum += tokens_per_head() * rungs_of(first_head + h).cost[0]; }
        return sum;
    }
    [[nodiscard]] index_t narrowest_step() const noexcept
    {
        index_t least = unit();
        for (index_t h = 0; h < heads; ++h) { least = std::min(least, rungs_of(first_head + h).narrowest_step()); }
        return least;
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
    offer const* open;
    rung_table const* rungs;
    std::size_t asked; ///< rungs whose losses must be finite: those of the table, or all
    std::array<float const*, max_rungs>
        loss; ///< of the table's rungs, then of the others that are asked, from the first token on

    chunk(problem const& p, index_t n) noexcept
        : number{n}
        , head{p.head_of(n)}
        , first{n % p.chunks_per_head() * chunk_tokens}
        , count{std::min(chunk_tokens, p.tokens_per_head() - first)}
        , rung{p.rung.data_handle() + p.rung.mapping()(head, first)}
        , undecided{p.undecided + n * chunk_tokens}
        , copies{p.copies + n * copied_tokens * p.loss.extent(1)}
        , state{p.chunks + n}
        , open{&p.offer_to(head)}
        , rungs{&open->rungs}
        , asked{rungs->count}
        , loss{}
    {
        auto const row = [&](std::size_t r) {
            return p.loss.data_handle() + p.loss.mapping()(head, static_cast<index_t>(r), first);
        };
        for (std::size_t r = 0; r < rungs->count; ++r) { loss[r] = row(rungs->index[r]); }
        if (!p.ask_closed) { return; }
        for (std::size_t r = 0, t = 0; r < static_cast<std::size_t>(p.loss.extent(1)); ++r)
        {
            if (t < rungs->count && rungs->index[t] == r) { ++t; }
            else { loss[asked++] = row(r); }
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
        for (std::size_t r = rungs->count; r < asked; ++r) { finite = finite && std::isfinite(loss[r][position]); }
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
    /// many. `zero` is 0, or not a number where a loss that is not among these says so.
    [[gnu::always_inline]] std::int32_t silence_non_finite(
        std::size_t rungs, simd::floats zero = simd::broadcast(0.0F)) noexcept
    {
        for_rungs<Count>(
            rungs, [&](auto r) __attribute__((always_inline)) { zero += loss[r] * 0.0F; });
        simd::ints const bad = zero != zero;
        if (!simd::any(bad)) [[likely]] { return 0; }
        std::int32_t count = 0;
        for (int i = 0; i < simd::lanes; ++i) { count -= bad[i]; }
        for_rungs<Count>(
            rungs, [&](auto r)
                       __attribute__((always_inline)) { loss[r] = simd::select(bad, simd::broadcast(0.0F), loss[r]); });
        return count;
    }
};

/// Reads a vector of a chunk's tokens, finite or silenced, and says how many were.
template <std::size_t Count>
[[gnu::always_inline]] inline std::int32_t load_tokens(token_vector<Count>& v, chunk const& tokens, index_t at) noexcept
{
    std::size_t const rungs = tokens.rungs->count;
    index_t const left      = tokens.count - at;
    v.load(tokens.loss, rungs, at, left);
    simd::floats zero = simd::broadcast(0.0F);
    for (std::size_t r = rungs; r < tokens.asked; ++r)
    {
        float closed[simd::lanes]{};
        std::memcpy(closed, tokens.loss[r] + at,
            sizeof(float) * static_cast<std::size_t>(std::min<index_t>(left, simd::lanes)));
        zero += simd::load(closed) * 0.0F;
    }
    return v.silence_non_finite(rungs, zero);
}

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

} // namespace mdkv::cpu::dual
