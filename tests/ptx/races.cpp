#include "races.hpp"

#include "machine.hpp"

#include <vector>

namespace ptx
{

namespace
{

std::uint32_t first_interval = 1; // of the launch
std::uint32_t last_interval  = 0;
std::vector<std::uint32_t> owners; // of the launch's intervals: the blocks' numbers

/// Whether what was done at `then`, by another thread, need not come before what is done now.
bool unordered(touch const& then, touch const& now, block const& mine)
{
    if (then.interval < first_interval || (then.bytes & now.bytes) == 0) { return false; }
    if (then.interval == now.interval)
    {
        return then.thread != now.thread
               && (then.thread / warp_size != now.thread / warp_size || then.phase == now.phase);
    }
    return owners[then.interval - first_interval] != mine.number;
}

} // namespace

char const* note(cell& word, touch now, access how, block const& mine)
{
    now.atomic             = how == access::atomic;
    bool const after_write = unordered(word.write, now, mine);
    bool const both_atomic = word.write.atomic != 0 && how == access::atomic;
    char const* race       = nullptr;
    if (how == access::read)
    {
        if (after_write) { race = "race: reads what another thread writes"; }
        bool const first = word.read.interval != now.interval || word.read.thread == now.thread;
        if (first && word.read.interval != now.interval) { word.other = word.read; }
        (first ? word.read : word.other) = now;
        return race;
    }
    if (how != access::same)
    {
        if (after_write && !both_atomic) { race = "race: writes what another thread writes"; }
        else if (how == access::write && (unordered(word.read, now, mine) || unordered(word.other, now, mine)))
        {
            race = "race: writes what another thread reads";
        }
    }
    if (how != access::same || !after_write) { word.write = now; }
    return race;
}

std::uint32_t next_interval(block const& of)
{
    owners.push_back(of.number);
    return ++last_interval;
}

void begin_launch()
{
    first_interval = last_interval + 1;
    owners.clear();
}

} // namespace ptx
