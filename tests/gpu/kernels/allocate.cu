#include <mdkv/gpu/allocate.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(__grid_constant__ allocate_menu const);
template __global__ void entry(__grid_constant__ allocate_begin const);
template __global__ void entry(__grid_constant__ allocate_passes const);

} // namespace mdkv::gpu::kernels
