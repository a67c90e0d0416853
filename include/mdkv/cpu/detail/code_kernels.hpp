/// \file code_kernels.hpp: the products of attention over tokens stored as codes, shared by its logits and its sums of values (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/detail/attention_kernels.hpp>
#include <mdkv/cpu/simd.hpp>

#include <algorithm>
#include <cstddef>

namespace mdkv::inline MDKV_MACHINE::cpu::detail
{

// A coordinate is minimum + scale * code, with one minimum and one scale for a token's group. It is never formed: a logit is
// scale * (sum of q * code) + minimum * (sum of q), and a sum of values is (weight * scale) * code summed, plus the sum of
// weight * minimum, the same for all columns of the group. The factors of codes, queries by group and weights by block, are
// rounded to multiples of a unit, so that products and their sums are whole numbers: to 16 bits where codes have 8, to 8 bits
// where codes have 4. Codes scatter around their middle: the middle times the sum of all numbers' rounding errors is
// added, so that only each error times a code's distance from the middle is lost (docs/numerics.md).

/// Query heads that one pass over codes serves. Eight would read codes from the nearest cache once where two passes of four
/// read them twice, and be compiled for every user.
inline constexpr int most_coded_heads = (std::min)(4, most_group);
inline constexpr int coded_passes     = 4;

/// Half of the fours of codes as a factor, the first or the second: of 8 bits first and third, or second and fourth; of 4
/// bits low halves, or high halves.
template <int Bits>
[[nodiscard]] [[gnu::always_inline]] inline simd::ints unpack(std::byte const* from, int half) noexcept
{
    auto const codes = simd::read<simd::ints>(from);
    if constexpr (Bits == 8) { return half == 0 ? codes & 0x00ff00ff : simd::high_bytes(codes); }
    else { return (half == 0 ? codes : codes >> 4) & 0x0f0f0f0f; }
}

/// Adds products: a from 0 to 255, of 4-bit codes b from -128 to 127.
template <int Bits, class Sums>
[[gnu::always_inline]] inline void multiply(Sums& sums, simd::ints a, simd::ints b) noexcept
{
    if constexpr (Bits == 8) { sums = simd::add_products(sums, a, b); }
    else { sums = simd::add_byte_products(sums, a, b); }
#if defined(__SSE2__) && !defined(__clang__)
    __asm__("" : "+v"(sums)); // g++ would add in another order, with more sums than there are registers
#endif
}

} // namespace mdkv::inline MDKV_MACHINE::cpu::detail
