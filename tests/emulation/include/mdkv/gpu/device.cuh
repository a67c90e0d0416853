/// \file device.cuh: stands in for <mdkv/gpu/device.cuh> on the host: the same functions, as the emulated GPU answers them.
#pragma once

#include <mdkv/core/types.hpp>

#include <emulation/machine.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <vector_types.h>

namespace MDKV_NAMESPACE::gpu::device
{

inline constexpr int warp_size = 32;

[[nodiscard]] inline int thread()
{
    return emulation::current().index;
}
[[nodiscard]] inline int threads()
{
    return emulation::current().block->threads;
}
[[nodiscard]] inline index_t block()
{
    return emulation::current().block->number;
}
[[nodiscard]] inline int lane()
{
    return thread() % warp_size;
}
[[nodiscard]] inline int warp()
{
    return thread() / warp_size;
}

inline void sync()
{
    emulation::wait_for_block();
}
inline void sync_warp()
{
    emulation::wait_for_warp("sync_warp");
}

template <class T>
[[nodiscard]] T shuffle_xor(T value, int mask)
{
    return emulation::exchange(value, "shuffle_xor").of(lane() ^ mask);
}
template <class T>
[[nodiscard]] T shuffle(T value, int from)
{
    return emulation::exchange(value, "shuffle").of(from);
}
[[nodiscard]] inline unsigned ballot(bool yes)
{
    auto const all = emulation::exchange(yes, "ballot");
    unsigned bits  = 0;
    for (int i = 0; i < warp_size; ++i) { bits |= all.of(i) ? 1U << i : 0U; }
    return bits;
}

[[nodiscard]] inline bool any(bool yes)
{
    return ballot(yes) != 0;
}

template <class T>
void atomic_add(T* to, T value)
{
    *to = static_cast<T>(*to + value);
}
template <class T>
void shared_add(T* to, T value)
{
    atomic_add(to, value);
}
template <class T>
void atomic_min(T* to, T value)
{
    *to = value < *to ? value : *to;
}

inline void prefetch(void const* /*from*/)
{}
inline void stamp(int /*number*/)
{}

[[nodiscard]] inline std::byte* shared_memory()
{
    return emulation::current().block->shared;
}

template <class V>
[[nodiscard]] V load(void const* from)
{
    static_assert(alignof(V) == sizeof(V), "load: one load takes its own size in alignment");
    emulation::expect_aligned(from, sizeof(V), "load");
    V value;
    std::memcpy(static_cast<void*>(&value), from, sizeof value);
    return value;
}
template <class V>
void store(void* to, V const& value)
{
    static_assert(alignof(V) == sizeof(V), "store: one store takes its own size in alignment");
    emulation::expect_aligned(to, sizeof(V), "store");
    std::memcpy(to, static_cast<void const*>(&value), sizeof value);
}

template <int Bytes>
void copy_async(void* to_shared, void const* from_global)
{
    static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16);
    emulation::begin_copy(to_shared, from_global, Bytes);
}
inline void copy_async_commit()
{
    emulation::end_copy_group();
}
template <int Pending>
void copy_async_wait()
{
    emulation::finish_copies(Pending);
}

/// By the fragment tables of the PTX manual (mma.m16n8k16), products and sums in float.
template <element T>
void multiply_tile(float (&d)[4], std::uint32_t const (&a)[4], std::uint32_t const (&b)[2])
{
    static_assert(sizeof(T) == 2, "multiply_tile: half or bfloat16");
    struct fragments
    {
        T a[8];
        T b[4];
    } mine;
    std::memcpy(static_cast<void*>(mine.a), a, sizeof a);
    std::memcpy(static_cast<void*>(mine.b), b, sizeof b);
    emulation::exchanged<fragments> const all = emulation::exchange(mine, "multiply_tile");
    auto const a_at                           = [&](int row, int column) {
        fragments const& from = all.of(row % 8 * 4 + column % 8 / 2);
        return widen(from.a[row / 8 * 2 + column / 8 * 4 + column % 2]);
    };
    auto const b_at = [&](int row, int column) {
        fragments const& from = all.of(column * 4 + row % 8 / 2);
        return widen(from.b[row / 8 * 2 + row % 2]);
    };
    for (int i = 0; i < 4; ++i)
    {
        int const row    = lane() / 4 + i / 2 * 8;
        int const column = lane() % 4 * 2 + i % 2;
        float sum        = 0;
        for (int k = 0; k < 16; ++k) { sum += a_at(row, k) * b_at(k, column); }
        d[i] += sum;
    }
}

inline void load_transposed(std::uint32_t (&to)[4], void const* row)
{
    auto const all = emulation::exchange(row, "load_transposed");
    emulation::expect_aligned(row, 16, "load_transposed");
    for (int i = 0; i < 4; ++i)
    {
        std::uint16_t column[2];
        for (int j = 0; j < 2; ++j)
        {
            auto const* const from = static_cast<std::uint16_t const*>(all.of(8 * i + lane() % 4 * 2 + j));
            column[j]              = from[lane() / 4];
        }
        to[i] = column[0] | static_cast<std::uint32_t>(column[1]) << 16;
    }
    emulation::wait_for_warp("load_transposed"); // nobody writes what others still read
}
template <int First>
[[nodiscard]] inline std::uint32_t every_other_byte(std::uint32_t word)
{
    return word >> (8U * First) & 0x00ff00ffU;
}
[[nodiscard]] inline std::uint32_t transpose(std::uint32_t pair)
{
    auto const all    = emulation::exchange(pair, "transpose");
    auto const number = [&](int row) { return all.of(row * 4 + lane() / 8) >> (lane() / 4 % 2 * 16) & 0xffffU; };
    return number(lane() % 4 * 2) | number(lane() % 4 * 2 + 1) << 16;
}

template <element T>
[[nodiscard]] std::uint32_t pair(float low, float high)
{
    return narrow<T>(low).bits | static_cast<std::uint32_t>(narrow<T>(high).bits) << 16;
}

[[nodiscard]] inline float exp2(float x)
{
    return exp2f(x);
}

[[nodiscard]] inline int thread_again()
{
    return thread();
}

} // namespace MDKV_NAMESPACE::gpu::device
