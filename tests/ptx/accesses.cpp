// Loads, stores, atomics and copies, with what is checked of each.
#include "machine.hpp"

#include <algorithm>
#include <array>
#include <map>

namespace ptx
{

namespace
{

using u8  = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

/// Where bytes are that a lane accesses; `data` is null after a fault.
struct place
{
    std::byte* data = nullptr;
    u8* state       = nullptr;
    cell* cells     = nullptr; ///< of the word they begin in; null of memory that no other lane sees
    u32 first       = 0;       ///< their place in that word
    bool shared     = false;
};

[[nodiscard]] std::string hexadecimal(u64 address)
{
    char text[32];
    std::snprintf(text, sizeof text, "address 0x%llx", static_cast<unsigned long long>(address));
    return text;
}

[[nodiscard]] u64 address_of(warp& w, instruction const& i, int lane, std::size_t operand)
{
    auto const base = i.wide ? words<u64>(w, i.at[operand])[lane] : words<u32>(w, i.at[operand])[lane];
    return base + static_cast<u64>(i.offset);
}

/// What the states of some bytes, at most 16, have in common, or, with Any, what one of them has: in the bytes of a word.
template <bool Any>
[[nodiscard]] u64 together(u8 const* state, u32 bytes)
{
    auto const join = [](u64 a, u64 b) { return Any ? a | b : a & b; };
    u64 first = Any ? 0 : ~u64{0}, last = first;
    switch (bytes) // sizes that the compiler knows
    {
        case 4:
            std::memcpy(&first, state, 4);
            break;
        case 16:
            std::memcpy(&last, state + 8, 8);
            [[fallthrough]];
        case 8:
            std::memcpy(&first, state, 8);
            break;
        default:
            std::memcpy(&first, state, bytes);
            break;
    }
    return join(first, last);
}
constexpr u64 each_byte = 0x0101010101010101;

[[nodiscard]] bool all_have(u8 const* state, u32 bytes, u8 what)
{
    return (together<false>(state, bytes) & (each_byte * what)) == each_byte * what;
}

[[nodiscard]] bool in_flight(place const& p, u32 bytes)
{
    return p.shared && (together<true>(p.state, bytes) & ~(each_byte * (allocated | written))) != 0;
}

[[nodiscard]] place find(warp& w, instruction const& i, int lane, space where, u64 address, u32 bytes)
{
    if (address % bytes != 0)
    {
        report("misaligned access", w, i, lane, hexadecimal(address));
        return {};
    }
    u64 at = address;
    if (where == space::generic)
    {
        where = space::global;
        if (address - shared_window < window_bytes) { where = space::shared, at = address - shared_window; }
        else if (address - local_window < window_bytes) { where = space::local, at = address - local_window; }
        else if (address - parameter_window < window_bytes)
        {
            auto& parameters          = w.of->of->parameters;
            at                        = address - parameter_window;
            static u8 const given[16] = {3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3};
            if (at + bytes <= parameters.size()) { return {parameters.data() + at, const_cast<u8*>(given)}; }
            report("access outside of the kernel's parameters", w, i, lane, std::to_string(at));
            return {};
        }
    }
    if (where == space::global)
    {
        device& gpu = the_device();
        at          = address - gpu.base;
        if (at < device::bytes && all_have(gpu.state + at, bytes, allocated))
        {
            return {gpu.memory + at, gpu.state + at, gpu.cells + at / 4, static_cast<u32>(at % 4)};
        }
        static u8 of_host[16] = {3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3}; // as much as an access may have
        if (at >= device::bytes && host_memory()) { return {reinterpret_cast<std::byte*>(address), of_host}; }
        report("access outside of what is allocated", w, i, lane, hexadecimal(address));
        return {};
    }
    if (where == space::shared)
    {
        block& b = *w.of;
        if (at + bytes <= b.shared.size())
        {
            return {b.shared.data() + at, b.state.data() + at, b.cells.data() + at / 4, static_cast<u32>(at % 4), true};
        }
        report("access outside of shared memory", w, i, lane,
            "byte " + std::to_string(at) + " of " + std::to_string(b.shared.size()));
        return {};
    }
    std::size_t const own = w.of->of->what->local_bytes;
    if (at + bytes <= own)
    {
        u64 const mine = static_cast<u64>(lane) * own + at;
        return {w.local.data() + mine, w.local_state.data() + mine};
    }
    report("access outside of local memory", w, i, lane, "byte " + std::to_string(at));
    return {};
}

/// Notes who accesses the words.
void note_all(warp& w, instruction const& i, int lane, place const& p, u32 bytes, access how)
{
    touch now;
    now.interval = w.of->interval;
    now.phase    = w.phase & 0x1ffff;
    now.thread   = static_cast<u32>(w.number * warp_size + lane) & 1023;
    for (u32 k = 0; k < bytes; k += 4)
    {
        now.bytes = bytes >= 4 ? 15 : ((1U << bytes) - 1) << p.first & 15;
        if (char const* const race = note(p.cells[k / 4], now, how, *w.of))
        {
            report(race, w, i, lane, p.shared ? "in shared memory" : "in global memory");
        }
    }
}

void check_read(warp& w, instruction const& i, int lane, place const& p, u32 bytes, access how)
{
    if (in_flight(p, bytes)) { report("reads what a copy is on its way to", w, i, lane); }
    else if (!all_have(p.state, bytes, written))
    {
        report("unwritten memory is read", w, i, lane,
            p.shared             ? "in shared memory"
            : p.cells != nullptr ? "in global memory"
                                 : "in local memory");
    }
    if (p.cells != nullptr) { note_all(w, i, lane, p, bytes, how); }
}

void check_write(warp& w, instruction const& i, int lane, place const& p, void const* value, u32 bytes)
{
    if (in_flight(p, bytes)) { report("writes what a copy is on its way to", w, i, lane); }
    if (p.cells != nullptr)
    {
        note_all(w, i, lane, p, bytes,
            all_have(p.state, bytes, written) && std::memcmp(p.data, value, bytes) == 0 ? access::same : access::write);
    }
    for (u32 k = 0; k < bytes; ++k) { p.state[k] |= written; }
}

template <class Element, class Word>
void load(warp& w, instruction const& i, lanes who)
{
    u32 const bytes = static_cast<u32>(sizeof(Element)) * i.elements;
    for_lanes(who, [&](int lane) {
        place const p = find(w, i, lane, i.where, address_of(w, i, lane, i.address), bytes);
        if (p.data != nullptr) { check_read(w, i, lane, p, bytes, access::read); }
        for (std::size_t k = 0; k < i.elements; ++k)
        {
            auto value = static_cast<Element>(-1);
            if (p.data != nullptr) { std::memcpy(&value, p.data + k * sizeof(Element), sizeof value); }
            words<Word>(w, i.at[k])[lane] = static_cast<Word>(value);
        }
    });
}

template <class Element, class Word>
void store(warp& w, instruction const& i, lanes who)
{
    u32 const bytes = static_cast<u32>(sizeof(Element)) * i.elements;
    for_lanes(who, [&](int lane) {
        std::array<Element, 4> value{};
        for (std::size_t k = 0; k < i.elements; ++k)
        {
            value[k] = static_cast<Element>(words<Word>(w, i.at[k + 1])[lane]);
        }
        place const p = find(w, i, lane, i.where, address_of(w, i, lane, i.address), bytes);
        if (p.data == nullptr) { return; }
        check_write(w, i, lane, p, value.data(), bytes);
        std::memcpy(p.data, value.data(), bytes);
    });
}

// --- atomics ---------------------------------------------------------------------------------------------------------------

template <auto F, class T>
void atomic(warp& w, instruction const& i, lanes who)
{
    for_lanes(who, [&](int lane) {
        place const p = find(w, i, lane, i.where, address_of(w, i, lane, i.address), sizeof(T));
        if (p.data == nullptr) { return; }
        T before;
        std::memcpy(&before, p.data, sizeof before);
        T const after = F(before, as<T>(words<lane_word<T>>(w, i.at[2])[lane]));
        check_read(w, i, lane, p, sizeof(T), access::atomic);
        std::memcpy(p.data, &after, sizeof after);
        words<lane_word<T>>(w, i.at[0])[lane] = word_of<T>(before);
    });
}

// --- copies to shared memory ---------------------------------------------------------------------------------------------

void arrive(block& b, flying_copy const& copy)
{
    device const& gpu = the_device();
    if (gpu.owns(copy.from, copy.bytes) || (host_memory() && !gpu.has(copy.from)))
    {
        std::memcpy(b.shared.data() + copy.to, gpu.at(copy.from), copy.bytes);
    }
}

/// Whether every copy that is on its way to some of these bytes brings the same.
[[nodiscard]] bool brings_same(block const& b, flying_copy const& mine)
{
    device const& gpu = the_device();
    for (warp const& w : b.warps)
    {
        for (flying_copy const& other : w.copies)
        {
            if (other.to >= mine.to + mine.bytes || mine.to >= other.to + other.bytes) { continue; }
            u32 const first = std::max(other.to, mine.to), end = std::min(other.to + other.bytes, mine.to + mine.bytes);
            auto const source = [&](flying_copy const& c) { return gpu.at(c.from) + (first - c.to); };
            if (std::memcmp(source(other), source(mine), end - first) != 0) { return false; }
        }
    }
    return true;
}

/// Nothing comes of it but time.
void prefetch(warp&, instruction const&, lanes)
{}

/// cp.async: operands are where to, where from, how many bytes.
void copy_async(warp& w, instruction const& i, lanes who)
{
    block& b = *w.of;
    for_lanes(who, [&](int lane) {
        auto const l      = static_cast<std::size_t>(lane);
        u32 const bytes   = words<u32>(w, i.at[2])[lane];
        u32 const to      = words<u32>(w, i.at[0])[lane];
        u64 const from    = words<u64>(w, i.at[1])[lane];
        place const here  = find(w, i, lane, space::shared, to, bytes);
        place const there = find(w, i, lane, space::global, from, bytes);
        if (here.data == nullptr || there.data == nullptr) { return; }
        check_read(w, i, lane, there, bytes, access::read);
        flying_copy copy{static_cast<u8>(lane), static_cast<u8>(bytes), false, w.groups[l], to, from};
        bool const meets = in_flight(here, bytes);
        if (meets && !brings_same(b, copy)) { report("copies to where another copy is on its way to", w, i, lane); }
        // The place is written from now on: what others read of it before must be over.
        bool const equal =
            meets || (all_have(here.state, bytes, written) && std::memcmp(here.data, there.data, bytes) == 0);
        note_all(w, i, lane, here, bytes, equal ? access::same : access::write);
        copy.arrived = which_order() == order::descending || (which_order() == order::shuffled && random()() % 2 == 0);
        if (copy.arrived) { arrive(b, copy); }
        else { std::memset(here.data, 0xff, bytes); } // NaNs
        for (u32 k = 0; k < bytes; ++k) { here.state[k] = static_cast<u8>(here.state[k] + flight); }
        w.copies.push_back(copy);
    });
}

void end_group(warp& w, instruction const&, lanes who)
{
    for_lanes(who, [&](int lane) { ++w.groups[static_cast<std::size_t>(lane)]; });
}

void wait_groups(warp& w, instruction const& i, lanes who)
{
    finish_copies(w, i, who, words<u32>(w, i.at[0])[0]);
}

/// ldmatrix.x4: lane l's address is that of row l % 8 of matrix l / 8.
template <bool Transposed>
void load_matrices(warp& w, instruction const& i, lanes)
{
    std::array<std::array<std::uint16_t, 8>, warp_size> rows;
    for (int l = 0; l < warp_size; ++l)
    {
        auto& row     = rows[static_cast<std::size_t>(l)];
        place const p = find(w, i, l, space::shared, address_of(w, i, l, i.address), sizeof row);
        row.fill(0xffff);
        if (p.data == nullptr) { continue; }
        check_read(w, i, l, p, sizeof row, access::read);
        std::memcpy(row.data(), p.data, sizeof row);
    }
    for (std::size_t matrix = 0; matrix < 4; ++matrix)
    {
        for (std::size_t l = 0; l < warp_size; ++l)
        {
            std::size_t const two = l % 4 * 2, one = l / 4, first = matrix * 8;
            u32 const low                  = Transposed ? rows[first + two][one] : rows[first + one][two];
            u32 const high                 = Transposed ? rows[first + two + 1][one] : rows[first + one][two + 1];
            words<u32>(w, i.at[matrix])[l] = low | high << 16;
        }
    }
}

template <class E>
[[nodiscard]] handler loads(u8 size)
{
    return size == 8 ? load<E, u64> : load<E, u32>;
}
template <class E>
[[nodiscard]] handler stores(u8 size)
{
    return size == 8 ? store<E, u64> : store<E, u32>;
}

/// "atom.global.add.u64" and the like.
handler atomic_named(std::string const& name)
{
    static std::map<std::string, handler> const all{
        {"add.u32", atomic<[](u32 a, u32 b) { return a + b; }, u32>},
        {"add.u64", atomic<[](u64 a, u64 b) { return a + b; }, u64>},
        {"min.u32", atomic<[](u32 a, u32 b) { return std::min(a, b); }, u32>},
        {"min.u64", atomic<[](u64 a, u64 b) { return std::min(a, b); }, u64>},
        {"min.s64", atomic<[](std::int64_t a, std::int64_t b) { return std::min(a, b); }, std::int64_t>},
    };
    auto const found = all.find(name);
    return found == all.end() ? nullptr : found->second;
}

} // namespace

void finish_copies(warp& w, instruction const& i, lanes who, std::uint32_t pending)
{
    block& b = *w.of;
    std::erase_if(w.copies, [&](flying_copy const& copy) {
        if ((who >> copy.lane & 1) == 0 || copy.group + pending >= w.groups[copy.lane]) { return false; }
        u8* const state = b.state.data() + copy.to;
        if (!copy.arrived) { arrive(b, copy); }
        for (u32 k = 0; k < copy.bytes; ++k) { state[k] = static_cast<u8>((state[k] - flight) | written); }
        place const here{b.shared.data() + copy.to, state, b.cells.data() + copy.to / 4, 0, true};
        note_all(w, i, copy.lane, here, copy.bytes, access::same);
        return true;
    });
}

bool decode_access(std::string const& name, std::vector<std::uint8_t> const& sizes, instruction& i)
{
    if (name == "prefetch.global.L2") { return i.run = prefetch, sizes == std::vector<u8>{8} && i.offset == 0; }
    if (name == "cp.async.commit_group") { return i.run = end_group, true; }
    if (name == "cp.async.wait_group") { return i.run = wait_groups, true; }
    if (name == "cp.async.ca.shared.global" || name == "cp.async.cg.shared.global")
    {
        return i.run = copy_async, sizes == std::vector<u8>{4, 8, 4} && i.offset == 0;
    }
    i.wide = sizes.size() > i.address && sizes[i.address] == 8;
    if (name.starts_with("ldmatrix.sync.aligned.m8n8.x4"))
    {
        i.run = name.find(".trans") != name.npos ? load_matrices<true> : load_matrices<false>;
        i.how = flow::whole_warp;
        return true;
    }
    std::string const kind = name.substr(0, name.find('.'));
    if (kind != "ld" && kind != "st" && kind != "atom") { return false; }
    std::string rest = name.substr(kind.size());
    auto const has   = [&](char const* word) {
        std::size_t const at = rest.find(word);
        if (at == rest.npos) { return false; }
        rest.erase(at, std::strlen(word));
        return true;
    };
    static_cast<void>(has(".volatile"));
    i.where = has(".global")   ? space::global
              : has(".shared") ? space::shared
              : has(".local")  ? space::local
                               : space::generic; // parameters, too
    static_cast<void>(has(".param"));
    static_cast<void>(has(".nc"));
    i.elements = has(".v2") ? 2 : has(".v4") ? 4 : 1;
    if (kind == "atom")
    {
        i.run = atomic_named(rest.substr(1));
        return i.run != nullptr;
    }
    bool const is_load     = kind == "ld";
    u8 const size          = sizes[is_load ? 0 : 1];
    std::string const type = rest.size() > 1 ? rest.substr(2) : "";
    bool const is_signed   = rest.size() > 1 && rest[1] == 's';
    if (sizes.size() != i.elements + 1U) { return false; }
    if (type == "8") { i.run = !is_load ? stores<u8>(size) : is_signed ? loads<std::int8_t>(size) : loads<u8>(size); }
    else if (type == "16")
    {
        i.run = !is_load    ? stores<std::uint16_t>(size)
                : is_signed ? loads<std::int16_t>(size)
                            : loads<std::uint16_t>(size);
    }
    else if (type == "32")
    {
        i.run = !is_load ? stores<u32>(size) : is_signed ? loads<std::int32_t>(size) : loads<u32>(size);
    }
    else if (type == "64") { i.run = is_load ? loads<u64>(size) : stores<u64>(size); }
    return i.run != nullptr;
}

} // namespace ptx
