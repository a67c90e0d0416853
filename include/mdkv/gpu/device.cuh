/// \file device.cuh: the functions of the GPU that kernels use: a thread's number, its block's barrier and memory, its warp, atomics, tensor cores.
#pragma once

#include <mdkv/core/ground.hpp>

#include <cmath>
#include <concepts>
#include <type_traits>

// Warp functions are for whole warps: all 32 lanes must reach them.

namespace MDKV_NAMESPACE::gpu::device
{

inline constexpr int warp_size = 32;

[[nodiscard]] __device__ __forceinline__ int thread()
{
    return static_cast<int>(threadIdx.x);
}
[[nodiscard]] __device__ __forceinline__ index_t block()
{
    return static_cast<index_t>(blockIdx.x);
}
[[nodiscard]] __device__ __forceinline__ int lane()
{
    return thread() % warp_size;
}
[[nodiscard]] __device__ __forceinline__ int warp()
{
    return thread() / warp_size;
}

/// Waits for all threads of the block and makes their writes visible to each other.
__device__ __forceinline__ void sync()
{
    __syncthreads();
}
/// Waits for all lanes of the warp and makes their writes visible to each other.
__device__ __forceinline__ void sync_warp()
{
    __syncwarp();
}

inline constexpr unsigned all_lanes = 0xffffffffU;

/// The value of the lane whose number differs in the bits of `mask`.
template <class T>
[[nodiscard]] __device__ __forceinline__ T shuffle_xor(T value, int mask)
{
    return __shfl_xor_sync(all_lanes, value, mask);
}
/// The value of lane `from`, 0 to 31.
template <class T>
[[nodiscard]] __device__ __forceinline__ T shuffle(T value, int from)
{
    return __shfl_sync(all_lanes, value, from);
}
/// The sum of the lanes' values, the same in each of them.
template <class T>
[[nodiscard]] __device__ __forceinline__ T sum_of_lanes(T x)
{
    for (int step = warp_size / 2; step > 0; step /= 2) { x += shuffle_xor(x, step); }
    return x;
}
/// The largest value that is a number, the same in each of these lanes: all, or those with the same number % `Apart`.
template <int Apart = 1>
[[nodiscard]] __device__ __forceinline__ float largest_of_lanes(float x)
{
    for (int step = warp_size / 2; step >= Apart; step /= 2) { x = fmaxf(x, shuffle_xor(x, step)); }
    return x;
}
/// Whether some lane says yes.
[[nodiscard]] __device__ __forceinline__ bool any(bool yes)
{
    return __any_sync(all_lanes, yes) != 0;
}

/// The type that CUDA's atomic functions take for integers of T's size: integers of 8 bytes must be called long long.
template <std::integral T>
using atomic_word =
    std::conditional_t<sizeof(T) == 4, T, std::conditional_t<std::is_signed_v<T>, long long, unsigned long long>>;

/// Adds integers only: sums of floats would depend on the order.
template <std::integral T>
__device__ __forceinline__ void atomic_add(T* to, T value)
{
    using word = atomic_word<std::make_unsigned_t<T>>;
    atomicAdd(reinterpret_cast<word*>(to), static_cast<word>(value));
}
/// Adds to a number in shared memory, where atomic sums of 64 bits are loops of compare-and-swap: its two words are added to
/// one after the other, so that it is whole at the block's next barrier.
template <std::integral T>
__device__ __forceinline__ void shared_add(T* to, T value)
{
    if constexpr (sizeof(T) == 4) { atomic_add(to, value); }
    else
    {
        auto* const words    = reinterpret_cast<unsigned*>(to);
        auto const low       = static_cast<unsigned>(value);
        unsigned const sum   = atomicAdd(words, low) + low;
        unsigned const above = static_cast<unsigned>(static_cast<std::uint64_t>(value) >> 32) + (sum < low ? 1U : 0U);
        if (above != 0) { atomicAdd(words + 1, above); }
    }
}
template <std::integral T>
__device__ __forceinline__ void atomic_min(T* to, T value)
{
    atomicMin(reinterpret_cast<atomic_word<T>*>(to), static_cast<atomic_word<T>>(value));
}

/// The block's dynamic shared memory, aligned to 16 bytes.
[[nodiscard]] __device__ __forceinline__ std::byte* shared_memory()
{
    extern __shared__ uint4 mdkv_shared_memory[];
    return reinterpret_cast<std::byte*>(mdkv_shared_memory);
}

/// The V at an address that is a multiple of sizeof(V), in one load. Kernels written by hand load and store vectors by these two
/// functions alone, whose addresses must be aligned; jobs do by load_all and store_all, which look at them.
template <class V>
[[nodiscard]] __device__ __forceinline__ V load(void const* from)
{
    static_assert(alignof(V) == sizeof(V), "load: one load takes its own size in alignment");
    return *static_cast<V const*>(from);
}
template <class V>
__device__ __forceinline__ void store(void* to, V const& value)
{
    static_assert(alignof(V) == sizeof(V), "store: one store takes its own size in alignment");
    *static_cast<V*>(to) = value;
}

/// Begins to copy `Bytes` bytes, 4, 8 or 16, from global to shared memory, both aligned to as many; `copy_async_wait` waits
/// for the copy's end.
template <int Bytes>
__device__ __forceinline__ void copy_async(void* to_shared, void const* from_global)
{
    auto const to = static_cast<unsigned>(__cvta_generic_to_shared(to_shared));
    if constexpr (Bytes == 16)
    {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from_global) : "memory");
    }
    else
    {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from_global), "n"(Bytes) : "memory");
    }
}
/// Ends a group of copies of this thread.
__device__ __forceinline__ void copy_async_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Waits for this thread's groups of copies but the last `Pending`; `sync` then shows them to the block.
template <int Pending>
__device__ __forceinline__ void copy_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

