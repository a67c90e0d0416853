// Decode attention from the packed cache: against a plain read of the same bytes, and small caches against the full one.
// Llama-3-8B's layer: 8 KV heads, 4 query heads each, D = 128, f16. Layers are rotated so that none stays in the caches.
// Tokens stored as codes against plain ones also in SmolLM2-135M's shape: 3 KV heads, 3 query heads each, D = 64.
//
// Nothing here scores or allocates: rungs are drawn in the shares that matter and vectors by normal_numbers (layers.hpp),
// because attend reads the same bytes in the same order whatever they say. The last line compares the time this took with
// that of the measurements. bench_attend_x86-64, _x86-64-v3 and _x86-64-v4 are the same for one instruction set each.
#include <mdkv/cpu/attend.hpp>

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <list>
#include <random>
#include <span>
#include <thread>
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

void fill_beyond_caches(layers& of)
{
    constexpr index_t beyond_caches = index_t{1} << 29;
    index_t const count             = std::max<index_t>(2, beyond_caches / of.all[0].arena_bytes());
    for (index_t i = 1; i < count; ++i) { of.all.push_back(of.all[0].copy()); }
}

/// Heads of one layer.
struct shape
{
    index_t heads;
    index_t group;
    index_t dim;

    [[nodiscard]] friend bool operator==(shape const&, shape const&) noexcept = default;
};

constexpr shape llama{heads, group, dim};
constexpr shape smollm2{3, 3, 64};
constexpr shape qwen{2, 6, 256};  // the layers of Qwen 3.5 that see every token
constexpr shape gemma{4, 8, 512}; // and of Gemma 4

/// What the tokens of a layer are stored as: rungs of the paper's set in bench::rungs_of's shares, or one rung of the set
/// below, or an equal share at each of its rungs, or the shares of the preset `best` at KV 512 of 2,048 tokens of SmolLM2,
/// which make three short runs of each head.
enum class stored : std::uint8_t
{
    paper,
    plain,
    int8,
    int4,
    mixed,
    best
};

constexpr ratio_set storages{drop, fraction(1, 4).as(storage::int8), full_int4, full_int8, full};

std::uint8_t rung_as(stored kind, std::mt19937& random)
{
    if (kind == stored::mixed) { return static_cast<std::uint8_t>(1 + random() % 4); }
    if (kind != stored::best)
    {
        constexpr std::uint8_t every[]{0, 4, 3, 2}; // rung by kind
        return every[static_cast<int>(kind)];
    }
    unsigned long const per_mille = random() % 1000;
    return per_mille < 222 ? 0 : per_mille < 888 ? 2 : per_mille < 995 ? 3 : 4;
}

layer packed_as(shape const& of, index_t tokens, stored kind, cpu::thread_pool& pool)
{
    auto const vectors = bench::normal_numbers<half>(of.heads * tokens * of.dim);
    auto const basis   = bench::normal_numbers<float>(of.dim * of.dim, 1.0F / std::sqrt(static_cast<float>(of.dim)));
    std::vector<std::uint8_t> rung(static_cast<std::size_t>(of.heads * tokens));
    std::mt19937 random{9};
    for (std::uint8_t& r : rung) { r = rung_as(kind, random); }
    cache_layout const layout{storages, of.heads, 0, {of.dim, of.dim}};
    cpu::backend const on;
    auto const rungs  = in(on, rung.data(), of.heads, tokens);
    auto const kv     = in(on, vectors.data(), of.heads, tokens, of.dim);
    auto const window = in(on, static_cast<half const*>(nullptr), of.heads, 0, of.dim);
    auto const u      = in(on, basis.data(), {of.heads, of.dim, of.dim}, {index_t{0}, of.dim, index_t{1}});
    index_t bytes     = 0;
    bench::with_scratch([&](cpu::backend const& with) { bytes = packed_bytes<half>(with, rungs, layout); }, pool);
    layer made{layout, bytes, 0, &bench::memory()};
    bench::with_scratch(
        [&](cpu::backend const& with) { pack(with, kv, kv, window, window, u, u, rungs, made.view()); }, pool);
    return made;
}

/// What layers are made of.
struct recipe
{
    shape of;
    index_t tokens;
    index_t kv_size; // of stored::paper; 0 keeps every token whole
    stored kind;

