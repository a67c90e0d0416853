#include <mdkv/cpu/backend.hpp>

#include <mdkv/core/view.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <vector>

namespace
{

using namespace mdkv;

} // namespace

TEST_CASE("the CPU backend works on host memory, serially and without scratch unless told otherwise")
{
    static_assert(backend<cpu::backend>);
    static_assert(cpu::backend::memory_space == space::host);
    cpu::backend const on;
    CHECK(on.scratch == nullptr);
    CHECK(on.workers(100) == 1);
}

TEST_CASE("there are as many workers as threads, but no more than items and at least one")
{
    cpu::thread_pool pool{4};
    cpu::backend const on{nullptr, pool};
    CHECK(on.workers(100) == 4);
    CHECK(on.workers(3) == 3);
    CHECK(on.workers(0) == 1);
}

TEST_CASE("for_each visits every item once and never runs two of one worker at a time")
{
    cpu::thread_pool pool{3};
    cpu::backend const on{nullptr, pool};
    std::vector<std::atomic<int>> visited(1000);
    std::vector<std::atomic<int>> inside(3);
    std::atomic<int> collisions{0};
    std::atomic<int> strangers{0};
    on.for_each(1000, [&](index_t i, index_t worker) {
        if (worker < 0 || worker >= 3)
        {
            ++strangers;
            return;
        }
        if (inside[static_cast<std::size_t>(worker)].fetch_add(1) != 0) { ++collisions; }
        ++visited[static_cast<std::size_t>(i)];
        inside[static_cast<std::size_t>(worker)].fetch_sub(1);
    });
    CHECK(collisions == 0);
    CHECK(strangers == 0);
    int wrong = 0;
    for (auto const& v : visited) { wrong += v == 1 ? 0 : 1; }
    CHECK(wrong == 0);
}
