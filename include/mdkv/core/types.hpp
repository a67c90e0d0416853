/// \file types.hpp: index type, a small array, and the element types a cache may have, converted, read and written.
#pragma once

#include <mdkv/core/machine.hpp>
#include <mdkv/core/version.hpp> // included by every header: an undefined MDKV_VERSION would be 0 in an #if

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#if defined(__CUDACC__)
#    include <cuda_bf16.h>
#    include <cuda_fp16.h>
#    define MDKV_HD __host__ __device__
#else
#    define MDKV_HD
#endif

/// Marks parts of stages and jobs that are called from several places: they are compiled once. Kernels inline them.
#if defined(__CUDACC__)
#    define MDKV_OUTLINE
#elif defined(__clang__)
#    define MDKV_OUTLINE [[gnu::noinline]]
#else
#    define MDKV_OUTLINE [[gnu::noinline, gnu::noclone]]
#endif

namespace MDKV_NAMESPACE
{

/// Extents, strides and byte counts. Signed, so that differences may be negative; 64 bits, so that a 128K-token cache fits.
using index_t = std::int64_t;

/// std::array with members for kernels.
template <class T, std::size_t N>
struct array
{
    T items[N == 0 ? 1 : N];

    [[nodiscard]] static constexpr std::size_t size() noexcept { return N; }
    [[nodiscard]] MDKV_HD constexpr T& operator[](std::size_t i) noexcept { return items[i]; }
    [[nodiscard]] MDKV_HD constexpr T const& operator[](std::size_t i) const noexcept { return items[i]; }
    [[nodiscard]] MDKV_HD constexpr T* data() noexcept { return items; }
    [[nodiscard]] MDKV_HD constexpr T const* data() const noexcept { return items; }
    [[nodiscard]] MDKV_HD constexpr T* begin() noexcept { return items; }
    [[nodiscard]] MDKV_HD constexpr T const* begin() const noexcept { return items; }
    [[nodiscard]] MDKV_HD constexpr T* end() noexcept { return items + N; }
    [[nodiscard]] MDKV_HD constexpr T const* end() const noexcept { return items + N; }
    [[nodiscard]] friend constexpr bool operator==(array const&, array const&) noexcept = default;
};

// Both types may alias: `as_half` reads an engine's own 16-bit objects through them. Both are made of their bits alone: an
// aggregate would take half(0.5F), and have the bits 0. `narrow` converts.

/// IEEE binary16, as memory holds it: the bits of `__half`, `_Float16`, `ggml_fp16_t`, `at::Half`.
struct [[gnu::may_alias]] half
{
    std::uint16_t bits;

    half() = default;
    MDKV_HD constexpr explicit half(std::integral auto bits_of_value) noexcept
        : bits{static_cast<std::uint16_t>(bits_of_value)}
    {}
};

/// The upper half of a float, as memory holds it: the bits of `__nv_bfloat16`, `at::BFloat16`.
struct [[gnu::may_alias]] bfloat16
{
    std::uint16_t bits;

