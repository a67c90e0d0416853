#include <mdkv/gpu/finite.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(first_not_finite<float>);
template __global__ void entry(first_not_finite<half>);
template __global__ void entry(first_not_finite<bfloat16>);
template __global__ void entry(least_of_blocks);

} // namespace mdkv::gpu::kernels
