/// \file element_rows.hpp: runs of cache elements (float, half) to float and back, rounding to nearest even
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#if defined(__F16C__)
#    include <immintrin.h>
#endif

#include <mdkv/core/types.hpp>

namespace runner
{

/// out[i] = float(in[i]).
template <mdkv::element T>
void widen_row(T const* __restrict in, std::int64_t count, float* __restrict out) noexcept
{
    std::int64_t i = 0;
    if constexpr (std::same_as<T, float>)
    {
        if (count > 0) { std::memcpy(out, in, static_cast<std::size_t>(count) * sizeof(float)); }
        return;
    }
#if defined(__F16C__)
    if constexpr (std::same_as<T, mdkv::half>)
    {
        for (; i + 8 <= count; i += 8)
        {
            __m128i const halves = _mm_loadu_si128(reinterpret_cast<__m128i const*>(in + i));
            _mm256_storeu_ps(out + i, _mm256_cvtph_ps(halves));
        }
    }
#endif
    for (; i < count; ++i) { out[i] = mdkv::widen(in[i]); }
}

/// out[i] = T(in[i]).
template <mdkv::element T>
void narrow_row(float const* __restrict in, std::int64_t count, T* __restrict out) noexcept
{
    std::int64_t i = 0;
    if constexpr (std::same_as<T, float>)
    {
        if (count > 0) { std::memcpy(out, in, static_cast<std::size_t>(count) * sizeof(float)); }
        return;
    }
#if defined(__F16C__)
    if constexpr (std::same_as<T, mdkv::half>)
    {
        for (; i + 8 <= count; i += 8)
        {
            __m128i const halves = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), halves);
        }
    }
#endif
    for (; i < count; ++i) { out[i] = mdkv::narrow<T>(in[i]); }
}

/// values[i] = float(T(values[i])): what a cache of T would give back.
template <mdkv::element T>
void round_row(float* values, std::int64_t count) noexcept
{
    if constexpr (!std::same_as<T, float>)
    {
        std::array<T, 64> rounded;
        for (std::int64_t first = 0; first < count; first += std::ssize(rounded))
        {
            std::int64_t const run = std::min(count - first, std::ssize(rounded));
            narrow_row(values + first, run, rounded.data());
            widen_row(rounded.data(), run, values + first);
        }
    }
}

} // namespace runner
