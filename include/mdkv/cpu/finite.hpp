/// \file finite.hpp: expects_finite on the CPU.
#pragma once

#include <mdkv/finite.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/simd.hpp>

#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>

namespace mdkv::cpu
{

namespace detail
{

/// True when none of n elements is a NaN or an infinity. x - x is 0 exactly where x is finite.
template <element T>
[[nodiscard]] inline bool all_finite(T const* x, index_t n) noexcept
{
    simd::ints bad           = simd::broadcast(std::int32_t{0});
    index_t i                = 0;
    auto const exponent_full = [](simd::floats v) {
        simd::ints bits;
        std::memcpy(&bits, &v, sizeof bits);
        return (bits & 0x7f800000) == 0x7f800000;
    };
    for (; i + simd::lanes <= n; i += simd::lanes) { bad |= exponent_full(simd::load(x + i)); }
    bool finite = !simd::any(bad);
    for (; i < n; ++i)
    {
        T value; // from any address
        std::memcpy(&value, x + i, sizeof value);
        finite = finite && (std::bit_cast<std::uint32_t>(widen(value)) & 0x7f800000U) != 0x7f800000U;
    }
    return finite;
}

} // namespace detail

template <element T>
void expects_finite_impl(backend const& on, char const* name, in_view<T, 3, backend> rows, index_t layer)
{
    if (on.scratch->counting()) { return; }
    index_t const heads     = rows.extent(0);
    index_t const count     = rows.extent(1);
    index_t const dim       = rows.extent(2);
    constexpr index_t block = 1024;
    index_t const blocks    = (count + block - 1) / block;
    std::atomic<index_t> first{heads * count};
    on.for_each(heads * blocks, [&](index_t item, index_t) {
        index_t const head  = item / blocks;
        index_t const begin = item % blocks * block;
        index_t const end   = begin + block < count ? begin + block : count;
        for (index_t t = begin; t < end; ++t)
        {
            if (detail::all_finite(rows.data_handle() + rows.mapping()(head, t, index_t{0}), dim)) { continue; }
            index_t const place = head * count + t;
            index_t seen        = first.load();
            while (place < seen && !first.compare_exchange_weak(seen, place)) {}
            return;
        }
    });
    index_t const place = first.load();
    if (place == heads * count) { return; }
    if (layer >= 0)
    {
        mdkv::detail::fail<non_finite_input>(
            name, ": NaN or infinity in layer ", layer, ", head ", place / count, ", row ", place % count);
    }
    mdkv::detail::fail<non_finite_input>(name, ": NaN or infinity in head ", place / count, ", row ", place % count);
}

} // namespace mdkv::cpu
