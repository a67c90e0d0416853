/// \file pool.hpp: pool on the CPU: a running window over each row of losses
#pragma once

#include <mdkv/pool.hpp>

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/simd.hpp>

#include <algorithm>

namespace mdkv::cpu
{

namespace detail
{

/// A NaN wins, from either side: it must reach allocate, which tells of it.
struct keep_largest
{
    static constexpr float neutral = -__builtin_huge_valf();

    [[nodiscard]] static float join(float a, float b) noexcept { return b > a || b != b ? b : a; }
    [[nodiscard]] static simd::floats join(simd::floats a, simd::floats b) noexcept { return b > a || b != b ? b : a; }
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

/// Tokens [first, last) of one row of n losses; both kinds join the neighbours from left to right, so that no result
/// depends on where a piece of work begins.
template <class Kind>
void pool_tokens(float const* loss, index_t n, index_t width, index_t first, index_t last, float* pooled) noexcept
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

} // namespace detail

inline void pool_impl(
    backend const& on, in_view<float, 3, backend> loss, pool_options options, out_view<float, 3, backend> pooled)
{
    if (on.scratch->counting()) { return; }
    constexpr index_t piece = 16384;
    index_t const rungs     = loss.extent(1);
    index_t const n         = loss.extent(2);
    index_t const pieces    = (n + piece - 1) / piece;
    on.for_each(loss.extent(0) * rungs * pieces, [&](index_t work, index_t) {
        index_t const row       = work / pieces;
        index_t const first     = work % pieces * piece;
        index_t const last      = std::min(first + piece, n);
        float const* const from = loss.data_handle() + loss.mapping()(row / rungs, row % rungs, 0);
        float* const to         = pooled.data_handle() + pooled.mapping()(row / rungs, row % rungs, 0);
        if (options.kind == pooling::max)
        {
            detail::pool_tokens<detail::keep_largest>(from, n, options.width, first, last, to);
        }
        else { detail::pool_tokens<detail::average>(from, n, options.width, first, last, to); }
    });
}

} // namespace mdkv::cpu
