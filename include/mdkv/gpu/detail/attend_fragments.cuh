/// \file attend_fragments.cuh: numbers as tensor cores take them in attention: pairs of 16 bits, alone or as sums of several (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/gpu/device.cuh>

#include <cstddef>
#include <cstdint>

namespace MDKV_NAMESPACE::gpu::kernels
{

/// Two fragments of queries, or two of weights: the second has what the first leaves by rounding, or, beside keys of 4 bits,
/// the coordinates of the high halves.
struct alignas(16) fragments
{
    std::uint32_t of[2][2];
};

/// A pair of numbers as sums of `Limbs` pairs of 16 bits.
template <element Limb, int Limbs>
__device__ __forceinline__ void to_limbs(float low, float high, std::uint32_t (&to)[std::size_t{Limbs}])
{
    MDKV_UNROLL
    for (int i = 0; i < Limbs; ++i)
    {
        to[i] = device::pair<Limb>(low, high);
        low -= widen(Limb{static_cast<std::uint16_t>(to[i] & 0xffffU)});
        high -= widen(Limb{static_cast<std::uint16_t>(to[i] >> 16U)});
    }
}

/// The weights of 16 tokens, as multiply_tile leaves logits, as factors of values in `Limbs` limbs.
template <element Limb, int Limbs>
__device__ __forceinline__ void transposed(float const (&w)[4], std::uint32_t (&to)[std::size_t{Limbs}][2])
{
    std::uint32_t first[std::size_t{Limbs}];
    std::uint32_t second[std::size_t{Limbs}];
    to_limbs<Limb, Limbs>(w[0], w[1], first);
    to_limbs<Limb, Limbs>(w[2], w[3], second);
    MDKV_UNROLL
    for (int i = 0; i < Limbs; ++i)
    {
        to[i][0] = device::transpose(first[i]);
        to[i][1] = device::transpose(second[i]);
    }
}

/// The low number of a pair of halves, and the high one.
[[nodiscard]] __device__ __forceinline__ float low_half(std::uint32_t pair)
{
    return widen(half{static_cast<std::uint16_t>(pair & 0xffffU)});
}
[[nodiscard]] __device__ __forceinline__ float high_half(std::uint32_t pair)
{
    return widen(half{static_cast<std::uint16_t>(pair >> 16U)});
}

/// Factor of codes in products.
inline constexpr float code_unit = 0x1p-24F;

} // namespace MDKV_NAMESPACE::gpu::kernels
