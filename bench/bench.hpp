/// \file bench.hpp: what the benchmarks share: two rivals measured turn by turn in one process, and a plain read to compare with
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory_resource>
#include <new>
#include <string>
#include <vector>

#include <sys/mman.h>

#include <benchmark/benchmark.h>

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/simd.hpp>

namespace bench
{

/// Seconds that one call takes.
template <class Call>
[[nodiscard]] double seconds(Call const& call)
{
    auto const start = std::chrono::steady_clock::now();
    call();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

[[nodiscard]] inline double median(std::vector<double> x)
{
    if (x.empty()) { return 0.0; }
    auto const middle = x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2);
    std::nth_element(x.begin(), middle, x.end());
    return *middle;
}

/// Medians of two rivals, in seconds.
struct pair_times
{
    double a = 0;
    double b = 0;
};

/// What the vector code of this program was compiled for, e.g. "AVX2, 8 floats a vector".
[[nodiscard]] inline std::string instruction_set()
{
    constexpr int lanes = mdkv::cpu::simd::lanes;
    std::string const names[]{"128 bits", "AVX2", "AVX-512"};
    return names[lanes / 8] + ", " + std::to_string(lanes) + " floats a vector";
}

/// Runs a and b by turns, so that what else the machine does hits both alike, and reports their medians and b/a, the
/// factor by which a is the faster one. The benchmark's own time is a's; register with UseManualTime().
template <class A, class B>
pair_times measure_pair(benchmark::State& state, A const& a, B const& b)
{
    a(); // first calls fault pages in
    b();
    std::vector<double> times_a;
    std::vector<double> times_b;
    bool a_first = true;
    for (auto _ : state)
    {
        if (!a_first) { times_b.push_back(seconds(b)); }
        times_a.push_back(seconds(a));
        if (a_first) { times_b.push_back(seconds(b)); }
        a_first = !a_first;
        state.SetIterationTime(times_a.back());
    }
    pair_times const medians{median(times_a), median(times_b)};
    state.counters["a_ms"]     = medians.a * 1e3;
    state.counters["b_ms"]     = medians.b * 1e3;
    state.counters["b_over_a"] = medians.b / medians.a;
    return medians;
}

/// Memory on huge pages where the system grants them, as an engine would hold its caches.
class huge_page_resource : public std::pmr::memory_resource
{
private:
    static constexpr std::size_t page = std::size_t{1} << 21;

    void* do_allocate(std::size_t bytes, std::size_t alignment) override
    {
        std::size_t const rounded = (bytes + page - 1) / page * page;
        void* const memory        = std::aligned_alloc(
            bytes < page ? alignment : page, bytes < page ? (bytes + alignment - 1) / alignment * alignment : rounded);
        if (memory == nullptr) { throw std::bad_alloc{}; }
        if (bytes >= page) { static_cast<void>(madvise(memory, rounded, MADV_HUGEPAGE)); }
        return memory;
    }
    void do_deallocate(void* memory, std::size_t, std::size_t) override { std::free(memory); }
    [[nodiscard]] bool do_is_equal(memory_resource const& other) const noexcept override { return this == &other; }
};

/// Reads every byte once, as fast as the threads can.
inline void plain_read(mdkv::cpu::executor_ref executor, std::byte const* data, std::int64_t bytes)
{
    namespace simd              = mdkv::cpu::simd;
    constexpr std::int64_t line = 64;
    constexpr std::int64_t step = 8 * line;
    std::int64_t const pieces   = std::max<std::int64_t>(1, bytes >> 18);
    auto const run              = [&](std::int64_t i) {
        std::int64_t const begin = bytes / line * i / pieces * line;
        std::int64_t const end   = bytes / line * (i + 1) / pieces * line;
        simd::ints sums[8]{};
        std::int64_t at = begin;
        for (; at + step <= end; at += step)
        {
            for (int l = 0; l < 8; ++l)
            {
                for (std::int64_t v = 0; v < line; v += std::int64_t{sizeof(simd::ints)})
                {
                    simd::ints x;
                    std::memcpy(&x, data + at + l * line + v, sizeof x);
                    sums[l] ^= x;
                }
            }
        }
        for (; at < end; at += line)
        {
            simd::ints x;
            std::memcpy(&x, data + at, sizeof x);
            sums[0] ^= x;
        }
        for (int l = 1; l < 8; ++l) { sums[0] ^= sums[l]; }
        benchmark::DoNotOptimize(sums[0]);
    };
    executor.parallel_for(pieces, run);
}

} // namespace bench
