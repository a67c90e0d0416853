// What this GPU can do at best: the yardsticks of the other benchmarks.
#include <mdkv/gpu/backend.cuh>

#include "bench.cuh"
#include "stopwatch.cuh"

namespace
{

struct nothing
{
    static constexpr char const* name = "nothing";
    static constexpr int threads      = 32;

    __device__ void operator()() const {}
};

/// A graph of as many empty kernels, one after another; the time is one kernel's.
[[nodiscard]] bench::work empty_kernels(bench::index_t count)
{
    return bench::recorded(
        count, [](mdkv::gpu::backend const& on, bench::index_t) { mdkv::gpu::launch(on, nothing{}, 1); });
}

void measure(bench::record& results)
{
    bench::stopwatch const clock;
    auto const times =
        clock.medians({clock.copy(), clock.copy_by_kernel(), clock.read(), empty_kernels(1), empty_kernels(512)});
    auto const size = static_cast<double>(clock.size());
    results.add({"copy/driver", {}, times[0], 2 * size, {}});
    results.add({"copy/kernel", {}, times[1], 2 * size, {{"of_copy", times[0] / times[1]}}});
    results.add({"read", {}, times[2], size, {{"of_copy", times[0] / times[2] / 2}}});
    results.add({"empty_kernel", {{"in_a_row", 1}}, times[3], 0, {}});
    results.add({"empty_kernel", {{"in_a_row", 512}}, times[4], 0, {}});
}

} // namespace

int main(int count, char** arguments)
{
    return bench::run(count, arguments, measure);
}
