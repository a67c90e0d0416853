/// \file ranks.cpp: allocate over ranks: what is exchanged, and what it costs beside one rank; what a preset's whole prompt exchanges
///
/// Ranks are threads of this process that exchange at a barrier, each with its share of the heads. Arguments: ranks, layers, heads of a
/// layer, tokens of a head, charge (0: rungs in no basis; 1: the paper's set, projections). Counters: a_ms = one rank with all
/// heads, b_ms = ranks (they share this machine's cores; threads and scratch are made in that time), `exchanges`, `bytes` = what each rank gives to sums,
/// `network_us` = 10 us for each exchange and 2 (ranks - 1) / ranks of the bytes at 100 Gb/s, as a ring all-reduce moves them.
///
/// `all_of_a_preset` makes the calls that a prompt over ranks exchanges in, once: arguments are ranks, layers, heads, tokens, preset (0:
/// best, 1: any_question).
///
///   bench_ranks [--benchmark_format=json]

#include <benchmark/benchmark.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/ranks.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/replay/balance.hpp>
#include <mdkv/replay/leverage.hpp>
#include <mdkv/stages/allocate.hpp>

#include "bench.hpp"
#include "support/host.hpp"
#include "support/ranks.hpp"

namespace
{

using mdkv::index_t;

std::vector<float> losses(index_t rows, index_t rungs, index_t tokens)
{
    std::mt19937_64 random{20603};
    std::normal_distribution<double> size{0.0, 2.0};
    std::vector<float> loss(static_cast<std::size_t>(rows * rungs * tokens));
    for (index_t h = 0; h < rows; ++h)
    {
        for (index_t i = 0; i < tokens; ++i)
        {
            double x = std::exp(size(random));
            for (index_t r = 0; r < rungs; ++r, x /= 3)
            {
                loss[static_cast<std::size_t>((h * rungs + r) * tokens + i)] =
                    r + 1 == rungs ? 0 : static_cast<float>(x);
            }
        }
    }
    return loss;
}

/// One rank's call with scratch of its own.
class caller
{
public:
    caller(std::vector<float> const& loss, mdkv::rung_costs const& costs, index_t heads, index_t tokens, index_t limit,
        mdkv::allocate_options options)
        : loss_{loss}
        , costs_{costs}
        , heads_{heads}
        , tokens_{tokens}
        , limit_{limit}
        , options_{options}
        , rung_(static_cast<std::size_t>(heads * tokens))
    {}
    void operator()()
    {
        mdkv::cpu::backend const on{&scratch_};
        mdkv::allocate(on,
            {mdkv::in(on, loss_.data(), heads_, static_cast<index_t>(costs_.size()), tokens_),
                mdkv::out(on, rung_.data(), heads_, tokens_)},
            costs_, mdkv::in(on, &limit_, 1), options_, mdkv::out(on, &report_, 1));
    }

private:
    std::vector<float> const& loss_;
    mdkv::rung_costs costs_;
    index_t heads_, tokens_, limit_;
    mdkv::allocate_options options_;
    std::vector<std::uint8_t> rung_;
    mdkv::allocation report_;
    mdkv::workspace scratch_{mdkv::cpu::host_memory{}};
};

void count_exchanges(benchmark::State& state, int ranks, index_t exchanges, index_t bytes)
{
    state.counters["exchanges"] = static_cast<double>(exchanges);
    state.counters["bytes"]     = static_cast<double>(bytes);
    state.counters["network_us"] =
        10 * static_cast<double>(exchanges) + 2.0 * (ranks - 1) / ranks * static_cast<double>(bytes) / 12.5e3;
}

void over_ranks(benchmark::State& state)
{
    auto const ranks     = static_cast<int>(state.range(0));
    index_t const layers = state.range(1), heads = state.range(2), tokens = state.range(3);
    mdkv::rung_costs costs{mdkv::paper_ratios, {128, 128}, 2};
    if (state.range(4) == 0) { costs.projection = {}; }
    auto const rungs    = static_cast<index_t>(costs.size());
    index_t const limit = layers * heads * tokens * costs.bytes[costs.size() - 1] / 10;
    auto const all      = losses(layers * heads, rungs, tokens);
    caller one{all, costs, layers * heads, tokens, limit, {}};

    support::rank_team team{ranks};
    std::vector<std::vector<float>> parts;
    for (int r = 0; r < ranks; ++r) // the same heads of each layer
    {
        index_t const first = heads * r / ranks, own = heads * (r + 1) / ranks - first;
        auto const row = static_cast<std::size_t>(rungs * tokens);
        parts.emplace_back();
        for (index_t l = 0; l < layers; ++l)
        {
            auto const begin =
                all.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(l * heads + first) * row);
            parts.back().insert(
                parts.back().end(), begin, begin + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(own) * row));
        }
    }
    auto const many = [&] {
        auto const errors = support::on_ranks(team, [&](support::thread_rank const& transport) {
            index_t const r     = transport.number;
            index_t const first = heads * r / ranks, own = heads * (r + 1) / ranks - first;
            mdkv::ranks const shared = transport.with(first, heads);
            caller part{parts[static_cast<std::size_t>(r)], costs, layers * own, tokens, limit,
                {.ranks = &shared, .layers = layers}};
            part();
        });
        for (std::string const& error : errors)
        {
            if (!error.empty()) { std::abort(); }
        }
    };
    many();
    count_exchanges(state, ranks, team.calls(), team.bytes());
    bench::measure_pair(
        state, [&one] { one(); }, many);
}
BENCHMARK(over_ranks)
    ->ArgNames({"ranks", "layers", "heads", "tokens", "charge"})
    ->Args({2, 1, 8, 131072, 0})
    ->Args({4, 1, 8, 131072, 0})
    ->Args({2, 1, 8, 131072, 1})
    ->Args({4, 1, 8, 131072, 1})
    ->Args({4, 32, 8, 8192, 0})
    ->Args({4, 32, 8, 8192, 1})
    ->UseManualTime()
    ->Iterations(5)
    ->Unit(benchmark::kMillisecond);

