// Decode attention from the packed cache: against a plain read of the same bytes, and small caches against the full one.
// Llama-3-8B's layer: 8 KV heads, 4 query heads each, D = 128, f16. Layers are rotated so that none stays in the caches.
#include <mdkv/cpu/attend.hpp>

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include "bench.hpp"
#include "layers.hpp"

namespace
{

using namespace mdkv;
using bench::dim;
using bench::group;
using bench::heads;
using bench::layer;

/// Layers of one size, together far larger than the last-level cache.
struct layers
{
    std::vector<layer> all;
    std::size_t next = 0;

    [[nodiscard]] layer const& rotate() { return all[next++ % all.size()]; }
};

layers& layers_of(index_t tokens, index_t kv_size)
{
    static std::map<std::pair<index_t, index_t>, layers> made;
    layers& found = made[{tokens, kv_size}];
    if (found.all.empty())
    {
        constexpr index_t beyond_caches = index_t{1} << 30;
        found.all.push_back(bench::source_layer{tokens, kv_size}.packed());
        index_t const count = std::max<index_t>(2, beyond_caches / found.all[0].arena_bytes());
        for (index_t i = 1; i < count; ++i) { found.all.push_back(found.all[0].copy()); }
    }
    return found;
}

/// One decode step's buffers.
struct step
{
    cpu::thread_pool pool;
    std::vector<std::byte> memory;
    std::vector<float> queries = std::vector<float>(static_cast<std::size_t>(heads * group * dim));
    std::vector<float> output  = queries;
    std::vector<float> lse     = std::vector<float>(static_cast<std::size_t>(heads * group));

    explicit step(int threads)
        : pool{threads}
    {
        std::mt19937 random{3};
        std::normal_distribution<float> normal;
        for (float& q : queries) { q = normal(random); }
    }

    void attend_to(layer const& from)
    {
        workspace count;
        run(cpu::backend{&count, pool}, from);
        memory.resize(std::max(memory.size(), count.bytes() + workspace::alignment));
        void* at         = memory.data();
        std::size_t room = memory.size();
        std::align(workspace::alignment, count.bytes(), at, room);
        workspace scratch{{static_cast<std::byte*>(at), count.bytes()}};
        run(cpu::backend{&scratch, pool}, from);
    }

private:
    void run(cpu::backend const& on, layer const& from)
    {
        attend(on, in(on, queries.data(), heads * group, dim), from.view(), {},
            out(on, output.data(), heads * group, dim), out(on, lse.data(), heads * group));
    }
};

void report(benchmark::State& state, double bytes, bench::pair_times const& times)
{
    state.counters["megabytes"] = bytes / 1e6;
    state.counters["a_GB/s"]    = bytes / times.a / 1e9;
}

/// a: attend; b: plain read of as many bytes. b_over_a is the share of the read bandwidth that attend reaches.
void attend_against_read(benchmark::State& state)
{
    layers& cache = layers_of(state.range(0), state.range(1));
    step decode{static_cast<int>(state.range(2))};
    auto const bytes = cache.all[0].arena_bytes();
    auto const times = bench::measure_pair(
        state, [&] { decode.attend_to(cache.rotate()); },
        [&] { bench::plain_read(decode.pool, cache.rotate().view().arena, bytes); });
    report(state, static_cast<double>(bytes), times);
    state.counters["read_GB/s"] = static_cast<double>(bytes) / times.b / 1e9;
}

/// a: a small cache; b: the full one. of_ideal is the speed-up over the ratio of their bytes.
void small_against_full(benchmark::State& state)
{
    layers& small = layers_of(state.range(0), state.range(1));
    layers& full  = layers_of(state.range(0), 0);
    step decode{static_cast<int>(state.range(2))};
    auto const times = bench::measure_pair(
        state, [&] { decode.attend_to(small.rotate()); }, [&] { decode.attend_to(full.rotate()); });
    auto const bytes      = static_cast<double>(small.all[0].arena_bytes());
    auto const full_bytes = static_cast<double>(full.all[0].arena_bytes());
    report(state, bytes, times);
    state.counters["byte_ratio"] = full_bytes / bytes;
    state.counters["of_ideal"]   = times.b / times.a / (full_bytes / bytes);
}

constexpr index_t k16 = 16384;
constexpr index_t k64 = 65536;

} // namespace

BENCHMARK(attend_against_read)
    ->ArgNames({"tokens", "kv_size", "threads"})
    ->ArgsProduct({{k16, k64}, {0}, {1, 2}})
    ->ArgsProduct({{k64}, {k64 / 10, k64 / 20, 1024, 512, 128}, {1, 2}})
    ->UseManualTime();
BENCHMARK(small_against_full)
    ->ArgNames({"tokens", "kv_size", "threads"})
    ->ArgsProduct({{k64}, {k64 / 10, k64 / 20, 1024, 512, 128}, {1, 2}})
    ->UseManualTime();

BENCHMARK_MAIN();
