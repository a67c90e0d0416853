/// \file prefill.cpp: the runner's prefill and decode beside bare Eigen products of the same shapes, and its two product paths
///
/// a is the runner, b the bare products for the same tokens on the same threads: `b_over_a` is the share of the
/// runner's time that they take. The bare side has its weights as floats already and does nothing but the products: no
/// attention, no norms, no dequantisation.
///
///   MDKV_REFERENCE_MODEL=model.gguf bench_prefill [--benchmark_format=json]

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include "bench.hpp"
#include "runner/eigen.hpp"
#include "runner/gguf.hpp"
#include "runner/model.hpp"

namespace
{

/// Times the runner and the bare products by turns and reports the medians.
bench::pair_times compare(
    benchmark::State& state, std::int64_t tokens, double bare_flop, auto const& runner, auto const& bare)
{
    bench::pair_times const medians = bench::measure_pair(state, runner, bare);
    state.counters["tokens_per_s"]  = static_cast<double>(tokens) / medians.a;
    state.counters["bare_gflop_s"]  = bare_flop / medians.b * 1e-9;
    return medians;
}

/// Products with float weights: rows are shared out among the threads in large pieces.
class bare_products
{
public:
    explicit bare_products(runner::language_model const& model, mdkv::cpu::executor_ref executor)
        : executor_{executor}
    {
        runner::layer_weights const& w = model.layer(0);
        for (auto const* matrix : {&w.query, &w.key, &w.value, &w.attention_output, &w.gate, &w.up, &w.down})
        {
            add(*matrix, model.shape().layers);
        }
        add(model.output(), 0);
    }

    /// All products of `tokens` tokens through the layers, 512 at a time, and the logits of `logits` of them.
    void run(std::int64_t tokens, std::int64_t logits)
    {
        for (std::int64_t first = 0; first < tokens; first += 512)
        {
            for (shape& s : shapes_)
            {
                for (std::int64_t i = 0; i < s.times; ++i) { multiply(s, std::min<std::int64_t>(512, tokens - first)); }
            }
        }
        multiply(shapes_.back(), logits);
    }

    [[nodiscard]] double flop(std::int64_t tokens, std::int64_t logits) const
    {
        double sum = 0;
        for (shape const& s : shapes_)
        {
            auto const products = static_cast<double>(s.times * tokens + (s.times == 0 ? logits : 0));
            sum += 2.0 * products * static_cast<double>(s.weights.size());
        }
        return sum;
    }

private:
    struct shape
    {
        runner::float_matrix weights; // [rows, columns]
        runner::float_matrix inputs;  // [512, columns]
        runner::float_matrix outputs; // [512, rows]
        std::int64_t times;
    };

    void add(runner::weight_matrix const& matrix, std::int64_t times)
    {
        shape s{runner::float_matrix(matrix.rows(), matrix.columns()), runner::float_matrix(512, matrix.columns()),
            runner::float_matrix(512, matrix.rows()), times};
        matrix.dequantise_rows(0, matrix.rows(), s.weights.data());
        s.inputs.setRandom();
        shapes_.push_back(std::move(s));
    }

    void multiply(shape& s, std::int64_t tokens) const
    {
        constexpr std::int64_t pieces = 4;
        std::int64_t const rows       = s.weights.rows();
        executor_.parallel_for(pieces, [&](std::int64_t piece) {
            std::int64_t const begin = rows * piece / pieces;
            std::int64_t const count = rows * (piece + 1) / pieces - begin;
            s.outputs.block(0, begin, tokens, count).noalias() =
                s.inputs.topRows(tokens) * s.weights.middleRows(begin, count).transpose();
        });
        benchmark::DoNotOptimize(s.outputs.data());
    }

    mdkv::cpu::executor_ref executor_;
    std::vector<shape> shapes_;
};

struct bench_context
{
    runner::language_model model;
    mdkv::cpu::thread_pool pool{static_cast<int>(std::max(1U, std::thread::hardware_concurrency()))};
    bare_products bare{model, pool};

