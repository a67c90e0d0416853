// The costs of instructions and of memory on an H200, as far as they are known, and a clock for each warp that adds them up.
#include "clock.hpp"

#include "machine.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <queue>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace ptx
{

namespace
{

using u32 = std::uint32_t;
using u64 = std::uint64_t;

enum class kind : std::uint8_t
{
    compute,
    rename, ///< costs nothing: ptxas makes an operand of it
    load,
    store,
    atomic,
    copy,
    prefetch,
    end_group,
    wait_group
};

/// By how an instruction's name begins: after how many cycles its result is there, and how many slots of its scheduler it takes.
struct cost
{
    std::string_view name;
    kind does;
    int latency, slots;
};

// Latencies of shared memory, caches, shuffles and products of tiles are those of a simulator over machine code that came
// within nine percent of four times measured on an H200. DRAM answers after 600 to 850 cycles. The other numbers are estimates:
// divisions, roots, slots, the price of a fetch, and up to where a branch becomes predicates.
constexpr double dram = 800, l2 = 270, l1 = 41;
constexpr double barrier = 28, jump = 9;
constexpr u32 predicated         = 12;               // instructions behind a branch that ptxas makes predicated ones
constexpr double fetch           = 25;               // of eight instructions that a warp has not come by before
constexpr double memory_rate     = 4.3e12 / 1.755e9; // bytes a cycle, measured for large caches
constexpr double most_rate       = 64;               // of a multiprocessor
constexpr u32 multiprocessors    = 132;
constexpr u32 schedulers         = 4;
constexpr std::size_t all_shared = 228 * 1024,
                      own_shared = 1024; // of a multiprocessor; what a block takes besides its own
constexpr u64 line_bytes         = 128;
constexpr std::array costs{cost{"mov.", kind::rename, 0, 0}, cost{"cvta.", kind::rename, 0, 0},
    cost{"ld.param", kind::rename, 0, 0}, cost{"ld.shared", kind::compute, 29, 1},
    cost{"ld.volatile.shared", kind::compute, 29, 1}, cost{"ldmatrix.", kind::compute, 33, 4},
    cost{"ld.local", kind::compute, 41, 1}, cost{"ld.", kind::load, 0, 1}, cost{"st.", kind::store, 0, 1},
    cost{"atom.shared", kind::compute, 60, 2}, cost{"atom.", kind::atomic, 700, 1},
    cost{"cp.async.commit", kind::end_group, 0, 1}, cost{"cp.async.wait", kind::wait_group, 0, 1},
    cost{"cp.async.", kind::copy, 0, 1}, cost{"prefetch.", kind::prefetch, 0, 1}, cost{"mma.", kind::compute, 33, 4},
    cost{"movmatrix.", kind::compute, 33, 2}, cost{"shfl.", kind::compute, 24, 2}, cost{"vote.", kind::compute, 12, 1},
    cost{"ex2.", kind::compute, 24, 2}, cost{"rcp.", kind::compute, 40, 4}, cost{"sqrt.", kind::compute, 60, 8},
    cost{"div.rn.f", kind::compute, 60, 12}, cost{"div.s64", kind::compute, 500, 100},
    cost{"div.u64", kind::compute, 500, 100}, cost{"rem.s64", kind::compute, 500, 100},
    cost{"rem.u64", kind::compute, 500, 100}, cost{"div.", kind::compute, 90, 20}, cost{"rem.", kind::compute, 90, 20},
    cost{"cvt.rz", kind::compute, 24, 2}, cost{"cvt.rn.f32.s", kind::compute, 24, 2}};

/// An instruction as the clock sees it.
struct timing
{
    cost of{};
    bool begins          = false; ///< a basic block: no instruction of before comes after
    bool skips           = false; ///< a branch over so few instructions that they become predicated
    std::uint8_t results = 0, first_source = 0, operands = 0;
    std::array<u32, most_operands> registers{};
    u32 guard = 0; ///< register 0 is always ready
};

struct kernel_timing
{
    std::vector<timing> code;
    u32 registers = 1;
};

[[nodiscard]] kernel_timing timing_of(module const& m, kernel const& k)
{
    kernel_timing made;
    std::unordered_map<u32, u32> numbers;
    auto const number = [&](u32 place) {
        auto const [found, is_new] = numbers.insert({place, made.registers});
        made.registers += is_new ? 1 : 0;
        return found->second;
    };
    for (instruction const& i : k.code)
    {
        std::string text = m.statement(i);
        if (text.starts_with("@")) { text.erase(0, text.find_first_not_of(" ", text.find_first_of(" "))); }
        std::string const name = text.substr(0, text.find_first_of(" "));
        std::size_t const open = text.find_first_not_of(" ", name.size());
        auto const is          = [&](char const* begin) { return name.starts_with(begin); };
        timing t;
        bool const wide = name.ends_with("64");
        t.of            = {"", kind::compute, wide ? 8 : 4, wide ? 2 : 1};
        auto const known =
            std::find_if(costs.begin(), costs.end(), [&](cost const& c) { return name.starts_with(c.name); });
        if (known != costs.end()) { t.of = *known; }
        t.operands         = i.operands;
        bool const carries = name.find(".cc") != name.npos || is("addc") || is("subc") || is("madc");
        bool const nothing = i.run == nullptr || is("st.") || is("cp.") || is("prefetch.") || is("bar.");
        t.results          = static_cast<std::uint8_t>(nothing                                  ? 0
                                                       : is("ld.")                              ? i.operands - 1
                                                       : is("ldmatrix.") || is("mma.")          ? 4
                                                       : is("shfl.") || carries                 ? 2
                                                       : open != text.npos && text[open] == '{' ? i.operands - 1
                                                                                                : 1);
        t.first_source     = carries ? 1 : t.results;
        for (std::size_t n = 0; n < i.operands; ++n) { t.registers[n] = number(i.at[n]); }
        if (i.guard != nowhere) { t.guard = number(i.guard); }
        made.code.push_back(t);
    }
    // Which basic blocks ptxas keeps: those that some jump reaches which is not made predicates.
    std::vector<bool> kept(made.code.size());
    for (u32 n = 0; n < made.code.size(); ++n)
    {
        if (k.code[n].how != flow::branch) { continue; }
        u32 const target = k.code[n].target;
        bool const few   = k.code[n].guard != nowhere && target > n && target - n <= predicated;
        timing& t        = made.code[n];
        t.skips = few && std::all_of(k.code.begin() + n + 1, k.code.begin() + target, [](instruction const& i) {
            return i.how == flow::next;
        });
        if (!t.skips) { kept[target] = kept[std::min<std::size_t>(n + 1, kept.size() - 1)] = true; }
    }
    for (u32 n = 0; n < made.code.size(); ++n) { made.code[n].begins = kept[n]; }
    return made;
}

/// When a register's value is there, and after how many loads that waited for one another.
struct value
{
    double ready = 0;
    int chain    = 0;
};

struct warp_time
{
    double now = 0, last = 0; ///< of the next instruction; of the last one that has begun, which may have waited
    int chain = 0, last_chain = 0;
    double slots  = 0; ///< since the last barrier
    double copied = 0, memory_free = 0;
    u64 instructions = 0;
    u32 until        = 0; ///< where instructions end that are predicated by
    u32 predicate    = 0;
    std::vector<value> registers;
    std::vector<double> groups;
    std::vector<bool> fetched;

    void catch_up(value const& to)
    {
        now   = std::max(now, to.ready);
        chain = std::max(chain, to.chain);
    }
    void catch_up() { catch_up({last, last_chain}); }
};

/// When a line is in the L2 cache.
struct line
{
    u32 launch  = 0;
    double time = 0;
};

} // namespace

/// A clock a warp. Within a basic block an instruction waits for its operands and for nothing else, because ptxas moves loads
/// forward; stores keep their order, and at the block's end the warp has waited for all that it has begun. At a barrier the
/// warps have the time of the last, or that of the scheduler that has most to issue for all resident blocks.
class stopwatch : public watcher
{
public:
    explicit stopwatch(u32 resident)
        : most_resident_{resident}
    {}

    std::vector<launch_time> launches;

    void begin(launch const& l) override
    {
        launch_time t;
        t.name = short_name(l.what->name);
        t.name.resize(std::min(t.name.size(), t.name.find('<')));
        t.blocks = l.blocks, t.threads = l.threads;
        launches.push_back(t);
        auto& known = kernels_[l.what];
        if (known.code.empty()) { known = timing_of(*l.code, *l.what); }
        kernel_          = &known;
        auto const fit   = static_cast<u32>(all_shared / (l.dynamic_shared + l.what->static_shared + own_shared));
        room_            = std::max<u32>(1, std::min({most_resident_, fit, 2048 / l.threads}));
        resident_        = std::min(room_, (l.blocks + multiprocessors - 1) / multiprocessors);
        double const all = std::min<double>(l.blocks, multiprocessors * room_);
        rate_            = std::min(memory_rate / all, most_rate / resident_) / (l.threads / warp_size);
        ends_.clear();
        ++launch_;
    }

    void begin(block const& b) override
    {
        warps_.assign(b.warps.size(), {});
        for (warp_time& t : warps_)
        {
            t.registers.assign(kernel_->registers, {});
            t.fetched.assign(kernel_->code.size() / 8 + 1, false);
        }
        mine_.clear();
        touched_.assign(kernel_->code.size(), false);
        phase_begin_ = 0;
        barriers_    = 0;
        first_copy_  = -1;
    }

    void step(warp& w, u32 at, lanes on) override
    {
        timing const& i      = kernel_->code[at];
        instruction const& p = w.of->of->what->code[at];
        warp_time& t         = warps_[static_cast<std::size_t>(w.number)];
        if (i.begins) { t.catch_up(); }
        ++t.instructions;
        touched_[at] = true;
        value from{0, t.chain};
        auto const add = [&](u32 which) {
            from.ready = std::max(from.ready, t.registers[which].ready);
            from.chain = std::max(from.chain, t.registers[which].chain);
        };
        add(i.guard);
        if (at < t.until) { add(t.predicate); }
        else { t.until = 0; }
        if (on != 0 || i.of.does == kind::rename)
        {
            for (std::size_t n = i.first_source; n < i.operands; ++n) { add(i.registers[n]); }
        }
        auto const give = [&](value const& result) {
            for (std::size_t n = 0; n < i.results; ++n)
            {
                value& to = t.registers[i.registers[n]];
                if (on == ~lanes{0}) { to = result; }
                else // the other lanes keep theirs
                {
                    to.ready = std::max(to.ready, result.ready);
                    to.chain = std::max(to.chain, result.chain);
                }
            }
        };
        if (i.of.does == kind::rename) { return give(from); }
        if (!t.fetched[at / 8])
        {
            t.fetched[at / 8] = true;
            t.now += fetch;
        }
        from.ready = std::max(from.ready, t.now);
        t.now += i.of.slots;
        t.slots += i.of.slots;
        t.last       = std::max(t.last, from.ready + i.of.slots);
        t.last_chain = std::max(t.last_chain, from.chain);
        if (i.skips) { t.until = p.target, t.predicate = i.guard; }
        else if (p.how == flow::branch)
        {
            t.catch_up();
            if (on != 0) { t.now += jump; }
        }
        if (on == 0) { return; }
        switch (i.of.does)
        {
            case kind::load:
            case kind::atomic:
            {
                bool global        = false;
                double const there = arrival(t, w, p, on, from.ready, p.address, global, i.of.does);
                give({std::max(there, from.ready + i.of.latency), from.chain + (global ? 1 : 0)});
                break;
            }
            case kind::copy:
            {
                t.catch_up(from);
                bool global = false;
                t.copied    = std::max(t.copied, arrival(t, w, p, on, from.ready, 1, global, i.of.does));
                first_copy_ = first_copy_ < 0 ? from.ready : std::min(first_copy_, from.ready);
                break;
            }
            case kind::prefetch:
            {
                t.catch_up(from);
                bool global = false;
                static_cast<void>(arrival(t, w, p, on, from.ready, 0, global, i.of.does));
                first_copy_ = first_copy_ < 0 ? from.ready : std::min(first_copy_, from.ready);
                break;
            }
            case kind::store:
                t.catch_up(from);
                each_line(w, p, on, p.address, [&](u64 at_line) { lines_[at_line] = {launch_, from.ready}; });
                break;
            case kind::end_group:
                if ((on & 1) != 0) { t.groups.push_back(std::exchange(t.copied, 0)); }
                break;
            case kind::wait_group:
            {
                std::size_t const left = words<u32>(w, p.at[0])[0];
                while (t.groups.size() > left)
                {
                    t.now = std::max(t.now, t.groups.front());
                    t.groups.erase(t.groups.begin());
                }
                break;
            }
            default:
                give({from.ready + i.of.latency, from.chain});
        }
    }

    void meet(block const&) override
    {
        ++barriers_;
        join(barrier);
    }

    void end(block const& b) override
    {
        launch_time& l = launches.back();
        double const t = join(0);
        ends_.push_back(t);
        l.block_cycles = std::max(l.block_cycles, t);
        l.before_copy  = std::max(l.before_copy, first_copy_);
        l.barriers     = std::max(l.barriers, barriers_);
        l.code = std::max<u64>(l.code, 16 * static_cast<u64>(std::count(touched_.begin(), touched_.end(), true)));
        for (warp_time const& w : warps_)
        {
            l.chain        = std::max(l.chain, w.chain);
            l.instructions = std::max(l.instructions, w.instructions);
        }
        if (ends_.size() < b.of->blocks) { return; }
        std::priority_queue<double, std::vector<double>, std::greater<>> places; // when each is free
        for (u32 n = 0; n < multiprocessors * room_; ++n) { places.push(0); }
        for (double const one : ends_)
        {
            double const ended = places.top() + one;
            places.pop();
            places.push(ended);
            l.cycles = std::max(l.cycles, ended);
        }
        l.memory_cycles = static_cast<double>(l.bytes) / memory_rate;
    }

private:
    /// Calls body(line) for the lines of global memory that some lanes access.
    template <class Body>
    void each_line(warp& w, instruction const& p, lanes on, std::size_t operand, Body const& body)
    {
        u64 before = 0;
        for_lanes(on, [&](int lane) {
            u64 const a = (p.wide ? words<u64>(w, p.at[operand])[lane] : words<u32>(w, p.at[operand])[lane])
                          + static_cast<u64>(p.offset);
            if (p.where == space::shared || p.where == space::local || !the_device().has(a)) { return; }
            if (a / line_bytes != before) { body(before = a / line_bytes); }
        });
    }

    /// When the last byte of an access is there. Afterwards its lines are in the block's L1 cache, but for a prefetch.
    double arrival(
        warp_time& t, warp& w, instruction const& p, lanes on, double now, std::size_t operand, bool& global, kind does)
    {
        double all = now + l1;
        each_line(w, p, on, operand, [&](u64 at) {
            if (does == kind::prefetch ? mine_.contains(at) : !mine_.insert(at).second) { return; }
            global       = true;
            line& known  = lines_[at];
            double there = now + l2;
            if (known.launch == 0 || known.launch == launch_) // others of this launch ask at the same time
            {
                // A warp has its share of the memory's rate, but what it loads into registers is little, and others' too.
                double const begin = does == kind::load ? now : std::max(t.memory_free, now);
                double const fresh = begin + dram;
                if (known.launch == 0) // DRAM is asked once
                {
                    launches.back().bytes += line_bytes;
                    t.memory_free = begin + line_bytes / rate_;
                }
                there = known.launch == 0 ? fresh : std::min(fresh, std::max(there, known.time));
                known = {launch_, known.launch == 0 ? fresh : std::min(fresh, known.time)};
            }
            all = std::max(all, there);
        });
        return all;
    }

    /// All warps at the time of the last.
    double join(double more)
    {
        double time = 0;
        int chain   = 0;
        std::array<double, schedulers> slots{};
        for (std::size_t n = 0; n < warps_.size(); ++n)
        {
            warp_time& w = warps_[n];
            w.catch_up();
            time  = std::max(time, w.now);
            chain = std::max(chain, w.chain);
            slots[n % schedulers] += w.slots * resident_;
        }
        time         = std::max(time, phase_begin_ + *std::max_element(slots.begin(), slots.end())) + more;
        phase_begin_ = time;
        for (warp_time& w : warps_) { w.now = w.last = time, w.chain = w.last_chain = chain, w.slots = 0; }
        return time;
    }

    u32 most_resident_, room_ = 1, resident_ = 1, launch_ = 0;
    double rate_ = 1, phase_begin_ = 0, first_copy_ = -1;
    int barriers_ = 0;
    std::unordered_map<kernel const*, kernel_timing> kernels_;
    kernel_timing const* kernel_ = nullptr;
    std::vector<warp_time> warps_;
    std::unordered_map<u64, line> lines_;
    std::unordered_set<u64> mine_; ///< lines that the block has in its L1 cache
    std::vector<bool> touched_;
    std::vector<double> ends_;
};

clock::clock(u32 resident)
    : own_{std::make_unique<stopwatch>(resident)}
{
    watching = own_.get();
}
clock::~clock()
{
    watching = nullptr;
}
std::vector<launch_time> const& clock::launches() const
{
    return own_->launches;
}

} // namespace ptx
