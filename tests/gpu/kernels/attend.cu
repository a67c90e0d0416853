#include <mdkv/gpu/attend.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(__grid_constant__ attend_slice<float, float> const);
template __global__ void entry(__grid_constant__ attend_slice<half, half> const);
template __global__ void entry(__grid_constant__ attend_slice<half, float> const);
template __global__ void entry(__grid_constant__ attend_slice<bfloat16, bfloat16> const);
template __global__ void entry(__grid_constant__ attend_merge<float, float> const);
template __global__ void entry(__grid_constant__ attend_merge<half, half> const);
template __global__ void entry(__grid_constant__ attend_merge<half, float> const);
template __global__ void entry(__grid_constant__ attend_merge<bfloat16, bfloat16> const);

} // namespace mdkv::gpu::kernels
