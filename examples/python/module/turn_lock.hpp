/// \file turn_lock.hpp: a lock that a forked process cannot wait for in vain
#pragma once

#include <mdkv/core/error.hpp>

#include <atomic>
#include <thread>

#include <unistd.h>

namespace mdkv_python
{

/// Taken by one thread at a time, as often as it likes, as std::recursive_mutex is. The thread that has it does not exist in a
/// child process that another thread forks meanwhile: there `lock` throws instead of waiting for ever.
class turn_lock
{
public:
    /// \throws mdkv::error   the process was forked during a call of another thread
    void lock()
    {
        int const here = ::getpid();
        if (process_ == here && thread_ == std::this_thread::get_id())
        {
            again_ += 1;
            return;
        }
        for (int held = 0; !process_.compare_exchange_strong(held, here); held = 0)
        {
            mdkv::expects<mdkv::error>(held == here,
                "Backend: this process was forked while another thread was in a "
                "call on it; make a Backend here, and prompts and layers on it, or "
                "fork between calls");
            process_.wait(held);
        }
        thread_ = std::this_thread::get_id();
    }
    void unlock() noexcept
    {
        if (again_ > 0)
        {
            again_ -= 1;
            return;
        }
        thread_  = std::thread::id{};
        process_ = 0;
        process_.notify_one();
    }

private:
    std::atomic<int> process_{0}; // that has the turn, or 0: one number, which no fork finds half changed
    std::atomic<std::thread::id> thread_{};
    int again_ = 0;
};

} // namespace mdkv_python
