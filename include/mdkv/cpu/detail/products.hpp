/// \file products.hpp: vector sums of integer products, the instructions of attention over codes, at the width of the machine that the compiler targets, and how codes become their factors (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/cpu/detail/attention_kernels.hpp>
#include <mdkv/cpu/simd.hpp>

#include <algorithm>
#include <cstddef>
#include <type_traits>

namespace MDKV_NAMESPACE::cpu::simd
{

// pair_sums add_products(pair_sums sum, ints a, ints b): sum + the products of 16-bit numbers, two by two: a lane grows by
// a[2i] * b[2i] + a[2i + 1] * b[2i + 1]. `widened` makes its lanes of 32 bits.
#if defined(__aarch64__)
/// Sums of products in twice as many lanes: `first` for the first half of the numbers, `last` for the last half.
struct split_sums
{
    ints first;
    ints last;
};
using pair_sums = split_sums;
[[nodiscard]] inline pair_sums add_products(pair_sums sum, ints a, ints b) noexcept
{
    __asm__ volatile("smlal %0.4s, %1.4h, %2.4h" : "+w"(sum.first) : "w"(a), "w"(b));
    __asm__ volatile("smlal2 %0.4s, %1.8h, %2.8h" : "+w"(sum.last) : "w"(a), "w"(b));
    return sum;
}
[[nodiscard]] inline ints widened(split_sums sum) noexcept
{
    return __builtin_shufflevector(sum.first, sum.last, 0, 2, 4, 6)
           + __builtin_shufflevector(sum.first, sum.last, 1, 3, 5, 7);
}
#else
using pair_sums = ints;
[[nodiscard]] inline pair_sums add_products(pair_sums sum, ints a, ints b) noexcept
{
#    if defined(__AVX512VNNI__) && defined(__AVX512F__) && defined(__clang__)
    return bits_as<ints>(__builtin_ia32_vpdpwssd512(sum, a, b));
#    elif defined(__AVX512VNNI__) && defined(__AVX512F__)
    return __builtin_ia32_vpdpwssd_v16si(sum, a, b);
#    else
    using pairs [[maybe_unused]] = short __attribute__((vector_size(4 * lanes)));
#        if defined(__AVX512BW__) && defined(__clang__)
    return sum + bits_as<ints>(__builtin_ia32_pmaddwd512(bits_as<pairs>(a), bits_as<pairs>(b)));
#        elif defined(__AVX512BW__)
    return sum + bits_as<ints>(__builtin_ia32_pmaddwd512_mask(bits_as<pairs>(a), bits_as<pairs>(b), sum, 0xffff));
#        elif defined(__AVX2__) && !defined(__AVX512F__)
    return sum + bits_as<ints>(__builtin_ia32_pmaddwd256(bits_as<pairs>(a), bits_as<pairs>(b)));
#        elif defined(__SSE2__) && !defined(__AVX512F__)
    return sum + bits_as<ints>(__builtin_ia32_pmaddwd128(bits_as<pairs>(a), bits_as<pairs>(b)));
#        else
    return sum + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#        endif
#    endif
}
#endif

/// Sums in lanes of 32 bits.
[[nodiscard]] inline ints widened(ints sum) noexcept
{
    return sum;
}

// byte_sums add_byte_products<Signed>(byte_sums sum, ints a, ints b): sum + the products of bytes, four to a lane of 32
// bits or two to one of 16, as the machine adds them. If Signed, bytes of a are from 0 to 127 and bytes of b from -128 to
// 127; if not, bytes of a are from 0 to 255 and bytes of b from 0 to 127. `widened` makes lanes of 32 bits; lanes of 16
// bits must be widened before they may pass 32767.
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
using byte_sums                       = short __attribute__((vector_size(4 * lanes)));
inline constexpr bool short_byte_sums = true;
template <bool Signed>
[[nodiscard]] inline byte_sums add_byte_products(byte_sums sum, ints a, ints b) noexcept
{
    using all = char __attribute__((vector_size(4 * lanes)));
    return sum + __builtin_ia32_pmaddubsw256(bits_as<all>(a), bits_as<all>(b));
}
[[nodiscard]] inline ints widened(byte_sums sum) noexcept
{
    return add_products(ints{}, bits_as<ints>(sum), ints{} + 0x00010001);
}
#else
#    if defined(__ARM_FEATURE_DOTPROD)
using byte_sums                       = ints;
#    else
using byte_sums = pair_sums;
#    endif
inline constexpr bool short_byte_sums = false;
template <bool Signed>
[[nodiscard]] inline byte_sums add_byte_products(byte_sums sum, ints a, ints b) noexcept
{
#    if defined(__AVX512VNNI__) && defined(__AVX512F__) && defined(__clang__)
    return bits_as<ints>(__builtin_ia32_vpdpbusd512(sum, a, b));
#    elif defined(__AVX512VNNI__) && defined(__AVX512F__)
    return __builtin_ia32_vpdpbusd_v16si(sum, a, b);
#    elif defined(__AVXVNNI__) && !defined(__AVX512F__) && defined(__clang__)
    return bits_as<ints>(__builtin_ia32_vpdpbusd256(sum, a, b));
#    elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return __builtin_ia32_vpdpbusd_v8si(sum, a, b);
#    elif defined(__ARM_FEATURE_DOTPROD)
    if constexpr (Signed) { __asm__ volatile("sdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(a), "w"(b)); }
    else { __asm__ volatile("udot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(a), "w"(b)); }
    return sum;
#    else
    using pairs     = short __attribute__((vector_size(4 * lanes)));
    auto const odd  = bits_as<ints>(bits_as<pairs>(b) >> 8);
    auto const even = bits_as<ints>((bits_as<pairs>(b) << 8) >> 8);
    return add_products(add_products(sum, a & 0x00ff00ff, even), high_bytes(a), odd);
#    endif
}
#endif

} // namespace MDKV_NAMESPACE::cpu::simd

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
