#include <mdkv/cpu/thread_pool.hpp>

#include "support/host.hpp"

#include <mdkv/cpu/executor.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <csignal>
#include <cstddef>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

namespace
{

using namespace mdkv;

/// What a child process returns of the call; -1 where it does not end within 20 seconds.
template <class Call>
int in_a_child(Call const& call)
{
    pid_t const child = fork();
    if (child == 0)
    {
        alarm(20);
        _exit(call());
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

std::atomic<bool> held;
std::atomic<bool> let_go;

/// A signal's handler: keeps its thread from all other work until `let_go`.
void hold(int)
{
    held = true;
    while (!let_go) {}
}

int sum_of(cpu::thread_pool& pool, index_t count)
{
    std::atomic<int> sum{0};
    cpu::executor_ref{pool}.parallel_for(count, [&](index_t i) { sum += static_cast<int>(i); });
    return sum;
}

} // namespace

TEST_CASE("a pool runs every index exactly once, for any number of threads and of indices")
{
    for (int const threads : {1, 2, 3, 8})
    {
        cpu::thread_pool pool{threads};
        CHECK(pool.threads() == threads);
        for (index_t const count : {0, 1, 2, 7, 1000})
        {
            CAPTURE(threads);
            CAPTURE(count);
            std::vector<std::atomic<int>> seen(static_cast<std::size_t>(count));
            cpu::executor_ref{pool}.parallel_for(count, [&](index_t i) { ++seen[static_cast<std::size_t>(i)]; });
            int wrong = 0;
            for (auto const& s : seen) { wrong += s == 1 ? 0 : 1; }
            CHECK(wrong == 0);
        }
    }
}

TEST_CASE("a pool really works on several threads at once")
{
    cpu::thread_pool pool{3};
    // All three items wait for one another: with fewer threads this would never end.
    std::atomic<int> arrived{0};
    std::mutex mutex;
    std::set<std::thread::id> ids;
    cpu::executor_ref{pool}.parallel_for(3, [&](index_t) {
        ++arrived;
        while (arrived < 3) { std::this_thread::yield(); }
        std::lock_guard const lock{mutex};
        ids.insert(std::this_thread::get_id());
    });
    CHECK(ids.size() == 3);
    CHECK(ids.contains(std::this_thread::get_id()));
}

TEST_CASE("the first exception comes out of the loop, and the pool serves the next loop")
{
    cpu::thread_pool pool{4};
    for (int round = 0; round < 20; ++round)
    {
        std::string const text = support::error_text<std::runtime_error>([&] {
            cpu::executor_ref{pool}.parallel_for(100, [](index_t i) {
                if (i % 10 == 3) { throw std::runtime_error{"an item failed"}; }
            });
        });
        CHECK(text == "an item failed");
        std::atomic<int> sum{0};
        cpu::executor_ref{pool}.parallel_for(100, [&](index_t i) { sum += static_cast<int>(i); });
        CHECK(sum == 4950);
    }
}

TEST_CASE("loops started from several threads at once all finish, each with its own work")
{
    cpu::thread_pool pool{2};
    std::vector<std::thread> callers;
    std::atomic<int> wrong{0};
    for (int c = 0; c < 4; ++c)
    {
        callers.emplace_back([&] {
            for (int round = 0; round < 50; ++round)
            {
                std::atomic<index_t> sum{0};
                cpu::executor_ref{pool}.parallel_for(20, [&](index_t i) { sum += i; });
                if (sum != 190) { ++wrong; }
            }
        });
    }
    for (std::thread& caller : callers) { caller.join(); }
    CHECK(wrong == 0);
}

TEST_CASE("a pool of no threads is refused, naming the number")
{
    CHECK(support::error_text<invalid_argument>([] { cpu::thread_pool{0}; })
          == "thread_pool: threads must be at least 1, got 0");
    CHECK_THROWS_AS(cpu::thread_pool{-3}, invalid_argument);
}

TEST_CASE("a pool that was never used ends quietly")
{
    for (int i = 0; i < 50; ++i) { cpu::thread_pool pool{3}; }
    CHECK(cpu::thread_pool{2}.threads() == 2);
}

TEST_CASE("a loop does not wait for a thread that has not begun to work on it")
{
    CHECK(in_a_child([] {
        std::signal(SIGUSR1, hold);
        cpu::thread_pool pool{2};
        auto const caller = pthread_self();
        std::atomic<pthread_t> worker{caller};
        std::atomic<int> arrived{0};
        cpu::executor_ref{pool}.parallel_for(2, [&](index_t) {
            ++arrived;
            while (arrived < 2) { std::this_thread::yield(); }
            if (pthread_equal(pthread_self(), caller) == 0) { worker = pthread_self(); }
        });
        pthread_kill(worker, SIGUSR1);
        while (!held) { std::this_thread::yield(); }
        int sum = 0;
        for (int i = 0; i < 3; ++i) { sum += sum_of(pool, 10); } // without end if it waits for the worker
        let_go = true;
        return sum + sum_of(pool, 11);
    }) == 190);
}

TEST_CASE("a forked child's pool has threads of its own, however often the parent has used it")
{
    for (int const loops : {0, 1, 57})
    {
        CAPTURE(loops);
        cpu::thread_pool pool{3};
        for (int i = 0; i < loops; ++i) { CHECK(sum_of(pool, 10) == 45); }
        CHECK(in_a_child([&] {
            // All three items wait for one another: with fewer threads this would never end.
            std::atomic<int> arrived{0};
            cpu::executor_ref{pool}.parallel_for(3, [&](index_t) {
                ++arrived;
                while (arrived < 3) { std::this_thread::yield(); }
            });
            return sum_of(pool, 10) + sum_of(pool, 11);
        }) == 100);
        CHECK(sum_of(pool, 10) == 45); // the parent's is as it was
    }
}

TEST_CASE("pools end in a forked child, used there or not, and children may fork")
{
    CHECK(in_a_child([] {
        std::vector<int> results;
        {
            cpu::thread_pool pool{2};
            static_cast<void>(sum_of(pool, 5));
            results.push_back(in_a_child([&] {
                {
                    cpu::thread_pool own{2};
                    static_cast<void>(sum_of(own, 5));
                }
                return sum_of(pool, 5);
            }));
            pid_t const child = fork();
            if (child == 0)
            {
                alarm(20);
                pool.~thread_pool(); // unused since the fork
                _exit(7);
            }
            int status = 0;
            waitpid(child, &status, 0);
            results.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -1);
        }
        return results == std::vector{10, 7} ? 1 : 0;
    }) == 1);
}
