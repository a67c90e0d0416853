/// \file repeat.hpp: loops that are unrolled for certain, so that arrays of vectors stay in registers.
#pragma once

#include <type_traits>
#include <utility>

namespace mdkv::cpu::detail
{

template <int N>
inline constexpr std::integral_constant<int, N> constant{};

/// Calls body(0), body(1), ..., body(N - 1) with constants.
template <int N, class Body>
[[gnu::always_inline]] inline void repeat(Body const& body)
{
    [&]<int... I>(std::integer_sequence<int, I...>) { (body(std::integral_constant<int, I>{}), ...); }(
        std::make_integer_sequence<int, N>{});
}

} // namespace mdkv::cpu::detail
