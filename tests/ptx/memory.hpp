/// \file memory.hpp: device memory and what is known of each of its bytes; the program's settings and the count of faults.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace ptx
{

// --- settings ----------------------------------------------------------------------------------------------------------

/// MDKV_PTX_ORDER of the environment: in which order blocks, warps and parted lanes run, and when copies arrive.
enum class order : std::uint8_t
{
    ascending,  ///< one block after the other; copies arrive when they are waited for
    descending, ///< the last block, warp and lane first; parted lanes meet at warp functions only; copies arrive at once
    shuffled ///< several blocks at once, warps in turns; copies arrive early or late. `shuffled:7` takes another seed
};
[[nodiscard]] order which_order();

/// For orders: the same in every run of a seed.
[[nodiscard]] std::mt19937& random();

/// MDKV_PTX_HOST_MEMORY=1: kernels may also use the host's memory, unchecked, for programs whose tensors lie there.
[[nodiscard]] bool host_memory();

// --- faults ------------------------------------------------------------------------------------------------------------

/// Counts a fault, and prints it if nothing was reported of this kind at `place` before.
void report(char const* kind, void const* place, std::string const& text);
/// Whether there was a report of this kind at this place; counts one more if so.
[[nodiscard]] bool reported(char const* kind, void const* place);
/// From now on it is no fault, which a comment in the sources explains.
void explain(char const* kind, void const* place);
[[nodiscard]] std::uint64_t faults();
/// The kinds reported since the last call, of which nothing remains: for tests of the reports.
[[nodiscard]] std::vector<std::string> take_reports();

// --- device memory -----------------------------------------------------------------------------------------------------

// What is known of a byte: bits, and in shared memory above them the number of copies on their way to it.
inline constexpr std::uint8_t allocated = 1;
inline constexpr std::uint8_t written   = 2;
inline constexpr std::uint8_t flight    = 4;

struct cell;

/// The device's memory: addresses that only kernels and copies can use.
struct device
{
    static constexpr std::uint64_t bytes = std::uint64_t{32} << 30;

    std::uint64_t base  = 0; ///< the first address
    std::byte* memory   = nullptr;
    std::uint8_t* state = nullptr; ///< a byte for each of memory
    cell* cells         = nullptr; ///< one for each four of memory

    [[nodiscard]] bool has(std::uint64_t address) const { return address - base < bytes; }
    /// Where the bytes are: the host's own if they are not the device's.
    [[nodiscard]] std::byte* at(std::uint64_t address) const
    {
        return has(address) ? memory + (address - base) : reinterpret_cast<std::byte*>(address);
    }
    /// Whether all of it is allocated.
    [[nodiscard]] bool owns(std::uint64_t address, std::uint64_t size) const;
    /// 0 if there is no room.
    [[nodiscard]] std::uint64_t allocate(std::uint64_t size);
    /// False if nothing was allocated there.
    [[nodiscard]] bool release(std::uint64_t address);
};
[[nodiscard]] device& the_device();

} // namespace ptx
