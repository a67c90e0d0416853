#include <mdkv/gpu/project.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(__grid_constant__ multiply_rows<float, float> const);
template __global__ void entry(__grid_constant__ multiply_rows<float, half> const);
template __global__ void entry(__grid_constant__ multiply_rows<float, bfloat16> const);
template __global__ void entry(__grid_constant__ multiply_rows<half, float> const);
template __global__ void entry(__grid_constant__ multiply_rows<half, half> const);
template __global__ void entry(__grid_constant__ multiply_rows<half, bfloat16> const);
template __global__ void entry(__grid_constant__ multiply_rows<bfloat16, float> const);
template __global__ void entry(__grid_constant__ multiply_rows<bfloat16, half> const);
template __global__ void entry(__grid_constant__ multiply_rows<bfloat16, bfloat16> const);

} // namespace mdkv::gpu::kernels