    bfloat16() = default;
    MDKV_HD constexpr explicit bfloat16(std::integral auto bits_of_value) noexcept
        : bits{static_cast<std::uint16_t>(bits_of_value)}
    {}
};

/// The scalar types a KV cache may be stored in.
template <class T>
concept element = std::same_as<T, float> || std::same_as<T, half> || std::same_as<T, bfloat16>;

/// A 16-bit type of another library with the bits of half, or of bfloat16.
template <class T>
concept foreign_element = sizeof(T) == 2 && std::is_trivially_copyable_v<T> && !element<std::remove_const_t<T>>;

/// The same memory as halves: `as_half(pointer)` for an engine's `__half`, `_Float16` or `std::uint16_t`.
template <foreign_element T>
[[nodiscard]] auto as_half(T* data) noexcept
{
    return reinterpret_cast<std::conditional_t<std::is_const_v<T>, half const, half>*>(data);
}
/// The same memory as bfloat16s.
template <foreign_element T>
[[nodiscard]] auto as_bfloat16(T* data) noexcept
{
    return reinterpret_cast<std::conditional_t<std::is_const_v<T>, bfloat16 const, bfloat16>*>(data);
}

namespace detail
{

/// Number of an element type in files, and between ranks.
template <element T>
inline constexpr std::uint32_t element_code = std::same_as<T, float>  ? 1
                                              : std::same_as<T, half> ? 2
                                                                      : 3;

[[nodiscard]] MDKV_HD constexpr float float_of_bits(std::uint32_t bits) noexcept
{
    return __builtin_bit_cast(float, bits);
}
[[nodiscard]] MDKV_HD constexpr std::uint32_t bits_of_float(float value) noexcept
{
    return __builtin_bit_cast(std::uint32_t, value);
}

[[nodiscard]] constexpr float float_of_half(std::uint16_t bits) noexcept
{
    // All cases are computed, so that loops are vectorised. No operand is a subnormal float, which some threads take for 0.
    std::uint32_t const sign      = (bits & 0x8000U) << 16U;
    std::uint32_t const magnitude = (bits & 0x7fffU) << 13U;
    std::uint32_t const normal    = magnitude + 0x38000000U;
    std::uint32_t const subnormal = bits_of_float(float_of_bits(magnitude + 0x38800000U) - 0x1p-14F);
    std::uint32_t const number    = sign | (magnitude < 0x00800000U ? subnormal : normal);
    std::uint32_t const special   = magnitude == 0x0f800000U ? sign | 0x7f800000U : 0x7fffffffU; // infinity, or a NaN
    return float_of_bits(magnitude >= 0x0f800000U ? special : number);
}

// No branch here either: each case is computed, and one is chosen.
[[nodiscard]] constexpr std::uint16_t half_of_float(float value) noexcept
{
    MDKV_IN_ORDER
    std::uint32_t const bits      = bits_of_float(value);
    std::uint32_t const sign      = (bits >> 16U) & 0x8000U;
    std::uint32_t const magnitude = bits & 0x7fffffffU;
    // Subnormal numbers have the unit of floats from 0.5 on; from 65520 on there is infinity.
    std::uint32_t const below     = magnitude < 0x38800000U ? magnitude : 0;
    std::uint32_t const subnormal = bits_of_float(float_of_bits(below) + 0.5F) - 0x3f000000U;
    std::uint32_t const normal    = (magnitude - 0x38000000U + 0xfffU + ((magnitude >> 13U) & 1U)) >> 13U;
    std::uint32_t const finite    = below == magnitude ? subnormal : normal;
    std::uint32_t const number    = sign | (magnitude < 0x477ff000U ? finite : 0x7c00U);
    return static_cast<std::uint16_t>(magnitude > 0x7f800000U ? 0x7fffU : number);
}

[[nodiscard]] constexpr std::uint16_t bfloat16_of_float(float value) noexcept
{
    std::uint32_t const bits = bits_of_float(value);
    if ((bits & 0x7fffffffU) > 0x7f800000U) { return 0x7fffU; }
    return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16U) & 1U)) >> 16U);
}

} // namespace detail

/// Exact conversion to float.
template <element T>
[[nodiscard]] MDKV_HD constexpr float widen(T value) noexcept
{
    if constexpr (std::same_as<T, float>) { return value; }
    else if constexpr (std::same_as<T, bfloat16>) { return detail::float_of_bits(std::uint32_t{value.bits} << 16U); }
    else
    {
#if defined(__CUDA_ARCH__)
        return __half2float(__ushort_as_half(value.bits));
#else
        return detail::float_of_half(value.bits);
#endif
    }
}

/// Conversion from float, rounding to nearest even.
template <element T>
[[nodiscard]] MDKV_HD constexpr T narrow(float value) noexcept
{
    if constexpr (std::same_as<T, float>) { return value; }
#if defined(__CUDA_ARCH__)
    else if constexpr (std::same_as<T, half>) { return half{__half_as_ushort(__float2half_rn(value))}; }
    else { return bfloat16{__bfloat16_as_ushort(__float2bfloat16_rn(value))}; }
#else
    else if constexpr (std::same_as<T, half>) { return half{detail::half_of_float(value)}; }
    else { return bfloat16{detail::bfloat16_of_float(value)}; }
#endif
}

