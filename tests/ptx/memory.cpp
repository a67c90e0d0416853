#include "memory.hpp"

#include "races.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string_view>
#include <utility>

#include <sys/mman.h>

namespace ptx
{

namespace
{

constexpr std::uint32_t usual_seed = 20260320;
constexpr std::uint64_t boundary   = 256; // of allocations
constexpr std::uint64_t page       = 4096;
constexpr int most_printed         = 100;

struct choice
{
    order which        = order::ascending;
    std::uint32_t seed = usual_seed;
};

choice chosen()
{
    char const* const text = std::getenv("MDKV_PTX_ORDER");
    std::string_view name{text == nullptr ? "ascending" : text};
    choice result;
    if (auto const colon = name.find(':'); colon != name.npos)
    {
        result.seed = static_cast<std::uint32_t>(std::strtoul(text + colon + 1, nullptr, 10));
        name        = name.substr(0, colon);
    }
    if (name == "ascending") { return result; }
    if (name != "descending" && name != "shuffled")
    {
        std::fprintf(
            stderr, "MDKV_PTX_ORDER is %s; it must be ascending, descending, shuffled or shuffled:SEED\n", text);
        std::_Exit(2);
    }
    result.which = name == "descending" ? order::descending : order::shuffled;
    if (result.which == order::shuffled) { std::fprintf(stderr, "ptx: order shuffled:%u\n", result.seed); }
    return result;
}
choice const& the_choice()
{
    static choice const one = chosen();
    return one;
}

using place = std::pair<std::string_view, void const*>;
std::map<place, std::uint64_t>& counts()
{
    static auto* const all = new std::map<place, std::uint64_t>; // the report at exit comes after static objects' ends
    return *all;
}
std::uint64_t count               = 0;
constexpr std::uint64_t explained = ~std::uint64_t{0};

std::map<std::uint64_t, std::uint64_t>& sizes() // of what is allocated, by address
{
    static auto* const all = new std::map<std::uint64_t, std::uint64_t>;
    return *all;
}

void* reserve(std::uint64_t bytes, int access)
{
    void* const at = mmap(nullptr, bytes, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
    {
        std::perror("ptx: no addresses for the device's memory");
        std::_Exit(2);
    }
    return at;
}

} // namespace

order which_order()
{
    return the_choice().which;
}

std::mt19937& random()
{
    static std::mt19937 one{the_choice().seed};
    return one;
}

bool host_memory()
{
    static bool const allowed = std::getenv("MDKV_PTX_HOST_MEMORY") != nullptr;
    return allowed;
}

bool reported(char const* kind, void const* where)
{
    auto const found = counts().find({kind, where});
    if (found == counts().end()) { return false; }
    if (found->second != explained)
    {
        ++found->second;
        ++count;
    }
    return true;
}

void explain(char const* kind, void const* where)
{
    counts()[{kind, where}] = explained;
}

void report(char const* kind, void const* where, std::string const& text)
{
    if (reported(kind, where)) { return; }
    ++count;
    counts()[{kind, where}] = 1;
    if (counts().size() <= most_printed) { std::fprintf(stderr, "ptx: %s: %s\n", kind, text.c_str()); }
}

std::vector<std::string> take_reports()
{
    std::vector<std::string> kinds;
    for (auto const& [at, times] : counts())
    {
        if (times != explained && (kinds.empty() || kinds.back() != at.first)) { kinds.emplace_back(at.first); }
    }
    counts().clear();
    count = 0;
    return kinds;
}

std::uint64_t faults()
{
    return count;
}

device& the_device()
{
    static device one = [] {
        device made;
        // Nothing is behind the addresses that the program sees: the host cannot use them by mistake.
        made.base   = reinterpret_cast<std::uint64_t>(reserve(device::bytes, PROT_NONE));
        made.memory = static_cast<std::byte*>(reserve(device::bytes, PROT_READ | PROT_WRITE));
        made.state  = static_cast<std::uint8_t*>(reserve(device::bytes, PROT_READ | PROT_WRITE));
        made.cells  = static_cast<cell*>(reserve(device::bytes / 4 * sizeof(cell), PROT_READ | PROT_WRITE));
        return made;
    }();
    return one;
}

bool device::owns(std::uint64_t address, std::uint64_t size) const
{
    auto const after = sizes().upper_bound(address);
    if (after == sizes().begin()) { return false; }
    auto const& [first, count_of] = *std::prev(after);
    return address - first <= count_of && size <= count_of - (address - first);
}

std::uint64_t device::allocate(std::uint64_t size)
{
    // The first gap that has room for it and for a boundary's bytes around, which no access may meet.
    std::uint64_t at = base + page;
    for (auto const& [first, bytes_of] : sizes())
    {
        if (first - at >= size + boundary && first > at) { break; }
        at = (first + bytes_of + 2 * boundary - 1) / boundary * boundary;
    }
    if (size > bytes - 2 * page || at - base > bytes - page - size) { return 0; }
    sizes()[at] = size;
    std::memset(state + (at - base), allocated, size);
    std::memset(memory + (at - base), 0xff, size); // NaNs
    return at;
}

bool device::release(std::uint64_t address)
{
    auto const found = sizes().find(address);
    if (found == sizes().end()) { return false; }
    auto const at = address - base;
    std::memset(state + at, 0, found->second);
    auto const first = (at + page - 1) / page * page;
    auto const end   = (at + found->second) / page * page;
    if (first < end)
    {
        madvise(memory + first, end - first, MADV_DONTNEED);
        madvise(state + first, end - first, MADV_DONTNEED);
    }
    sizes().erase(found);
    return true;
}

} // namespace ptx
