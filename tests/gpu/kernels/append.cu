#include <mdkv/gpu/append.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(append_token<float, float>);
template __global__ void entry(append_token<half, half>);
template __global__ void entry(append_token<half, float>);
template __global__ void entry(append_token<bfloat16, bfloat16>);
template __global__ void entry(append_token<bfloat16, float>);

} // namespace mdkv::gpu::kernels
