#include <mdkv/gpu/project.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(multiply_rows<float, float>);
template __global__ void entry(multiply_rows<float, half>);
template __global__ void entry(multiply_rows<float, bfloat16>);
template __global__ void entry(multiply_rows<half, float>);
template __global__ void entry(multiply_rows<half, half>);
template __global__ void entry(multiply_rows<half, bfloat16>);
template __global__ void entry(multiply_rows<bfloat16, float>);
template __global__ void entry(multiply_rows<bfloat16, half>);
template __global__ void entry(multiply_rows<bfloat16, bfloat16>);

} // namespace mdkv::gpu::kernels
