/// \file machine.hpp: a GPU as its programming model describes it, run on the host: blocks one after another, the threads of
/// a block as fibers that change at barriers and warp functions only.
#pragma once

#include <mdkv/core/types.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

// What is an error on a GPU, or undefined there, is an exception here: a barrier that some threads of the block never
// reach, a warp function without all its lanes, two different ones at once, shared memory beyond what a block may have,
// copies nobody waited for, vectors at addresses that are no multiples of their size. Shared memory is on the heap and holds
// NaNs at first, so that a sanitizer and a test see what is read before it is written. Asynchronous copies arrive when they are
// waited for (ascending order; NaNs are in their place before), at once (descending), or either (shuffled). What depends on
// the order of threads shows when the same work is done in several orders.

namespace emulation
{

/// The order in which threads run between two barriers, and blocks after each other.
enum class order : std::uint8_t
{
    ascending,
    descending,
    shuffled ///< another one at every barrier
};

/// Applies to every kernel started from now on, by this thread.
void use(order which);

/// Kernels and threads run so far: what a test suite reports.
struct counts
{
    std::uint64_t kernels  = 0;
    std::uint64_t blocks   = 0;
    std::uint64_t switches = 0;
};
[[nodiscard]] counts const& total();

/// Names of the kernels run so far, without those of other processes.
[[nodiscard]] std::vector<std::string> kernel_names();

/// Shared memory that a block may have, in bytes: what GPUs with little of it give (compute capability 8.6, 8.9, 12).
inline constexpr mdkv::index_t most_shared = 99 * 1024;

struct grid
{
    char const* name;
    int threads;
    mdkv::index_t blocks;
    mdkv::index_t shared_bytes;
};

/// Runs every thread of every block to its end.
/// \throws std::logic_error   naming kernel, block and thread; or whatever a thread throws
void run(grid const& what, std::function<void()> const& thread);

struct block_state
{
    int threads;
    mdkv::index_t number;
    mdkv::index_t blocks;
    std::byte* shared;
};

/// The thread that is running.
struct thread_state
{
    int index;
    block_state const* block;
};
[[nodiscard]] thread_state const& current();

void wait_for_block();
void wait_for_warp(char const* function);

/// Publishes `size` bytes of this lane, waits for the warp, and gives the first of 32 slots of `most_exchanged` bytes.
inline constexpr std::size_t most_exchanged = 32;
[[nodiscard]] std::byte const* exchange_bytes(void const* value, std::size_t size, char const* function);

/// What the 32 lanes have published.
template <class T>
struct exchanged
{
    std::byte const* slots;

    [[nodiscard]] T of(int lane) const
    {
        T value;
        std::memcpy(
            static_cast<void*>(&value), slots + static_cast<std::size_t>(lane & 31) * most_exchanged, sizeof(T));
        return value;
    }
};

template <class T>
[[nodiscard]] exchanged<T> exchange(T const& value, char const* function)
{
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= most_exchanged);
    return {exchange_bytes(&value, sizeof(T), function)};
}

/// \throws std::logic_error   the address is no multiple of `bytes`
void expect_aligned(void const* address, std::size_t bytes, char const* function);

void begin_copy(void* to, void const* from, std::size_t bytes);
void end_copy_group();
void finish_copies(int pending);

} // namespace emulation
