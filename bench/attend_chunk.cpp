// Attention of a prompt's chunk from the packed cache: the queries of 256 tokens at once over 4,096 stored tokens and the
// chunk's own, which are in the tail. One KV head; D = 64, 128 and 256; G = 1, 4 and 7 query heads; one thread, or two.
//
// codes_against_plain measures tokens stored as codes by turns with as many plain ones. GFLOP/s count two products of D, a
// multiplication and an addition each, for every query and token, hidden ones of the chunk included.
#include <mdkv/cpu/attend.hpp>

#include <mdkv/append.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/thread_pool.hpp>
#include <mdkv/stages/pack.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <benchmark/benchmark.h>

#include "bench.hpp"
#include "layers.hpp"

namespace
{

using namespace mdkv;

constexpr index_t stored_tokens = 4096;
constexpr index_t chunk         = 256; // tokens in the tail, whose queries are attended

constexpr ratio_set storages{drop, full_int4, full_int8, full}; // bit_ratios
enum stored_as : std::uint8_t
{
    int4  = 1,
    int8  = 2,
    plain = 3
};

/// A packed head of tokens stored alike, with a chunk's tokens in its tail, and the chunk's queries.
struct chunk_of_head
{
    index_t group;
    index_t dim;
    bench::layer cache;
    cpu::thread_pool pool;
    std::vector<float> queries = bench::normal_numbers<float>(group * chunk * dim);
    std::vector<float> output  = queries;
    std::vector<float> lse     = std::vector<float>(static_cast<std::size_t>(group * chunk));

    chunk_of_head(benchmark::State const& state, stored_as kind)
        : group{state.range(1)}
        , dim{state.range(0)}
        , cache{packed(dim, kind)}
        , pool{static_cast<int>(state.range(2))}
    {}

    void attend_chunk()
    {
        bench::with_scratch(
            [&](cpu::backend const& on) {
                attend(on, in(on, queries.data(), group, chunk, dim), cache, {},
                    out(on, output.data(), group, chunk, dim), out(on, lse.data(), group, chunk));
            },
            pool);
    }

    [[nodiscard]] double operations() const
    {
        return 4.0 * static_cast<double>(group * chunk * dim * (stored_tokens + chunk));
    }

private:
    [[nodiscard]] static bench::layer packed(index_t dim, stored_as kind)
    {
        auto const vectors = bench::normal_numbers<half>(stored_tokens * dim);
        auto const basis   = bench::normal_numbers<float>(dim * dim, 1.0F / std::sqrt(static_cast<float>(dim)));
        std::vector<std::uint8_t> const rung(static_cast<std::size_t>(stored_tokens), kind);
        cache_layout const layout{storages, 1, 0, {dim, dim}};
        cpu::backend const on;
        auto const rungs  = in(on, rung.data(), 1, stored_tokens);
        auto const kv     = in(on, vectors.data(), 1, stored_tokens, dim);
        auto const window = in(on, static_cast<half const*>(nullptr), 1, 0, dim);
        auto const u      = in(on, basis.data(), 1, dim, dim);
        index_t bytes     = 0;
        bench::with_scratch([&](cpu::backend const& with) { bytes = packed_bytes<half>(with, rungs, layout); });
        bench::layer made{layout, bytes, chunk, &bench::memory()};
        bench::with_scratch(
            [&](cpu::backend const& with) { pack(with, kv, kv, window, window, u, u, rungs, made.view()); });
        auto const own = in(on, vectors.data(), 1, chunk, dim);
        bench::with_scratch([&](cpu::backend const& with) { append(with, own, own, made); });
        return made;
    }
};

/// a: tokens stored as codes; b: as many plain ones.
void codes_against_plain(benchmark::State& state, stored_as kind)
{
    chunk_of_head codes{state, kind};
    chunk_of_head halves{state, plain};
    auto const times = bench::measure_pair(
        state, [&] { codes.attend_chunk(); }, [&] { halves.attend_chunk(); });
    state.counters["a_over_b"]  = times.a / times.b;
    state.counters["a_GFLOP/s"] = codes.operations() / times.a / 1e9;
    state.counters["b_GFLOP/s"] = codes.operations() / times.b / 1e9;
}

void shapes(benchmark::internal::Benchmark* of)
{
    of->ArgNames({"D", "G", "threads"})->UseManualTime()->Unit(benchmark::kMillisecond);
    for (index_t const dim : {64, 128, 256})
    {
        for (index_t const group : {1, 4, 7}) { of->Args({dim, group, 1}); }
        of->Args({dim, 4, 2});
    }
}

} // namespace

BENCHMARK_CAPTURE(codes_against_plain, int4, int4)->Apply(shapes);
BENCHMARK_CAPTURE(codes_against_plain, int8, int8)->Apply(shapes);

int main(int count, char** arguments)
{
    benchmark::Initialize(&count, arguments);
    if (benchmark::ReportUnrecognizedArguments(count, arguments)) { return 1; }
    benchmark::AddCustomContext("instruction_set", bench::instruction_set());
    benchmark::RunSpecifiedBenchmarks();
}
