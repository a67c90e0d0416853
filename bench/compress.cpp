// Compressing one layer of Llama-3-8B's shape (8 KV heads, 4 query heads each, D = 128, f16, window 32), all stages, and
// the most extra memory alive at any time: scratch, the new cache and what the linear algebra library allocates.
#include <mdkv/compress.hpp>
#include <mdkv/cpu/score.hpp>

#include <mdkv/core/budget.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/thread_pool.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/prompt.hpp>

#include <cstddef>
#include <random>
#include <vector>

#include <benchmark/benchmark.h>

#include "bench.hpp"

namespace
{

using namespace mdkv;

constexpr index_t heads  = 8;
constexpr index_t group  = 4;
constexpr index_t window = 32;
constexpr index_t dim    = 128;

std::vector<half> random_rows(index_t rows, std::uint32_t seed, float decay)
{
    std::mt19937 random{seed};
    std::normal_distribution<float> normal;
    std::vector<half> all(static_cast<std::size_t>(rows * dim));
    for (std::size_t i = 0; i < all.size(); ++i)
    {
        auto const coordinate = static_cast<float>(i % static_cast<std::size_t>(dim));
        all[i]                = narrow<half>(normal(random) * 3.0F / (1.0F + decay * coordinate));
    }
    return all;
}

/// Arguments: tokens, threads. Counters: milliseconds a stage would take alone are left to the stages' own benches.
void compress_layer(benchmark::State& state)
{
    index_t const tokens            = state.range(0);
    std::vector<half> const keys    = random_rows(heads * tokens, 1, 0.2F);
    std::vector<half> const values  = random_rows(heads * tokens, 2, 0.1F);
    std::vector<half> const queries = random_rows(heads * group * window, 3, 0.0F);
    cpu::thread_pool pool{static_cast<int>(state.range(1))};

    cpu::cache<half> made;
    auto const call = [&](cpu::backend const& on) {
        prompt_rows<cpu::backend, half> const rows{in(on, queries.data(), heads * group, window, dim),
            in(on, keys.data(), heads, tokens, dim), in(on, values.data(), heads, tokens, dim)};
        return compress(on, rows, presets::paper, budget::kv_size(512), made);
    };
    workspace scratch{cpu::host_memory{}};
    compress_report report = call(cpu::backend{&scratch, pool}); // takes the memory
    for (auto _ : state)
    {
        state.SetIterationTime(bench::seconds([&] { report = call(cpu::backend{&scratch, pool}); }));
    }
    auto const layer_bytes               = static_cast<double>(report.full_bytes);
    state.counters["scratch_MB"]         = static_cast<double>(scratch.peak()) / 1e6;
    state.counters["cache_MB"]           = static_cast<double>(report.resident_bytes) / 1e6;
    state.counters["layer_MB"]           = layer_bytes / 1e6;
    state.counters["scratch_over_layer"] = static_cast<double>(scratch.peak()) / layer_bytes;
    state.counters["rows_x_tokens_MB"]   = static_cast<double>(heads * group * window * tokens * 4) / 1e6;
    state.counters["tokens/s"] =
        benchmark::Counter(static_cast<double>(tokens), benchmark::Counter::kIsIterationInvariantRate);
}

BENCHMARK(compress_layer)
    ->ArgNames({"tokens", "threads"})
    ->ArgsProduct({{8192, 32768}, {1, 2}})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond)
    ->Iterations(5);

} // namespace

BENCHMARK_MAIN();
