/// \file element.hpp: reading and writing values at any address.
#pragma once

#include <mdkv/core/types.hpp>

#include <cstdint>

// On the host keys, values and queries may lie at any address, and so may all that an arena holds: there is no padding.

namespace mdkv::inline MDKV_MACHINE::detail
{

template <class V>
[[nodiscard]] MDKV_HD inline V load_at(void const* from) noexcept
{
#if defined(__CUDA_ARCH__)
    if (reinterpret_cast<std::uintptr_t>(from) % alignof(V) == 0) { return *static_cast<V const*>(from); }
#endif
    V value;
    __builtin_memcpy(static_cast<void*>(&value), from, sizeof value);
    return value;
}

template <class V>
MDKV_HD inline void store_at(void* to, V value) noexcept
{
#if defined(__CUDA_ARCH__)
    if (reinterpret_cast<std::uintptr_t>(to) % alignof(V) == 0)
    {
        *static_cast<V*>(to) = value;
        return;
    }
#endif
    __builtin_memcpy(to, static_cast<void const*>(&value), sizeof value);
}

} // namespace mdkv::inline MDKV_MACHINE::detail