    [[nodiscard]] std::vector<std::int32_t> prompt(std::int64_t tokens) const
    {
        std::vector<std::int32_t> ids;
        for (std::int64_t i = 0; i < tokens; ++i)
        {
            ids.push_back(static_cast<std::int32_t>(i * 7919 % model.shape().vocabulary));
        }
        return ids;
    }
};

template <mdkv::element T>
std::vector<float> run_prefill(bench_context& context, std::span<std::int32_t const> ids, auto const& on_layer)
{
    return runner::prefill<T>(
        context.model, ids, 32, context.pool, on_layer, [](std::int64_t, std::int64_t) { return true; });
}

void prefill(benchmark::State& state, bench_context& context)
{
    std::int64_t const tokens = state.range(0);
    auto const ids            = context.prompt(tokens);
    compare(
        state, tokens, context.bare.flop(tokens, 1),
        [&] {
            auto const logits = run_prefill<mdkv::half>(context, ids, [](runner::layer_kv<mdkv::half> const&) {});
            benchmark::DoNotOptimize(logits.data());
        },
        [&] { context.bare.run(tokens, 1); });
}

/// One step of `batch` sequences; the attention is left out on both sides, the library's bench_attend measures it.
void decode(benchmark::State& state, bench_context& context)
{
    std::int64_t const batch = state.range(0);
    auto const ids           = context.prompt(batch);
    std::vector<std::int64_t> const positions(static_cast<std::size_t>(batch), 100);
    std::vector<float> logits(static_cast<std::size_t>(batch * context.model.shape().vocabulary));
    runner::decode_workspace space;
    compare(
        state, batch, context.bare.flop(batch, batch),
        [&] {
            runner::decode_step(
                context.model, ids, positions, context.pool,
                [&](std::int64_t, std::int64_t, float const* query, float const*, float const*, float* out) {
                    runner::model_shape const& s = context.model.shape();
                    std::fill(out, out + s.query_heads * s.value_dim, query[0]);
                },
                logits, space);
            benchmark::DoNotOptimize(logits.data());
        },
        [&] { context.bare.run(batch, batch); });
}

/// One matrix alone: the panels of the file's blocks against one bare product with float weights, on one thread.
void one_product(benchmark::State& state, bench_context& context)
{
    runner::weight_matrix const& weights = context.model.layer(0).gate;
    std::int64_t const tokens            = state.range(0);
    runner::float_matrix floats(weights.rows(), weights.columns());
    weights.dequantise_rows(0, weights.rows(), floats.data());
    runner::float_matrix const x = runner::float_matrix::Random(tokens, weights.columns());
    runner::float_matrix out(tokens, weights.rows());
    double const flop               = 2.0 * static_cast<double>(tokens) * static_cast<double>(floats.size());
    bench::pair_times const medians = compare(
        state, tokens, flop,
        [&] {
            runner::multiply({}, weights, x.data(), tokens, out.data());
            benchmark::DoNotOptimize(out.data());
        },
        [&] {
            out.noalias() = x * floats.transpose();
            benchmark::DoNotOptimize(out.data());
        });
    state.counters["runner_gflop_s"]    = flop / medians.a * 1e-9;
    state.counters["file_gbytes_per_s"] = static_cast<double>(weights.rows() * weights.row_bytes()) / medians.a * 1e-9;
    state.counters["gweights_per_s"]    = static_cast<double>(floats.size()) / medians.a * 1e-9;
}

} // namespace

int main(int count, char** arguments)
{
    try
    {
        benchmark::Initialize(&count, arguments);
        char const* const path = std::getenv("MDKV_REFERENCE_MODEL");
        if (path == nullptr || benchmark::ReportUnrecognizedArguments(count, arguments))
        {
            std::fputs("usage: MDKV_REFERENCE_MODEL=model.gguf bench_prefill [--benchmark_...]\n", stderr);
            return 2;
        }
        bench_context context{runner::language_model::load(runner::gguf_file::open(path))};
        auto const add = [&](char const* name, auto function, std::vector<std::int64_t> const& sizes) {
            auto* const bench = benchmark::RegisterBenchmark(
                name, [&context, function](benchmark::State& state) { function(state, context); });
            for (std::int64_t const size : sizes) { bench->Arg(size); }
            bench->UseManualTime()->Unit(benchmark::kMillisecond);
        };
        add("prefill/tokens", prefill, {512, 2048, 8192});
        add("decode/batch", decode, {1, 13});
        add("product/tokens", one_product, {1, 4, 13, 16, 17, 32, 64, 512});
        benchmark::RunSpecifiedBenchmarks();
        return 0;
    }
    catch (std::exception const& error)
    {
        std::fprintf(stderr, "bench_prefill: %s\n", error.what());
        return 1;
    }
}
