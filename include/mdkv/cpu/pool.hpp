/// \file pool.hpp: pool on the CPU: what each token gets of its row's losses
#pragma once

#include <mdkv/pool.hpp>

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/simd.hpp>

#include <algorithm>
#include <cmath>
#include <utility>

namespace mdkv::cpu
{

namespace detail
{

/// A NaN wins, from either side: it must reach allocate, which tells of it.
struct keep_largest
{
    static constexpr float neutral = -__builtin_huge_valf();

    template <class Floats>
    [[nodiscard]] static Floats join(Floats a, Floats b) noexcept
    {
        return b > a || b != b ? b : a;
    }
    template <class Floats>
    [[nodiscard]] static Floats finish(Floats joined, float) noexcept
    {
        return joined;
    }
};

struct average
{
    static constexpr float neutral = 0.0F;

    template <class Floats>
    [[nodiscard]] static Floats join(Floats a, Floats b) noexcept
    {
        return a + b;
    }
    template <class Floats>
    [[nodiscard]] static Floats finish(Floats joined, float width) noexcept
    {
        return joined / width;
    }
};

/// Tokens [first, last) of one row of n losses, one neighbour after another: for narrow windows, and for those too wide for
/// a tile.
template <class Kind>
void pool_directly(float const* loss, index_t n, index_t width, index_t first, index_t last, float* pooled) noexcept
{
    index_t const reach = width / 2;
    auto const divisor  = static_cast<float>(width);
    index_t i           = first;
    auto const one      = [&] {
        float joined      = Kind::neutral;
        index_t const end = i + std::min(reach, n - 1 - i) + 1; // i + reach may leave 64 bits
        for (index_t t = i - std::min(reach, i); t < end; ++t) { joined = Kind::join(joined, loss[t]); }
        pooled[i] = Kind::finish(joined, divisor);
    };
    for (; i < last && i < reach; ++i) { one(); }
    for (; i + simd::lanes <= last && i + simd::lanes - 1 <= n - 1 - reach; i += simd::lanes)
    {
        simd::floats joined = simd::broadcast(Kind::neutral);
        for (index_t t = i - reach; t <= i + reach; ++t) { joined = Kind::join(joined, simd::load(loss + t)); }
        simd::store(pooled + i, Kind::finish(joined, divisor));
    }
    for (; i < last; ++i) { one(); }
}

inline constexpr index_t pool_tile   = 2048; // losses that one tile joins, on the stack
inline constexpr index_t pool_narrow = 9;    // up to this width, loading neighbours is cheaper than keeping tiles

/// Tokens [first, last) of one row of n losses, a tile at a time; 2 * width <= pool_tile. A window of 2k tokens is two of k
/// side by side, and one of any width is as many of these as its number has binary digits, so that a token costs a few
/// joins whatever the width; and a token's joins are the same wherever a tile begins.
template <class Kind>
void pool_tiles(float const* loss, index_t n, index_t width, index_t first, index_t last, float* pooled) noexcept
{
    constexpr index_t slack = simd::lanes; // a last vector reaches past its loop's end
    float runs[pool_tile + slack];         // from i on: `length` losses joined
    float joined[pool_tile + slack];       // from i on: `done` losses joined
    index_t const reach = width / 2;
    auto const divisor  = static_cast<float>(width);
    for (index_t at = first; at < last; at += pool_tile - (width - 1))
    {
        index_t const tokens = std::min(last - at, pool_tile - (width - 1));
        index_t const count  = tokens + width - 1; // runs[i] is loss[at - reach + i] at first
        index_t const before = std::max<index_t>(reach - at, 0);
        index_t const end    = std::min(count, n - at + reach);
        std::fill_n(runs, before, Kind::neutral);
        std::copy(loss + (at - reach + before), loss + (at - reach + end), runs + before);
        std::fill(runs + end, runs + pool_tile + slack, Kind::neutral);
        std::copy_n(runs, tokens + slack, joined); // the width is odd: its lowest digit is set
        index_t done = 1;
        for (index_t length = 1; 2 * length <= width; length *= 2)
        {
            for (index_t i = 0; i <= count - 2 * length; i += simd::lanes)
            {
                simd::store(runs + i, Kind::join(simd::load(runs + i), simd::load(runs + i + length)));
            }
            if ((width & (2 * length)) == 0) { continue; }
            for (index_t i = 0; i < tokens; i += simd::lanes)
            {
                simd::store(joined + i, Kind::join(simd::load(joined + i), simd::load(runs + i + done)));
            }
            done += 2 * length;
        }
        index_t i = 0;
        for (; i + simd::lanes <= tokens; i += simd::lanes)
        {
            simd::store(pooled + at + i, Kind::finish(simd::load(joined + i), divisor));
        }
        for (; i < tokens; ++i) { pooled[at + i] = Kind::finish(joined[i], divisor); }
    }
}

template <class Kind>
void pool_tokens(float const* loss, index_t n, index_t width, index_t first, index_t last, float* pooled) noexcept
{
    if (width > pool_narrow && width <= pool_tile / 2) { pool_tiles<Kind>(loss, n, width, first, last, pooled); }
    else { pool_directly<Kind>(loss, n, width, first, last, pooled); }
}

/// What is left of a loss on its way over the row, one direction of it.
template <bool Rightwards>
struct fading
{
    simd::floats past; ///< of what arrived at the vector's border, in each lane
    double vector;     ///< of what crosses a whole vector
    float steps[4];    ///< after 1, 2, 4, 8 tokens

