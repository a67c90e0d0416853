/// \file races.hpp: who touched a word of memory last, and whether what touches it now comes after.
#pragma once

#include <cstdint>

namespace ptx
{

/// An access to some bytes of a word: by which thread, between which two barriers of its block, and between which two meetings
/// of its warp.
struct touch
{
    std::uint32_t interval    = 0;
    std::uint32_t phase : 17  = 0;
    std::uint32_t thread : 10 = 0;
    std::uint32_t bytes : 4   = 0;
    std::uint32_t atomic : 1  = 0;
};

/// The last accesses to a word. Reads of two threads are kept, because either may be the writer's own.
struct cell
{
    touch write, read, other;
};

enum class access : std::uint8_t
{
    read,
    write,
    same, ///< a write that changes nothing
    atomic
};

struct block;

/// Notes an access, of which `now` says who and when. Returns what it races with, null if nothing.
[[nodiscard]] char const* note(cell& word, touch now, access how, block const& mine);

/// A new interval of a block.
[[nodiscard]] std::uint32_t next_interval(block const& of);
/// Intervals from now on are a new launch's, which comes after all before.
void begin_launch();

} // namespace ptx