/// d += a b on tensor cores for one warp: a is 16 x 16, b 16 x 8, d 16 x 8 in float. With g = lane / 4 and p = lane % 4 a
/// lane holds, as pairs of neighbours,
///   a[0] rows g, columns 2p, 2p+1;  a[1] row g+8;  a[2] row g, columns 2p+8, 2p+9;  a[3] row g+8, columns 2p+8, 2p+9
///   b[0] rows 2p, 2p+1 of column g;  b[1] rows 2p+8, 2p+9
///   d[0], d[1] row g, columns 2p, 2p+1;  d[2], d[3] row g+8                  (PTX ISA, mma.m16n8k16)
template <element T>
__device__ __forceinline__ void multiply_tile(float (&d)[4], std::uint32_t const (&a)[4], std::uint32_t const (&b)[2])
{
    static_assert(sizeof(T) == 2, "multiply_tile: half or bfloat16");
    if constexpr (std::same_as<T, half>)
    {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
    else
    {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
}

/// Four matrices of 8 x 8 numbers of 16 bits, transposed: a lane gives the address in shared memory, aligned to 16 bytes, of
/// row lane % 8 of matrix lane / 8, and gets of each matrix columns lane / 4 of rows 2p and 2p+1, p = lane % 4, as a pair
/// (PTX ISA, ldmatrix).
__device__ __forceinline__ void load_transposed(std::uint32_t (&to)[4], void const* row)
{
    auto const from = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}
/// Transposes an 8 x 8 matrix of numbers of 16 bits, of which a lane holds columns 2p and 2p+1 of row lane / 4 (PTX ISA,
/// movmatrix).
[[nodiscard]] __device__ __forceinline__ std::uint32_t transpose(std::uint32_t pair)
{
    std::uint32_t result = 0;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

/// Bytes `First` and `First` + 2 of a word as a pair of numbers of 16 bits, in one instruction.
template <int First>
[[nodiscard]] __device__ __forceinline__ std::uint32_t every_other_byte(std::uint32_t word)
{
    static_assert(First == 0 || First == 1);
    return __byte_perm(word, 0, First == 0 ? 0x4240 : 0x4341);
}

/// Two numbers rounded to 16 bits as a pair, the first in the low half.
template <element T>
[[nodiscard]] __device__ __forceinline__ std::uint32_t pair(float low, float high)
{
    static_assert(sizeof(T) == 2, "pair: half or bfloat16");
    std::uint32_t result = 0;
    if constexpr (std::same_as<T, half>) { asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low)); }
    else { asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low)); }
    return result;
}

/// 2^x in one instruction, to two units in the last place; results below 2^-126 are 0.
[[nodiscard]] __device__ __forceinline__ float exp2(float x)
{
    float result = 0;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

/// thread() through a volatile read, so that nvcc recomputes what depends on it instead of keeping registers.
[[nodiscard]] __device__ __forceinline__ int thread_again()
{
    unsigned number = 0;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
    return static_cast<int>(number & 1023U);
}

inline constexpr int stamps = 8; ///< most points of a kernel that are stamped

#ifdef MDKV_STAMPS // for a benchmark
/// Where stamps are wanted: [blocks][stamps][2]; null: nowhere.
static __device__ long long* stamp_memory;
/// Notes when the block's first thread comes by point `number` of a kernel, in its multiprocessor's cycles and in nanoseconds.
__device__ __forceinline__ void stamp(int number)
{
    if (stamp_memory == nullptr || thread() != 0) { return; }
    long long* const to = stamp_memory + (block() * stamps + number) * 2;
    to[0]               = clock64();
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(to[1])::"memory");
}
#else
__device__ __forceinline__ void stamp(int /*number*/)
{}
#endif

} // namespace MDKV_NAMESPACE::gpu::device
