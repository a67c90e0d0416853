#include <mdkv/gpu/append.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(__grid_constant__ append_token<float, float> const);
template __global__ void entry(__grid_constant__ append_token<half, half> const);
template __global__ void entry(__grid_constant__ append_token<half, float> const);
template __global__ void entry(__grid_constant__ append_token<bfloat16, bfloat16> const);
template __global__ void entry(__grid_constant__ append_token<bfloat16, float> const);

} // namespace mdkv::gpu::kernels
