#include <emulation/machine.hpp>

#include <boost/context/fiber.hpp>
#include <boost/context/fixedsize_stack.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <utility>

namespace emulation
{

namespace
{

namespace context = boost::context;

constexpr int warp_size                 = 32;
constexpr std::size_t stack_bytes       = std::size_t{192} << 10; // frames are larger under sanitizers
constexpr std::uint32_t poison          = 0x7fc0dead;             // a NaN in float, half and bfloat16 alike
constexpr mdkv::index_t shared_boundary = 16;

enum class waiting : std::uint8_t
{
    no,
    for_block,
    for_warp,
    done
};

struct pending_copy
{
    void* to;
    void const* from; // null if it has arrived
    std::size_t bytes;
    int group;
};

struct fiber_thread
{
    thread_state state{};
    waiting wait         = waiting::no;
    char const* function = nullptr; // of the warp, that it waits in
    unsigned exchanges   = 0;
    int copy_group       = 0;
    std::vector<pending_copy> copies;
    context::fiber fiber;
    std::exception_ptr error;
};

/// MDKV_EMULATION_ORDER of the environment.
order first_order()
{
    char const* const text = std::getenv("MDKV_EMULATION_ORDER");
    std::string const name{text == nullptr ? "ascending" : text};
    if (name == "ascending") { return order::ascending; }
    if (name == "descending") { return order::descending; }
    if (name == "shuffled") { return order::shuffled; }
    throw std::logic_error{"MDKV_EMULATION_ORDER is " + name + "; it must be ascending, descending or shuffled"};
}

struct machine
{
    order which = first_order();
    counts seen;

    machine()                          = default;
    machine(machine const&)            = delete;
    machine& operator=(machine const&) = delete;
    /// What ran without a GPU is said by name, so that what did not is seen.
    ~machine()
    {
        std::printf("emulated GPU: %llu launches, %llu blocks, %llu changes of thread; kernels:",
            static_cast<unsigned long long>(seen.kernels), static_cast<unsigned long long>(seen.blocks),
            static_cast<unsigned long long>(seen.switches));
        for (std::string const& name : names) { std::printf(" %s", name.c_str()); }
        std::printf("\n");
    }
    std::set<std::string> names;
    std::mt19937 random{20260320}; // NOLINT: orders must be the same in every run

    std::vector<std::unique_ptr<fiber_thread>> threads; // reused by all blocks
    fiber_thread* running = nullptr;
    context::fiber scheduler; // where `running` goes when it waits
    std::function<void()> const* body = nullptr;
    std::vector<std::byte> slots; // [warps][2][32][most_exchanged]

    [[noreturn]] void fail(grid const& g, fiber_thread const& t, std::string const& what) const
    {
        throw std::logic_error{std::string{g.name} + ", block " + std::to_string(t.state.block->number) + ", thread "
                               + std::to_string(t.state.index) + ": " + what};
    }

    void make_threads(int count)
    {
        while (threads.size() < static_cast<std::size_t>(count))
        {
            threads.push_back(std::make_unique<fiber_thread>());
            fiber_thread* const t = threads.back().get();
            t->state.index        = static_cast<int>(threads.size()) - 1;
            t->fiber              = context::fiber{
                std::allocator_arg, context::fixedsize_stack{stack_bytes}, [this, t](context::fiber&& back) {
                    scheduler = std::move(back);
                    for (;;)
                    {
                        try
                        {
                            (*body)();
                        }
                        catch (context::detail::forced_unwind const&)
                        {
                            throw;
                        }
                        catch (...)
                        {
                            t->error = std::current_exception();
                        }
                        t->wait   = waiting::done;
                        scheduler = std::move(scheduler).resume();
                    }
                    return std::move(scheduler);
                }};
        }
    }

    void resume(fiber_thread& t)
    {
        ++seen.switches;
        running = &t;
        t.fiber = std::move(t.fiber).resume();
        running = nullptr;
        if (t.error)
        {
            auto const error = std::exchange(t.error, nullptr);
            std::rethrow_exception(error);
        }
    }

