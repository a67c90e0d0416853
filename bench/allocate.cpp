/// \file allocate.cpp: allocate beside a fused, vectorised bisection of 55 passes over the same losses
///
/// 1,048,576 tokens (8 heads). Counters: a_ms = allocate, b_ms = bisection, b_over_a = how much faster allocate is
/// (medians, by turns), `loss_ratio` = allocate's loss / the bisection's, `gap` = allocate's duality gap / its loss,
/// `bytes_unspent`, `rival_unspent` = what each leaves of the limit.
/// The bisection is the fastest that we could write: one pass per multiplier computes every token's rung and adds its
/// bytes at the full width of the machine's vectors, with the number of rungs a constant; nothing is written before the
/// last pass. It ends where the paper's does not: after 55 halvings.
///
/// if_better_against_always: all heads that pay for projections if less is lost so beside all heads that pay, 8 heads of 8,192
/// to 32,768 tokens at D = 128 in 16 bits. Counters: a_ms = if better, b_ms = always, `loss_ratio` = a / b.
///
/// quotas_against_one_limit: a limit for each head beside one limit for all, of as many bytes together, four rungs. Counters:
/// a_ms = quotas, b_ms = one limit, a_ns_a_token, b_ns_a_token.
///
///   bench_allocate [--benchmark_format=json]

#include <benchmark/benchmark.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory_resource>
#include <random>
#include <vector>

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/thread_pool.hpp>
#include <mdkv/cpu/tile.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/stages/allocate.hpp>

#include "bench.hpp"

namespace
{

namespace simd = mdkv::cpu::simd;
using mdkv::index_t;

constexpr index_t heads  = 8;
constexpr index_t tokens = 131072;

/// Bytes of a token at head dimension 128 in 16 bits: 512. Four rungs are the paper's set.
template <std::size_t R>
mdkv::rung_costs costs()
{
    mdkv::rung_costs c;
    c.rungs = R;
    if constexpr (R == 4) { c.bytes = {0, 64, 128, 512}; }
    else { c.bytes = {0, 32, 64, 96, 128, 192, 256, 512}; }
    return c;
}

/// Few large losses among many small ones, falling with the rung at rates of their own.
/// `loss_of_low_rungs`: how much more of it remains at the rungs between in the last head than in the first.
std::pmr::vector<float> losses(std::size_t rungs, std::pmr::memory_resource* memory, index_t tokens_per_head = tokens,
    double loss_of_low_rungs = 0, index_t all_heads = heads)
{
    auto const row  = static_cast<std::size_t>(tokens_per_head);
    auto const rows = static_cast<std::size_t>(all_heads);
    std::mt19937_64 random{20603};
    std::normal_distribution<double> size{0.0, 2.0};
    std::uniform_real_distribution<double> fall{0.5, 1.02};
    std::pmr::vector<float> loss(rows * row * rungs, memory);
    for (std::size_t h = 0; h < rows; ++h)
    {
        for (std::size_t i = 0; i < row; ++i)
        {
            double x = std::exp(size(random));
            for (std::size_t r = 0; r < rungs; ++r)
            {
                loss[(h * rungs + r) * row + i] = r + 1 == rungs ? 0.0F : static_cast<float>(x);
                double const rest               = fall(random);
                x *=
                    rest + (1 - rest) * loss_of_low_rungs * static_cast<double>(h) / static_cast<double>(all_heads - 1);
            }
        }
    }
    return loss;
}

/// The rival.
template <std::size_t R>
class bisection
{
public:
    bisection(std::pmr::vector<float> const& loss, mdkv::rung_costs const& cost, mdkv::cpu::executor_ref threads)
        : loss_{loss.data()}
        , cost_{cost}
        , threads_{threads}
        , sums_(static_cast<std::size_t>(pieces))
    {}

    void run(index_t limit, std::uint8_t* rung)
    {
        double low  = 0;
        double high = 1e6;
        for (int pass = 0; pass < 55; ++pass)
        {
            double const middle                                         = (low + high) / 2;
            (bytes_at(static_cast<float>(middle)) > limit ? low : high) = middle;
        }
        assign(static_cast<float>(high), rung);
    }

private:
    static constexpr index_t piece  = 4096;
    static constexpr index_t pieces = heads * tokens / piece;

    [[nodiscard]] float const* row(index_t p, std::size_t r) const
    {
        index_t const head = p / (tokens / piece);
        return loss_ + (head * static_cast<index_t>(R) + static_cast<index_t>(r)) * tokens
               + p % (tokens / piece) * piece;
    }