void all_of_a_preset(benchmark::State& state)
{
    auto const ranks     = static_cast<int>(state.range(0));
    index_t const layers = state.range(1), heads = state.range(2);
    mdkv::preset const& preset = state.range(4) == 0 ? mdkv::presets::best : mdkv::presets::any_question;
    index_t const tokens       = state.range(3) - preset.window;
    mdkv::rung_costs const costs{preset.ratios, {128, 128}, 2};
    auto const rungs = static_cast<index_t>(costs.size());

    support::rank_team team{ranks};
    auto const body = [&](support::thread_rank const& transport) {
        index_t const r     = transport.number;
        index_t const first = heads * r / ranks, own = heads * (r + 1) / ranks - first;
        mdkv::ranks const all = transport.with(first, heads);
        auto replayed         = losses(layers * own, rungs, tokens);
        auto const last       = losses(own, rungs, tokens);
        index_t const to      = layers * heads * tokens * costs.bytes[costs.size() - 1] / 10;
        std::vector<mdkv::leverage_sum> leverages(static_cast<std::size_t>(tokens), mdkv::leverage_sum{1} << 36U);
        std::vector<std::uint8_t> rung(static_cast<std::size_t>(layers * own * tokens));
        mdkv::allocation report;
        auto const whole = [&](mdkv::cpu::backend const& on) {
            for (index_t l = 0; preset.last_queries_score() && l < layers; ++l)
            {
                auto const layer = mdkv::out(on, replayed.data() + l * own * rungs * tokens, own, rungs, tokens);
                mdkv::join(on, mdkv::as_input(layer), mdkv::in(on, last.data(), own, rungs, tokens),
                    preset.replayed->join, layer, &all);
            }
            if (preset.leverage_power() > 0) { mdkv::detail::sum_over_ranks(on, &all, leverages.data(), tokens); }
            mdkv::balance(on, mdkv::out(on, replayed.data(), layers, own, rungs, tokens),
                preset.balance<mdkv::cpu::backend>(mdkv::in(on, leverages.data(), tokens), &all));
            mdkv::allocate(on,
                {mdkv::in(on, replayed.data(), layers * own, rungs, tokens),
                    mdkv::out(on, rung.data(), layers * own, tokens)},
                costs, mdkv::in(on, &to, 1), {.charge = preset.charge, .ranks = &all, .layers = layers},
                mdkv::out(on, &report, 1));
        };
        mdkv::workspace scratch{mdkv::cpu::host_memory{}};
        whole({&scratch});
    };
    for (auto _ : state)
    {
        for (std::string const& error : support::on_ranks(team, body))
        {
            if (!error.empty()) { state.SkipWithError(error.c_str()); }
        }
    }
    index_t const agreements = 1 + (preset.last_queries_score() ? layers : 0); // of 67 numbers
    count_exchanges(state, ranks, team.calls() + agreements, team.bytes() + agreements * 8 * 67);
}
BENCHMARK(all_of_a_preset)
    ->ArgNames({"ranks", "layers", "heads", "tokens", "preset"})
    ->Args({4, 32, 8, 131072, 0})
    ->Args({4, 32, 8, 131072, 1})
    ->Iterations(1)
    ->Unit(benchmark::kMillisecond);

} // namespace

BENCHMARK_MAIN();
