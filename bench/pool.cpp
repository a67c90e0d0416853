/// \file pool.cpp: pool beside a plain copy of the same losses
///
/// Counters: a_ms = pool, b_ms = the copy, b_over_a = pool's share of the copy's speed, `gb_per_s` = bytes read and
/// written by pool / its time.
///
///   bench_pool [--benchmark_format=json]

#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstring>
#include <memory_resource>

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/thread_pool.hpp>
#include <mdkv/stages/pool.hpp>

#include "bench.hpp"

namespace
{

using mdkv::index_t;

void pool_against_copy(benchmark::State& state, mdkv::pooling kind)
{
    constexpr index_t heads  = 8;
    constexpr index_t rungs  = 4;
    constexpr index_t tokens = 131072;
    bench::huge_page_resource pages;
    std::pmr::vector<float> loss(heads * rungs * tokens, 1.0F, &pages);
    std::pmr::vector<float> pooled(loss.size(), 0.0F, &pages);
    for (std::size_t i = 0; i < loss.size(); ++i) { loss[i] = static_cast<float>(i * 2654435761U % 1000003U); }
    mdkv::cpu::thread_pool threads{static_cast<int>(state.range(1))};
    auto const width  = state.range(0);
    auto const pieces = static_cast<index_t>(heads * rungs);
    mdkv::workspace scratch{mdkv::cpu::host_memory{}};
    mdkv::cpu::backend const on{&scratch, threads};
    bench::pair_times const times = bench::measure_pair(
        state,
        [&] {
            mdkv::pool(on, mdkv::in(on, loss.data(), heads, rungs, tokens), {width, kind},
                mdkv::out(on, pooled.data(), heads, rungs, tokens));
        },
        [&] {
            mdkv::cpu::executor_ref{threads}.parallel_for(pieces, [&](index_t i) {
                std::memcpy(pooled.data() + i * tokens, loss.data() + i * tokens, tokens * sizeof(float));
            });
            benchmark::ClobberMemory();
        });
    state.counters["bytes"]    = static_cast<double>(2 * loss.size() * sizeof(float));
    state.counters["gb_per_s"] = static_cast<double>(2 * loss.size() * sizeof(float)) / times.a * 1e-9;
}

void shapes(benchmark::internal::Benchmark* b)
{
    b->ArgNames({"width", "threads"})
        ->ArgsProduct({{1, 7, 25, 51}, {1, 2}})
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
}

BENCHMARK_CAPTURE(pool_against_copy, max, mdkv::pooling::max)->Apply(shapes);
BENCHMARK_CAPTURE(pool_against_copy, mean, mdkv::pooling::mean)->Apply(shapes);
BENCHMARK_CAPTURE(pool_against_copy, adaptive, mdkv::pooling::adaptive)->Apply(shapes);

} // namespace

BENCHMARK_MAIN();