    [[nodiscard]] friend bool operator==(recipe const&, recipe const&) noexcept = default;
};

double setup_seconds = 0; // of the whole run

/// Two sets of layers are kept, those asked for last: all of them together would not fit a small machine's memory.
layers& made_by(recipe const& key)
{
    static std::list<std::pair<recipe, layers>> made; // asked for last comes first
    auto const found = std::find_if(made.begin(), made.end(), [&](auto const& one) { return one.first == key; });
    if (found != made.end())
    {
        made.splice(made.begin(), made, found);
        return made.front().second;
    }
    if (made.size() == 2) { made.pop_back(); }
    setup_seconds += bench::seconds([&] {
        cpu::thread_pool pool{static_cast<int>(std::max(1U, std::thread::hardware_concurrency()))};
        layers fresh;
        fresh.all.push_back(key.kind == stored::paper ? bench::source_layer{key.tokens, key.kv_size}.packed(pool)
                                                      : packed_as(key.of, key.tokens, key.kind, pool));
        fill_beyond_caches(fresh);
        made.emplace_front(key, std::move(fresh));
    });
    return made.front().second;
}

layers& layers_of(index_t tokens, index_t kv_size)
{
    return made_by({llama, tokens, kv_size, stored::paper});
}

/// One decode step's buffers.
struct step
{
    shape of;
    cpu::thread_pool pool;
    workspace scratch{cpu::host_memory{}};
    std::vector<float> queries = std::vector<float>(static_cast<std::size_t>(of.heads * of.group * of.dim));
    std::vector<float> output  = queries;
    std::vector<float> lse     = std::vector<float>(static_cast<std::size_t>(of.heads * of.group));

    explicit step(int threads, shape const& s = llama)
        : of{s}
        , pool{threads}
    {
        std::mt19937 random{3};
        std::normal_distribution<float> normal;
        for (float& q : queries) { q = normal(random); }
    }

    void attend_to(layer const& from)
    {
        index_t const rows = of.heads * of.group;
        with_scratch([&](cpu::backend const& on) {
            attend(on, in(on, queries.data(), rows, of.dim), from.view(), {}, out(on, output.data(), rows, of.dim),
                out(on, lse.data(), rows));
        });
    }

