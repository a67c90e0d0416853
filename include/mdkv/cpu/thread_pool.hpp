/// \file thread_pool.hpp: an executor over std::thread, for callers that have no threads of their own to lend.
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/cpu/executor.hpp>

#include <atomic>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include <time.h> // <chrono> costs who includes this header 0.07 s of compile time
#include <unistd.h>

namespace MDKV_NAMESPACE::cpu
{

/// A fixed set of threads that share one loop at a time. The calling thread works too, so `thread_pool{2}` starts one. A loop
/// never waits for a thread that has not begun to work on it: on a busy machine the others do the work.
/// Loops started from several threads at once take turns; a loop started inside a loop's task would wait for itself.
/// A process may fork while no loop runs: the child's pool starts threads of its own with its first loop.
class thread_pool
{
public:
    /// \throws invalid_argument if threads < 1, std::system_error if a thread cannot be started
    explicit thread_pool(int threads)
        : thread_pool{} // from here on the destructor ends the threads that run, even if the next cannot be started
    {
        expects(threads >= 1, "thread_pool: threads must be at least 1, got ", threads);
        start_workers(static_cast<std::size_t>(threads) - 1);
    }

    ~thread_pool()
    {
        if (forked()) { forget_workers(); }
        task_ = nullptr;
        start_loop();
        for (std::thread& worker : workers_) { worker.join(); }
    }
    thread_pool(thread_pool const&)            = delete;
    thread_pool& operator=(thread_pool const&) = delete;

    [[nodiscard]] int threads() const noexcept { return static_cast<int>(workers_.size()) + 1; }

    void parallel_for(index_t count, executor_ref::task_function task, void* context)
    {
        std::lock_guard const one_loop_at_a_time{turn_};
        if (forked())
        {
            std::size_t const workers = workers_.size();
            forget_workers();
            start_workers(workers);
        }
        task_    = task;
        context_ = context;
        count_   = count;
        next_    = 0;
        start_loop();
        drain();
        if (!leave())
        {
            spin([&] { return ended_ == loop_; });
            for (unsigned ended = ended_; ended != loop_; ended = ended_) { ended_.wait(ended); }
        }
        if (failure_) { std::rethrow_exception(std::exchange(failure_, nullptr)); }
    }

private:
    thread_pool() = default;

    void start_workers(std::size_t count)
    {
        while (workers_.size() < count)
        {
            workers_.emplace_back([this] { serve(); });
        }
    }

    [[nodiscard]] bool forked() const noexcept { return process_ != ::getpid(); }

    /// In a child there is only the thread that called fork. The objects that name the other threads are overwritten:
    /// joining these threads would wait for ever, and detaching them could meet a new thread of the same name.
    void forget_workers() noexcept
    {
        for (std::thread& worker : workers_) { ::new (static_cast<void*>(&worker)) std::thread{}; }
        workers_.clear();
        process_ = ::getpid();
        loop_    = 0;
    }

    void start_loop() noexcept
    {
        unsigned const before = loop_;
        ended_                = before;
        inside_               = (std::uint64_t{before + 1} << 32U) + 1; // the calling thread
        loop_                 = before + 1;
        loop_.notify_all();
    }

    /// Counts a worker in, unless the loop has ended or another one has begun.
    [[nodiscard]] bool enter(unsigned loop) noexcept
    {
        std::uint64_t now = inside_;
        while (now >> 32U == loop && static_cast<std::uint32_t>(now) != 0)
        {
            if (inside_.compare_exchange_weak(now, now + 1)) { return true; }
        }
        return false;
    }

    /// Counts a thread out. True for the last one: nobody can enter any more.
    [[nodiscard]] bool leave() noexcept { return static_cast<std::uint32_t>(--inside_) == 0; }

    /// Waits ten microseconds before the thread sleeps: waking it takes longer than many a loop. The time is read, because
    /// one pause takes from 10 to 140 cycles, by processor.
    static void spin(auto const& done) noexcept
    {
        auto const nanoseconds = [] {
            ::timespec now{};
            ::clock_gettime(CLOCK_MONOTONIC, &now);
            return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
        };
        std::int64_t const end = nanoseconds() + 10'000;
        do {
            for (int i = 0; i < 16; ++i)
            {
                if (done()) { return; }
#if defined(__SSE2__)
                __builtin_ia32_pause();
#elif defined(__aarch64__)
                asm volatile("isb"); // yield is no wait on most processors
#endif
            }
        } while (nanoseconds() < end);
    }

    void drain() noexcept
    {
        for (index_t i = 0; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;)
        {
#if !defined(__cpp_exceptions)
            task_(context_, i);
#else
            try
            {
                task_(context_, i);
            }
            catch (...)
            {
                std::lock_guard const lock{failing_};
                if (!failure_) { failure_ = std::current_exception(); }
                next_ = count_;
            }
#endif
        }
    }

    /// A worker takes part in a loop if it wakes before the loop's work is done.
    void serve() noexcept
    {
        for (unsigned seen = 0;;)
        {
            spin([&] { return loop_ != seen; });
            loop_.wait(seen);
            seen = loop_;
            if (!enter(seen)) { continue; }
            if (task_ == nullptr) { return; }
            drain();
            if (leave())
            {
                ended_ = seen;
                ended_.notify_one();
            }
        }
    }

    ::pid_t process_ = ::getpid();
    std::vector<std::thread> workers_;
    std::mutex turn_;
    std::mutex failing_;
    std::exception_ptr failure_;
    executor_ref::task_function task_{};
    void* context_{};
    index_t count_{};
    std::atomic<index_t> next_{};
    std::atomic<unsigned> loop_{};        // number of loops begun
    std::atomic<unsigned> ended_{};       // number of the last loop whose caller was not the last to leave
    std::atomic<std::uint64_t> inside_{}; // high half: number of the loop; low half: threads that work on it
};

} // namespace MDKV_NAMESPACE::cpu
