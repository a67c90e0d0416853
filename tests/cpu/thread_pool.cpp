#include <mdkv/cpu/thread_pool.hpp>

#include "support/host.hpp"

#include <mdkv/cpu/executor.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace
{

using namespace mdkv;

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
    // All three pieces wait for one another: with fewer threads this would never end.
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
                if (i % 10 == 3) { throw std::runtime_error{"a piece failed"}; }
            });
        });
        CHECK(text == "a piece failed");
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
