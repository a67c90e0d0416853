#include <mdkv/gpu/pool.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(__grid_constant__ pool_neighbours const);
template __global__ void entry(__grid_constant__ pool_fading_ends const);
template __global__ void entry(__grid_constant__ pool_fading const);

} // namespace mdkv::gpu::kernels
