/// \file lanes.hpp: how work on neighbouring tokens is written so that every compiler makes vector instructions of it.
#pragma once

#include <mdkv/core/ground.hpp>

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

namespace MDKV_NAMESPACE::detail
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
#if defined(__CUDA_ARCH__)
    return *from; // copied by __builtin_memcpy it would be four bytes
#else
    V x;
    __builtin_memcpy(&x, from, sizeof x);
    return x;
#endif
}
[[gnu::always_inline]] MDKV_HD inline void store_lanes(float* to, auto const& x)
{
#if defined(__CUDA_ARCH__)
    *to = x;
#else
    __builtin_memcpy(to, &x, sizeof x);
#endif
}

/// The number in lane l.
[[nodiscard, gnu::always_inline]] MDKV_HD inline auto lane(auto const& x, [[maybe_unused]] int l)
{
    if constexpr (requires { x[0]; }) { return x[l]; }
    else { return x; }
}
/// Whether a lane is not 0. A backend whose team has several lanes in a register has an overload of its own.
template <class Team, class V>
[[nodiscard, gnu::always_inline]] MDKV_HD inline bool any_lane(Team const&, V const& x)
{
    return x != 0;
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

} // namespace MDKV_NAMESPACE::detail
