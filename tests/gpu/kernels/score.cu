#include <mdkv/gpu/score.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(score_queries<float>);
template __global__ void entry(score_queries<half>);
template __global__ void entry(score_queries<bfloat16>);
template __global__ void entry(score_bases);
template __global__ void entry(score_query_latents);
template __global__ void entry(score_sums<float, true>);
template __global__ void entry(score_sums<half, true>);
template __global__ void entry(score_sums<bfloat16, true>);
template __global__ void entry(score_sums<float, false>);
template __global__ void entry(score_sums<half, false>);
template __global__ void entry(score_sums<bfloat16, false>);
template __global__ void entry(score_join);
template __global__ void entry(score_losses<float, true>);
template __global__ void entry(score_losses<half, true>);
template __global__ void entry(score_losses<bfloat16, true>);
template __global__ void entry(score_losses<float, false>);
template __global__ void entry(score_losses<half, false>);
template __global__ void entry(score_losses<bfloat16, false>);

} // namespace mdkv::gpu::kernels
