/// \file dequantise_steps.hpp: the inner steps of dequantisation: halves, nibbles and small integers, to float
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) && defined(__F16C__)
#    include <immintrin.h>
#endif

namespace runner::detail
{

/// Byte `i` as a number; int, because that is what vector units convert to float.
[[nodiscard]] inline int u8_at(std::byte const* place, int i) noexcept
{
    return static_cast<int>(place[i]);
}
[[nodiscard]] inline int i8_at(std::byte const* place, int i) noexcept
{
    return static_cast<std::int8_t>(place[i]);
}

/// The meaning of each step, in plain loops.
struct plain_steps
{
    [[nodiscard]] static float half(std::byte const* place) noexcept
    {
        std::uint16_t bits;
        std::memcpy(&bits, place, sizeof bits);
        std::uint32_t const sign      = static_cast<std::uint32_t>(bits & 0x8000U) << 16;
        std::uint32_t const magnitude = bits & 0x7FFFU;
        // Moved to float's places, the exponent is too small by 112. A product by 2^112 mends that for normal and
        // subnormal numbers alike, and is exact; infinities and NaN get float's largest exponent.
        float const scaled          = std::bit_cast<float>(magnitude << 13) * 0x1p112F;
        std::uint32_t const special = magnitude >= 0x7C00U ? 0x7F800000U : 0U;
        return std::bit_cast<float>(std::bit_cast<std::uint32_t>(scaled) | special | sign);
    }

    static void eight_halves(std::byte const* in, float* out) noexcept
    {
        for (int j = 0; j < 8; ++j) { out[j] = half(in + 2 * j); }
    }

    /// out = d * q
    template <int Count>
    static void scale(std::int8_t const* q, float d, float* out) noexcept
    {
        for (int j = 0; j < Count; ++j) { out[j] = d * static_cast<float>(q[j]); }
    }

    /// out = d * q + m
    template <int Count>
    static void scale_and_add(std::int8_t const* q, float d, float m, float* out) noexcept
    {
        for (int j = 0; j < Count; ++j) { out[j] = d * static_cast<float>(q[j]) + m; }
    }

    /// Low nibbles of `Bytes` bytes, then their high nibbles.
    template <int Bytes>
    static void unpack_nibbles(std::byte const* in, std::int8_t* q) noexcept
    {
        for (int j = 0; j < Bytes; ++j) { q[j] = static_cast<std::int8_t>(u8_at(in, j) & 15); }
        for (int j = 0; j < Bytes; ++j) { q[j + Bytes] = static_cast<std::int8_t>(u8_at(in, j) >> 4); }
    }

    /// Adds 16 to element j of 32 where bit j of the four bytes `high` is set.
    static void add_fifth_bits(std::byte const* high, std::int8_t* q) noexcept
    {
        for (int j = 0; j < 32; ++j)
        {
            int const bit = (u8_at(high, j / 8) >> (j % 8)) & 1;
            q[j]          = static_cast<std::int8_t>(q[j] + 16 * bit);
        }
    }

    /// Adds 16 times the bits `mask` of byte j, moved down by `Shift`, to element j of 32, then `bias`.
    template <int Shift>
    static void add_high_bits(std::byte const* high, int mask, int bias, std::int8_t* q) noexcept
    {
        for (int j = 0; j < 32; ++j)
        {
            q[j] = static_cast<std::int8_t>(q[j] + 16 * ((u8_at(high, j) >> Shift) & mask) + bias);
        }
    }

    template <int Count>
    static void add(int bias, std::int8_t* q) noexcept
    {
        for (int j = 0; j < Count; ++j) { q[j] = static_cast<std::int8_t>(q[j] + bias); }
    }
};

#if defined(__AVX2__) && defined(__F16C__)

/// The same steps by hand, since which of the loops a compiler turns into good vector code differs between compilers
/// and targets by a factor of ten, and decode spends its time here. The bits are the same: no step rounds but the sum.
struct avx2_steps
{
    [[nodiscard]] static float half(std::byte const* place) noexcept
    {
        std::uint16_t bits;
        std::memcpy(&bits, place, sizeof bits);
        return _cvtsh_ss(bits);
    }

