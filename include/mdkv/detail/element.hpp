/// \file element.hpp: reading and writing elements: at any address of the host, aligned in device memory (detail::check sees to it).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>

#include <cstddef>
#include <cstring>

namespace mdkv::detail
{

template <backend B, element T>
[[nodiscard]] MDKV_HD T read_element(T const* from) noexcept
{
    if constexpr (B::memory_space == space::device) { return *from; }
    else
    {
        T value;
        std::memcpy(static_cast<void*>(&value), static_cast<void const*>(from), sizeof value);
        return value;
    }
}

template <backend B, element T>
MDKV_HD void write_element(T value, std::byte* to) noexcept
{
    if constexpr (B::memory_space == space::device) { *reinterpret_cast<T*>(to) = value; }
    else { std::memcpy(to, static_cast<void const*>(&value), sizeof value); }
}

} // namespace mdkv::detail
