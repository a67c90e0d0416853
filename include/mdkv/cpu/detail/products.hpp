/// \file products.hpp: vector sums of integer products, the instructions of attention over codes, at the width of the machine that the compiler targets.
#pragma once

#include <mdkv/cpu/simd.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>

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
#elif defined(__aarch64__) && !defined(__ARM_FEATURE_DOTPROD)
using byte_sums                       = split_sums;
inline constexpr bool short_byte_sums = false;
template <bool Signed>
[[nodiscard]] inline byte_sums add_byte_products(byte_sums sum, ints a, ints b) noexcept
{
    ints first, last;
    if constexpr (Signed)
    {
        __asm__ volatile("smull %0.8h, %1.8b, %2.8b" : "=w"(first) : "w"(a), "w"(b));
        __asm__ volatile("smull2 %0.8h, %1.16b, %2.16b" : "=w"(last) : "w"(a), "w"(b));
        __asm__ volatile("sadalp %0.4s, %1.8h" : "+w"(sum.first) : "w"(first));
        __asm__ volatile("sadalp %0.4s, %1.8h" : "+w"(sum.last) : "w"(last));
    }
    else
    {
        __asm__ volatile("umull %0.8h, %1.8b, %2.8b" : "=w"(first) : "w"(a), "w"(b));
        __asm__ volatile("umull2 %0.8h, %1.16b, %2.16b" : "=w"(last) : "w"(a), "w"(b));
        __asm__ volatile("uadalp %0.4s, %1.8h" : "+w"(sum.first) : "w"(first));
        __asm__ volatile("uadalp %0.4s, %1.8h" : "+w"(sum.last) : "w"(last));
    }
    return sum;
}
#else
using byte_sums                       = ints;
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
