/// \file lanes.hpp: how work on neighbouring tokens is written so that every compiler makes vector instructions of it.
#pragma once

#include <mdkv/core/types.hpp>

#include <cstdint>

// `MDKV_FOR_LANES(l, Team::lanes) { x[l] = ...; }` is a plain loop. g++ would unroll it into scalar code before it looks
// for vectors; `MDKV_UNROLL` is for the loops around it, so that arrays become registers; `MDKV_ROLLED` forbids unrolling.
#if defined(__CUDACC__)
#    define MDKV_FOR_LANES(l, lanes) for (int l = 0; l < (lanes); ++l)
#    define MDKV_UNROLL _Pragma("unroll")
#    define MDKV_ROLLED _Pragma("unroll 1")
#else
#    define MDKV_FOR_LANES(l, lanes) MDKV_ROLLED for (int l = 0; l < (lanes); ++l)
#    define MDKV_UNROLL _Pragma("GCC unroll 16")
#    define MDKV_ROLLED _Pragma("GCC unroll 1")
#endif

namespace mdkv::inline MDKV_MACHINE::detail
{

template <class V, int Lanes>
struct lane_vector
{
#if defined(__CUDA_ARCH__) // nvcc reads jobs of the CPU's team for the device, too, but never runs them there
    using type = V;
#else
    typedef V type __attribute__((vector_size(sizeof(V) * Lanes))); // g++ ignores the attribute in a `using`
#endif
};
template <class V>
struct lane_vector<V, 1>
{
    using type = V;
};

/// Neighbours in a register, no more than Team::register_lanes, or one number if Lanes is 1. Arithmetic, and
/// `a > b ? x : y`, are written alike for both.
template <int Lanes>
using lane_floats = typename lane_vector<float, Lanes>::type;
template <int Lanes>
using lane_ints = typename lane_vector<std::int32_t, Lanes>::type;

/// Neighbours from any address, and back.
template <class V>
[[nodiscard, gnu::always_inline]] MDKV_HD inline V load_lanes(float const* from)
{
    V x;
    __builtin_memcpy(&x, from, sizeof x);
    return x;
}
template <class V>
[[gnu::always_inline]] MDKV_HD inline void store_lanes(float* to, V const& x)
{
    __builtin_memcpy(to, &x, sizeof x);
}

/// The whole parts of numbers from 0 on.
[[nodiscard, gnu::always_inline]] MDKV_HD inline float cut_off(float x)
{
    return static_cast<float>(static_cast<int>(x));
}
template <class V>
[[nodiscard, gnu::always_inline]] MDKV_HD inline V cut_off(V const& x)
{
#if defined(__CUDA_ARCH__)
    return x;
#else
    return __builtin_convertvector(__builtin_convertvector(x, lane_ints<int{sizeof(V) / sizeof(float)}>), V);
#endif
}

template <class V>
[[nodiscard]] MDKV_HD inline V larger(V const& a, V const& b) noexcept
{
    return a > b ? a : b;
}
template <class V>
[[nodiscard]] MDKV_HD inline V smaller(V const& a, V const& b) noexcept
{
    return a < b ? a : b;
}

/// The bits of x as another type's.
template <class To, class From>
[[nodiscard]] MDKV_HD inline To bits_as(From const& x) noexcept
{
    static_assert(sizeof(To) == sizeof(From));
    To to;
    __builtin_memcpy(&to, &x, sizeof to);
    return to;
}

/// Stores the first n lanes as bytes.
template <int Lanes>
[[gnu::always_inline]] MDKV_HD inline void store_bytes(lane_ints<Lanes> const& x, std::uint8_t* to, index_t n)
{
    if constexpr (Lanes == 1) { *to = static_cast<std::uint8_t>(x); }
#if !defined(__CUDA_ARCH__)
    else
    {
        auto const narrow = __builtin_convertvector(x, typename lane_vector<std::uint8_t, Lanes>::type);
        if (n >= Lanes) { __builtin_memcpy(to, &narrow, sizeof narrow); }
        else { __builtin_memcpy(to, &narrow, static_cast<std::size_t>(n)); }
    }
#endif
}

[[nodiscard]] MDKV_HD inline int lowest_bit(std::uint64_t bits) noexcept
{
#if defined(__CUDA_ARCH__)
    return __ffsll(static_cast<long long>(bits)) - 1;
#else
    return __builtin_ctzll(bits);
#endif
}

/// Lanes of 0s and 1s in one word, from which for_lanes_in takes them.
template <int Lanes>
[[nodiscard, gnu::always_inline]] MDKV_HD inline std::uint64_t lane_word(lane_ints<Lanes> const& mask)
{
    if constexpr (Lanes == 1) { return static_cast<std::uint64_t>(mask); }
#if !defined(__CUDA_ARCH__)
    else
    {
        auto const narrow = __builtin_convertvector(mask, typename lane_vector<std::uint8_t, Lanes>::type);
        std::uint64_t part[std::size_t{(Lanes + 7) / 8}]{};
        __builtin_memcpy(part, &narrow, sizeof narrow);
        std::uint64_t word = 0;
        for (int p = 0; p < (Lanes + 7) / 8; ++p) { word |= part[p] << p; }
        return word;
    }
#else
    return 0;
#endif
}

/// Calls body(l) for every lane of a word.
template <class Body>
[[gnu::always_inline]] MDKV_HD inline void for_lanes_in(std::uint64_t word, Body const& body)
{
    for (; word != 0; word &= word - 1)
    {
        int const bit = lowest_bit(word);
        body(bit % 8 * 8 + bit / 8);
    }
}

} // namespace mdkv::inline MDKV_MACHINE::detail
