// Folding a tail into a layer's compressed part, beside compressing as many tokens anew from the uncompressed ones, by turns.
// The layer of SmolLM2-135M (3 KV heads, 3 query heads each, D = 64, f16), preset by_window.
#include <mdkv/append.hpp>
#include <mdkv/compress.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/recompress.hpp>

#include <mdkv/core/budget.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include <vector>

#include <benchmark/benchmark.h>

#include "bench.hpp"
#include "layers.hpp"

namespace
{

using namespace mdkv;

constexpr index_t heads  = 3;
constexpr index_t group  = 3;
constexpr index_t dim    = 64;
constexpr index_t recent = 8;  // queries of a fold
constexpr index_t folded = 48; // tokens

/// Arguments: tokens, percent of their bytes, threads. a: a fold, b: compress.
void recompress_against_compress(benchmark::State& state)
{
    constexpr auto const& chosen = presets::by_window;
    index_t const tokens         = state.range(0);
    index_t const queries        = chosen.queries;
    auto const rows              = bench::normal_numbers<half>((tokens + folded) * heads * dim, 2.0F);
    auto const asked             = bench::normal_numbers<half>(heads * group * queries * dim);
    budget const limit = budget::bytes(tokens * heads * dim * index_t{2 * sizeof(half)} * state.range(1) / 100);
    cpu::thread_pool pool{static_cast<int>(state.range(2))};

    cpu::cache<half> cache;
    std::vector<double> folding, compressing;
    for (auto _ : state)
    {
        auto const take = [&](auto const& call, std::vector<double>& times) {
            bench::with_scratch(
                [&](cpu::backend const& on) {
                    times.push_back(bench::seconds([&] { call(on); }));
                },
                pool);
        };
        auto const compress_all = [&](cpu::backend const& on) {
            auto const kv = in(on, rows.data(), {heads, tokens, dim}, {dim, heads * dim, 1});
            prompt_rows<cpu::backend, half> const layer{in(on, asked.data(), heads * group, queries, dim), kv, kv};
            compress(on, layer, chosen, limit, cache);
        };
        take(compress_all, compressing);
        cache.reserve_tail(folded);
        workspace none{cpu::host_memory{}};
        cpu::backend const on{&none};
        for (index_t t = tokens; t < tokens + folded; ++t)
        {
            auto const row = in(on, rows.data() + t * heads * dim, heads, dim);
            append(on, row, row, cache);
        }
        auto const fold = [&](cpu::backend const& with) {
            recompress(with, in(with, asked.data(), heads * group, recent, dim), chosen.ratios,
                fold_options<cpu::backend>(chosen, limit, recent), cache);
        };
        take(fold, folding);
        state.SetIterationTime(folding.back());
    }
    double const a             = bench::median(folding);
    double const b             = bench::median(compressing);
    state.counters["a_ms"]     = a * 1e3;
    state.counters["b_ms"]     = b * 1e3;
    state.counters["b_over_a"] = b / a;
}

BENCHMARK(recompress_against_compress)
    ->ArgNames({"tokens", "percent", "threads"})
    ->ArgsProduct({{1024, 4096}, {28, 53}, {1, 2}})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond)
    ->Iterations(21);

} // namespace

BENCHMARK_MAIN();
