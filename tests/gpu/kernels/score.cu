#include <mdkv/gpu/score.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(__grid_constant__ score_queries<float> const);
template __global__ void entry(__grid_constant__ score_queries<half> const);
template __global__ void entry(__grid_constant__ score_queries<bfloat16> const);
template __global__ void entry(__grid_constant__ score_bases const);
template __global__ void entry(__grid_constant__ score_query_latents const);
template __global__ void entry(__grid_constant__ score_sums<float, true> const);
template __global__ void entry(__grid_constant__ score_sums<half, true> const);
template __global__ void entry(__grid_constant__ score_sums<bfloat16, true> const);
template __global__ void entry(__grid_constant__ score_sums<float, false> const);
template __global__ void entry(__grid_constant__ score_sums<half, false> const);
template __global__ void entry(__grid_constant__ score_sums<bfloat16, false> const);
template __global__ void entry(__grid_constant__ score_join const);
template __global__ void entry(__grid_constant__ score_losses<float, true> const);
template __global__ void entry(__grid_constant__ score_losses<half, true> const);
template __global__ void entry(__grid_constant__ score_losses<bfloat16, true> const);
template __global__ void entry(__grid_constant__ score_losses<float, false> const);
template __global__ void entry(__grid_constant__ score_losses<half, false> const);
template __global__ void entry(__grid_constant__ score_losses<bfloat16, false> const);

} // namespace mdkv::gpu::kernels
