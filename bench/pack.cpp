// Packing one layer of Llama-3-8B's shape (8 KV heads, D = 128, f16) at several budgets, against a plain copy of the
// bytes that it writes.
#include <mdkv/cpu/backend.hpp>
#include <mdkv/stages/pack.hpp>

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include <cstddef>
#include <cstring>

#include <benchmark/benchmark.h>

#include "bench.hpp"
#include "layers.hpp"

namespace
{

/// a: pack; b: memcpy of the packed bytes, by one thread.
void pack_against_copy(benchmark::State& state)
{
    bench::source_layer const source{state.range(0), state.range(1)};
    mdkv::cpu::thread_pool pool{static_cast<int>(state.range(2))};
    bench::layer cache = source.packed();
    bench::layer copy  = cache.copy();
    auto const bytes   = static_cast<std::size_t>(cache.arena_bytes());
    auto const times   = bench::measure_pair(
        state, [&] { source.pack_into(cache, pool); },
        [&] {
            std::memcpy(copy.view().arena, cache.view().arena, bytes);
            benchmark::ClobberMemory();
        });
    state.counters["megabytes"]   = static_cast<double>(bytes) / 1e6;
    state.counters["packed_GB/s"] = static_cast<double>(bytes) / times.a / 1e9;
    state.counters["Mtokens/s"]   = static_cast<double>(bench::heads * state.range(0)) / times.a / 1e6;
}

} // namespace

BENCHMARK(pack_against_copy)
    ->ArgNames({"tokens", "kv_size", "threads"})
    ->ArgsProduct({{32768}, {0, 3277, 512}, {1, 2}})
    ->UseManualTime();

BENCHMARK_MAIN();
