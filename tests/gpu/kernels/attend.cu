#include <mdkv/gpu/attend.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(attend_slice<float, float>);
template __global__ void entry(attend_slice<half, half>);
template __global__ void entry(attend_slice<half, float>);
template __global__ void entry(attend_slice<bfloat16, bfloat16>);
template __global__ void entry(attend_merge<float, float>);
template __global__ void entry(attend_merge<half, half>);
template __global__ void entry(attend_merge<half, float>);
template __global__ void entry(attend_merge<bfloat16, bfloat16>);

} // namespace mdkv::gpu::kernels
