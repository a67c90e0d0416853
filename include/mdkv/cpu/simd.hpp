/// \file simd.hpp: the few vector operations of the CPU kernels, at the width of the machine that the compiler targets.
#pragma once

#include <mdkv/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

// Instructions that no vector expression becomes are spelled as in the compilers' own headers: including these headers
// takes a fifth to a quarter of the time that all of mdkv takes. Compilers differ in their spelling of Arm's instructions,
// which are therefore written in assembly; products are volatile there, because g++ would otherwise move them apart until
// registers run out.

namespace mdkv::inline MDKV_MACHINE::cpu
{

/// Floats of a vector register.
#if defined(__AVX512F__)
inline constexpr int vector_lanes = 16;
#elif defined(__AVX2__)
inline constexpr int vector_lanes = 8;
#else
inline constexpr int vector_lanes = 4;
#endif

} // namespace mdkv::inline MDKV_MACHINE::cpu

namespace mdkv::inline MDKV_MACHINE::cpu::simd
{

// Vector types of the compilers (g++ and clang), never wider than the machine's registers, so that passing them by value
// is free.
inline constexpr int lanes = vector_lanes;

/// Vector registers of the machine.
#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int registers = 32;
#else
inline constexpr int registers = 16;
#endif

using floats = float __attribute__((vector_size(4 * lanes)));
using ints   = std::int32_t __attribute__((vector_size(4 * lanes)));
using shorts = std::uint16_t __attribute__((vector_size(2 * lanes)));
using bytes  = std::uint8_t __attribute__((vector_size(lanes)));
using halves = short __attribute__((vector_size(2 * lanes))); // bits of half

#if defined(__AVX512F__) && defined(__clang__)
inline constexpr unsigned short all_lanes = 0xffff; // mask of all lanes
#elif defined(__AVX512F__)
inline constexpr short all_lanes = -1;
#endif

[[nodiscard]] inline floats broadcast(float x) noexcept
{
    return x - floats{}; // exactly x, and one instruction
}

/// The bits of a vector as one of another type.
template <class To, class From>
[[nodiscard]] inline To bits_as(From const& from) noexcept
{
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

/// A vector from any address.
template <class V>
[[nodiscard]] inline V read(void const* p) noexcept
{
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

/// Elements as floats, from any address.
template <element T>
[[nodiscard]] inline floats load(T const* p) noexcept
{
    if constexpr (std::same_as<T, float>) { return read<floats>(p); }
    else if constexpr (std::same_as<T, bfloat16>)
    {
        return bits_as<floats>(__builtin_convertvector(read<shorts>(p), ints) << 16);
    }
    else
    {
#if defined(__AVX512F__)
        return __builtin_ia32_vcvtph2ps512_mask(read<halves>(p), floats{}, all_lanes, 4); // 4: rounds nothing
#elif defined(__AVX2__) && defined(__F16C__) && __has_builtin(__builtin_ia32_vcvtph2ps256)
        return __builtin_ia32_vcvtph2ps256(read<halves>(p));
#elif defined(__AVX2__) && defined(__F16C__) // clang 22 makes the same instruction of the expression
        using elements = _Float16 __attribute__((vector_size(2 * lanes)));
        return __builtin_convertvector(read<elements>(p), floats);
#elif defined(__aarch64__)
        floats wide;
        __asm__("fcvtl %0.4s, %1.4h" : "=w"(wide) : "w"(read<halves>(p)));
        return wide;
#else
        // Moves exponent and mantissa into place and rescales by 2^112, which is exact for subnormals too; infinities
        // and NaNs, whose exponent is all ones, get the float's all-ones exponent.
        ints const wide      = __builtin_convertvector(read<shorts>(p), ints);
        ints const magnitude = (wide & 0x7fff) << 13;
        ints result          = bits_as<ints>(bits_as<floats>(magnitude) * broadcast(0x1p112F));
        result |= (magnitude >= (0x7c00 << 13)) & 0x7f800000;
        result |= (wide & 0x8000) << 16;
        return bits_as<floats>(result);
#endif
    }
}

/// Bytes as numbers from 0 to 255.
[[nodiscard]] inline ints load_bytes(std::byte const* p) noexcept
{
#if defined(__AVX2__) && !defined(__clang__) // g++ makes several instructions of the expression below
    using sixteen = char __attribute__((vector_size(16)));
#    if defined(__AVX512F__)
    return __builtin_ia32_pmovzxbd512_mask(read<sixteen>(p), ints{}, 0xffff);
#    else
    using pair = long long __attribute__((vector_size(16))); // not bytes, which would go through memory
    return __builtin_ia32_pmovzxbd256(bits_as<sixteen>(pair{read<long long>(p), 0}));
#    endif
#elif defined(__aarch64__) && !defined(__clang__)
    using four = std::uint32_t __attribute__((vector_size(8)));
    ints wide;
    __asm__("uxtl %0.8h, %1.8b\n\tuxtl %0.4s, %0.4h" : "=w"(wide) : "w"(four{read<std::uint32_t>(p), 0}));
    return wide;
#else
    return __builtin_convertvector(read<bytes>(p), ints);
#endif
}

/// The second byte of each pair, as the pair's number.
[[nodiscard]] inline ints high_bytes(ints v) noexcept
{
    using pairs = std::uint16_t __attribute__((vector_size(4 * lanes)));
    return bits_as<ints>(bits_as<pairs>(v) >> 8);
}

/// The high half of each byte, as the byte's number.
[[nodiscard]] inline ints high_halves(ints v) noexcept
{
#if defined(__aarch64__)
    using all = std::uint8_t __attribute__((vector_size(4 * lanes)));
    return bits_as<ints>(bits_as<all>(v) >> 4);
#else
    return v >> 4 & 0x0f0f0f0f;
#endif
}

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

// byte_sums add_byte_products<Signed>(byte_sums sum, ints a, ints b): sum + the products of bytes, four to a lane of 32
// bits or two to one of 16, as the machine adds them. If Signed, bytes of a are from 0 to 127 and bytes of b from -128 to
// 127; if not, bytes of a are from 0 to 255 and bytes of b from 0 to 127. `widened` makes lanes of 32 bits; lanes of 16
// bits must be widened before they may pass 32767.
#if (defined(__AVX512VNNI__) && defined(__AVX512F__)) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
using byte_sums                       = ints;
inline constexpr bool short_byte_sums = false;
template <bool Signed>
[[nodiscard]] inline byte_sums add_byte_products(byte_sums sum, ints a, ints b) noexcept
{
#    if defined(__AVX512F__) && defined(__clang__)
    return bits_as<ints>(__builtin_ia32_vpdpbusd512(sum, a, b));
#    elif defined(__AVX512F__)
    return __builtin_ia32_vpdpbusd_v16si(sum, a, b);
#    elif defined(__clang__)
    return bits_as<ints>(__builtin_ia32_vpdpbusd256(sum, a, b));
#    else
    return __builtin_ia32_vpdpbusd_v8si(sum, a, b);
#    endif
}
[[nodiscard]] inline ints widened(byte_sums sum) noexcept
{
    return sum;
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
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
[[nodiscard]] inline ints widened(ints sum) noexcept
{
    return sum;
}
#elif defined(__ARM_FEATURE_DOTPROD)
using byte_sums                       = ints;
inline constexpr bool short_byte_sums = false;
template <bool Signed>
[[nodiscard]] inline byte_sums add_byte_products(byte_sums sum, ints a, ints b) noexcept
{
    if constexpr (Signed) { __asm__ volatile("sdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(a), "w"(b)); }
    else { __asm__ volatile("udot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(a), "w"(b)); }
    return sum;
}
[[nodiscard]] inline ints widened(byte_sums sum) noexcept
{
    return sum;
}
#elif defined(__aarch64__)
using byte_sums = split_sums;
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
    using pairs     = short __attribute__((vector_size(4 * lanes)));
    auto const odd  = bits_as<ints>(bits_as<pairs>(b) >> 8);
    auto const even = bits_as<ints>((bits_as<pairs>(b) << 8) >> 8);
    return add_products(add_products(sum, a & 0x00ff00ff, even), high_bytes(a), odd);
}
[[nodiscard]] inline ints widened(byte_sums sum) noexcept
{
    return sum;
}
#endif

// If the machine multiplies bytes four at a time, numbers of 16 bits are multiplied with codes of 8 bits as two bytes, a
// low and a high one: the low bytes of four numbers come first, then their high bytes.
#if defined(__ARM_FEATURE_DOTPROD)
inline constexpr bool byte_limbs = true;
#    if defined(__ARM_FEATURE_MATMUL_INT8)
inline constexpr bool base_of_high = false; // sums of products of high bytes begin with 0
#    else
inline constexpr bool base_of_high = true;
#    endif
/// Sums of products with the numbers' low bytes, and with their high bytes.
struct limb_sums
{
    ints low;
    ints high;
};
[[nodiscard]] inline limb_sums add_low_products(limb_sums sum, ints codes, ints numbers) noexcept
{
    __asm__ volatile("udot %0.4s, %1.16b, %2.16b" : "+w"(sum.low) : "w"(codes), "w"(numbers));
    return sum;
}
/// If Signed and base_of_high, sums must begin with `high_base` of the numbers.
template <bool Signed>
[[nodiscard]] inline limb_sums add_high_products(limb_sums sum, ints codes, ints numbers) noexcept
{
    if constexpr (!Signed)
    {
        __asm__ volatile("udot %0.4s, %1.16b, %2.16b" : "+w"(sum.high) : "w"(codes), "w"(numbers));
    }
    else
    {
#    if defined(__ARM_FEATURE_MATMUL_INT8)
        __asm__ volatile("usdot %0.4s, %1.16b, %2.16b" : "+w"(sum.high) : "w"(codes), "w"(numbers));
#    else
        ints const less = codes ^ static_cast<int>(0x80808080); // codes - 128, with a sign
        __asm__ volatile("sdot %0.4s, %1.16b, %2.16b" : "+w"(sum.high) : "w"(less), "w"(numbers));
#    endif
    }
    return sum;
}
/// 128 times the sum of the high bytes of n numbers, in every lane, because add_high_products multiplies codes - 128. n is
/// a multiple of 4.
[[nodiscard]] inline ints high_base(std::byte const* numbers, int n) noexcept
{
    ints base{};
    ints const least = ints{} + static_cast<int>(0x80808080); // bytes of -128
    for (int i = 0; i < n; i += 4)
    {
        std::int32_t word = 0;
        std::memcpy(&word, numbers + 2 * i + 4, sizeof word);
        __asm__ volatile("sdot %0.4s, %1.16b, %2.16b" : "+w"(base) : "w"(word - ints{}), "w"(least));
    }
    return -base;
}
[[nodiscard]] inline ints widened(limb_sums sum) noexcept
{
    return sum.low + sum.high * 256;
}
/// Stores the 16 lanes of 4 vectors as limbs of 16 bits.
inline void store_limbs(std::byte* p, ints const* v) noexcept
{
    using sixteen = std::uint8_t __attribute__((vector_size(16)));
    auto const of = [&](int i) { return bits_as<sixteen>(v[i]); };
    for (int i = 0; i < 4; i += 2, p += 16)
    {
        sixteen const limbs =
            __builtin_shufflevector(of(i), of(i + 1), 0, 4, 8, 12, 1, 5, 9, 13, 16, 20, 24, 28, 17, 21, 25, 29);
        std::memcpy(p, &limbs, sizeof limbs);
    }
}
#else
inline constexpr bool byte_limbs   = false;
inline constexpr bool base_of_high = false;
#endif

/// The four bytes at p in every lane.
[[nodiscard]] inline ints words(std::byte const* p) noexcept
{
    std::int32_t word = 0;
    std::memcpy(&word, p, sizeof word);
    return word - ints{};
}

/// Swaps the middle two of every four lanes.
template <class Ints>
[[nodiscard]] inline Ints swap_middle(Ints v) noexcept
{
    if constexpr (sizeof(Ints) == 64)
    {
        return __builtin_shufflevector(v, v, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    }
    else if constexpr (sizeof(Ints) == 32) { return __builtin_shufflevector(v, v, 0, 2, 1, 3, 4, 6, 5, 7); }
    else { return __builtin_shufflevector(v, v, 0, 2, 1, 3); }
}

[[nodiscard]] inline floats to_floats(ints v) noexcept
{
    return __builtin_convertvector(v, floats);
}

inline void store(float* p, floats v) noexcept
{
    std::memcpy(p, &v, sizeof v);
}

/// Stores lanes rounded to half, as narrow<half> rounds each.
inline void narrow_to(half* p, floats v) noexcept
{
#if defined(__AVX512F__)
    auto const rounded = __builtin_ia32_vcvtps2ph512_mask(v, 8, halves{}, 0xffff); // 8: to nearest, no exceptions
#elif defined(__AVX2__) && defined(__F16C__)
    auto const rounded = __builtin_ia32_vcvtps2ph256(v, 8);
#elif defined(__aarch64__)
    halves rounded;
    __asm__("fcvtn %0.4h, %1.4s" : "=w"(rounded) : "w"(v));
#else
    half rounded[lanes];
    for (int i = 0; i < lanes; ++i) { rounded[i] = narrow<half>(v[i]); }
#endif
    std::memcpy(static_cast<void*>(p), &rounded, sizeof rounded);
}

/// The larger of each pair; the second if one is NaN.
[[nodiscard]] inline floats larger(floats a, floats b) noexcept
{
#if defined(__AVX512F__) && !defined(__clang__) // g++ makes two instructions of the expression below
    return __builtin_ia32_maxps512_mask(a, b, a, -1, 4);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return __builtin_ia32_maxps256(a, b);
#else
    return a > b ? a : b;
#endif
}
/// The smaller of each pair; the second if one is NaN.
[[nodiscard]] inline floats smaller(floats a, floats b) noexcept
{
#if defined(__AVX512F__) && !defined(__clang__)
    return __builtin_ia32_minps512_mask(a, b, a, -1, 4);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return __builtin_ia32_minps256(a, b);
#else
    return a < b ? a : b;
#endif
}
[[nodiscard]] inline floats abs(floats a) noexcept
{
    return bits_as<floats>(bits_as<ints>(a) & 0x7fffffff);
}

/// True if any lane of a comparison holds.
[[nodiscard]] inline bool any(ints mask) noexcept
{
#if defined(__AVX512F__) && !defined(__clang__)
    return __builtin_ia32_ptestmd512(mask, mask, 0xffff) != 0;
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return __builtin_ia32_movmskps256(bits_as<floats>(mask)) != 0;
#elif defined(__aarch64__)
    using pair      = long long __attribute__((vector_size(16)));
    auto const both = bits_as<pair>(mask);
    return (both[0] | both[1]) != 0;
#else
    std::int32_t all = 0;
    for (int i = 0; i < lanes; ++i) { all |= mask[i]; }
    return all != 0;
#endif
}

/// Lane i is lane i ^ Half of x. Spelled out, because nvcc expands no pack in the builtin.
template <int Half, class Floats>
[[nodiscard]] inline Floats swap_lanes(Floats x) noexcept
{
    constexpr int H = Half;
    if constexpr (sizeof(Floats) == 64)
    {
        return __builtin_shufflevector(x, x, 0 ^ H, 1 ^ H, 2 ^ H, 3 ^ H, 4 ^ H, 5 ^ H, 6 ^ H, 7 ^ H, 8 ^ H, 9 ^ H,
            10 ^ H, 11 ^ H, 12 ^ H, 13 ^ H, 14 ^ H, 15 ^ H);
    }
    else if constexpr (sizeof(Floats) == 32)
    {
        return __builtin_shufflevector(x, x, 0 ^ H, 1 ^ H, 2 ^ H, 3 ^ H, 4 ^ H, 5 ^ H, 6 ^ H, 7 ^ H);
    }
    else { return __builtin_shufflevector(x, x, 0 ^ H, 1 ^ H, 2 ^ H, 3 ^ H); }
}

/// The nearest whole numbers, below 2^22 in magnitude.
[[nodiscard]] inline ints to_nearest(floats x) noexcept
{
    MDKV_IN_ORDER
#if defined(__AVX512F__)
    return __builtin_ia32_cvtps2dq512_mask(x, ints{}, all_lanes, 4); // 4: rounds in the processor's current mode
#elif defined(__AVX2__)
    return __builtin_ia32_cvtps2dq256(x);
#else
    floats const magic = broadcast(12582912.0F); // 1.5 * 2^23: the last bits of a sum are the nearest whole number
    return bits_as<ints>(x + magic) - bits_as<ints>(magic);
#endif
}

/// Stores the 16 lanes of 16 / lanes vectors as bytes: numbers from -128 to 127 if Signed, from 0 to 255 if not.
template <bool Signed>
inline void store_bytes(std::byte* p, ints const* v) noexcept
{
#if defined(__AVX512F__)
    using sixteen        = char __attribute__((vector_size(16)));
    sixteen const narrow = __builtin_ia32_pmovdb512_mask(*v, sixteen{}, 0xffff);
    std::memcpy(p, &narrow, 16);
#elif defined(__AVX2__)
    auto const words = __builtin_ia32_packssdw256(v[0], v[1]);
    auto const fours = bits_as<ints>( // 0 and 1: lanes 0 to 3 of both
        Signed ? __builtin_ia32_packsswb256(words, words) : __builtin_ia32_packuswb256(words, words));
    ints const all   = __builtin_ia32_permvarsi256(fours, ints{0, 4, 1, 5, 0, 4, 1, 5});
    std::memcpy(p, &all, 16);
#elif defined(__aarch64__)
    using sixteen   = std::uint8_t __attribute__((vector_size(16)));
    auto const even = [](sixteen a, sixteen b) {
        return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    };
    auto const of        = [&](int i) { return bits_as<sixteen>(v[i]); };
    sixteen const narrow = even(even(of(0), of(1)), even(of(2), of(3)));
    std::memcpy(p, &narrow, 16);
#else
    for (int i = 0; i < 16; ++i) { p[i] = static_cast<std::byte>(v[i / lanes][i % lanes] & 0xff); }
#endif
}

/// Stores the 16 lanes of 16 / lanes vectors as 16 bits each: numbers from -32768 to 32767.
inline void store_shorts(std::byte* p, ints const* v) noexcept
{
#if defined(__AVX2__) && !defined(__AVX512F__)
    using words     = long long __attribute__((vector_size(32)));
    auto const all  = bits_as<words>(__builtin_ia32_packssdw256(v[0], v[1])); // half of each vector, twice
    words const out = __builtin_shufflevector(all, all, 0, 2, 1, 3);
    std::memcpy(p, &out, sizeof out);
#else
    for (int i = 0; i < 16 / lanes; ++i, p += 2 * lanes)
    {
        auto const narrow = __builtin_convertvector(v[i], shorts);
        std::memcpy(p, &narrow, sizeof narrow);
    }
#endif
}

/// Joins all lanes, pairwise: halves of the vector first.
template <class Join>
[[nodiscard]] inline float over_lanes(floats v, Join const& join) noexcept
{
    if constexpr (lanes >= 16) { v = join(v, swap_lanes<8>(v)); }
    if constexpr (lanes >= 8) { v = join(v, swap_lanes<4>(v)); }
    v = join(v, swap_lanes<2>(v));
    return join(v, swap_lanes<1>(v))[0];
}
[[nodiscard]] inline float sum(floats v) noexcept
{
    return over_lanes(v, [](floats a, floats b) { return a + b; });
}
[[nodiscard]] inline float max_lane(floats v) noexcept
{
    return over_lanes(v, [](floats a, floats b) { return larger(a, b); });
}

/// 2^x for x <= 127, within 1e-7 relative; exactly 0 below 2^-126 (and at -infinity). A NaN stays one.
/// The polynomial is a least-maximum fit of 2^f on [-1/2, 1/2] whose constant term is 1, so that 2^0 is exactly 1.
[[nodiscard]] inline floats exp2(floats x) noexcept
{
    MDKV_IN_ORDER
    floats const magic = broadcast(12582912.0F + 127.0F); // to_nearest's magic and the offset of exponents
    ints const tiny    = x < broadcast(-126.0F);          // lanes whose result is 0
    floats const moved = x + magic;
    floats const whole = moved - magic;
    floats const f     = x - whole;
    floats p           = broadcast(1.535335905e-04F);
    p                  = p * f + broadcast(1.339887618e-03F);
    p                  = p * f + broadcast(9.618437849e-03F);
    p                  = p * f + broadcast(5.550332367e-02F);
    p                  = p * f + broadcast(2.402264774e-01F);
    p                  = p * f + broadcast(6.931471825e-01F);
    p                  = p * f + broadcast(1.0F);
    p *= bits_as<floats>(bits_as<ints>(moved) << 23); // magic's other bits are shifted out
    return tiny ? broadcast(0.0F) : p;
}

} // namespace mdkv::inline MDKV_MACHINE::cpu::simd
