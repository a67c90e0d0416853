/// \file transpose.hpp: squares of sixteen by sixteen elements, turned in registers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mdkv::cpu::detail
{

/// Sixteen lanes of an element's size, as bits.
template <std::size_t Bytes>
struct square;
template <>
struct square<1>
{
    using line = std::uint8_t __attribute__((vector_size(16)));
};
template <>
struct square<2>
{
    using line = std::uint16_t __attribute__((vector_size(32)));
};
template <>
struct square<4>
{
    using line = std::uint32_t __attribute__((vector_size(64)));
};

// Written out for each size: nvcc's front end does not understand the builtin where its operands depend on a template.
[[gnu::always_inline]] inline void interleave(
    square<1>::line const& a, square<1>::line const& b, square<1>::line& low, square<1>::line& high) noexcept
{
    low  = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    high = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
[[gnu::always_inline]] inline void interleave(
    square<2>::line const& a, square<2>::line const& b, square<2>::line& low, square<2>::line& high) noexcept
{
    low  = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    high = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
[[gnu::always_inline]] inline void interleave(
    square<4>::line const& a, square<4>::line const& b, square<4>::line& low, square<4>::line& high) noexcept
{
    low  = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    high = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

/// x[i][j] becomes x[j][i]: four rounds that each interleave the first half of the lines with the second.
template <class Line>
[[gnu::always_inline]] inline void transpose(Line (&x)[16]) noexcept
{
    for (int round = 0; round < 4; ++round)
    {
        Line y[16];
        for (int i = 0; i < 8; ++i) { interleave(x[i], x[i + 8], y[2 * i], y[2 * i + 1]); }
        for (int i = 0; i < 16; ++i) { x[i] = y[i]; }
    }
}

} // namespace mdkv::cpu::detail
