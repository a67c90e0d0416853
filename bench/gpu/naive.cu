// Compression of one layer of 8K and 32K tokens to a tenth beside a first version of it: everything
// materialised, cuBLAS, cuSOLVER, and a bisection that waits for the device. The first version does not pack, and the
// time of that is not counted against it.
#include "bench.cuh"

#include <cstdio>

#ifdef MDKV_BENCH_CUBLAS

#    include "layers.cuh"
#    include "naive.cuh"
#    include "stages.cuh"
#    include "stopwatch.cuh"

namespace
{

using namespace bench;

void measure_at(index_t tokens, stopwatch const& clock, record& results)
{
    layer x{tokens, 1};
    work const ours = recorded(1, [&](gpu::backend const& on, index_t) { compress(on, x); });

    materialised first{x.from, x.spendable};
    bisected found;
    work const naive{[&] { found = first.run(); }};
    auto const times = clock.medians({ours, naive});

    mdkv::allocation const chosen = first_of(x.report);
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