    static void eight_halves(std::byte const* in, float* out) noexcept
    {
        _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<__m128i const*>(in))));
    }

    template <int Count>
    static void scale(std::int8_t const* q, float d, float* out) noexcept
    {
        static_assert(Count % 8 == 0);
        for (int j = 0; j < Count; j += 8)
        {
            _mm256_storeu_ps(out + j, _mm256_mul_ps(_mm256_set1_ps(d), eight(q + j)));
        }
    }

    template <int Count>
    static void scale_and_add(std::int8_t const* q, float d, float m, float* out) noexcept
    {
        static_assert(Count % 8 == 0);
        for (int j = 0; j < Count; j += 8)
        {
            __m256 const product = _mm256_mul_ps(_mm256_set1_ps(d), eight(q + j));
            _mm256_storeu_ps(out + j, _mm256_add_ps(product, _mm256_set1_ps(m)));
        }
    }

    template <int Bytes>
    static void unpack_nibbles(std::byte const* in, std::int8_t* q) noexcept
    {
        if constexpr (Bytes == 16)
        { // one store of 32 bytes: a load of 32 would have to wait for two of 16
            __m128i const both  = _mm_loadu_si128(reinterpret_cast<__m128i const*>(in));
            __m256i const apart = _mm256_set_m128i(_mm_srli_epi16(both, 4), both);
            store(_mm256_and_si256(apart, _mm256_set1_epi8(15)), q);
        }
        else
        {
            static_assert(Bytes % 32 == 0);
            for (int j = 0; j < Bytes; j += 32)
            {
                __m256i const both = _mm256_loadu_si256(reinterpret_cast<__m256i const*>(in + j));
                store(_mm256_and_si256(both, _mm256_set1_epi8(15)), q + j);
                store(_mm256_and_si256(_mm256_srli_epi16(both, 4), _mm256_set1_epi8(15)), q + j + Bytes);
            }
        }
    }

    static void add_fifth_bits(std::byte const* high, std::int8_t* q) noexcept
    {
        std::int32_t bits;
        std::memcpy(&bits, high, sizeof bits);
        __m256i const which_byte = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, //
            2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
        __m256i const which_bit  = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201ULL));
        __m256i const spread     = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), which_byte);
        __m256i const set        = _mm256_cmpeq_epi8(_mm256_and_si256(spread, which_bit), which_bit);
        store(_mm256_add_epi8(load(q), _mm256_and_si256(set, _mm256_set1_epi8(16))), q);
    }

    template <int Shift>
    static void add_high_bits(std::byte const* high, int mask, int bias, std::int8_t* q) noexcept
    {
        __m256i const bytes = _mm256_loadu_si256(reinterpret_cast<__m256i const*>(high));
        __m256i const bits =
            _mm256_and_si256(_mm256_srli_epi16(bytes, Shift), _mm256_set1_epi8(static_cast<char>(mask)));
        __m256i const sum = _mm256_add_epi8(load(q), _mm256_slli_epi16(bits, 4)); // bits <= 3: none leaves its byte
        store(_mm256_add_epi8(sum, _mm256_set1_epi8(static_cast<char>(bias))), q);
    }

    template <int Count>
    static void add(int bias, std::int8_t* q) noexcept
    {
        static_assert(Count % 32 == 0);
        for (int j = 0; j < Count; j += 32)
        {
            store(_mm256_add_epi8(load(q + j), _mm256_set1_epi8(static_cast<char>(bias))), q + j);
        }
    }

private:
    [[nodiscard]] static __m256 eight(std::int8_t const* q) noexcept
    {
        __m128i const bytes = _mm_loadl_epi64(reinterpret_cast<__m128i const*>(q));
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    }
    [[nodiscard]] static __m256i load(std::int8_t const* q) noexcept
    {
        return _mm256_loadu_si256(reinterpret_cast<__m256i const*>(q));
    }
    static void store(__m256i value, std::int8_t* q) noexcept
    {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), value);
    }
};

using fastest_steps = avx2_steps;

#else

using fastest_steps = plain_steps;

#endif

} // namespace runner::detail
