/// \file simd.hpp: the few vector operations the CPU kernels are written in, at the width the compiler was told the machine has.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/width.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__F16C__) || defined(__AVX512F__) || defined(__AVX__)
// g++ 12's own intrinsics start from an uninitialised register and warn of it wherever they are inlined, in Eigen too.
#    if defined(__GNUC__) && !defined(__clang__)
#        pragma GCC diagnostic push
#        pragma GCC diagnostic ignored "-Wuninitialized"
#        pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#    endif
#    include <immintrin.h>
#    if defined(__GNUC__) && !defined(__clang__)
#        pragma GCC diagnostic pop
#    endif
#endif

namespace mdkv::cpu::inline MDKV_CPU_WIDTH::simd
{

// Vector types of the compilers (g++ and clang), never wider than the machine's registers, so that passing them by value
// is free.
inline constexpr int lanes = vector_lanes;

// One by one: g++ drops the attribute when its argument depends on a template parameter.
template <int N>
struct vector_of;
template <>
struct vector_of<4>
{
    using floats = float __attribute__((vector_size(16)));
    using ints   = std::int32_t __attribute__((vector_size(16)));
    using halves = std::uint16_t __attribute__((vector_size(8)));
    using bytes  = std::uint8_t __attribute__((vector_size(4)));
};
template <>
struct vector_of<8>
{
    using floats = float __attribute__((vector_size(32)));
    using ints   = std::int32_t __attribute__((vector_size(32)));
    using halves = std::uint16_t __attribute__((vector_size(16)));
    using bytes  = std::uint8_t __attribute__((vector_size(8)));
};
template <>
struct vector_of<16>
{
    using floats = float __attribute__((vector_size(64)));
    using ints   = std::int32_t __attribute__((vector_size(64)));
    using halves = std::uint16_t __attribute__((vector_size(32)));
    using bytes  = std::uint8_t __attribute__((vector_size(16)));
};

template <int N>
using floats_of = typename vector_of<N>::floats;
template <int N>
using ints_of = typename vector_of<N>::ints;

using floats = floats_of<lanes>;
using ints   = ints_of<lanes>;

// Written as a list of N equal items, which both compilers turn into one instruction.
template <int N = lanes>
[[nodiscard]] inline floats_of<N> broadcast(float x) noexcept
{
    return [x]<int... I>(std::integer_sequence<int, I...>) { return floats_of<N>{(static_cast<void>(I), x)...}; }(
               std::make_integer_sequence<int, N>{});
}

template <int N = lanes>
[[nodiscard]] inline ints_of<N> broadcast(std::int32_t x) noexcept
{
    return [x]<int... I>(std::integer_sequence<int, I...>) { return ints_of<N>{(static_cast<void>(I), x)...}; }(
               std::make_integer_sequence<int, N>{});
}

/// N elements as floats, from any address.
template <int N = lanes, element T>
[[nodiscard]] inline floats_of<N> load(T const* p) noexcept
{
    if constexpr (std::same_as<T, float>)
    {
        floats_of<N> v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
    else if constexpr (std::same_as<T, bfloat16>)
    {
        typename vector_of<N>::halves bits;
        std::memcpy(&bits, p, sizeof bits);
        ints_of<N> const wide = __builtin_convertvector(bits, ints_of<N>) << 16;
        floats_of<N> v;
        std::memcpy(&v, &wide, sizeof v);
        return v;
    }
    else
    {
#if defined(__AVX512F__)
        if constexpr (N == 16)
        {
            return (floats_of<N>)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<__m256i const*>(p)));
        }
#endif
#if defined(__F16C__)
        if constexpr (N == 8)
        {
            return (floats_of<N>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<__m128i const*>(p)));
        }
        if constexpr (N == 4)
        {
            return (floats_of<N>)_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<__m128i const*>(p)));
        }
#endif
        // Moves exponent and mantissa into place and rescales by 2^112, which is exact for subnormals too; infinities
        // and NaNs, whose exponent is all ones, get the float's all-ones exponent.
        typename vector_of<N>::halves bits;
        std::memcpy(&bits, p, sizeof bits);
        ints_of<N> const wide      = __builtin_convertvector(bits, ints_of<N>);
        ints_of<N> const magnitude = (wide & 0x7fff) << 13;
        floats_of<N> scaled;
        std::memcpy(&scaled, &magnitude, sizeof scaled);
        scaled *= broadcast<N>(0x1p112F);
        ints_of<N> result;
        std::memcpy(&result, &scaled, sizeof result);
        result |= (magnitude >= (0x7c00 << 13)) & 0x7f800000;
        result |= (wide & 0x8000) << 16;
        floats_of<N> v;
        std::memcpy(&v, &result, sizeof v);
        return v;
    }
}

/// N bytes as numbers from 0 to 255.
template <int N = lanes>
[[nodiscard]] inline ints_of<N> load_bytes(std::byte const* p) noexcept
{
#if defined(__AVX512F__)
    if constexpr (N == 16)
    {
        return (ints_of<N>)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<__m128i const*>(p)));
    }
#endif
#if defined(__AVX2__)
    if constexpr (N == 8)
    {
        return (ints_of<N>)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<__m128i const*>(p)));
    }
