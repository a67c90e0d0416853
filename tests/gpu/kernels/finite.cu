#include <mdkv/gpu/finite.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(__grid_constant__ first_not_finite<float> const);
template __global__ void entry(__grid_constant__ first_not_finite<half> const);
template __global__ void entry(__grid_constant__ first_not_finite<bfloat16> const);
template __global__ void entry(__grid_constant__ least_of_blocks const);

} // namespace mdkv::gpu::kernels
