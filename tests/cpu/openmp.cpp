// Compiled with -fopenmp where the compiler has it, and right without.
#include <mdkv/cpu/openmp.hpp>

#include "support/host.hpp"

#include <mdkv/cpu/executor.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

namespace
{

using namespace mdkv;

} // namespace

TEST_CASE("the OpenMP executor runs every index exactly once")
{
    for (int const team : {0, 1, 2, 5})
    {
        cpu::openmp_executor executor{team};
        for (index_t const count : {0, 1, 2, 1000})
        {
            CAPTURE(team);
            CAPTURE(count);
            std::vector<std::atomic<int>> seen(static_cast<std::size_t>(count));
            cpu::executor_ref{executor}.parallel_for(count, [&](index_t i) { ++seen[static_cast<std::size_t>(i)]; });
            int wrong = 0;
            for (auto const& s : seen) { wrong += s == 1 ? 0 : 1; }
            CHECK(wrong == 0);
        }
    }
}

TEST_CASE("the OpenMP executor says how large its team is")
{
#if defined(_OPENMP)
    CHECK(cpu::openmp_executor{3}.threads() == 3);
#else
    CHECK(cpu::openmp_executor{3}.threads() == 1);
#endif
    CHECK(cpu::openmp_executor{}.threads() >= 1);
}

TEST_CASE("an exception leaves the OpenMP loop whole")
{
    cpu::openmp_executor executor{2};
    std::string const text = support::error_text<std::runtime_error>([&] {
        cpu::executor_ref{executor}.parallel_for(100, [](index_t i) {
            if (i % 10 == 3) { throw std::runtime_error{"a piece failed"}; }
        });
    });
    CHECK(text == "a piece failed");
}
