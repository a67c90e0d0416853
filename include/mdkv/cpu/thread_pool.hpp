/// \file thread_pool.hpp: an executor over std::thread, for callers that have no threads of their own to lend.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/width.hpp>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace mdkv::cpu::inline MDKV_CPU_WIDTH
{

/// A fixed set of threads that share one loop at a time. The calling thread works too, so `thread_pool{2}` starts one.
/// Loops started from several threads at once take turns; a loop started inside a loop's task would wait for itself.
class thread_pool
{
public:
    /// \throws invalid_argument if threads < 1, std::system_error if a thread cannot be started
    explicit thread_pool(int threads)
    {
        expects(threads >= 1, "thread_pool: threads must be at least 1, got ", threads);
        try
        {
            workers_.reserve(static_cast<std::size_t>(threads - 1));
            for (int t = 1; t < threads; ++t)
            {
                workers_.emplace_back([this] { serve(); });
            }
        }
        catch (...)
        {
            stop();
            throw;
        }
    }

    ~thread_pool() { stop(); }
    thread_pool(thread_pool const&)            = delete;
    thread_pool& operator=(thread_pool const&) = delete;

    [[nodiscard]] int threads() const noexcept { return static_cast<int>(workers_.size()) + 1; }

    void parallel_for(index_t count, executor_ref::task_function task, void* context)
    {
        std::lock_guard const one_loop_at_a_time{turn_};
        {
            std::lock_guard const lock{mutex_};
            task_    = task;
            context_ = context;
            count_   = count;
            next_.store(0, std::memory_order_relaxed);
            busy_    = static_cast<int>(workers_.size());
            failure_ = nullptr;
            ++generation_;
        }
        wake_.notify_all();
        drain();
        std::unique_lock lock{mutex_};
        done_.wait(lock, [this] { return busy_ == 0; });
        if (failure_) { std::rethrow_exception(failure_); }
    }

private:
    void drain() noexcept
    {
        for (index_t i = next_.fetch_add(1, std::memory_order_relaxed); i < count_;
             i         = next_.fetch_add(1, std::memory_order_relaxed))
        {
            try
            {
                task_(context_, i);
            }
            catch (...)
            {
                std::lock_guard const lock{mutex_};
                if (!failure_) { failure_ = std::current_exception(); }
                next_.store(count_, std::memory_order_relaxed);
            }
        }
    }

    void serve()
    {
        std::uint64_t seen = 0;
        std::unique_lock lock{mutex_};
        while (true)
        {
            wake_.wait(lock, [&] { return stopping_ || generation_ != seen; });
            if (stopping_) { return; }
            seen = generation_;
            lock.unlock();
            drain();
            lock.lock();
            if (--busy_ == 0) { done_.notify_one(); }
        }
    }

    void stop() noexcept
    {
        {
            std::lock_guard const lock{mutex_};
            stopping_ = true;
        }
        wake_.notify_all();
        for (std::thread& worker : workers_) { worker.join(); }
    }

    std::vector<std::thread> workers_;
    std::mutex turn_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::condition_variable done_;
    executor_ref::task_function task_{};
    void* context_{};
    index_t count_{};
    std::atomic<index_t> next_{};
    int busy_{};
    std::uint64_t generation_{};
    bool stopping_{};
    std::exception_ptr failure_;
};

} // namespace mdkv::cpu::inline MDKV_CPU_WIDTH