    index_t bytes_at(float multiplier)
    {
        threads_.parallel_for(pieces, [&](index_t p) {
            simd::ints bytes{};
            for (index_t i = 0; i < piece; i += simd::lanes) { bytes += choose(p, i, multiplier, byte_count{cost_}); }
            std::int64_t sum = 0;
            for (int l = 0; l < simd::lanes; ++l) { sum += bytes[l]; }
            sums_[static_cast<std::size_t>(p)] = sum;
        });
        index_t sum = 0;
        for (index_t const s : sums_) { sum += s; }
        return sum;
    }

    void assign(float multiplier, std::uint8_t* rung)
    {
        threads_.parallel_for(pieces, [&](index_t p) {
            for (index_t i = 0; i < piece; i += simd::lanes)
            {
                using bytes        = std::uint8_t __attribute__((vector_size(simd::lanes)));
                bytes const narrow = __builtin_convertvector(choose(p, i, multiplier, rung_index{}), bytes);
                std::memcpy(rung + p * piece + i, &narrow, sizeof narrow);
            }
        });
    }

    struct byte_count
    {
        mdkv::rung_costs const& cost;
        std::int32_t operator()(std::size_t r) const { return static_cast<std::int32_t>(cost.bytes[r]); }
    };
    struct rung_index
    {
        std::int32_t operator()(std::size_t r) const { return static_cast<std::int32_t>(r); }
    };

    /// What the rung of least loss + multiplier * bytes stands for, for a vector of tokens.
    template <class Value>
    [[gnu::always_inline]] simd::ints choose(index_t p, index_t i, float multiplier, Value const& value) const
    {
        simd::floats best =
            simd::load(row(p, 0) + i) + simd::broadcast(multiplier * static_cast<float>(cost_.bytes[0]));
        simd::ints outcome = simd::ints{} + value(0);
        MDKV_UNROLL for (std::size_t r = 1; r < R; ++r)
        {
            simd::floats const here =
                simd::load(row(p, r) + i) + simd::broadcast(multiplier * static_cast<float>(cost_.bytes[r]));
            simd::ints const cheaper = here < best;
            best                     = simd::smaller(here, best);
            outcome                  = cheaper ? simd::ints{} + value(r) : outcome;
        }
        return outcome;
    }

