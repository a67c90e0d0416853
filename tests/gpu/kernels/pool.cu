#include <mdkv/gpu/pool.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(pool_neighbours);
template __global__ void entry(pool_fading_ends);
template __global__ void entry(pool_fading);

} // namespace mdkv::gpu::kernels