namespace detail
{

// On the host keys, values and queries may lie at any address, and so may all that an arena holds: there is no padding. On a
// GPU pointers to elements are aligned to them, and bytes of an arena need not be.

/// The value at `from`, on a GPU byte by byte: fewer registers, and more loads, than load_at.
template <class V>
[[nodiscard]] MDKV_HD inline V load_bytes(void const* from) noexcept
{
    V value;
    __builtin_memcpy(static_cast<void*>(&value), from, sizeof value);
    return value;
}

/// The value at `from`.
template <class V>
[[nodiscard]] MDKV_HD inline V load_at(void const* from) noexcept
{
#if defined(__CUDA_ARCH__)
    V value;
    if (reinterpret_cast<std::uintptr_t>(from) % alignof(V) == 0) { return *static_cast<V const*>(from); }
    // volatile keeps nvcc from merging this branch with the aligned one.
    auto const* const byte = static_cast<unsigned char const volatile*>(from);
    for (std::size_t i = 0; i < sizeof value; ++i) { reinterpret_cast<unsigned char*>(&value)[i] = byte[i]; }
    return value;
#else
    return load_bytes<V>(from);
#endif
}
template <class V>
[[nodiscard]] MDKV_HD inline V load_at(V const* from) noexcept
{
#if defined(__CUDA_ARCH__)
    return *from;
#else
    return load_at<V>(static_cast<void const*>(from));
#endif
}

/// Stores `value` at `to`.
template <class V>
MDKV_HD inline void store_at(void* to, V value) noexcept
{
#if defined(__CUDA_ARCH__)
    if (reinterpret_cast<std::uintptr_t>(to) % alignof(V) == 0)
    {
        *static_cast<V*>(to) = value;
        return;
    }
    auto* const byte = static_cast<unsigned char volatile*>(to); // see load_at
    for (std::size_t i = 0; i < sizeof value; ++i) { byte[i] = reinterpret_cast<unsigned char const*>(&value)[i]; }
#else
    __builtin_memcpy(to, static_cast<void const*>(&value), sizeof value);
#endif
}
template <class V>
MDKV_HD inline void store_at(V* to, V value) noexcept
{
#if defined(__CUDA_ARCH__)
    *to = value;
#else
    store_at<V>(static_cast<void*>(to), value);
#endif
}

/// Loads N neighbours, or stores them: on a GPU in vectors of 16 bytes if their address allows it.
template <class V, std::size_t N>
MDKV_HD inline void load_all(V const* from, V (&to)[N]) noexcept
{
#if defined(__CUDA_ARCH__)
    constexpr int vectors = static_cast<int>(sizeof to / sizeof(uint4));
    if (sizeof to % sizeof(uint4) == 0 && reinterpret_cast<std::uintptr_t>(from) % sizeof(uint4) == 0)
    {
        uint4 vec16[vectors + 1];
        for (int i = 0; i < vectors; ++i) { vec16[i] = reinterpret_cast<uint4 const*>(from)[i]; }
        __builtin_memcpy(static_cast<void*>(to), vec16, sizeof to);
        return;
    }
    for (std::size_t i = 0; i < N; ++i) { to[i] = from[i]; }
#else
    __builtin_memcpy(static_cast<void*>(to), from, sizeof to);
#endif
}
template <class V, std::size_t N>
MDKV_HD inline void store_all(void* to, V const (&from)[N]) noexcept
{
#if defined(__CUDA_ARCH__)
    constexpr int vectors = static_cast<int>(sizeof from / sizeof(uint4));
    if (sizeof from % sizeof(uint4) == 0 && reinterpret_cast<std::uintptr_t>(to) % sizeof(uint4) == 0)
    {
        uint4 vec16[vectors + 1];
        __builtin_memcpy(vec16, static_cast<void const*>(from), sizeof from);
        for (int i = 0; i < vectors; ++i) { static_cast<uint4*>(to)[i] = vec16[i]; }
        return;
    }
    for (std::size_t i = 0; i < N; ++i) { static_cast<V*>(to)[i] = from[i]; }
#else
    __builtin_memcpy(to, static_cast<void const*>(from), sizeof from);
#endif
}

} // namespace detail

/// Equal as numbers.
template <element T>
    requires(sizeof(T) == 2)
[[nodiscard]] MDKV_HD constexpr bool operator==(T a, T b) noexcept
{
    return widen(a) == widen(b);
}

/// Name of an element type on command lines and in messages.
template <element T>
[[nodiscard]] constexpr char const* element_name() noexcept
{
    return std::same_as<T, float> ? "f32" : std::same_as<T, half> ? "f16" : "bf16";
}

} // namespace MDKV_NAMESPACE