    template <class Call>
    void with_scratch(Call const& call)
    {
        call(cpu::backend{&scratch, pool});
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

/// a: tokens stored as codes; b: as many plain ones. b_over_a is what codes save a token, of_ideal that over the ratio of
/// their bytes.
void codes_against_plain(benchmark::State& state, shape const& of, stored kind)
{
    layers& codes = made_by({of, state.range(0), 0, kind});
    layers& plain = made_by({of, state.range(0), 0, stored::plain});
    step decode{static_cast<int>(state.range(1)), of};
    auto const times = bench::measure_pair(
        state, [&] { decode.attend_to(codes.rotate()); }, [&] { decode.attend_to(plain.rotate()); });
    auto const bytes       = static_cast<double>(codes.all[0].arena_bytes());
    auto const plain_bytes = static_cast<double>(plain.all[0].arena_bytes());
    auto const tokens      = static_cast<double>(of.heads * state.range(0));
    report(state, bytes, times);
    state.counters["a_ns_per_token"] = times.a / tokens * 1e9;
    state.counters["b_ns_per_token"] = times.b / tokens * 1e9;
    state.counters["b_GB/s"]         = plain_bytes / times.b / 1e9;
    state.counters["byte_ratio"]     = plain_bytes / bytes;
    state.counters["of_ideal"]       = times.b / times.a / (plain_bytes / bytes);
}

/// a: several sequences, one query each, in one call; b: in a call each. Every sequence has a cache of its own, and what comes
/// next has others.
void batch_against_calls(benchmark::State& state, shape const& of)
{
    constexpr index_t sequences = 8;
    layers& caches              = made_by({of, state.range(0), 0, stored::mixed});
    step decode{static_cast<int>(state.range(1)), of};
    index_t const rows = of.heads * of.group;
    std::vector<float> queries;
    for (index_t i = 0; i < sequences; ++i)
    {
        queries.insert(queries.end(), decode.queries.begin(), decode.queries.end());
    }
    std::vector<float> output = queries;
    std::vector<float> lse(static_cast<std::size_t>(sequences * rows));
    std::vector<sequence_view<half, space::host>> batch(sequences);
    auto const times = bench::measure_pair(
        state,
        [&] {
            for (auto& one : batch) { one.cache = caches.rotate().view(); }
            index_t const extents[]{rows, sequences, of.dim};
            index_t const strides[]{of.dim, rows * of.dim, 1}; // [sequences, H*G, D]
            decode.with_scratch([&](cpu::backend const& on) {
                attend(on, in(on, queries.data(), extents, strides), std::span{batch}, {},
                    out(on, output.data(), extents, strides), out(on, lse.data(), rows, sequences));
            });
        },
        [&] {
            for (index_t i = 0; i < sequences; ++i) { decode.attend_to(caches.rotate()); }
        });
    report(state, static_cast<double>(sequences * caches.all[0].arena_bytes()), times);
}

constexpr index_t k16 = 16384;
constexpr index_t k64 = 65536;
constexpr index_t kv_sizes[]{k64 / 10, k64 / 20, 1024, 512, 128};

using benchmarks = benchmark::internal::Benchmark;

// Threads change last, so that the layers of one size are made once.
template <index_t... Tokens>
void token_args(benchmarks* of)
{
    of->ArgNames({"tokens", "threads"})->UseManualTime();
    for (index_t const tokens : {Tokens...}) { of->Args({tokens, 1})->Args({tokens, 2}); }
}
constexpr auto coded_args = token_args<512, k16>;
constexpr auto best_args  = token_args<2048>;
constexpr auto batch_args = token_args<512, 4096>;
void full_args(benchmarks* of)
{
    of->ArgNames({"tokens", "kv_size", "threads"})->UseManualTime();
    for (index_t const tokens : {k16, k64}) { of->Args({tokens, 0, 1})->Args({tokens, 0, 2}); }
}
void small_args(benchmarks* of)
{
    of->ArgNames({"tokens", "kv_size", "threads"})->UseManualTime();
    for (index_t const size : kv_sizes) { of->Args({k64, size, 1})->Args({k64, size, 2}); }
}

} // namespace

BENCHMARK(attend_against_read)->Apply(full_args)->Apply(small_args);
// By the small cache's time alone, the full one would be read a thousand times.
BENCHMARK(small_against_full)->Apply(small_args)->Iterations(50);
BENCHMARK_CAPTURE(codes_against_plain, llama_int8, llama, stored::int8)->Apply(coded_args);
BENCHMARK_CAPTURE(codes_against_plain, llama_int4, llama, stored::int4)->Apply(coded_args);
BENCHMARK_CAPTURE(codes_against_plain, llama_mixed, llama, stored::mixed)->Apply(coded_args);
BENCHMARK_CAPTURE(codes_against_plain, smollm2_int8, smollm2, stored::int8)->Apply(coded_args);
BENCHMARK_CAPTURE(codes_against_plain, smollm2_int4, smollm2, stored::int4)->Apply(coded_args);
BENCHMARK_CAPTURE(codes_against_plain, smollm2_mixed, smollm2, stored::mixed)->Apply(coded_args);
BENCHMARK_CAPTURE(codes_against_plain, smollm2_best, smollm2, stored::best)->Apply(best_args);
BENCHMARK_CAPTURE(codes_against_plain, qwen_mixed, qwen, stored::mixed)->Apply(coded_args);
BENCHMARK_CAPTURE(codes_against_plain, gemma_mixed, gemma, stored::mixed)->Apply(coded_args);
BENCHMARK_CAPTURE(batch_against_calls, llama, llama)->Apply(batch_args);
BENCHMARK_CAPTURE(batch_against_calls, smollm2, smollm2)->Apply(batch_args);

int main(int count, char** arguments)
{
    benchmark::Initialize(&count, arguments);
    if (benchmark::ReportUnrecognizedArguments(count, arguments)) { return 1; }
    benchmark::AddCustomContext("instruction_set", bench::instruction_set());
    double const all = bench::seconds([] { benchmark::RunSpecifiedBenchmarks(); });
    std::fprintf(stderr, "set up in %.1f s, measured in %.1f s\n", setup_seconds, all - setup_seconds);
}
