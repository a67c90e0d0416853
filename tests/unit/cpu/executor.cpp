#include <mdkv/cpu/executor.hpp>

#include "support/host.hpp"

#include <mdkv/cpu/backend.hpp>

#include <doctest/doctest.h>

#include <stdexcept>
#include <thread>
#include <vector>

namespace
{

using namespace mdkv;

/// Runs the loop backwards, on a thread of its own: an executor may do so.
struct contrary
{
    int loops = 0;

    [[nodiscard]] int threads() const { return 3; }
    void parallel_for(index_t count, cpu::executor_ref::task_function task, void* context)
    {
        ++loops;
        std::thread{[&] {
            for (index_t i = count; i-- > 0;) { task(context, i); }
        }}.join();
    }
};

std::vector<int> visits(cpu::executor_ref executor, index_t count)
{
    std::vector<int> seen(static_cast<std::size_t>(count), 0);
    executor.parallel_for(count, [&](index_t i) { ++seen[static_cast<std::size_t>(i)]; });
    return seen;
}

} // namespace

TEST_CASE("a default-made executor runs every index once, in order, in the calling thread")
{
    cpu::executor_ref const serial;
    CHECK(serial.threads() == 1);
    std::vector<index_t> order;
    auto const caller = std::this_thread::get_id();
    bool elsewhere    = false;
    serial.parallel_for(5, [&](index_t i) {
        order.push_back(i);
        elsewhere = elsewhere || std::this_thread::get_id() != caller;
    });
    CHECK(order == std::vector<index_t>{0, 1, 2, 3, 4});
    CHECK_FALSE(elsewhere);
}

TEST_CASE("a caller's executor is used for every index once")
{
    contrary executor;
    CHECK(cpu::executor_ref{executor}.threads() == 3);
    CHECK(visits(executor, 7) == std::vector<int>(7, 1));
    CHECK(executor.loops == 1);
}

TEST_CASE("a single item stays in the calling thread, and none does nothing")
{
    contrary executor;
    auto const caller = std::this_thread::get_id();
    cpu::executor_ref{executor}.parallel_for(1, [&](index_t i) {
        CHECK(i == 0);
        CHECK(std::this_thread::get_id() == caller);
    });
    CHECK(visits(executor, 0).empty());
    CHECK(executor.loops == 0);
}

TEST_CASE("copies of a reference use the same executor")
{
    contrary executor;
    cpu::executor_ref const one{executor};
    cpu::executor_ref const two = one;
    CHECK(visits(two, 4) == std::vector<int>(4, 1));
    CHECK(executor.loops == 1);
}

TEST_CASE("exceptions of the work pass through")
{
    auto const text = support::error_text<std::runtime_error>([] {
        cpu::executor_ref{}.parallel_for(4, [](index_t i) {
            if (i == 2) { throw std::runtime_error{"item 2"}; }
        });
    });
    CHECK(text == "item 2");
}