    /// Called by the running thread.
    void suspend(waiting why, char const* function)
    {
        running->wait     = why;
        running->function = function;
        scheduler         = std::move(scheduler).resume();
    }

    /// Runs a warp until all its lanes wait for the block or are done.
    void run_warp(grid const& g, int warp, std::vector<int>& lanes)
    {
        for (;;)
        {
            arrange(lanes);
            for (int const lane : lanes)
            {
                fiber_thread& t = *threads[static_cast<std::size_t>(warp * warp_size + lane)];
                if (t.wait == waiting::no) { resume(t); }
            }
            int in_warp             = 0;
            fiber_thread* first     = nullptr;
            fiber_thread* elsewhere = nullptr;
            for (int const lane : lanes)
            {
                fiber_thread& t = *threads[static_cast<std::size_t>(warp * warp_size + lane)];
                if (t.wait != waiting::for_warp)
                {
                    elsewhere = &t;
                    continue;
                }
                ++in_warp;
                if (first != nullptr && std::strcmp(first->function, t.function) != 0)
                {
                    fail(g, t,
                        std::string{"is in "} + t.function + " while thread " + std::to_string(first->state.index)
                            + " of its warp is in " + first->function);
                }
                first = &t;
            }
            if (in_warp == 0) { return; }
            if (elsewhere != nullptr)
            {
                fail(g, *first,
                    std::string{"waits in "} + first->function + "; thread " + std::to_string(elsewhere->state.index)
                        + " of its warp " + (elsewhere->wait == waiting::done ? "has ended" : "waits for the block"));
            }
            for (int const lane : lanes)
            {
                threads[static_cast<std::size_t>(warp * warp_size + lane)]->wait = waiting::no;
            }
        }
    }

    template <class List>
    void arrange(List& list)
    {
        if (which == order::shuffled) { std::shuffle(list.begin(), list.end(), random); }
    }

    [[nodiscard]] std::vector<int> listed(int count) const
    {
        std::vector<int> list(static_cast<std::size_t>(count));
        std::iota(list.begin(), list.end(), 0);
        if (which == order::descending) { std::reverse(list.begin(), list.end()); }
        return list;
    }

