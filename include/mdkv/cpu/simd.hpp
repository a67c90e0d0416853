/// \file simd.hpp: the few vector operations of the CPU kernels, at the width of the machine that the compiler targets.
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/detail/lanes.hpp>

#include <cstring>

// Instructions that no vector expression becomes are spelled as in the compilers' own headers: including these headers takes a
// fifth to a quarter of the time that all of mdkv takes. Compilers differ in their spelling of Arm's instructions, which are
// therefore written in assembly; products are volatile there, because g++ would otherwise move them apart until registers run out.

namespace MDKV_NAMESPACE::cpu
{

/// Floats of a vector register.
#if defined(__AVX512F__)
inline constexpr int vector_lanes = 16;
#elif defined(__AVX2__)
inline constexpr int vector_lanes = 8;
#else
inline constexpr int vector_lanes = 4;
#endif

} // namespace MDKV_NAMESPACE::cpu

namespace MDKV_NAMESPACE::cpu::simd
{

// Vector types of the compilers (g++ and clang), never wider than the machine's registers, so that passing them by value is free.
inline constexpr int lanes = vector_lanes;

/// Vector registers of the machine.
#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int registers = 32;
#else
inline constexpr int registers    = 16;
#endif

using floats = float __attribute__((vector_size(4 * lanes)));
using ints   = std::int32_t __attribute__((vector_size(4 * lanes)));
using shorts = std::uint16_t __attribute__((vector_size(2 * lanes)));
using bytes  = std::uint8_t __attribute__((vector_size(lanes)));
using halves = short __attribute__((vector_size(2 * lanes))); // bits of half

#if defined(__AVX512F__) && defined(__clang__)
inline constexpr unsigned short all_lanes = 0xffff; // mask of all lanes
#elif defined(__AVX512F__)
inline constexpr short all_lanes  = -1;
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

/// The four bytes at p in every lane.
[[nodiscard]] inline ints words(std::byte const* p) noexcept
{
    std::int32_t word = 0;
    std::memcpy(&word, p, sizeof word);
    return word - ints{};
}

/// Lane i is lane at(i) of a and b, one behind the other; `at` has no state. (nvcc does not expand a pack in a list of lanes.)
template <class V, class At>
[[nodiscard]] inline V shuffled(V a, V b, At at) noexcept
{
    if constexpr (sizeof a / sizeof a[0] == 16)
    {
        return __builtin_shufflevector(a, b, at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9),
            at(10), at(11), at(12), at(13), at(14), at(15));
    }
    else if constexpr (sizeof a / sizeof a[0] == 8)
    {
        return __builtin_shufflevector(a, b, at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
    }
    else { return __builtin_shufflevector(a, b, at(0), at(1), at(2), at(3)); }
}

/// Lane i is lane i ^ Half of x.
template <int Half>
[[nodiscard]] inline floats swap_lanes(floats x) noexcept
{
    return shuffled(x, x, [](int i) { return i ^ Half; });
}

/// Exchanges rows and columns: lane j of vector i becomes lane i of vector j.
[[gnu::always_inline]] inline void transpose(floats (&x)[std::size_t{lanes}]) noexcept
{
    constexpr int half = lanes / 2;
    MDKV_UNROLL
    for (int step = 1; step < lanes; step *= 2)
    {
        floats y[std::size_t{lanes}];
        MDKV_UNROLL
        for (int i = 0; i < half; ++i)
        {
            y[2 * i]     = shuffled(x[i], x[i + half], [](int l) { return l / 2 + l % 2 * lanes; });
            y[2 * i + 1] = shuffled(x[i], x[i + half], [](int l) { return l / 2 + l % 2 * lanes + lanes / 2; });
        }
        MDKV_UNROLL
        for (int i = 0; i < lanes; ++i) { x[i] = y[i]; }
    }
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
[[nodiscard]] inline floats magnitude(floats a) noexcept
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
#else
    using pairs   = long long __attribute__((vector_size(4 * lanes)));
    long long all = 0;
    for (int i = 0; i < lanes / 2; ++i) { all |= bits_as<pairs>(mask)[i]; }
    return all != 0;
#endif
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
#else
    using sixteen        = std::uint8_t __attribute__((vector_size(16)));
    auto const even      = [](sixteen a, sixteen b) { return shuffled(a, b, [](int i) { return 2 * i; }); };
    auto const of        = [&](int i) { return bits_as<sixteen>(v[i]); };
    sixteen const narrow = even(even(of(0), of(1)), even(of(2), of(3)));
    std::memcpy(p, &narrow, 16);
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
[[nodiscard]] inline float over_lanes(floats v, auto const& join) noexcept
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

} // namespace MDKV_NAMESPACE::cpu::simd