#endif
    typename vector_of<N>::bytes narrow;
    std::memcpy(&narrow, p, sizeof narrow);
    return __builtin_convertvector(narrow, ints_of<N>);
}

template <int N = lanes>
[[nodiscard]] inline floats_of<N> to_floats(ints_of<N> v) noexcept
{
    return __builtin_convertvector(v, floats_of<N>);
}

/// The low four bits of every lane as numbers from 0 to 15.
template <int N = lanes>
[[nodiscard]] inline floats_of<N> low_nibbles(ints_of<N> v) noexcept
{
#if defined(__AVX512F__)
    // one look-up instead of a mask and a conversion
    if constexpr (N == 16)
    {
        return (floats_of<N>)_mm512_permutexvar_ps(
            (__m512i)v, _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    }
#endif
    return to_floats<N>(v & 15);
}

template <int N>
inline void store_floats(float* p, floats_of<N> v) noexcept
{
    std::memcpy(p, &v, sizeof v);
}

inline void store(float* p, floats v) noexcept
{
    std::memcpy(p, &v, sizeof v);
}

/// Stores lanes rounded to T, as narrow<T> rounds each.
template <element T>
inline void narrow_to(T* p, floats v) noexcept
{
    if constexpr (std::same_as<T, float>) { store(p, v); }
    else if constexpr (std::same_as<T, bfloat16>)
    {
        ints bits;
        std::memcpy(&bits, &v, sizeof bits);
        bits = v == v ? bits : broadcast(std::int32_t{0x7fff0000}); // one NaN, and no overflow in what follows
        bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        auto const halves = __builtin_convertvector(bits, vector_of<lanes>::halves);
        std::memcpy(static_cast<void*>(p), &halves, sizeof halves);
    }
    else
    {
#if defined(__AVX512F__)
        auto const halves = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        std::memcpy(static_cast<void*>(p), &halves, sizeof halves);
#elif defined(__AVX2__) && defined(__F16C__)
        auto const halves = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        std::memcpy(static_cast<void*>(p), &halves, sizeof halves);
#else
        for (int i = 0; i < lanes; ++i)
        {
            T const one = narrow<T>(v[i]);
            std::memcpy(static_cast<void*>(p + i), &one, sizeof one);
        }
#endif
    }
}

/// The larger of each pair; the second where one is NaN.
[[nodiscard]] inline floats max(floats a, floats b) noexcept
{
#if defined(__AVX512F__)
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

/// The smaller of each pair; the second where one is NaN.
[[nodiscard]] inline floats min(floats a, floats b) noexcept
{
#if defined(__AVX512F__)
    return (floats)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (floats)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return a < b ? a : b;
#endif
}

[[nodiscard]] inline floats abs(floats a) noexcept
{
    ints bits;
    std::memcpy(&bits, &a, sizeof bits);
    bits &= 0x7fffffff;
    std::memcpy(&a, &bits, sizeof a);
    return a;
}

/// The lanes of a comparison as bits, lane 0 lowest.
[[nodiscard]] inline std::uint32_t bits(ints mask) noexcept
{
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif defined(__AVX2__)
    return static_cast<std::uint32_t>(_mm256_movemask_ps((__m256)mask));
#else
    std::uint32_t all = 0;
    for (int i = 0; i < lanes; ++i) { all |= mask[i] != 0 ? std::uint32_t{1} << i : 0U; }
    return all;
#endif
}

/// True where any lane of a comparison holds.
[[nodiscard]] inline bool any(ints mask) noexcept
{
    return bits(mask) != 0;
}

/// All lanes joined: of two halves first, then of their halves.
template <int N, class Join>
[[nodiscard]] inline float join_lanes(floats_of<N> v, Join const& join) noexcept
{
    float part[N];
    std::memcpy(part, &v, sizeof v);
    if constexpr (N > 4) { return join_lanes<N / 2>(join(load<N / 2>(part), load<N / 2>(part + N / 2)), join); }
    else { return join(join(part[0], part[2]), join(part[1], part[3])); }
}

template <int N = lanes>
[[nodiscard]] inline float sum(floats_of<N> v) noexcept
{
    return join_lanes<N>(v, [](auto a, auto b) { return a + b; });
}

[[nodiscard]] inline float max_lane(floats v) noexcept
{
    return join_lanes<lanes>(v, [](auto a, auto b) { return a > b ? a : b; });
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
    floats const halved = y + (y < broadcast(0.0F) ? broadcast(-0.5F) : broadcast(0.5F));
    ints const whole    = __builtin_convertvector(halved, ints);
    floats const f      = (KeepNan ? x : y) - __builtin_convertvector(whole, floats);
    floats p            = broadcast(1.535335905e-04F);
    p                   = p * f + broadcast(1.339887618e-03F);
    p                   = p * f + broadcast(9.618437849e-03F);
    p                   = p * f + broadcast(5.550332367e-02F);
    p                   = p * f + broadcast(2.402264774e-01F);
    p                   = p * f + broadcast(6.931471825e-01F);
    p                   = p * f + broadcast(1.0F);
    ints const scale    = (whole + 127) << 23;
    floats power;
    std::memcpy(&power, &scale, sizeof power);
    p *= power;
    return tiny ? broadcast(0.0F) : p;
}

} // namespace mdkv::cpu::inline MDKV_CPU_WIDTH::simd
