/// \file rungs.hpp: reading a head's rungs: how many tokens each has, whether all are known, which tokens have one.
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace mdkv::cpu::detail
{

/// \throws invalid_argument   a rung of head h is not below `rungs`, naming head and token
inline void expects_rungs(char const* stage, in_view<std::uint8_t, 2, backend> rung, index_t h, std::size_t rungs)
{
    std::uint8_t const* const row = rung.data_handle() + rung.mapping()(h, 0);
    index_t const tokens          = rung.extent(1);
    std::uint8_t largest          = 0;
    for (index_t t = 0; t < tokens; ++t) { largest = std::max(largest, row[t]); }
    if (tokens == 0 || largest < rungs) { return; }
    index_t t = 0;
    while (row[t] < rungs) { ++t; }
    expects(false, stage, ": rung of head ", h, ", token ", t, " is ", int{row[t]}, "; it must be below ", rungs);
}

/// Tokens of head h at each rung; every rung is below max_rungs.
[[nodiscard]] inline ::cuda::std::array<index_t, max_rungs> count_rungs(
    in_view<std::uint8_t, 2, backend> rung, index_t h, std::size_t rungs) noexcept
{
    std::uint8_t const* const row = rung.data_handle() + rung.mapping()(h, 0);
    ::cuda::std::array<index_t, max_rungs> tokens{};
    constexpr index_t piece = 255; // what a byte can count, so that the inner loop runs on bytes
    for (index_t t = 0; t < rung.extent(1); t += piece)
    {
        index_t const n = std::min(piece, rung.extent(1) - t);
        for (std::size_t r = 0; r < rungs; ++r)
        {
            auto const wanted  = static_cast<std::uint8_t>(r);
            std::uint8_t equal = 0;
            for (index_t i = t; i < t + n; ++i) { equal = static_cast<std::uint8_t>(equal + (row[i] == wanted)); }
            tokens[r] += equal;
        }
    }
    return tokens;
}

/// Calls body(t) for the tokens of a head at rung r, ascending. Eight tokens without one are passed over at once: most
/// tokens of a small cache are dropped.
template <class Body>
inline void for_tokens_at(std::uint8_t const* row, index_t tokens, std::size_t r, Body const& body)
{
    constexpr std::uint64_t ones = 0x0101010101010101U;
    constexpr std::uint64_t high = 0x8080808080808080U;
    auto const wanted            = static_cast<std::uint8_t>(r);
    index_t t                    = 0;
    for (; t + 8 <= tokens; t += 8)
    {
        std::uint64_t eight = 0;
        std::memcpy(&eight, row + t, sizeof eight);
        eight ^= ones * wanted; // a byte is 0 where the rung is the wanted one
        if (((eight - ones) & ~eight & high) == 0) { continue; }
        for (index_t i = t; i < t + 8; ++i)
        {
            if (row[i] == wanted) { body(i); }
        }
    }
    for (; t < tokens; ++t)
    {
        if (row[t] == wanted) { body(t); }
    }
}

} // namespace mdkv::cpu::detail
