#include <mdkv/gpu/cache.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(__grid_constant__ clear_directory const);
template __global__ void entry(__grid_constant__ move_tail<float> const);
template __global__ void entry(__grid_constant__ move_tail<half> const);
template __global__ void entry(__grid_constant__ move_tail<bfloat16> const);

} // namespace mdkv::gpu::kernels
