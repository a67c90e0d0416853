/// \file gpu_pipeline.cu: a layer compressed and attended on the GPU, recorded into a graph once and replayed
#include <mdkv/compress.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/gpu/attend.cuh>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/basis.cuh>
#include <mdkv/gpu/cache.cuh>
#include <mdkv/gpu/memory.cuh>
#include <mdkv/gpu/score.cuh>
#include <mdkv/presets.hpp>
#include <mdkv/stages/allocate.hpp>

#include <cstddef>
#include <iostream>
#include <random>
#include <span>
#include <vector>

#include <thrust/device_vector.h>
#include <thrust/host_vector.h>

using namespace mdkv;

namespace
{
constexpr index_t H = 8, G = 4, W = 32, N = 4096, D = 128;

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
    auto q = random_rows(H * G * W, 0.3F), k = random_rows(H * (N + W), 0), v = random_rows(H * (N + W), 0);
    auto new_query = random_rows(H * G, 0.3F);
    thrust::device_vector<mdkv::half> output(H * G * D);
    thrust::device_vector<float> lse(H * G);
    thrust::device_vector<allocation> chosen(1);

    cudaStream_t stream = nullptr;
    gpu::check(cudaStreamCreate(&stream), "cudaStreamCreate");
    layer_shape const shape{H, G, N, W, {D, D}, sizeof(mdkv::half)};
    compress_options<gpu::backend> options = presets::paper.options<gpu::backend>(budget::kv_size(512));
    options.on_non_finite                  = non_finite::unchecked;
    options.allocation.charge              = projection_charge::always;
    gpu::pool_resource pool;
    index_t const bytes = options.limit.in_bytes(shape);
    gpu::cache<mdkv::half> cache{cache_layout{paper_ratios, H, W, shape.dims}, bytes, 64, stream, pool};

    // The whole work of a prompt's end and one decoded token; a dry run says how much scratch it takes.
    auto const work = [&](gpu::backend const& on) {
        auto const queries = in(on, raw(q), H * G, W, D);
        auto const layer   = split_window(on, queries, in(on, raw(k), H, N + W, D), in(on, raw(v), H, N + W, D), W);
        compressed_layer<mdkv::half, space::device> to{cache.view(), raw(chosen)};
        static_cast<void>(compress(on, layer, paper_ratios, options, to));
        attend(on, in(on, raw(new_query), H * G, D), cache.view(), {}, out(on, raw(output), H * G, D),
            out(on, raw(lse), H * G));
    };
    workspace counting;
    work(gpu::backend{stream, &counting});
    thrust::device_vector<std::byte> memory(counting.bytes());
    workspace scratch{std::span{raw(memory), memory.size()}};

    cudaGraph_t graph      = nullptr;
    cudaGraphExec_t replay = nullptr;
    gpu::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    work(gpu::backend{stream, &scratch}); // allocates nothing and waits for nothing
    gpu::check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    gpu::check(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
    gpu::check(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
    gpu::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");

    allocation const report = chosen[0];
    for (std::size_t r = 0; r < paper_ratios.size(); ++r)
    {
        std::cout << report.tokens[r] << " tokens at rung " << r << '\n';
    }
    std::cout << report.token_bytes + report.charged_bytes << " bytes of " << report.limit << "; lse " << lse[0]
              << '\n';
    return report.status == allocation_status::optimal ? 0 : 1;
}
