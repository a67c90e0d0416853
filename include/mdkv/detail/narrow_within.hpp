/// \file narrow_within.hpp: conversion to the element type that keeps what is finite finite.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/detail/quantiser.hpp>

#include <concepts>

namespace mdkv::detail
{

/// The nearest element that is finite where x is.
template <element T>
[[nodiscard]] MDKV_HD inline T narrow_within(float x) noexcept
{
    if constexpr (std::same_as<T, half>)
    {
        return narrow<T>(x < -largest_half ? -largest_half : x > largest_half ? largest_half : x);
    }
    else { return narrow<T>(x); }
}

} // namespace mdkv::detail
