/// \file types.hpp: version, index type and the element types a cache may have, with their conversions to and from float.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define MDKV_VERSION_MAJOR 0
#define MDKV_VERSION_MINOR 1
#define MDKV_VERSION_PATCH 0

#if defined(__CUDACC__)
#    define MDKV_HD __host__ __device__
#else
#    define MDKV_HD
#endif

namespace mdkv
{

/// Every extent, stride and byte count. Signed, so that differences are safe; 64 bits, so that a 128K-token cache is.
using index_t = std::int64_t;

using half     = __half;
using bfloat16 = __nv_bfloat16;

/// The scalar types a KV cache may be stored in.
template <class T>
concept element = std::same_as<T, float> || std::same_as<T, half> || std::same_as<T, bfloat16>;

/// Exact conversion to float.
template <element T>
[[nodiscard]] MDKV_HD inline float widen(T value) noexcept
{
    if constexpr (std::same_as<T, float>) { return value; }
    else if constexpr (std::same_as<T, half>) { return __half2float(value); }
    else { return __bfloat162float(value); }
}

/// Conversion from float, rounding to nearest even.
template <element T>
[[nodiscard]] MDKV_HD inline T narrow(float value) noexcept
{
    if constexpr (std::same_as<T, float>) { return value; }
    else if constexpr (std::same_as<T, half>) { return __float2half_rn(value); }
    else { return __float2bfloat16_rn(value); }
}

/// Name of an element type as it is written on a command line and in messages.
template <element T>
[[nodiscard]] constexpr char const* element_name() noexcept
{
    if constexpr (std::same_as<T, float>) { return "f32"; }
    else if constexpr (std::same_as<T, half>) { return "f16"; }
    else { return "bf16"; }
}

} // namespace mdkv
