/// \file code_kernels.hpp: the products of attention over tokens stored as codes, shared by its logits and its sums of values (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/cpu/detail/attention_kernels.hpp>
#include <mdkv/cpu/detail/products.hpp>
#include <mdkv/cpu/simd.hpp>

#include <algorithm>
#include <cstddef>
#include <type_traits>

namespace MDKV_NAMESPACE::cpu::detail
{

// A coordinate is minimum + scale * code, with one minimum and one scale for a token's group. It is never formed: a logit
// is scale * (sum of q * code) + minimum * (sum of q), and a sum of values is (weight * scale) * code summed, plus the sum
// of weight * minimum, the same for all columns of the group. The factors of codes, queries by group and weights by block,
// are rounded to multiples of a unit, so that products and their sums are whole numbers: to 16 bits for codes of 8 bits,
// to 8 bits for codes of 4 bits. Codes scatter around their middle: the middle times the sum of all rounding errors is
// added, so that only each error times a code's distance from the middle is lost (docs/numerics.md).

/// Query heads that one pass over codes serves. A pass of eight would read codes from the first-level cache once, two
/// passes of four read them twice; but every user would compile it.
inline constexpr int most_coded_heads = (std::min)(4, most_group);
inline constexpr int coded_passes     = 4;

/// Sums of products with codes of `Bits` bits, and the registers that they take.
template <int Bits>
using code_sums = std::conditional_t<Bits == 8, simd::pair_sums, simd::byte_sums>;
template <int Bits>
inline constexpr int sum_registers = int{sizeof(code_sums<Bits>)} / int{sizeof(simd::ints)};

/// Half of each four codes as a factor, the first half or the second. For codes of 8 bits: first and third, or second and
/// fourth code; for codes of 4 bits: low, or high halves of bytes.
template <int Bits>
[[nodiscard]] [[gnu::always_inline]] inline simd::ints unpack(std::byte const* from, int half) noexcept
{
    auto const codes = simd::read<simd::ints>(from);
    if constexpr (Bits == 8) { return half == 0 ? codes & 0x00ff00ff : simd::high_bytes(codes); }
    else { return half == 0 ? codes & 0x0f0f0f0f : simd::high_halves(codes); }
}

/// Adds products of half of the codes with numbers, which are signed if Signed. For 8 bits, a are the codes. For 4 bits, a
/// are the codes if Signed, otherwise the numbers.
template <int Bits, bool Signed>
[[gnu::always_inline]] inline void multiply(code_sums<Bits>& sums, simd::ints a, simd::ints b) noexcept
{
    if constexpr (Bits == 8) { sums = simd::add_products(sums, a, b); }
    else { sums = simd::add_byte_products<Signed>(sums, a, b); }
#if defined(__SSE2__) && !defined(__clang__)
    __asm__("" : "+v"(sums)); // g++ would add in another order, with more sums than there are registers
#endif
}

} // namespace MDKV_NAMESPACE::cpu::detail
