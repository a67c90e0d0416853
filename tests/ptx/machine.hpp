/// \file machine.hpp: warps and blocks that run, their registers, and the reports of what they do wrong.
#pragma once

#include "memory.hpp"
#include "program.hpp"
#include "races.hpp"

#include <bit>
#include <cstring>
#include <type_traits>

// PTX executed as its manual describes it: a warp's 32 lanes at once, by function pointers; lanes that part become parties,
// which meet where they are at the same instruction (in descending order only where they must), the blocks of a launch one
// after another or, shuffled, four at a time. What is an error on a GPU, or undefined there, is reported, each place once, and
// the process then ends with status 1: misaligned vectors; accesses outside of allocations; reads of what nobody wrote;
// asynchronous copies whose bytes are read, written or copied to before they are waited for, or that nobody waits for; two
// threads' accesses to a word of which one changes it, without a barrier between, in shared and global memory; barriers and warp functions that some threads miss. Equal values that two
// threads write are no fault. A comment in the kernels' sources may explain a race or a read ("// race: ...", "// unwritten:
// ..."). Not shown: memory that is seen in another order than it was written; what ptxas makes of PTX; the rounding of
// approximations, which are the host library's, and of tensor cores, whose sums are of doubles here; time, of which clock.hpp
// has an estimate.

namespace ptx
{

struct block;

/// A copy from global to shared memory that was begun.
struct flying_copy
{
    std::uint8_t lane;
    std::uint8_t bytes;
    bool arrived;
    std::uint32_t group;
    std::uint32_t to;
    std::uint64_t from;
};

enum class waiting : std::uint8_t
{
    no,
    for_lanes,
    for_block
};

/// Lanes of a warp that are at the same instruction.
struct party
{
    std::uint32_t at;
    lanes who;
    waiting wait = waiting::no;
};

struct warp
{
    std::byte* frame    = nullptr;
    block* of           = nullptr;
    int number          = 0;
    lanes alive         = 0;
    std::uint32_t phase = 0; ///< how often all lanes have met
    std::vector<party> parties;
    std::vector<flying_copy> copies;
    std::array<std::uint32_t, warp_size> groups{}; ///< of copies, ended by each lane
    std::vector<std::byte> registers, local;
    std::vector<std::uint8_t> local_state;
};

struct launch;

struct block
{
    launch* of             = nullptr;
    std::uint32_t number   = 0;
    std::uint32_t interval = 0; ///< between two barriers; no two of the program's have the same number
    std::vector<std::byte> shared;
    std::vector<std::uint8_t> state; ///< of its bytes
    std::vector<cell> cells;         ///< of its words
    std::vector<warp> warps;
    bool done = true;
};

struct launch
{
    module const* code;
    kernel* what;
    std::uint32_t blocks, threads;
    std::size_t dynamic_shared;
    std::vector<std::byte> parameters;
};

/// Is told of what runs; ptx::clock is one.
class watcher
{
public:
    virtual void begin(launch const& l)                    = 0;
    virtual void begin(block const& b)                     = 0;
    virtual void step(warp& w, std::uint32_t at, lanes on) = 0; ///< before the instruction; no lane: its guard is false
    virtual void meet(block const& b)                      = 0; ///< at a barrier
    virtual void end(block const& b)                       = 0;

protected:
    ~watcher() = default;
};
inline watcher* watching = nullptr; ///< null: none

/// Runs a kernel to its end. One at a time.
/// \throws std::runtime_error   it cannot end
void run(launch what);

/// The lane's report of a fault; each place is printed once.
void report(char const* kind, warp const& w, instruction const& i, int lane, std::string const& more = {});

/// Ends the copies of some lanes but those of the last `pending` groups.
void finish_copies(warp& w, instruction const& i, lanes who, std::uint32_t pending);

// --- registers ---------------------------------------------------------------------------------------------------------

/// A register's lanes: words of 4 or 8 bytes.
template <class T>
using lane_word = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;

template <class Word>
[[nodiscard]] inline Word* words(warp& w, std::uint32_t at)
{
    return reinterpret_cast<Word*>(w.frame + at);
}
/// A register of predicates: a bit for each lane.
[[nodiscard]] inline lanes& bits(warp& w, std::uint32_t at)
{
    return *words<lanes>(w, at);
}
template <class T>
[[nodiscard]] inline T as(lane_word<T> word)
{
    if constexpr (std::is_floating_point_v<T>) { return std::bit_cast<T>(word); }
    else { return static_cast<T>(word); }
}
template <class T>
[[nodiscard]] inline lane_word<T> word_of(T value)
{
    if constexpr (std::is_floating_point_v<T>) { return std::bit_cast<lane_word<T>>(value); }
    else { return static_cast<lane_word<T>>(static_cast<std::make_unsigned_t<T>>(value)); }
}
template <class Do>
inline void for_lanes(lanes who, Do const& what)
{
    for (; who != 0; who &= who - 1) { what(std::countr_zero(who)); }
}

} // namespace ptx
