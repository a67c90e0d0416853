/// \file gpu_pipeline.cu: a layer compressed on the GPU, then decode steps over it, recorded into a graph once and replayed
#include <mdkv/append.hpp>
#include <mdkv/compress.hpp>
#include <mdkv/gpu/attend.cuh>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/cache.cuh>
#include <mdkv/gpu/memory.cuh>
#include <mdkv/gpu/score.cuh>
#include <mdkv/presets.hpp>

#include <cstddef>
#include <iostream>
#include <random>

#include <thrust/device_vector.h>
#include <thrust/host_vector.h>

using namespace mdkv;

namespace
{
constexpr index_t H = 8, G = 4, Q = 64, N = 4096, D = 128, steps = 16;

thrust::device_vector<mdkv::half> random_rows(index_t count, float mean)
{
    static std::mt19937 random{7};
    std::normal_distribution<float> normal{mean, 1.0F};
    thrust::host_vector<mdkv::half> rows(static_cast<std::size_t>(count * D));
    for (mdkv::half& x : rows) { x = narrow<mdkv::half>(normal(random)); }
    return rows;
}

template <class T>
T* raw(thrust::device_vector<T>& x)
{
    return thrust::raw_pointer_cast(x.data());
}
} // namespace

int main()
{
    if (int devices = 0; cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0)
    {
        std::cout << "SKIPPED: gpu_pipeline: no GPU answers\n";
        return 77;
    }
    auto q = random_rows(H * G * Q, 0.3F), k = random_rows(H * N, 0), v = random_rows(H * N, 0);
    auto new_query = random_rows(H * G, 0.3F), new_key = random_rows(H, 0), new_value = random_rows(H, 0);
    thrust::device_vector<mdkv::half> output(H * G * D);
    thrust::device_vector<float> lse(H * G);

    cudaStream_t stream = nullptr;
    gpu::expects_success(cudaStreamCreate(&stream), "cudaStreamCreate");
    gpu::pool_resource pool;
    workspace scratch{gpu::stream_memory<gpu::pool_resource>{stream, &pool}}; // grows to what its calls need
    gpu::backend const on{stream, &scratch};

    // The prompt's end: waits for the device, because the arena has the size of what was chosen.
    gpu::cache<mdkv::half> cache{cache_layout{}, 0, 0, stream, pool};
    prompt_rows<gpu::backend, mdkv::half> const rows{
        in(on, raw(q), H * G, Q, D), in(on, raw(k), H, N, D), in(on, raw(v), H, N, D)};
    compress_report const report = compress(on, rows, presets::by_window, budget::kv_size(512), cache);
    cache.reserve_tail(steps);

    // A decode step: allocates nothing and waits for nothing, once the first one has taken its scratch.
    auto const step = [&] {
        append(on, in(on, raw(new_key), H, D), in(on, raw(new_value), H, D), cache);
        attend(on, in(on, raw(new_query), H * G, D), cache, {}, out(on, raw(output), H * G, D),
            out(on, raw(lse), H * G));
    };
    step();
    cudaGraph_t graph      = nullptr;
    cudaGraphExec_t replay = nullptr;
    gpu::expects_success(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    step();
    gpu::expects_success(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    gpu::expects_success(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
    for (index_t i = 1; i < steps; ++i) { gpu::expects_success(cudaGraphLaunch(replay, stream), "cudaGraphLaunch"); }
    gpu::expects_success(cudaStreamSynchronize(stream), "cudaStreamSynchronize");

    index_t const appended = gpu::to_host(cache, stream).appended();
    std::cout << report.resident_bytes << " of " << report.full_bytes << " bytes; " << appended
              << " tokens appended; lse " << lse[0] << '\n';
    return report.resident_bytes <= report.budget_bytes && appended == steps ? 0 : 1;
}
