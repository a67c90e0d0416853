/// \file clock.hpp: an estimate of the cycles that a launch takes on a GPU, computed while its PTX is executed
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace ptx
{

/// One launch, all its figures computed. Cycles are at 1.755 GHz.
struct launch_time
{
    std::string name; ///< the kernel's, without its arguments
    std::uint32_t blocks = 0, threads = 0;
    double cycles        = 0; ///< of the whole launch: blocks that find no room begin when another ends
    double block_cycles  = 0; ///< of the slowest block
    double before_copy   = 0; ///< cycles until the first cp.async or prefetch, in the block that begins its own last
    double memory_cycles = 0; ///< a lower bound: the bytes from DRAM at 4.3 TB/s
    std::uint64_t bytes  = 0; ///< from DRAM
    int chain            = 0; ///< global loads into registers that wait for one another, in the worst warp
    int barriers         = 0; ///< most of a block
    std::uint64_t instructions = 0; ///< PTX, most of a warp
    std::uint64_t code = 0; ///< 16 bytes for each PTX instruction that some warp of a block comes by, most of a block

    [[nodiscard]] double microseconds() const { return (cycles > memory_cycles ? cycles : memory_cycles) / 1755; }
};

// How well it agrees with an H200 (slices + merge of the kernel of 27 November computed, the whole call with its two launches
// measured, microseconds): codes at .4 % 46 + 6, measured 55; coordinates at .4 % 50 + 9, measured 55; codes at 10 % 59 + 12,
// measured 81; coordinates at 10 % 53 + 15, measured 94; 4 bits of 131,072 tokens 48 + 12, measured 80; 16 bits 137 + 11, measured
// 168. Figures of small caches with projections are no proof: they were higher until short branches became predicates. Large
// caches were computed once, after that, and come out 12 to 28 percent low: resident blocks do not wait for one another. Merges
// were probably a third low.

/// Watches launches while it lives, from a cold L2 cache on. In ascending order only, one at a time.
class clock
{
public:
    /// \param resident   blocks of a kernel that a multiprocessor has room for by registers, which PTX does not say
    explicit clock(std::uint32_t resident = 4);
    ~clock();
    clock(clock const&)            = delete;
    clock& operator=(clock const&) = delete;

    [[nodiscard]] std::vector<launch_time> const& launches() const;

private:
    std::unique_ptr<class stopwatch> own_;
};

} // namespace ptx
