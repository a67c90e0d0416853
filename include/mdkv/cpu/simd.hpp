/// \file simd.hpp: the few vector operations the CPU kernels are written in, at the width the compiler was told the machine has.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/width.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

// Instructions that no vector expression becomes are spelled as the compilers' own headers spell them: to include these
// takes a quarter of the time that all of mdkv takes.

namespace mdkv::cpu::inline MDKV_CPU_WIDTH::simd
{

// Vector types of the compilers (g++ and clang), never wider than the machine's registers, so that passing them by value
// is free.
inline constexpr int lanes = vector_lanes;

using floats = float __attribute__((vector_size(4 * lanes)));
using ints   = std::int32_t __attribute__((vector_size(4 * lanes)));
using shorts = std::uint16_t __attribute__((vector_size(2 * lanes)));
using bytes  = std::uint8_t __attribute__((vector_size(lanes)));
using halves = short __attribute__((vector_size(2 * lanes))); // their bits

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
#    if defined(__clang__)
        constexpr unsigned short all = 0xffff;
#    else
        constexpr short all = -1;
#    endif
        return __builtin_ia32_vcvtph2ps512_mask(read<halves>(p), floats{}, all, 4); // 4: rounds nothing
#elif defined(__AVX2__) && defined(__F16C__)
        return __builtin_ia32_vcvtph2ps256(read<halves>(p));
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
#if defined(__AVX2__) && !defined(__clang__) // which makes several instructions of the expression below
    using sixteen = char __attribute__((vector_size(16)));
#    if defined(__AVX512F__)
    return __builtin_ia32_pmovzxbd512_mask(read<sixteen>(p), ints{}, 0xffff);
#    else
    using pair = long long __attribute__((vector_size(16))); // not bytes, which would go through memory
    return __builtin_ia32_pmovzxbd256(bits_as<sixteen>(pair{read<long long>(p), 0}));
#    endif
#else
    return __builtin_convertvector(read<bytes>(p), ints);
#endif
}

[[nodiscard]] inline floats to_floats(ints v) noexcept
{
    return __builtin_convertvector(v, floats);
}

/// The low four bits of every lane as numbers from 0 to 15.
[[nodiscard]] inline floats low_nibbles(ints v) noexcept
{
#if defined(__AVX512F__)
    // one look-up instead of a mask and a conversion
    floats const numbers{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#    if defined(__clang__)
    return __builtin_ia32_permvarsf512(numbers, v);
#    else
    return __builtin_ia32_permvarsf512_mask(numbers, v, numbers, 0xffff);
#    endif
#else
    return to_floats(v & 15);
#endif
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
#else
    half rounded[lanes];
    for (int i = 0; i < lanes; ++i) { rounded[i] = narrow<half>(v[i]); }
#endif
    std::memcpy(static_cast<void*>(p), &rounded, sizeof rounded);
}

/// The larger of each pair; the second where one is NaN.
[[nodiscard]] inline floats max(floats a, floats b) noexcept
{
#if defined(__AVX512F__) && !defined(__clang__) // g++ makes two instructions of the expression below
    return __builtin_ia32_maxps512_mask(a, b, a, -1, 4);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return __builtin_ia32_maxps256(a, b);
#else
    return a > b ? a : b;
#endif
}
/// The smaller of each pair; the second where one is NaN.
[[nodiscard]] inline floats min(floats a, floats b) noexcept
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

/// True where any lane of a comparison holds.
[[nodiscard]] inline bool any(ints mask) noexcept
{
#if defined(__AVX512F__) && !defined(__clang__)
    return __builtin_ia32_ptestmd512(mask, mask, 0xffff) != 0;
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return __builtin_ia32_movmskps256(bits_as<floats>(mask)) != 0;
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
    return over_lanes(v, [](floats a, floats b) { return max(a, b); });
}

/// 2^x for x <= 127, within 1e-7 relative; exactly 0 below 2^-126 (and at -infinity).
/// A NaN gives any number, unless it is to stay one.
/// The polynomial is a least-maximum fit of 2^f on [-1/2, 1/2] whose constant term is 1, so that 2^0 is exactly 1.
template <bool KeepNan = false>
[[nodiscard]] inline floats exp2(floats x) noexcept
{
    floats const floor  = broadcast(-126.0F);
    ints const tiny     = x < floor;
    floats const y      = max(x, floor);
    ints const half     = (bits_as<ints>(y) & ~0x7fffffff) | bits_as<ints>(broadcast(0.5F)); // of the sign of y
    floats const halved = y + bits_as<floats>(half);
    ints const whole    = __builtin_convertvector(halved, ints);
    floats const f      = (KeepNan ? x : y) - __builtin_convertvector(whole, floats);
    floats p            = broadcast(1.535335905e-04F);
    p                   = p * f + broadcast(1.339887618e-03F);
    p                   = p * f + broadcast(9.618437849e-03F);
    p                   = p * f + broadcast(5.550332367e-02F);
    p                   = p * f + broadcast(2.402264774e-01F);
    p                   = p * f + broadcast(6.931471825e-01F);
    p                   = p * f + broadcast(1.0F);
#if defined(__AVX512F__)
    p = __builtin_ia32_scalefps512_mask(p, __builtin_convertvector(whole, floats), p, -1, 4);
#else
    p *= bits_as<floats>((whole + 127) << 23);
#endif
    return tiny ? broadcast(0.0F) : p;
}

} // namespace mdkv::cpu::inline MDKV_CPU_WIDTH::simd
