// Decode attention from the packed cache: against a plain read of the same bytes, and small caches against the full one.
// Llama-3-8B's layer: 8 KV heads, 4 query heads each, D = 128, f16. Layers are rotated so that none stays in the caches.
#include <mdkv/cpu/attend.hpp>

#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/pack.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "bench.hpp"

namespace
{

using namespace mdkv;

constexpr index_t heads = 8;
constexpr index_t group = 4;
constexpr index_t dim   = 128;

using layer = cpu::cache<half>;

/// Layers of one size, together far larger than the last-level cache.
struct layers
{
    std::vector<layer> all;
    std::size_t next = 0;

    [[nodiscard]] layer const& rotate() { return all[next++ % all.size()]; }
};

bench::huge_page_resource& memory()
{
    static bench::huge_page_resource resource;
    return resource;
}

/// Tokens at 16, 32 and 128 coordinates take 25, 15 and 60 % of a head's bytes; kv_size 0 keeps every token whole.
std::vector<std::uint8_t> rungs_of(index_t tokens, index_t kv_size, std::mt19937& random)
{
    std::vector<std::uint8_t> rung(static_cast<std::size_t>(heads * tokens), std::uint8_t{3});
    if (kv_size == 0) { return rung; }
    auto const room     = static_cast<double>(kv_size - 32); // what a projection of 32 columns takes, in whole tokens
    auto const share    = [&](double part, double coordinates) { return static_cast<index_t>(room * part * dim / coordinates); };
    index_t const counts[]{0, share(0.25, 16), share(0.15, 32), share(0.60, 128)};
    for (index_t h = 0; h < heads; ++h)
    {
        auto const row = rung.begin() + h * tokens;
        auto at        = row;
        for (std::uint8_t r = 1; r < 4; ++r) { at = std::fill_n(at, counts[r], r); }
        std::fill(at, row + tokens, std::uint8_t{0});
        std::shuffle(row, row + tokens, random);
    }
    return rung;
}

layer make_layer(index_t tokens, index_t kv_size)
{
    std::mt19937 random{7};
    std::normal_distribution<float> normal;
    std::vector<half> x(static_cast<std::size_t>(tokens * dim));
    for (half& v : x) { v = narrow<half>(normal(random)); }
    std::vector<float> basis(static_cast<std::size_t>(dim * dim)); // how long its rows are does not matter here
    for (float& v : basis) { v = normal(random) / std::sqrt(static_cast<float>(dim)); }
    std::vector<std::uint8_t> const rung = rungs_of(tokens, kv_size, random);

    alignas(64) std::byte scratch[64];
    workspace none{scratch};
    cpu::backend const on{&none};
    cache_layout const layout{paper_ratios, heads, 0, {dim, dim}};
    auto const rungs = in(on, rung.data(), heads, tokens);
    layer made{layout, packed_bytes<half>(on, rungs, layout), 0, &memory()};
    auto const kv     = in(on, x.data(), {heads, tokens, dim}, {index_t{0}, dim, index_t{1}});
    auto const window = in(on, static_cast<half*>(nullptr), heads, 0, dim);
    auto const u      = in(on, basis.data(), {heads, dim, dim}, {index_t{0}, dim, index_t{1}});
    pack(on, kv, kv, window, window, u, u, rungs, made.view());
    return made;
}

layers& layers_of(index_t tokens, index_t kv_size)
{
    static std::map<std::pair<index_t, index_t>, layers> made;
    layers& found = made[{tokens, kv_size}];
    if (found.all.empty())
    {
        constexpr index_t beyond_caches = index_t{1} << 30;
        found.all.push_back(make_layer(tokens, kv_size));
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
        attend(on, in(on, queries.data(), heads * group, dim), from.view(), {}, out(on, output.data(), heads * group, dim),
            out(on, lse.data(), heads * group));
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