    explicit fading(index_t width) noexcept
    {
        auto const after = [&](int tokens) { return std::exp2(-2.0 * tokens / static_cast<double>(width)); };
        float lanes[simd::lanes];
        for (int l = 0; l < simd::lanes; ++l)
        {
            lanes[Rightwards ? l : simd::lanes - 1 - l] = static_cast<float>(after(l + 1));
        }
        past   = simd::load(lanes);
        vector = after(simd::lanes);
        for (int s = 0; s < 4; ++s) { steps[s] = static_cast<float>(after(1 << s)); }
    }

    /// Each lane's largest among itself and those behind it.
    [[nodiscard]] simd::floats within(simd::floats x) const noexcept
    {
        return [&]<int... S>(std::integer_sequence<int, S...>) {
            ((x = keep_largest::join(x, shifted<(1 << S)>(x) * steps[S])), ...);
            return x;
        }(std::make_integer_sequence < int, simd::lanes == 16  ? 4
                                            : simd::lanes == 8 ? 3
                                                               : 2 > {});
    }

    /// By `Tokens` lanes in the direction; what enters is neutral.
    template <int Tokens, class Floats>
    [[nodiscard]] static Floats shifted(Floats x) noexcept
    {
        Floats const none = simd::broadcast(keep_largest::neutral);
        if constexpr (Rightwards) { return neighbours<simd::lanes - Tokens>(none, x); }
        else { return neighbours<Tokens>(x, none); }
    }

    /// Lanes First, First + 1, ... of a and then b. Spelled out, because nvcc expands no pack in the builtin.
    template <int First, class Floats>
    [[nodiscard]] static Floats neighbours(Floats a, Floats b) noexcept
    {
        constexpr int F = First;
        if constexpr (sizeof(Floats) == 64)
        {
            return __builtin_shufflevector(a, b, F, F + 1, F + 2, F + 3, F + 4, F + 5, F + 6, F + 7, F + 8, F + 9,
                F + 10, F + 11, F + 12, F + 13, F + 14, F + 15);
        }
        else if constexpr (sizeof(Floats) == 32)
        {
            return __builtin_shufflevector(a, b, F, F + 1, F + 2, F + 3, F + 4, F + 5, F + 6, F + 7);
        }
        else { return __builtin_shufflevector(a, b, F, F + 1, F + 2, F + 3); }
    }
};

/// One direction of one row, joined to what the other one left. It starts from the losses themselves, and carries them from
/// vector to vector in double, so that rounding does not grow with the distance.
template <bool Rightwards>
void pool_fading(float const* loss, index_t n, index_t width, float* pooled) noexcept
{
    constexpr int exit = Rightwards ? simd::lanes - 1 : 0; // the lane next to the following vector
    fading<Rightwards> const left{width};
    double carried     = double{keep_largest::neutral};
    auto const arrived = [&](simd::floats losses) {
        simd::floats const near = left.within(losses);
        simd::floats const far  = left.past * static_cast<float>(carried);
        carried                 = keep_largest::join(carried * left.vector, double{near[exit]});
        return keep_largest::join(near, far);
    };
    index_t const rest = n % simd::lanes;
    for (index_t done = 0; done < n - rest; done += simd::lanes)
    {
        index_t const at     = Rightwards ? done : n - simd::lanes - done;
        simd::floats const x = arrived(simd::load(loss + at));
        simd::store(pooled + at, Rightwards ? x : keep_largest::join(simd::load(pooled + at), x));
    }
    float part[simd::lanes];
    index_t const at   = Rightwards ? n - rest : 0;
    index_t const lane = Rightwards ? 0 : simd::lanes - rest; // where the rest lies, next to what was carried
    std::fill_n(part, simd::lanes, keep_largest::neutral);
    std::copy_n(loss + at, rest, part + lane);
    simd::store(part, arrived(simd::load(part)));
    for (index_t i = 0; i < rest; ++i)
    {
        pooled[at + i] = Rightwards ? part[lane + i] : keep_largest::join(pooled[at + i], part[lane + i]);
    }
}

} // namespace detail

inline void pool_impl(
    backend const& on, in_view<float, 3, backend> loss, pool_options options, out_view<float, 3, backend> pooled)
{
    if (on.scratch->counting()) { return; }
    constexpr index_t piece = 16384;
    bool const by_row       = options.kind == pooling::adaptive; // what a token gets depends on the whole row
    index_t const rungs     = loss.extent(1);
    index_t const n         = loss.extent(2);
    index_t const pieces    = by_row ? std::min<index_t>(n, 1) : (n + piece - 1) / piece;
    on.for_each(loss.extent(0) * rungs * pieces, [&](index_t work, index_t) {
        index_t const row       = work / pieces;
        index_t const first     = work % pieces * piece;
        index_t const last      = std::min(first + piece, n);
        float const* const from = loss.data_handle() + loss.mapping()(row / rungs, row % rungs, 0);
        float* const to         = pooled.data_handle() + pooled.mapping()(row / rungs, row % rungs, 0);
        switch (options.kind)
        {
            case pooling::max:
                detail::pool_tokens<detail::keep_largest>(from, n, options.width, first, last, to);
                break;
            case pooling::mean:
                detail::pool_tokens<detail::average>(from, n, options.width, first, last, to);
                break;
            case pooling::adaptive:
                detail::pool_fading<true>(from, n, options.width, to);
                detail::pool_fading<false>(from, n, options.width, to);
                break;
        }
    });
}

} // namespace mdkv::cpu
