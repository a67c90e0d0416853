// Compression of one layer of 8K and 32K tokens to a tenth beside a first version of it (performance.md, G5): everything
// materialised, cuBLAS, cuSOLVER, and a bisection that waits for the device. The first version does not pack, and the
// time of that is not counted against it.
#include "bench.cuh"

#include <cstdio>

#ifdef MDKV_BENCH_CUBLAS

#    include <mdkv/stages/allocate.hpp>
#    include <mdkv/gpu/backend.cuh>
#    include <mdkv/gpu/basis.cuh>
#    include <mdkv/gpu/score.cuh>

#    include <mdkv/core/cache.hpp>
#    include <mdkv/compress.hpp>
#    include <mdkv/core/budget.hpp>
#    include <mdkv/gpu/cache.cuh>
#    include <mdkv/presets.hpp>

#    include <vector>

#    include "layers.cuh"
#    include "naive.cuh"
#    include "stopwatch.cuh"

namespace
{

using namespace bench;

constexpr auto const& paper = mdkv::presets::paper;

void measure_at(index_t tokens, stopwatch const& clock, record& results)
{
    source_layer const layer{tokens, 1};
    mdkv::layer_shape const shape = layer.shape();
    mdkv::budget const tenth      = mdkv::budget::fraction(1, 10);
    index_t const bytes           = tenth.in_bytes(shape);

    device_array<mdkv::allocation> const report{1};
    gpu::cache<element> cache{mdkv::cache_layout{paper.ratios, heads, window, dims}, bytes, 0, stream(), memory()};
    auto options          = paper.options<gpu::backend>(tenth);
    options.on_non_finite = mdkv::non_finite::unchecked;
    mdkv::compressed_layer<element, mdkv::space::device> destination{cache.view(), report.data()};
    work const ours = recorded(1,
        [&](gpu::backend const& on, index_t) { mdkv::compress(on, layer.view(), paper.ratios, options, destination); });

    materialised first{layer, bytes - shape.window_bytes()};
    bisected found;
    work const naive{[&] { found = first.run(); }};
    auto const times = clock.medians({ours, naive});

    mdkv::allocation const chosen = first_of(report);
    fields const about{{"tokens", static_cast<double>(tokens)}};
    results.add({"compress/paper", about, times[0], 0,
        {{"naive_over_this", times[1] / times[0]},
            {"bytes_over_naive", static_cast<double>(chosen.token_bytes) / static_cast<double>(found.bytes)},
            {"multiplier_over_naive", chosen.multiplier / found.multiplier}}});
    results.add({"compress/naive", about, times[1], 0, {}});
}

void measure(record& results)
{
    stopwatch const clock;
    for (index_t const tokens : {8 * 1024, 32 * 1024}) { measure_at(tokens, clock, results); }
}

} // namespace

#else

namespace
{

void measure(bench::record&)
{
    std::printf("left out: built without cuBLAS and cuSOLVER, which the first version needs\n");
}

} // namespace

#endif

int main(int count, char** arguments)
{
    return bench::run(count, arguments, measure);
}