    void run_block(grid const& g, block_state const& block)
    {
        for (int i = 0; i < g.threads; ++i)
        {
            fiber_thread& t = *threads[static_cast<std::size_t>(i)];
            t.state.block   = &block;
            t.wait          = waiting::no;
            t.exchanges     = 0;
            t.copy_group    = 0;
            t.copies.clear();
        }
        std::vector<int> warps = listed(g.threads / warp_size);
        std::vector<int> lanes = listed(warp_size);
        for (;;)
        {
            arrange(warps);
            for (int const w : warps) { run_warp(g, w, lanes); }
            fiber_thread* waits = nullptr;
            fiber_thread* ended = nullptr;
            for (int i = 0; i < g.threads; ++i)
            {
                fiber_thread& t                           = *threads[static_cast<std::size_t>(i)];
                (t.wait == waiting::done ? ended : waits) = &t;
            }
            if (waits == nullptr) { break; }
            if (ended != nullptr)
            {
                fail(g, *waits, "waits for the block; thread " + std::to_string(ended->state.index) + " has ended");
            }
            for (int i = 0; i < g.threads; ++i) { threads[static_cast<std::size_t>(i)]->wait = waiting::no; }
        }
        for (int i = 0; i < g.threads; ++i)
        {
            fiber_thread const& t = *threads[static_cast<std::size_t>(i)];
            if (!t.copies.empty()) { fail(g, t, "ended without waiting for a copy to shared memory"); }
        }
    }
};

machine& the_machine()
{
    static thread_local machine one;
    return one;
}

} // namespace

void use(order which)
{
    the_machine().which = which;
}

counts const& total()
{
    return the_machine().seen;
}

std::vector<std::string> kernel_names()
{
    auto const& names = the_machine().names;
    return {names.begin(), names.end()};
}

thread_state const& current()
{
    return the_machine().running->state;
}

void run(grid const& what, std::function<void()> const& thread)
{
    machine& m = the_machine();
    m.make_threads(what.threads);
    m.body = &thread;
    m.slots.resize(static_cast<std::size_t>(what.threads) * 2 * most_exchanged);
    ++m.seen.kernels;
    m.names.insert(what.name);
    auto const words = static_cast<std::size_t>((what.shared_bytes + 3) / 4);
    std::vector<mdkv::index_t> numbers(static_cast<std::size_t>(what.blocks));
    std::iota(numbers.begin(), numbers.end(), mdkv::index_t{0});
    if (m.which == order::descending) { std::reverse(numbers.begin(), numbers.end()); }
    m.arrange(numbers);
    try
    {
        for (mdkv::index_t const number : numbers)
        {
            ++m.seen.blocks;
            auto const bytes  = static_cast<std::size_t>(what.shared_bytes);
            auto const shared = std::unique_ptr<std::uint32_t[], void (*)(std::uint32_t*)>{
                static_cast<std::uint32_t*>(
                    ::operator new(std::max<std::size_t>(bytes, 4), std::align_val_t{shared_boundary})),
                [](std::uint32_t* p) { ::operator delete(p, std::align_val_t{shared_boundary}); }};
            std::fill_n(shared.get(), words == 0 ? 0 : bytes / 4, poison);
            m.run_block(what, {what.threads, number, what.blocks, reinterpret_cast<std::byte*>(shared.get())});
        }
    }
    catch (...)
    {
        m.threads.clear(); // unwinds what waits inside the kernel
        throw;
    }
}

void wait_for_block()
{
    the_machine().suspend(waiting::for_block, nullptr);
}

void wait_for_warp(char const* function)
{
    the_machine().suspend(waiting::for_warp, function);
}

std::byte const* exchange_bytes(void const* value, std::size_t size, char const* function)
{
    // Two sets of slots in turn: a lane can be at most one exchange ahead of another.
    machine& m             = the_machine();
    fiber_thread& t        = *m.running;
    auto const warp        = static_cast<std::size_t>(t.state.index / warp_size);
    auto const lane        = static_cast<std::size_t>(t.state.index % warp_size);
    std::byte* const slots = m.slots.data() + (warp * 2 + t.exchanges % 2) * warp_size * most_exchanged;
    std::memcpy(slots + lane * most_exchanged, value, size);
    ++t.exchanges;
    wait_for_warp(function);
    return slots;
}

void expect_aligned(void const* address, std::size_t bytes, char const* function)
{
    if (reinterpret_cast<std::uintptr_t>(address) % bytes != 0)
    {
        throw std::logic_error{std::string{function} + ": an address is no multiple of " + std::to_string(bytes)};
    }
}

void begin_copy(void* to, void const* from, std::size_t bytes)
{
    fiber_thread& t = *the_machine().running;
    expect_aligned(to, bytes, "copy_async");
    expect_aligned(from, bytes, "copy_async");
    // A copy may arrive at any time until it is waited for: late ones leave poison until then, early ones are there at once.
    bool const early = the_machine().which == order::descending
                       || (the_machine().which == order::shuffled && the_machine().random() % 2 == 0);
    if (early) { std::memcpy(to, from, bytes); }
    else
    {
        for (std::size_t i = 0; i < bytes; i += sizeof poison)
        {
            std::memcpy(static_cast<std::byte*>(to) + i, &poison, sizeof poison);
        }
    }
    t.copies.push_back({to, early ? nullptr : from, bytes, t.copy_group});
}

void end_copy_group()
{
    ++the_machine().running->copy_group;
}

void finish_copies(int pending)
{
    fiber_thread& t = *the_machine().running;
    std::erase_if(t.copies, [&](pending_copy const& copy) {
        if (copy.group >= t.copy_group - pending) { return false; }
        if (copy.from != nullptr) { std::memcpy(copy.to, copy.from, copy.bytes); }
        return true;
    });
}

} // namespace emulation
