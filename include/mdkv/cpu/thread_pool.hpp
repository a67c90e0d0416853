/// \file thread_pool.hpp: an executor over std::thread, for callers that have no threads of their own to lend.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>

#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace mdkv::inline MDKV_MACHINE::cpu
{

/// A fixed set of threads that share one loop at a time. The calling thread works too, so `thread_pool{2}` starts one.
/// Loops started from several threads at once take turns; a loop started inside a loop's task would wait for itself.
class thread_pool
{
public:
    /// \throws invalid_argument if threads < 1, std::system_error if a thread cannot be started
    explicit thread_pool(int threads)
        : thread_pool{} // from here on the destructor ends the threads that run, also where the next cannot be started
    {
        expects(threads >= 1, "thread_pool: threads must be at least 1, got ", threads);
        while (this->threads() < threads)
        {
            workers_.emplace_back([this] { serve(); });
        }
    }

    ~thread_pool()
    {
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
        task_    = task;
        context_ = context;
        count_   = count;
        next_    = 0;
        busy_    = threads() - 1;
        start_loop();
        drain();
        spin([&] { return busy_ == 0; });
        for (int busy = busy_; busy != 0; busy = busy_) { busy_.wait(busy); }
        if (failure_) { std::rethrow_exception(std::exchange(failure_, nullptr)); }
    }

private:
    thread_pool() = default;

    void start_loop() noexcept
    {
        ++loop_;
        loop_.notify_all();
    }

    /// Waits some ten microseconds before the thread sleeps: to wake it takes longer than many a loop.
    template <class Done>
    static void spin(Done const& done) noexcept
    {
        for (int i = 0; i < 2000 && !done(); ++i)
        {
#if defined(__SSE2__)
            __builtin_ia32_pause();
#endif
        }
    }

    void drain() noexcept
    {
        for (index_t i = 0; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;)
        {
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
        }
    }

    /// A worker takes part in every loop: the next one begins when none is busy any more.
    void serve() noexcept
    {
        for (unsigned seen = 0;; ++seen)
        {
            spin([&] { return loop_ != seen; });
            loop_.wait(seen);
            if (task_ == nullptr) { return; }
            drain();
            if (--busy_ == 0) { busy_.notify_one(); }
        }
    }

    std::vector<std::thread> workers_;
    std::mutex turn_;
    std::mutex failing_;
    std::exception_ptr failure_;
    executor_ref::task_function task_{};
    void* context_{};
    index_t count_{};
    std::atomic<index_t> next_{};
    std::atomic<int> busy_{};
    std::atomic<unsigned> loop_{}; // number of loops begun
};

} // namespace mdkv::inline MDKV_MACHINE::cpu
