// Appending one decoded token to a layer's tail, against copying its bytes. Llama-3-8B's layer: 8 KV heads, D = 128, f16.
#include <mdkv/append.hpp>

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>

#include <cstddef>
#include <cstring>
#include <vector>

#include <benchmark/benchmark.h>

#include "bench.hpp"

namespace
{

using namespace mdkv;

constexpr index_t heads  = 8;
constexpr index_t dim    = 128;
constexpr index_t tokens = 4096; // appended in one measurement, so that it is longer than a clock's tick

/// a: append, token by token into an empty tail; b: the same bytes copied in the order they come.
void append_against_copy(benchmark::State& state)
{
    cpu::cache<half> cache{cache_layout{evict_ratios, heads, 0, {dim, dim}}, 0, tokens};
    std::vector<half> const rows(static_cast<std::size_t>(tokens * heads * dim), narrow<half>(0.5F));
    std::vector<half> copied(2 * rows.size());
    workspace scratch{cpu::host_memory{}};
    cpu::backend const on{&scratch};
    auto const times = bench::measure_pair(
        state,
        [&] {
            *cache.view().appended = 0;
            for (index_t t = 0; t < tokens; ++t)
            {
                auto const row = in(on, rows.data() + t * heads * dim, heads, dim);
                append(on, row, row, cache);
            }
        },
        [&] {
            std::size_t const bytes = static_cast<std::size_t>(heads * dim) * sizeof(half);
            for (std::size_t t = 0; t < static_cast<std::size_t>(tokens); ++t)
            {
                std::byte const* const from = reinterpret_cast<std::byte const*>(rows.data()) + t * bytes;
                std::byte* const to         = reinterpret_cast<std::byte*>(copied.data()) + 2 * t * bytes;
                std::memcpy(to, from, bytes);
                std::memcpy(to + bytes, from, bytes);
            }
            benchmark::ClobberMemory();
        });
    state.counters["us_per_token"] = times.a * 1e6 / static_cast<double>(tokens);
}

BENCHMARK(append_against_copy)->UseManualTime()->Unit(benchmark::kMillisecond)->Iterations(21);

} // namespace

BENCHMARK_MAIN();
