#include <mdkv/gpu/allocate.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(allocate_menu);
template __global__ void entry(allocate_begin);
template __global__ void entry(allocate_passes);

} // namespace mdkv::gpu::kernels