    float const* loss_;
    mdkv::rung_costs const& cost_;
    mdkv::cpu::executor_ref threads_;
    std::vector<index_t> sums_;
};

/// \param share  the limit is heads * tokens * 512 / share bytes, or 512 full tokens a head where it is 0
template <std::size_t R>
void allocate_against_bisection(benchmark::State& state)
{
    index_t const share     = state.range(0);
    auto const thread_count = static_cast<int>(state.range(1));
    index_t const limit     = share == 0 ? heads * 512 * 512 : heads * tokens * 512 / share;
    bench::huge_page_resource pages;
    std::pmr::vector<float> const loss = losses(R, &pages);
    mdkv::rung_costs const cost        = costs<R>();
    std::vector<std::uint8_t> ours(heads * tokens);
    std::vector<std::uint8_t> theirs(heads * tokens);
    mdkv::allocation report;
    mdkv::cpu::thread_pool pool{thread_count};
    mdkv::workspace scratch{mdkv::cpu::host_memory{&pages}};
    mdkv::cpu::backend const on{&scratch, pool};
    auto const call = [&] {
        mdkv::allocate(on, {mdkv::in(on, loss.data(), heads, R, tokens), mdkv::out(on, ours.data(), heads, tokens)},
            cost, mdkv::in(on, &limit, 1), {}, mdkv::out(on, &report, 1));
    };
    bisection<R> rival{loss, cost, pool};
    bench::measure_pair(state, call, [&] { rival.run(limit, theirs.data()); });

    double loss_of_rival = 0;
    index_t bytes        = 0;
    for (std::size_t t = 0; t < theirs.size(); ++t)
    {
        loss_of_rival += static_cast<double>(loss[(t / tokens * R + theirs[t]) * tokens + t % tokens]);
        bytes += cost.bytes[theirs[t]];
    }
    if (report.token_bytes > limit || bytes > limit) { state.SkipWithError("a limit was exceeded"); }
    state.counters["tokens"]        = static_cast<double>(heads * tokens);
    state.counters["loss_mb"]       = static_cast<double>(loss.size() * sizeof(float)) * 1e-6;
    state.counters["scratch_mb"]    = static_cast<double>(scratch.peak()) * 1e-6;
    state.counters["loss_ratio"]    = report.loss / loss_of_rival;
    state.counters["gap"]           = report.gap() / report.loss;
    state.counters["bytes_unspent"] = static_cast<double>(limit - report.token_bytes);
    state.counters["rival_unspent"] = static_cast<double>(limit - bytes);
}

void budgets(benchmark::internal::Benchmark* b)
{
    b->ArgNames({"share", "threads"})
        ->ArgsProduct({{0, 20, 10}, {1, 2}})
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
}

/// \param kv_size  the limit is so many full tokens a head
void if_better_against_always(benchmark::State& state)
{
    index_t const tokens_per_head = state.range(0);
    index_t const kv_size         = state.range(1);
    index_t const limit           = heads * kv_size * 512;
    bench::huge_page_resource pages;
    std::pmr::vector<float> const loss = losses(4, &pages, tokens_per_head, 0.9);
    mdkv::rung_costs const cost{mdkv::paper_ratios, {128, 128}, 2};
    std::vector<std::uint8_t> rung(static_cast<std::size_t>(heads * tokens_per_head));
    std::array<mdkv::allocation, 2> report;
    mdkv::cpu::thread_pool pool{static_cast<int>(state.range(2))};
    mdkv::workspace scratch{mdkv::cpu::host_memory{&pages}};
    mdkv::cpu::backend const on{&scratch, pool};
    auto const measured = [&](mdkv::projection_charge charge) {
        return [&, charge] {
            mdkv::allocate(on,
                {mdkv::in(on, loss.data(), heads, 4, tokens_per_head),
                    mdkv::out(on, rung.data(), heads, tokens_per_head)},
                cost, mdkv::in(on, &limit, 1), {.charge = charge},
                mdkv::out(on, &report[static_cast<std::size_t>(charge)], 1));
        };
    };
    bench::measure_pair(state, measured(mdkv::projection_charge::if_better), measured(mdkv::projection_charge::always));
    state.counters["loss_ratio"] = report[0].loss / report[1].loss;
}

void quotas_against_one_limit(benchmark::State& state)
{
    index_t const all_heads       = state.range(0);
    index_t const tokens_per_head = state.range(1);
    bench::huge_page_resource pages;
    std::pmr::vector<float> const loss = losses(4, &pages, tokens_per_head, 0, all_heads);
    mdkv::rung_costs const cost        = costs<4>();
    std::vector<index_t> const quotas(static_cast<std::size_t>(all_heads), tokens_per_head * 512 / 10);
    index_t const together = all_heads * quotas.front();
    std::vector<std::uint8_t> rung(static_cast<std::size_t>(all_heads * tokens_per_head));
    std::vector<mdkv::allocation> report(quotas.size());
    mdkv::cpu::thread_pool pool{static_cast<int>(state.range(2))};
    mdkv::workspace scratch{mdkv::cpu::host_memory{&pages}};
    mdkv::cpu::backend const on{&scratch, pool};
    auto const measured = [&](index_t const* limits, index_t n) {
        return [&, limits, n] {
            mdkv::allocate(on,
                {mdkv::in(on, loss.data(), all_heads, 4, tokens_per_head),
                    mdkv::out(on, rung.data(), all_heads, tokens_per_head)},
                cost, mdkv::in(on, limits, n), {}, mdkv::out(on, report.data(), n));
        };
    };
    auto const times = bench::measure_pair(state, measured(quotas.data(), all_heads), measured(&together, index_t{1}));
    double const tokens_of_all     = static_cast<double>(all_heads * tokens_per_head);
    state.counters["a_ns_a_token"] = times.a * 1e9 / tokens_of_all;
    state.counters["b_ns_a_token"] = times.b * 1e9 / tokens_of_all;
}

BENCHMARK(quotas_against_one_limit)
    ->ArgNames({"heads", "tokens", "threads"})
    ->ArgsProduct({{8}, {8192, 131072}, {1, 2}})
    ->ArgsProduct({{240}, {512}, {1, 2}})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

BENCHMARK(if_better_against_always)
    ->ArgNames({"tokens", "kv_size", "threads"})
    ->ArgsProduct({{8192, 32768}, {64, 128, 512, 1024}, {1, 2}})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

BENCHMARK_TEMPLATE(allocate_against_bisection, 4)->Apply(budgets);
BENCHMARK_TEMPLATE(allocate_against_bisection, 8)->Apply(budgets);

} // namespace

BENCHMARK_MAIN();
