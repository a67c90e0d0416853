#include <mdkv/gpu/cache.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(clear_directory);
template __global__ void entry(move_tail<float>);
template __global__ void entry(move_tail<half>);
template __global__ void entry(move_tail<bfloat16>);

} // namespace mdkv::gpu::kernels
